"""Samples of whole documents from a text stream: documents are packed block by block, as they come."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pangu.data.batch import Row
from pangu.data.packed_source import PackedSource, StreamRecipe
from pangu.data.packing import Piece, best_fit_decreasing, packed_row
from pangu.topology.random import generator

BLOCK_TOKENS = 1 << 20
FEWEST_SAMPLES = 64
"""Documents packed together: as many as have these tokens, and fill these samples, but of one epoch."""


class DocumentBlocks:
    """Endless samples of a source, packed by `best_fit` or `single`. Raises UserError as `PackedSource` does.

    The documents of a block are known before its first sample, and its samples are a function of them. So a position is
    that of the block's first document and a number of samples, with their length.
    """

    def __init__(self, recipe: StreamRecipe) -> None:
        """Prepare the source; `begin` starts reading."""
        self._recipe, self._documents, ids = recipe, PackedSource(recipe), recipe.data.packing
        known = [token for token in (ids.bos, ids.eod) if isinstance(token, int)]
        self._bos, self._begin = ids.bos, known[0]  # first input of a document that does not begin with `bos`
        self._pad = next(token for token in (ids.pad, ids.eod, *known) if token is not None)
        whole = max(BLOCK_TOKENS, FEWEST_SAMPLES * recipe.sequence)
        self._size = whole if ids.method == "best_fit" else 1

    def begin(self, position: dict[str, Any] | None) -> None:
        """Start reading at a position (None: the beginning). Raises KeyError, TypeError or ValueError if invalid."""
        self._block: dict[str, Any] | None = None if position is None else position["block"]
        self._taken = 0 if position is None else int(position["taken"])
        own = self._recipe.sequence
        self._sequence = own if position is None else int(position.get("sequence", own))  # of the samples taken
        self._documents.begin(self._block)
        self._samples: list[list[Piece]] | None = None
        self._held: NDArray[np.int32] | None = None  # first document of the next epoch
        self.epoch = 0

    def close(self) -> None:
        """Stop prefetching."""
        self._documents.close()

    @property
    def position(self) -> dict[str, Any]:
        """JSON-compatible position to resume from."""
        return {"block": self._block, "taken": self._taken, "sequence": self._sequence}

    def take(self) -> Row:
        """Return the next sample."""
        if self._samples is None:
            self._samples = self._packed()
            if self._sequence != self._recipe.sequence:
                # the block was packed in other samples: continue after as many tokens
                taken = -(-self._taken * self._sequence // self._recipe.sequence)
                self._taken, self._sequence = min(taken, len(self._samples)), self._recipe.sequence
            if self._taken > len(self._samples):
                raise self._documents.changed()
        while self._taken == len(self._samples):
            self._block = self._documents.position_before(0 if self._held is None else len(self._held))
            self._samples, self._taken = self._packed(), 0
        self._taken += 1
        return packed_row(self._samples[self._taken - 1], self._recipe.sequence, self._pad)

    def _packed(self) -> list[list[Piece]]:
        """Return the samples of the next block, in random order."""
        pieces, size, keys = list[Piece](), 0, None
        while size < self._size:
            ids = self._documents.next_document() if self._held is None else self._held
            turn, self._held = self._documents.turn, None
            if keys is not None and turn[0] != self.epoch:
                self._held = ids
                break
            if len(ids):
                keys, self.epoch = keys or turn, turn[0]
                pieces += self._pieces(ids)
                size += len(ids)
        if self._size == 1:
            return [[piece] for piece in pieces]
        source = generator(*self._recipe.keys, "packing", *(keys or ()))
        pieces = [pieces[place] for place in source.permutation(len(pieces))]
        bins = best_fit_decreasing(np.array([len(piece.labels) for piece in pieces]), self._recipe.sequence)
        samples: list[list[Piece]] = [[] for _ in range(bins.max(initial=-1) + 1)]
        for place in source.permutation(len(pieces)):
            samples[bins[place]].append(pieces[place])
        return [samples[place] for place in source.permutation(len(samples))]

    def _pieces(self, ids: NDArray[np.int32]) -> list[Piece]:
        first = int(ids[0]) == self._bos
        labels, inputs = ids[first:], ids if first else np.concatenate([[self._begin], ids])
        starts = range(0, len(labels), self._recipe.sequence)
        return [Piece(int(inputs[start]), labels[start : start + self._recipe.sequence], None) for start in starts]
