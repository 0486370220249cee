"""How heads are cut from the width."""

from __future__ import annotations

import pytest
import torch

from pangu.layers.attention import merge_heads, split_heads, split_projections, stack_projections


def test_heads_are_contiguous_slices_of_the_width() -> None:
    x = torch.arange(2 * 3 * 8.0).view(2, 3, 8)
    heads = split_heads(x, 2)
    assert heads.shape == (3, 4, 2, 2)
    assert torch.equal(heads[1, 2, 0], x[0, 1, 4:6])
    assert torch.equal(merge_heads(heads), x)


def test_heads_of_no_tokens() -> None:
    assert split_heads(torch.empty(0, 3, 8), 2).shape == (3, 4, 0, 2)


@pytest.mark.parametrize("stacked", [True, False])
def test_projections_that_lie_side_by_side_are_not_copied(stacked: bool) -> None:
    """Of 2 query heads and a head of keys and of values."""
    x, widths = torch.arange(3 * 2 * 8.0).view(3, 2, 8), [4, 2, 2]
    heads = split_projections(x, widths, 2)
    for found, part in zip(heads, x.split(widths, -1), strict=True):
        assert torch.equal(found, split_heads(part, 2))
    for some in (slice(0, 3), slice(1, 3), slice(0, 1)):
        found = stack_projections(heads[some] if stacked else [part.clone() for part in heads[some]])
        assert torch.equal(found, torch.cat(x.split(widths, -1)[some], -1))
        assert stack_projections(heads[some], apart=False).is_contiguous()
        assert (found.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == stacked


def test_projections_in_another_order_are_copied() -> None:
    x = torch.arange(3 * 2 * 6.0).view(3, 2, 6)
    query, key, value = split_projections(x, [2, 2, 2], 2)
    assert torch.equal(stack_projections([query, value, key]), x.view(3, 2, 3, 2)[:, :, [0, 2, 1]].flatten(2))
