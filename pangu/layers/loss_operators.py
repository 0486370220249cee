"""Passes over the logits on an accelerator: one that reads them, one that overwrites them."""

from __future__ import annotations

import torch
from torch import Tensor

from pangu.layers.fused import fused
from pangu.layers.loss_rows import overwrite_with_gradient, row_statistics


def _statistics(logits: Tensor, labels: Tensor, start: Tensor, width: Tensor) -> Tensor:
    wide = torch.promote_types(logits.dtype, torch.float32)
    """Compute `row_statistics` as an online softmax (Milakov & Gimelshein 2018), to be compiled."""
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
