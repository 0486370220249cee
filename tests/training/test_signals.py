"""A run saves and stops when it is asked to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed as dist

from pangu.common.errors import LostError
from pangu.common.exit_status import INTERRUPTED
from pangu.topology.member import Member
from pangu.training import elastic, interrupts
from pangu.training.interrupts import Interrupts
from pangu.training.process import read_flags
from pangu.training.run import run
from pangu.training.saving import Saver
from pangu.training.step import Trainer
from tests.configs import composed, config
from tests.end_to_end.commands import SMALL, call_and_exit, metrics
from tests.spawn import repository, run_ranks
from tests.training.test_resume import QUIET, train

forward_backward = Trainer.forward_backward


def sends(number: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a signal arrive in the middle of a step."""

    def compute(trainer: Trainer, batches: Any) -> None:
        if trainer.step == step - 1:
            os.kill(os.getpid(), number)
        forward_backward(trainer, batches)

    monkeypatch.setattr(Trainer, "forward_backward", compute)


def test_a_signal_that_was_noted_before_a_rank_was_lost_stops_the_next_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(elastic.MEMBER, "0@host:1")
    monkeypatch.setattr(elastic, "Member", MagicMock())
    stops = []

    def attempt(stop_signals: Any) -> int:
        with stop_signals(0.0, None) as signals:
            if not stops:
                os.kill(os.getpid(), signal.SIGTERM)
            stops.append(read_flags(signals.flags(0.0, save_has_failed=False))[1])
            if len(stops) == 1:
                raise LostError("a rank is lost")
        return 0

    assert elastic.run_elastic({}, attempt) == 0
    assert stops == ["SIGTERM", "SIGTERM"]


@pytest.fixture
def refuse() -> Iterator[Any]:
    """The handler of SIGTERM before a run and after it."""

    def refuse(*_: object) -> None:
        raise AssertionError("the process would have been killed")

    previous = signal.signal(signal.SIGTERM, refuse)
    yield refuse
    signal.signal(signal.SIGTERM, previous)


