"""One rank's step without its device: the trainer itself, on fake tensors and a process group that sends nothing."""

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
    """What a rank does in a step, and what its device holds."""

    rank: int
    stage: int
    tensor: int
    """Place among the ranks that share every matrix."""
    replica: int
    peak: int
    """Bytes of the tensors at the peak."""
    peak_place: str
    """The allocation that led to it: file and line, action of the schedule."""
    peak_bytes: dict[str, int]
    """Kind (see `memory.KINDS`) -> bytes at the peak."""
    lasting_bytes: dict[str, int]
    """The same before the first step."""
    groups: int
    """Process groups in which it sends, each with buffers of its own."""
    collectives: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    """Axis -> collective -> its calls and bytes in a step, and bytes that products hide. Bytes are those of the whole
    tensor: what all ranks of the group have together after a gather, what each has before a reduction."""
    launches: int = 0
    """Kernels in a step; one for each operation."""
    memory_bound_bytes: int = 0
    """Read and written by operations other than products of matrices."""
    copy_bytes: int = 0
    """Copied between host and device beside the computation."""
    flops: int = 0
    products: list[dict[str, Any]] = field(default_factory=list)
    """Products of matrices and fused attention: operator, shapes, format, the share that is computed, how often."""
    update: dict[str, int] = field(default_factory=dict)
    """`launches` and `memory_bound_bytes` of what is done once a step; `working_bytes`, most that are live after the
    last micro-batch besides those that last."""
    host_syncs: dict[str, int] = field(default_factory=dict)
    """File and line -> how often in a step the host waits for a value of the device."""
    blocking_copies: dict[str, int] = field(default_factory=dict)
    """File and line -> how often in a step the host waits for a copy."""
    any_order: dict[str, int] = field(default_factory=dict)
    """Operator that adds up in an order of its own -> how often in a step, unless `train.deterministic` replaces it."""
    findings: dict[str, int] = field(default_factory=dict)
    """Operations across devices, tensors of the host in collectives of the device."""
    races: dict[str, int] = field(default_factory=dict)
    """Who touches a buffer of an asynchronous collective or copy before its wait."""


