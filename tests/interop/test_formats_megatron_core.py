"""Megatron-Core's own GPTModel, where it is installed: what it saves computes the same here, what we write the same
there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.interop.test_formats import convert, logical, require_equal
from tests.interop.test_formats_transformers import our_logits, tokens
from tests.spawn import repository

pytest.importorskip("megatron.core")

SCRIPT = repository() / "tests" / "references" / "megatron_core_gpt.py"


def megatron(ranks: int, *words: object) -> None:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    done = subprocess.run([*start, *map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "torch_dist"])
@pytest.mark.parametrize(
    ("variant", "ranks"),
    [("gpt", 1), ("gpt", 2), ("llama", 2), ("linear", 2), ("yarn", 1), ("deepseek", 1), ("deepseek", 2)],
)
def test_logits_both_ways(variant: str, ranks: int, how: str, tmp_path: Path) -> None:
    """1e-5: fp32, logits of up to about 10, sums of at most 256 products."""
    ids = tokens(256, 24)
    torch.save(ids, tmp_path / "ids.pt")
    megatron(ranks, "save", how, variant, tmp_path / "theirs", tmp_path / "ids.pt", tmp_path / "expected.pt")
    expected = torch.load(tmp_path / "expected.pt")
    run = convert("megatron", "pangu", tmp_path / "theirs", tmp_path / "ours")
    torch.testing.assert_close(our_logits(run, ids), expected, atol=1e-5, rtol=1e-5)
    other = 3 - ranks
    words = ["--tensor", str(other)] if how == "torch" else ["--megatron-format", how]
    back = convert("pangu", "megatron", run, tmp_path / "back", *words)
    require_equal(logical(convert("megatron", "pangu", back, tmp_path / "again")), logical(run))
    if (variant, how) == ("deepseek", "torch_dist"):
        # with Transformer Engine alone, whose names other modules do not find there
        return
    megatron(other, "load", how, variant, back, tmp_path / "ids.pt", tmp_path / "found.pt")
    torch.testing.assert_close(torch.load(tmp_path / "found.pt"), expected, atol=1e-5, rtol=1e-5)
