"""Whole nodes are killed, stopped, cut off and come back; the processes of the first node stay.

A node is a launcher with its ranks and a folder in memory of its own, for the cut also a network namespace of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from pangu.training.watchdog import BEAT_SECONDS
from tests.end_to_end.commands import metrics, wait_until
from tests.end_to_end.dying import HOLDS_AFTER
from tests.end_to_end.test_staying import STEPS, environment, epochs, figures, prepare, whole, words
from tests.spawn import free_port, repository

LAYOUT = "tensor 2 x data 2"
ADDRESSES = ("10.83.0.1", "10.83.0.2")


class Node:
    """A launcher with two ranks, or without."""

    def __init__(
        self, folder: Path, number: int, spares: int, host: str, port: int, *prefix: str, ranks: int = 2, nodes: int = 2
    ) -> None:
        line = [*prefix, sys.executable, "scripts/launch.py", f"--nproc-per-node={ranks}", f"--nnodes={nodes}"]
        line += [
            f"--spares={spares}",
            f"--node-rank={number}",
            f"--master-addr={host}",
            f"--master-port={port}",
            str(folder / "dying.py"),
        ]
        self.memory = folder / "memory" / str(number)
        own = {"PANGU_MEMORY": str(self.memory)} | ({"GLOO_SOCKET_IFNAME": f"v{number}"} if prefix else {})
        self._log = (folder / f"said-{number}").open("a")
        self.launcher = subprocess.Popen(
            [*line, *words(folder / "run", LAYOUT)],
            cwd=repository(),
            env=environment() | own,
            stderr=self._log,
            start_new_session=True,
        )

    def processes(self) -> list[int]:
        """Process numbers of the launcher and its ranks; `ip netns exec` becomes the launcher."""
        with suppress(FileNotFoundError):
            children = Path(f"/proc/{self.launcher.pid}/task/{self.launcher.pid}/children").read_text().split()
            return [self.launcher.pid, *map(int, children)]
        return []

    def signal(self, number: int) -> list[int]:
        """Send a signal to all of them."""
        processes = self.processes()
        for process in processes:
            os.kill(process, number)
        return processes

    def end(self) -> None:
        """Kill what is left."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.launcher.wait()
        self._log.close()


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def has_begun(folder: Path, ranks: int) -> bool:
    file = folder / "processes"
    return file.exists() and len(file.read_text().splitlines()) == ranks


@contextmanager
def cluster(folder: Path, spares: int, spaces: tuple[str, ...] = (), leads: bool = False) -> Iterator[list[Node]]:
    """Two nodes of a run that waits in step `HOLDS_AFTER`, once it has met again, while there is a file `holds`.

    If another machine `leads`, it is the first of three nodes.
    """
    prepare(folder)
    (folder / "holds").touch()
    host, port = ("127.0.0.1", free_port()) if not spaces else (ADDRESSES[0], 29400)
    nodes: list[Node] = []
    with ExitStack() as stack:
        for number in range(2 + leads):
            prefix = ("ip", "netns", "exec", spaces[number]) if spaces else ()
            ranks, spare = (0 if leads and number == 0 else 2), (spares if number in (0, 2) else 0)
            nodes.append(Node(folder, number, spare, host, port, *prefix, ranks=ranks, nodes=2 + leads))
        stack.callback(lambda: [node.end() for node in nodes])
        wait_until(lambda: len(metrics(folder / "run")) >= 5 if (folder / "run/metrics.jsonl").exists() else False)
        yield nodes


def finish(folder: Path, node: Node, *worlds: int, first: int = 0) -> list[list[list[int]]]:
    """Let the run end, and return its epochs; two processes, from rank `first` on, stay in all of them."""
    (folder / "holds").unlink()
    assert node.launcher.wait(300) == 0, (folder / "said-0").read_text()
    found = epochs(folder, *worlds)
    assert len({tuple(process for _, process, _ in ranks[first : first + 2]) for ranks in found}) == 1
    assert [line["step"] for line in metrics(folder / "run")] == list(range(1, STEPS + 1))
    return found


