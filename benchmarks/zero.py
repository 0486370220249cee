"""One training step of a GPT on two replicas (gloo processes): ours at every ZeRO stage beside torch's DDP, its
ZeroRedundancyOptimizer and FSDP2, and DeepSpeed.

    python -m benchmarks.zero --output benchmarks/results/zero.json

`plain` is the loop of one process with as many threads as all processes have together, while the others wait. A step is
one micro-batch of every replica. DeepSpeed is measured if it can be imported (see benchmarks/README.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks import with_deepspeed
from benchmarks.models import PlainGPT, loop, plain_on_one
from benchmarks.side_by_side import Step, command_line, measure

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PROCESSES = 2
OURS = tuple(f"pangu_{stage}" for stage in range(4))
DEEPSPEED = tuple(f"deepspeed_{stage}" for stage in (1, 2, 3))
PEERS = ("plain", *OURS, "ddp", "zero_optimizer", "fsdp2", *DEEPSPEED)


def own_part(batch: Tensor) -> Tensor:
    """This replica's samples."""
    return batch.chunk(PROCESSES)[dist.get_rank()]


def replicated(make: Callable[[], Step]) -> Step:
    """A step on this replica's samples."""
    step = make()
    return lambda batch: step(own_part(batch))


def ddp(precision: str, vocab: int, micro: int, sharded: bool) -> Step:
    """DistributedDataParallel; `sharded`: AdamW's state is dealt to the replicas (ZeRO-1)."""
    model = DistributedDataParallel(PlainGPT(vocab))
    optimizer = None
    if sharded:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    return loop(model, model, precision, micro, optimizer=optimizer)


def fsdp2(precision: str, vocab: int, micro: int) -> Step:
    """`fully_sharded` on two processes."""
    from torch.distributed.device_mesh import init_device_mesh

    return fully_sharded(PlainGPT(vocab), precision, micro, init_device_mesh("cpu", (PROCESSES,)))


def fully_sharded(model: PlainGPT, precision: str, micro: int, mesh: DeviceMesh) -> Step:
    """`fully_shard` of every block and of the rest, bf16 by its own policy."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision == "bf16" else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return loop(model, model, "fp32", micro)


def make(peer: str, precision: str, vocab: int, micro: int) -> Step:
    """See `side_by_side.Make`."""
    torch.manual_seed(0)
    name, _, stage = peer.rpartition("_")
    if name == "pangu":
        from benchmarks.trainer import pangu_step

        batch = (f"batch.micro_size={micro}", f"batch.global_size={PROCESSES * micro}")
        return replicated(lambda: pangu_step(precision, vocab, micro, f"parallel.zero={stage}", *batch))
    if name == "deepspeed":
        return replicated(lambda: with_deepspeed.zero(precision, vocab, micro, int(stage)))
    if peer == "fsdp2":
        return replicated(lambda: fsdp2(precision, vocab, micro))
    if peer == "plain":
        return plain_on_one(precision, vocab, micro)
    return replicated(lambda: ddp(precision, vocab, micro, sharded=peer == "zero_optimizer"))


def main(arguments: argparse.Namespace) -> None:
    """Measure what can run."""
    arguments.peers = with_deepspeed.without_absent(arguments.peers)
    arguments.batch = PROCESSES * arguments.micro
    measure(make, PROCESSES, arguments)


if __name__ == "__main__":
    sys.modules["benchmarks.zero"] = sys.modules["__main__"]
    main(command_line(__doc__, PEERS, threads=1))