def dry_run(
    chosen: Chosen,
    rank: int,
    device: torch.device,
    fake: FakeDevice | None = None,
    steps: int = 1,
    whole: bool = False,
) -> RankReport:
    """Carry out steps of one rank, and report of the last one.

    Args:
        chosen: the run.
        rank: any of its layout.
        device: that tensors are said to be on.
        fake: what tells its streams apart; None: they are one.
        steps: how many.
        whole: all micro-batches are carried out; otherwise as many as it takes until they repeat.
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
                trainer.scales.known = True  # as in all steps but the first
            label_states(audit, trainer)
            lasting = dict(audit.memory.bytes)
            for _ in range(steps):
                audit.counts.clear()
                audit.memory.restart()
                carry_out(Observer(audit), trainer, micro_batches(config, layout))
        return report_of(audit, mesh, total, _repeated(stages.schedule), lasting)


def as_carried_out(config: RunConfig) -> RunConfig:
    """Return a configuration as a dry run takes it: nothing compiles for a device that is not there, and a step that is
    shortened has another list."""
    return replace(config, compile=False, train=replace(config.train, check_step=False))


def shortened(config: RunConfig, layout: Layout, stages: Stages, stage: int) -> tuple[RunConfig, Stages]:
    """The same run with as few micro-batches as it takes until they repeat: the stage holds of each chunk as many at a
    time as it ever does, with the gradients that are summed meanwhile, and there is one between the first and the
    last."""
    total, held = stages.schedule.micro_batches, _held(stages.schedule, stage)
    for count in range(_repeated(stages.schedule) + 2, total):
        fewer = replace(config.batch, global_size=count * config.batch.micro_size * layout.data)
        try:
            shorter = plan_stages(replace(config, batch=fewer), layout)
        except ConfigError:
            continue  # the schedule cannot cut so many
        if _held(shorter.schedule, stage) == held:
            return replace(config, batch=fewer), shorter
    return config, stages


def _repeated(schedule: Schedule) -> int:
    """Return the micro-batch that stands for those left out: if each is reduced, the first that waits for others."""
    return IN_FLIGHT if schedule.reduce_each else 1


def _held(schedule: Schedule, stage: int) -> list[set[Held]]:
    """Return what a stage holds at its fullest moments, and at those with as many reductions in flight as ever."""
    computed = (action for action in schedule.actions[stage] if action.kind in COMPUTE)
    order = [(action.kind, action.chunk, cast(int, action.micro)) for action in computed]
    return [set(held_in(order, schedule.name, skipped)) for skipped in (0, IN_FLIGHT * schedule.reduce_each)]


@contextmanager
def on_fake_tensors(rank: int, world: int) -> Iterator[None]:
    """Tensors without memory, and a process group of any size that sends nothing."""
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
    """As many rows to each rank as to the others; the host waits for the device all the same."""
    counts.cpu()
    sides, ranks, _ = counts.shape
    return [[[rows // ranks + (rank < rows % ranks) for rows in most] for rank in range(ranks)] for _ in range(sides)]


def with_kernel(config: RunConfig, device: torch.device) -> RunConfig:
    """Return a configuration with FlexAttention, which trials would find the fastest, for a block-sparse model that it
    can compute."""
    if config.model.sparse is None or "flex" not in kernels_of(config, device):
        return config
    return replace(config, model=replace(config.model, attention="flex"))


@contextmanager
def audited(config: RunConfig, mesh: Mesh, fake: FakeDevice | None = None) -> Iterator[Audit]:
    """An audit of what a rank does within the block."""
    vocab = room(config.model.vocab, mesh.layout.tensor, VOCABULARY_MULTIPLE)
    groups = {str(group.group_name): axis for axis, group in mesh.groups.items()}
    sparse = config.model.sparse
    share = 1.0 if sparse is None else computed_share(sparse, config.model.sequence, FLEX_TILE)
    with Audit(mesh.device, groups, fake, vocab, share) as audit, ownership(audit):
        yield audit


class Observer:
    """Is told when actions begin and end, and tells the audit."""

    def __init__(self, audit: Audit) -> None:
        self.audit = audit

    def begin(self, action: Any) -> None:
        """An action begins."""
        self.audit.scope = Scope(action)

    def end(self, action: Any) -> None:
        """An action ends."""
        memory = self.audit.memory
        self.audit.scope, memory.high = Scope(), memory.total


class _ObservedActions(tuple[Any, ...]):
    """Actions that somebody observes."""

    observer: Observer

    def __iter__(self) -> Iterator[Any]:
        for action in super().__iter__():
            self.observer.begin(action)
            yield action
            self.observer.end(action)


class _Move(NamedTuple):
    """What is done for a micro-batch before the schedule begins."""

    micro: int

    def __str__(self) -> str:
        return f"moving micro-batch {self.micro} to the device"


def carry_out(observer: Observer, trainer: Trainer, batches: list[Batch]) -> None:
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
        finish()  # before this the last reductions are in flight
        audit.staying = audit.memory.of_micro_batch(1)

    with (
        patch.object(trainer, "stages", audited_stages),
        patch.object(Batch, "to", moved),
        patch.object(gradients, "finish", finished),
    ):
        trainer.train_step(batches)
    # the next step waits for a module's weights where it uses them: its first products hide the gathers of the rest
    unsharder = trainer.parameters.unsharder
    num_before = 1 + sum(module in unsharder.regions.lookups for module in unsharder.uses)
    unsharder.wait(flat for flats in list(unsharder.uses.values())[:num_before] for flat in flats)
    audit.hide()


def micro_batches(config: RunConfig, layout: Layout) -> list[Batch]:
    """Those of a step of one replica, all zeros."""
    rows, length = config.batch.micro_size, config.model.sequence + 1
    count = config.batch.global_size // (rows * layout.data)
    return [
        make_batch(np.zeros((rows, length), np.int64), range(i * rows, (i + 1) * rows), config.data.packing)
        for i in range(count)
    ]


def report_of(audit: Audit, mesh: Mesh, total: int, repeated: int, lasting: dict[str, int]) -> RankReport:
    """Return what was counted in a step, as of `total` micro-batches: those left out are like `repeated`."""
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
