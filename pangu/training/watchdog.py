"""Watchdog: report which ranks hang, and where, before a device backend aborts the process without a message."""

from __future__ import annotations

import faulthandler
import json
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import TracebackType
from typing import Any, NamedTuple, Self

from pangu.collectives.agreement import FAILED, absent, answer_of_store
from pangu.common.errors import STORE_SECONDS, LostError, printable
from pangu.topology.backends import abort_groups
from pangu.topology.mesh import Mesh, is_silence
from pangu.training.step import Trainer

BEAT_SECONDS = 5.0
"""Interval of a process's messages to the store; less if `parallel.timeout_s` is short."""
PATIENCE = 0.7
"""Fraction of `parallel.timeout_s` without progress after which a process reports, before the timeout ends it."""
LOOK = 3
"""Message intervals after which a process without a message is unresponsive."""
NAMED_RANKS = 8
"""Largest number of ranks named in a line."""


class Place(NamedTuple):
    """Position of a process in its run; a different one is progress."""

    step: int
    words: str
    began: float = 0.0
    """Start of the current action, on any clock."""


STARTING = Place(-1, "before the first step")


def place_of(trainer: Trainer) -> Place:
    """Return the position of a trainer."""
    runner, words = trainer.runner, f"step {trainer.step + 1}, {trainer.doing}"
    if trainer.doing == "forward and backward" and runner.action is not None:
        words += f", {runner.action}"
    return Place(trainer.step, words, runner.began)


def _key(step: int) -> str:
    return f"speaks-{step}"


