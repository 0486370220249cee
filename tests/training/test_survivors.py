"""What ranks that are left keep when another one is lost: a step that all of them reach, and its unread result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pangu.common.errors import LostError, UserError
from pangu.topology.layout import Layout
from pangu.topology.member import Member
from pangu.training import saving, survivors
from pangu.training.saving import Saver
from pangu.training.step import Trainer
from pangu.training.survivors import common_step
from tests.end_to_end.commands import metrics
from tests.training.test_resume import train

SUMS = [1.5, 0.25]


def report(rank: int, step: int, waits: bool = False) -> dict[str, Any]:
    return {"rank": rank, "step": step, "sums": [float(step), *SUMS], "waits": waits}


def test_ranks_that_wait_for_sums_get_them_from_those_that_are_a_step_ahead() -> None:
    replicas, groups = Layout(data=4), Layout(data=4, zero=1, zero_group=2)
    ahead, waiting, before = report(0, 8), report(2, 7, waits=True), report(3, 7)
    assert common_step([ahead, waiting, before, None], replicas) == (8, [8.0, *SUMS], {0, 2}, [0])
    assert common_step([waiting, before], replicas) == (7, [7.0, *SUMS], {2, 3}, [2])
    assert common_step([{**ahead, "sums": None}, waiting], replicas) == (8, None, {0}, [0])
    assert common_step([None, None], replicas) is None
    # ranks 0 and 2 hold the same shard, and so do ranks 1 and 3
    assert common_step([ahead, waiting, before], groups) == (7, [7.0, *SUMS], {2, 3}, [2, 3])
    assert common_step([ahead, waiting, {**before, "waits": True}], groups) == (8, [8.0, *SUMS], {0, 2, 3}, [0, 3])
    assert common_step([ahead, waiting], groups) == (8, [8.0, *SUMS], {0, 2}, [0, 1])


@given(st.lists(st.none() | st.tuples(st.integers(7, 8), st.booleans()), min_size=4, max_size=4), st.integers(1, 4))
def test_states_of_different_steps_are_never_combined(ranks: list[tuple[int, bool] | None], shards: int) -> None:
    layout = Layout(data=4, zero=1, zero_group=shards if shards != 3 else 1)
    found = common_step([report(rank, *one) if one else None for rank, one in enumerate(ranks)], layout)
    assert (found is None) == (not any(ranks))
    if found is not None:
        known = {rank: one for rank, one in enumerate(ranks) if one}
        there = {rank for rank, (step, waits) in known.items() if step == found.step or (step < found.step and waits)}
        assert found.ranks == there
        newest = max(step for step, _ in known.values())
        assert found.step == newest or there.issuperset(found.writers)


def member(store: dist.TCPStore, number: int) -> Member:
    return Member(
        {
            "PANGU_MEMBER": f"{number}@127.0.0.1:{store.port}",
            "LOCAL_WORLD_SIZE": "1",
            "TORCHELASTIC_RUN_ID": "run",
            "RANK": str(number),
        }
    )


def begin(store: dist.TCPStore, epoch: int, *numbers: int) -> None:
    store.set(f"epoch-{epoch}", json.dumps({"port": 1, "ranks": [[number, 0] for number in numbers]}))


def test_those_that_are_left_hear_each_other_and_wait_for_nobody_who_is_lost_meanwhile() -> None:
    """Of ranks 0 to 3, rank 1 is lost, then rank 2 before it tells anything; 4 and 5 are spares."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begin(store, 0, 0, 1, 2, 3)
    answers: dict[int, tuple[str, list[Mapping[str, Any]]]] = {}

    def tell(number: int) -> None:
        one = member(store, number)
        one.leave(())
        answers[number] = one.meet(report(number, 7))

    threads = [Thread(target=tell, args=(number,)) for number in (0, 3)]
    for thread in threads:
        thread.start()
    begin(store, 1, 0, 4, 2, 3)
    threads[0].join(2.0)
    assert not answers
    begin(store, 2, 0, 4, 5, 3)
    for thread in threads:
        thread.join(20.0)
    assert answers == dict.fromkeys((0, 3), ("run-0", [report(0, 7), report(3, 7)]))


