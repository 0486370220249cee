"""Micro-batches: tokens, labels, loss weights, positions and document numbers; labels of multi-token prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pangu.config.data import PackingConfig

if TYPE_CHECKING:
    from pangu.topology.context import ContextRank


@dataclass(frozen=True)
class Batch:
    """Micro-batch of model inputs. All tensors but `bounds` are [batch, sequence], or a rank's part of that."""

    tokens: Tensor
    """Token ids, int64."""
    labels: Tensor
    """Next token after each input, int64."""
    weights: Tensor
    """Loss weights, fp32: 1 where the loss counts, 0 elsewhere and at padding."""
    positions: Tensor
    """Row of the position table for each token, int64."""
    documents: Tensor | None
    """Document number of each token, from 0 in each row, int64; None: not separated. KV cache: [batch, cached+new]."""
    samples: tuple[int, ...]
    """Global sample indices of the rows."""
    bounds: Tensor | None = None
    """Document starts in the flattened micro-batch, padded by its end to 2^n + 1, int32; None: as `documents`."""
    part: ContextRank | None = None
    """Context-parallel part that tokens, labels, weights and positions (not `documents`) hold. None: full sequence."""
    padding: Tensor | None = None
    """Mask of the padding after all documents, within the sequence or the part, bool; None: no padding."""
    mtp_labels: Tensor | None = None
    """Labels of multi-token prediction, int64 [batch, modules, sequence] (`with_mtp_targets`); None: none computes."""
    mtp_weights: Tensor | None = None
    """Loss weights of `mtp_labels`."""

    def cut(self, part: ContextRank | None) -> Batch:
        """Return the batch with only `part` of the sequence; None: all of it."""
        if part is None:
            return self
        names = ("tokens", "labels", "weights", "positions", "padding", "mtp_labels", "mtp_weights")
        tensors = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        cut: dict[str, Any] = {name: part.cut(tensor, -1) for name, tensor in tensors.items()}
        return replace(self, **cut, part=part)

    def halves(self) -> list[Batch]:
        """Return the first and the second half of the rows; of an odd number, the first half has one more."""
        count, rows = len(self.tokens), -(-len(self.tokens) // 2)
        return [self._rows(0, rows), self._rows(rows, count)]

    def _rows(self, start: int, stop: int) -> Batch:
        tensors: dict[str, Any] = {name: x[start:stop] for name, x in vars(self).items() if isinstance(x, Tensor)}
        if self.bounds is not None and self.documents is not None:
            length = self.documents.shape[1]
            # without a host sync: documents of other rows stay, but are empty
            tensors["bounds"] = (self.bounds - start * length).clamp(0, (stop - start) * length)
        return replace(self, **tensors, samples=self.samples[start:stop])

    def uncounted(self) -> Batch:
        """Return the batch with all tokens masked out of the loss, its gradients and the loads of experts."""
        padding = torch.ones_like(self.tokens, dtype=torch.bool)
        return replace(self, weights=torch.zeros_like(self.weights), padding=padding)

    def to(self, device: torch.device, stream: Callable[[], AbstractContextManager[object]] = nullcontext) -> Batch:
        """Copy the batch to a device without a host sync; copies are queued in the context that `stream` returns."""
        if self.tokens.device.type == device.type:
            return self
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        pinned = {name: torch.empty_like(tensor, pin_memory=True).copy_(tensor) for name, tensor in tensors.items()}
        moved: dict[str, Any] = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
        # Allocate outside of `stream`, so that the memory belongs to the current stream, and only then copy: another
        # thread may just have freed this memory while its stream still uses it, so the copies wait for all queued work.
        with stream():
            for name, tensor in pinned.items():
                moved[name].copy_(tensor, non_blocking=True)
        return replace(self, **moved)


@dataclass(frozen=True)
class Row:
    """Sample of whole, independent documents and padding after them, [sequence]; or several, [batch, sequence]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    counted: NDArray[np.bool_]
    """Mask of the tokens that count in the loss."""
    begins: NDArray[np.bool_]
    """Mask of the tokens that begin a document or the padding."""
    padding: NDArray[np.bool_]

    def cut(self, length: int) -> Row:
        """Return the first `length` tokens."""
        return Row(*(getattr(self, field.name)[..., :length] for field in fields(self)))


Sample = NDArray[np.int64] | Row
"""Sample of a stream: [sequence + 1] tokens of concatenated documents, the last one only a label; or a `Row`."""


def padding_of(sample: NDArray[Any] | Row) -> int:
    """Return the number of padding tokens in a sample."""
    return int(sample.padding.sum()) if isinstance(sample, Row) else 0


def batch_of(samples: Sequence[Sample], indices: Sequence[int], packing: PackingConfig) -> Batch:
    """Return the micro-batch of samples of one stream, given their global indices."""
    rows = [sample for sample in samples if isinstance(sample, Row)]
    if not rows:
        return make_batch(np.stack([sample for sample in samples if not isinstance(sample, Row)]), indices, packing)
    whole = Row(*(np.stack([getattr(row, field.name) for row in rows]) for field in fields(Row)))
    return replace(_batch(whole, indices, packing), padding=torch.from_numpy(whole.padding))


def make_batch(samples: NDArray[np.int64], indices: Sequence[int], packing: PackingConfig) -> Batch:
    """Cut samples [batch, sequence + 1] with the given global indices into inputs and labels."""
    tokens = np.ascontiguousarray(samples[:, :-1])
    labels = np.ascontiguousarray(samples[:, 1:])
    begins = np.ones(tokens.shape, dtype=bool)
    # `eod` ends a document and belongs to it. Only ends among the inputs count, as in PanGu-α's pipeline.
    begins[:, 1:] = _equal(tokens[:, :-1], packing.eod)
    counted = np.ones(tokens.shape, dtype=bool)
    return _batch(Row(tokens, labels, counted, begins, padding=~counted), indices, packing)


def _batch(rows: Row, indices: Sequence[int], packing: PackingConfig) -> Batch:
    documents = np.cumsum(rows.begins, axis=1) - 1 if packing.reset_mask else None
    return Batch(
        tokens=torch.from_numpy(rows.tokens),
        labels=torch.from_numpy(rows.labels),
        weights=torch.from_numpy((rows.counted & ~_equal(rows.tokens, packing.pad)).astype(np.float32)),
        positions=torch.from_numpy(_positions(rows.begins, packing.reset_positions)),
        documents=None if documents is None else torch.from_numpy(documents),
        samples=tuple(indices),
        bounds=torch.from_numpy(_bounds(rows.begins)) if packing.reset_mask else None,
    )


def _equal(tokens: NDArray[np.int64], token: int | None) -> NDArray[np.bool_]:
    return np.zeros(tokens.shape, dtype=bool) if token is None else tokens == token


def _positions(begins: NDArray[np.bool_], reset: bool) -> NDArray[np.int64]:
    places = np.broadcast_to(np.arange(begins.shape[1]), begins.shape)
    return places - np.maximum.accumulate(np.where(begins & reset, places, 0), axis=1)


def _bounds(begins: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return `Batch.bounds`, padded by empty documents: kernels see few shapes, and the count needs no host sync."""
    starts = np.flatnonzero(begins)
    bounds = np.full(2 ** (len(starts) - 1).bit_length() + 1, begins.size, dtype=np.int32)
    bounds[: len(starts)] = starts
    return bounds


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
