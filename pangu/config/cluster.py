"""Description of the devices that a run is planned for: compute rates, memory and bandwidths.

A file of configs/cluster/ gives the source of each figure; `tools/calibrate.py` writes one for your own machine,
for `cluster=FILE.yaml`. Only planning reads it, training does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pangu.config.bounds import Bounds, Count, Filename, NotNegative, Positive
from pangu.config.build import build

Part = Annotated[float, Bounds(above=0, most=1)]
"""Fraction of a peak that is reached."""


@dataclass(frozen=True)
class MatmulConfig:
    """Cost model of matmuls: peak x `efficiency`, less the losses of small and unaligned shapes."""

    tflops: Positive
    """Peak rate in 16-bit formats (dense), 10^12 operations per second."""
    tflops_fp32: Positive
    """Peak rate in fp32, 10^12 operations per second."""
    efficiency: Part
    """Fraction of the peak that large, well-shaped matmuls reach."""
    depth: NotNegative
    """Inner-dimension length that costs as much as starting and finishing a tile: k is charged as k + `depth`."""
    waves: NotNegative
    """Waves of tiles lost to the last, partly filled one: w waves are charged as w + `waves`."""
    alignment: NotNegative
    """Fraction of time added by a weight dimension that is not a multiple of 64 elements."""
    unaligned: Annotated[float, Bounds(least=1)]
    """Slowdown factor of matmuls with a dimension that is not a multiple of 8, which tensor cores cannot load."""
    attention: Part
    """Fraction of the peak that the matmuls in fused attention kernels reach."""
    units: Count
    """Multiprocessors (cube cores) of a device: tiles of 128 x 128 computed at a time."""
    measured: tuple[tuple[Positive, Positive, Positive, Positive], ...]
    """Measured matmuls: [rows, columns, inner dimension, fraction of the peak]. A shape near one of them uses its
    fraction; others are computed from the numbers above, which were fitted to these."""
    tflops_fp8: Positive | None = None
    """Peak rate in fp8 (dense), to which the same `efficiency` applies, 10^12 operations per second; null: no fp8."""
    bf16: bool = True
    """Hardware support for bf16; a plan in bf16 for devices without it logs a warning."""


@dataclass(frozen=True)
class DeviceMemoryConfig:
    """Memory of a device."""

    gib: Positive
    """Device memory, GiB."""
    context_gib: NotNegative
    """GiB taken by the device context (loaded kernels, driver)."""
    workspace_gib: NotNegative
    """GiB taken by library workspaces and by memory the allocator cannot use."""
    communicator_gib: NotNegative
    """GiB taken by the buffers of each communicator."""
    fragmentation: NotNegative
    """Fraction added to the activations for fragmentation and for copies of messages."""
    gb_s: Positive
    """Peak bandwidth, 10^9 bytes per second."""
    efficiency: Part
    """Fraction of the bandwidth that elementwise operations reach."""

    def overhead_gib(self, communicators: int) -> float:
        """Return the GiB that hold no tensors: context, workspaces, and buffers of the communicators."""
        return self.context_gib + self.workspace_gib + communicators * self.communicator_gib


@dataclass(frozen=True)
class LinkConfig:
    """Links of one level: a message of n bytes takes latency_us + n / gb_s."""

    latency_us: NotNegative
    """Latency of a message, microseconds."""
    gb_s: Positive
    """Bandwidth per device and direction, both directions at once, 10^9 bytes per second."""
    measured: tuple[tuple[str, Count, Positive, Positive], ...] = ()
    """Measured collectives: [kind, ranks, bytes of the full tensor, microseconds]. A collective of as many ranks is
    interpolated between the nearest sizes; others are computed from the numbers above. Kind `message`: processor time
    of a host that sends or receives a message between stages."""


@dataclass(frozen=True)
class PriceConfig:
    """Power and price of a device."""

    watts: NotNegative
    """Power of a device, including its share of host, network and cooling, watts."""
    per_hour: NotNegative
    """Price of a device per hour, in any currency; 0: unknown."""


@dataclass(frozen=True)
class FailureConfig:
    """Failures that stop a run, and what a restart costs."""

    device_hours: Positive = 50_700.0
    """Mean hours between two interruptions, multiplied by the number of devices. The default is Llama 3's (Dubey et al.
    2024, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 GPUs."""
    restart_s: NotNegative = 600.0
    """Seconds from a failure to the next step: detecting it, restarting all processes, loading the checkpoint."""


@dataclass(frozen=True)
class ClusterConfig:
    """Cluster of identical devices in nodes of equal size."""

    name: Filename
    """Name shown in reports."""
    devices: Count
    """Number of devices that a plan may use."""
    node: Count
    """Devices per node, all connected by the fastest links."""
    nics: Count
    """Network interfaces per node, shared by its devices."""
    matmul: MatmulConfig
    """Cost model of matmuls."""
    memory: DeviceMemoryConfig
    """Device memory."""
    inside: LinkConfig
    """Links inside a node."""
    between: LinkConfig
    """Links between nodes; `gb_s` is that of one of the `nics`."""
    launch_us: NotNegative
    """Microseconds between two kernel launches by a host: the time per kernel in a step made of tiny kernels."""
    message_us: NotNegative
    """Host time of a message between pipeline stages, microseconds."""
    step_us: NotNegative
    """Fixed microseconds per step: the host's part of the update, the device-to-host copy of the loss."""
    overlap: Annotated[float, Bounds(least=1)]
    """Slowdown factor of compute and communication while they overlap."""
    host_gb_s: Positive
    """Bandwidth between a device and host memory, 10^9 bytes per second in each direction."""
    price: PriceConfig
    """Power and price."""
    failures: FailureConfig = FailureConfig()
    """Failures and restarts, for the expected goodput."""
    queued: bool = True
    """True if kernels are queued on the device while the host launches others; false: the device is the host itself,
    which finishes each kernel before it launches the next."""
    alone: Annotated[float, Bounds(least=1)] = 1.0
    """Speedup factor of a device while the others of its node are idle, for processes that share cores."""
    operator_us: NotNegative = 0.0
    """Host time of a torch operator, including views, microseconds."""
    call_us: NotNegative = 0.0
    """Host time of a Python function in the model or the trainer, excluding its operators, microseconds."""
    host_memory_gb_s: Positive = 40.0
    """Host memory bandwidth per device while all devices use it, 10^9 bytes per second. If the device is the host
    itself, gradients and optimizer states move at this rate, other tensors that are not matmul operands at
    `memory`'s."""


def cluster_in(values: Mapping[str, object], path: str = "cluster") -> ClusterConfig:
    """Return the cluster in group `path` of a configuration. Raises ConfigError with all problems."""
    return build(ClusterConfig, values, path)
