"""The head and the loss."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def tied_logits(hidden: Tensor, table: Tensor) -> Tensor:
    """Scores of every vocabulary entry with the word embedding as the head, without bias.

    Args:
        hidden: [sequence, batch, hidden].
        table: [vocab, hidden].

    Returns:
        [sequence, batch, vocab] in the format of `hidden`.
    """
    return F.linear(hidden, table)


def weighted_token_loss(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens of weight x negative log-likelihood, in fp32 (fp64 for fp64 logits).

    Args:
        logits: [sequence, batch, vocab].
        labels: int64 [batch, sequence].
        weights: [batch, sequence], 0 where a token does not count.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), labels.t().flatten(), reduction="none")
    return (losses * weights.t().flatten()).sum()
