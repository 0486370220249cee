"""A shuffle of documents that pass by."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar

from pangu.topology.random import random_key

Item = TypeVar("Item")
Turn = tuple[int, int, int]
"""When the turn of a document comes: epoch, tokens of the epoch that were read before then, number in the epoch."""


class PassingShuffle(Generic[Item]):
    """Shuffles documents that are read once, in order: each lets up to `span` tokens of the text after it pass, as many
    as its keys say. The order is a function of lengths and keys, however far ahead text is read, so that to go on
    within it only what still waits has to be read anew. At most `span` tokens wait, and one document.

    With a span of 60 tokens:

        document    0   1   2   3
        begins at   0  40  50  90
        lets pass  55   5  35   0
        turn       55  45  85  90     so the order is 1, 0, 2, 3
    """

    def __init__(self, span: int, *keys: object) -> None:
        """A span of 0 leaves documents in their order."""
        self._span, self._keys = span, keys
        self._waiting: list[tuple[Turn, Item]] = []

    def turn(self, epoch: int, begin: int, number: int) -> Turn:
        """That of a document that `begin` tokens of its epoch come before."""
        passing = random_key(*self._keys, epoch, number) * (self._span + 1) >> 64 if self._span else 0
        return epoch, begin + passing, number

    def put(self, turn: Turn, item: Item) -> None:
        heappush(self._waiting, (turn, item))

    def take(self, epoch: int, read: int) -> tuple[Turn, Item] | None:
        """The document whose turn it is when `read` tokens of an epoch were read; None if more has to be read."""
        if not self._waiting or self._waiting[0][0][:2] > (epoch, read):
            return None
        return heappop(self._waiting)
