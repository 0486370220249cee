"""Loss of logits over a vocabulary that is sharded over the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.reduce import all_reduce, largest
from pangu.collectives.regions import TensorRegion
from pangu.layers.fused import fused
from pangu.layers.loss_rows import overwrite_with_gradient, row_statistics


def _statistics(logits: Tensor, labels: Tensor, start: Tensor, width: Tensor) -> Tensor:
    """Compute `row_statistics` as an online softmax (Milakov & Gimelshein 2018), to be compiled."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    columns, least = torch.arange(logits.shape[-1], device=logits.device), torch.finfo(wide).min
    values = torch.where(columns < width, logits.to(wide), least)
    top = values.amax(-1)
    label = torch.where(columns == (labels - start)[:, None], values, least).amax(-1)
    return torch.stack([top, label, (values - top[:, None]).exp().sum(-1)])


def _gradient(logits: Tensor, log_sum: Tensor, labels: Tensor, grad: Tensor, start: Tensor, width: Tensor) -> None:
    columns = torch.arange(logits.shape[-1], device=logits.device)
    at_label = (columns == (labels - start)[:, None]).to(log_sum.dtype)
    grad_logits = (logits - log_sum[:, None]).exp() - at_label
    logits.copy_(torch.where(columns < width, grad_logits * grad[:, None], 0.0))


def _like_statistics(logits: Tensor, labels: Tensor, start: int, width: int) -> Tensor:
    return logits.new_empty(3, len(logits), dtype=torch.promote_types(logits.dtype, torch.float32))


loss_statistics = fused(
    "loss_statistics(Tensor logits, Tensor labels, int start, int width) -> Tensor",
    _statistics,
    _like_statistics,
    without_triton=row_statistics,
)
loss_gradient = fused(
    "loss_gradient(Tensor(a!) logits, Tensor log_sum, Tensor labels, Tensor grad, int start, int width) -> ()",
    _gradient,
    lambda *arguments: None,
    without_triton=overwrite_with_gradient,
)


class VocabParallelLoss(Function):
    """Cross-entropy that never gathers the logits (Shoeybi et al. 2019, section 3), and keeps their dtype."""

    # Three numbers per token are reduced: largest logit, label's logit and sum of exponentials.
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, region: TensorRegion, vocab: int) -> Tensor:
        """Map logits [tokens, vocab / ranks] and labels [tokens] to losses [tokens], in fp32 (fp64 for fp64 logits)."""
        losses, log_sum = losses_of(logits, labels, region, vocab)
        ctx.save_for_backward(logits, log_sum, labels)
        ctx.region, ctx.vocab = region, vocab
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Overwrite the logits with their gradient: nothing else may read them."""
        logits, log_sum, labels = ctx.saved_tensors
        overwrite(logits, log_sum, labels, grads[0], ctx.region, ctx.vocab)
        return logits, None, None, None


def losses_of(logits: Tensor, labels: Tensor, region: TensorRegion, vocab: int) -> tuple[Tensor, Tensor]:
    """Return each token's loss, and the logarithm of the sum of the exponentials of all logits."""
    # loss = log(sum of exp(x - highest)) + highest - x[label]. A rank knows only its own largest logit (`top`) when it
    # sums, so its sum is multiplied by exp(top - highest) before the sums are added
    start, stop = region.bounds(vocab)
    *tops, total = loss_statistics(logits, labels, start, stop - start).unbind()
    highest, label = tops
    if region.size > 1:
        highest, label = largest(torch.stack(tops), region.group).unbind()
        total = all_reduce(total * (tops[0] - highest).exp(), region.group)
    log_total = total.log()
    return log_total - (label - highest), highest + log_total


def overwrite(logits: Tensor, log_sum: Tensor, labels: Tensor, grad: Tensor, region: TensorRegion, vocab: int) -> None:
    """Overwrite logits with their gradient, from that of the losses [tokens]."""
    start, stop = region.bounds(vocab)
    loss_gradient(logits, log_sum, labels, grad, start, stop - start)
