"""Micro-batches in flight on a pipeline stage at the memory peaks of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import ge
from typing import NamedTuple

from pangu.schedule.actions import Kind
from pangu.schedule.orders import SCHEDULES, Order, reduces_each

_PARTS = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 2}
"""Kind of an action -> the part of a backward pass that it computes; 0: forward, 2: weights alone."""

_CHANGES = {Kind.FORWARD: (1, 0), Kind.BACKWARD: (-1, 0), Kind.BACKWARD_INPUT: (-1, 1), Kind.BACKWARD_WEIGHT: (0, -1)}
"""Kind of an action -> changes of the numbers of micro-batches in `PeakInFlight`."""


class PeakInFlight(NamedTuple):
    """Largest numbers of micro-batches in flight on a stage."""

    forwards: int
    """Micro-batches with pending backward pass."""
    weights: int
    """Micro-batches with only weight gradients pending."""
    chunks: tuple[int, ...]
    """Micro-batches of each chunk with pending backward pass, when these are the most."""


@lru_cache(maxsize=10_000)
def peak_in_flight(name: str, stages: int, virtual_stages: int, micro_batches: int) -> list[PeakInFlight]:
    """Return the largest numbers of micro-batches in flight on each stage of a schedule."""
    return [_peak(order) for order in SCHEDULES[name].order(stages, virtual_stages, micro_batches)]


def _peak(order: Order) -> PeakInFlight:
    held = dict.fromkeys(sorted({chunk for _, chunk, _ in order}), 0)
    forwards, weights, most, most_weights, chunks = 0, 0, 0, 0, tuple[int, ...]()
    for kind, chunk, _ in order:
        change, change_of_weights = _CHANGES[kind]
        held[chunk] += change
        forwards += change
        weights += change_of_weights
        if forwards > most:
            most, chunks = forwards, tuple(held.values())
        if weights > most_weights:
            most_weights = weights
    return PeakInFlight(most, most_weights, chunks)


def states_in_flight(order: Order, schedule: str, skipped: int = 0) -> list[tuple[int, ...]]:
    """Return the states of a stage that no other dominates, from the order of its work; `skipped`: backward passes.

    A state counts the micro-batches whose input gradient is pending, for each chunk, then those whose weight gradients
    alone are pending. Unless gradients are reduced after each micro-batch, it has 1 for each chunk with gradients of
    earlier micro-batches, else 0. It ends with the index of the chunk that computes, and the part.
    """
    chunks = sorted({chunk for _, chunk, _ in order})
    sums = len(chunks) * (not reduces_each(schedule))
    maximal: list[tuple[int, ...]] = []
    for one in sorted(set(_states(order, chunks, sums, skipped)), key=sum, reverse=True):
        if not any(other[-2:] == one[-2:] and all(map(ge, other, one)) for other in maximal):
            maximal.append(one)
    return maximal


def _states(order: Order, chunks: Sequence[int], sums: int, skipped: int) -> Iterator[tuple[int, ...]]:
    """Yield the state before each action; see `states_in_flight`."""
    place, count = {chunk: number for number, chunk in enumerate(chunks)}, len(chunks)
    held, summed = [0] * (2 * count), [0] * sums
    for kind, chunk, _ in order:
        slot = place[chunk]
        held[slot] += kind is Kind.FORWARD
        if skipped <= 0:
            yield *held, *summed, slot, _PARTS[kind]
        skipped -= kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        change, change_of_weights = _CHANGES[kind]
        held[slot] += min(change, 0)
        held[slot + count] += change_of_weights
        if sums:
            summed[slot] |= kind is not Kind.FORWARD
