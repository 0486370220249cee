"""Runs the project's commands as a user types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.spawn import repository

SMALL = (
    "model.layers=2",
    "model.hidden=32",
    "model.heads=4",
    "model.sequence=32",
    "batch.global_size=4",
    "batch.micro_size=2",
    "metrics.wandb=off",
    "metrics.tensorboard=false",
)


def command(
    *words: str, processes: int = 0, cwd: Path | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`, or `torchrun --nproc-per-node=PROCESSES WORDS`."""
    start = [sys.executable]
    if processes:
        start += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    root = str(repository())
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    }
    return subprocess.run(
        [*start, *words], cwd=cwd or root, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def pretrain(output: Path, *overrides: str, processes: int = 0) -> subprocess.CompletedProcess[str]:
    """`pretrain.py OVERRIDES train.output=OUTPUT`."""
    script = str(repository() / "pretrain.py")
    return command(script, *overrides, f"train.output={output}", processes=processes)


def metrics(output: Path) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl, read strictly."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]
