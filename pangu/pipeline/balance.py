"""Which layers each chunk of a pipelined model has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise


def split_layers(
    num_layers: int, chunks: int, explicit: Sequence[int] | None = None, costs: Sequence[float] | None = None
) -> list[range]:
    """The layers of each chunk, in model order; every chunk has at least one.

    Args:
        num_layers: layers of the model; PanGu's query layer is the last of them, so it is in the last chunk.
        chunks: stages times virtual stages.
        explicit: layers of each chunk, if the user gives them.
        costs: time of each layer in any unit. The caller adds the embedding's to the first layer's and the head's to
            the last layer's, for that is where they are computed. Without it all layers cost the same.

    Without `explicit`, the largest chunk costs as little as can be, and of the ways to reach that the one with the
    smallest sum of squares is taken; if several have it, later chunks get more layers, since in most schedules early
    stages hold more activations.

    Raises ValueError if there are more chunks than layers, or `explicit` does not add up.
    """
    if chunks > num_layers:
        raise ValueError(f"{chunks} chunks for {num_layers} layers: each needs a layer; at most {num_layers} work")
    if explicit is not None:
        return _as_given(num_layers, chunks, explicit)
    sums = [0.0, *accumulate(costs if costs is not None else [1.0] * num_layers)]
    assert len(sums) == num_layers + 1, f"{len(sums) - 1} costs for {num_layers} layers"

    def cost(start: int, stop: int) -> float:
        return sums[stop] - sums[start]

    largest = max(cost(part.start, part.stop) for part in _best(num_layers, chunks, cost, max))

    def square(start: int, stop: int) -> float:
        return cost(start, stop) ** 2 if cost(start, stop) <= largest else float("inf")

    return _best(num_layers, chunks, square, lambda total, part: total + part)


def _as_given(num_layers: int, chunks: int, explicit: Sequence[int]) -> list[range]:
    counts = list(explicit)
    if len(counts) != chunks:
        numbers = "one number" if chunks == 1 else f"{chunks} numbers, one for each chunk"
        raise ValueError(f"layers per chunk {counts}: must be {numbers}; null works")
    if min(counts) < 1:
        raise ValueError(f"layers per chunk {counts}: each chunk needs at least one layer; null works")
    if sum(counts) != num_layers:
        raise ValueError(
            f"layers per chunk {counts}: must add up to the model's {num_layers} layers, not {sum(counts)}; null works"
        )
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]


def _best(
    num_layers: int, chunks: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> list[range]:
    """The cut of the layers into chunks whose joined costs are smallest, by dynamic programming over (chunk, layer)."""
    best = {0: 0.0}  # where the chunks so far end -> their joined cost
    starts: list[dict[int, int]] = []  # of each chunk, by where it ends
    for chunk in range(chunks):
        last = num_layers - (chunks - chunk - 1)  # leaves one layer for each chunk to come
        ways = {
            stop: min((join(best[start], cost(start, stop)), start) for start in best if start < stop)
            for stop in range(chunk + 1, last + 1)
        }
        best = {stop: total for stop, (total, _) in ways.items()}
        starts.append({stop: start for stop, (_, start) in ways.items()})
    cut, stop = [], num_layers
    for start_of in reversed(starts):
        cut.append(range(start_of[stop], stop))
        stop = start_of[stop]
    return cut[::-1]
