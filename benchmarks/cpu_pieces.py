"""A training step with and without each piece of the trainer that exists for CPUs only.

    python -m benchmarks.cpu_pieces --output benchmarks/results/cpu_pieces.json

A ratio is the step's time without the piece over that with it, the median over interleaved repeats: above 1, the piece
helps. Processor time is that of the first process; other work on the machine changes it least. Peaks are those of fresh
processes. The file also holds, by hand, the rows of pieces that were removed because they gained too little.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.side_by_side import _peak_resident_mib, fresh, machine
from benchmarks.trainer import micro_batches, pangu_trainer

CONTEXT = ("parallel.context=2", "parallel.context_kind=gather", "model.sequence=2048", "model.layers=1")
DROPS = ("model.dropout=0.1", "model.attention_dropout=0.1", "model.layers=4")
HIGHEST = "precision.fp32_matmul=highest"


def plain_exchange() -> AbstractContextManager[Any]:
    """gloo's own all-gather and reduce-scatter."""
    return patch("pangu.topology.mesh.exchanges", lambda device: False)


def plain_dropout() -> AbstractContextManager[Any]:
    """Masks of whole tensors at a time."""
    from pangu.layers import attention_blocks, dropout_masks

    stack = ExitStack()
    for owner in (attention_blocks, dropout_masks):
        stack.enter_context(patch.object(owner, "dropout", dropout_masks.drop))
    return stack


def explicit_blocks() -> AbstractContextManager[Any]:
    """Scores of context-parallel attention computed explicitly."""
    from pangu.layers import context_attention

    return patch.object(context_attention, "CpuBlocks", context_attention.ExplicitBlocks)


def wrapped_optimizer() -> AbstractContextManager[Any]:
    """torch's AdamW, which imports its compiler."""
    return patch.multiple(
        "pangu.optim.uncompiled.AdamW", add_param_group=torch.optim.AdamW.add_param_group, step=torch.optim.AdamW.step
    )


class Piece(NamedTuple):
    """A piece, the work it is measured on, and how to do without it."""

    name: str
    processes: int
    precision: str
    batch: int
    words: tuple[str, ...]
    without: Callable[[], AbstractContextManager[Any]] = nullcontext
    words_without: tuple[str, ...] = ()


PIECES = (
    Piece("exchange", 2, "bf16", 2, ("parallel.zero=3",), plain_exchange),
    Piece("exchange", 2, "fp32", 1, (HIGHEST, "parallel.tensor=2", "parallel.sequence=true"), plain_exchange),
    Piece("dropout in blocks", 1, "fp32", 1, (HIGHEST, *DROPS), plain_dropout),
    Piece("flash attention of context parallelism", 2, "fp32", 1, (HIGHEST, *CONTEXT), explicit_blocks),
    Piece("oneDNN", 1, "fp32", 1, ("precision.fp32_matmul=medium", "model.layers=4"), words_without=(HIGHEST,)),
    Piece("unwrapped AdamW", 1, "fp32", 1, (HIGHEST,), wrapped_optimizer),
)


def measured(piece: Piece, ways: tuple[bool, ...], repeats: int) -> tuple[dict[bool, list[tuple[float, float]]], float]:
    """Return wall and processor seconds of steps with and without a piece, and this process's peak in MiB."""
    torch.set_num_threads(1)
    steps, sizes = {}, ("batch.micro_size=1", f"batch.global_size={piece.batch}")
    for way in ways:
        with nullcontext() if way else piece.without():
            words = (*sizes, *piece.words, *(() if way else piece.words_without))
            trainer = pangu_trainer(piece.precision, 8192, *words)
        source = torch.Generator().manual_seed(trainer.mesh.at.data)
        batch = torch.randint(0, 8192, (1, trainer.config.model.sequence + 1), generator=source)
        steps[way] = partial(trainer.train_step, micro_batches(batch, 1))
    seconds: dict[bool, list[tuple[float, float]]] = {way: [] for way in ways}
    for repeat in range(1 + repeats):
        for way in Random(repeat).sample(ways, len(ways)):
            if dist.is_initialized():
                dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            with nullcontext() if way else piece.without():
                steps[way]()
            if repeat:
                seconds[way].append((time.perf_counter() - wall, time.process_time() - processor))
    return seconds, _peak_resident_mib()


def row_of(piece: Piece, repeats: int) -> dict[str, Any]:
    """Return the ratios and peaks of a piece."""
    timed = fresh(piece.processes, measured, piece, (True, False), repeats)[0][0]
    ratios = [[off / on for on, off in zip(*pair, strict=True)] for pair in zip(timed[True], timed[False], strict=True)]
    wall, processor = (statistics.median(column) for column in zip(*ratios, strict=True))
    peaks = [[round(one) for _, one in fresh(piece.processes, measured, piece, (way,), 1)] for way in (True, False)]
    return {
        **piece._asdict(),
        "without": piece.without.__name__,
        "wall_ratio": round(wall, 3),
        "processor_ratio": round(processor, 3),
        "repeats": repeats,
        "peak_mib": dict(zip(("with", "without"), peaks, strict=True)),
    }


def main() -> None:
    """Measure every piece, print the rows and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pieces", nargs="+", choices=sorted({piece.name for piece in PIECES}))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")  # peaks without freed blocks
    rows = []
    for piece in PIECES:
        if options.pieces is None or piece.name in options.pieces:
            rows.append(row_of(piece, options.repeats))
            print(json.dumps(rows[-1]), flush=True)
    if options.output is not None:
        options.output.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
