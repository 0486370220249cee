"""One training step of a GPT, ours beside others, on this machine: same shapes, same work, interleaved repeats.

    python benchmarks/train_step.py --precision fp32 bf16 --vocab 8192 40000 --output benchmarks/results/train_step.json

Each row is the median of its repeats as a ratio to the plain eager loop (above 1: faster than it), with the spread
(smallest and largest ratio of a repeat to the plain one next to it) and the peak resident set of a process of its own.
Machines are noisy, so absolute times are kept for reference only.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.config.build import build
from pangu.config.data import PackingConfig
from pangu.config.schema import RunConfig
from pangu.data.batch import make_batch

SHAPE = {"layers": 6, "hidden": 512, "heads": 8, "sequence": 512}
PEERS = ("plain", "pangu", "pangu_chunked", "transformers", "compiled")
Step = Callable[[Tensor], float]


class PlainBlock(nn.Module):
    """A pre-norm block as a tutorial writes it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """A GPT as a tutorial writes it, tied head included."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocab, SHAPE["hidden"])
        self.position = nn.Embedding(SHAPE["sequence"], SHAPE["hidden"])
        self.blocks = nn.ModuleList(PlainBlock(SHAPE["hidden"], SHAPE["heads"]) for _ in range(SHAPE["layers"]))
        self.norm = nn.LayerNorm(SHAPE["hidden"])
        nn.init.normal_(self.word.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.word(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.word.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def loop(model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], precision: str, micro: int) -> Step:
    """The usual loop: autocast for bf16, accumulation in the parameters' own gradients, clipping, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(samples: Tensor) -> float:
        total = 0.0
        batches = samples.split(micro)
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                value = loss(batch[:, :-1], batch[:, 1:]) / len(batches)
            value.backward()
            total += float(value.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def plain(precision: str, vocab: int, micro: int, compiled: bool = False) -> Step:
    """The plain loop, eager or compiled."""
    model = PlainGPT(vocab)
    return loop(model, torch.compile(model) if compiled else model, precision, micro)


def transformers_gpt2(precision: str, vocab: int, micro: int) -> Step:
    """GPT-2 of the transformers library in the same loop."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab,
        n_positions=SHAPE["sequence"],
        n_embd=SHAPE["hidden"],
        n_layer=SHAPE["layers"],
        n_head=SHAPE["heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    return loop(model, loss, precision, micro)


def pangu_step(precision: str, vocab: int, micro: int, chunk: int | None = None) -> Step:
    """Our trainer, on one process."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from pangu.layers.kernels import choose_attention
    from pangu.models.language_model import Options, build_model
    from pangu.topology.layout import Layout
    from pangu.topology.mesh import Mesh
    from pangu.training.step import Trainer

    folder = str(Path(__file__).resolve().parent.parent / "configs")
    with initialize_config_dir(folder, version_base="1.3"):
        overrides = [f"model.{key}={value}" for key, value in SHAPE.items()]
        fixed = ["model=gpt2_124m", "data=synthetic", "model.dropout=0", "model.attention_dropout=0"]
        composed = compose("base", overrides=[*fixed, *overrides, f"model.vocab={vocab}", f"precision={precision}"])
    config = build(RunConfig, OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]
    kernel = choose_attention(config.model, precision, torch.device("cpu"))
    model, table = build_model(config.model, Options(kernel, loss_chunk=chunk))
    trainer = Trainer(config, Mesh(Layout(), 0, torch.device("cpu")), model, table)
    packing = PackingConfig(None, None, False, False)

    def step(samples: Tensor) -> float:
        batches = [make_batch(part.numpy(), range(len(part)), packing) for part in samples.split(micro)]
        return trainer.train_step(batches).loss

    return step


def make(peer: str, precision: str, vocab: int, micro: int) -> Step:
    """The step function of a peer."""
    torch.manual_seed(0)
    match peer:
        case "plain" | "compiled":
            return plain(precision, vocab, micro, compiled=peer == "compiled")
        case "transformers":
            return transformers_gpt2(precision, vocab, micro)
        case _:
            return pangu_step(precision, vocab, micro, chunk=512 if peer == "pangu_chunked" else None)


def samples(vocab: int, batch: int) -> Tensor:
    """int64 [batch, sequence + 1], the same for all."""
    return torch.randint(0, vocab, (batch, SHAPE["sequence"] + 1), generator=torch.Generator().manual_seed(0))


def peak_resident_mib() -> float:
    """Largest resident set of this process. Not by getrusage, whose figure outlives exec and is then the parent's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def peak_memory(peer: str, precision: str, vocab: int, arguments: argparse.Namespace) -> float:
    """Peak resident set (MiB) of a fresh process that makes three steps."""
    words = [__file__, "--only", peer, "--precision", precision, "--vocab", str(vocab)]
    words += ["--batch", str(arguments.batch), "--micro", str(arguments.micro), "--threads", str(arguments.threads)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def compare(precision: str, vocab: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each peer, repeats interleaved."""
    data = samples(vocab, arguments.batch)
    steps = {peer: make(peer, precision, vocab, arguments.micro) for peer in arguments.peers}
    seconds: dict[str, list[float]] = {peer: [] for peer in steps}
    for repeat in range(arguments.warm_up + arguments.repeats):
        for peer, step in steps.items():
            began = time.perf_counter()
            step(data)
            if repeat >= arguments.warm_up:
                seconds[peer].append(time.perf_counter() - began)
    rows = []
    for peer, times in seconds.items():
        ratios = [base / own for base, own in zip(seconds["plain"], times, strict=True)]
        row = {
            "precision": precision,
            "vocab": vocab,
            "peer": peer,
            "speed_ratio": round(statistics.median(ratios), 3),
            "smallest": round(min(ratios), 3),
            "largest": round(max(ratios), 3),
            "median_seconds": round(statistics.median(times), 4),
            "peak_mib": round(peak_memory(peer, precision, vocab, arguments)),
        }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def main() -> None:
    """Read the command line, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--vocab", nargs="+", type=int, default=[8192, 40000])
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--micro", type=int, default=4, help="sequences in a micro-batch")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=PEERS, help="make three steps of one peer and print its peak memory")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.only:
        step = make(arguments.only, arguments.precision[0], arguments.vocab[0], arguments.micro)
        for _ in range(3):
            step(samples(arguments.vocab[0], arguments.batch))
        print(peak_resident_mib())
        return
    rows = [row for p in arguments.precision for v in arguments.vocab for row in compare(p, v, arguments)]
    if arguments.output:
        configuration = {key: str(value) for key, value in vars(arguments).items()}
        machine = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        result = {"shape": SHAPE, "configuration": configuration, "machine": machine, "rows": rows}
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
