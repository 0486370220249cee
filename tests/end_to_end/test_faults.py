"""Several processes, one of which goes wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pangu.common.exit_status import USER_ERROR
from tests.end_to_end.commands import HANG, SMALL, metrics, run_script
from tests.pace import at_some_pace
from tests.spawn import Program, repository, run_ranks

QUIET = (*SMALL, "data=synthetic", "validation.every=0", "lr_schedule.warmup_steps=1", "checkpoint.every=2")

SCRIPT = f"""
import math, os
from pathlib import Path

from pangu.pretrain import pretrain
from pangu.training.step import Trainer

RANK = int(os.environ["RANK"])
forward_backward, update = Trainer.forward_backward, Trainer.update
bad = []
{HANG}

def changed(trainer, batches):
    CODE


def spoiled(trainer, flags):
    pending = update(trainer, flags)
    if bad and bad.pop():
        pending.numbers[0] = math.nan
    return pending


Trainer.forward_backward, Trainer.update = changed, spoiled
if __name__ == "__main__":
    pretrain(Path({str(repository())!r}) / "configs")
"""


def run_changed(folder: Path, code: list[str], *words: str) -> Program:
    """Two replicas whose `forward_backward(trainer, batches)` is this code."""
    folder.mkdir(exist_ok=True)
    script = folder / "changed.py"
    script.write_text(SCRIPT.replace("CODE", "\n    ".join(code)), encoding="utf-8")
    return run_ranks(2, run_script, str(script), *QUIET, *words, f"train.output={folder / 'run'}", timeout=600)


@pytest.mark.parametrize(("sleeps", "doing"), [("step", "counting target tokens"), ("loss", "adding up loss and norm")])
@at_some_pace
def test_a_replica_that_sleeps_for_ever_is_named_in_one_message(
    tmp_path: Path, sleeps: str, doing: str, pace: float
) -> None:
    code = ["if RANK == 1 and trainer.step == 2:"]
    if sleeps == "step":
        code += ["    hang()"]
    else:
        code += ["    trainer.parameters.norm_and_loss = lambda *given: hang()"]
    code += ["forward_backward(trainer, batches)"]
    done = run_changed(tmp_path / f"{pace:g}", code, f"parallel.timeout_s={5 * pace}", "train.steps=9")
    assert done.returncode != 0
    expected = f"error: rank 0, step 3, {doing}: rank 1 did not respond within parallel.timeout_s"
    assert done.stderr.count(expected) == done.stderr.count("error: rank") == 1, done.stderr
    assert "LocalError" not in done.stderr


def test_a_replica_without_memory_says_so_in_one_message_and_ends_with_a_users_error(tmp_path: Path) -> None:
    error = "__import__('torch').OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has')"
    code = ["if RANK == 1 and trainer.step == 1:", f"    raise {error}", "forward_backward(trainer, batches)"]
    done = run_changed(tmp_path, code, "train.steps=9")
    assert done.statuses[1] == USER_ERROR
    expected = r"error: rank 1 \(cpu\), step 2, training: out of memory, 2.00 GiB requested; try .*\n"
    assert len(re.findall(expected, done.stderr)) == 1, done.stderr
    assert "Traceback" not in done.stderr


def test_replicas_go_back_together(tmp_path: Path) -> None:
    """A fault in the batch from sample 20 on; the samples from 16, the newest checkpoint's, to 28 are left out."""
    code = [
        "first = batches[0].samples[0]",
        r"print(f'batch {first}\n', end='', flush=True)",  # in one piece
        "forward_backward(trainer, batches)",
        "bad.append(first // 4 == 5)",
    ]
    words = (
        "faults.action=rollback",
        "faults.spike=1e9",
        "faults.skip_after=1",
        "faults.proven_after=1",
        "train.steps=7",
        "faults.straggler_every=1",
    )
    done = run_changed(tmp_path, code, *words)
    assert done.returncode == 0, done.stderr
    # micro-batches of 2 are dealt in turn
    first = (0, 4, 8, 12, 16, 20, 28, 32, 36)
    assert sorted(map(int, re.findall(r"batch (\d+)", done.stdout))) == sorted([*first, *(n + 2 for n in first)])
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 8))
    assert done.stderr.count("step-00000004, 2 steps before, is proven") == 1
    assert done.stderr.count("step-00000004: continuing after step 4 with sample 28") == 1


def test_replicas_whose_weights_differ_go_back_and_leave_no_batch_out(tmp_path: Path) -> None:
    """A bit is turned over on rank 1 before step 6, whose weights step 5 has left; step 4 is the newest checkpoint."""
    code = [
        "if RANK == 1 and trainer.step == 5 and 'flipped' not in globals():",
        "    globals()['flipped'] = True",
        "    trainer.parameters.unsharder.wait()",
        "    trainer.parameters.flat_parameters[0].weights.data.view(__import__('torch').int32)[3] ^= 1 << 20",
        r"print(f'batch {batches[0].samples[0]}\n', end='', flush=True)",
        "forward_backward(trainer, batches)",
    ]
    words = ("faults.action=rollback", "faults.verify_weights=true", "parallel.zero=2", "train.steps=7")
    done = run_changed(tmp_path, code, *words)
    assert done.returncode == 0, done.stderr
    # step 6, after which a checkpoint is due, is read at once
    first = (0, 4, 8, 12, 16, 20, 16, 20, 24)
    assert sorted(map(int, re.findall(r"batch (\d+)", done.stdout))) == sorted([*first, *(n + 2 for n in first)])
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 8))
    named = r"step 6: weights differ \(faults.verify_weights\): flat parameter 0 \(.*\): rank 0 on \S+, rank 1 on \S+ "
    assert len(re.findall(named, done.stderr)) == 1, done.stderr
    assert done.stderr.count("step-00000004: continuing after step 4 with sample 16") == 1


def test_a_spike_is_of_the_device_or_of_the_data(tmp_path: Path) -> None:
    """Rank 1 gets the loss of step 4 wrong, once; that of the samples from 20 on is large whoever computes it."""
    code = [
        "forward_backward(trainer, batches)",
        "if RANK == 1 and trainer.step == 3 and 'erred' not in globals():",
        "    globals()['erred'] = True",
        "    trainer._loss = trainer._loss * 1e4",
        "if batches[0].samples[0] // 4 == 5:",
        "    trainer._loss = trainer._loss * 1e4",
    ]
    words = ("faults.action=rollback", "faults.spike=1e3", "faults.spike_window=3", "faults.recheck=2")
    done = run_changed(tmp_path, code, *words, "faults.skip_after=0", "train.deterministic=true", "train.steps=7")
    assert done.returncode == 0, done.stderr
    device = r"recomputed with different bits \(faults.recheck\): rank 1 on \S+; check the device: rolling back\n.*"
    device += "step-00000002: continuing after step 2 with sample 8"
    data = r"recomputed in place and on all replicas with the same bits, so no device is at fault: rolling back; "
    data += "(?s:.*)step-00000002: continuing after step 2 with sample 24"
    for step, verdict in ((4, device), (6, data)):
        assert len(re.findall(rf"step {step}: the loss is \S+, above .*; {verdict}", done.stderr)) == 1, done.stderr
    assert "skipped" not in done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == list(range(1, 8))
