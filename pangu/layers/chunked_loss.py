"""Loss for which only the logits of one chunk of tokens exist at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from pangu.collectives.regions import TensorRegion
from pangu.layers.vocab_parallel_loss import losses_of, overwrite

if TYPE_CHECKING:
    from pangu.layers.weight_gradient_store import WeightGradientStore


class Chunks(NamedTuple):
    """Options of a chunked loss."""

    size: int
    """Number of tokens per chunk."""
    table: Tensor
    store: WeightGradientStore | None
    region: TensorRegion
    vocab: int
    train: bool
    batch: int
    sums: int


def add_up(losses: Tensor, batch: int, sums: int) -> Tensor:
    """Return the sum of losses [sequence x batch], or with `sums` > 1 those of equal parts of the batch: [sums]."""
    return losses.sum() if sums == 1 else losses.view(-1, sums, batch // sums).sum((0, 2))


class ChunkedLoss(Function):
    """Sum of weighted losses for which only the logits of one chunk of tokens exist at a time.

    Nothing is computed twice: in the forward pass a chunk's logits become their gradient at once, which gives the
    gradients of the chunk's hidden states and of the matrix (Hsu et al. 2024, arXiv 2410.10989, section 3.2). For that
    the forward pass must know the gradient that the backward pass will get. With two chunks:

        forward    x0 Wᵀ | loss, dlogits | dx0, dW += | x1 Wᵀ | loss, dlogits | dx1, dW += |
        backward   -> dx0, dx1
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, table: Tensor, labels: Tensor, weights: Tensor, scale: Tensor | None, chunks: Chunks
    ) -> Tensor:
        """Return the loss of tokens [n, width], table [vocab / ranks, width], labels and weights [n]."""
        # `scale`: the gradient that the backward pass will get, None: 1
        trains_table, sums = chunks.train and chunks.table.requires_grad, chunks.store and chunks.store.sums
        ctx.chunks, ctx.grad = chunks, torch.empty_like(tokens) if chunks.train and tokens.requires_grad else None
        ctx.sum = torch.zeros_like(table) if trains_table and not sums else None

        def of_chunk(rows: slice) -> Tensor:
            x, label = tokens[rows], labels[rows]
            logits = F.linear(x, table)
            losses, log_sum = losses_of(logits, label, chunks.region, chunks.vocab)
            if chunks.train:
                overwrite(logits, log_sum, label, grad_losses[rows], chunks.region, chunks.vocab)
            if ctx.grad is not None:
                torch.mm(logits, table, out=ctx.grad[rows])
            if ctx.sum is not None:
                ctx.sum += logits.t() @ x
            elif trains_table and sums:
                sums.add(chunks.table, logits.t(), x, completes=False)
            return losses

        weights = weights.to(torch.promote_types(tokens.dtype, torch.float32))
        grad_losses = weights if scale is None else weights * scale
        starts = range(0, len(tokens), chunks.size)
        losses = torch.cat([of_chunk(slice(start, start + chunks.size)) for start in starts])
        return add_up(losses * weights, chunks.batch, chunks.sums)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the forward pass."""
        chunks, grad, total = ctx.chunks, ctx.grad, ctx.sum
        ctx.grad = ctx.sum = None
        if total is None and chunks.table.requires_grad:
            assert chunks.store is not None
            assert chunks.store.sums is not None
            chunks.store.sums.complete(chunks.table)
        return grad, total, None, None, None, None
