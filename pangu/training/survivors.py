"""State that the ranks of an epoch keep when another one is lost (`scripts/launch.py --spares`).

Gradients change no weights before norm and loss are summed, so each rank that is left has a whole step. Ranks may
differ by one, as only some have received that sum. Then those that have it tell the others, which finish the update:

    rank 0 | gradients 8 | sums | update 8 | gradients 9 ...   is at step 8, tells its sums
    rank 1 | gradients 8 | sums | x                            is lost
    rank 2 | gradients 8 | sums ...                            is at step 7, makes update 8 with these sums

What is left is written into the memory of nodes, each shard by the first rank that has it, and is the newest generation
there (`checkpoint.memory`) if each shard of the lost rank is held by another one as well.
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
from pangu.zero.norms import holders

if TYPE_CHECKING:
    from pangu.training.loop import Loop

log = logging.getLogger("pangu")

Meet = Callable[[Any], tuple[str, list[Any]]]
"""Function that exchanges reports with the ranks that are left; it returns a name of the epoch, too (`Member.meet`)."""


UnreadResult = tuple[PendingResult, dict[int, float] | None, dict[str, Any]]
"""Result of a step, its stragglers, and the data part of its record."""


class Border(NamedTuple):
    """State of a loop between two steps, as far as later work changes it."""

    result: UnreadResult | None
    """Result of the step before; None: it was read, and needs no record."""
    watch: Mapping[str, Any]
    """State of `SpikeDetector` before that result."""
    position: Mapping[str, Any] | None
    """Position of the data source after the step before, or earlier."""
    began: DeviceEvent | None
    """Beginning of the step before, and the seconds since then that belong to no step."""
    outside_s: float

    def unread(self) -> dict[str, Any] | None:
        """Return the result for the index of a checkpoint: it may not be recorded yet, nor what is due then be done."""
        if self.result is None or self.began is None:
            return None
        pending, stragglers, details = self.result
        seconds = pending.end.seconds_since(self.began) - self.outside_s
        return {
            "numbers": pending.numbers.tolist(),
            "lr": pending.lr,
            "seconds": seconds,
            "stragglers": None if stragglers is None else [*stragglers.items()],
            "details": details,
        }


def result_of(unread: Mapping[str, Any], trainer: Trainer) -> UnreadResult:
    """Return the result of which `Border.unread` has told."""
    numbers, compared = torch.tensor(unread["numbers"], dtype=torch.float64), trainer.parameters.unsharder.sums
    sums = None if compared is None else numbers  # no weights differ, see `_is_sound`
    stragglers = None if unread["stragglers"] is None else dict(unread["stragglers"])
    return (
        PendingResult(numbers, unread["lr"], [], DeviceEvent(trainer.mesh.device), sums),
        stragglers,
        unread["details"],
    )


class CommonStep(NamedTuple):
    """Step at which ranks that are left can meet."""

    step: int
    sums: Sequence[float] | None
    """Sums with which ranks that wait for them make its update."""
    ranks: set[int]
    """Ranks that are there, or get there."""
    writers: list[int]
    """Ranks that write its shards together; one that is lost held some alone."""


def common_step(reports: Iterable[Mapping[str, Any] | None], layout: Layout) -> CommonStep | None:
    """Return the newest step that the ranks which are left hold together, else the newest one; None: nobody has any."""
    whole, found = [one for one in reports if one is not None], list[CommonStep]()
    for step in sorted({one["step"] for one in whole}, reverse=True):
        sums = next((one["sums"] for one in whole if one["step"] == step and one["sums"]), None)
        waiting = [one["rank"] for one in whole if one["step"] == step - 1 and one["waits"] and sums is not None]
        ranks = {*waiting, *(one["rank"] for one in whole if one["step"] == step)}
        found.append(CommonStep(step, sums, ranks, sorted(writers_of(layout, ranks))))
    return next((one for one in found if one.ranks.issuperset(one.writers)), found[0] if found else None)


def writers_of(layout: Layout, left: Set[int]) -> set[int]:
    """Return the first of the ranks `left` that holds each shard, or the first of all where none of them does."""
    writers = set[int]()
    for expert in {False, layout.splits_experts}:
        seen = set[int]()
        for rank in range(layout.world):
            if rank not in seen:
                ranks = holders(layout, rank, expert)
                seen.update(ranks)
                writers.add(next((one for one in ranks if one in left), ranks[0]))
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
    """Keep the state of the newest step that the ranks which are left have in common, as far as this one holds it."""
    trainer = loop.trainer
    rank, layout, device = trainer.mesh.rank, trainer.mesh.layout, trainer.mesh.device
    report = None
    # A device executes updates that are already launched after NCCL has aborted the sums and gradients they use.
    if device.type == "cpu" and trainer.is_whole and _is_sound(loop.border.result, trainer):
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
    """Return whether no result has to be looked at with what only this epoch has: batches, norms and sums of bits."""
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
    problem = f"only {trainer.mesh.named(lost)} held a part of it" if lost else ""
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
        write_part(folder, {**part, "facts": {**facts, "unread": border.unread()}})
    except UserError as error:  # the next epoch reports that this part is missing
        log.warning("survivors: %s", problem or error)
