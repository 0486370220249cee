"""From samples to a model's inputs: tokens, labels, loss weights, positions, documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pangu.config.data import PackingConfig

if TYPE_CHECKING:
    from pangu.topology.context import ContextRank


@dataclass(frozen=True)
class Batch:
    """One micro-batch. All tensors but `bounds` are [batch, sequence], or parts of that."""

    tokens: Tensor
    """int64."""
    labels: Tensor
    """The token after each input, int64."""
    weights: Tensor
    """1 where the loss counts, 0 at padding, fp32."""
    positions: Tensor
    """Row of the position table, int64."""
    documents: Tensor | None
    """Number of each token's document, from 0 in each row, int64. None if tokens attend across documents. [batch,
    cached tokens + these] where a KV cache holds the tokens before them."""
    samples: tuple[int, ...]
    """Global sample indices of the rows."""
    bounds: Tensor | None = None
    """Where each of `documents` begins in the flattened micro-batch, then where the last one ends, over and over: int32
    [2^n + 1]. None: not known."""
    part: ContextRank | None = None
    """Which part of the sequence tokens, labels, weights and positions are, where ranks share it; documents are always
    those of all tokens. None: all of it."""
    padding: Tensor | None = None
    """Whether a place of the sequence, or of the part, is behind all documents, bool; None: none is."""

    def cut(self, part: ContextRank | None) -> Batch:
        """A part of the sequence; None: all of it."""
        if part is None:
            return self
        names = ("tokens", "labels", "weights", "positions", *(() if self.padding is None else ("padding",)))
        cut: dict[str, Any] = {name: part.cut(getattr(self, name), 1) for name in names}
        return replace(self, **cut, part=part)

    def to(self, device: torch.device, beside: Callable[[], AbstractContextManager[object]] | None = None) -> Batch:
        """The same on a device. The host does not wait for the copies, which are queued within what `beside` returns,
        if it is given: their memory belongs to the stream that is the current one outside of it."""
        if self.tokens.device.type == device.type:
            return self
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        pinned = {name: torch.empty_like(tensor, pin_memory=True).copy_(tensor) for name, tensor in tensors.items()}
        moved: dict[str, Any] = {name: torch.empty_like(tensor, device=device) for name, tensor in tensors.items()}
        # Only now: the memory may be what another thread has just freed, which its stream has not done with. The copies
        # must wait for all that was queued before.
        with nullcontext() if beside is None else beside():
            for name, tensor in pinned.items():
                moved[name].copy_(tensor, non_blocking=True)
        return replace(self, **moved)


@dataclass(frozen=True)
class Row:
    """A sample of whole documents, each by itself, and padding behind them; or several of them. [sequence] or [batch,
    sequence]."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    counted: NDArray[np.bool_]
    """Whether the loss counts there."""
    begins: NDArray[np.bool_]
    """Whether a document begins there, or the padding."""
    padding: NDArray[np.bool_]

    def cut(self, length: int) -> Row:
        """The first tokens."""
        return Row(*(getattr(self, field.name)[..., :length] for field in fields(self)))


Sample = NDArray[np.int64] | Row
"""Of a stream: tokens cut from a row of documents, [sequence + 1], the last of which is only a label; or a row."""


def batch_of(samples: Sequence[Sample], indices: Sequence[int], packing: PackingConfig) -> Batch:
    """A micro-batch of samples of one stream, with their global indices."""
    rows = [sample for sample in samples if isinstance(sample, Row)]
    if not rows:
        return make_batch(np.stack([sample for sample in samples if not isinstance(sample, Row)]), indices, packing)
    whole = Row(*(np.stack([getattr(row, field.name) for row in rows]) for field in fields(Row)))
    return replace(_batch(whole, indices, packing), padding=torch.from_numpy(whole.padding))


def make_batch(samples: NDArray[np.int64], indices: Sequence[int], packing: PackingConfig) -> Batch:
    """Cut samples [batch, sequence + 1] with the given global indices into inputs and labels. The id `packing.eod` ends
    a document and belongs to it. Only ends among the inputs count, as in PanGu-α's pipeline."""
    tokens = np.ascontiguousarray(samples[:, :-1])
    labels = np.ascontiguousarray(samples[:, 1:])
    begins = np.ones(tokens.shape, dtype=bool)
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
    """Distance of each token from the beginning of its document, or of all, [batch, sequence]."""
    places = np.broadcast_to(np.arange(begins.shape[1]), begins.shape)
    return places - np.maximum.accumulate(np.where(begins & reset, places, 0), axis=1)


def _bounds(begins: NDArray[np.bool_]) -> NDArray[np.int32]:
    """`Batch.bounds`, filled up with empty documents: a kernel meets few shapes, and no host waits for their number."""
    starts = np.flatnonzero(begins)
    bounds = np.full(2 ** (len(starts) - 1).bit_length() + 1, begins.size, dtype=np.int32)
    bounds[: len(starts)] = starts
    return bounds