class Watchdog:
    """Thread that reports hanging ranks; training itself does nothing for it.

    It sends the position of this process to the store every few seconds. When that has not changed for most of
    `parallel.timeout_s`, it writes the stacks of this process to `stacks/rank-N.txt` of the run folder, and the first
    process to which that happens reports the positions of all ranks, the furthest behind first, also to
    `stacks/where-HOST.txt`; if the store does not answer, there is one file per host. It ends nothing that makes no
    progress, which may still finish. But where this process fails, the other ranks hear of it and abort their
    communicators. Use it as a context manager.
    """

    def __init__(self, mesh: Mesh, folder: Path, place: Callable[[], Place] = lambda: STARTING) -> None:
        """Prepare the thread; `place` returns the current position."""
        self._mesh, self._folder, self._place = mesh.background(), folder, place
        self._interval_s = min(BEAT_SECONDS, mesh.timeout_s / 20)
        self._began_s = time.monotonic()
        """Time when this process met the others, about the same moment for all."""
        self._ended = Event()
        self._reported_in: int | None = None
        """Step in which this process reports the positions of all."""
        self._thread = Thread(target=self._watch, name="watchdog", daemon=True)

    def follow(self, trainer: Trainer) -> None:
        """Watch the position of a trainer from now on."""
        self._place = partial(place_of, trainer)

    def set_activity(self, words: str = STARTING.words, progress: int = 0) -> None:
        """Set the activity before the first step, and the amount of its progress."""
        self._place = lambda: Place(STARTING.step, words, progress)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        """Stop the thread; after an error, unless it is that another rank is lost, tell the other ranks."""
        self._ended.set()
        self._thread.join(STORE_SECONDS)  # Python ends with an abort if a thread is in the store then
        is_lost = isinstance(error, LostError) or (isinstance(error, RuntimeError) and is_silence(error))
        if (store := self._mesh.store) is not None and error is not None and not is_lost:
            with suppress(RuntimeError):
                answer_of_store(STORE_SECONDS, lambda: store.set(FAILED, str(self._mesh.rank)))

    def _watch(self) -> None:
        store = self._mesh.store
        assert store is not None
        place, since_s, has_spoken = self._place(), time.monotonic(), False
        while not self._ended.wait(self._interval_s):
            if (now := self._place()) != place:
                place, since_s, has_spoken = now, time.monotonic(), False
            still_s = time.monotonic() - since_s
            try:
                if self._reported_in is not None and not has_spoken:  # it continued: a later wait is a new one
                    store.set(_key(self._reported_in), "0")
                    self._reported_in = None
                store.set(f"beat-{self._mesh.rank}", json.dumps([self._age_s(), still_s, place.step, place.words]))
                if store.check([FAILED]):
                    abort_groups()
                    self._ended.set()
                if still_s > PATIENCE * self._mesh.timeout_s and not has_spoken:
                    has_spoken = True
                    self._report(place)
            except RuntimeError:  # the store is gone, and with it the run, or its epoch (`topology.supervisor`)
                abort_groups()
                return

    def _report(self, place: Place) -> None:
        """Write the stacks; one process, the one that has waited longest, reports for all.

        The first rank may be the one that is stopped, and the backend ends the longest waiting one first.
        """
        store = self._mesh.store
        assert store is not None
        self._leave(f"rank-{self._mesh.rank}.txt", f"{self._mesh.name}: {place.words}", stacks=True)
        try:
            if answer_of_store(STORE_SECONDS, lambda: store.add(_key(place.step), 1)) > 1:
                return
            self._reported_in, is_quiet = place.step, False
            text = answer_of_store(LOOK * BEAT_SECONDS + STORE_SECONDS, self._all_places)
        except RuntimeError:  # nobody can be asked
            if self._ended.is_set():
                return
            server = "the launcher" if self._mesh.store_rank is None else self._mesh.named([self._mesh.store_rank])
            text = f"{self._mesh.name}: {place.words}: no progress, and {server} does not respond"
            is_quiet = self._mesh.rank > NAMED_RANKS  # every process comes here
        if not is_quiet:
            with suppress(OSError):  # a log on a full disk
                print(f"\n{printable(text)}", file=sys.stderr, flush=True)
        self._leave(f"where-{socket.gethostname()}.txt", text)

    def _leave(self, name: str, text: str, stacks: bool = False) -> None:
        """Write a file into `stacks/`, optionally with this process's stacks, which otherwise go to standard error."""
        path = self._folder / "stacks" / name
        try:
            path.parent.mkdir(exist_ok=True)
            with path.open("w") as file:
                print(text, file=file, flush=True)
                if stacks:
                    faulthandler.dump_traceback(file)
        except OSError as error:
            with suppress(OSError):
                if stacks:
                    print(f"\n{printable(text)} (cannot write {path}: {error.strerror})", file=sys.stderr, flush=True)
                    faulthandler.dump_traceback(sys.stderr)

    def _all_places(self) -> str:
        """Return the positions of all processes: unresponsive first, then those behind, then longest waiting."""
        before = self._beats()
        self._ended.wait(LOOK * self._interval_s)
        ranks: dict[tuple[int, str], list[int]] = {}
        longest: dict[tuple[int, str], float] = {}
        beats = self._beats()
        for rank in range(self._mesh.layout.world):
            age_s, still_s, step, words = beats.get(rank, [0.0, 0.0, 0, ""])
            is_silent = before.get(rank, [0.0])[0] == age_s and rank != self._mesh.rank
            place = (step, words)
            if is_silent:
                place, still_s = (-2, "not responding, stopped or exited"), self._age_s() - age_s
            ranks.setdefault(place, []).append(rank)
            longest[place] = max(longest.get(place, 0.0), still_s)
        places = sorted(ranks, key=lambda place: (place[0], -longest[place]))
        limit_s, named = self._mesh.timeout_s, partial(self._mesh.named, most=NAMED_RANKS)
        return "\n".join(
            [
                f"{self._mesh.name}: no progress for {PATIENCE * limit_s:g} s (parallel.timeout_s = {limit_s:g}); "
                f"stacks are in {self._folder / 'stacks'}; ranks by place, starting with those that others wait for:",
                *(f"  {named(ranks[place])}: {place[1]}, for {longest[place]:.1f} s" for place in places),
            ]
        )

    def _age_s(self) -> float:
        """Return the seconds since this process met the others: clocks of machines differ."""
        return time.monotonic() - self._began_s

    def _beats(self) -> dict[int, list[Any]]:
        """Return age of the last message, seconds in one place, step and activity of each rank that has started."""
        store, keys = self._mesh.store, [f"beat-{rank}" for rank in range(self._mesh.layout.world)]
        assert store is not None
        missing = set(absent(store, keys))
        begun = [rank for rank, key in enumerate(keys) if key not in missing]
        return dict(zip(begun, map(json.loads, store.multi_get([keys[rank] for rank in begun])), strict=True))
