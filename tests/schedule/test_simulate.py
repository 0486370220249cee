"""The simulator on schedules small enough to do by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.schedule.actions import Action, Durations, Kind
from pangu.schedule.orders import SCHEDULES, B, F, Family, Order
from pangu.schedule.schedule import make_schedule
from pangu.schedule.simulate import Gap, chunk_times, gaps, makespan, simulate
from pangu.schedule.timeline import Event
from tests.schedule.test_schedule import NAMES, drawn


def test_two_stages_by_hand() -> None:
    """Stage 0: F 0-1, waits for the gradient, B 10.5-13.5; stage 1: F 1.5-5.5, B 5.5-10; messages take 0.5."""
    durations = Durations(forward=[1, 4], backward_input=[2, 4], backward_weight=[1, 0.5], link=0.5)
    timeline = simulate(make_schedule("1f1b", 2, 1, 1), durations)
    assert sorted(timeline.events, key=lambda event: event.start) == [
        Event(0, Action(Kind.FORWARD, 0, 0), 0, 1),
        Event(0, Action(Kind.SEND_ACTIVATION, 0, 0, 1), 1, 1.5),
        Event(1, Action(Kind.FORWARD, 1, 0), 1.5, 5.5),
        Event(1, Action(Kind.BACKWARD, 1, 0, reduce=True), 5.5, 10),
        Event(1, Action(Kind.SEND_GRADIENT, 1, 0, 0), 10, 10.5),
        Event(0, Action(Kind.BACKWARD, 0, 0, reduce=True), 10.5, 13.5),
    ]
    assert timeline.makespan == 13.5
    assert timeline.stage_bubbles == pytest.approx((9.5 / 13.5, 5 / 13.5))
    assert timeline.bubble == pytest.approx((9.5 + 5) / 27)
    activation, gradient = (Kind.RECV_ACTIVATION, 1, 0), (Kind.RECV_GRADIENT, 0, 0)
    assert gaps(timeline, measured=False) == (
        Gap(0, 1, 10.5, Action(Kind.BACKWARD, 0, 0, reduce=True), gradient),
        Gap(1, 0, 1.5, Action(Kind.FORWARD, 1, 0), activation),
        Gap(1, 10, 13.5, None, None),
    )
    # were these times measured, the first stage would have sent until 1.5
    assert gaps(timeline, measured=True) == (
        Gap(0, 1, 1.5, Action(Kind.BACKWARD, 0, 0, reduce=True), None),
        Gap(0, 1.5, 10.5, Action(Kind.BACKWARD, 0, 0, reduce=True), gradient),
        Gap(1, 0, 1.5, Action(Kind.FORWARD, 1, 0), activation),
        Gap(1, 10, 13.5, None, None),
    )


@pytest.mark.parametrize(("name", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zb_v", 2)])
def test_gaps_are_all_that_is_not_computed(name: str, v: int) -> None:
    timeline = simulate(make_schedule(name, 4, v, 6), Durations(1, 1, 1, 0.3))
    for stage, bubble in enumerate(timeline.stage_bubbles):
        idle = [gap.stop - gap.start for gap in gaps(timeline, measured=False) if gap.stage == stage]
        assert sum(idle) == pytest.approx(bubble * timeline.makespan)


def test_a_transfer_begins_when_both_ends_are_ready() -> None:
    """Stage 1 posts the receive of micro-batch 2 before it begins with 1, at 11, long after it was sent."""
    timeline = simulate(make_schedule("gpipe", 2, 1, 3), Durations(forward=[1, 10], link=0.5))
    transfers = [(event.start, event.stop) for event in timeline.events if event.action.kind is Kind.SEND_ACTIVATION]
    assert transfers == [(1, 1.5), (2, 2.5), (11.5, 12)]


def test_activations_kept_for_the_weight_gradient() -> None:
    """ZB-H1's last stage holds one micro-batch from forward to I, and p of them, as W needs what F kept."""
    assert make_schedule("zb_h1", 4, 1, 8).peak_live() == (4, 4, 4, 4)


