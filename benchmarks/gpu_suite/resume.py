"""A run that is killed after its first checkpoint and started again, against one that is not disturbed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_suite.setting import ROOT, Setting, require_near

STEPS, EVERY = 24, 6
COMPARED = 5
"""Steps after the checkpoint. Later ones drift apart where kernels add up in another order each time."""
TOLERANCE = 1e-3
"""In fp32."""
CHANGES = {
    **{"train.steps": STEPS, "checkpoint.every": EVERY, "precision.compute": "fp32", "metrics.every": 1},
    **{"batch.micro_size": 4, "batch.global_size": 4, "model.attention": "sdpa"},
}


def start(values: dict[str, Any]) -> subprocess.Popen[bytes]:
    """A process that makes a run."""
    words = [sys.executable, "-m", "benchmarks.gpu_suite.resume", json.dumps(values)]
    return subprocess.Popen(words, cwd=ROOT)


def losses(folder: Path) -> dict[int, float]:
    """Step -> loss, as far as a run has come."""
    path = folder / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def killed_after_checkpoint(values: dict[str, Any]) -> int:
    """Start a run and kill it once it has saved; the last step that it had recorded. Raises RuntimeError if it ends
    before."""
    folder, process = Path(values["train"]["output"]), start(values)
    while not list(folder.glob("checkpoints/step-*")):
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with status {process.returncode} before it was killed")
        time.sleep(0.01)
    process.kill()
    process.wait()
    return max(losses(folder))


def finish(values: dict[str, Any]) -> float:
    """Seconds of a run. Raises RuntimeError if it fails."""
    began = time.perf_counter()
    if status := start(values).wait():
        raise RuntimeError(f"the run ended with status {status}")
    return time.perf_counter() - began


def measure(setting: Setting) -> None:
    """A row for each run, and one that compares them."""
    folders = {name: setting.output / "runs" / name for name in ("whole", "killed")}
    values = {
        name: setting.values("gpt2_124m", {**CHANGES, "train.output": str(folder)}) for name, folder in folders.items()
    }
    shutil.rmtree(setting.output / "runs", ignore_errors=True)
    with setting.row("killed") as figures:
        figures["last step"] = killed_after_checkpoint(values["killed"])
    saved = max(int(path.name.removeprefix("step-")) for path in folders["killed"].glob("checkpoints/step-*"))
    with setting.row("resumed") as figures:
        figures["checkpoint"] = saved
        figures["seconds"] = finish(values["killed"])
    with setting.row("whole") as figures:
        figures["seconds"] = finish(values["whole"])
    with setting.row("resumed against whole") as figures:
        found, expected = (losses(folders[name]) for name in ("killed", "whole"))
        figures["losses"], figures["losses of the whole run"] = list(found.values()), list(expected.values())
        figures["equal bit for bit"] = found == expected
        if sorted(found) != list(range(1, STEPS + 1)):
            raise ValueError(f"the resumed run has the steps {sorted(found)}")
        steps = range(saved + 1, min(saved + COMPARED, STEPS) + 1)
        require_near([found[step] for step in steps], [expected[step] for step in steps], TOLERANCE)


if __name__ == "__main__":
    from pangu.training.run import run

    configuration = json.loads(sys.argv[1])
    if configuration["train"]["device"] == "cpu":  # on which the model is too small for several threads
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    run(configuration)
