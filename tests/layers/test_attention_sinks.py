"""Learned sinks of attention: every kernel equals the reference, whose sums the model's own test writes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torchs

from pangu.config.attention import obstacles
from pangu.layers.attention import AttentionCore
from pangu.layers.builder import Builder
from pangu.layers.context_attention import sequence_kernel
from pangu.layers.dropout import DropoutKeys
from pangu.layers.kernels import MaskAndBias
from pangu.layers.masks import AttentionMask
from pangu.topology.placement import PlacementTable
from tests.layers.test_kernels import BOUNDS, CASES, CPU, HEADS, LENGTH, blocks_of, inputs_of
from tests.models.helpers import variant

KEYS = DropoutKeys(3, 5, (0, 1))


def results(kernel: str, case: tuple[Any, ...], dropout: float, recompute: bool = False) -> list[Tensor]:
    """Output, and gradients of sinks, queries, keys, values and a learned bias, in fp64."""
    documents, window, kind, groups, pattern = case
    given, bias, inputs = inputs_of(kind, groups)
    sinks = torch.linspace(-2, 3, HEADS, dtype=torch.float64).requires_grad_()
    mask = AttentionMask(documents, window, None if documents is None else BOUNDS, blocks_of(pattern))
    made = sequence_kernel(kernel, True, dropout > 0)(MaskAndBias(mask, bias, LENGTH, torch.float64, CPU))
    core = AttentionCore(Builder(PlacementTable()), dropout, recompute)
    output, _ = core(given, made, KEYS.on(torch.zeros(2, LENGTH)) if dropout else None, sinks=sinks)
    weight = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return [output, *torch.autograd.grad(output, [sinks, *inputs], weight)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "dropout"), [("sdpa", 0.0), ("flex", 0.0), ("flex", 0.4)], ids=["sdpa", "flex", "flex_drops"]
)
def test_gradients_are_those_of_the_reference(
    kernel: str, dropout: float, case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp64; 1e-12: sums of at most 16 products, and exp of a difference of logarithms."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *tensors: None)  # torch refuses flex's backward on a CPU
    expected = results("reference", case, dropout)
    for mine, theirs in zip(results(kernel, case, dropout), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    assert float(expected[1].abs().min()) > 1e-3


def test_a_recompute_gives_the_same() -> None:
    for mine, theirs in zip(results("sdpa", CASES[1], 0.0), results("sdpa", CASES[1], 0.0, True), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kernel", ["cudnn", "flash_attn"])
def test_a_kernel_without_sums_of_exponentials_is_refused(kernel: str) -> None:
    (problem,) = obstacles(kernel, variant(attention_sinks=True, head_dim=16), "bf16", "cuda")
    assert "does not support model.attention_sinks; use flash, triton or flex, or set model.attention=auto" in str(
        problem
    )
