"""The devices that a run is planned for: what they compute, hold and send a second.

A file of configs/cluster/ says of each figure where it is from; `tools/calibrate.py` writes one of the user's own
machine. Training reads none of it: only what plans does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pangu.config.bounds import Bounds, Count, Filename, NotNegative, Positive
from pangu.config.build import read
from pangu.config.errors import ConfigError

Part = Annotated[float, Bounds(above=0, most=1)]
"""What is reached of a peak."""


@dataclass(frozen=True)
class MatmulConfig:
    """How fast a matrix product of some shape is: peak x `efficiency`, less what small and crooked shapes lose."""

    tflops: Positive
    """Peak rate in the 16-bit formats (dense), 10^12 operations a second."""
    tflops_fp32: Positive
    """Peak rate in fp32."""
    efficiency: Part
    """Share of the peak that large, well-shaped products reach."""
    depth: NotNegative
    """Length of the inner dimension that takes as long as starting and ending a tile: k is charged as k + `depth`."""
    waves: NotNegative
    """Waves of tiles lost to the last one, which is not full: w waves are charged as w + `waves`."""
    alignment: NotNegative
    """Share of time that a dimension of the weights adds that is not a multiple of 64 elements."""
    unaligned: Annotated[float, Bounds(least=1)]
    """Factor by which products are slower with a dimension that is no multiple of 8: tensor cores cannot load it."""
    attention: Part
    """Share of the peak that the products of fused attention kernels reach."""
    units: Count
    """Multiprocessors (cube cores): tiles of 128 x 128 computed at a time."""
    measured: tuple[tuple[Positive, Positive, Positive, Positive], ...]
    """Products that were timed: [rows, columns, inner dimension, share of the peak]. A shape near one of them takes its
    share; others are computed from the numbers above, which were fitted to these."""
    tflops_fp8: Positive | None = None
    """Peak rate in fp8 (dense), of which products reach the same share; null: there is none."""


@dataclass(frozen=True)
class DeviceMemoryConfig:
    """A device's own memory."""

    gib: Positive
    """GiB on a device."""
    context_gib: NotNegative
    """Of these the device's context (loaded kernels, driver)."""
    workspace_gib: NotNegative
    """Of these workspaces of libraries, and what the allocator cannot use."""
    communicator_gib: NotNegative
    """Of these the buffers of each group of processes that sends."""
    fragmentation: NotNegative
    """Part of the activations that comes on top: holes between blocks, copies for messages."""
    gb_s: Positive
    """Peak bandwidth, 10^9 bytes a second."""
    efficiency: Part
    """Share of the bandwidth that operations on whole tensors reach."""

    def overhead_gib(self, communicators: int) -> float:
        """Return the GiB that hold no tensors: context, workspaces, and buffers of the groups that send."""
        return self.context_gib + self.workspace_gib + communicators * self.communicator_gib


@dataclass(frozen=True)
class LinkConfig:
    """A level of links: a message of n bytes takes latency_us + n / gb_s."""

    latency_us: NotNegative
    """Microseconds of a message however short."""
    gb_s: Positive
    """10^9 bytes a second that a device sends while it receives as many."""
    measured: tuple[tuple[str, Count, Positive, Positive], ...] = ()
    """Collectives that were timed: [kind, ranks, bytes of the whole tensor, microseconds]. One of as many ranks takes a
    time between those of the nearest sizes; others are computed from the numbers above."""


@dataclass(frozen=True)
class PriceConfig:
    """What a device uses up."""

    watts: NotNegative
    """Power of a device with its share of host, network and cooling."""
    per_hour: NotNegative
    """Money for a device and hour, in any currency; 0: not told."""


@dataclass(frozen=True)
class ClusterConfig:
    """Equal devices in nodes of equal size."""

    name: Filename
    """What reports call it."""
    devices: Count
    """Devices that a plan may use."""
    node: Count
    """Devices of a node, all joined by links of the fastest level."""
    nics: Count
    """Network interfaces of a node, which its devices share."""
    matmul: MatmulConfig
    """Matrix products."""
    memory: DeviceMemoryConfig
    """Device memory."""
    inside: LinkConfig
    """Links inside a node."""
    between: LinkConfig
    """Links between nodes, `gb_s` of one of the `nics`."""
    launch_us: NotNegative
    """Microseconds between two kernels that a host starts: what a step of tiny kernels takes of each."""
    message_us: NotNegative
    """Microseconds of the host for a message between pipeline stages."""
    step_us: NotNegative
    """Microseconds of a step that do not depend on its size: the host's part of the update, the loss read back."""
    overlap: Annotated[float, Bounds(least=1)]
    """Factor by which computing slows while communication runs beside it, and the other way round."""
    host_gb_s: Positive
    """10^9 bytes a second between a device and host memory, in each direction."""
    price: PriceConfig
    """Power and money."""
    queued: bool = True
    """Kernels wait in a queue of the device while the host starts others; false: the device is the host, which starts a
    kernel after it has computed the one before."""
    alone: Annotated[float, Bounds(least=1)] = 1.0
    """Factor by which a device is faster while the others of its node are idle: processes that share cores."""
    host_memory_gb_s: Positive = 40.0
    """10^9 bytes a second that the host reads and writes for one of its devices while all want it."""


def cluster_in(values: Mapping[str, object], path: str = "cluster") -> ClusterConfig:
    """Return the cluster of a configuration's group `path`. Raises ConfigError for all that is wrong with it."""
    cluster, problems = read(ClusterConfig, values, path)
    if problems:
        raise ConfigError(problems)
    return cluster
