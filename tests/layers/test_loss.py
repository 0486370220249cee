"""The loss over shares of a vocabulary: what accelerators compile and what a CPU does in blocks give the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from pangu.collectives.regions import TensorRegion
from pangu.layers import loss, loss_rows, vocab_parallel_loss
from pangu.layers.builder import Builder
from pangu.layers.vocab_parallel_loss import VocabParallelLoss
from pangu.topology.placement import PlacementTable

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
    statistics = vocab_parallel_loss._statistics if compiled else loss_rows.row_statistics
    gradient = vocab_parallel_loss._gradient if compiled else loss_rows.overwrite_with_gradient
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
        gradients, expected_gradients = x[:, :width].double(), exact.grad[:, start : start + width]
        torch.testing.assert_close(gradients, expected_gradients, rtol=rounding, atol=off)


@pytest.mark.parametrize("scale", [None, 0.125])
@pytest.mark.parametrize("chunk", [1, 4, 10])
def test_a_loss_in_chunks_is_that_of_all_tokens(chunk: int, scale: float | None) -> None:
    """fp64, sums in another order: the loss, and the gradients of hidden states and matrix, where tokens count
    differently or not at all; three products of each chunk, and no logits but of a chunk."""
    source = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, 1, 5, generator=source, dtype=torch.float64)
    table = torch.randn(VOCAB, 5, generator=source, dtype=torch.float64)
    labels, weights = torch.randint(VOCAB, (1, TOKENS), generator=source), torch.arange(TOKENS)[None] % 4 / 2.0
    factor = None if scale is None else torch.tensor(scale, dtype=torch.float64)
    results = []
    for size in (None, chunk):
        head = loss.Head(Builder(PlacementTable()), VOCAB, size)
        inputs = [tensor.clone().requires_grad_() for tensor in (hidden, table)]
        with Shapes() as shapes:
            total = head.loss(*inputs, labels=labels, weights=weights, scale=factor)
            gradients = torch.autograd.grad(total, inputs, factor)
        results.append([total.detach(), *gradients])
        products = [shape for name, shape in shapes.made if name == "mm"]
        num_chunks = 1 if size is None else -(-TOKENS // size)
        assert len(products) == 3 * num_chunks
        assert max(rows for rows, width in products if width == VOCAB) == (size or TOKENS)
        with torch.no_grad():
            assert torch.equal(head.loss(*inputs, labels=labels, weights=weights), total)
    for whole_one, in_chunks in zip(*results, strict=True):
        torch.testing.assert_close(in_chunks, whole_one, rtol=1e-13, atol=1e-13)


def test_a_loss_in_chunks_has_the_gradients_that_are_asked_for() -> None:
    """Of a frozen matrix, or of the matrix alone."""
    hidden, table = torch.ones(TOKENS, 1, 5), torch.ones(VOCAB, 5)
    labels, weights = torch.zeros(1, TOKENS, dtype=torch.int64), torch.ones(1, TOKENS)
    head = loss.Head(Builder(PlacementTable()), VOCAB, 4)
    for trained in (hidden, table):
        trained.requires_grad_()
        with Shapes() as shapes:
            head.loss(hidden, table, labels, weights).backward()
        assert trained.grad is not None
        assert len([name for name, _ in shapes.made if name == "mm"]) == 2 * 3
        trained.requires_grad_(False)


class Shapes(TorchDispatchMode):
    """Names of operators, and the shapes of the matrices that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[int, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.made.append((func.overloadpacket.__name__, tuple(out.shape)))
        return out


def test_backward_overwrites_the_logits() -> None:
    logits, labels, grad = whole(torch.bfloat16)
    logits.requires_grad_()
    copy, seen = logits * 1.0, []
    copy.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    VocabParallelLoss.apply(copy, labels, TensorRegion(), VOCAB).backward(grad)
    assert seen == [copy.data_ptr()]
