"""Peak throughput and memory of a device: the denominators of the metrics of a run."""

from __future__ import annotations

import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from pangu.common.errors import UserError
from pangu.topology.launch import Launch

Compute = Literal["fp32", "bf16", "fp16", "fp64"]


class Peak(NamedTuple):
    """Dense matmul throughput in TFLOP/s by compute format; None if the device has no matrix unit for it."""

    fp16: float
    bf16: float | None
    fp32: float | None
    fp64: float | None


# From the vendors' data sheets, without sparsity. fp32 is true fp32, not TF32. RTX cards: with fp32 accumulation, as
# torch requests. MI250X: half of the card, because it shows as two devices. The first pattern found in the name counts.
_PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"\bGB200\b", Peak(2500, 2500, 80, 40)),
    (r"\bB200\b", Peak(2250, 2250, 75, 37)),
    (r"\bH[12]00 NVL\b", Peak(835.5, 835.5, 60, 60)),
    (r"\bH100 PCIe\b", Peak(756, 756, 51.2, 51.2)),
    (r"\bG?H[12]00\b", Peak(989.4, 989.4, 66.9, 66.9)),
    (r"\bH800 PCIe\b", Peak(756, 756, 51.2, 0.8)),
    (r"\bH800\b", Peak(989.4, 989.4, 66.9, 1)),
    (r"\bH20\b", Peak(148, 148, 44, 1)),
    (r"\bA[18]00\b", Peak(312, 312, 19.5, 19.5)),
    (r"\bA30\b", Peak(165, 165, 10.3, 10.3)),
    (r"\bA40\b", Peak(149.7, 149.7, 37.4, None)),
    (r"\bA10\b", Peak(125, 125, 31.2, None)),
    (r"\bV100S\b", Peak(130, None, 16.4, 8.2)),
    (r"\bV100[- ]PCIe\b", Peak(112, None, 14, 7)),
    (r"\bV100\b", Peak(125, None, 15.7, 7.8)),
    (r"\bT4\b", Peak(65, None, 8.1, None)),
    (r"\bL40S\b", Peak(362, 362, 91.6, None)),
    (r"\bL40\b", Peak(181, 181, 90.5, None)),
    (r"\bL4\b", Peak(121, 121, 30.3, None)),
    (r"\bRTX 5090$", Peak(209.5, 209.5, 104.8, None)),
    (r"\bRTX 4090$", Peak(165.2, 165.2, 82.6, None)),
    (r"\bRTX 3090$", Peak(71, 71, 35.6, None)),
    (r"\bRTX A6000$", Peak(154.8, 154.8, 38.7, None)),
    (r"\bRTX 6000 Ada\b", Peak(364.2, 364.2, 91.1, None)),
    (r"\bMI3[02][05]X\b", Peak(1307.4, 1307.4, 163.4, 163.4)),
    (r"\bMI250X\b", Peak(191.5, 191.5, 47.9, 47.9)),
    (r"\bMI2[15]0\b", Peak(181, 181, 45.3, 45.3)),
    (r"\bAscend ?910B2", Peak(376, 376, None, None)),
    (r"\bAscend ?910B3", Peak(313, 313, None, None)),
    (r"\bAscend ?910B4", Peak(280, 280, None, None)),
    (r"\bAscend ?910A?$", Peak(320, None, None, None)),
)


def device_name(device: torch.device) -> str:
    """Return the name that the driver reports for a device, e.g. `NVIDIA H100 80GB HBM3`."""
    if device.type == "cpu":
        return f"{platform.machine()} CPU"
    return torch.get_device_module(device).get_device_name(device)


def processor_name(device: torch.device) -> str:
    """Return the `device_name` of an accelerator, or the model of a CPU with the instruction set that torch uses."""
    if device.type != "cpu":
        return device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def peak_tflops(name: str, compute: Compute) -> float | None:
    """Return the dense matmul TFLOP/s of a device in a compute format; None if unknown, as for every CPU."""
    for pattern, peak in _PEAKS:
        if re.search(pattern, name, re.IGNORECASE):
            return getattr(peak, compute)
    return None


def peak_memory_gib(device: torch.device) -> float:
    """Return the peak memory so far in GiB: allocated tensors on an accelerator, the resident set size on a CPU."""
    if device.type != "cpu":
        # torch.accelerator supports only some allocators; that of torch_npu is not one of them before 2.13
        return torch.get_device_module(device).max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def device_here(launch: Launch) -> Any:
    """Return the properties (`name`, `total_memory` in bytes) of this process's accelerator, or None if unknown.

    This takes none of the device's memory. Torch reports no properties for some devices, such as Apple's.
    """
    kind = torch.accelerator.current_accelerator()
    ask = None if kind is None else getattr(torch.get_device_module(kind), "get_device_properties", None)
    return None if ask is None or launch.local_rank >= torch.accelerator.device_count() else ask(launch.local_rank)


def require_format(compute: str, device: torch.device) -> None:
    """Raise `UserError` if a device has no matmul in a compute format."""
    module: Any = torch.get_device_module(device)
    has_bf16 = getattr(module, "is_bf16_supported", lambda: True)()
    formats = ["fp32", *(["bf16"] if has_bf16 else []), *([] if device.type == "npu" else ["fp64"])]
    if compute not in (*formats, "fp16"):
        fix = f"use {', '.join(formats)} or fp16"
        raise UserError(f"precision = {compute}: {device_name(device)} does not support matmuls in {compute}; {fix}")
