"""State that surviving ranks keep when another rank is lost (`scripts/launch.py --spares`).

Weights do not change before norm and loss are summed, so each surviving rank has the complete state of a step. The
steps may differ by one, as only some ranks have received the sums. They send them to the others, which then update:

    rank 0 | gradients 8 | sums | update 8 | gradients 9 ...   is at step 8, sends its sums
    rank 1 | gradients 8 | sums | x                            is lost
    rank 2 | gradients 8 | sums ...                            is at step 7, makes update 8 with these sums

The state is written into the memory of nodes, each shard by the first surviving rank that holds it. It is the newest
generation there (`checkpoint.memory`) if surviving ranks hold all shards of the lost one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pangu.checkpoint.files import Written, partial_of
from pangu.checkpoint.memory import write_part
from pangu.checkpoint.writing import write_own
from pangu.common.errors import LostError, UserError, writing
from pangu.topology.copy_stream import DeviceEvent
from pangu.topology.layout import Layout
from pangu.training.saving import facts_of
from pangu.training.step import PendingResult, Trainer
from pangu.training.validation import local_trust_ratios
from pangu.zero.norms import holders

if TYPE_CHECKING:
    from pangu.training.loop import Loop

log = logging.getLogger("pangu")

Meet = Callable[[Any], tuple[str, list[Any]]]
"""Function that exchanges reports with the surviving ranks; returns the epoch's name and them (`Member.meet`)."""


UnreadResult = tuple[PendingResult, dict[int, float] | None, dict[str, Any]]
"""Result of a step, its stragglers, and the data part of its record."""


