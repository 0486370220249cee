from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from pangu.metrics.devices import Compute, device_name, peak_memory_gib, peak_tflops


@pytest.mark.parametrize(
    ("name", "compute", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 80GB HBM3", "fp32", 66.9),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA GH200 480GB", "bf16", 989.4),
        ("NVIDIA H800", "bf16", 989.4),
        ("NVIDIA H800", "fp64", 1),
        ("NVIDIA B200", "bf16", 2250),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp64", 19.5),
        ("NVIDIA A800-SXM4-80GB", "fp16", 312),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp16", 112),
        ("Tesla V100S-PCIE-32GB", "fp16", 130),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("NVIDIA GeForce RTX 4090 D", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "fp16", 1307.4),
        ("Ascend910A", "fp16", 320),
        ("Ascend910B3", "bf16", 313),
        ("Ascend910B3", "fp64", None),
        ("x86_64 CPU", "fp32", None),
    ],
)
def test_peak_of_a_device_by_the_name_its_driver_gives(name: str, compute: Compute, peak: float | None) -> None:
    assert peak_tflops(name, compute) == peak


def test_a_cpu_has_a_name_and_no_known_peak() -> None:
    name = device_name(torch.device("cpu"))
    assert name.endswith("CPU")
    assert peak_tflops(name, "fp32") is None


@pytest.mark.skipif(sys.platform != "linux", reason="compares with /proc")
def test_peak_memory_of_a_cpu_process_agrees_with_the_kernel() -> None:
    lines = Path("/proc/self/status").read_text().splitlines()
    high_water_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    # A process started by a larger one may inherit that one's peak; a wrong unit would be a factor of 1024.
    assert 0.9 < peak_memory_gib(torch.device("cpu")) / (high_water_kib / 2**20) < 100


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_peak_memory_of_an_accelerator_counts_allocated_tensors() -> None:
    device = torch.accelerator.current_accelerator()
    assert device is not None
    assert isinstance(device_name(device), str)
    before = peak_memory_gib(device)
    block = torch.zeros(2**28, device=device)  # 1 GiB
    del block
    assert peak_memory_gib(device) >= max(before, 1.0)
