"""Masks and kernels of attention."""

from __future__ import annotations

import pytest
import torch

from pangu.layers.attention import AttentionCore, AttentionMask, choose_attention, merge_heads, split_heads
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys
from pangu.topology.placement import PlacementTable

CPU = torch.device("cpu")


def test_mask_of_documents_by_hand() -> None:
    allowed = AttentionMask(torch.tensor([[0, 0, 1, 1]])).allowed(4, CPU)[0, 0]
    assert allowed.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def test_padding_is_seen_by_nobody_but_itself() -> None:
    valid = torch.tensor([[False, True, True]])
    allowed = AttentionMask(None, valid).allowed(3, CPU)[0, 0]
    assert allowed.int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]


def test_heads_are_contiguous_slices_of_the_width() -> None:
    x = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    heads = split_heads(x, 2)
    assert heads.shape == (3, 4, 2, 2)
    assert torch.equal(heads[1, 2, 0], x[0, 1, 4:6])
    assert torch.equal(merge_heads(heads), x)


@pytest.mark.parametrize("documents", [None, torch.tensor([[0] * 5 + [1] * 7, [0] * 12])])
def test_kernels_agree(documents: torch.Tensor | None) -> None:
    query, key, value = torch.randn(3, 2, 4, 12, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    outputs = [
        AttentionCore(Builder(PlacementTable()), kernel, 0.0)(query, key, value, AttentionMask(documents), None)
        for kernel in ("reference", "sdpa")
    ]
    torch.testing.assert_close(*outputs, atol=1e-14, rtol=1e-13)


def test_the_fused_kernel_draws_the_same_mask_again() -> None:
    query, key, value = torch.randn(3, 2, 4, 12, 8, generator=torch.Generator().manual_seed(0))
    core = AttentionCore(Builder(PlacementTable()), "sdpa", 0.5)
    keys = DropoutKeys(1, 2, (3, 4))
    first = core(query, key, value, AttentionMask(None), keys)
    torch.rand(17)
    assert torch.equal(first, core(query, key, value, AttentionMask(None), keys))
    assert not torch.equal(first, core(query, key, value, AttentionMask(None), DropoutKeys(1, 3, (3, 4))))


def test_auto_takes_explicit_scores_where_the_cpu_kernel_is_slow_or_cannot_drop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_attention("auto", CPU, torch.float32, 0.0) == "sdpa"
    assert choose_attention("auto", CPU, torch.float32, 0.1) == "reference"
    for tiles, kernel in ((False, "reference"), (True, "sdpa")):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda tiles=tiles: tiles)
        assert choose_attention("auto", CPU, torch.bfloat16, 0.0) == kernel
    assert choose_attention("auto", torch.device("cuda"), torch.bfloat16, 0.1) == "sdpa"
    assert choose_attention("sdpa", CPU, torch.bfloat16, 0.1) == "sdpa"