def test_a_signal_between_two_attempts_stops_the_next_one(monkeypatch: pytest.MonkeyPatch, refuse: Any) -> None:
    def leave(_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    member, attempts = MagicMock(), []
    member.leave.side_effect = leave
    monkeypatch.setenv(elastic.MEMBER, "0@host:1")
    monkeypatch.setattr(elastic, "Member", lambda: member)

    def attempt(stop_signals: Any) -> int:
        attempts.append(set(stop_signals(0.0, None)._received))
        if len(attempts) == 1:
            raise LostError("a rank is lost")
        os.kill(os.getpid(), signal.SIGHUP)  # while it starts
        attempts.append(set(stop_signals(0.0, None)._received))
        return 0

    assert elastic.run_elastic({}, attempt) == 0
    assert signal.getsignal(signal.SIGTERM) is refuse
    assert attempts == [set(), {signal.SIGTERM}, {signal.SIGTERM, signal.SIGHUP}]


def test_a_signal_while_a_lost_run_ends_stops_the_next_attempt(monkeypatch: pytest.MonkeyPatch, refuse: Any) -> None:
    """It comes between the loop's end and that of the run, which waits for threads and other ranks."""
    monkeypatch.setenv(elastic.MEMBER, "0@host:1")
    monkeypatch.setattr(elastic, "Member", MagicMock())
    stops = []

    def end() -> None:
        if len(stops) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def attempt(stop_signals: Any) -> int:
        with ExitStack() as run:
            run.callback(end)
            signals = run.enter_context(stop_signals(0.0, None))
            stops.append(read_flags(signals.flags(0.0, save_has_failed=False))[1])
            if len(stops) == 1:
                raise LostError("a rank is lost")
        return 0

    assert elastic.run_elastic({}, attempt) == 0
    assert stops == [None, "SIGTERM"]
    assert signal.getsignal(signal.SIGTERM) is refuse


def test_a_spare_notes_signals_before_the_launcher_counts_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher ends the run if a rank that it counts on is told to end and does."""
    launchers = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for epoch, number in enumerate((0, 2)):
        launchers.set(f"epoch-{epoch}", json.dumps({"port": 1, "ranks": [[number, 0]]}))
    environment = {"PANGU_MEMBER": f"2@127.0.0.1:{launchers.port}", "LOCAL_WORLD_SIZE": "1"}
    counted = []
    Member(environment).join(lambda _: True, lambda: counted.append(launchers.check(["news-1"])), lambda: None)
    assert counted == [False]
    assert json.loads(launchers.get("news-1")) == ["joined", 2, 1]


def test_sigterm_saves_and_stops_and_the_run_continues_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unbroken = train(tmp_path / "whole", 5, "checkpoint.every=100")
    handler = signal.getsignal(signal.SIGTERM)
    sends(signal.SIGTERM, 2, monkeypatch)  # all hear of it while they make step 3
    assert train(tmp_path / "run", 5, "checkpoint.every=100") == unbroken[:3]
    said = capsys.readouterr().err
    assert "stopped after step 3 (SIGTERM)" in said
    assert "step-00000003 is saved; start the same command again to continue" in said
    assert signal.getsignal(signal.SIGTERM) is handler
    assert (tmp_path / "run" / "plots" / "loss.png").stat().st_size
    assert train(tmp_path / "run", 5, "checkpoint.every=100") == unbroken
    assert train(tmp_path / "unsaved", 5, "checkpoint.every=0") == unbroken[:3]
    said = capsys.readouterr().err
    assert "no checkpoint is saved (checkpoint.every = 0); the same command starts where this one did" in said


@pytest.fixture
def _obeyed() -> Iterator[None]:
    """Ctrl-C and a closed terminal have their usual meaning; what a shell or `nohup` starts in the background ignores
    them."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {which: signal.signal(which, handler) for which, handler in usual.items()}
    yield
    for which, handler in before.items():
        signal.signal(which, handler)


@pytest.mark.usefixtures("_obeyed")
@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_closed_terminal_and_ctrl_c_save_and_stop(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sends(signal.Signals[name], 2, monkeypatch)
    assert len(train(tmp_path, 5, "checkpoint.every=100")) == 3
    said = capsys.readouterr().err
    assert f"stopped after step 3 ({name}): " in said
    assert "step-00000003 is saved; start the same command again to continue" in said
    assert (tmp_path / "plots" / "loss.png").stat().st_size
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_signal_that_the_parent_ignores_stays_ignored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`nohup` and a shell's background."""
    before = signal.signal(signal.Signals[name], signal.SIG_IGN)
    try:
        sends(signal.Signals[name], 2, monkeypatch)
        assert len(train(tmp_path, 4, "checkpoint.every=0")) == 4
    finally:
        signal.signal(signal.Signals[name], before)


def interrupt(times: int) -> None:
    """Let Ctrl-C arrive so many times, then block the main thread where no Python handler can run."""
    say, said = Interrupts._say, Event()

    def press() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)
        if times == 2:
            said.wait()  # that it can be pressed again
            os.kill(os.getpid(), signal.SIGINT)

    def noted(self: Interrupts, text: str) -> None:
        say(self, text)
        said.set()

    interrupts.SAME_SECONDS = 0.0
    Interrupts._say = noted
    Thread(target=press).start()
    dist.HashStore().wait(["never"], timedelta(seconds=600))


def run_interrupted(place: str, *words: str) -> None:
    """A run whose step, save or preparation blocks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.GRACE_SECONDS = 0.5
    if place == "step":
        Trainer.forward_backward = lambda *given: interrupt(2)
    elif place == "save":
        Saver._write = lambda *given, **named: interrupt(2)
    else:
        Trainer.__init__ = lambda *given: interrupt(1)
    call_and_exit("pretrain", *words)


@pytest.mark.parametrize("place", ["step", "save", "start"])
def test_a_second_ctrl_c_ends_a_blocked_run_at_once(place: str, tmp_path: Path) -> None:
    """Before the first step, where there is nothing to save, one is enough."""
    words = (*SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", "train.steps=2", "checkpoint.every=1")
    done = run_ranks(1, run_interrupted, place, *words, f"train.output={tmp_path / 'run'}")
    assert done.statuses == [INTERRUPTED], done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\ninterrupted; start the same command again to continue from the newest checkpoint") == 1
    assert done.stderr.count("press Ctrl-C again to stop it at once") == (place != "start")


def test_sigusr1_saves_once_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sends(signal.SIGUSR1, 2, monkeypatch)
    assert len(train(tmp_path, 5, "checkpoint.every=100")) == 5
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000005"]


def test_a_time_limit_stops_the_run_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("train.steps=100000", "checkpoint.every=100000", "train.stop_after=3", "metrics.every=100000")
    assert run(composed(*QUIET, *words, "train.stop_status=143", f"train.output={tmp_path}")) == 143
    steps = len(metrics(tmp_path))
    assert 0 < steps < 100000
    assert f"stopped after step {steps} (train.stop_after)" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / f"step-{steps:08d}").is_dir()
    assert (tmp_path / "plots" / "loss.png").stat().st_size


@pytest.mark.parametrize(("given", "seconds"), [("90", 90.0), ("1h30m", 5400.0), ("2m5s", 125.0), ("null", None)])
def test_times_are_read(given: str, seconds: float | None) -> None:
    assert config(f"train.stop_after={given}").train.stop_after_s == seconds


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, *_):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = [{script!r}, "+config=quickstart"]
runpy.run_path({script!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("script", "name", "said"),
    [
        ("pretrain.py", "pangu.pretrain", "\ninterrupted"),
        ("pretrain.py", "pangu.config.schema", "\ninterrupted"),
        ("pretrain.py", "hydra", interrupts.ENDED),
        ("pretrain.py", "torch", interrupts.ENDED),
        ("pretrain.py", "torch.nn", interrupts.ENDED),
        ("scripts/launch.py", "torch", interrupts.ENDED),
    ],
)
def test_ctrl_c_while_modules_are_imported_is_one_message(script: str, name: str, said: str) -> None:
    """Torch aborts with a core dump if its import ends with an exception of Python."""
    code = INTERRUPTED_IMPORT.format(script=script, name=name)
    done = subprocess.run([sys.executable, "-c", code], cwd=repository(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (INTERRUPTED, f"{said}\n")
