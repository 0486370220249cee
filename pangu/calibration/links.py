"""Times of collectives and messages between processes, and how much they and computation slow each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pangu.calibration.clock import Clock
from pangu.collectives.point_to_point import Channels
from pangu.collectives.reduce import start_all_gather, start_reduce_scatter
from pangu.config.cluster import ClusterConfig, LinkConfig
from pangu.planning.cost import collective_seconds
from pangu.schedule.groups import Group
from pangu.schedule.spans import Collective
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh, exchanges
from pangu.topology.recorder import AxisGroup

_SIZES = {False: (2**16, 2**20, 2**24, 2**27, 2**29), True: (2**12, 2**16, 2**18, 2**20, 2**22, 2**24)}
"""Bytes of messages, by whether the device is the host."""
_LONG = 2**22
"""Bytes from which on a message is repeated less often."""
_BEFORE = 256
"""Side of the square matrices that a host multiplies before a message."""


def measure_link(
    clock: Clock, groups: Mapping[int, dist.ProcessGroup | None], base: ClusterConfig, quick: bool
) -> LinkConfig:
    """Return times of collectives of groups by their size, and latency and bandwidth of the largest group.

    Both are least squares over sizes and kinds of collectives, on relative errors.
    """
    samples: dict[tuple[str, int, int], Callable[[], float]] = {}
    for count in _SIZES[clock.on_host][1 if quick else 0 :: 2 if quick else 1]:
        for size, group in groups.items():
            samples |= _collectives(clock, count, size, group or dist.group.WORLD)
    times = {which: max(1e-6, taken) for which, taken in clock.in_turns(samples, often=2).items()}
    rows = [
        [term / taken for term in _terms(kind, nbytes, size, base)]
        for (kind, size, nbytes), taken in times.items()
        if size == max(groups)
    ]
    measured = tuple((*which, round(1e6 * taken, 1)) for which, taken in times.items())
    return LinkConfig(*latency_and_bandwidth(np.array(rows)), measured)


def latency_and_bandwidth(table: np.ndarray) -> tuple[float, float]:
    """Return microseconds and GB/s from rows of `_terms` over the measured seconds.

    Bytes take at least half the time of the message with the highest rate: on a busy machine large messages may seem to
    take no longer than small ones, and the bandwidth would be infinite.
    """
    latency, inverse = np.linalg.lstsq(table, np.ones(len(table)), rcond=None)[0]
    return max(0.1, float(latency)), float(1 / max(inverse, 0.5 / table[:, 1].max()))


def _collectives(
    clock: Clock, nbytes: int, size: int, group: dist.ProcessGroup | None
) -> dict[tuple[str, int, int], Callable[[], float]]:
    """Return samples by kind, ranks and bytes.

    On a host a collective begins after some computing, as in a step: processes that share cores do not all come at
    once.
    """
    buffer = torch.zeros(nbytes // 4 // size * size, device=clock.device)
    matrix = torch.randn(_BEFORE, _BEFORE)
    before = (lambda: matrix @ matrix) if clock.on_host else None
    return {
        (kind, size, buffer.nbytes): clock.meeting(action, 3 if nbytes >= _LONG else 10, before)
        for kind, action in _actions(buffer, group, size).items()
    }


def _terms(kind: str, nbytes: int, size: int, base: ClusterConfig) -> tuple[float, float]:
    """Return the seconds of a collective for each microsecond of latency, and for each nanosecond of a byte."""
    cluster = replace(base, inside=LinkConfig(1.0, 1.0))
    alone = collective_seconds(Collective(kind, "tensor", 0.0), Group(size, size), cluster)  # type: ignore[arg-type]
    whole = collective_seconds(Collective(kind, "tensor", nbytes), Group(size, size), cluster)  # type: ignore[arg-type]
    return alone, whole - alone


def _actions(buffer: Tensor, group: Any, size: int) -> dict[str, Callable[[], object]]:
    """Return the collectives of layers and replicas on a buffer."""
    shard = torch.zeros_like(buffer[: buffer.numel() // size])
    along = AxisGroup(group, "replicas", exchanges=exchanges(buffer.device))
    return {
        "all_reduce": lambda: dist.all_reduce(buffer, group=group),
        "all_gather": lambda: start_all_gather(buffer, shard, along).wait(),
        "reduce_scatter": lambda: start_reduce_scatter(shard, buffer, along).wait(),
    }


def measure_messages(clock: Clock, world: int, quick: bool) -> list[tuple[str, int, int, float]]:
    """Return kind, ranks, bytes and microseconds of messages between pipeline stages: each even rank and the next one.

    A message takes half the time there and back, and on a host half of the processor's, all threads together, for one
    sent and one received.
    """
    mesh = Mesh.connect(Layout(pipeline=world), clock.device)
    evens = range(0, world - 1, 2)
    ways = [("activation", rank, rank + 1) for rank in evens] + [("gradient", rank + 1, rank) for rank in evens]
    channels, rank = Channels(mesh, ways), dist.get_rank()

    def there_and_back(tensor: Tensor) -> None:
        if rank % 2:
            channels.receive("activation", [tuple(tensor.shape)], tensor.dtype, rank - 1).wait()
            channels.send("gradient", [tensor], rank - 1)
        elif rank + 1 < world:
            channels.send("activation", [tensor], rank + 1)
            channels.receive("gradient", [tuple(tensor.shape)], tensor.dtype, rank + 1).wait()

    samples: dict[tuple[str, int], Callable[[], float]] = {}
    for nbytes in _SIZES[clock.on_host][1 if quick else 0 :: 2 if quick else 1]:
        action = partial(there_and_back, torch.zeros(nbytes // 4, device=clock.device))
        samples["send", nbytes] = clock.meeting(action, 5)
        if clock.on_host:
            samples["message", nbytes] = clock.working(action, 5)
    taken = clock.in_turns(samples, often=2)
    return [(kind, 2, nbytes, round(1e6 * seconds / 2, 1)) for (kind, nbytes), seconds in taken.items()]


def measure_overlap(clock: Clock, dtype: torch.dtype) -> float:
    """Return the factor by which a matmul and an all-reduce slow each other."""
    side = 512 if clock.on_host else 8192
    matrix = torch.randn(side, side, device=clock.device, dtype=dtype)
    buffer = torch.zeros(2**20 if clock.on_host else 2**26, device=clock.device)

    def both() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        matrix @ matrix
        assert work is not None
        work.wait()

    actions: dict[str, Callable[[], object]] = {
        "matmul": lambda: matrix @ matrix,
        "reduction": lambda: dist.all_reduce(buffer),
        "both": both,
    }
    taken = clock.in_turns({name: clock.meeting(action, 3) for name, action in actions.items()}, often=2)
    matmul, reduction, together = taken.values()
    # max + (overlap - 1) x min: see `planning.cost`
    return 1 + min(1.0, max(0.0, together - max(matmul, reduction)) / min(matmul, reduction))
