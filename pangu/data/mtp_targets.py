"""Labels of multi-token prediction, made before a sequence is split over context-parallel ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.data.batch import Batch


def with_mtp_targets(batch: Batch, modules: int, eod: int | None) -> Batch:
    """Return a batch of full sequences with the labels and loss weights of `modules` of multi-token prediction.

    Module j, from 1 on, predicts at position i the label of position i + j. It has no target where that label has
    none, and none in another document than the token at i: documents end with `eod`, and where masks or positions
    start again. With j = 1, and a document of three tokens at the end of a sequence:

        position    0  1  2  3
        token       a  b  c eod
        label       b  c eod x      x: of the next document
        ahead       c eod -  -
    """
    ends = torch.zeros_like(batch.tokens, dtype=torch.bool) if eod is None else batch.tokens == eod
    ends[:, :-1] |= batch.positions[:, 1:] != batch.positions[:, :-1] + 1
    if batch.documents is not None:
        ends[:, :-1] |= batch.documents[:, 1:] != batch.documents[:, :-1]
    # number of documents that end before a position, and up to it
    before, ended = ends.cumsum(1) - ends.long(), ends.cumsum(1)

    def shifted(values: Tensor, by: int, fill: float) -> Tensor:
        return F.pad(values[:, by:], (0, min(by, values.shape[1])), value=fill)

    labels, weights = [], []
    for by in range(1, modules + 1):
        labels.append(shifted(batch.labels, by, 0))
        weights.append(shifted(batch.weights, by, 0.0) * (shifted(ended, by, -1) == before))
    return replace(batch, mtp_labels=torch.stack(labels, 1), mtp_weights=torch.stack(weights, 1))


def all_targets(batch: Batch) -> tuple[Tensor, Tensor, int]:
    """Return the labels and loss weights [predictions x batch, sequence] of a batch, and the number of predictions."""
    if batch.mtp_labels is None or batch.mtp_weights is None:
        return batch.labels, batch.weights, 1
    labels = torch.cat([batch.labels, *batch.mtp_labels.unbind(1)])
    return labels, torch.cat([batch.weights, *batch.mtp_weights.unbind(1)]), 1 + batch.mtp_labels.shape[1]
