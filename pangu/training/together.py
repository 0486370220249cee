"""Work that only some processes do, with errors that all of them learn of: nobody waits for a process that gave up."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

import torch

from pangu.collectives.reduce import gather_objects, largest
from pangu.config.errors import UserError
from pangu.topology.mesh import Mesh

T = TypeVar("T")

INTERVAL_SECONDS = 1.0
"""Processes at long work tell each other that often that they are there; oftener if `parallel.timeout_s` is short."""


class StuckError(UserError):
    """The work of some process does not get on. All processes know it."""


def together(mesh: Mesh, action: Callable[[], T], *, here: bool) -> list[T | None]:
    """Run `action` on the processes where `here` is true; all return when all have finished.

    Returns:
        On every process what `action` returned on each, in rank order; None where it did not run.

    Raises:
        UserError: on every process, with the first message, if `action` raised one on any.
    """
    result, message = None, None
    if here:
        try:
            result = action()
        except UserError as error:
            message = str(error)
    answers = gather_objects((result, message), mesh.group("world"))
    messages = [text for _, text in answers if text is not None]
    if messages:
        raise UserError(messages[0])
    return [value for value, _ in answers]


def together_for_long(
    mesh: Mesh, doing: str, action: Callable[[Callable[[], None]], T], *, here: bool
) -> list[T | None]:
    """As `together`, of work that may take longer than `parallel.timeout_s` but has to get on within it. The processes
    tell each other all the while that they are there.

    Args:
        mesh: of a group that nothing else uses meanwhile, see `Mesh.background`.
        doing: the work in words, e.g. "writing".
        action: gets a function to call each time that it has got on.
        here: as in `together`.

    Raises:
        StuckError: on every process, naming the ranks whose action has not got on in time.
        RuntimeError: if a process does not answer, see `answered`.
    """
    world = mesh.group("world")
    work = _Work(action) if here else None
    busy = True
    while busy:
        if work is not None:
            work.join(min(INTERVAL_SECONDS, mesh.timeout_s / 10))
        mine = work is not None and work.is_alive()
        stuck = work is not None and mine and work.idle_s > mesh.timeout_s
        busy, somewhere = map(bool, largest(torch.tensor([mine, stuck], dtype=torch.int32), world).tolist())
        if somewhere:
            ranks = [str(rank) for rank, one in enumerate(gather_objects(stuck, world)) if one]
            raise StuckError(
                f"rank {', '.join(ranks)}: {doing} does not get on for more than {mesh.timeout_s:g} s "
                "(parallel.timeout_s); look at the disk and the network there"
            )
    return together(mesh, work.outcome if work is not None else lambda: None, here=here)


class _Work(Thread, Generic[T]):
    """An action that runs beside the thread that began it, and what came of it."""

    def __init__(self, action: Callable[[Callable[[], None]], T]) -> None:
        super().__init__(name="long work", daemon=True)
        self._action = action
        self._result: T | None = None
        self._error: BaseException | None = None
        self._got_on()
        self.start()

    def run(self) -> None:
        """The thread's work."""
        try:
            self._result = self._action(self._got_on)
        except BaseException as error:
            self._error = error

    def outcome(self) -> T | None:
        """What the action returned, or raised."""
        if self._error is not None:
            raise self._error
        return self._result

    @property
    def idle_s(self) -> float:
        """Seconds since it last got on."""
        return time.monotonic() - self._moved

    def _got_on(self) -> None:
        self._moved = time.monotonic()