@pytest.mark.long
@pytest.mark.parametrize("ends", ["killed", "stopped", "cut off"])
def test_spares_take_the_ranks_of_a_node(ends: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A node that was only stopped, or cut off, ends its ranks before they write anything."""
    expected = whole(tmp_path_factory, LAYOUT)
    folder = tmp_path_factory.mktemp("nodes") / "of"
    with ExitStack() as stack:
        spaces = stack.enter_context(namespaces()) if ends == "cut off" else ()
        nodes = stack.enter_context(cluster(folder, 2, spaces))
        stale = nodes[1].processes()[1:]
        if ends == "killed":
            nodes[1].signal(signal.SIGKILL)
            shutil.rmtree(nodes[1].memory)
        elif ends == "stopped":
            nodes[1].signal(signal.SIGSTOP)
        else:
            switch(spaces[1], "down")
        wait_until(lambda: has_begun(folder, 8))
        if ends == "cut off":
            assert not any(map(is_there, stale)), "the ranks were given away while the old ones lived"
            switch(spaces[1], "up")
        wait_until(lambda: len(metrics(folder / "run")) == HOLDS_AFTER)
        wait_until((folder / f"run/checkpoints/step-{HOLDS_AFTER:08}/index.json").exists)
        before = settled(folder)
        if ends == "stopped":
            nodes[1].signal(signal.SIGCONT)
            wait_until(lambda: not any(map(is_there, stale)))
        assert settled(folder) == before
        _, after = finish(folder, nodes[0], 4)
    assert after[0][2] >= 4, "five steps were recorded, and more than one of them is repeated"
    assert "/memory/" in (folder / "said-0").read_text().partition("continuing from")[2].partition("\n")[0]
    assert figures(folder / "run") == expected


@pytest.mark.long
def test_the_node_of_rank_0_can_be_lost_where_another_machine_leads(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A signal to the machine that leads reaches all ranks: the run saves and stops."""
    expected = whole(tmp_path_factory, LAYOUT)
    folder = tmp_path_factory.mktemp("nodes") / "of"
    with cluster(folder, 2, leads=True) as nodes:
        nodes[1].signal(signal.SIGKILL)
        shutil.rmtree(nodes[1].memory)
        wait_until(lambda: has_begun(folder, 8))
        _, after = finish(folder, nodes[0], 4, first=2)
        assert nodes[2].launcher.wait(60) == 0
    assert after[0][2] >= 4, "five steps were recorded, and more than one of them is repeated"
    assert figures(folder / "run") == expected
    folder = tmp_path_factory.mktemp("nodes") / "of"
    with cluster(folder, 0, leads=True) as nodes:
        nodes[0].launcher.send_signal(signal.SIGTERM)
        (folder / "holds").unlink()
        statuses = [node.launcher.wait(120) for node in nodes]
    assert statuses == [0, 0, 0], (folder / "said-1").read_text()
    assert len(metrics(folder / "run")) < STEPS


@pytest.mark.long
def test_a_run_grows_back_when_a_node_returns(tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = whole(tmp_path_factory, LAYOUT)
    folder = tmp_path_factory.mktemp("nodes") / "of"
    with cluster(folder, 0) as nodes:
        nodes[1].signal(signal.SIGKILL)
        shutil.rmtree(nodes[1].memory)
        wait_until(lambda: has_begun(folder, 6))
        port = next(word for word in nodes[0].launcher.args if word.startswith("--master-port="))
        nodes.append(Node(folder, 1, 0, "127.0.0.1", int(port.partition("=")[2])))
        wait_until(lambda: "ranks are missing" in (folder / "said-0").read_text())
        time.sleep(2 * BEAT_SECONDS)  # they notice it while they train, not while the test holds them
        finish(folder, nodes[0], 4, 2, 4)
    losses = [loss for loss, _ in figures(folder / "run")]
    # only the number of summands of a sum in fp32 changes
    assert losses == pytest.approx([loss for loss, _ in expected], rel=1e-5)


def contents(folder: Path) -> dict[str, bytes]:
    """Files that the run must not change while it holds, in the run folder and in the copies of the second node."""
    files = [*(folder / "run").rglob("*"), *(folder / "memory" / "1").rglob("*")]
    return {str(file): file.read_bytes() for file in files if file.is_file()}


def settled(folder: Path) -> dict[str, bytes]:
    """Return these files once they have not changed for a second."""
    before = dict[str, bytes]()
    while (now := contents(folder)) != before:
        before = now
        time.sleep(1)
    return now


def switch(space: str, state: str) -> None:
    subprocess.run(["ip", "-n", space, "link", "set", "v1", state], check=True)


@contextmanager
def namespaces() -> Iterator[tuple[str, ...]]:
    """Two network namespaces, joined by a cable."""
    spaces = tuple(f"pangu-{os.getpid()}-{number}" for number in (0, 1))
    with ExitStack() as stack:
        for space in spaces:
            made = subprocess.run(["ip", "netns", "add", space], check=False, capture_output=True, text=True)
            if made.returncode:
                pytest.skip(f"no network namespace can be made here: {made.stderr}")
            stack.callback(subprocess.run, ["ip", "netns", "del", space], check=False)
            subprocess.run(["ip", "-n", space, "link", "set", "lo", "up"], check=True)
        cable = f"ip link add v0 netns {spaces[0]} type veth peer name v1 netns {spaces[1]}"
        subprocess.run(cable.split(), check=True)
        for number, (space, address) in enumerate(zip(spaces, ADDRESSES, strict=True)):
            subprocess.run(["ip", "-n", space, "addr", "add", f"{address}/24", "dev", f"v{number}"], check=True)
            subprocess.run(["ip", "-n", space, "link", "set", f"v{number}", "up"], check=True)
        yield spaces
