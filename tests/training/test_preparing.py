"""Data that a run prepares: slowly, never, wrongly, or until it is told to stop."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.end_to_end.commands import SMALL, metrics, run_script
from tests.pace import at_some_pace
from tests.spawn import Program, repository, run_ranks

FILES = 8
SCRIPT = f"""
import os, signal, sys, time
from multiprocessing import active_children, current_process
from pathlib import Path

from pangu.collectives import agreement
from pangu.common.errors import UserError
from pangu.prepare import instructions
from pangu.pretrain import pretrain

RANK = os.environ["RANK"]
read = instructions.read_chunks
current_process().daemon = False  # so that it may have workers


def changed(sources, key):
    for number, chunk in enumerate(read(sources, key)):
        CODE
        yield chunk


if __name__ == "__main__":
    instructions.read_chunks = changed
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts behind itself ignores it
    os.environ["LOCAL_RANK"] = "0"  # each is a node of its own, with its own disk
    sys.argv.append(f"data.folder={{sys.argv[-1].removeprefix('train.output=')}}/data-{{RANK}}")
    pretrain(Path({str(repository())!r}) / "configs")
"""


def run_changed(folder: Path, processes: int, code: str, *words: str) -> Program:
    """A run that fine-tunes on files of one conversation each, before each of which this code runs."""
    folder.mkdir(exist_ok=True)
    script = folder / "changed.py"
    script.write_text(SCRIPT.replace("CODE", code), encoding="utf-8")
    (folder / "files").mkdir(exist_ok=True)
    for number in range(FILES):
        talk = json.dumps({"prompt": f"{number} and one is ", "response": f"{number + 1}"})
        (folder / "files" / f"{number}.jsonl").write_text(f"{talk}\n" * 8, encoding="utf-8")
    data = ("data=instructions", f"data.train=[{folder}/files]", "data.tokenizer={kind:bytes}", "data.template=plain")
    small = (*SMALL, "model.vocab=257", "train.device=cpu", "train.steps=2", "checkpoint.every=0", "validation.every=0")
    words = (*small, *data, "lr_schedule.warmup_steps=1", *words, f"train.output={folder / 'run'}")
    return run_ranks(processes, run_script, str(script), *words, timeout=600)


def left_over(folder: Path) -> list[str]:
    return [path.name for path in (folder / "run" / "data-0").iterdir()]


@at_some_pace
def test_data_may_be_prepared_for_longer_than_processes_wait(tmp_path: Path, pace: float) -> None:
    """First on one node, then on the other."""
    folder = tmp_path / f"{pace:g}"
    done = run_changed(folder, 2, f"time.sleep({0.6 * pace})", f"parallel.timeout_s={3 * pace}")
    assert done.returncode == 0, done.stderr
    assert len(metrics(folder / "run")) == 2
    assert "no progress" not in done.stderr  # as the watchdog says


@pytest.mark.parametrize(
    ("rank", "workers", "code"),
    [(1, 1, "time.sleep(900)"), (0, 2, "[os.kill(worker.pid, signal.SIGSTOP) for worker in active_children()]")],
    ids=["the process", "its workers"],
)
@at_some_pace
def test_a_preparation_that_hangs_ends_the_run(tmp_path: Path, rank: int, workers: int, code: str, pace: float) -> None:
    folder, limit_s = tmp_path / f"{pace:g}", 3 * pace
    code = f"if number == 4 and RANK == '{rank}': {code}"
    done = run_changed(folder, 2, code, f"parallel.timeout_s={limit_s}", f"data.workers={workers}")
    assert done.statuses[0] == 2, done.stderr
    assert done.stderr.count(" error: ") == 1
    assert (
        f": error: rank {rank}: preparing data=instructions made no progress for more than {limit_s:g} s "
        "(parallel.timeout_s); check the disk and the network there, or raise parallel.timeout_s\n"
    ) in done.stderr
    stacks = (folder / "run" / "stacks" / f"rank-{rank}.txt").read_text()
    assert stacks.startswith(f"rank {rank}: preparing data=instructions\n")
    assert "parallel_map" in stacks


def test_an_error_of_one_process_is_said_once(tmp_path: Path) -> None:
    done = run_changed(tmp_path, 2, "if number == 4: raise UserError('a bad file')", "data.workers=2")
    assert done.statuses[0] == 2
    assert done.stderr.count("error: a bad file") == done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr
    assert left_over(tmp_path) == []


@pytest.mark.parametrize(("number", "status"), [("SIGINT", 130), ("SIGTERM", -signal.SIGTERM)])
@pytest.mark.parametrize(("processes", "workers"), [(1, 2), (2, 1), (2, 2)])
def test_a_signal_ends_a_preparation(tmp_path: Path, number: str, status: int, processes: int, workers: int) -> None:
    # to clean up takes a slow machine longer
    code = f"if number == 4: agreement.LEAVE_SECONDS = 300.0; os.kill(os.getpid(), signal.{number}); time.sleep(0.5)"
    done = run_changed(tmp_path, processes, code, f"data.workers={workers}")
    assert done.statuses[0] == status
    assert "Traceback" not in done.stderr
    if number == "SIGINT":
        assert "\ninterrupted; start the same command again to continue from the newest checkpoint" in done.stderr
        assert left_over(tmp_path) == []
    assert run_changed(tmp_path, 1, "pass").returncode == 0
