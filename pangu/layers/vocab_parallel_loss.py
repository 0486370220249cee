"""Loss of logits over a vocabulary that is sharded over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.reduce import all_reduce, largest
from pangu.collectives.regions import TensorRegion
from pangu.layers.loss_operators import loss_gradient, loss_statistics
from pangu.layers.loss_rows import overwrite_with_gradient, row_statistics


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
    statistics, _ = _row_functions(logits.device)
    *tops, total = statistics(logits, labels, start, stop - start).unbind()
    highest, label = tops
    if region.size > 1:
        highest, label = largest(torch.stack(tops), region.group).unbind()
        total = all_reduce(total * (tops[0] - highest).exp(), region.group)
    log_total = total.log()
    return log_total - (label - highest), highest + log_total


def overwrite(logits: Tensor, log_sum: Tensor, labels: Tensor, grad: Tensor, region: TensorRegion, vocab: int) -> None:
    """Overwrite logits with their gradient, from that of the losses [tokens]."""
    start, stop = region.bounds(vocab)
    _row_functions(logits.device)[1](logits, log_sum, labels, grad, start, stop - start)


def _row_functions(device: torch.device) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    if device.type == "cpu":
        return row_statistics, overwrite_with_gradient
    return loss_statistics, loss_gradient