def test_nobody_waits_for_a_rank_that_takes_no_part_in_the_epoch() -> None:
    """Rank 1 sees epoch 1 only, and rank 2 has no place in the layout."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begin(store, 0, 0, 1, 2)
    leaver = member(store, 0)
    leaver.join(lambda world: world == 2, lambda: None, lambda: None)
    begin(store, 1, 0, 1, 2)
    leaver.leave(())
    late, idle = member(store, 1), member(store, 2)
    waiting = Thread(target=idle.join, args=(lambda world: world == 2, lambda: None, lambda: None))
    waiting.start()
    late.join(lambda world: world == 2, lambda: None, lambda: None)
    assert leaver.meet(report(0, 7)) == ("run-0", [report(0, 7), None, None])
    late.leave(())
    leaver.leave(())
    begin(store, 2, 0, 1, 2)
    answers: list[object] = []
    thread = Thread(target=lambda: answers.append(late.meet(report(1, 8))))
    thread.start()
    assert leaver.meet(None) == ("run-1", [None, report(1, 8), None])
    thread.join(20.0)
    assert answers == [("run-1", [None, report(1, 8), None])]
    begin(store, 3, 0, 2)
    waiting.join(20.0)


def fail_in(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose another rank while the step after `step` is computed."""
    original = Trainer.forward_backward

    def lost(trainer: Trainer, *arguments: Any) -> None:
        if trainer.step == step:
            raise LostError("rank 1 is lost")
        original(trainer, *arguments)

    monkeypatch.setattr(Trainer, "forward_backward", lost)


@pytest.mark.parametrize(
    ("is_full", "changed", "more"),
    [
        (False, (), ("optimizer=lamb", "metrics.trust_ratios=true")),
        (True, (), ()),
        (False, ("faults.verify_weights=true",), ()),
    ],
)
def test_a_step_whose_result_was_not_read_is_recorded_by_those_that_continue(
    is_full: bool,
    changed: tuple[str, ...],
    more: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ("checkpoint.every=100", "checkpoint.memory_every=50", *more)
    monkeypatch.setenv("PANGU_MEMORY", str(tmp_path / "memory"))
    train(tmp_path / "whole", 6, *words)
    with monkeypatch.context() as patch:
        fail_in(3, patch)
        with pytest.raises(LostError) as lost:
            train(tmp_path / "run", 6, *words)
    assert len(metrics(tmp_path / "run")) == 2, "the third result was read"
    assert lost.value.keep_state is not None
    with monkeypatch.context() as patch:
        if is_full:
            patch.setattr(survivors, "write_own", lambda *_: no_room())
        lost.value.keep_state(lambda said: ("run-0", [said]))
    capsys.readouterr()
    train(tmp_path / "run", 6, *words, *changed)
    said = capsys.readouterr().err
    if is_full:
        assert "survivors: the state of step 3 is incomplete: no room" in said
        assert "continuing from" not in said
    else:
        assert "survivors    the surviving ranks hold the complete state of step 3" in said
        assert "(step 3)" in said
    names = ("step", "loss", "grad_norm", "lr", "skipped", "trust_ratios")
    figures = [
        [{name: line.get(name) for name in names} for line in metrics(tmp_path / one)] for one in ("run", "whole")
    ]
    if changed:  # the numbers of the result would be others
        del figures[1][2]
    assert figures[0] == figures[1]


def no_room() -> None:
    raise UserError("no room")


def test_the_last_checkpoint_is_written_by_the_next_epoch_if_a_rank_is_lost_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of the last step is read and recorded, and its checkpoint is in flight."""
    words = ("checkpoint.every=100", "checkpoint.memory_every=50")
    monkeypatch.setenv("PANGU_MEMORY", str(tmp_path / "memory"))
    is_awaited, finish = Event(), Saver.finish

    def lose(*_: Any) -> None:
        is_awaited.wait(60.0)
        raise LostError("rank 1 is lost")

    def announce(saver: Saver) -> None:
        if saver.is_writing:
            is_awaited.set()
        finish(saver)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_together", lose)
        patch.setattr(Saver, "finish", announce)
        with pytest.raises(LostError) as lost:
            train(tmp_path / "run", 3, *words)
    assert lost.value.keep_state is not None
    lost.value.keep_state(lambda said: ("run-0", [said]))
    train(tmp_path / "run", 3, *words)
    assert (tmp_path / "run/checkpoints/step-00000003").exists()
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3]


@pytest.mark.parametrize("is_faulty", [False, True])
def test_ranks_keep_no_state_that_may_be_wrong(
    is_faulty: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recheck has found a fault; or an aborted sum leaves wrong values on a device, which updates after it use."""
    monkeypatch.setenv("PANGU_MEMORY", str(tmp_path / "memory"))
    fail_in(2, monkeypatch)
    with pytest.raises(LostError) as lost:
        train(tmp_path / "run", 3, "checkpoint.memory_every=50")
    keep_state = lost.value.keep_state
    assert isinstance(keep_state, partial)
    loop, said = keep_state.args[0], list[Any]()
    if is_faulty:
        loop.devices.found = "replicas compute different bits", 0
    else:
        loop.trainer.mesh = replace(loop.trainer.mesh, device=torch.device("meta"))
    keep_state(lambda report: (said.append(report), ("run-0", said))[1])
    assert said == [None]
