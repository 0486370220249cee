"""The head and the loss, over a vocabulary that is sharded over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from pangu.collectives.reduce import all_reduce, largest
from pangu.collectives.regions import TensorRegion, enter
from pangu.layers.builder import Builder
from pangu.layers.recompute import checkpointed
from pangu.layers.tensor_parallel_matmul import ALONE, column_parallel_matmul


class VocabParallelLoss(Function):
    """Cross-entropy that never gathers the logits (Shoeybi et al. 2019, section 3): three numbers per token are
    reduced, the largest logit, the label's logit and the sum of exponentials. Logits stay in their format: forward
    reads them, backward reads and overwrites them."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, region: TensorRegion, vocab: int) -> Tensor:
        """logits [tokens, vocab / ranks], labels [tokens] -> losses [tokens], in fp32 (fp64 for fp64 logits). Backward
        overwrites the logits with their gradient: nobody else may read them."""
        # loss = log(sum of exp(x - highest)) + highest - x[label]. A rank that sums knows only its largest logit
        # (`top`), so its sum is multiplied by exp(top - highest) before the ranks' sums are added
        start, stop = region.bounds(vocab)
        statistics, ctx.overwrite = _row_functions(logits.device)
        *tops, total = statistics(logits, labels, start, stop - start).unbind()
        highest, label = tops
        if region.size > 1:
            highest, label = largest(torch.stack(tops), region.group).unbind()
            total = all_reduce(total * (tops[0] - highest).exp(), region.group)
        log_total = total.log()
        ctx.save_for_backward(logits, highest + log_total, labels)
        ctx.words = start, stop - start
        return log_total - (label - highest)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sum, labels = ctx.saved_tensors
        ctx.overwrite(logits, log_sum, labels, grads[0], *ctx.words)
        return logits, None, None, None


def _row_functions(device: torch.device) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """What reads logits and what overwrites them."""
    if device.type == "cpu":
        from pangu.layers.loss_rows import overwrite_with_gradient, row_statistics

        return row_statistics, overwrite_with_gradient
    from pangu.layers.loss_operators import loss_gradient, loss_statistics

    return loss_statistics, loss_gradient


class Head(nn.Module):
    """The output matrix, without bias, and the loss. A tied head (Press & Wolf 2017) uses the word embedding."""

    def __init__(self, build: Builder, vocab: int, chunk: int | None) -> None:
        """`vocab`: number of words, without padding. `chunk`: tokens whose logits exist at a time, recomputed in
        backward; None: all at once, without recompute."""
        super().__init__()
        self.region = build.region
        self.store = build.store
        self.vocab = vocab
        self.chunk = chunk
        self.weight = build.optional("head.weight")

    def loss(self, hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Sum over tokens of weight x negative log-likelihood, in fp32 (fp64 for fp64 states). `hidden`: [sequence (/
        ranks with sequence parallelism), batch, width]; `table`: this rank's rows of the output matrix [vocab / ranks,
        width], padding included; `labels` (int64) and `weights` (0 where a token does not count): [batch, sequence]."""
        tokens = enter(hidden, self.region).flatten(0, 1)
        flat_labels, flat_weights = labels.t().flatten(), weights.t().flatten()
        if self.chunk is None:
            return self._part(tokens, table, flat_labels, flat_weights, 1)
        size = self.chunk
        parts = list(zip(tokens.split(size), flat_labels.split(size), flat_weights.split(size), strict=True))
        losses = [checkpointed(self._part, some, table, label, weight, len(parts)) for some, label, weight in parts]
        return torch.stack(losses).sum()

    def _part(self, tokens: Tensor, table: Tensor, labels: Tensor, weights: Tensor, parts: int) -> Tensor:
        """Sum of the weighted losses of [n, width] tokens, one of so many parts; labels and weights [n]."""
        # the states are whole already
        logits = column_parallel_matmul(tokens, table, None, ALONE, self.store, parts)
        losses = VocabParallelLoss.apply(logits, labels, self.region, self.vocab)
        return (losses * weights).sum()
