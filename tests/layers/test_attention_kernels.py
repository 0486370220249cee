"""Our Triton kernels of attention, compiled for GPUs as training launches them, fit into their registers and memory."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from benchmarks.attention_kernels import CAPABILITIES, KERNELS, compiled, needs

SHARED_KIB = {80: 163, 90: 227, 100: 227}
"""Shared memory that a program may have, by compute capability (CUDA programming guide, technical specifications)."""
SIZES = (64, 80, 128)
"""Columns of a head of the presets."""
IN_CI = {(80, 128), (90, 64), (90, 80), (90, 128), (100, 80)}


@pytest.mark.parametrize(
    ("capability", "size"),
    [
        pytest.param(capability, size, marks=() if (capability, size) in IN_CI else pytest.mark.long)
        for capability in CAPABILITIES
        for size in SIZES
    ],
)
def test_kernels_fit(capability: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spilled, and all products run on the tensor cores as the newest instructions of the GPU have them."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = compiled(capability, size)
    assert len(kernels) == len(KERNELS)
    for name, kernel in zip(KERNELS, kernels, strict=True):
        found = needs(kernel, capability)
        assert found["spilled_bytes"] == 0, (name, found)
        assert found["shared_bytes"] <= SHARED_KIB[capability] * 1024, (name, found)
        assert (found["products"] > 0, found["old_products"] > 0) == (capability >= 90, capability < 90), (name, found)
