"""Pipeline schedules as data: the actions of one step for every stage, without processes or torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from pangu.layers.turns import Turn
from pangu.schedule.actions import CONTENTS, SENDS, Action, Kind
from pangu.schedule.orders import SCHEDULES, NumbersError, Order, Step, allows, reduces_each


@dataclass(frozen=True)
class Schedule:
    """Actions of all stages in one step."""

    name: str
    stages: int
    virtual_stages: int
    micro_batches: int
    stage_of: tuple[int, ...]
    """Stage of each chunk, in model order."""
    actions: tuple[tuple[Action, ...], ...]
    two_phases: bool = False
    """True if a chunk stays unsharded through all its forward passes, then through all its backward passes."""
    reduce_each: bool = False
    """True if gradients are reduced after every micro-batch, keeping no full ones, rather than once per step."""
    turns: tuple[Turn, ...] = ()
    """Order in which a forward pass computes halves of its micro-batch in a layer; (): both at once."""

    def __hash__(self) -> int:
        """Hash the identifying numbers: hashing all actions would be slow."""
        return hash((self.name, self.stages, self.virtual_stages, self.micro_batches))

    @cached_property
    def splits_backward(self) -> bool:
        """True if weight gradients are computed apart from input gradients."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for actions in self.actions for action in actions)

    @property
    def channels(self) -> list[tuple[str, int, int]]:
        """Kind, source and target stage of each channel of a step."""
        channels = {
            (CONTENTS[action.kind], stage, action.peer)
            for stage, actions in enumerate(self.actions)
            for action in actions
            if action.kind in SENDS and action.peer is not None
        }
        return sorted(channels)

    def peak_live(self) -> tuple[int, ...]:
        """Return the peak number of activations on each stage, in activations of one chunk for one micro-batch.

        An activation lives from the start of its forward to the end of its backward pass, of both parts if it is split.
        """
        added = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.BACKWARD_WEIGHT: -1}
        changes = [[added[action.kind] for action in actions if action.kind in added] for actions in self.actions]
        return tuple(max(accumulate(per_stage)) for per_stage in changes)


def chunk_stages(name: str, stages: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the stage of each chunk, in model order."""
    down = tuple(range(stages))
    return down + down[::-1] if SCHEDULES[name].v_shape else down * virtual_stages


def make_schedule(
    name: str, stages: int, virtual_stages: int, micro_batches: int, reduce_each: bool = False
) -> Schedule:
    """Return schedule `name` for `stages` stages of `virtual_stages` chunks each and `micro_batches` micro-batches.

    `reduce_each` applies if the schedule allows it (`orders.reduces_each`). Raise `NumbersError`, with values that
    work, if there is no such schedule or it does not allow these numbers.
    """
    if name not in SCHEDULES:
        raise NumbersError(f"schedule {name}", f"unknown schedule; use one of {', '.join(sorted(SCHEDULES))}")
    for what, value in (("stages", stages), ("virtual_stages", virtual_stages), ("micro_batches", micro_batches)):
        if value < 1:
            raise NumbersError(f"schedule {name} with {what} = {value}", "must be at least 1")
    family = SCHEDULES[name]
    least, most = family.virtual_stages
    if not allows(name, virtual_stages):
        allowed = f"{'exactly' if most == least else 'at least'} {least} chunk{'s' if least > 1 else ''}"
        raise NumbersError(
            f"schedule {name} with virtual_stages = {virtual_stages}", f"{name} needs {allowed} per stage; use {least}"
        )
    stage_of = chunk_stages(name, stages, virtual_stages)
    orders = family.order(stages, virtual_stages, micro_batches)
    each = reduce_each and reduces_each(name)
    actions = tuple(tuple(_complete(order, stage_of, family.two_phases, each)) for order in orders)
    return Schedule(name, stages, virtual_stages, micro_batches, stage_of, actions, family.two_phases, each)


def _complete(order: Order, stage_of: tuple[int, ...], two_phases: bool, reduce_each: bool) -> Iterator[Action]:
    """Yield a stage's steps with their messages and parameter actions."""
    # A receive is posted one step before the step that waits for it: it overlaps with one step, and no more than one
    # step's worth of buffers waits. Sends follow the step that makes the tensors.
    last = {step[1]: step for step in order}
    ends = {one: _ends(*one, stage_of) for one in {step[:2] for step in order}}
    yield from _message(order[0], ends, sends=False)
    for before, step, after in zip([None, *order[:-1]], order, [*order[1:], None], strict=True):
        if after is not None:
            yield from _message(after, ends, sends=False)
        kind, chunk, micro = step
        if two_phases and (before is None or before[1] != chunk):
            yield Action(Kind.UNSHARD, chunk)
        completes = kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        yield Action(kind, chunk, micro, None, completes and (reduce_each or step == last[chunk]))
        yield from _message(step, ends, sends=True)
        if two_phases and (after is None or after[1] != chunk):
            yield Action(Kind.RESHARD, chunk)


End = tuple[Kind, int] | None
"""End of a message: its kind and the other stage; None if no message is needed."""


def _message(step: Step, ends: Mapping[tuple[Kind, int], Sequence[End]], sends: bool) -> tuple[Action, ...]:
    kind, chunk, micro = step
    end = ends[kind, chunk][sends]
    return () if end is None else (Action(end[0], chunk, micro, end[1]),)


def _ends(kind: Kind, chunk: int, stage_of: tuple[int, ...]) -> list[End]:
    """Return the message that a step waits for, and the one that it sends."""
    messages = ((Kind.RECV_GRADIENT, chunk + 1), (Kind.SEND_GRADIENT, chunk - 1))
    if kind is Kind.FORWARD:
        messages = ((Kind.RECV_ACTIVATION, chunk - 1), (Kind.SEND_ACTIVATION, chunk + 1))
    peers = [stage_of[other] if 0 <= other < len(stage_of) else stage_of[chunk] for _, other in messages]
    needed = [kind is not Kind.BACKWARD_WEIGHT and peer != stage_of[chunk] for peer in peers]
    return [(name, peer) if sent else None for (name, _), peer, sent in zip(messages, peers, needed, strict=True)]


def forward_only(schedule: Schedule, micro_batches: int) -> Schedule:
    """Return a schedule of the forward passes of `micro_batches` micro-batches, chunk by chunk."""
    chunks = [[c for c, at in enumerate(schedule.stage_of) if at == stage] for stage in range(schedule.stages)]
    orders = [[(Kind.FORWARD, c, micro) for c in per_stage for micro in range(micro_batches)] for per_stage in chunks]
    actions = tuple(tuple(_complete(order, schedule.stage_of, schedule.two_phases, False)) for order in orders)
    name = f"{schedule.name}, forwards"
    return replace(schedule, name=name, micro_batches=micro_batches, actions=actions, turns=())
