"""Logits and token losses of the head for evaluation, not differentiable over several ranks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.collectives.reduce import largest
from pangu.collectives.regions import enter, gather_last
from pangu.layers.fused import of_any_length
from pangu.layers.loss import Head
from pangu.layers.loss_rows import block_rows, widened
from pangu.layers.vocab_parallel_loss import VocabParallelLoss
from pangu.topology.placement import room


def token_losses(head: Head, hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Return losses and misses (1 if greedy decoding differs from the label), [2, batch, sequence], on every rank."""
    # fp32 (fp64 for fp64 states), 0 where the weight is 0; arguments as in `Head.loss`
    tokens, flat_labels = enter(hidden, head.region).flatten(0, 1), labels.t().flatten()
    wide = torch.promote_types(tokens.dtype, torch.float32)
    results = torch.zeros(2, len(tokens), dtype=wide, device=tokens.device)
    counted = weights.t().flatten().nonzero()[:, 0]
    for places in counted.split(block_rows(table.shape[0], tokens.device.type)):
        # only rows that count: their number is arbitrary
        rows, label = of_any_length(F.linear(tokens[places], table), flat_labels[places])
        results[0, places] = VocabParallelLoss.apply(rows, label, head.region, head.vocab)
        results[1, places] = (_likeliest(head, rows) != label).to(wide)
    return results.view(2, *labels.t().shape).transpose(1, 2)


def logits(head: Head, hidden: Tensor, table: Tensor, places: slice = slice(None)) -> Tensor:
    """Return logits [places, batch, vocab] at some places of the sequence, equal on every rank."""
    rows = F.linear(enter(hidden, head.region)[places], table)[..., : room(head.vocab, head.region.size)]
    return gather_last(rows, head.region)[..., : head.vocab]


def _likeliest(head: Head, rows: Tensor) -> Tensor:
    """Return the token with the largest logit, the first of equal ones: [tokens, vocab / ranks] -> [tokens]."""
    start, stop = head.region.bounds(head.vocab)
    top, word = widened(rows, stop - start).max(-1)
    highest = largest(top.clone(), head.region.group)
    return -largest(-(word + start).masked_fill(top < highest, head.vocab), head.region.group)
