"""The head and the loss, over a vocabulary that is sharded over the tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from pangu.collectives.reduce import all_reduce, largest
from pangu.collectives.regions import TensorRegion, enter, gather_last
from pangu.layers.builder import Builder
from pangu.layers.recompute import checkpointed
from pangu.layers.tensor_parallel_matmul import ALONE, column_parallel_matmul


class _VocabParallelLoss(Function):
    """Cross-entropy that never gathers the logits (Shoeybi et al. 2019, section 3): three numbers per token are
    reduced, the largest logit, the sum of exponentials and the label's logit. Logits stay in their format; both passes
    widen a few rows at a time, so that on a CPU these stay in its cache."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, region: TensorRegion, vocab: int) -> Tensor:
        """logits [tokens, vocab / ranks], labels [tokens] -> losses [tokens], in fp32 (fp64 for fp64 logits). Backward
        overwrites the logits with their gradient: nobody else may read them."""
        # loss = log(sum of exp(x - highest)) + highest - x[label]. A rank that sums knows only its largest logit
        # (`top`), so its sum is multiplied by exp(top - highest) before the ranks' sums are added
        start, stop = region.bounds(vocab)
        elsewhere = ((labels < start) | (labels >= stop))[:, None]
        index = (labels - start)[:, None].masked_fill(elsewhere, 0)
        wide = torch.promote_types(logits.dtype, torch.float32)
        top, total = torch.empty(2, len(logits), 1, dtype=wide, device=logits.device)
        for rows, row_top, row_total in _blocks(logits, top, total):
            values = _widened(rows, stop - start)
            # a rank that holds nothing but padding has no largest logit
            row_top.copy_(values.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min))
            row_total.copy_(values.sub_(row_top).exp_().sum(-1, keepdim=True))
            del values  # before the next rows are widened
        highest = largest(top.clone(), region.group)
        label = (logits.gather(-1, index) - highest).masked_fill(elsewhere, 0.0)
        label, total = all_reduce(torch.stack([label, total * (top - highest).exp()]), region.group)
        log_total = total.log()
        ctx.save_for_backward(logits, highest + log_total, index, elsewhere)
        ctx.width = stop - start
        return (log_total - label)[:, 0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        logits, log_sum, index, elsewhere = ctx.saved_tensors
        minus_one = elsewhere.to(log_sum.dtype) - 1.0
        for rows, row_sum, label, share, grad in _blocks(logits, log_sum, index, minus_one, grads[0][:, None]):
            # probabilities, less 1 at the label; without a name, so that they are gone before the next rows are widened
            rows.copy_(_widened(rows, ctx.width).sub_(row_sum).exp_().scatter_add_(-1, label, share).mul_(grad))
        return logits, None, None, None


def _widened(rows: Tensor, width: int) -> Tensor:
    """A copy in fp32 (fp64 for fp64) with -inf in the padding, from column `width` on."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    wide[:, width:] = -torch.inf
    return wide


def _blocks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The tensors split into blocks of a few rows: on a CPU 2 MiB of fp32 logits, which fit a cache; elsewhere 256 MiB,
    which are worth a kernel's launch."""
    rows = block_rows(logits.shape[-1], logits.device.type)
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def block_rows(width: int, device: str) -> int:
    """Rows of a block of logits of this width."""
    return max(1, (2**19 if device == "cpu" else 2**26) // width)


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
            return self._part(tokens, table, flat_labels, flat_weights)
        size = self.chunk
        parts = zip(tokens.split(size), flat_labels.split(size), flat_weights.split(size), strict=True)
        losses = [checkpointed(self._part, some, table, label, weight) for some, label, weight in parts]
        return torch.stack(losses).sum()

    def token_losses(self, hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Losses (fp32; fp64 for fp64 states) and misses (1 where greedy decoding takes another word than the label),
        both [batch, sequence], 0 where the weight is 0, the same on every rank. Arguments as for `loss`; for
        evaluation, without gradients."""
        tokens, flat_labels = enter(hidden, self.region).flatten(0, 1), labels.t().flatten()
        wide = torch.promote_types(tokens.dtype, torch.float32)
        results = torch.zeros(2, len(tokens), dtype=wide, device=tokens.device)
        counted = weights.t().flatten().nonzero()[:, 0]
        for places in counted.split(block_rows(table.shape[0], tokens.device.type)):
            logits, label = F.linear(tokens[places], table), flat_labels[places]
            results[0, places] = _VocabParallelLoss.apply(logits, label, self.region, self.vocab)
            results[1, places] = (self._likeliest(logits) != label).to(wide)
        losses, misses = results.view(2, *labels.t().shape).transpose(1, 2)
        return losses, misses

    def logits(self, hidden: Tensor, table: Tensor, places: slice = slice(None)) -> Tensor:
        """Logits [places, batch, vocab] at some places of the sequence, the same on every rank; `hidden` and `table` as
        in `loss`. Not differentiable over several ranks: for evaluation."""
        return gather_last(F.linear(enter(hidden, self.region)[places], table), self.region)[..., : self.vocab]

    def _likeliest(self, logits: Tensor) -> Tensor:
        """The word with the largest logit, the first of equal ones: [tokens, vocab / ranks] -> [tokens]."""
        start, stop = self.region.bounds(self.vocab)
        top, word = _widened(logits, stop - start).max(-1)
        highest = largest(top.clone(), self.region.group)
        return -largest(-(word + start).masked_fill(top < highest, self.vocab), self.region.group)

    def _part(self, tokens: Tensor, table: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Sum of the weighted losses of [n, width] tokens; labels and weights [n]."""
        # the states are whole already
        logits = column_parallel_matmul(tokens, table, None, ALONE, self.store)
        losses = _VocabParallelLoss.apply(logits, labels, self.region, self.vocab)
        return (losses * weights).sum()
