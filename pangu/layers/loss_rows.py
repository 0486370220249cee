"""Passes over the logits of a loss, a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def row_statistics(logits: Tensor, labels: Tensor, start: int, width: int) -> Tensor:
    """Return the largest logit, the label's and the sum of exp(logit - largest) per row: [3, tokens], at least fp32."""
    # Columns are tokens from `start` to `start + width`, then padding. In a row without columns, or without its label,
    # the least number stands for the logit. Few rows are widened at a time, to stay in a CPU's cache.
    wide = torch.promote_types(logits.dtype, torch.float32)
    result = torch.empty(3, len(logits), dtype=wide, device=logits.device)
    index, elsewhere = _index(labels, start, width)
    top, label, total = result[..., None]
    for rows, row_top, row_total in _blocks(logits, top, total):
        values = widened(rows, width)
        row_top.copy_(values.amax(-1, keepdim=True).clamp(min=torch.finfo(wide).min))
        row_total.copy_(values.sub_(row_top).exp_().sum(-1, keepdim=True))
        del values  # before the next rows are widened
    label.copy_(logits.gather(-1, index)).masked_fill_(elsewhere, torch.finfo(wide).min)
    return result


def overwrite_with_gradient(
    logits: Tensor, log_sum: Tensor, labels: Tensor, grad: Tensor, start: int, width: int
) -> None:
    """Overwrite logits with their gradient; `log_sum`: of the exponentials over the full vocabulary, [tokens]."""
    # (probabilities, less 1 at the label) times the row's gradient
    index, elsewhere = _index(labels, start, width)
    minus_one = elsewhere.to(log_sum.dtype) - 1.0
    for rows, row_sum, label, share, row_grad in _blocks(logits, log_sum[:, None], index, minus_one, grad[:, None]):
        # unnamed, so that they are freed before the next rows are widened
        rows.copy_(widened(rows, width).sub_(row_sum).exp_().scatter_add_(-1, label, share).mul_(row_grad))


def _index(labels: Tensor, start: int, width: int) -> tuple[Tensor, Tensor]:
    index = (labels - start)[:, None]
    elsewhere = (index < 0) | (index >= width)
    return index.masked_fill(elsewhere, 0), elsewhere


def widened(rows: Tensor, width: int) -> Tensor:
    """Return a copy in fp32 (fp64 for fp64), with -inf in the padding from column `width` on."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32), copy=True)
    wide[:, width:] = -torch.inf
    return wide


def _blocks(logits: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors in blocks of rows: 2 MiB of fp32 logits on a CPU (its cache), else 256 MiB (launch cost)."""
    rows = block_rows(logits.shape[-1], logits.device.type)
    return zip(*(tensor.split(rows) for tensor in (logits, *others)), strict=True)


def block_rows(width: int, device: str) -> int:
    """Return the number of rows per block of logits of this width."""
    return max(1, (2**19 if device == "cpu" else 2**26) // width)
