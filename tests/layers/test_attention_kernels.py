"""Our Triton kernels of attention, compiled for GPUs as training launches them, fit into their registers and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.attention_kernels import CAPABILITIES, KERNELS, instruction_of
from tests.spawn import repository

triton = pytest.importorskip("triton")
IS_OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)

SHARED_KIB = {80: 163, 90: 227, 100: 227, 120: 99}
"""Shared memory that a program may have, by compute capability (CUDA programming guide, technical specifications)."""
SIZES = (64, 80, 128)
"""Columns of a head of the presets."""
LOOP_INSTRUCTIONS = {
    (90, 80): {"attend": 500, "query_gradients": 480, "key_gradients": 405},
    (80, 128): {"attend": 680, "query_gradients": 350, "key_gradients": 530},
    (100, 80): {"key_gradients": 485},
}
"""Most instructions of a thread for a tile, with dropout: 717, 637 and 496, and 868, 427 and 630 with a hash for every
element. On 10.0, 524 for 4,096 scores by 256 threads before 481 by 128 threads."""
IN_CI = {(80, 128), (90, 64), (90, 80), (90, 128), (100, 80)}


@pytest.mark.parametrize(
    ("capability", "size"),
    [
        pytest.param(capability, size, marks=() if (capability, size) in IN_CI else pytest.mark.long)
        for capability in CAPABILITIES
        for size in SIZES
    ],
)
def test_kernels_fit(capability: int, size: int, tmp_path: Path) -> None:
    """Nothing is spilled, and all products run on the tensor cores as the newest instructions of the GPU have them."""
    # a process of its own: in this one, other tests let Triton interpret its kernels
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    words = ["-m", "benchmarks.attention_kernels", "--capabilities", str(capability), "--head-sizes", str(size)]
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=repository(), env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["kernel"] for row in rows] == list(KERNELS)
    for row in rows:
        assert row["spilled_bytes"] == 0, row
        assert row["shared_bytes"] <= SHARED_KIB[capability] * 1024, row
        is_old = instruction_of(capability) == "mma"
        assert (row["products"] > 0, row["old_products"] > 0) == (not is_old, is_old), row
        most = {} if IS_OLD else LOOP_INSTRUCTIONS.get((capability, size), {})
        assert row["loop_instructions"] <= most.get(row["kernel"], 10**9), row
