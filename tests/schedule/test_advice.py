"""What a run is told about its pipeline, and when it is told nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pangu.schedule.actions import Durations
from pangu.schedule.advice import advise
from pangu.schedule.orders import SCHEDULES, NumbersError, Order, one_f_one_b
from pangu.schedule.schedule import make_schedule


def test_a_large_bubble_is_warned_of_with_numbers() -> None:
    """1F1B, p = 4, m = 4: 3/7; with 28 micro-batches 3/31; zb_v 3/27, in (4 * 6 + 3) / (7 * 6) of the time."""
    lines = advise(make_schedule("1f1b", 4, 1, 4), Durations(), num_layers=8, micro_size=2)
    held = "peak activations in micro-batches"
    assert lines == [
        f"pipeline     1f1b, 4 stages, 4 micro-batches: bubble 42.9%, {held}: 4, 3, 2, 1 by stage",
        "warning: the pipeline is idle 42.9% of the time; 28 micro-batches would make it 9.7%: use a "
        "smaller batch.micro_size or larger batch.global_size",
        "warning: parallel.schedule=zb_v parallel.virtual_stages=2 would be 55.6% faster: zb_v, 4 stages of 2 chunks, "
        f"4 micro-batches: bubble 11.1%, {held}: 4 on each stage",
    ]


def test_too_few_layers_for_two_chunks() -> None:
    lines = advise(make_schedule("1f1b", 4, 1, 4), Durations(), num_layers=7, micro_size=2)
    assert [line.split()[1] for line in lines if "faster" in line] == ["parallel.schedule=zb_h1"]


def test_a_faster_schedule_with_fewer_chunks_names_their_number() -> None:
    lines = advise(make_schedule("interleaved", 4, 2, 8), Durations(), num_layers=7, micro_size=1)
    assert "parallel.schedule=zb_h1 parallel.virtual_stages=1 would be" in lines[2]


def test_fewer_micro_batches_than_stages() -> None:
    lines = advise(make_schedule("zb_v", 8, 2, 1), Durations(), num_layers=16, micro_size=2)
    assert "16 micro-batches" in lines[1]
    assert "would make it 6.8%: use a smaller batch.micro_size" in lines[1]


def test_schedules_that_refuse_these_numbers_are_not_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor more micro-batches than a schedule allows."""

    def only_3(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
        if micro_batches != 3:
            raise NumbersError(f"{micro_batches} micro-batches", "must be 3")
        return one_f_one_b(stages, virtual_stages, micro_batches)

    monkeypatch.setitem(SCHEDULES, "only_3", replace(SCHEDULES["1f1b"], order=only_3))
    assert not any("only_3" in line for line in advise(make_schedule("gpipe", 2, 1, 2), Durations(), 2, 1))
    alone = advise(make_schedule("only_3", 4, 1, 3, reduce_each=True), Durations(), 4, 1)
    assert not any("micro-batches would make it" in line for line in alone)


def test_a_schedule_that_holds_too_much() -> None:
    """GPipe with a small bubble: 1F1B would be as fast and hold 4 instead of 64, and ZB-H1 holds no more than 1F1B."""
    lines = advise(make_schedule("gpipe", 4, 1, 64), Durations(), num_layers=4, micro_size=2)
    assert any("parallel.schedule=zb_h1 would be 3.1% faster" in line for line in lines)


def test_nothing_to_say_of_a_good_schedule() -> None:
    assert len(advise(make_schedule("zb_v", 4, 2, 32), Durations(), num_layers=64, micro_size=2)) == 1
    assert len(advise(make_schedule("1f1b", 1, 1, 1), Durations(), num_layers=64, micro_size=2)) == 1


def test_more_micro_batches_do_not_mend_uneven_stages() -> None:
    """The last of 4 stages takes 4 times as long, and the others wait for it: 1 - (7 / 4 * 64) / (3 + 4 * 64)."""
    lines = advise(
        make_schedule("1f1b", 4, 1, 64), Durations([1, 1, 1, 4], [1, 1, 1, 4], [1, 1, 1, 4]), num_layers=4, micro_size=2
    )
    assert "bubble 56.8%" in lines[0]
    assert not any("micro-batches would" in line for line in lines)


def test_a_micro_batch_of_one_sequence_cannot_be_smaller() -> None:
    lines = advise(make_schedule("1f1b", 4, 1, 4), Durations(), num_layers=8, micro_size=1)
    assert "28 micro-batches would make it 9.7%: use a larger batch.global_size" in lines[1]
