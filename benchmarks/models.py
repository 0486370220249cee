"""The plain GPT that everything is compared with, the loop around it, and our trainer on the same work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from benchmarks.side_by_side import SHAPE, Step
from pangu.config.build import build
from pangu.config.data import PackingConfig
from pangu.config.layout_checks import data_size
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, make_batch
from pangu.topology.launch import choose_memory_settings
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.autotune import choose
from pangu.training.step import Trainer


class PlainBlock(nn.Module):
    """A pre-norm block as a tutorial writes it. Heads are counted from the width, as tensor parallelism wants it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.head_size = hidden // heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        query, key, value = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_size)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        """What a block makes of tokens one by one."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits [batch, sequence, vocabulary] and int64 labels [batch, sequence] -> mean loss."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


class PlainGPT(nn.Module):
    """A GPT as a tutorial writes it, tied head included."""

    def __init__(self, vocab: int, shape: Mapping[str, int] = SHAPE) -> None:
        super().__init__()
        hidden = shape["hidden"]
        self.word = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(shape["sequence"], hidden)
        self.blocks = nn.ModuleList(PlainBlock(hidden, shape["heads"]) for _ in range(shape["layers"]))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.word.weight
        nn.init.normal_(self.word.weight, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """int64 [batch, sequence] both -> mean loss."""
        x = self.word(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device)[None])
        for block in self.blocks:
            x = block(x)
        return loss_of(self.head(self.norm(x)), labels)


def clip(groups: Sequence[Sequence[Tensor]]) -> None:
    """Clip the global norm of all groups of parameters to 1."""
    norms = [nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, 1.0, torch.stack(whole).norm())


def loop(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    precision: str,
    micro: int,
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
    optimizer: torch.optim.Optimizer | None = None,
) -> Step:
    """The usual loop: autocast for bf16, accumulation in the parameters' own gradients, clipping, fused AdamW.

    Args:
        model: whose parameters are trained.
        loss: tokens, labels [batch, sequence] -> mean loss.
        precision: `fp32` or `bf16`.
        micro: sequences in a micro-batch.
        around: a context that forward and backward need.
        optimizer: None: fused AdamW.
    """
    # torch's fused and foreach kernels cannot mix cut (DTensor) and whole parameters
    groups = [[p for p in model.parameters() if isinstance(p, DTensor) == cut] for cut in (False, True)]
    groups = [group for group in groups if group]
    optimizer = optimizer or torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, fused=True)

    def step(batch: Tensor) -> float:
        total = torch.zeros((), device=batch.device)
        parts = batch.split(micro)
        for part in parts:
            with around():
                with torch.autocast(batch.device.type, torch.bfloat16, enabled=precision == "bf16"):
                    value = loss(part[:, :-1], part[:, 1:]) / len(parts)
                value.backward()
            value = value.detach()
            total += value.full_tensor() if isinstance(value, DTensor) else value
        clip(groups)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total)

    return step


def plain_on_one(precision: str, vocab: int, micro: int) -> Step:
    """The plain loop on the first process of several, with the threads of all."""
    if dist.get_rank() != 0:
        return lambda batch: _nothing_until_the_barrier()
    model = PlainGPT(vocab)
    step, threads = loop(model, model, precision, micro), torch.get_num_threads()

    def with_all_threads(batch: Tensor) -> float:
        torch.set_num_threads(dist.get_world_size() * threads)
        loss = step(batch)
        torch.set_num_threads(threads)
        dist.barrier()
        return loss

    return with_all_threads


def _nothing_until_the_barrier() -> float:
    dist.barrier()
    return math.nan


def composed(*words: str) -> dict[str, Any]:
    """What pretrain.py would run from, given these overrides."""
    from pangu.training.command import compose

    return compose(Path(__file__).resolve().parent.parent / "configs", words)


def pangu_trainer(precision: str, vocab: int, *overrides: str) -> Trainer:
    """Our trainer, on all processes of the default group; `overrides` are configuration keys."""
    choose_memory_settings()
    shape = [f"model.{key}={value}" for key, value in SHAPE.items()]
    fixed = ["model=gpt2_124m", "data=synthetic", "model.dropout=0", "model.attention_dropout=0"]
    words = (*fixed, *shape, f"model.vocab={vocab}", f"precision={precision}", *overrides)
    # the others have no configuration to read: Hydra does it in a process of its own
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        config = build(RunConfig, pool.submit(composed, *words).result())
    device = torch.device("cpu")
    world = dist.get_world_size() if dist.is_initialized() else 1
    mesh = Mesh.connect(Layout.of(config.parallel, data_size(config, world)), device)
    return Trainer(config, mesh, choices=choose(config, mesh))


def micro_batches(batch: Tensor, micro: int) -> list[Batch]:
    """int64 [sequences, sequence + 1] in parts of `micro` sequences, as our trainer takes them."""
    packing = PackingConfig(None, None, False, False)
    return [make_batch(part.numpy(), range(len(part)), packing) for part in batch.split(micro)]


def pangu_step(precision: str, vocab: int, micro: int, *overrides: str) -> Step:
    """A step of our trainer, which is built at the first one, when the batch is known; arguments as for
    `pangu_trainer`."""
    trainer: Trainer | None = None
    products = ""

    def step(batch: Tensor) -> float:
        nonlocal trainer, products
        if trainer is None:
            sizes = (f"batch.micro_size={micro}", f"batch.global_size={len(batch)}")
            trainer = pangu_trainer(precision, vocab, *sizes, *overrides)
            assert trainer.choices is not None
            products = trainer.choices["products"]
        torch.set_float32_matmul_precision(products)
        loss = trainer.train_step(micro_batches(batch, micro)).loss
        torch.set_float32_matmul_precision("highest")  # what the others run with
        return loss

    return step
