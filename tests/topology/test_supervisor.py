"""Decisions of the launcher that leads: who is lost, and who takes which rank."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
import torch.distributed as dist

from pangu.common.exit_status import RETRYABLE, USER_ERROR
from pangu.topology import supervisor
from pangu.topology.member import send_news
from pangu.topology.supervisor import Leader


class Launchers:
    """Stand-in for two launchers with two ranks each, the first one with a spare."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.leader = Leader(self.store, "127.0.0.1", nodes=2)

    def say(self, *news: Any) -> None:
        send_news(self.store, *news)
        self.leader.poll()

    def ranks(self, epoch: int) -> list[int]:
        return [number for number, _ in json.loads(self.store.get(f"epoch-{epoch}"))["ranks"]]

    def orders(self) -> tuple[list[int], int | None]:
        orders = json.loads(self.store.get("orders"))
        return orders["kill"], orders["end"]


def test_a_process_that_ends_before_all_launchers_have_come_is_replaced_or_ends_the_run() -> None:
    run = Launchers()
    run.say("here", 0, [0, 1, 2], 2)
    run.say("ended", 1, -signal.SIGKILL, "it was killed")
    run.say("here", 1, [3, 4], 2)
    assert run.ranks(0) == [0, 1, 3, 4]
    assert run.ranks(1) == [0, 2, 3, 4]
    run = Launchers()
    run.say("here", 0, [0, 1, 2], 2)
    run.say("ended", 1, USER_ERROR, "it has said why")
    assert run.orders() == ([], USER_ERROR)


def test_a_leader_without_ranks_stops_all_ranks_at_a_signal_and_exits_at_a_later_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Launchers()
    with pytest.raises(SystemExit):  # there is nobody to stop
        run.leader.stop(signal.SIGTERM, None)
    run.say("here", 1, [0, 1], 2)
    run.say("here", 2, [2, 3], 2)
    assert run.ranks(0) == [0, 1, 2, 3]
    run.leader.stop(signal.SIGTERM, None)
    run.leader.poll()
    assert json.loads(run.store.get("orders")) == {"kill": [], "stop": True, "end": None}
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):  # a terminal that closes, or a scheduler, sends more
        run.leader.stop(number, None)
    monkeypatch.setattr(supervisor, "BEAT_SECONDS", 0.0)
    run.leader.stop(signal.SIGTERM, None)
    with pytest.raises(SystemExit):
        run.leader.stop(signal.SIGINT, None)


def test_a_launcher_that_is_started_again_gives_its_old_ranks_away_and_the_run_grows_back() -> None:
    run = Launchers()
    run.say("here", 0, [0, 1], 2)
    run.say("here", 1, [2, 3], 2)
    for number in range(4):
        run.say("joined", number, 0)
    run.say("here", 1, [4, 5], 2)
    assert run.orders() == ([2, 3], None)
    assert run.ranks(1) == [0, 1, 4, 5]
    run.say("ended", 4, -signal.SIGKILL, "it was killed")
    run.say("ended", 5, -signal.SIGKILL, "it was killed, too")
    assert run.ranks(3) == [0, 1]
    for number in (0, 1):
        run.say("joined", number, 3)
    run.say("here", 1, [6, 7], 2)
    assert not run.store.check(["epoch-4"]), "the ranks have not left yet"
    for number in (0, 1):
        run.say("left", number, 3)
    assert run.ranks(4) == [0, 1, 6, 7]


def test_a_cut_between_ranks_ends_the_run_though_a_spare_is_left_that_no_layout_takes() -> None:
    run = Launchers()
    run.say("here", 0, [0, 1], 2)
    run.say("here", 1, [2, 3], 2)
    run.say("ended", 3, -signal.SIGKILL, "it was killed")
    run.say("idle", 2, 1)
    for number in (0, 1):
        run.say("joined", number, 1)
    for number in (0, 1):
        run.say("left", number, 1)
    assert run.orders() == ([], RETRYABLE)


def test_a_spare_that_is_told_to_end_before_it_knows_of_its_rank_does_not_end_the_run() -> None:
    run = Launchers()
    run.say("here", 0, [0, 1, 2], 2)
    run.say("here", 1, [3, 4], 2)
    for number in (0, 1, 3, 4):
        run.say("joined", number, 0)
    run.say("exchange", 1, [1], 3, True)
    run.say("ended", 2, -signal.SIGTERM, "it was told to")
    assert run.orders() == ([1], None)
    for number in (0, 3, 4):
        run.say("left", number, 0)
    assert sorted(run.ranks(1)) == [0, 3, 4]
    for number in (0, 3, 4):
        run.say("joined", number, 1)
    run.say("ended", 3, -signal.SIGTERM, "it was told to")
    assert run.orders() == ([1], 128 + signal.SIGTERM)


def test_a_node_is_lost_without_signs_of_life_unless_all_were_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(supervisor.time, "monotonic", lambda: now_s)
    run = Launchers()
    run.say("here", 0, [0, 1, 2, 3], 2)
    run.say("here", 1, [4, 5], 2)
    for passed_s in (16, *[4] * 3):
        now_s += passed_s
        run.store.add("beat-0", 1)
        run.leader.poll()
        assert not run.store.check(["epoch-1"])
    now_s += 4
    run.store.add("beat-0", 1)
    run.leader.poll()
    assert run.ranks(1) == [0, 1, 2, 3]
    assert run.orders() == ([4, 5], None)


def test_ranks_are_exchanged_together_for_spares_with_devices_of_their_own_or_stay() -> None:
    run = Launchers()
    run.say("here", 0, [0, 1, 2], 2)
    run.say("here", 1, [3, 4, 5], 2)
    for number in (0, 1, 3, 4):
        run.say("joined", number, 0)
    run.say("exchange", 1, [1], 2, True)
    run.say("exchange", 2, [0, 1, 3], 3, True)
    assert [run.store.get(f"answer-{one}") for one in (1, 2)] == [b"false"] * 2, "a node has 2 devices, or 2 spares"
    run.say("exchange", 5, [1, 3], 3, False)
    assert run.store.get("answer-5") == b"true"
    assert run.orders() == ([], None), "they are only asked for"
    run.say("exchange", 3, [1, 3], 3, True)
    assert run.store.get("answer-3") == b"true"
    assert run.orders() == ([1, 3], None)
    run.say("ended", 1, -signal.SIGKILL, "it was killed")
    run.say("left", 0, 0)
    run.say("left", 3, 0)
    assert not run.store.check(["epoch-1"]), "process 4 has not left yet"
    run.say("left", 4, 0)
    assert json.loads(run.store.get("epoch-1"))["ranks"] == [[0, 0], [2, 2], [5, 2], [4, 1]], (
        "devices are not used again"
    )
    run.say("here", 2, [6], 0)
    run.say("exchange", 4, [0], 3, True)
    assert run.store.get("answer-4") == b"false", "the ranks that ask have not met in this epoch"
