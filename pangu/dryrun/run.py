"""Dry run of one rank's step: the trainer on fake tensors, with a process group that sends nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, make_batch
from pangu.dryrun.audit import Audit
from pangu.dryrun.device import FakeDevice
from pangu.dryrun.fake_tensors import REPLACED, FakeTensors, row_counts
from pangu.layers import expert_exchange
from pangu.layers.kernel_choice import kernels_of
from pangu.layers.sparse import FLEX_TILE, computed_share
from pangu.models.parameters import VOCABULARY_MULTIPLE
from pangu.optim import build
from pangu.pipeline.layouts import Chosen
from pangu.pipeline.stages import plan_stages
from pangu.schedule.in_flight import states_in_flight
from pangu.schedule.orders import SCHEDULES, NumbersError
from pangu.schedule.schedule import Schedule
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import room
from pangu.training.step import Trainer
from pangu.zero.gradients import GradientSum
from pangu.zero.grouping import IN_FLIGHT
from pangu.zero.sharded import ShardedParameters
from pangu.zero.unshard import Unsharder

_OWNERS: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (ShardedParameters, "parameters", ("__init__",)),
    (ShardedParameters, "gradients", ("norm_and_loss",)),
    (ShardedParameters, "optimizer", ("update",)),
    (Unsharder, "gathered", ("publish", "do")),
    (GradientSum, "gradients", ("start_step", "sum_of", "complete", "reduce", "finish", "_add")),
)
"""Class, the kind of memory that its flat parameters allocate, and the methods that allocate it."""


@dataclass(frozen=True)
class RankReport:
    """Operations of a rank in a step, and the memory of its device."""

    rank: int
    stage: int
    tensor: int
    """Tensor-parallel rank."""
    replica: int
    peak: int
    """Peak bytes of tensors."""
    peak_place: str
    """Allocation that led to the peak: file and line, action of the schedule."""
    peak_bytes: dict[str, int]
    lasting_bytes: dict[str, int]
    """Bytes by kind (see `memory.KINDS`) at the peak, and before the first step."""
    groups: int
    """Number of process groups in which the rank communicates, each with buffers of its own."""
    collectives: dict[str, dict[str, dict[str, int]]]
    """Mapping from axis and collective to the calls and bytes per step, and the bytes that matmuls hide. Bytes are
    those of the full tensor: the output of a gather on all ranks of the group, the input of a reduction on each."""
    launches: int
    """Kernel launches per step; one for each operation."""
    memory_bound_bytes: int
    """Bytes read and written by operations other than matmuls."""
    copy_bytes: int
    """Bytes copied between host and device in parallel with the computation."""
    flops: int
    update: dict[str, int]
    """Once-per-step work: `launches` and `memory_bound_bytes`."""
    host_syncs: dict[str, int]
    blocking_copies: dict[str, int]
    """Number per step by file and line: where the host waits for a value from the device, or for a copy."""
    any_order: dict[str, int]
    """Calls per step of operators with nondeterministic summation order, unless `train.deterministic` replaces them."""
    findings: dict[str, int]
    """Errors found: operations across devices, and host tensors in collectives of the device."""
    races: dict[str, int]
    """Accesses to a buffer of an asynchronous collective or copy before its wait."""


def dry_run(
    chosen: Chosen, rank: int, device: torch.device, fake: FakeDevice | None = None, steps: int = 1, whole: bool = False
) -> RankReport:
    """Carry out steps of one rank, and return a report of the last one.

    Args:
        chosen: the run.
        rank: any rank of its layout.
        device: device that the tensors are placed on.
        fake: fake device that tells its streams apart; None: there is one stream.
        steps: number of steps.
        whole: carry out all micro-batches instead of the fewest after which they repeat.
    """
    config, layout, stages = fewer = chosen if whole else shortened(chosen, chosen.layout.coordinates(rank).pipeline)
    with on_fake_tensors(rank, layout.world), audited(fewer, device, fake) as (audit, trainer):
        lasting = dict(audit.memory.bytes)
        for _ in range(steps):
            audit.by_action.clear()
            audit.enter(None)
            audit.memory.restart()
            carry_out(audit, trainer, micro_batches(config, layout))
        return report_of(audit, trainer.mesh, chosen.stages.schedule.micro_batches, repeated(stages.schedule), lasting)


def shortened(chosen: Chosen, stage: int) -> Chosen:
    """Return the same run with the fewest micro-batches after which they repeat.

    The stage still reaches its highest number of micro-batches in flight for each chunk, with the gradients summed
    meanwhile, and there is one round of micro-batches between the first and the last.
    """
    config, layout, schedule = chosen.config, chosen.layout, chosen.stages.schedule
    wanted, one_round = _held(schedule, stage, schedule.micro_batches), repeated(schedule)
    rounds = reversed(range(schedule.micro_batches - len(one_round), one_round.stop, -len(one_round)))
    for count in rounds if schedule.micro_batches % len(one_round) == 0 else ():  # others do not repeat
        with suppress(NumbersError):  # the schedule does not support so few
            if _held(schedule, stage, count) == wanted:
                fewer = replace(config.batch, global_size=count * config.batch.micro_size * layout.data)
                config = replace(config, batch=fewer)
                return Chosen(config, layout, plan_stages(config, layout))
    return chosen


def repeated(schedule: Schedule) -> range:
    """Return the micro-batches that represent those left out: a round, after which the turns of chunks repeat."""
    first = IN_FLIGHT if schedule.reduce_each else 1  # if each is reduced, the first that waits for earlier ones
    return range(first, first + (schedule.stages if schedule.virtual_stages > 1 else 1))


def _held(schedule: Schedule, stage: int, micro_batches: int) -> list[set[tuple[int, ...]]]:
    """Return what a stage holds at its peaks, and at the points with the most reductions in flight."""
    order = SCHEDULES[schedule.name].order(schedule.stages, schedule.virtual_stages, micro_batches)[stage]
    return [set(states_in_flight(order, schedule.name, skipped)) for skipped in (0, IN_FLIGHT * schedule.reduce_each)]


@contextmanager
def on_fake_tensors(rank: int, world: int) -> Iterator[None]:
    """Use tensors without memory, and a process group of any size that sends nothing, within the block."""
    with ExitStack() as stack:
        for owner, replaced in REPLACED:
            stack.enter_context(patch.multiple(owner, **replaced))
        if world > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(FakeTensors())
        yield


@contextmanager
def audited(
    chosen: Chosen, device: torch.device, fake: FakeDevice | None = None, thorough: bool = True
) -> Iterator[tuple[Audit, Trainer]]:
    """Yield the trainer of this process's rank, ready for any step but the first, and an audit of its operations.

    Nothing compiles, and block-sparse models use FlexAttention, the fastest in trials, where it supports them. Unless
    it is `thorough`, the optimizer has no moments, which take long to create for hundreds of experts.
    """
    config, layout, stages = chosen
    config = replace(config, compile=False, train=replace(config.train, check_step=False))
    sparse, share = config.model.sparse, 1.0
    if sparse is not None:
        share = computed_share(sparse, config.model.sequence, FLEX_TILE)
        if "flex" in kernels_of(config, device):
            config = replace(config, model=replace(config.model, attention="flex"))
    mesh = Mesh.connect(layout, device, config.parallel.timeout_s)
    vocab = room(config.model.vocab, layout.tensor, VOCABULARY_MULTIPLE)
    groups = {str(group.group_name): axis for axis, group in mesh.groups.items()}
    with Audit(device, groups, fake, vocab, share, thorough) as audit, ExitStack() as stack:
        for owner, kind, names in _OWNERS:
            for name in names:
                stack.enter_context(patch.object(owner, name, _owned(audit, getattr(owner, name), kind)))
        stack.enter_context(patch.object(expert_exchange, "host_numbers", partial(row_counts, config)))
        with patch.object(build, "start_moments", build.start_moments if thorough else lambda *_: None):
            trainer = Trainer(config, mesh, stages)
        if trainer.scales is not None:
            trainer.scales.known = True
        _label_states(audit, trainer)
        yield audit, trainer


def _owned(audit: Audit, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
    def method(*args: Any, **kwargs: Any) -> Any:
        before, audit.owner = audit.owner, kind
        try:
            return original(*args, **kwargs)
        finally:
            audit.owner = before

    return method


def _label_states(audit: Audit, trainer: Trainer) -> None:
    """Tell the audit which owner each persistent buffer belongs to."""
    kinds = {"total": "gradients", "grad": "gradients", "main": "optimizer"}
    for flat in trainer.parameters.flat_parameters:
        for row in reversed(flat.table.values()):  # an alias is labeled as the buffer it points to
            tensor = getattr(flat, row.name)
            if row.alias is None and tensor is not None:
                audit.memory.label(tensor, kinds.get(row.name, "parameters") if row.lasting else "gathered")
    for state in trainer.optimizer.state.values():
        for tensor in state.values():
            audit.memory.label(tensor, "optimizer")


class _Move(NamedTuple):
    """Move of a micro-batch to the device, before the schedule begins."""

    micro: int

    def __str__(self) -> str:
        return f"moving micro-batch {self.micro} to the device"


def carry_out(audit: Audit, trainer: Trainer, batches: list[Batch]) -> None:
    """Carry out one training step, and tell the audit of its actions and moves of micro-batches."""
    move, micro, gradients = Batch.to, iter(range(len(batches))), trainer.parameters.gradients
    finish = gradients.finish

    def moved(batch: Batch, device: torch.device) -> Batch:
        audit.enter(_Move(next(micro)))
        result = move(batch, device)
        audit.enter(None)
        return result

    def finished() -> None:
        audit.enter(None)
        finish()  # until then, the last reductions are in flight
        audit.staying.clear()
        for entry in audit.memory.live.values():
            audit.staying[entry.kind] += entry.size * (entry.micro == 1)

    with (
        patch.object(trainer.runner, "on_action", audit.enter),
        patch.object(Batch, "to", moved),
        patch.object(gradients, "finish", finished),
        # the training loop reads the result of a step while the next one computes
        patch.object(trainer, "read", lambda pending: None),
        audit.counting_calls(),
    ):
        trainer.train_step(batches)
    # the next step waits for a module's weights on first use: its first matmuls hide the other gathers
    unsharder = trainer.parameters.unsharder
    num_before = 1 + sum(module in unsharder.regions.lookups for module in unsharder.uses)
    unsharder.wait(flat for flats in list(unsharder.uses.values())[:num_before] for flat in flats)
    audit.hide()


def micro_batches(config: RunConfig, layout: Layout) -> list[Batch]:
    """Return the micro-batches of one replica's step, all zeros."""
    rows, length = config.batch.micro_size, config.model.sequence + 1
    return [
        make_batch(np.zeros((rows, length), np.int64), range(i * rows, (i + 1) * rows), config.data.packing)
        for i in range(config.batch.accumulation(layout.data))
    ]


