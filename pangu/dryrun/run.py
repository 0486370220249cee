"""Dry run of one rank's step: the trainer on fake tensors, with a process group that sends nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from pangu.config.errors import ConfigError
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, make_batch
from pangu.dryrun import kernels
from pangu.dryrun.audit import Audit, Scope
from pangu.dryrun.device import FakeDevice
from pangu.dryrun.fake_tensors import FakeTensors
from pangu.dryrun.ownership import label_states, ownership
from pangu.layers import attention_blocks, dropping_attention, expert_exchange, gpu_kernels
from pangu.layers.kernel_choice import kernels_of
from pangu.layers.sparse import FLEX_TILE, computed_share
from pangu.models.parameters import VOCABULARY_MULTIPLE
from pangu.pipeline.actions import COMPUTE
from pangu.pipeline.held import Held, held_in
from pangu.pipeline.layouts import Chosen
from pangu.pipeline.schedule import Schedule
from pangu.pipeline.stages import Stages, plan_stages
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import room
from pangu.training.step import Trainer
from pangu.zero import flat_parameter
from pangu.zero.grouping import IN_FLIGHT


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
    """Bytes by kind (see `memory.KINDS`) at the peak."""
    lasting_bytes: dict[str, int]
    """Bytes by kind before the first step."""
    groups: int
    """Number of process groups in which the rank communicates, each with buffers of its own."""
    collectives: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Mapping from axis and collective to the calls and bytes per step, and the bytes that matmuls hide. Bytes are
    those of the full tensor: the output of a gather on all ranks of the group, the input of a reduction on each."""
    launches: int = 0
    """Kernel launches per step; one for each operation."""
    memory_bound_bytes: int = 0
    """Bytes read and written by operations other than matmuls."""
    copy_bytes: int = 0
    """Bytes copied between host and device in parallel with the computation."""
    flops: int = 0
    products: list[dict[str, Any]] = field(default_factory=list)
    """Matmuls and fused attention: operator, shapes, format, share that is computed, count."""
    update: dict[str, int] = field(default_factory=dict)
    """Once-per-step work: `launches`, `memory_bound_bytes`, and `working_bytes`: its peak transient bytes."""
    host_syncs: dict[str, int] = field(default_factory=dict)
    """Number of host syncs per step by file and line, where the host waits for a value from the device."""
    blocking_copies: dict[str, int] = field(default_factory=dict)
    """Number of blocking copies per step by file and line, where the host waits for the copy."""
    any_order: dict[str, int] = field(default_factory=dict)
    """Calls per step of operators with nondeterministic summation order, unless `train.deterministic` replaces them."""
    findings: dict[str, int] = field(default_factory=dict)
    """Errors found: operations across devices, and host tensors in collectives of the device."""
    races: dict[str, int] = field(default_factory=dict)
    """Accesses to a buffer of an asynchronous collective or copy before its wait."""


