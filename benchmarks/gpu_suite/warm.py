"""Start-up time that caches save: the same steps by two processes, one after the other, with caches of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu_suite.setting import ROOT, Setting
from benchmarks.gpu_suite.speed import ours

LIMIT_S = 120
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "XDG_CACHE_HOME": "home"}
"""Variable -> folder of a cache; the last one holds what the trainer keeps of its trials of kernels."""


def start(values: dict[str, Any], folder: Path) -> dict[str, float]:
    """Seconds of a fresh process from its start to the end of its second step, and of these steps."""
    caches = {name: str(folder / cache) for name, cache in CACHES.items()}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_suite.warm"],
        input=json.dumps(values),
        env={**os.environ, **caches, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"status {done.returncode}: {done.stderr[-1000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {"process_start_to_end": time.perf_counter() - began, **found}


def measure(setting: Setting) -> None:
    """A row for each start, eager and compiled."""
    for name, compiled in (("eager", False), ("compiled", True)):
        values = setting.values("pangu_350m", {"compile": compiled})
        with TemporaryDirectory() as folder:
            for which in ("first start", "second start"):
                with setting.row(f"{name}, {which}") as figures:
                    figures |= start(values, Path(folder))


def main() -> None:
    """Make two steps of the configuration on standard input, and print their seconds."""
    values = json.load(sys.stdin)
    device = torch.device(values["train"]["device"], *((0,) if values["train"]["device"] != "cpu" else ()))
    began = time.perf_counter()
    step = ours(values, device)
    built = time.perf_counter()
    step()
    step()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    print(json.dumps({"building_seconds": built - began, "two_steps_seconds": time.perf_counter() - built}))


if __name__ == "__main__":
    main()
