"""The schedules of the papers, as lists and as properties."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.schedule.actions import COMPUTE, Durations, Kind
from pangu.schedule.orders import SCHEDULES, Family, Order
from pangu.schedule.schedule import Schedule, make_schedule
from pangu.schedule.simulate import bubble_by_formula, simulate
from pangu.schedule.timeline import Timeline
from tests.schedule.formulas import peak_live

NAMES = sorted(SCHEDULES)
WITH_FORMULAS = {"1f1b", "breadth_first", "gpipe", "interleaved", "zb_h1", "zb_v"}
"""Schedules whose bubble and activations are known as formulas of the numbers."""


def computing(schedule: Schedule, stage: int) -> str:
    """E.g. `F0.1 B0.1`: kind, chunk, micro-batch."""
    actions = schedule.actions[stage]
    return " ".join(f"{action.kind}{action.chunk}.{action.micro}" for action in actions if action.kind in COMPUTE)


def virtuals(name: str) -> range:
    least, most = SCHEDULES[name].virtual_stages
    return range(least, (most or 4) + 1)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_for_all_small_numbers(name: str) -> None:
    """1,408 schedules: none is refused or gets stuck, bubble and activations are the formulas' with F = I = W."""
    assert set(NAMES) >= WITH_FORMULAS
    for p in range(1, 9):
        for v in virtuals(name):
            for m in range(1, 17):
                timeline = simulate(make_schedule(name, p, v, m), Durations())
                if name in WITH_FORMULAS:
                    assert timeline.bubble == pytest.approx(bubble_by_formula(name, p, v, m), abs=1e-12), (p, v, m)
                    assert timeline.schedule.peak_live() == peak_live(name, p, v, m), (p, v, m)


def drawn(name: str, p: int, m: int, data: st.DataObject) -> tuple[Schedule, Durations]:
    v = data.draw(st.sampled_from(virtuals(name)))
    times = st.lists(st.floats(0.1, 10), min_size=p * v, max_size=p * v)
    durations = Durations(data.draw(times), data.draw(times), data.draw(times), data.draw(st.floats(0, 5)))
    return make_schedule(name, p, v, m), durations


@settings(max_examples=500)
@given(st.sampled_from(NAMES), st.integers(1, 6), st.integers(1, 14), st.data())
def test_any_times_keep_the_order_and_lose_no_work(name: str, p: int, m: int, data: st.DataObject) -> None:
    schedule, durations = drawn(name, p, m, data)
    timeline = simulate(schedule, durations)
    computing = [event for stage in timeline.computing for event in stage]
    stop = {(back(event.action.kind), event.action.chunk, event.action.micro): event.stop for event in computing}
    seconds = durations.per_chunk(len(schedule.stage_of))
    work = [0.0] * p
    for stage, action, start, end in computing:
        duration = seconds[action.kind][action.chunk]
        work[stage] += duration
        assert end - start == pytest.approx(duration)
        for kind, chunk in needs(action.kind, action.chunk, len(schedule.stage_of)):
            link = durations.link if schedule.stage_of[chunk] != stage else 0.0
            assert start >= stop[kind, chunk, action.micro] + link
    assert len(computing) == p * schedule.virtual_stages * m * (3 if name in ("zb_h1", "zb_v") else 2)
    assert timeline.stage_bubbles == pytest.approx([1 - time / timeline.makespan for time in work], abs=1e-9)


def back(kind: Kind) -> Kind:
    """Both kinds of backward that give the gradient of the input are one here."""
    return Kind.BACKWARD_INPUT if kind is Kind.BACKWARD else kind


def needs(kind: Kind, chunk: int, num_chunks: int) -> Iterator[tuple[Kind, int]]:
    """What must have stopped before, for the same micro-batch."""
    if kind is Kind.FORWARD and chunk > 0:
        yield Kind.FORWARD, chunk - 1
    if back(kind) is Kind.BACKWARD_INPUT:
        yield Kind.FORWARD, chunk
        if chunk + 1 < num_chunks:
            yield Kind.BACKWARD_INPUT, chunk + 1
    if kind is Kind.BACKWARD_WEIGHT:
        yield Kind.BACKWARD_INPUT, chunk


