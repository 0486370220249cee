"""The plain GPT that everything is compared with, and the loop around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.side_by_side import SHAPE, Step


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
        """Return the output of the feed-forward layer."""
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


def is_cut(x: Tensor) -> bool:
    """Return whether `x` is a DTensor, without importing the class, which only some peers use."""
    return hasattr(x, "full_tensor")


def whole(x: Tensor) -> Tensor:
    """A tensor, or what a DTensor is a part of."""
    return x.full_tensor() if is_cut(x) else x  # type: ignore[attr-defined]


def clip(groups: Sequence[Sequence[Tensor]]) -> None:
    """Clip the global norm of all groups of parameters to 1."""
    norms = [whole(nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])) for group in groups]
    for group in groups:
        nn.utils.clip_grads_with_norm_(group, 1.0, torch.stack(norms).norm())


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
    groups = [[p for p in model.parameters() if is_cut(p) == cut] for cut in (False, True)]
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
            total += whole(value.detach())
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
