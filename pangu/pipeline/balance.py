"""Distribution of layers over the chunks of a pipelined model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from pangu.schedule.orders import NumbersError


def split_layers(
    num_layers: int, chunks: int, explicit: Sequence[int] | None = None, costs: Sequence[float] | None = None
) -> list[range]:
    """Return the layers of each chunk in model order, at least one per chunk, balanced by cost unless `explicit`.

    The largest chunk costs as little as possible; among such splits the sum of squares is smallest, and then later
    chunks get more layers, since in most schedules early stages hold more activations. PanGu's query layer is the last
    layer. Raise `NumbersError` if there are more chunks than layers, or `explicit` does not add up.
    `costs` has the time per layer in any unit, including embedding (first layer) and head (last); None: all equal.
    """
    if chunks > num_layers:
        raise NumbersError(f"{chunks} chunks for {num_layers} layers", f"each needs a layer; use at most {num_layers}")
    if explicit is not None:
        return _as_given(num_layers, chunks, explicit)
    each = np.ones(num_layers) if costs is None else np.asarray(costs, dtype=np.float64)
    assert len(each) == num_layers, f"{len(each)} costs for {num_layers} layers"
    sums = np.concatenate([[0.0], np.cumsum(each)])
    cost = np.where(np.tri(num_layers + 1, dtype=bool), np.inf, sums[None, :] - sums[:, None])  # [start, stop]
    largest = max(cost[part.start, part.stop] for part in _best(cost, chunks, np.maximum))
    return _best(np.where(cost <= largest, cost**2, np.inf), chunks, np.add)


def _as_given(num_layers: int, chunks: int, explicit: Sequence[int]) -> list[range]:
    counts, rule = list(explicit), None
    if len(counts) != chunks:
        rule = "must be " + ("one number" if chunks == 1 else f"{chunks} numbers, one for each chunk")
    elif min(counts) < 1:
        rule = "each chunk needs at least one layer"
    elif sum(counts) != num_layers:
        rule = f"must add up to the model's {num_layers} layers, not {sum(counts)}"
    if rule is not None:
        raise NumbersError(f"layers per chunk {counts}", f"{rule}; use null")
    return [range(start, stop) for start, stop in pairwise([0, *accumulate(counts)])]


def _best(cost: np.ndarray, chunks: int, join: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> list[range]:
    """Return the split of layers into chunks with the smallest joined cost, by dynamic programming."""
    # `cost`: [start, stop] of the layers from start to stop - 1, infinite for none. `join`: costs of the chunks so far
    # and of one more -> cost of all. best[j] of k chunks is the smallest join(best[i] of k - 1 chunks, cost[i, j]),
    # since the best split of the layers before i does not depend on those after it; walking back through the chosen i
    # gives the split.
    num_layers = len(cost) - 1
    best = np.full(num_layers + 1, np.inf)  # indexed by the end of the chunks so far
    best[0] = 0.0
    starts = []  # of each chunk, indexed by its end
    for chunk in range(chunks):
        last = num_layers - (chunks - chunk - 1)  # leave one layer for each remaining chunk
        joined = join(best[chunk:last, None], cost[chunk:last, chunk + 1 : last + 1])
        choice = joined.argmin(0)  # the first of equal ones
        start_of = np.zeros(num_layers + 1, dtype=np.int64)
        start_of[chunk + 1 : last + 1] = choice + chunk
        best = np.full(num_layers + 1, np.inf)
        best[chunk + 1 : last + 1] = joined.min(0)
        starts.append(start_of)
    cut, stop = [], num_layers
    for start_of in reversed(starts):
        cut.append(range(int(start_of[stop]), stop))
        stop = cut[-1].start
    return cut[::-1]