def run(name: str, p: int, v: int, m: int, times: Durations) -> Timeline:
    return simulate(make_schedule(name, p, v, m), times)


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(2, 4), st.integers(0, 12), st.tuples(*[st.floats(0.1, 3)] * 3))
def test_bubbles_of_the_papers(p: int, v: int, more: int, fiw: tuple[float, float, float]) -> None:
    """With m >= p. All stages take the same times; these are any, with W no longer than F and I."""
    m, (w, f, i) = p + more, sorted(fiw)
    times = Durations(f, i, w)
    for name in ("gpipe", "1f1b"):
        assert run(name, p, 1, m, times).bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-9)
    for name in ("interleaved", "breadth_first"):
        assert run(name, p, v, m, times).bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-9)
    idle = (p - 1) * (f + i - w)
    assert run("zb_h1", p, 1, m, times).bubble == pytest.approx(idle / (idle + m * (f + i + w)), abs=1e-9)
    # with F = I = W a stage is idle only as long as a forward takes from the first stage to the last
    assert run("zb_v", p, 2, m, Durations(f, f, f)).bubble == pytest.approx((p - 1) / (6 * m + p - 1), abs=1e-9)


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(1, 24))
def test_activations_of_the_papers(p: int, m: int) -> None:
    one_f_one_b = tuple(float(min(m, p - r)) for r in range(p))
    assert make_schedule("1f1b", p, 1, m).peak_live() == one_f_one_b
    zb_h1 = make_schedule("zb_h1", p, 1, m)
    from_f_to_i = {Kind.FORWARD: 1, Kind.BACKWARD_INPUT: -1}  # without what W needs
    changes = ([from_f_to_i.get(action.kind, 0) for action in actions] for actions in zb_h1.actions)
    assert tuple(max(accumulate(of_stage)) for of_stage in changes) == one_f_one_b
    assert max(zb_h1.peak_live()) == max(one_f_one_b)
    assert max(make_schedule("zb_v", p, 2, m).peak_live()) / 2 <= p
    if m % p == 0:  # the first stage of arXiv 2205.05198, 4.2.3: p (1 + (p-1)/(p v)) micro-batches' worth
        interleaved = make_schedule("interleaved", p, 2, m)
        assert max(interleaved.peak_live()) / 2 == pytest.approx(min(m, p * (1 + (p - 1) / (2 * p))))


def test_1f1b_as_written() -> None:
    schedule = make_schedule("1f1b", 2, 1, 3)
    assert schedule.stage_of == (0, 1)
    assert computing(schedule, 0) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert computing(schedule, 1) == "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"


def test_interleaved_as_written() -> None:
    schedule = make_schedule("interleaved", 2, 2, 4)
    assert schedule.stage_of == (0, 1, 0, 1)
    assert computing(schedule, 0) == "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3"
    assert computing(schedule, 1) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"


def test_zb_h1_as_written() -> None:
    schedule = make_schedule("zb_h1", 3, 1, 3)
    assert computing(schedule, 0) == "F0.0 F0.1 F0.2 I0.0 W0.0 I0.1 W0.1 I0.2 W0.2"
    assert computing(schedule, 2) == "F2.0 I2.0 F2.1 I2.1 F2.2 I2.2 W2.0 W2.1 W2.2"


@pytest.mark.parametrize(
    ("name", "virtual_stages", "once", "each"),
    [
        ("breadth_first", 2, "UNSHARD0 F0 F0 RESHARD0 UNSHARD2 F2 F2 B2 B2+ RESHARD2 UNSHARD0 B0 B0+ RESHARD0", None),
        ("gpipe", 1, "UNSHARD0 F0 F0 B0 B0+ RESHARD0", None),
        ("1f1b", 1, "F0 F0 B0 B0+", "F0 F0 B0+ B0+"),
        ("interleaved", 2, "F0 F0 F2 F2 B2 B2+ B0 B0+", "F0 F0 F2 F2 B2+ B2+ B0+ B0+"),
        ("zb_h1", 1, "F0 F0 I0 W0 I0 W0+", None),
        ("zb_v", 2, "F0 F0 F3 I3 F3 I3 I0 W3 I0 W3+ W0 W0+", None),
    ],
)
def test_when_a_chunk_is_held_and_reduced(name: str, virtual_stages: int, once: str, each: str | None) -> None:
    """Two phases hold a chunk twice. A chunk is reduced (+) once per step, or after each micro-batch, if its gradients
    are complete then and it is not to be left."""

    def listed(reduce_each: bool) -> str:
        actions = make_schedule(name, 2, virtual_stages, 2, reduce_each).actions[0]
        return " ".join(f"{a.kind}{a.chunk}" + "+" * a.reduce for a in actions if a.peer is None)

    assert listed(False) == once
    assert listed(True) == (each or once)


