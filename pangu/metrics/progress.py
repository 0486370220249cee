"""Progress of file preparation: a bar at a terminal, and a callback for the caller."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Item = TypeVar("Item")


class ProgressBar(Progress):
    """Progress bar for each phase, if shown. `on_progress` is called on progress; its errors end the work."""

    def __init__(self, show: bool, on_progress: Callable[[], None] = lambda: None) -> None:
        """Prepare the bar; nothing is displayed unless `show`."""
        console = Console(stderr=True)
        bar = [BarColumn()] if console.is_terminal else []  # a file gets one plain line at the end
        columns = (TextColumn("{task.description}"), *bar, MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, disable=not show)
        self.on_progress = on_progress

    def start(self) -> None:
        """Show the bar; it is stopped at process exit at the latest, as a thread of it may never finish."""
        atexit.register(self.stop)
        super().start()

    def stop(self) -> None:
        """Stop updating the bar; a phase of unknown length ends with what was done, an idle one is not shown."""
        for task in self.tasks:
            if task.total is None:
                self.update(task.id, total=task.completed, visible=task.completed > 0)
        super().stop()
        atexit.unregister(self.stop)

    def through(self, items: Collection[Item], description: str) -> Iterable[Item]:
        """Yield the items; each advances the bar of a phase and counts as progress."""
        return self.track(with_progress(items, self.on_progress), len(items), description=description)


def with_progress(items: Iterable[Item], on_progress: Callable[[], None]) -> Iterator[Item]:
    """Yield the items, and call `on_progress` before each."""
    for item in items:
        on_progress()
        yield item
