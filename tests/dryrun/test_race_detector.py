"""The log of a device's streams has one reader at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from pangu.dryrun.device import FakeDevice, StreamEntry
from pangu.dryrun.memory import Access, LiveStorage, RaceDetector


class Log:
    """A device with two streams, whose operations are read once."""

    def __init__(self) -> None:
        self.entries: list[StreamEntry] = []

    def current_stream(self) -> int:
        return 0

    def log(self) -> Iterator[StreamEntry]:
        while self.entries:
            yield self.entries.pop(0)


def test_buffers_that_are_collected_late_take_no_entries_from_the_next_detector() -> None:
    """Garbage of one dry run may be collected in the next one, between a wait and what it orders."""
    device: Any = Log()
    first, second = (RaceDetector(cast(FakeDevice, device)) for _ in range(2))
    first.close()
    buffer = LiveStorage("parameters", None, 0)
    second.access(0, set(), {buffer}, lambda: "here")
    device.entries = [StreamEntry(0, 1, 0), StreamEntry(1, 1, 5)]  # stream 5 waits for stream 0
    first.free(LiveStorage("parameters", None, 0, written=Access(0, 1, "before")))
    second.access(5, {buffer}, set(), lambda: "there")
    assert not second.races