def dry_run(
    chosen: Chosen,
    rank: int,
    device: torch.device,
    fake: FakeDevice | None = None,
    steps: int = 1,
    whole: bool = False,
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
    layout = chosen.layout
    total = chosen.stages.schedule.micro_batches
    config, stages = as_carried_out(chosen.config), chosen.stages
    if not whole:
        config, stages = shortened(config, layout, stages, layout.coordinates(rank).pipeline)
    with on_fake_tensors(rank, layout.world):
        config = with_kernel(config, device)
        mesh = Mesh.connect(layout, device, config.parallel.timeout_s)
        with audited(config, mesh, fake) as audit:
            trainer = Trainer(config, mesh, stages)
            if trainer.scales is not None:
                trainer.scales.known = True  # like all steps but the first
            label_states(audit, trainer)
            lasting = dict(audit.memory.bytes)
            for _ in range(steps):
                audit.counts.clear()
                audit.memory.restart()
                carry_out(Observer(audit), trainer, micro_batches(config, layout))
        return report_of(audit, mesh, total, _repeated(stages.schedule), lasting)


def as_carried_out(config: RunConfig) -> RunConfig:
    """Return a configuration for a dry run: nothing compiles, and a shortened step has its own schedule."""
    return replace(config, compile=False, train=replace(config.train, check_step=False))


def shortened(config: RunConfig, layout: Layout, stages: Stages, stage: int) -> tuple[RunConfig, Stages]:
    """Return the same run with the fewest micro-batches after which they repeat.

    The stage still reaches its highest number of micro-batches in flight for each chunk, with the gradients summed
    meanwhile, and there is one micro-batch between the first and the last.
    """
    total, held = stages.schedule.micro_batches, _held(stages.schedule, stage)
    for count in range(_repeated(stages.schedule) + 2, total):
        fewer = replace(config.batch, global_size=count * config.batch.micro_size * layout.data)
        try:
            shorter = plan_stages(replace(config, batch=fewer), layout)
        except ConfigError:
            continue  # the schedule does not support so few
        if _held(shorter.schedule, stage) == held:
            return replace(config, batch=fewer), shorter
    return config, stages


def _repeated(schedule: Schedule) -> int:
    """Return the micro-batch that represents those left out: if each is reduced, the first that waits for others."""
    return IN_FLIGHT if schedule.reduce_each else 1


def _held(schedule: Schedule, stage: int) -> list[set[Held]]:
    """Return what a stage holds at its peaks, and at the points with the most reductions in flight."""
    computed = (action for action in schedule.actions[stage] if action.kind in COMPUTE)
    order = [(action.kind, action.chunk, cast(int, action.micro)) for action in computed]
    return [set(held_in(order, schedule.name, skipped)) for skipped in (0, IN_FLIGHT * schedule.reduce_each)]


@contextmanager
def on_fake_tensors(rank: int, world: int) -> Iterator[None]:
    """Use tensors without memory, and a process group of any size that sends nothing, within the block."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(flat_parameter, "fill", lambda *_: None))
        stack.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", kernels.attention))
        stack.enter_context(patch.object(gpu_kernels, "flash_attention", kernels.flash_attention))
        stack.enter_context(patch.object(attention_blocks, "flash_forward", kernels.flash_forward))
        stack.enter_context(patch.object(attention_blocks, "flash_backward", kernels.flash_backward))
        stack.enter_context(patch.object(dropping_attention, "attend", kernels.attend))
        stack.enter_context(patch.object(dropping_attention, "attend_backward", kernels.attend_backward))
        stack.enter_context(patch.object(gpu_kernels, "_flex", lambda compiled: kernels.flex))
        stack.enter_context(patch.object(gpu_kernels, "can_run", lambda kernel, device: True))
        stack.enter_context(patch.object(expert_exchange, "host_numbers", _evenly))
        if world > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(FakeTensors())
        yield


def _evenly(counts: Tensor, most: Sequence[int]) -> list[list[list[int]]]:
    """Return equal numbers of rows for all ranks, still with a host sync."""
    counts.cpu()
    sides, ranks, _ = counts.shape
    return [[[rows // ranks + (rank < rows % ranks) for rows in most] for rank in range(ranks)] for _ in range(sides)]


def with_kernel(config: RunConfig, device: torch.device) -> RunConfig:
    """Return a configuration with FlexAttention, the fastest in trials, for block-sparse models that it supports."""
    if config.model.sparse is None or "flex" not in kernels_of(config, device):
        return config
    return replace(config, model=replace(config.model, attention="flex"))


@contextmanager
def audited(config: RunConfig, mesh: Mesh, fake: FakeDevice | None = None) -> Iterator[Audit]:
    """Yield an audit of a rank's operations within the block."""
    vocab = room(config.model.vocab, mesh.layout.tensor, VOCABULARY_MULTIPLE)
    groups = {str(group.group_name): axis for axis, group in mesh.groups.items()}
    sparse = config.model.sparse
    share = 1.0 if sparse is None else computed_share(sparse, config.model.sequence, FLEX_TILE)
    with Audit(mesh.device, groups, fake, vocab, share) as audit, ownership(audit):
        yield audit


class Observer:
    """Observer of the beginning and end of actions, which it passes on to the audit."""

    def __init__(self, audit: Audit) -> None:
        """Create an observer that reports to an audit."""
        self.audit = audit

    def begin(self, action: Any) -> None:
        """Begin an action."""
        self.audit.scope = Scope(action)

    def end(self, action: Any) -> None:
        """End an action."""
        memory = self.audit.memory
        self.audit.scope, memory.high = Scope(), memory.total


class _ObservedActions(tuple[Any, ...]):
    """Actions that an observer is told about."""

    observer: Observer

    def __iter__(self) -> Iterator[Any]:
        for action in super().__iter__():
            self.observer.begin(action)
            yield action
            self.observer.end(action)


class _Move(NamedTuple):
    """Move of a micro-batch to the device, before the schedule begins."""

    micro: int

    def __str__(self) -> str:
        return f"moving micro-batch {self.micro} to the device"


def carry_out(observer: Observer, trainer: Trainer, batches: list[Batch]) -> None:
    """Carry out one training step, and tell the observer of its actions and moves of micro-batches."""
    schedule = trainer.stages.schedule
    actions = tuple(map(_ObservedActions, schedule.actions))
    for of_stage in actions:
        of_stage.observer = observer
    audited_stages = replace(trainer.stages, schedule=replace(schedule, actions=actions))
    move, micro = Batch.to, iter(range(len(batches)))

    def moved(batch: Batch, device: torch.device) -> Batch:
        action = _Move(next(micro))
        observer.begin(action)
        result = move(batch, device)
        observer.end(action)
        return result

    audit, gradients = observer.audit, trainer.parameters.gradients
    finish = gradients.finish

    def finished() -> None:
        finish()  # until then, the last reductions are in flight
        audit.staying = audit.memory.of_micro_batch(1)

    with (
        patch.object(trainer, "stages", audited_stages),
        patch.object(Batch, "to", moved),
        patch.object(gradients, "finish", finished),
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
    count = config.batch.global_size // (rows * layout.data)
    return [
        make_batch(np.zeros((rows, length), np.int64), range(i * rows, (i + 1) * rows), config.data.packing)
        for i in range(count)
    ]


def report_of(audit: Audit, mesh: Mesh, total: int, repeated: int, lasting: dict[str, int]) -> RankReport:
    """Return the counters of a step, scaled to `total` micro-batches: those left out are like `repeated`."""
    counts: Counter[tuple[Any, ...]] = Counter()
    actions = audit.by_action()
    missing = total - len({action.micro for action in actions if action and action.micro is not None})
    for action, counted in actions.items():
        times = 1 + (missing if action and action.micro == repeated else 0)
        for key, amount in counted.items():
            counts[key] += times * amount
    # a micro-batch and its loss stay until the step ends
    audit.memory.peak += missing * audit.staying.total()
    for kind, nbytes in audit.staying.items():
        audit.memory.peak_bytes[kind] += missing * nbytes
    at = mesh.at
    return RankReport(
        mesh.rank,
        at.pipeline,
        at.tensor,
        at.data,
        audit.memory.peak,
        audit.memory.peak_place,
        audit.memory.peak_bytes,
        lasting,
        len(audit.used_groups),
        _collectives(counts, ("calls", "bytes", "hidden_bytes")),
        counts["launches",],
        counts["memory_bound_bytes",],
        counts["copy_bytes",],
        counts["flops",],
        _products(counts),
        {
            **{what: actions[None][what,] for what in ("launches", "memory_bound_bytes")},
            "working_bytes": audit.memory.high - sum(lasting.values()),
        },
        {key[1]: amount for key, amount in counts.items() if key[0] == "host_sync"},
        {key[1]: amount for key, amount in counts.items() if key[0] == "blocking_copy"},
        {key[1]: amount for key, amount in counts.items() if key[0] == "any_order"},
        dict(audit.findings),
        dict(audit.detector.races),
    )


def _collectives(counts: Counter[tuple[Any, ...]], names: Sequence[str]) -> dict[str, dict[str, dict[str, int]]]:
    by_axis: dict[str, dict[str, dict[str, int]]] = {}
    for (what, *of), amount in sorted(counts.items(), key=lambda item: repr(item[0])):
        if what in names:
            by_axis.setdefault(of[0], {}).setdefault(of[1], {})[what] = amount
    return by_axis


def _products(counts: Counter[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [
        {"operator": key[1], "shapes": key[2], "format": key[3], "computed": key[4], "calls": amount}
        for key, amount in counts.items()
        if key[0] == "product"
    ]
