"""Our Triton kernel for fp8, on a CPU by Triton's interpreter, and compiled for GPUs as training launches it."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys

import pytest
import torch

from benchmarks.attention_kernels import compiling_for, needs
from pangu.layers import fp8
from tests.spawn import repository

pytest.importorskip("triton")
CAPABILITIES = (89, 90, 100)
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_fp8.py has what a GPU must show")
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_cast_by_tiles_is_the_one_of_torch(dtype: torch.dtype) -> None:
    """Of numbers that fp8 has, as the interpreter does not round; the last tiles are not full."""
    x = torch.randint(-4, 5, (200, 96)).bfloat16()
    results = []
    for cast in (fp8._cast, fp8.cast_by_kernel):
        rows, columns = torch.zeros(200, 96, dtype=dtype), torch.zeros(96, 200, dtype=dtype)
        amax, sums = torch.tensor(3.0), torch.zeros(2, 96)
        cast(x, torch.tensor(2.0), amax, rows, columns, sums)
        results.append((rows.float(), columns.float(), amax, sums.sum(0)))
    for ours, torchs in zip(*results, strict=True):
        assert torch.equal(ours, torchs)
    assert results[0][2] == 4
    for value in (math.inf, -math.inf, math.nan):
        x[150, 80] = value
        fp8.cast_by_kernel(x, torch.tensor(2.0), amax, rows, columns, None)
        assert not amax.isfinite()


def test_the_kernel_fits() -> None:
    """Nothing is spilled, x is read and both results are written by 16 bytes at a time, and the device rounds."""
    # a process of its own: in this one, Triton interprets its kernels
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    words = [sys.executable, "-m", "tests.layers.test_fp8_kernels"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=repository(), env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == len(CAPABILITIES) * len(FORMATS) * 2
    for row in rows:
        assert (row["spilled_bytes"], row["registers"] <= 80, row["shared_bytes"] <= 16384) == (0, True, True), row
        assert (row["wide_loads"], row["wide_stores"], row["roundings"]) == (4, 4, 16), row


def compile_kernels() -> None:
    """Print what the kernel takes of each GPU, with and without sums over rows."""
    for capability, dtype, sums in itertools.product(CAPABILITIES, FORMATS, (False, True)):
        x, of_rows = torch.zeros(1024, 1024, dtype=torch.bfloat16), torch.zeros(8, 1024) if sums else None
        rows, columns = torch.empty_like(x, dtype=dtype), torch.empty_like(x, dtype=dtype)
        with compiling_for(capability) as made:
            fp8.cast_by_kernel(x, torch.ones(()), torch.zeros(()), rows, columns, of_rows)
        counts = {
            "wide_loads": r"ld\.global\.v4\.b32",
            "wide_stores": r"st\.global\.v4\.b32",
            "roundings": r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32",
        }
        found = {name: len(re.findall(pattern, made[0].asm["ptx"])) for name, pattern in counts.items()}
        print(json.dumps({"capability": capability, "dtype": str(dtype)} | needs(made[0], capability) | found))


if __name__ == "__main__":
    compile_kernels()
