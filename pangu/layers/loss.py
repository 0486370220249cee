"""The head and the loss, over a vocabulary that is dealt to the tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from pangu.collectives.reduce import all_reduce, largest
from pangu.collectives.regions import TensorRegion, enter, gather_last
from pangu.layers.builder import Builder, NewTensor
from pangu.layers.products import ALONE, column_product
from pangu.layers.recompute import checkpointed


class _VocabParallelLoss(Function):
    """Cross-entropy that never gathers the logits (Shoeybi et al. 2019, section 3).

    Three numbers per token are exchanged: the largest logit, the sum of exponentials and the label's logit.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, region: TensorRegion, vocab: int) -> Tensor:
        """logits [tokens, vocab / ranks], labels [tokens] -> losses [tokens], in fp32 (fp64 for fp64 logits)."""
        start, stop = region.bounds(vocab)
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        wide[:, stop - start :] = -torch.inf  # padding has no probability, hence no gradient
        top = largest(wide.amax(-1), region.group)
        wide.sub_(top[:, None])
        elsewhere = (labels < start) | (labels >= stop)
        index = (labels - start).masked_fill(elsewhere, 0)[:, None]
        label = wide.gather(-1, index)[:, 0].masked_fill(elsewhere, 0.0)
        probabilities = wide.exp_()
        label, total = all_reduce(torch.stack([label, probabilities.sum(-1)]), region.group)
        probabilities.div_(total[:, None])
        ctx.save_for_backward(probabilities, index, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - label

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, index, elsewhere = ctx.saved_tensors
        ones = (~elsewhere).to(probabilities.dtype)[:, None]
        # in place: the largest tensor of the model must not exist twice
        grad = probabilities.scatter_add_(-1, index, -ones).mul_(grads[0][:, None])
        return grad.to(ctx.dtype), None, None, None


class Head(nn.Module):
    """The output matrix, without bias, and the loss.

    A tied head (Press & Wolf 2017) has no matrix of its own and is handed the word embedding.
    """

    def __init__(self, build: Builder, vocab: int, chunk: int | None, matrix: NewTensor | None = None) -> None:
        """
        Args:
            build: stands at the parent of this layer, whose attribute `head` holds it.
            vocab: number of words, without padding.
            chunk: tokens whose logits exist at a time; they are computed again in backward, so that those of all tokens
                never exist together. None computes all at once and keeps their probabilities.
            matrix: the output matrix [vocab, width], stored in `head.weight`; None: the word embedding next door.
        """
        super().__init__()
        self.region = build.region
        self.later = build.later
        self.vocab = vocab
        self.chunk = chunk
        self.weight = None if matrix is None else build.parameter("head.weight", [matrix])

    def loss(self, hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Sum over tokens of weight x negative log-likelihood, in fp32 (fp64 for fp64 states).

        Args:
            hidden: [sequence (/ ranks with sequence parallelism), batch, width].
            table: this rank's rows of the output matrix [vocab / ranks, width], padding included.
            labels: int64 [batch, sequence].
            weights: [batch, sequence], 0 where a token does not count.
        """
        tokens = enter(hidden, self.region).flatten(0, 1)
        flat_labels, flat_weights = labels.t().flatten(), weights.t().flatten()
        if self.chunk is None:
            return self._part(tokens, table, flat_labels, flat_weights)
        size = self.chunk
        parts = zip(tokens.split(size), flat_labels.split(size), flat_weights.split(size), strict=True)
        losses = [checkpointed(self._part, some, table, label, weight) for some, label, weight in parts]
        return torch.stack(losses).sum()

    def logits(self, hidden: Tensor, table: Tensor) -> Tensor:
        """Scores [sequence, batch, vocab] of every word, the same on every rank; `hidden` and `table` as in `loss`.

        Not differentiable over several ranks: for evaluation.
        """
        return gather_last(F.linear(enter(hidden, self.region), table), self.region)[..., : self.vocab]

    def _part(self, tokens: Tensor, table: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        """Sum of weighted losses of some tokens: tokens [n, width], labels and weights [n]."""
        # the states are whole already
        logits = column_product(tokens, table, None, ALONE, self.later)
        losses = _VocabParallelLoss.apply(logits, labels, self.region, self.vocab)
        return (losses * weights).sum()
