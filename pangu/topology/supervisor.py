"""Launchers that keep the processes of a run when one is lost, and give its rank to a spare.

One launcher per node starts the processes and says which have ended. The launcher of node 0 leads: it serves the store,
and says who has which rank:

    epoch 0   ranks 0 1 2 3, spare 4
              process 2 is killed: its launcher says so
    epoch 1   ranks 0 1 4 3         0, 1 and 3 meet again, without having been restarted

Node 0 may have no processes: then its machine needs no devices, and every node with ranks can be lost.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist

from pangu.common.exit_status import RETRYABLE
from pangu.topology.launch import MEMBER
from pangu.topology.member import send_news
from pangu.topology.membership import Membership

INTERVAL_SECONDS = 0.1
BEAT_SECONDS = 1.0
"""Interval of the signs of life of a launcher, at least."""
LOST_SECONDS = 15.0
"""Time without a sign of life after which a node is lost."""
CUT_SECONDS = 10.0
"""Time without an answer of the store after which a launcher kills its processes: they are given up soon after."""
LEAVE_SECONDS = 60.0
"""Time for a rank to notice a loss (see `CONNECT_SECONDS`), 0.1 s more for each rank; then it hangs, and is killed."""
END_SECONDS = 5.0, 25.0
"""Times for processes to end after SIGTERM, which is sent twice."""
MEET_SECONDS = 900.0
"""Time for the launchers to meet."""
ENDING = {-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP}
"""Statuses of a process that somebody has ended: nothing takes its place."""


def is_loss(status: int) -> bool:
    """Return whether a process that ended so is lost: killed, or crashed with a traceback, but without a message."""
    return status == 1 or (status < 0 and status not in ENDING)


class Leader:
    """Decisions of the launcher of node 0."""

    def __init__(self, store: dist.Store, host: str, nodes: int) -> None:
        """Wait for `nodes` launchers; members reach the stores of the epochs at `host`."""
        self._store, self._host, self._expected = store, host, nodes
        self._membership, self._arrived = Membership(), dict[int, tuple[list[int], int]]()
        self._read, self._epoch, self._killed, self._done = 0, -1, set[int](), set[int]()
        self._server: dist.TCPStore | None = None
        self._end: int | None = None
        self._grows = False
        """True while ranks leave their epoch because others have come, or are exchanged."""
        self._reached: dict[int, int] = {}
        """Epoch that each rank has reached; those that notice a loss are on their way into the next one."""
        self._target, self._due_s = 0, float("inf")
        """Epoch that all ranks must have reached at a time."""
        self._began_s = self._polled_s = time.monotonic()
        self._beats: dict[int, tuple[int, int, float]] = {}
        """First process of each node, signs of life of its launcher, and the time of the last one."""
        self._early: list[list[Any]] = []
        """News of processes that ended before all launchers had come."""
        self._status = RETRYABLE
        """Status to end with: that of the process which ended last."""
        self._stop_s = 0.0
        self.order()

    def order(self, end: int | None = None) -> None:
        """Tell all launchers which processes to kill, whether all ranks stop, and with what status to end."""
        self._end = self._end if end is None else end
        orders = {"kill": sorted(self._killed), "stop": bool(self._stop_s), "end": self._end}
        self._store.set("orders", json.dumps(orders))

    def stop(self, number: int, _: object) -> None:
        """Handle a signal: send all ranks SIGTERM at the next `poll`; exit if there are none, or at a later Ctrl-C."""
        if not self._beats or (number == signal.SIGINT and 0 < self._stop_s < time.monotonic() - BEAT_SECONDS):
            sys.exit(128 + number)
        self._stop_s = self._stop_s or time.monotonic()

    def poll(self) -> None:
        """Read the news, and act on it."""
        lost: list[int] = []
        if self._stop_s:
            self.order()
        for kind, number, *facts in self._news():
            if kind == "here":
                lost += self._welcome(number, *facts)
            elif kind == "ended":
                lost += self._ended(number, *facts)
            elif kind == "idle":
                self._membership.make_spare(number)
                self._reached.pop(number, None)
            elif kind == "joined":
                self._reached[number] = facts[0]
            elif kind == "exchange":
                self._exchange(number, *facts)
            elif number in self._membership.ranks:  # left
                self._reached[number] = facts[0] + 1
                if facts[0] == self._epoch == self._target:
                    self._expect(self._epoch + 1)
        for node in self._silent_nodes():
            say(f"node {node} sent no heartbeat: {len(self._membership.processes_of(node))} processes are lost")
            lost += self._give_up(node)
        if lost and self._epoch >= 0:
            self._replace(lost)
        late = [number for number in self._membership.ranks if self._reached.get(number, self._target) < self._target]
        if self._done and self._target > self._epoch >= 0:
            self.order(self._status)  # a rank has stopped as it was told to, before it noticed the loss
        elif not late and self._grows:
            self._begin_epoch()
        elif not late and self._target > self._epoch >= 0:
            say("the ranks lost contact with each other, but no process ended: check the network between the nodes")
            self.order(RETRYABLE)
        elif late and time.monotonic() > self._due_s:
            say(f"{len(late)} processes hang and are killed")
            self._killed |= {*late}
            self._due_s = float("inf")
            self.order()

    def _news(self) -> Iterator[list[Any]]:
        """Return what is new; losses count when all launchers have come, but a message that ends the run at once."""
        while self._store.check([f"news-{self._read + 1}"]):
            self._read += 1
            news = json.loads(self._store.get(f"news-{self._read}"))
            if self._epoch < 0 and news[0] == "ended" and (not news[2] or is_loss(news[2])):
                self._early.append(news)
                continue
            yield news
            if self._epoch >= 0:
                yield from self._early
                self._early.clear()
        if self._epoch < 0 and time.monotonic() - self._began_s > MEET_SECONDS:
            say(f"{len(self._arrived)} of {self._expected} launchers connected within {MEET_SECONDS:g} s")
            self.order(RETRYABLE)

    def _welcome(self, node: int, numbers: list[int], count: int) -> list[int]:
        """Add the processes of a node; return those that are lost because its launcher was started again."""
        lost = self._give_up(node) if self._epoch >= 0 and self._membership.processes_of(node) else []
        self._beats[node] = (numbers[0], 0, time.monotonic())
        if self._epoch >= 0:
            say(f"node {node} connected: {len(numbers)} more spares")
            self._membership.add(node, numbers)
            if self._membership.can_grow and not lost and self._target == self._epoch:
                say("ranks are missing: all processes rejoin and continue from the newest state")
                self._grows = True
                self._expect(self._epoch + 1)
            return lost
        self._arrived[node] = numbers, count
        if len(self._arrived) == self._expected:
            for one, (numbers_of_one, ranks) in sorted(self._arrived.items()):
                self._membership.add(one, numbers_of_one, ranks)
            self._begin_epoch()
        return []

    def _give_up(self, node: int) -> list[int]:
        """Return the processes of a node that is lost, and tell its launcher to kill them, should it return."""
        numbers = self._membership.processes_of(node)
        self._killed |= {*numbers}
        self._beats.pop(node, None)
        self._arrived.pop(node, None)
        self.order()
        return numbers

    def _ended(self, number: int, status: int, words: str) -> list[int]:
        """Return the process if it is lost."""
        self._status = status if status >= 0 else 128 - status
        # a spare that is given a rank when all are told to end does not know of it
        knows = status not in ENDING or not self._target or number in self._reached
        can_be_replaced = (is_loss(status) or not knows) and not self._done
        if is_loss(status):
            say(words)
        if (number in self._membership.ranks or self._epoch < 0) and not can_be_replaced:
            self._done.add(number)
            if status or self._done.issuperset(self._membership.ranks):
                self.order(self._status)
            return []
        return [number] if number in (*self._membership.ranks, *self._membership.spares) else []

    def _replace(self, lost: Sequence[int]) -> None:
        were = [number for number in self._membership.ranks if number in lost]
        replaced = self._membership.replace(lost)
        if not were:
            return
        if not self._membership.ranks:
            self.order(self._status)
            return
        for number in were:
            by = f"a spare replaces process {number} of the run" if number in replaced else "no spare is left"
            say(f"{by}; the other processes continue from the newest state")
        self._begin_epoch()

    def _exchange(self, question: int, numbers: Sequence[int], places: int, now: bool) -> None:
        """Answer whether each rank with a slow or wrong device can have a spare, and replace them if `now`."""
        is_possible = (  # not where this epoch began after the question: its ranks could not leave it
            all(self._reached.get(rank) == self._epoch for rank in self._membership.ranks)
            and {*numbers} <= {*self._membership.ranks}
            and self._membership.exchange(numbers, places, now)
        )
        self._store.set(f"answer-{question}", json.dumps(is_possible))
        if not is_possible:
            say("no process was replaced: not every slow rank has a spare with its own device")
        if not (is_possible and now):
            return
        for one in numbers:
            say(f"a spare replaces process {one} of the run, which is killed; the other processes keep running")
        self._killed |= {*numbers}
        self.order()
        self._grows = True
        self._expect(self._epoch + 1)

    def _begin_epoch(self) -> None:
        self._membership.grow()
        self._grows = False
        self._epoch += 1
        self._expect(self._epoch)
        self._server = dist.TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        record = {"port": self._server.port, "ranks": self._membership.record()}
        self._store.set(f"epoch-{self._epoch}", json.dumps(record))

    def _expect(self, epoch: int) -> None:
        """Close the store of the epoch before `epoch`, which all ranks must leave within `LEAVE_SECONDS`."""
        self._target, self._server = epoch, None
        self._due_s = time.monotonic() + LEAVE_SECONDS + len(self._membership.ranks) / 10

    def _silent_nodes(self) -> list[int]:
        now_s, silent = time.monotonic(), []
        paused_s, self._polled_s = now_s - self._polled_s, now_s
        for node, (first, count, since_s) in self._beats.items():
            if now_s - since_s < BEAT_SECONDS:
                continue
            beats = self._store.add(f"beat-{first}", 0)
            if beats != count or paused_s > CUT_SECONDS:  # all may have been stopped, as a scheduler does
                self._beats[node] = first, beats, now_s
            elif now_s - since_s > LOST_SECONDS:
                silent.append(node)
        return silent


def say(words: str) -> None:
    """Print a line of the launcher."""
    with suppress(OSError):
        print(f"\n{words}", file=sys.stderr, flush=True)


def supervise(command: Sequence[str], place: tuple[str, int], node: int, nodes: int, count: int, spares: int) -> int:
    """Start a node's `count` ranks and its spares, keep them running, and return the status of the run.

    Args:
        command: What each process carries out.
        place: Host and port of the launchers' store, on node 0; port 0: any.
        node: Number of this node.
        nodes: Number of nodes in the beginning.
        count: Ranks of each node; 0 on node 0: it has no processes, and only leads.
        spares: Spares of each node.
    """
    host, port = place
    limit = timedelta(seconds=MEET_SECONDS if node else LOST_SECONDS)
    store = dist.TCPStore(host, port, is_master=node == 0, timeout=limit, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=LOST_SECONDS))
    if node == 0:
        store.set("leaders without ranks", str(int(not count)))
    leaders = int(store.get("leaders without ranks"))
    world, own_first = (nodes - leaders) * count, (node - leaders) * count
    leader = Leader(store, host, nodes - leaders) if node == 0 else None
    members = count + spares if count else 0
    first = store.add("members", members) - members
    numbers = list(range(first, first + members))
    environment = {
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # torch warns whenever a store that somebody waits in is closed
        **os.environ,
        "MASTER_ADDR": host,
        "MASTER_PORT": str(store.port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_RUN_ID": store.compare_set("run", "", os.urandom(8).hex()).decode(),  # the first one names it
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    children: dict[int, subprocess.Popen[bytes]] = {}
    answers = SimpleQueue[bool]()
    try:
        for local, number in enumerate(numbers):
            # a spare is not rank 0, which speaks for all, and gets its rank with its place
            rank = own_first + local if local < count else world + number
            own = {MEMBER: f"{number}@{host}:{store.port}", "RANK": str(rank), "LOCAL_RANK": str(local)}
            children[number] = subprocess.Popen(command, env=environment | own, start_new_session=True)
        if members:
            send_news(store, "here", node, numbers, count)
        elif leader is not None:  # no process passes a signal on to the others
            signal.set_wakeup_fd(-1)
            for number in map(abs, ENDING):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, leader.stop)
        Thread(target=_end_if_cut_off, args=(children, answers), daemon=True).start()
        return _watch(store, leader, children, answers)
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        say(f"{socket.gethostname()}: the launchers' store at {host}:{port} does not respond ({reason})")
        return RETRYABLE
    finally:
        answers.put(False)
        _end(children)


def _watch(
    store: dist.Store,
    leader: Leader | None,
    children: dict[int, subprocess.Popen[bytes]],
    answers: SimpleQueue[bool],
) -> int:
    """Report what ends, and carry out orders, until the run has ended; return its status."""
    beat_s, first, is_stopping = 0.0, min(children, default=None), False
    while True:
        if time.monotonic() - beat_s > BEAT_SECONDS:
            beat_s = time.monotonic()
            if first is not None:
                store.add(f"beat-{first}", 1)
            answers.put(True)
        for number, child in list(children.items()):
            if (status := child.poll()) is not None:
                del children[number]
                _signal(child, signal.SIGKILL)  # what it has started, for example workers that load data
                how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
                words = f"process {number} of the run (process {child.pid} on {socket.gethostname()}) {how}"
                send_news(store, "ended", number, status, words)
        if leader is not None:
            leader.poll()
        orders = json.loads(store.get("orders"))
        for number in orders["kill"]:
            if number in children:
                _signal(children[number], signal.SIGKILL)
        if orders["stop"] and not is_stopping:
            is_stopping = True
            for child in children.values():
                _signal(child, signal.SIGTERM)
        if orders["end"] is not None:
            status = int(orders["end"])
            if leader is not None:
                time.sleep(2 * BEAT_SECONDS * bool(leader._beats.keys() - {0}))  # the others read it, too
            return status
        time.sleep(INTERVAL_SECONDS)


def _end_if_cut_off(children: dict[int, subprocess.Popen[bytes]], answers: SimpleQueue[bool]) -> None:
    """Kill all processes of this node, and end, if the launchers' store stays silent, until `answers` has False.

    Otherwise processes that have been given up would write into the run folder next to those that replace them. Time in
    which this process is stopped does not count: it is told what to kill when it continues.
    """
    silences = 0
    while silences < 2:
        try:
            if not answers.get(timeout=CUT_SECONDS / 2):
                return
            silences = 0
        except Empty:
            silences += 1
    say(f"{socket.gethostname()}: the launchers' store does not respond: {len(children)} processes are killed")
    for child in list(children.values()):
        _signal(child, signal.SIGKILL)
    os._exit(RETRYABLE)


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _end(children: dict[int, subprocess.Popen[bytes]]) -> None:
    """End processes that are left, also those that hang."""
    for patience_s in END_SECONDS:  # a rank may have recorded the first SIGTERM, and then lost the others
        deadline_s = time.monotonic() + patience_s
        for child in children.values():
            _signal(child, signal.SIGTERM)
        for child in children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline_s - time.monotonic()))
    for child in children.values():
        _signal(child, signal.SIGKILL)
