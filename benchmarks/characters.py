"""A character-level GPT by nanoGPT's recipe for a CPU, ours and a plain one, on the same batches.

    python -m benchmarks.characters --output benchmarks/results/characters.json --picture docs/characters.svg

nanoGPT's recipe has 4 layers of 128 columns, 4 heads, 64 characters of context, batches of 12, 2,000 steps, no dropout
and no biases. The text is as long as its Shakespeare: the first 1,115,394 ASCII characters of the standard library's
sources, of which the last tenth is held out. The plain model draws its weights itself; all else is equal. Each run is a
process on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.experts_quality import train
from benchmarks.model_kinds import Curve, draw
from benchmarks.side_by_side import fresh, machine
from pangu.data.indexed import open_indexed
from pangu.data.stream import SampleStream
from pangu.metrics.progress import ProgressBar
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.prepare.stdlib import read_library

CHARACTERS = 1_115_394
LAYERS, HIDDEN, HEADS, SEQUENCE, BATCH, WARMUP = 4, 128, 4, 64, 12, 100
RATE, LEAST_RATE, BETAS, DECAY = 1e-3, 1e-4, (0.9, 0.99), 0.1


def write_text(folder: Path) -> int:
    """Write the two parts of the text as token files, one id for each character. Return the size of the vocabulary."""
    sources = read_library(Path(sysconfig.get_paths()["stdlib"]), ProgressBar(show=False))
    text = "\n".join(documents[0] for documents in sources.values()).encode("ascii", "ignore")[:CHARACTERS]
    letters, ids = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
    border = len(text) * 9 // 10
    for name, part in (("train", ids[:border]), ("held_out", ids[border:])):
        with IndexedWriter(folder / name, len(letters)) as writer:
            writer.add(part)
    return len(letters)


class Block(nn.Module):
    """Pre-norm block without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN, bias=False) for _ in range(2))
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN, bias=False), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1))  # [batch, sequence, 3, heads, columns]
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class CharacterGPT(nn.Module):
    """GPT-2 in nanoGPT's form: no biases, tied head, exact GELU."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(HIDDEN, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                closes_branch = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if closes_branch else 0.02)

    def forward(self, samples: Tensor) -> Tensor:
        """int64 [batch, sequence + 1] -> mean loss."""
        tokens, labels = samples[:, :-1], samples[:, 1:]
        x = self.norm(self.blocks(self.tokens(tokens) + self.positions.weight))
        return F.cross_entropy((x @ self.tokens.weight.T).flatten(0, 1), labels.flatten())


def rate(update: int, steps: int) -> float:
    """Learning rate of update `update`, from 0: a linear warm-up, then half a cosine."""
    if update < WARMUP:
        return RATE * (update + 1) / WARMUP
    done = (update - WARMUP) / (steps - WARMUP)
    return LEAST_RATE + (RATE - LEAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def batches(folder: Path, name: str, vocab: int, seed: int | None, count: int | None, size: int) -> Iterable[Tensor]:
    """Yield int64 [size, sequence + 1]: the samples that our run of that seed reads, or (None) all in their order."""
    stream = SampleStream([(open_indexed(folder / name), 1.0)], SEQUENCE, vocab, seed or 0, shuffle=seed is not None)
    for first in range(0, (count * size if count else stream.num_samples or 0), size):
        last = first + size if count else min(first + size, stream.num_samples or 0)
        yield torch.from_numpy(np.stack([stream[index] for index in range(first, last)]))


def train_plain(folder: Path, vocab: int, seed: int, steps: int, every: int) -> tuple[Curve, int]:
    """Train the plain model; return its held-out losses by step and its number of parameters."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = CharacterGPT(vocab)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": [p for p in model.parameters() if p.dim() < 2]}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    curve: Curve = []
    for update, samples in enumerate(batches(folder, "train", vocab, seed, steps, BATCH)):
        for group in optimizer.param_groups:
            group["lr"] = rate(update, steps)
        model(samples).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (update + 1) % every == 0:
            with torch.no_grad():
                found = [(float(model(part)), len(part)) for part in batches(folder, "held_out", vocab, None, None, 64)]
            curve.append((update + 1, sum(loss * n for loss, n in found) / sum(n for _, n in found)))
    return curve, sum(p.numel() for p in model.parameters())


def words(folder: Path, vocab: int, seed: int, steps: int, every: int) -> list[str]:
    """Return the overrides that make our trainer follow the recipe."""
    shape = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "sequence": SEQUENCE, "vocab": vocab}
    data = [f"data.train=[{folder / 'train'}]", f"data.validation=[{folder / 'held_out'}]", "data.packing.eod=null"]
    optimizer = {"lr": RATE, "betas": f"[{BETAS[0]},{BETAS[1]}]", "weight_decay": DECAY, "eps": 1e-8, "clip": 1.0}
    return [
        *(f"model.{key}={value}" for key, value in shape.items()),
        *("model.dropout=0", "model.attention_dropout=0", "model.biases=false", "model.activation=gelu"),
        *data,
        *(f"optimizer.{key}={value}" for key, value in optimizer.items()),
        *(f"lr_schedule.warmup_steps={WARMUP}", f"lr_schedule.min_lr={LEAST_RATE}", "precision=fp32"),
        *(f"batch.global_size={BATCH}", f"batch.micro_size={BATCH}", f"train.steps={steps}", f"train.seed={seed}"),
        *(f"validation.every={every}", "validation.sequences=1000000", "checkpoint.every=0", "metrics.wandb=off"),
    ]


def main() -> None:
    """Train, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=250, help="steps between two measurements on the held-out text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    cores = queue.Queue[int]()
    cores.put(max(os.sched_getaffinity(0)))
    curves: dict[str, list[Curve]] = {"pangu": [], "plain": []}
    parameters: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        vocab = write_text(folder)
        for seed in arguments.seeds:
            length = seed, arguments.steps, arguments.every
            records = train(cores, folder, f"seed_{seed}", "gpt2_124m", *words(folder, vocab, *length))
            curves["pangu"].append([(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r])
            ((curve, parameters["plain"]),) = fresh(1, train_plain, folder, vocab, *length)
            curves["plain"].append(curve)
        parameters["pangu"] = json.loads((folder / f"seed_{seed}/summary.json").read_text())["parameters"]
    rows: list[dict[str, Any]] = []
    for peer, runs in curves.items():
        losses = [curve[-1][1] for curve in runs]
        mean, spread = statistics.mean(losses), max(losses) - min(losses)
        rows.append({"peer": peer, "parameters": parameters[peer], "held_out_loss": mean, "spread": spread})
        print(json.dumps(rows[-1]))
    if arguments.output:
        result = {
            "command": " ".join(["python -m benchmarks.characters", *sys.argv[1:]]),
            "machine": machine(),
            "vocab": vocab,
            "tokens": arguments.steps * BATCH * SEQUENCE,
            "seeds": arguments.seeds,
            "rows": rows,
            "runs": curves,
        }
        arguments.output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    if arguments.picture:
        draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
