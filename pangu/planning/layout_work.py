"""How a model is spread over ranks, and from what each module does to what each stage does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import add
from typing import Literal, NamedTuple, cast

from pangu.config.optimizer import UPDATED_AT_ONCE
from pangu.planning.plan import Plan as Plan
from pangu.planning.plan import Recompute as Recompute
from pangu.planning.workload import Axis, Collective, ModuleWork, StepWork, Working, Workload
from pangu.topology.experts import ExpertLayout

DENSE = "dense "
"""Before the kind of a layer without experts, in a model whose others have some."""
RESIDENT = " resident"
"""After the kind of the last layer of a chunk, which keeps its activations where those of others are offloaded."""


class Shape(NamedTuple):
    """A decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = False
    tied: bool = True
    dense: tuple[int, ...] = ()
    """Layers without experts, in a model whose others have some."""

    @property
    def embedding(self) -> int:
        """Weights of the words' table."""
        return self.vocab * self.hidden

    @property
    def layer_matrices(self) -> int:
        """Weights of a layer's matrices."""
        kv = self.hidden // self.heads * self.kv_heads
        return self.hidden * (2 * self.hidden + 2 * kv + (3 if self.gated else 2) * self.ffn)

    @property
    def parameters(self) -> float:
        """Of the whole model."""
        words = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.layer_matrices + 13 * self.hidden) + words + self.sequence * self.hidden

    def flops(self, sequences: float) -> float:
        """Model FLOPs of a step: attention in full, nothing twice."""
        layer = 2.0 * self.layer_matrices + 4.0 * self.sequence * self.hidden
        return 3.0 * sequences * self.sequence * (self.layers * layer + 2.0 * self.vocab * self.hidden)


@dataclass(frozen=True)
class System:
    """Formats of a program's states and messages, and the communication that it hides."""

    gradient_bytes: int
    """Of a gradient that is summed and reduced."""
    hidden_data: float = 0.0
    """Share of the communication of replicas that runs beside backward."""
    number_bytes: int = 2
    """Of weights and activations."""
    spare_bytes: int = 0
    """Of a gradient besides the sum, from one micro-batch to the next."""

    @property
    def optimizer_bytes(self) -> int:
        """Of a parameter's moments, and of its main copy where weights are shorter (Rajbhandari et al. 2020, 3.1)."""
        return 12 if self.number_bytes == 2 else 8


class Update(NamedTuple):
    """What the optimizer does."""

    bytes: float
    """Read and written for each number whose state a rank holds."""
    launches: float
    """For each layer."""
    working: float
    """Most bytes that it takes meanwhile for each number that it updates at a time."""


ADAM = Update(34.0, 24.0, 0.0)
"""Fused, in fp32."""


def cut(shape: Shape, plan: Plan) -> list[int]:
    """Layers of each chunk: as even as can be, the larger ones first."""
    if plan.layers:
        return list(plan.layers)
    chunks = plan.pipeline * plan.virtual
    each, rest = divmod(shape.layers, chunks)
    return [each + (number < rest) for number in range(chunks)]


class Weights(NamedTuple):
    """Weights of a stage that the same ranks have copies of."""

    numbers: float
    """On each of them, before any sharding."""
    replicas: int
    shards: int
    """Of the replicas, those that share states."""
    experts: bool
    """They are of experts that the layout splits."""

    def axis(self, name: Literal["data", "shard", "copies"]) -> Axis:
        """Along which these ranks communicate."""
        return cast(Axis, f"expert_{name}") if self.experts else name

    @classmethod
    def of(cls, plan: Plan, numbers: float, experts: float) -> tuple[Weights, ...]:
        """Those of a stage, of experts the second ones if the layout splits them."""
        layout = plan.layout
        weights = (cls(numbers, layout.replicas, layout.shards, False),)
        if not layout.splits_experts:
            return weights
        apart = ExpertLayout(layout)
        return (*weights, cls(experts, apart.replicas, apart.shards, True))


def assemble(
    shape: Shape,
    system: System,
    plan: Plan,
    modules: Mapping[str, ModuleWork],
    update: Update = ADAM,
    twice: float | None = None,
) -> Workload:
    """The workload of a step.

    Args:
        shape: of the model.
        system: how states are kept and sent.
        plan: the layout.
        modules: `embedding`, `layer`, `recomputed` if there are such, both before `RESIDENT` too, the same of
            `shape.dense` after `DENSE`, `head`, and `inner` if the chunks between the first and the last one do more
            than their layers.
        update: what the optimizer does.
        twice: numbers of the matrix that embedding and head share where they are on one stage; None: all of the head's.
    """
    twice = modules["head"].parameters if twice is None else twice
    layers = kinds_of_chunks(shape.dense, tuple(cut(shape, plan)))
    # most chunks are alike, and so are most stages: what is alike is one object
    kinds = [(of_chunk, number == 0, number == len(layers) - 1) for number, of_chunk in enumerate(layers)]
    orders = {kind: _modules_of(*kind, plan.recomputed, modules) for kind in set(kinds)}
    made = {kind: Counter(order) for kind, order in orders.items()}
    chunks = [made[kind] for kind in kinds]
    stages: list[list[Counter[str]]] = [[] for _ in range(plan.pipeline)]
    for stage, chunk in zip(plan.steps.stage_of, chunks, strict=True):
        stages[stage].append(chunk)
    steps: dict[tuple[int, ...], StepWork] = {}
    for of_stage in stages:
        key = tuple(map(id, of_stage))
        if key not in steps:
            steps[key] = _step(modules, sum(of_stage, Counter[str]()), shape, system, plan, update, twice)
    tokens = plan.micro_size * shape.sequence / plan.context
    # tensor ranks send a part each: Narayanan et al. 2021, 4.1
    message = system.number_bytes * tokens * shape.hidden / plan.tensor
    each = tuple(steps[tuple(map(id, of_stage))] for of_stage in stages)
    return Workload(dict(modules), tuple(chunks), tuple(orders[kind] for kind in kinds), each, message)


