"""Schedules that cannot be carried out are refused: the check is checked."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.layers.turns import LayerPart, Turn
from pangu.schedule.actions import COMPUTE, Action, Durations, Kind
from pangu.schedule.check import ScheduleError, check
from pangu.schedule.orders import OVERLAPPED
from pangu.schedule.schedule import Schedule, make_schedule
from pangu.schedule.simulate import simulate
from tests.schedule.test_schedule import NAMES, virtuals

Actions = list[Action]


def changed(schedule: Schedule, stage: int, change: Callable[[Actions], object]) -> Schedule:
    """The schedule with one stage's list changed."""
    lists = [list(actions) for actions in schedule.actions]
    change(lists[stage])
    return replace(schedule, actions=tuple(tuple(actions) for actions in lists))


def find(actions: Actions, text: str) -> int:
    """Where the action that reads `text` is."""
    (index,) = [index for index, action in enumerate(actions) if str(action) == text]
    return index


def move(what: str, before: str) -> Callable[[Actions], None]:
    def change(actions: Actions) -> None:
        action = actions.pop(find(actions, what))
        actions.insert(find(actions, before), action)

    return change


def drop(what: str) -> Callable[[Actions], None]:
    return lambda actions: actions.__delitem__(find(actions, what))


def put(what: str, instead: Action) -> Callable[[Actions], None]:
    return lambda actions: actions.__setitem__(find(actions, what), instead)


def swap(one: str, other: str) -> Callable[[Actions], None]:
    def change(actions: Actions) -> None:
        a, b = find(actions, one), find(actions, other)
        actions[a], actions[b] = actions[b], actions[a]

    return change


def message(kind: str, chunk: int, micro: int, peer: int) -> str:
    return f"{kind} of chunk {chunk}, micro-batch {micro}, peer stage {peer}"


def micro(kind: str, chunk: int, index: int) -> str:
    return f"{kind} of chunk {chunk}, micro-batch {index}"


