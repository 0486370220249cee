"""In which order each stage computes: one short function per pipeline schedule.

A function takes (stages p, chunks per stage v, micro-batches m) and gives, for every stage, its forwards and backwards
in order. Messages and parameter actions are added by schedule.py, the same way for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from pangu.pipeline.actions import Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741

Step = tuple[Kind, int, int]
"""Kind, chunk (in model order), micro-batch."""
Order = list[Step]
"""What one stage computes."""


@dataclass(frozen=True)
class Family:
    """A schedule for any number of stages."""

    order: Callable[[int, int, int], list[Order]]
    """(stages, virtual, micro_batches) -> the order of each stage."""
    virtual: tuple[int, int | None]
    """Fewest and most chunks per stage (None: no limit)."""
    v_shape: bool = False
    """Chunks run down the stages and up again (stage 0 has the first and the last) instead of round and round."""
    two_phases: bool = False
    """Parameters of a chunk are released between its last forward and its first backward."""


SCHEDULES: dict[str, Family] = {}
"""All schedules by name. A new one is one function with `@register(...)`."""


def register(
    name: str, virtual: tuple[int, int | None] = (1, 1), v_shape: bool = False, two_phases: bool = False
) -> Callable[[Callable[[int, int, int], list[Order]]], Callable[[int, int, int], list[Order]]]:
    """Decorator that makes an order function known as schedule `name`; the rest as in Family."""

    def add(order: Callable[[int, int, int], list[Order]]) -> Callable[[int, int, int], list[Order]]:
        SCHEDULES[name] = Family(order, virtual, v_shape, two_phases)
        return order

    return add


@register("breadth_first", virtual=(1, None), two_phases=True)
def breadth_first(stages: int, virtual: int, micro_batches: int) -> list[Order]:
    """All micro-batches through a chunk before the next chunk, so that a chunk's parameters are gathered twice and its
    gradients reduced once per step (Lamy-Poirier, arXiv 2211.05953)."""
    micros = range(micro_batches)
    return [
        [(F, loop * stages + stage, micro) for loop in range(virtual) for micro in micros]
        + [(B, loop * stages + stage, micro) for loop in reversed(range(virtual)) for micro in micros]
        for stage in range(stages)
    ]


@register("gpipe")
def gpipe(stages: int, virtual: int, micro_batches: int) -> list[Order]:
    """All forwards, then all backwards (Huang et al., arXiv 1811.06965)."""
    return breadth_first(stages, virtual, micro_batches)


def _alternate(warm_up: int, forwards: Order, backwards: Order) -> Order:
    """`warm_up` forwards, then one forward and one backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = [step for pair in zip(forwards[warm_up:], backwards, strict=False) for step in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


@register("1f1b")
def one_f_one_b(stages: int, virtual: int, micro_batches: int) -> list[Order]:
    """One forward, one backward: stage r never holds more than p - r micro-batches (PipeDream-flush, Narayanan et al.,
    arXiv 2006.09503)."""
    return [
        _alternate(
            stages - stage - 1,
            [(F, stage, micro) for micro in range(micro_batches)],
            [(B, stage, micro) for micro in range(micro_batches)],
        )
        for stage in range(stages)
    ]


@register("interleaved", virtual=(2, None))
def interleaved(stages: int, virtual: int, micro_batches: int) -> list[Order]:
    """1F1B over `virtual` chunks per stage, which take turns group by group (Narayanan et al., arXiv 2104.04473, 2.2).

    A group is p micro-batches there, so m must be a multiple of p. Here m is cut into m // p groups as even as can be
    (one group if m < p): a group of at least p leaves no stage waiting for the chunk before to come round, and the
    warm-up grows with the largest group, so even groups hold the fewest activations.
    """
    num_groups = max(1, micro_batches // stages)
    cuts = [micro_batches * group // num_groups for group in range(num_groups + 1)]
    groups = [range(start, stop) for start, stop in pairwise(cuts)]
    largest = max(len(group) for group in groups)
    loops = range(virtual)
    return [
        _alternate(
            2 * (stages - stage - 1) + (virtual - 1) * largest,
            [(F, loop * stages + stage, micro) for group in groups for loop in loops for micro in group],
            [(B, loop * stages + stage, micro) for group in groups for loop in reversed(loops) for micro in group],
        )
        for stage in range(stages)
    ]


@register("zb_h1")
def zb_h1(stages: int, virtual: int, micro_batches: int) -> list[Order]:
    """1F1B with the backward split: stage r computes weight gradients r micro-batches late, so that the gradient of the
    input leaves at once and the weight gradients fill the end (ZB-H1, Qi et al., arXiv 2401.10241, 2.2)."""
    orders = []
    for stage, one_f_one_b_order in enumerate(one_f_one_b(stages, virtual, micro_batches)):
        order: Order = []
        for kind, chunk, micro in one_f_one_b_order:
            order.append((F if kind is F else I, chunk, micro))
            if kind is B and micro >= stage:
                order.append((W, chunk, micro - stage))
        order += [(W, stage, micro) for micro in range(max(0, micro_batches - stage), micro_batches)]
        orders.append(order)
    return orders


@register("zb_v", virtual=(2, 2), v_shape=True)
def zb_v(stages: int, virtual: int, micro_batches: int) -> list[Order]:
    """Two chunks per stage in a V, backward split (ZB-V, Qi et al., arXiv 2401.10241; V schedules, arXiv 2405.15362).

    Found by carrying it out in equal ticks: a stage takes the first that is ready of a backward for the input, a
    forward of its upper chunk, a forward of its lower chunk, a weight gradient; and holds at most 2p chunk
    activations (what 1F1B's first stage holds), the last of them for the upper chunk only. That never gets stuck: the
    oldest unfinished micro-batch finds, wherever it goes next, no younger one before it in the same chunk, so at most
    2p - 1 places are taken. Forwards and backwards of a chunk keep the order of the micro-batches.
    """
    num_chunks, places = 2 * stages, 2 * stages
    forwards, inputs, weights = [[0] * num_chunks for _ in range(3)]  # micro-batches done, per chunk
    orders: list[Order] = [[] for _ in range(stages)]

    def next_step(stage: int) -> Step | None:
        lower, upper = stage, num_chunks - 1 - stage
        held = sum(forwards[chunk] - weights[chunk] for chunk in (lower, upper))
        for chunk in (lower, upper):
            arrived = forwards[chunk] if chunk == num_chunks - 1 else inputs[chunk + 1]
            if inputs[chunk] < arrived:
                return I, chunk, inputs[chunk]
        for chunk, limit in ((upper, places), (lower, places - 1)):
            arrived = micro_batches if chunk == 0 else forwards[chunk - 1]
            if forwards[chunk] < arrived and held < limit:
                return F, chunk, forwards[chunk]
        for chunk in (upper, lower):
            if weights[chunk] < inputs[chunk]:
                return W, chunk, weights[chunk]
        return None

    done = {F: forwards, I: inputs, W: weights}
    while weights[0] < micro_batches or min(weights) < micro_batches:
        for stage, step in enumerate([next_step(stage) for stage in range(stages)]):
            if step is not None:
                done[step[0]][step[1]] += 1
                orders[stage].append(step)
    return orders
