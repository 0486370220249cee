"""How heads are cut from the width."""

from __future__ import annotations

import torch

from pangu.layers.attention import merge_heads, split_heads


def test_heads_are_contiguous_slices_of_the_width() -> None:
    x = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    heads = split_heads(x, 2)
    assert heads.shape == (3, 4, 2, 2)
    assert torch.equal(heads[1, 2, 0], x[0, 1, 4:6])
    assert torch.equal(merge_heads(heads), x)


def test_heads_of_no_tokens() -> None:
    assert split_heads(torch.empty(0, 3, 8), 2).shape == (3, 4, 0, 2)
