"""The loss over shares of a vocabulary: what accelerators compile and what a CPU does in blocks give the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.collectives.regions import TensorRegion
from pangu.layers import loss, loss_operators, loss_rows

VOCAB, TOKENS = 37, 11
SHARES = [(0, 10, 10), (10, 10, 10), (20, 10, 16), (30, 7, 16), (37, 0, 16)]
"""First word, words, columns: the last of them with padding, one of nothing else."""


def whole(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels and a gradient for each token's loss."""
    source = torch.Generator().manual_seed(0)
    logits = 20 * torch.randn(TOKENS, VOCAB, generator=source, dtype=torch.float64).to(dtype)
    labels = torch.randint(VOCAB, (TOKENS,), generator=source)
    wide = torch.promote_types(dtype, torch.float32)
    return logits, labels, torch.randn(TOKENS, generator=source, dtype=torch.float64).to(wide)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiled", [True, False])
def test_statistics_and_gradients_of_shares_make_up_the_whole(dtype: torch.dtype, compiled: bool) -> None:
    statistics = loss_operators._statistics if compiled else loss_rows.row_statistics
    gradient = loss_operators._gradient if compiled else loss_rows.overwrite_with_gradient
    logits, labels, grad = whole(dtype)
    exact = logits.double().clone().requires_grad_()
    expected = F.cross_entropy(exact, labels, reduction="none")
    (expected * grad).sum().backward()
    # padding holds what products of padding rows gave, or nothing sensible
    shares = [
        F.pad(logits[:, start : start + width], (0, columns - width), value=1e4) for start, width, columns in SHARES
    ]
    tops, label, totals = torch.stack(
        [statistics(x, labels, start, width) for x, (start, width, _) in zip(shares, SHARES, strict=True)], dim=1
    )
    highest = tops.amax(0)
    log_sum = highest + (totals * (tops - highest).exp()).sum(0).log()
    off = {torch.float64: 1e-13}.get(dtype, 1e-5)
    torch.testing.assert_close((log_sum - label.amax(0)).double(), expected.detach(), rtol=off, atol=off)
    for x, (start, width, _) in zip(shares, SHARES, strict=True):
        gradient(x, log_sum, labels, grad, start, width)
        assert not x[:, width:].any()
        rounding = max(off, torch.finfo(dtype).eps)
        gradients, expected_gradients = x[:, :width].double(), exact.grad[:, start : start + width]  # type: ignore[index]
        torch.testing.assert_close(gradients, expected_gradients, rtol=rounding, atol=off)


def test_backward_overwrites_the_logits() -> None:
    logits, labels, grad = whole(torch.bfloat16)
    logits.requires_grad_()
    copy, seen = logits * 1.0, []
    copy.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    loss.VocabParallelLoss.apply(copy, labels, TensorRegion(), VOCAB).backward(grad)
    assert seen == [copy.data_ptr()]
