"""Samples of a data-parallel rank in a step, and a loader that prefetches them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import count, islice
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
import torch

from pangu.config.data import PackingConfig
from pangu.data.batch import Batch, Sample, batch_of
from pangu.data.stream import Stream
from pangu.topology.copy_stream import CopyStream


class LoaderStage(NamedTuple):
    """Size of the global batches of some steps."""

    global_size: int
    parts: int = 1
    """Equal sequences into which each sample of the stream is cut; divides `global_size`."""
    shares: tuple[int, ...] = ()
    """Micro-batches of each data-parallel rank; empty: equal numbers, see `step_samples`."""


class _Loaded(NamedTuple):
    """Prefetched micro-batches of a step."""

    batches: list[Batch]
    arrival: torch.Event | None  # of the micro-batches on the device
    position: dict[str, Any] | None  # of the stream, after these micro-batches
    padding: float | None


def step_samples(
    consumed: int, global_size: int, micro_size: int, rank: int, size: int, shares: Sequence[int] = ()
) -> list[range]:
    """Return the global sample indices of each micro-batch of data-parallel rank `rank` of `size` in the next step.

    The `global_size` samples after the `consumed` ones go to the ranks in turn, by micro-batches, so neither `size` nor
    `micro_size` changes the sequence of global batches. The last ranks may get one micro-batch less than the first.
    With `shares`, each rank's number of micro-batches, a rank that has all of its own is passed over.
    Raises ValueError if `micro_size` does not divide `global_size`, or a rank would get none.
    """
    if global_size % micro_size or global_size < micro_size * size:
        raise ValueError(
            f"a global batch of {global_size} cannot be divided among {size} ranks in micro-batches of {micro_size}"
        )
    total = global_size // micro_size
    assert not shares or sum(shares) == total
    turns = (other for turn in count() for other in range(size) if not shares or turn < shares[other])
    starts = range(consumed, consumed + global_size, micro_size)
    owners = zip(starts, islice(turns, total), strict=True)
    return [range(start, start + micro_size) for start, owner in owners if owner == rank]


class Loader(AbstractContextManager["Loader"]):
    """Loader of a data-parallel rank's micro-batches; a thread prefetches the next step during computation."""

    def __init__(
        self,
        stream: Stream,
        packing: PackingConfig,
        global_size: int,
        micro_size: int,
        rank: int,
        size: int,
        device: torch.device | None = None,
        stage_at: Callable[[int], LoaderStage] | None = None,
    ) -> None:
        """Create a loader that copies micro-batches to `device`; None: they stay in host memory.

        `stage_at` returns the size of the batch of each step; None: always `global_size`.
        """
        self._stream, self._packing = stream, packing
        self._sizes = (micro_size, rank, size)
        self._stage_at = stage_at or (lambda _: LoaderStage(global_size))
        self._last: tuple[int, Sample] | None = None
        """Sample that was read last, whose other parts may follow."""
        self._device = device or torch.device("cpu")
        self._copies = CopyStream(self._device)
        # A new thread would use the first device
        start = None if self._device.type == "cpu" else partial(torch.accelerator.set_device_index, self._device)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader", initializer=start)
        self.waited_s = 0.0
        """Seconds that the last `micro_batches` took: the exposed time, which prefetching did not hide."""
        self.position: dict[str, Any] | None = None
        """Position from which the stream resumes after the micro-batches returned last; see `Stream.position`."""
        self.padding: float | None = None
        """Padding share of the tokens of that global batch, on the first rank, if documents are packed."""
        self._ahead: tuple[tuple[int, LoaderStage], Future[_Loaded]] | None = None

    def micro_batches(self, consumed: int, step: int = 0) -> list[Batch]:
        """Return the micro-batches of step `step`, after `consumed` samples. Raises what reading them raised."""
        began = time.perf_counter()
        stage = self._stage_at(step)
        if self._ahead is None or self._ahead[0] != (consumed, stage):
            self._abandon()
            self._read(consumed, stage)
        assert self._ahead is not None
        batches, arrival, self.position, self.padding = self._ahead[1].result()
        self._copies.wait(arrival)
        self.waited_s = time.perf_counter() - began
        self._read(consumed + stage.global_size // stage.parts, self._stage_at(step + 1))
        return batches

    def close(self) -> None:
        """End the thread and close the stream."""
        self._thread.shutdown(cancel_futures=True)
        self._abandon()
        self._stream.close()

    def _abandon(self) -> None:
        """Make computation wait for copies that nobody asked for: it may be given their memory."""
        reading, self._ahead = None if self._ahead is None else self._ahead[1], None
        if reading is not None and not reading.cancel() and reading.exception() is None:
            self._copies.wait(reading.result().arrival)

    def _read(self, consumed: int, stage: LoaderStage) -> None:
        self._ahead = ((consumed, stage), self._thread.submit(self._load, consumed, stage))

    def _load(self, consumed: int, stage: LoaderStage) -> _Loaded:
        micro_size, _, size = self._sizes
        batches = [
            batch_of([self._sequence(index, stage.parts) for index in indices], indices, self._packing)
            for indices in step_samples(consumed * stage.parts, stage.global_size, *self._sizes, stage.shares)
        ]
        if not stage.shares and len(batches) * micro_size * size < stage.global_size:
            # all ranks meet in the same collectives; a repeated batch changes no maximum, as of fp8 or attention logits
            batches.append(batches[-1].uncounted())
        elif stage.global_size % (micro_size * size) and batches[-1].padding is None:
            # experts have room for padding on all ranks or on none
            batches[-1] = replace(batches[-1], padding=torch.zeros_like(batches[-1].tokens, dtype=torch.bool))
        moved = [batch.to(self._device, self._copies.after_computation) for batch in batches]
        padding = self._padding(consumed, stage.global_size, batches[0].tokens.shape[1])
        return _Loaded(moved, self._copies.record(), self._stream.position, padding)

    def _sequence(self, index: int, parts: int) -> Sample:
        """Return sequence `index`, of samples that are cut into `parts`; neighbors share the token at the cut."""
        if parts == 1:
            return self._stream[index]
        number, part = divmod(index, parts)
        if self._last is None or self._last[0] != number:
            self._last = number, self._stream[number]
        tokens = self._last[1]
        assert isinstance(tokens, np.ndarray)
        length = (len(tokens) - 1) // parts
        return tokens[part * length : (part + 1) * length + 1]

    def _padding(self, consumed: int, size: int, sequence: int) -> float | None:
        _, rank, _ = self._sizes
        if self._packing.method == "concat" or rank:
            return None
        return sum(map(self._stream.padding, range(consumed, consumed + size))) / (size * sequence)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close the loader."""
        self.close()
