"""Predicts the time and the memory of a published system's step with the planner's cost model. Schedules: Narayanan
et al. 2021, section 2.2; Qi et al. 2024, section 5. Model states: Rajbhandari et al. 2020, section 3.1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from benchmarks.planner_accuracy import published
from benchmarks.planner_accuracy.published import RULES, Module, Setup, System
from pangu.config.cluster import ClusterConfig
from pangu.config.model import ModelConfig
from pangu.planning.cost import Phase, collective_seconds, phase_seconds
from pangu.schedule.groups import Group, groups_of
from pangu.schedule.in_flight import states_in_flight
from pangu.schedule.orders import SCHEDULES
from pangu.schedule.spans import Axis, Collective, Work
from pangu.topology.experts import ExpertLayout


class Step(NamedTuple):
    """Training step of a system, independent of the speed of its devices."""

    modules: tuple[Module, ...]
    """Embedding, layer and head."""
    counts: Any
    """[stages, modules]: how many of each module a stage has."""
    message: Collective
    """Message to the next stage."""
    ends: set[tuple[Work, Work, Work]]
    """Different work of the stages after the micro-batches: gradients sent beside the last backward pass, the update,
    and parameters sent beside the next forward pass."""
    states: Any
    """[stages]: bytes of parameters, gradients and optimizer states."""
    activations: Any
    """[stages]: peak bytes of saved activations and messages."""


@lru_cache(maxsize=10_000)
def describe(setup: Setup) -> Step:
    """Return the step of a system."""
    model, system, plan = setup[:3]
    kinds = {kind: layer for layer, kind in enumerate(_kinds(model))}  # a layer of each kind
    layers = tuple(published.layer_work(setup, layer) for layer in kinds.values())
    modules = published.embedding_work(setup), *layers, published.head_work(setup)
    chunks = _chunks(setup)
    counts = chunks.sum(0)
    owned = np.hstack([counts[:, :-1], counts[:, -1:] > 0])  # multi-token prediction shares the head
    # Tensor-parallel ranks send one part each: Narayanan et al. 2021, section 4.1.
    sent = 2 * plan.micro_size * model.sequence / plan.context * model.hidden / plan.tensor
    kept = [module.saved_bytes for module in modules]
    # While a layer is recomputed it keeps everything, and the head nothing: Narayanan et al. 2021, section 3.5.
    whole = max(published.kept_bytes(setup, "none", layer) for layer in kinds.values())
    working = 0.0, whole if plan.recompute == "full" else 0.0
    saved = (chunks @ np.transpose([kept, [*kept[:-1], 0.0]])).swapaxes(0, 1)
    most = min(plan.micro_batches, 4 * plan.pipeline)  # more change nothing
    held = in_flight(plan.pipeline, plan.virtual_stages, most, system.doubled or plan.schedule == "zb-2p")
    activations = np.array([(moments @ one + working).max() for moments, one in zip(held, saved, strict=True)])
    shared = modules[-1].parameters if model.tied_head else 0
    parameters = owned @ [module.parameters for module in modules] - (shared if plan.pipeline == 1 else 0)
    experts = owned @ [module.experts for module in modules]
    groups = {"": (parameters, plan.layout.shards)}
    groups |= {"expert_": (experts, ExpertLayout(plan.layout).shards)} if experts.any() else {}
    updated, states = np.zeros((2, plan.pipeline))
    for held, shards in groups.values():
        summed = shards if plan.zero >= 2 else 1
        updated += held * (RULES.update_bytes / shards + (system.gradient_bytes + 4) / summed)
        gradients = system.gradient_bytes / (shards if setup.reduces_each else 1) + system.spare_bytes
        states += held * (2 / (shards if plan.zero == 3 else 1) + gradients + RULES.optimizer_bytes / shards)
    ends = set()
    for stage, number in enumerate(counts[:, 1:-1].sum(1).tolist()):
        pairs = [_reductions(float(held[stage]), setup, prefix) for prefix, (held, _) in groups.items()]
        reductions, gathers = (sum(works, ()) for works in zip(*pairs, strict=True))
        if shared and stage in (0, plan.pipeline - 1):
            reductions += (Collective("all_reduce", "ends", shared * system.gradient_bytes),)
        update = Work((), float(updated[stage]), RULES.update_launches * number)
        ends.add((Work(collectives=reductions), update, Work(collectives=gathers)))
    activations += RULES.message_buffers * sent if plan.pipeline > 1 else 0
    return Step(modules, counts, Collective("send", "pipeline", sent), ends, states, activations)


def _kinds(model: ModelConfig) -> list[tuple[bool, bool]]:
    """Return whether each layer has experts, and whether it is one of multi-token prediction."""
    return [(model.has_experts(layer), layer >= model.layers) for layer in range(model.num_blocks)]


def _chunks(setup: Setup) -> Any:
    """Return how many of each module a chunk has: embedding, layers of each kind, head; multi-token prediction comes
    last and uses the head once more for each layer."""
    model, plan, last = setup.model, setup.plan, len(setup.plan.layers) - 1
    kinds, ends = _kinds(model), [0, *accumulate(plan.layers)]
    ends[-1] += model.mtp_layers
    counts = [[kinds[slice(*span)].count(kind) for kind in dict.fromkeys(kinds)] for span in pairwise(ends)]
    rows = [(chunk == 0, *own, (chunk == last) * (1 + model.mtp_layers)) for chunk, own in enumerate(counts)]
    return np.array(rows, float).reshape(plan.virtual_stages, plan.pipeline, -1)


@lru_cache(maxsize=1000)
def in_flight(stages: int, virtual_stages: int, micro_batches: int, is_doubled: bool) -> list[Any]:
    """Return, for each stage, an array [moments, chunks] of the micro-batches whose activations it holds."""
    # Stages that hold twice as much are every other one of twice as many stages. ZB-1p holds what 1F1B does.
    like, every = "interleaved" if virtual_stages > 1 else "1f1b", 1 + is_doubled
    orders = SCHEDULES[like].order(every * stages, virtual_stages, micro_batches)[::every]
    return [np.array([one[:virtual_stages] for one in states_in_flight(order, like)]) for order in orders]


def _reductions(parameters: float, setup: Setup, prefix: Any) -> tuple[tuple[Collective, ...], ...]:
    """Return the collectives of gradients and of parameters between replicas, or with a prefix between replicas of
    experts, except those of ZeRO-3 in the layers."""
    system, plan = setup.system, setup.plan
    # The size of Megatron-Core's DistributedDataParallelConfig.
    buckets = max(1.0, parameters / max(40e6, 1e6 * plan.layout.replicas)) if system.overlapped else 1.0
    sent, hidden = parameters * system.gradient_bytes / buckets, 1.0 if setup.reduces_each else 1 - 1 / buckets
    if plan.zero in (0, 3):
        return (Collective("all_reduce", f"{prefix}replicas", sent, buckets, hidden),) * (plan.zero == 0), ()
    times = plan.micro_batches if setup.reduces_each else 1
    gathers = (Collective("all_gather", f"{prefix}shard", 2 * parameters / buckets, buckets, hidden),)
    sums = Collective("reduce_scatter", f"{prefix}shard", sent, times * buckets, hidden)
    return (sums._replace(kind="all_reduce") if system.replicated else sums,), gathers


def memory_gib(setup: Setup, cluster: ClusterConfig) -> float:
    """Return the GiB of the stage that needs most memory."""
    step, memory = describe(setup), cluster.memory
    tensors = float((step.states + (1 + memory.fragmentation) * step.activations).max())
    return tensors / 2**30 + memory.overhead_gib(setup.plan.layout.axes)


def step_seconds(setup: Setup, cluster: ClusterConfig, slowdown: float = 1.0) -> float:
    """Return the seconds of a step; `slowdown` is a factor of what the layers and the bubble take."""
    step, system, plan = describe(setup), setup.system, setup.plan
    m, chunks = plan.micro_batches, plan.virtual_stages
    groups = groups_of(plan.layout, cluster.node)
    phases = []
    for *passes, inputs, weights in (module.passes for module in step.modules):
        *early, late = [pass_time(work, system, groups, cluster) for work in (*passes, weights)]
        # Weight gradients hide what input gradients send, too, as in a plan.
        phases.append([*early, pass_time(inputs, system, groups, cluster, late.compute), late])
    seconds = step.counts @ [[phase.total for phase in passes] for passes in phases]
    # A host is ahead of the device by many kernels, so only the sum of all passes can delay it, as in a plan.
    host = cluster.operator_us / 1e6 * system.operators * (3 + (plan.recompute == "full")) * step.counts[:, 1:-1].sum(1)
    seconds *= np.maximum(1.0, host / np.maximum(seconds.sum(1), 1e-9))[:, None]  # a stage may be empty
    longest = (stages := seconds.sum(1)).argmax()
    replicas = m * float(step.counts[longest] @ [sum(phase.replicas for phase in passes) for passes in phases])
    sent = collective_seconds(step.message, groups["pipeline"], cluster)
    link = sent * (not system.overlapped) + cluster.message_us * 1e-6
    # Messages that are hidden in between are not while a pipeline fills and drains (Megatron-Core's default).
    filling = 2 * (plan.pipeline - 1 + (chunks - 1) * min(m, plan.pipeline)) * sent * system.overlapped
    total = makespan(seconds, setup, link)
    # The last stage computes weight gradients of the head while the others drain the pipeline, if it is the longest.
    draining = (plan.pipeline - 1) / chunks * seconds[-1, 1:].sum(), m * (stages[-1] - stages[:-1].max(initial=0.0))
    total -= system.deferred_head * max(0.0, min(m * phases[-1][3].total, *map(float, draining)))
    waiting = min(2 * link * chunks * m, total - m * float(stages[longest])) + filling
    # What the replicas send of a chunk hides behind all that the other chunks have left, or begin with.
    window = (1 + (chunks - 1) * min(m, plan.pipeline)) / chunks
    beside = window * seconds[longest, 1:].sum(), 0.0, window * seconds[longest, 0]
    ends = [zip(works, beside, strict=True) for works in step.ends]
    end = max(sum(phase_seconds(work, groups, cluster, float(least)).total for work, least in one) for one in ends)
    return slowdown * (total + filling - waiting - replicas) + waiting + replicas + end + cluster.step_us * 1e-6


def pass_time(
    work: Work, system: System, groups: Mapping[Axis, Group], cluster: ClusterConfig, computing: float = 0.0
) -> Phase:
    """Return the seconds of one pass of a module, which overlaps `computing` seconds of another one."""
    if system.contended_us and groups["pipeline"].inside < groups["pipeline"].size:
        rings = sum(one.calls for one in work.collectives if one.axis == "tensor" and one.kind != "all_reduce")
        held_us = rings * (groups["tensor"].size - 1) * system.contended_us
        work = replace(work, launches=work.launches + held_us / cluster.launch_us)
    return phase_seconds(work, groups, cluster, computing)


def makespan(seconds: Any, setup: Setup, link: float) -> float:
    """Return the seconds from the first to the last computation of a step, in closed form, where a micro-batch takes
    `seconds` [stages, passes] and a message between stages takes `link`."""
    plan, stages = setup.plan, seconds.sum(1)
    p, v, m = plan.pipeline, plan.virtual_stages, plan.micro_batches
    waiting = 2 * link * v if p > 1 else 0.0
    if plan.schedule == "zb-2p":  # twice the activations: no stage waits but at the ends, Qi et al. 2024, table 5
        return float(m * stages.max() + 2 * (p - 1) * link)
    if plan.schedule == "zb-1p":  # weight gradients apart from input gradients
        idle = stages.sum() - 2 * seconds[:, 3].sum()
        return float(m * (stages.max() + waiting) + (p - 1) / p * max(0.0, idle) + 2 * (p - 1) * link)
    # Exact where micro-batches are even and fill whole rounds of the stages, or less than one.
    busy = ((v - 1) * max(m, p) + m - 1) / v * stages.max()
    return float(stages.sum() / v + busy + (m - 1) * waiting + 2 * (p - 1) * link)