def test_receives_are_posted_one_computation_ahead_and_sends_follow_theirs() -> None:
    listed = [str(action) for action in make_schedule("1f1b", 3, 1, 2).actions[1]]
    assert listed == [
        "RECV_ACTIVATION of chunk 1, micro-batch 0, peer stage 0",
        "RECV_ACTIVATION of chunk 1, micro-batch 1, peer stage 0",
        "F of chunk 1, micro-batch 0",
        "SEND_ACTIVATION of chunk 1, micro-batch 0, peer stage 2",
        "RECV_GRADIENT of chunk 1, micro-batch 0, peer stage 2",
        "F of chunk 1, micro-batch 1",
        "SEND_ACTIVATION of chunk 1, micro-batch 1, peer stage 2",
        "RECV_GRADIENT of chunk 1, micro-batch 1, peer stage 2",
        "B of chunk 1, micro-batch 0",
        "SEND_GRADIENT of chunk 1, micro-batch 0, peer stage 0",
        "B of chunk 1, micro-batch 1, reduce",
        "SEND_GRADIENT of chunk 1, micro-batch 1, peer stage 0",
    ]


def test_the_v_turns_without_messages() -> None:
    schedule = make_schedule("zb_v", 3, 2, 4)
    assert schedule.stage_of == (0, 1, 2, 2, 1, 0)
    ends = [(action.chunk, action.peer) for action in schedule.actions[2] if action.peer is not None]
    assert set(ends) == {(2, 1), (3, 1)}
    assert len(ends) == 4 * 4


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 4), (8, 20), (16, 32)])
def test_the_upper_chunk_of_a_v_is_complete_before_the_end_that_hides_its_reduction(p: int, m: int) -> None:
    """Once only weight gradients are left to a stage, none of its lower chunk comes before those of the upper one."""
    schedule = make_schedule("zb_v", p, 2, m)
    for stage, actions in enumerate(schedule.actions):
        done = [action for action in actions if action.kind in COMPUTE]
        after = 1 + max(place for place, action in enumerate(done) if action.kind is not Kind.BACKWARD_WEIGHT)
        chunks = [action.chunk for action in done[after:]]
        assert chunks == sorted(chunks, reverse=True)
        assert len(chunks) >= min(stage, m - 1)
    assert len(set(chunks)) == 2  # of the last stage, which has the most left


def test_a_new_schedule_is_one_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """One micro-batch after the other: all stages but one are always idle."""

    def one_by_one(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
        kinds = (Kind.FORWARD, Kind.BACKWARD)
        return [[(kind, stage, micro) for micro in range(micro_batches) for kind in kinds] for stage in range(stages)]

    monkeypatch.setitem(SCHEDULES, "one_by_one", Family(one_by_one, virtual_stages=(1, 1)))
    assert run("one_by_one", 4, 1, 3, Durations()).bubble == pytest.approx(3 / 4)
    assert bubble_by_formula("one_by_one", 4, 1, 3) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("2f2b", 2, 1, 4), "schedule 2f2b: unknown schedule; use one of 1f1b, breadth_first, "),
        (("1f1b", 2, 2, 4), "1f1b with virtual_stages = 2: 1f1b needs exactly 1 chunk per stage; use 1"),
        (
            ("interleaved", 2, 1, 4),
            "interleaved with virtual_stages = 1: interleaved needs at least 2 chunks per stage; use 2",
        ),
        (("zb_v", 2, 3, 4), "zb_v with virtual_stages = 3: zb_v needs exactly 2 chunks per stage; use 2"),
        (("gpipe", 0, 1, 4), "gpipe with stages = 0: must be at least 1"),
        (("gpipe", 1, 1, 0), "gpipe with micro_batches = 0: must be at least 1"),
    ],
)
def test_numbers_a_schedule_does_not_allow(arguments: tuple[str, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(*arguments)