class Border(NamedTuple):
    """State of a loop between two steps, as far as later work changes it."""

    result: UnreadResult | None
    """Result of the step before; None: there is none since the run began or continued."""
    watch: Mapping[str, Any]
    """State of `SpikeDetector` before that result."""
    position: Mapping[str, Any] | None
    """Position of the data source after the step before, or earlier."""
    began: DeviceEvent | None
    """Beginning of the step before, and the seconds since then that belong to no step."""
    outside_s: float

    def unread(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return the result for the index of a checkpoint, for the next epoch to record it and to do what is due."""
        if self.result is None or self.began is None:
            return None
        pending, stragglers, details = self.result
        seconds = pending.end.seconds_since(self.began) - self.outside_s
        asks_ratios = trainer.config.metrics.trust_ratios
        return {
            "numbers": pending.numbers.tolist(),
            "fields": trainer.result_fields,
            "lr": pending.lr,
            "seconds": seconds,
            "stragglers": None if stragglers is None else [*stragglers.items()],
            "details": {**details, "trust_ratios": local_trust_ratios(trainer)} if asks_ratios else details,
        }


def unread_of(checkpoint: Mapping[str, Any], trainer: Trainer) -> Mapping[str, Any] | None:
    """Return the unread result in an index; None: there is none, or it has other numbers, because keys have changed."""
    unread = checkpoint.get("unread")
    return unread if unread is not None and unread["fields"] == trainer.result_fields else None


def result_of(unread: Mapping[str, Any], trainer: Trainer) -> UnreadResult:
    """Return the result that `Border.unread` has described."""
    numbers, compared = torch.tensor(unread["numbers"], dtype=torch.float64), trainer.parameters.unsharder.sums
    sums = None if compared is None else numbers  # no weights differ, see `_is_sound`
    stragglers = None if unread["stragglers"] is None else dict(unread["stragglers"])
    return (
        PendingResult(numbers, unread["lr"], [], DeviceEvent(trainer.mesh.device), sums),
        stragglers,
        unread["details"],
    )


class CommonStep(NamedTuple):
    """Step that surviving ranks have in common."""

    step: int
    sums: Sequence[float] | None
    """Sums with which ranks that lack them finish its update."""
    ranks: set[int]
    """Ranks at this step, and those that can finish it."""
    writers: list[int]
    """Ranks that write its shards; a lost rank among them was the only holder of a shard."""


def common_step(reports: Iterable[Mapping[str, Any] | None], layout: Layout) -> CommonStep | None:
    """Return the newest step whose complete state survives, else the newest step; None: there is no state."""
    whole, found = [one for one in reports if one is not None], list[CommonStep]()
    for step in sorted({one["step"] for one in whole}, reverse=True):
        sums = next((one["sums"] for one in whole if one["step"] == step and one["sums"]), None)
        waiting = [one["rank"] for one in whole if one["step"] == step - 1 and one["waits"] and sums is not None]
        ranks = {*waiting, *(one["rank"] for one in whole if one["step"] == step)}
        found.append(CommonStep(step, sums, ranks, sorted(writers_of(layout, ranks))))
    return next((one for one in found if one.ranks.issuperset(one.writers)), found[0] if found else None)


def writers_of(layout: Layout, surviving: Set[int]) -> set[int]:
    """Return the first surviving holder of each shard, or its first holder if none survives."""
    writers = set[int]()
    for expert in {False, layout.splits_experts}:
        seen = set[int]()
        for rank in range(layout.world):
            if rank not in seen:
                ranks = holders(layout, rank, expert)
                seen.update(ranks)
                writers.add(next((one for one in ranks if one in surviving), ranks[0]))
    return writers


@contextmanager
def keeping_state(loop: Loop, folder: Path) -> Iterator[None]:
    """Give a `LostError` of the block the function that keeps the state of `loop` in the node's `folder`."""
    try:
        yield
    except LostError as error:
        error.keep_state = partial(keep_state, loop, folder)
        raise


def keep_state(loop: Loop, folder: Path, meet: Meet) -> None:
    """Write this rank's part of the state of the surviving ranks' newest common step."""
    trainer = loop.trainer
    rank, layout, device = trainer.mesh.rank, trainer.mesh.layout, trainer.mesh.device
    report, is_sound = None, loop.devices.found is None and _is_sound(loop.border.result, trainer)
    # A device executes updates that are already launched after NCCL has aborted the sums and gradients they use.
    if device.type == "cpu" and trainer.is_whole and is_sound:
        known = None if trainer.sums is None else trainer.sums.tolist()
        report = {"rank": rank, "step": trainer.step, "sums": known, "waits": trainer.can_finish_alone}
    epoch, reports = meet(report)
    if (common := common_step(reports, layout)) is None or rank not in common.ranks:
        return
    if common.step > trainer.step:
        trainer.mesh.groups.clear()  # nobody gathers the new weights: the state consists of shards
        loop.finish_step(trainer.update(sums=torch.tensor(common.sums, dtype=torch.float64, device=device)))
    if rank in common.writers:
        _write(loop, folder / f"kept-{epoch}-{common.step:08d}", common)


def _is_sound(result: UnreadResult | None, trainer: Trainer) -> bool:
    """Return whether handling the result needs nothing that is lost with this epoch: batches, norms, sums of bits."""
    if result is None:
        return True
    pending, *_ = result
    pending.end.synchronize()
    return math.isfinite(pending.numbers[1]) and trainer.read(pending).weight_sums is None


def _write(loop: Loop, path: Path, common: CommonStep) -> None:
    """Write this rank's part of a generation, or why there is none."""
    trainer, rank, border = loop.trainer, loop.trainer.mesh.rank, loop.border
    folder, written = partial_of(path), Written()
    lost = [one for one in common.writers if one not in common.ranks]
    problem = f"only {trainer.mesh.named(lost)} held part of it" if lost else ""
    try:
        with writing(folder):
            folder.mkdir(exist_ok=True)
        if not lost:
            written = write_own(path, rank, trainer.state(owned=common.ranks), lambda: None)
    except UserError as error:
        problem = str(error)
        for file in folder.glob(f"tensors-{rank:05d}-*"):
            file.unlink(missing_ok=True)
    facts = facts_of(loop.config, trainer, loop.samples, border.watch, border.position)
    part = {"step": trainer.step, "rank": rank, "writers": common.writers, "problem": problem, **asdict(written)}
    try:
        write_part(folder, {**part, "facts": {**facts, "unread": border.unread(trainer)}})
    except UserError as error:  # the next epoch reports that this part is missing
        log.warning("survivors: %s", problem or error)