# of zb_h1 with 2 stages and 3 micro-batches; stage, change, what the error says
REFUSED: dict[str, tuple[int, Callable[[Actions], None], str]] = {
    "a send is missing": (
        0,
        drop(message("SEND_ACTIVATION", 0, 1, 1)),
        "stage 1: RECV_ACTIVATION from stage 0, message 1: it receives chunk 1, micro-batch 1, "
        "but stage 0 sends chunk 1, micro-batch 2",
    ),
    "the last send is missing": (
        1,
        drop(message("SEND_GRADIENT", 1, 2, 0)),
        "stage 0: RECV_GRADIENT from stage 1, message 2: it receives chunk 0, micro-batch 2, but stage 1 sends nothing",
    ),
    "receives in another order": (
        1,
        move(message("RECV_ACTIVATION", 1, 1, 0), message("RECV_ACTIVATION", 1, 0, 0)),
        "stage 1: RECV_ACTIVATION from stage 0, message 0: it receives chunk 1, micro-batch 1, "
        "but stage 0 sends chunk 1, micro-batch 0",
    ),
    "sent before it is made": (
        0,
        move(message("SEND_ACTIVATION", 0, 0, 1), micro("F", 0, 0)),
        "stage 0: SEND_ACTIVATION of chunk 0, micro-batch 0, peer stage 1: sent before its forward",
    ),
    "gradient sent before it is made": (
        1,
        move(message("SEND_GRADIENT", 1, 0, 0), micro("I", 1, 0)),
        "SEND_GRADIENT of chunk 1, micro-batch 0, peer stage 0: sent before its backward",
    ),
    "receive posted too late": (
        1,
        swap(message("RECV_ACTIVATION", 1, 0, 0), micro("F", 1, 0)),
        "stage 1: F of chunk 1, micro-batch 0: no RECV_ACTIVATION posted before it",
    ),
    "sent to a stage that does not exist": (
        0,
        put(message("SEND_ACTIVATION", 0, 0, 1), Action(Kind.SEND_ACTIVATION, 0, 0, 2)),
        "no such message: the neighbouring chunk is not on that stage",
    ),
    "a message to nobody": (
        0,
        put(message("SEND_ACTIVATION", 0, 0, 1), Action(Kind.SEND_ACTIVATION, 0, 0)),
        "no such message: the neighbouring chunk is not on that stage",
    ),
    "backward before forward": (
        1,
        swap(micro("F", 1, 1), micro("I", 1, 1)),
        "stage 1: I of chunk 1, micro-batch 1: before its forward",
    ),
    "weight gradient before backward": (
        1,
        swap(micro("W", 1, 0), micro("I", 1, 0)),
        "stage 1: W of chunk 1, micro-batch 0: before its backward for the input",
    ),
    "two backwards": (
        1,
        put(micro("W", 1, 0), Action(Kind.BACKWARD, 1, 0)),
        "stage 1: B of chunk 1, micro-batch 0: second backward of the micro-batch",
    ),
    "forward twice": (
        1,
        put(micro("F", 1, 1), Action(Kind.FORWARD, 1, 0)),
        "stage 1: F of chunk 1, micro-batch 0: done twice",
    ),
    "no weight gradient": (
        1,
        drop(f"{micro('W', 1, 2)}, reduce"),
        "stage 1: W of chunk 1, micro-batch 2: missing",
    ),
    "no backward": (
        0,
        lambda actions: (drop(f"{micro('W', 0, 2)}, reduce")(actions), drop(micro("I", 0, 2))(actions)),
        "stage 0: I of chunk 0, micro-batch 2: missing",
    ),
    "a chunk of another stage": (
        1,
        put(micro("F", 1, 0), Action(Kind.FORWARD, 0, 0)),
        "stage 1: F of chunk 0, micro-batch 0: the stage has only the chunks [1]",
    ),
    "a micro-batch too many": (
        1,
        put(micro("F", 1, 2), Action(Kind.FORWARD, 1, 3)),
        "stage 1: F of chunk 1, micro-batch 3: the schedule has 3 micro-batches",
    ),
    "a forward of no micro-batch": (
        1,
        put(micro("F", 1, 2), Action(Kind.FORWARD, 1)),
        "stage 1: F of chunk 1: computations and messages need a micro-batch, other actions must not have one",
    ),
    "reduced too early": (
        0,
        put(micro("W", 0, 1), Action(Kind.BACKWARD_WEIGHT, 0, 1, reduce=True)),
        "stage 0: W of chunk 0, micro-batch 1, reduce: reduced before they are complete",
    ),
    "not reduced": (
        0,
        put(f"{micro('W', 0, 2)}, reduce", Action(Kind.BACKWARD_WEIGHT, 0, 2)),
        "stage 0: W of chunk 0, micro-batch 2: the gradients are complete but not reduced",
    ),
    "reduced by a forward": (
        0,
        put(micro("F", 0, 0), Action(Kind.FORWARD, 0, 0, reduce=True)),
        "stage 0: F of chunk 0, micro-batch 0, reduce: it does not complete any gradients",
    ),
}
# of breadth_first with 2 stages of 2 chunks and 2 micro-batches
NOT_HELD: dict[str, tuple[int, Callable[[Actions], None], str]] = {
    "used before it is held": (
        0,
        lambda actions: actions.insert(find(actions, micro("F", 0, 1)), actions.pop(actions.index(UNSHARD))),
        "stage 0: F of chunk 0, micro-batch 0: outside UNSHARD and RESHARD of its chunk",
    ),
    "used after it is released": (
        1,
        move("RESHARD of chunk 3", f"{micro('B', 3, 1)}, reduce"),
        "stage 1: B of chunk 3, micro-batch 1, reduce: outside UNSHARD and RESHARD of its chunk",
    ),
    "held twice": (0, lambda actions: actions.insert(1, UNSHARD), "stage 0: UNSHARD of chunk 0: already unsharded"),
    "released twice": (
        0,
        lambda actions: actions.append(Action(Kind.RESHARD, 0)),
        "stage 0: RESHARD of chunk 0: not unsharded",
    ),
    "not released": (1, drop("RESHARD of chunk 3"), "stage 1: RESHARD of chunk 3: missing"),
}
UNSHARD = Action(Kind.UNSHARD, 0)


@pytest.mark.parametrize("name", [*REFUSED, *NOT_HELD])
def test_what_is_wrong_is_named(name: str) -> None:
    stage, change, says = {**REFUSED, **NOT_HELD}[name]
    schedule = make_schedule("zb_h1", 2, 1, 3) if name in REFUSED else make_schedule("breadth_first", 2, 2, 2)
    simulate(schedule, Durations())
    with pytest.raises(ScheduleError, match=re.escape(says)):
        simulate(changed(schedule, stage, change), Durations())


@pytest.mark.parametrize(
    "turns",
    [
        OVERLAPPED[1:],
        OVERLAPPED[::2],
        OVERLAPPED[::-1],
        (*OVERLAPPED, OVERLAPPED[-1]),
        tuple(Turn(part, half) for half in range(3) for part in LayerPart),
    ],
)
def test_halves_take_each_turn_once_in_order(turns: tuple[Turn, ...]) -> None:
    schedule = make_schedule("1f1b", 2, 1, 2)
    check(replace(schedule, turns=OVERLAPPED))
    said = f"turns {', '.join(map(str, turns))}: halves 0 and 1 of a micro-batch need ATTENTION, EXPERTS, OUTPUT once"
    with pytest.raises(ScheduleError, match=said):
        check(replace(schedule, turns=turns))


