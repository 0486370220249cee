"""Micro-batches that a pipeline stage holds at the fullest moments of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from pangu.pipeline.actions import Kind
from pangu.pipeline.orders import SCHEDULES, Order, reduces_each

_PARTS = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 2}
"""As `Held.part`."""


class Held(NamedTuple):
    """Micro-batches that a stage holds at a time, of each of its chunks."""

    forwards: tuple[int, ...]
    """Whose gradient of the input is to come."""
    inputs: tuple[int, ...]
    """Whose gradients of weights alone are to come."""
    summed: tuple[int, ...]
    """1 of chunks of which there are gradients of some before; () where they are reduced after each."""
    chunk: int
    """Which of them computes."""
    part: int
    """0 while a forward computes, 1 a backward or its part for the input, 2 that for the weights."""

    @property
    def begins(self) -> bool:
        """Whether this is the first backward of a chunk."""
        return self.part == 1 and bool(self.summed) and not self.summed[self.chunk]

    @property
    def has_sums_ahead(self) -> bool:
        """Whether a head may have made gradients in forward, in the last chunk, to which backward has not come."""
        came = self.part == 1 and self.chunk == len(self.forwards) - 1
        return self.forwards[-1] > 0 and bool(self.summed) and not (self.summed[-1] or came)


@lru_cache(maxsize=10_000)
def most_held(name: str, stages: int, virtual: int, micro_batches: int) -> list[tuple[int, int]]:
    """Return the most micro-batches of each stage whose backward, and whose gradients of weights, are to come."""
    return [_most(order) for order in SCHEDULES[name].order(stages, virtual, micro_batches)]


def _most(order: Order) -> tuple[int, int]:
    forwards = inputs = 0
    most = (0, 0)
    for kind, _, _ in order:
        forwards += 1 if kind is Kind.FORWARD else -(kind is not Kind.BACKWARD_WEIGHT)
        inputs += (kind is Kind.BACKWARD_INPUT) - (kind is Kind.BACKWARD_WEIGHT)
        most = max(most[0], forwards), max(most[1], inputs)
    return most


def held_in(order: Order, schedule: str) -> list[Held]:
    """What a stage holds at moments that no other moment covers, from the very order of its work in a schedule."""
    chunks = sorted({chunk for _, chunk, _ in order})
    sums = len(chunks) * (not reduces_each(schedule))
    return _fullest(set(_moments(order, chunks, sums)), len(chunks))


def _moments(order: Order, chunks: Sequence[int], sums: int) -> Iterator[tuple[int, ...]]:
    """What is held while each step computes, forwards of each chunk, then inputs, then, of so many chunks, whether
    gradients are; and the chunk and the part that the step is."""
    place, count = {chunk: number for number, chunk in enumerate(chunks)}, len(chunks)
    held, summed = [0] * (2 * count), [0] * sums
    for kind, chunk, _ in order:
        slot = place[chunk]
        held[slot] += kind is Kind.FORWARD
        yield *held, *summed, slot, _PARTS[kind]
        if kind is Kind.BACKWARD_WEIGHT:
            held[slot + count] -= 1
        elif kind is not Kind.FORWARD:
            held[slot] -= 1
            held[slot + count] += kind is Kind.BACKWARD_INPUT
        if sums:
            summed[slot] |= kind is not Kind.FORWARD


def _fullest(moments: set[tuple[int, ...]], chunks: int) -> list[Held]:
    """Those that no other of the same chunk and part is at least as much as in everything."""
    fullest: list[tuple[int, ...]] = []
    for one in sorted(moments, key=sum, reverse=True):
        if not any(other[-2:] == one[-2:] and all(map(ge, other, one)) for other in fullest):
            fullest.append(one)
    both = 2 * chunks
    return [Held(one[:chunks], one[chunks:both], one[both:-2], *one[-2:]) for one in fullest]
