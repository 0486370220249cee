"""Streaming shuffle of documents with a bounded buffer."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from pangu.topology.random import random_key

Item = TypeVar("Item")
Turn = tuple[int, int, int]
"""Shuffled position of a document: epoch, tokens of the epoch read before it is due, document number in the epoch."""


class PassingShuffle(Generic[Item]):
    """Streaming shuffle that delays each document by a keyed pseudorandom number of tokens, at most `span`.

    The order depends only on document lengths and keys, not on how far ahead the text is read, so that resuming has to
    reread only the buffered documents. The buffer holds at most `span` tokens and one document. With a span of 60:

        document    0   1   2   3
        begins at   0  40  50  90
        delay      55   5  35   0
        turn       55  45  85  90     so the order is 1, 0, 2, 3
    """

    def __init__(self, span: int, *keys: object) -> None:
        """Prepare an empty buffer; a span of 0 keeps the documents in order."""
        self._span, self._keys = span, keys
        self._waiting: list[tuple[Turn, Item]] = []

    def turn(self, epoch: int, begin: int, number: int) -> Turn:
        """Return the turn of document `number` of an epoch, which starts after `begin` tokens of the epoch."""
        passing = random_key(*self._keys, epoch, number) * (self._span + 1) >> 64 if self._span else 0
        return epoch, begin + passing, number

    def put(self, turn: Turn, item: Item) -> None:
        """Add a document to the buffer."""
        heappush(self._waiting, (turn, item))

    def take(self, epoch: int, read: int) -> tuple[Turn, Item] | None:
        """Return the next document once `read` tokens of an epoch have been read; None if more must be read first."""
        if not self._waiting or self._waiting[0][0][:2] > (epoch, read):
            return None
        return heappop(self._waiting)
