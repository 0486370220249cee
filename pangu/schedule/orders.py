"""Order of computations on each stage: one short function per pipeline schedule.

A function takes (stages p, chunks per stage v, micro-batches m) and returns each stage's forward and backward passes in
order. schedule.py adds messages and parameter actions, in the same way for all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

from pangu.layers.turns import LayerPart, Turn
from pangu.schedule.actions import Kind

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT  # noqa: E741


class NumbersError(ValueError):
    """Error for numbers that a schedule or the split into chunks does not allow: the value, and the rule."""

    def __init__(self, value: str, rule: str) -> None:
        """Store the rule, which names values that work."""
        super().__init__(f"{value}: {rule}")
        self.rule = rule


Step = tuple[Kind, int, int]
"""Kind, chunk (in model order), micro-batch."""
Order = list[Step]


@dataclass(frozen=True)
class Family:
    """Schedule for any number of stages."""

    order: Callable[[int, int, int], list[Order]]
    """Function (stages, virtual_stages, micro_batches) -> order of each stage."""
    virtual_stages: tuple[int, int | None]
    """Minimum and maximum chunks per stage (None: no limit)."""
    v_shape: bool = False
    """True if chunks run down the stages and up again (stage 0 has first and last) rather than round and round."""
    two_phases: bool = False
    """True if a chunk stays unsharded through its forward passes, and again through its backward passes."""


# The backward pass, which runs in the opposite order, overlaps in the same way:
#
#    computing           ATTENTION 0 | ATTENTION 1 | EXPERTS 0 | EXPERTS 1 | OUTPUT 0, 1
#    tokens to experts               | 0           | 1         |           |
#    back                            |             |           | 0         | 1
OVERLAPPED = tuple(Turn(part, half) for part in LayerPart for half in (0, 1))
"""Turns of a layer with experts in which each half of a micro-batch computes while the other one's tokens travel."""

SCHEDULES: dict[str, Family] = {}
"""Schedules by name; `@register(...)` adds one."""


def register(
    name: str, virtual_stages: tuple[int, int | None] = (1, 1), v_shape: bool = False, two_phases: bool = False
) -> Callable[[Callable[[int, int, int], list[Order]]], Callable[[int, int, int], list[Order]]]:
    """Return a decorator that registers an order function as schedule `name`; other arguments as in `Family`."""

    def add(order: Callable[[int, int, int], list[Order]]) -> Callable[[int, int, int], list[Order]]:
        SCHEDULES[name] = Family(order, virtual_stages, v_shape, two_phases)
        return order

    return add


SIMPLEST = "1f1b"
"""Schedule of a pipeline of one stage."""


def worth_trying() -> list[str]:
    """Return the schedules to consider for a layout; two-phase ones need more memory for the same time."""
    return [name for name, family in SCHEDULES.items() if not family.two_phases]


def allows(name: str, virtual_stages: int) -> bool:
    """Return whether a schedule supports this number of chunks per stage."""
    least, most = SCHEDULES[name].virtual_stages
    return least <= virtual_stages and (most is None or virtual_stages <= most)


@cache
def splits_backward(name: str) -> bool:
    """Return whether a schedule computes weight gradients apart from input gradients."""
    family = SCHEDULES[name]
    for stages, micro_batches in product((1, 2, 4), (1, 2, 3, 4, 8)):
        with suppress(NumbersError):
            return any(kind is W for kind, _, _ in family.order(stages, family.virtual_stages[0], micro_batches)[0])
    raise NumbersError(f"schedule {name}", "must allow 1, 2 or 4 stages with 1, 2, 3, 4 or 8 micro-batches")


def reduces_each(name: str) -> bool:
    """Return whether ZeRO-2 and 3 reduce gradients after each micro-batch of a schedule, keeping no full ones."""
    # Two phases exist to reduce them once, and split backward passes compute weight gradients too late.
    return not (SCHEDULES[name].two_phases or splits_backward(name))