def test_chunks_of_one_stage_follow_each_other() -> None:
    """Where a V turns there is no message whose absence would show it."""
    schedule = make_schedule("zb_v", 1, 2, 2)
    with pytest.raises(ScheduleError, match="F of chunk 1, micro-batch 0: before the forward of chunk 0 on this stage"):
        simulate(changed(schedule, 0, move(micro("F", 1, 0), micro("F", 0, 0))), Durations())
    with pytest.raises(ScheduleError, match="I of chunk 0, micro-batch 0: before the backward of chunk 1"):
        simulate(changed(schedule, 0, swap(micro("I", 1, 0), micro("I", 0, 0))), Durations())


def test_stages_that_wait_for_each_other() -> None:
    """Each list is possible and the channels agree, but stage 0 wants a gradient before it has sent what it is of."""
    schedule = make_schedule("gpipe", 2, 1, 2)
    schedule = changed(schedule, 0, move(micro("B", 0, 0), micro("F", 0, 1)))
    schedule = changed(schedule, 0, move(message("RECV_GRADIENT", 0, 0, 1), micro("B", 0, 0)))
    with pytest.raises(ScheduleError) as error:
        simulate(schedule, Durations())
    assert str(error.value) == (
        "deadlock: stages wait for each other: stage 0: B of chunk 0, micro-batch 0: waits for RECV_GRADIENT from "
        "stage 1; stage 1: F of chunk 1, micro-batch 1: waits for RECV_ACTIVATION from stage 0"
    )


@settings(max_examples=500)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6), st.data())
def test_no_action_can_be_spared_or_done_twice(name: str, p: int, m: int, data: st.DataObject) -> None:
    schedule = make_schedule(name, p, data.draw(st.sampled_from(virtuals(name))), m)
    stage = data.draw(st.integers(0, p - 1))
    index = data.draw(st.integers(0, len(schedule.actions[stage]) - 1))
    with pytest.raises(ScheduleError, match=r"^stage \d+: "):
        simulate(changed(schedule, stage, lambda actions: actions.pop(index)), Durations())
    again = data.draw(st.integers(0, len(schedule.actions[stage])))
    with pytest.raises(ScheduleError, match=r"^stage \d+: "):
        simulate(changed(schedule, stage, lambda actions: actions.insert(again, actions[index])), Durations())


@settings(max_examples=300)
@given(st.sampled_from(NAMES), st.integers(2, 4), st.integers(2, 6), st.data())
def test_messages_keep_their_order(name: str, p: int, m: int, data: st.DataObject) -> None:
    """Two messages of one channel that change places at one end are refused."""
    schedule = make_schedule(name, p, data.draw(st.sampled_from(virtuals(name))), m)
    stage = data.draw(st.integers(0, p - 1))
    actions = schedule.actions[stage]
    kind, peer = data.draw(st.sampled_from(sorted({(a.kind, a.peer) for a in actions if a.peer is not None})))
    places = [index for index, action in enumerate(actions) if (action.kind, action.peer) == (kind, peer)]
    one, other = sorted(data.draw(st.permutations(places))[:2])

    def exchange(actions: Actions) -> None:
        actions[one], actions[other] = actions[other], actions[one]

    with pytest.raises(ScheduleError, match=r"^stage \d+: "):
        simulate(changed(schedule, stage, exchange), Durations())


@settings(max_examples=500)
@given(st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 6), st.data())
def test_a_change_of_order_is_refused_or_harmless(name: str, p: int, m: int, data: st.DataObject) -> None:
    """Any two actions of a stage change places: it is refused, or all computations still take place."""
    schedule = make_schedule(name, p, data.draw(st.sampled_from(virtuals(name))), m)
    stage = data.draw(st.integers(0, p - 1))
    index = st.integers(0, len(schedule.actions[stage]) - 1)
    one, other = data.draw(index), data.draw(index)

    def exchange(actions: Actions) -> None:
        actions[one], actions[other] = actions[other], actions[one]

    try:
        timeline = simulate(changed(schedule, stage, exchange), Durations())
    except ScheduleError:
        return
    planned = sum(action.kind in COMPUTE for actions in schedule.actions for action in actions)
    assert sum(len(events) for events in timeline.computing) == planned
