"""Member of a run whose processes stay when one is lost (`scripts/launch.py --spares`): a rank, or a spare."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Container, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pangu.common.errors import SAVE_SECONDS, LostError
from pangu.topology.backends import abort_groups, leave_groups
from pangu.topology.launch import MEMBER, end_with_launcher

QUERY_SECONDS = 60.0
MEET_SECONDS = 1.0
"""Interval at which a rank that waits for reports checks whether their senders still survive."""


def send_news(store: dist.Store, *news: Any) -> None:
    """Tell the leading launcher something; it reads all news in the order of their numbers."""
    store.set(f"news-{store.add('news', 1)}", json.dumps(news))


def connect(environment: Mapping[str, str] = os.environ) -> tuple[int, dist.TCPStore]:
    """Return the number of this process among all members, and a connection to the launchers' store."""
    number, _, address = environment[MEMBER].partition("@")
    host, _, port = address.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=QUERY_SECONDS))
    return int(number), store


def ask_for_spares(numbers: Sequence[int], places: int, now: bool) -> bool:
    """Return whether spares can replace these processes; if `now`, they do, and all ranks must leave.

    places: devices of each node.
    """
    _, store = connect()
    question = store.add("questions", 1)
    send_news(store, "exchange", question, numbers, places, now)
    return bool(json.loads(store.get(f"answer-{question}")))


class Member:
    """Connection of this process to the launchers' store, which outlives every epoch of the run.

    An epoch is the time between two losses. It has a list of ranks, and a store of its own, in which these meet. The
    leading launcher closes that store when a rank is lost: who waits there fails at once, like those whose peers in a
    collective have closed their connections.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Connect."""
        end_with_launcher(environment)
        self._environment, self._epoch = environment, 0
        self._number, self._store = connect(environment)

    def join(self, fits: Callable[[int], bool], begin: Callable[[], None], rest: Callable[[], None]) -> None:
        """Wait until this process is a rank, and set the launcher's variables accordingly.

        `fits` returns whether some layout has this number of ranks; it must return the same on all members. From the
        second epoch on, a rank calls `begin` before the launcher counts on it, and ranks beyond the largest such number
        wait, too, and call `rest` before.
        """
        while True:
            record = self._newest_epoch()
            ranks = record["ranks"]
            sizes = range(len(ranks), 0, -1) if self._epoch else ()
            world = next(filter(fits, sizes), len(ranks))
            rank = next((rank for rank, (number, _) in enumerate(ranks) if number == self._number), world)
            if rank < world:
                break
            if rank < len(ranks):
                rest()
                send_news(self._store, "idle", self._number, self._epoch)
            self._skip_epoch()
        local_rank = ranks[rank][1]
        local_world = max(int(self._environment["LOCAL_WORLD_SIZE"]), local_rank + 1)
        numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_world}
        numbers |= {"MASTER_PORT": record["port"], "PANGU_EPOCH": self._epoch}
        self._environment.update({name: str(value) for name, value in numbers.items()})
        if self._epoch:
            begin()
        send_news(self._store, "joined", self._number, self._epoch)

    def meet(self, report: Any) -> tuple[str, list[Any]]:
        """Exchange reports with the surviving ranks; all of them call this after `leave`.

        Return the name of the epoch that they leave, and their reports. The next epoch's list says who survives.
        """
        epoch = self._epoch - 1
        self._store.set(f"report-{epoch}-{self._number}", json.dumps(report))
        members = {number for number, _ in json.loads(self._store.get(f"epoch-{epoch}"))["ranks"]}
        while True:
            keys = [f"report-{epoch}-{number}" for number, _ in self._newest_epoch()["ranks"] if number in members]
            with suppress(dist.DistStoreError):  # one of them may be lost as well, then there is a newer epoch
                self._store.wait(keys, timedelta(seconds=MEET_SECONDS))
                run = self._environment["TORCHELASTIC_RUN_ID"]
                return f"{run}-{epoch}", [json.loads(answer) for answer in self._store.multi_get(keys)]

    def leave(self, writers: Container[str]) -> None:
        """Leave the epoch, because a rank is lost: close connections, and wait for threads with the names `writers`.

        Their groups and their store fail, too. Raises LostError if one does not end.
        """
        send_news(self._store, "left", self._number, self._epoch)
        self._epoch += 1
        abort_groups()
        leave_groups()
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.distributed_c10d._world.group_count = 0  # torch counts those that failed to meet, and names groups by that
        gc.collect()  # gloo closes its connections when nothing refers to a group any more: others wait for that
        for thread in threading.enumerate():
            if thread.name in writers:
                thread.join(SAVE_SECONDS)
                if thread.is_alive():
                    raise LostError(f"rank {self._environment['RANK']}: the {thread.name} thread of the lost run hangs")
        gc.collect()

    def _newest_epoch(self) -> Any:
        """Wait for the next epoch, and return the record of the newest one."""
        while True:
            try:
                self._store.wait([f"epoch-{self._epoch}"], timedelta(seconds=QUERY_SECONDS))
                break
            except dist.DistStoreError:
                continue  # a spare may wait for days
        while self._store.check([f"epoch-{self._epoch + 1}"]):
            self._skip_epoch()
        return json.loads(self._store.get(f"epoch-{self._epoch}"))

    def _skip_epoch(self) -> None:
        """Skip this epoch, and send an empty report, so that nobody who leaves it waits for this process."""
        self._store.set(f"report-{self._epoch}-{self._number}", "null")
        self._epoch += 1
