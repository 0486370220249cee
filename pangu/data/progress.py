"""The progress of making files: a bar for people, a call for whoever waits."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")


class ProgressBar(Progress):
    """A bar for each phase, if it is to be shown. `note_progress` is called when the work has got on; what it raises
    ends the work."""

    def __init__(self, show: bool, note_progress: Callable[[], None] = lambda: None) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=Console(stderr=True), disable=not show)
        self.note_progress = note_progress

    def start(self) -> None:
        """Show it, until the process ends at most, which may leave a thread behind that never comes to the end."""
        atexit.register(self.stop)
        super().start()

    def stop(self) -> None:
        super().stop()
        atexit.unregister(self.stop)

    def through(self, items: Collection[Item], description: str) -> Iterable[Item]:
        """The items, each of which moves the bar of a phase and is progress."""
        return self.track(noted(items, self.note_progress), len(items), description=description)


def noted(items: Iterable[Item], note_progress: Callable[[], None]) -> Iterator[Item]:
    """The items; each that is taken is progress."""
    for item in items:
        note_progress()
        yield item