def report_of(audit: Audit, mesh: Mesh, total: int, one_round: range, lasting: dict[str, int]) -> RankReport:
    """Return the counters of a step, scaled to `total` micro-batches: those left out are rounds like `one_round`."""
    counts: Counter[tuple[Any, ...]] = Counter()
    memory, actions = audit.memory, audit.by_action
    missing = total - len({action.micro for action in actions if action and action.micro is not None})
    for action, counted in actions.items():
        times = 1 + (missing // len(one_round) if action and action.micro in one_round else 0)
        for key, amount in counted.items():
            counts[key] += times * amount
    found: dict[str, Any] = {name: {} for name in ("host_syncs", "blocking_copies", "any_order", "collectives")}
    found |= {name: counts[name,] for name in ("launches", "memory_bound_bytes", "copy_bytes", "flops")}
    for (what, *of), amount in counts.items():
        if what in ("calls", "bytes", "hidden_bytes"):
            kind_counts = found["collectives"].setdefault(of[0], {}).setdefault(of[1], {})
            kind_counts[what] = kind_counts.get(what, 0) + amount
        elif what in found and of:
            found[what][of[0]] = amount
    found["collectives"] = {axis: dict(sorted(kinds.items())) for axis, kinds in sorted(found["collectives"].items())}
    return RankReport(
        rank=mesh.rank,
        stage=mesh.at.pipeline,
        tensor=mesh.at.tensor,
        replica=mesh.at.data,
        # a micro-batch and its loss stay until the step ends
        peak=memory.peak + missing * audit.staying.total(),
        peak_place=memory.peak_place,
        peak_bytes={kind: nbytes + missing * audit.staying[kind] for kind, nbytes in memory.peak_bytes.items()},
        lasting_bytes=lasting,
        groups=len(audit.used_groups),
        update={name: actions[None][name,] for name in ("launches", "memory_bound_bytes")},
        findings=dict(audit.findings),
        races=dict(audit.detector.races),
        **found,
    )
