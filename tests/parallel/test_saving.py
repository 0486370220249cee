"""Saves in which a rank hangs end, and name it."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pangu.checkpoint import files
from pangu.checkpoint.files import list_checkpoints
from pangu.checkpoint.remote import RemoteRun
from pangu.collectives import agreement
from pangu.collectives.agreement import StuckError, agree_on_long_work, report_unresponsive_ranks
from pangu.collectives.reduce import gather_objects
from pangu.common.errors import LocalError
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.saving import Saver
from tests.configs import tiny
from tests.pace import at_some_pace
from tests.parallel.harness import OVERRIDES, small_trainer
from tests.spawn import Pool

TIMEOUT = 2.0
"""Seconds, times the pace of a test."""


def saves(rank: int, world: int, folder: Path, asynchronous: bool, limit_s: float) -> str:
    """What is said of a second save, in which the second of two ranks hangs at its first file."""
    words = (*OVERRIDES, f"parallel.timeout_s={limit_s}", f"train.output={folder}")
    words += (f"checkpoint.asynchronous={str(asynchronous).lower()}",)
    tiny(*words)  # takes long for the first time
    dist.barrier()
    trainer, _ = small_trainer(Layout(data=2, zero=1), *words)
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").touch()
    write = files._write_file

    def slow(*arguments: object) -> None:
        time.sleep(3 * limit_s if rank == 1 else 0)
        write(*arguments)

    saver = Saver(trainer.config, trainer)
    saver.save(0, {})
    saver.finish()
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-00000000"]
    trainer.step = 1
    began = time.monotonic()
    with patch.object(files, "_write_file", slow):
        saver.save(0, {})
        if asynchronous:
            while not saver.has_failed:
                time.sleep(0.05)
        with pytest.raises(StuckError) as raised:
            saver.wait()
    assert limit_s < time.monotonic() - began < 3 * limit_s
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-00000000"]
    return str(raised.value)


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.long)])
@at_some_pace
def test_a_rank_that_hangs_during_a_save_is_named(pool: Pool, asynchronous: bool, tmp_path: Path, pace: float) -> None:
    folder, limit_s = tmp_path / f"{pace:g}", TIMEOUT * pace
    path = folder / "checkpoints" / "step-00000001"
    for said in pool.run(2, saves, folder, asynchronous, limit_s):
        assert said.startswith(f"rank 1: writing {path} made no progress for more than {limit_s:g} s")


def stopped(rank: int, world: int, keeps: bool, pace: float) -> str:
    """What the second of two ranks says when the first one is stopped, as a debugger does, or hangs with its node.

    Args:
        rank: of this process.
        world: 2.
        keeps: the store of the run lies in the first process, otherwise in the second.
        pace: of the test.
    """
    mesh = Mesh.connect(Layout(data=2), torch.device("cpu"), TIMEOUT * pace)
    group = mesh.group("world")
    store_rank = 0 if keeps else 1
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == store_rank else None
    port = gather_objects(store.port if store is not None else 0, group)[store_rank]
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    mesh = replace(mesh, store=store, store_rank=store_rank)
    background = mesh.background()
    process = gather_objects(os.getpid(), group)[0]
    if rank == 0:
        os.kill(process, signal.SIGSTOP)
        return ""
    try:
        with (
            patch.multiple(agreement, SILENCE_SECONDS=0.2 * pace, STORE_SECONDS=pace),
            pytest.raises(LocalError) as raised,
            report_unresponsive_ranks(mesh, lambda: "saving"),
        ):
            agree_on_long_work(background, "writing", lambda _: None, runs_here=True)
    finally:
        os.kill(process, signal.SIGCONT)
    return str(raised.value)


@pytest.mark.parametrize("keeps", [True, pytest.param(False, marks=pytest.mark.long)])
@at_some_pace
def test_a_rank_that_is_stopped_is_named(pool: Pool, keeps: bool, pace: float) -> None:
    """A store in a process that is stopped does not answer, and torch waits for that without end."""
    _, said = pool.run(2, stopped, keeps, pace)
    assert said.startswith("rank 1, saving: rank 0 did not respond within parallel.timeout_s, or exited")


def sends(rank: int, world: int, folder: Path, limit_s: float) -> list[str]:
    """Return the copies at the end of a run whose second rank sends its file for longer than the first one waits."""
    url = f"file://{folder}/remote"
    words = (*OVERRIDES, f"parallel.timeout_s={limit_s}", f"train.output={folder}/run", f"checkpoint.remote={url}")
    trainer, _ = small_trainer(Layout(data=2, zero=1), *words)
    send = RemoteRun._send_file

    def slow(self: RemoteRun, *arguments: Any) -> None:
        for _ in range(17 if rank == 1 else 0):
            time.sleep(limit_s / 10)
            self._on_progress()
        send(self, *arguments)

    with patch.object(RemoteRun, "_send_file", slow):
        saver = Saver(trainer.config, trainer)
        saver.save(0, {})
        saver.finish()
        saver.finish_uploads()
        return list(RemoteRun(url).checkpoints())


@at_some_pace
def test_the_end_of_a_run_waits_for_the_slowest_rank_that_sends(pool: Pool, tmp_path: Path, pace: float) -> None:
    for copies in pool.run(2, sends, tmp_path / str(pace), TIMEOUT * pace):
        assert len(copies) == 1
