"""One training step of a GPT whose sequences two gloo processes share, ours beside torch's ring attention.

    python -m benchmarks.context --output benchmarks/results/context.json

`plain` is the loop of one process with as many threads as all processes have together, while the others wait. torch's
own context-parallel API (`torch.distributed.tensor.experimental.context_parallel`) knows no kernel of a CPU; its ring,
which takes any kernel, is given the one for CPUs here, on the same halves of the sequence (zig-zag) as ours.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.parallel import DistributedDataParallel

from benchmarks.models import PlainGPT, loop, loss_of, plain_on_one
from benchmarks.side_by_side import Step, command_line, measure

PROCESSES = 2
PEERS = ("plain", "pangu_gather", "pangu_ring", "pangu_ulysses", "torch_ring")


def _torch_context() -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


def _forward(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, value, 0.0, is_causal)


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return kernel(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)


class RingAttention(Function):
    """torch's ring with torch's kernel for CPUs. Parts are [batch, heads, sequence / ranks, head size]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out, log_sum = _torch_context()._templated_ring_attention(
            dist.group.WORLD, 2, _forward, query, key, value, is_causal=True
        )
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return _torch_context()._templated_ring_attention_backward(
            dist.group.WORLD, 2, _backward, grads[0].contiguous(), "grad_out", *ctx.saved_tensors, is_causal=True
        )


class RingGPT(nn.Module):
    """The plain model on this rank's first and last chunk of each sequence."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.model = PlainGPT(vocab)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """int64 [batch, sequence] both -> mean loss of this rank's half."""
        rank, size = dist.get_rank(), dist.get_world_size()
        chunks = torch.arange(tokens.shape[1]).chunk(2 * size)
        places = torch.cat([chunks[rank], chunks[2 * size - 1 - rank]])
        x = self.model.word(tokens[:, places]) + self.model.position(places)
        for block in self.model.blocks:
            parts = block.qkv(block.norm1(x)).unflatten(-1, (-1, 3, block.head_size)).permute(3, 0, 2, 1, 4)
            x = x + block.out(RingAttention.apply(*parts).transpose(1, 2).flatten(2))
            x = x + block.feed_forward(block.norm2(x))
        return loss_of(self.model.head(self.model.norm(x)), labels[:, places])


def make(peer: str, precision: str, vocab: int, micro: int) -> Step:
    """The step function of a peer."""
    torch.manual_seed(0)
    if peer == "plain":
        return plain_on_one(precision, vocab, micro)
    if peer == "torch_ring":
        model = RingGPT(vocab)
        return loop(model, DistributedDataParallel(model), precision, micro)
    from benchmarks.trainer import pangu_step

    kind = peer.removeprefix("pangu_")
    return pangu_step(precision, vocab, micro, f"parallel.context={PROCESSES}", f"parallel.context_kind={kind}")


if __name__ == "__main__":
    arguments = command_line(__doc__, PEERS, threads=1, vocab=(8192,), micro=1, batch=1, sequence=4096)
    measure(make, PROCESSES, arguments)
