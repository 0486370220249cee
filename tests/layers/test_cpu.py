"""`precision.fp32_matmul=auto` never gives up fp32, and tries oneDNN only where MKL is slow."""

from __future__ import annotations

import pytest
import torch

from pangu.layers import cpu
from pangu.layers.cpu import matmul_precision, precisions
from pangu.layers.kernel_choice import random

CPU = torch.device("cpu")
EXACT = 1e-4
"""Bound of the error of true fp32 matmuls relative to sqrt(inner size); TF32 errs by 1e-3, bf16 by 1e-2."""


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="this processor multiplies in bf16 where it may")
def test_medium_keeps_products_true_fp32_without_tiles() -> None:
    x, weight, grad = random(CPU, torch.float32, (300, 200), (100, 200), (300, 100))
    with matmul_precision("medium"):
        for left, right in ((x, weight.t()), (grad, weight), (grad.t(), x)):
            errors = (left @ right - left.double() @ right.double()).abs()
            assert errors.max() < EXACT * left.shape[1] ** 0.5
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("processor", "tiles", "expected"),
    [
        ("AMD EPYC 9B45, AVX512", False, ["highest", "medium"]),
        ("AMD EPYC, AVX512", True, ["highest"]),
        ("Intel(R) Xeon(R) Processor, AVX512", False, ["highest"]),
    ],
)
def test_medium_is_a_candidate_where_mkl_is_slow(
    monkeypatch: pytest.MonkeyPatch, processor: str, tiles: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(cpu, "processor_name", lambda device: processor)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert precisions("auto", "fp32", CPU) == expected
    assert precisions("high", "fp32", CPU) == ["high"]
    assert precisions("auto", "bf16", CPU) == precisions("auto", "fp32", torch.device("cuda")) == ["highest"]