@register("gpipe", two_phases=True)
@register("breadth_first", virtual_stages=(1, None), two_phases=True)
def breadth_first(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
    """Run all micro-batches through a chunk before the next chunk (Lamy-Poirier, arXiv 2211.05953).

    With one chunk per stage this is GPipe (Huang et al., arXiv 1811.06965): all forward passes, then all backward ones.
    """
    # Per step, a chunk's parameters are gathered at most twice and its gradients reduced once.
    micros = range(micro_batches)
    return [
        [(F, loop * stages + stage, micro) for loop in range(virtual_stages) for micro in micros]
        + [(B, loop * stages + stage, micro) for loop in reversed(range(virtual_stages)) for micro in micros]
        for stage in range(stages)
    ]


def _alternate(warm_up: int, forwards: Order, backwards: Order) -> Order:
    # Warm-up, then steady state (one forward, one backward), then cool-down.
    warm_up = min(warm_up, len(forwards))
    steady = [step for pair in zip(forwards[warm_up:], backwards, strict=False) for step in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]


@register("1f1b")
def one_f_one_b(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
    """Alternate one forward, one backward (PipeDream-flush, Narayanan et al., arXiv 2006.09503)."""
    # Stage r never holds more than p - r micro-batches. 3 stages and 4 micro-batches: a backward pass frees the
    # activation that the next forward pass needs.
    #
    #    stage 0   F0 F1 F2 B0 F3 B1 B2 B3
    #    stage 1   F0 F1 B0 F2 B1 F3 B2 B3
    #    stage 2   F0 B0 F1 B1 F2 B2 F3 B3
    return [
        _alternate(
            stages - stage - 1,
            [(F, stage, micro) for micro in range(micro_batches)],
            [(B, stage, micro) for micro in range(micro_batches)],
        )
        for stage in range(stages)
    ]


@register("interleaved", virtual_stages=(2, None))
def interleaved(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
    """Run 1F1B over `virtual_stages` chunks per stage, in turns by group (Narayanan et al., arXiv 2104.04473, 2.2).

    There, a group is p micro-batches, so m must be a multiple of p. Here m is split into m // p groups as even as
    possible (one if m < p): with groups of at least p no stage waits for the previous chunk to come round, and the
    warm-up grows with the largest group, so even groups hold the fewest activations.
    """
    # stage 0 of 2 with chunks a and b, 4 micro-batches in groups of 2:
    #
    #     forwards    a0 a1 b0 b1 | a2 a3 b2 b3
    #     backwards   b0 b1 a0 a1 | b2 b3 a2 a3
    num_groups = max(1, micro_batches // stages)
    cuts = [micro_batches * group // num_groups for group in range(num_groups + 1)]
    groups = [range(start, stop) for start, stop in pairwise(cuts)]
    largest = max(len(group) for group in groups)
    loops = range(virtual_stages)
    return [
        _alternate(
            2 * (stages - stage - 1) + (virtual_stages - 1) * largest,
            [(F, loop * stages + stage, micro) for group in groups for loop in loops for micro in group],
            [(B, loop * stages + stage, micro) for group in groups for loop in reversed(loops) for micro in group],
        )
        for stage in range(stages)
    ]


@register("zb_h1")
def zb_h1(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
    """Run 1F1B with a split backward pass (ZB-H1, Qi et al., arXiv 2401.10241, 2.1)."""
    # Stage r computes weight gradients r micro-batches late: the input gradient leaves at once, and weight gradients
    # fill the end. 3 stages and 4 micro-batches: the later a stage, the sooner its last I and the more W remain for the
    # end.
    #
    #    stage 0   F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3
    #    stage 2   F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3
    orders = []
    for stage, one_f_one_b_order in enumerate(one_f_one_b(stages, virtual_stages, micro_batches)):
        order: Order = []
        for kind, chunk, micro in one_f_one_b_order:
            order.append((F if kind is F else I, chunk, micro))
            if kind is B and micro >= stage:
                order.append((W, chunk, micro - stage))
        order += [(W, stage, micro) for micro in range(max(0, micro_batches - stage), micro_batches)]
        orders.append(order)
    return orders


@register("zb_v", virtual_stages=(2, 2), v_shape=True)
def zb_v(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
    """Run two chunks per stage in a V with a split backward pass (ZB-V, Qi et al., arXiv 2401.10241)."""
    # V-ZB of arXiv 2405.15362: at most 2p chunk activations on any stage, as on the first stage of 1F1B. F and I are in
    # the order of ZB-V; `_fill` places W. Fewer than 2p - 1 micro-batches are the first of 2p - 1.
    rounds = max(2 * stages - 1, micro_batches)
    orders = []
    for stage in range(stages):
        down, up = stage, 2 * stages - 1 - stage
        pattern = [(F, down)] * (2 * (stages - stage) - 1)
        pattern += [(F, up), (F, down)] * stage
        pattern += [(F, up), (I, up)] * (stages - stage)
        pattern += [(F, down), (I, down), (F, up), (I, up)] * (rounds - 2 * stages + stage + 1)
        pattern += [(I, down), (F, up), (I, up)] * (stages - stage - 1)
        pattern += [(I, down), (I, up)] * stage
        pattern += [(I, down)] * (stages - stage)
        micros = {step: iter(range(rounds)) for step in pattern}
        numbered = [(kind, chunk, next(micros[kind, chunk])) for kind, chunk in pattern]
        orders.append([step for step in numbered if step[2] < micro_batches])
    return _fill(orders, num_chunks=2 * stages, places=2 * stages)


def _fill(orders: list[Order], num_chunks: int, places: int) -> list[Order]:
    """Insert weight gradients where a stage would wait for another, or needs the memory of an activation.

    `orders` has F and I, with micro-batches of a chunk in ascending order; it must need at most `places` activations
    per stage from F to I, and the result needs no more from F to W. Simulated in ticks of equal length, this always
    ends: the orders themselves can run, and a weight gradient delays a stage by one tick only.
    """
    done = {(kind, chunk): 0 for kind in (F, I) for chunk in range(num_chunks)}  # micro-batches
    remaining = [deque(order) for order in orders]
    owed: list[deque[Step]] = [deque() for _ in orders]  # pending weight gradients
    held = [0 for _ in orders]
    filled: list[Order] = [[] for _ in orders]

    def can_go_on(stage: int) -> bool:
        if not remaining[stage] or (remaining[stage][0][0] is F and held[stage] == places):
            return False
        kind, chunk, micro = remaining[stage][0]
        turn = kind is I and chunk == num_chunks - 1  # at the loss, backward follows the same chunk's forward
        source = (F, chunk) if turn else (kind, chunk - 1 if kind is F else chunk + 1)
        return source not in done or done[source] > micro

    while any(remaining) or any(owed):
        # one tick: each stage runs its next F or I if that can start, otherwise a pending W
        tick = [
            (stage, queue.popleft())
            for stage in range(len(orders))
            if (queue := remaining[stage] if can_go_on(stage) else owed[stage])
        ]
        for stage, (kind, chunk, micro) in tick:
            filled[stage].append((kind, chunk, micro))
            if kind is W:
                held[stage] -= 1
                continue
            done[kind, chunk] += 1
            if kind is F:
                held[stage] += 1
            else:
                owed[stage].append((W, chunk, micro))
                if all(step[0] is I for step in remaining[stage]):
                    # no activation is needed any more: with the upper chunk first, its reduction hides behind the rest
                    owed[stage] = deque(sorted(owed[stage], key=lambda step: -step[1]))
    return filled