def test_a_measured_time_line_may_begin_at_any_time() -> None:
    timeline = simulate(make_schedule("zb_v", 2, 2, 3), Durations())
    later = tuple(event._replace(start=event.start + 100, stop=event.stop + 100) for event in timeline.events[::-1])
    moved = type(timeline)(timeline.schedule, later)
    assert moved.makespan == timeline.makespan
    assert moved.bubble == pytest.approx(timeline.bubble)


def test_durations_for_another_number_of_chunks() -> None:
    with pytest.raises(ValueError, match="backward_input has 3 entries: needs one per chunk, 2"):
        simulate(make_schedule("1f1b", 2, 1, 1), Durations(backward_input=[1, 2, 3]))


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 14), st.data())
def test_a_makespan_is_that_of_the_time_line(name: str, p: int, m: int, data: st.DataObject) -> None:
    schedule, durations = drawn(name, p, m, data)
    assert makespan(schedule, durations) == simulate(schedule, durations, checked=True).makespan


@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 14), st.data())
def test_times_of_chunks_are_those_of_the_time_line(name: str, p: int, m: int, data: st.DataObject) -> None:
    schedule, durations = drawn(name, p, m, data)
    timeline = simulate(schedule, durations, checked=True)
    for events, chunks in zip(timeline.computing, chunk_times(schedule, durations), strict=True):
        for chunk, times in zip(sorted({event.action.chunk for event in events}), chunks, strict=True):
            own = sorted((event.start, event.stop) for event in events if event.action.chunk == chunk)
            assert times == pytest.approx((own[0][0], *own[-1]), abs=1e-9)


@settings(max_examples=300)
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 25), st.integers(1, 40), st.data())
def test_a_makespan_of_more_micro_batches(name: str, p: int, m: int, more: int, data: st.DataObject) -> None:
    """It is that of the schedule of all, whether they fill whole rounds or not, and whether the schedule repeats."""
    schedule, durations = drawn(name, p, m, data)
    longer = make_schedule(name, p, schedule.virtual_stages, m + more)
    assert makespan(schedule, durations, more) == pytest.approx(makespan(longer, durations), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "virtual_stages", "seconds"),
    [("1f1b", 1, 3 * (3e9 + 3)), ("interleaved", 2, 6 * 3e9 + 9), ("zb_h1", 1, 3 * 3e9 + 3), ("zb_v", 2, 6 * 3e9 + 3)],
)
def test_a_schedule_that_repeats_is_not_run_for_all_micro_batches(
    name: str, virtual_stages: int, seconds: float
) -> None:
    """The formulas of `bubble_by_formula` for three billion micro-batches."""
    schedule = make_schedule(name, 4, virtual_stages, 16)
    assert makespan(schedule, Durations(), 3_000_000_000 - 16) == pytest.approx(seconds, rel=1e-14)


@given(st.integers(1, 6), st.integers(0, 5), st.lists(st.floats(0.1, 10), min_size=6, max_size=6), st.floats(0, 5))
def test_a_makespan_of_a_schedule_that_is_added(p: int, odd: int, times: list[float], link: float) -> None:
    """1F1B with one forward more ahead on each stage, as docs/extending.md adds one."""

    def ahead(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
        def order(held: int) -> Iterator[tuple[Kind, int]]:
            for turn in range(micro_batches + held):
                yield from [(F, turn)] * (turn < micro_batches) + [(B, turn - held)] * (turn >= held)

        return [[(kind, stage, micro) for kind, micro in order(stages - stage)] for stage in range(stages)]

    durations = Durations(times[:p], times[:p], times[-p:], link)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCHEDULES, "ahead", Family(ahead, virtual_stages=(1, 1)))
        schedule, longer = (make_schedule("ahead", p, 1, m + odd) for m in (4 * p, 9 * p))
        assert makespan(schedule, durations, 5 * p) == pytest.approx(makespan(longer, durations), rel=1e-12)