@lru_cache(maxsize=1000)
def kinds_of_chunks(dense: tuple[int, ...], layers: tuple[int, ...]) -> tuple[tuple[bool, ...], ...]:
    """Of each layer of each chunk, whether it is one of the `dense`."""
    chunks = (range(stop - count, stop) for stop, count in zip(accumulate(layers), layers, strict=True))
    return tuple(tuple(layer in dense for layer in chunk) for chunk in chunks)


def _modules_of(
    layers: tuple[bool, ...], first: bool, last: bool, recomputed: int, modules: Mapping[str, ModuleWork]
) -> tuple[str, ...]:
    """Kinds of a chunk's modules in the order of forward; `layers`: which are dense."""
    ends = (("head",) if last else ()) + (("inner",) if "inner" in modules and not (first or last) else ())
    return (*(("embedding",) if first else ()), *kinds_of_layers(layers, recomputed, modules), *ends)


def kinds_of_layers(layers: tuple[bool, ...], recomputed: int, modules: Collection[str]) -> list[str]:
    """Kinds of the modules of a chunk's layers; `layers`: which are dense."""
    kinds = ["recomputed" if number < recomputed else "layer" for number in range(len(layers))]
    if "layer" + RESIDENT in modules:
        kinds[-1] += RESIDENT
    return [DENSE * dense + kind for kind, dense in zip(kinds, layers, strict=True)]


def sent_to_host(layer: ModuleWork) -> ModuleWork:
    """A layer whose saved activations wait on the host (`pangu.layers.offload`): they are on the device while it
    computes, and those of the layer before it are still there in forward, and back already in backward."""
    saved, both = layer.saved_bytes, 2 * layer.saved_bytes
    return replace(
        layer,
        forward=replace(layer.forward, host_bytes=layer.forward.host_bytes + saved),
        backward_input=replace(layer.backward_input, host_bytes=layer.backward_input.host_bytes + saved),
        saved_bytes=0.0,
        working=Working(*map(add, layer.working, (both, both, 0.0, both))),
    )


def state_bytes(system: System, plan: Plan, numbers: float) -> float:
    """Bytes on the device that last from step to step, of so many parameters of a stage."""
    shards = plan.shards
    # schedules that compute weight gradients late keep whole gradients
    gradient_shards = shards if plan.zero >= 2 and plan.reduces_each else 1
    main = 0.0 if "optimizer" in plan.offload else system.optimizer_bytes / shards
    gradients = system.gradient_bytes / gradient_shards + system.spare_bytes
    return numbers * (system.number_bytes / (shards if plan.zero == 3 else 1) + gradients + main)


def _step(
    modules: Mapping[str, ModuleWork],
    counts: Counter[str],
    shape: Shape,
    system: System,
    plan: Plan,
    update: Update,
    twice: float,
) -> StepWork:
    """What a stage does once a step: gradients between replicas, the optimizer."""
    numbers = sum(modules[kind].parameters * count for kind, count in counts.items())
    experts = sum(modules[kind].experts * count for kind, count in counts.items())
    holds = ("embedding" in counts) + ("head" in counts) if shape.tied else 0
    if holds == 2:
        numbers -= twice
    weights = Weights.of(plan, numbers, experts)
    sends = [one for of_ranks in weights for one in _sums(of_ranks, system, plan)]
    if holds == 1:
        sends.append(Collective("all_reduce", "ends", twice * system.gradient_bytes))
    gradients, on_host = system.gradient_bytes, "optimizer" in plan.offload
    # gradients there; new weights to where they are used
    new = system.number_bytes * (on_host != ("parameters" in plan.offload))
    states = sum(of_ranks.numbers / of_ranks.shards for of_ranks in weights)
    summed = sum(of_ranks.numbers / (of_ranks.shards if plan.zero >= 2 else 1) for of_ranks in weights)
    updated = states * update.bytes
    return StepWork(
        numbers,
        experts,
        update_bytes=updated * (not on_host) + summed * (gradients + 4),
        launches=update.launches * sum(counts[kind] for kind in counts if kind not in ("embedding", "head", "inner")),
        collectives=tuple(sends),
        host_bytes=states * (gradients * on_host + new),
        host_update_bytes=updated * on_host,
        state_bytes=state_bytes(system, plan, numbers),
        communicators=plan.axes,
        update_working_bytes=update.working * min(states, UPDATED_AT_ONCE) * (not on_host),
    )


def _sums(weights: Weights, system: System, plan: Plan) -> Iterator[Collective]:
    """What sums and shares the gradients of weights, and brings what was updated to all replicas. ZeRO-3 does so beside
    the micro-batches."""
    sent, hidden = weights.numbers * system.gradient_bytes, system.hidden_data
    reduces_each = plan.zero >= 2 and plan.reduces_each
    if weights.shards == 1:
        if weights.replicas > 1:  # beside others that are reduced after each micro-batch, behind the last one
            yield Collective("all_reduce", weights.axis("data"), sent, 1, 0.0 if reduces_each else hidden)
        return
    # whole gradients are there for one micro-batch only: each is reduced
    often = plan.micro_batches if reduces_each else 1
    if plan.zero < 3:
        yield Collective("reduce_scatter", weights.axis("shard"), sent, often, hidden)
        yield Collective("all_gather", weights.axis("shard"), weights.numbers * system.number_bytes, 1, hidden)
    if weights.shards < weights.replicas:
        yield Collective("all_reduce", weights.axis("copies"), sent / weights.shards, often, hidden)
