"""One training step of a GPT whose layers two gloo processes share, ours beside torch.distributed.pipelining and
DeepSpeed (if it can be imported, see benchmarks/README.md).

    python -m benchmarks.pipeline --output benchmarks/results/pipeline.json

8 micro-batches; the same cut of the layers for all that have as many chunks. `plain` is the loop of one process with as
many threads as all processes have together, while the others wait.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import with_deepspeed
from benchmarks.models import PlainGPT, loss_of, plain_on_one
from benchmarks.side_by_side import Step, command_line, measure

PROCESSES = 2
MICRO_BATCHES = 8
ONCE, LOOPED, IN_A_V = (4, 2), (2, 1, 2, 1), (1, 2, 2, 1)
"""Layers of each chunk. The head takes as long as 1.3 layers, so each process has 3 or 4 layers' worth."""
TORCH = {
    "torch_gpipe": ("ScheduleGPipe", ONCE),
    "torch_1f1b": ("Schedule1F1B", ONCE),
    "torch_interleaved": ("ScheduleInterleaved1F1B", LOOPED),
    "torch_zero_bubble": ("ScheduleInterleavedZeroBubble", LOOPED),
    "torch_zb_v": ("ScheduleZBVZeroBubble", IN_A_V),
}
OURS = {
    "gpipe": ONCE,
    "1f1b": ONCE,
    "interleaved": LOOPED,
    "breadth_first": LOOPED,
    "zb_h1": ONCE,
    "zb_v": IN_A_V,
}
UNTIMED = "1f1b_highest"
"""1F1B that is told which products to take: kernels of a library that was only timed stay in the process."""
PEERS = ("plain", *TORCH, "deepspeed", *OURS, UNTIMED)


class Chunk(nn.Module):
    """Some neighbouring blocks of the plain model, with the embedding before the first and the head behind the last."""

    def __init__(self, model: PlainGPT, start: int, stop: int, precision: str) -> None:
        super().__init__()
        self.blocks = model.blocks[start:stop]
        self.word = model.word if start == 0 else None
        self.position = model.position if start == 0 else None
        self.norm, self.head = (model.norm, model.head) if stop == len(model.blocks) else (None, None)
        self.bf16 = precision == "bf16"

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [batch, sequence] or hidden states [batch, sequence, hidden] -> hidden states or logits."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            if self.word is not None and self.position is not None:
                x = self.word(x) + self.position(torch.arange(x.shape[1])[None])
            for block in self.blocks:
                x = block(x)
            return x if self.head is None or self.norm is None else self.head(self.norm(x))


def torch_pipeline(schedule_name: str, layers: tuple[int, ...], precision: str, vocab: int) -> Step:
    """The plain model on torch's stages and schedule; the rest of the loop is that of `loop`, over two processes."""
    from torch.distributed import pipelining

    rank, model = dist.get_rank(), PlainGPT(vocab)
    ends = [sum(layers[:chunk]) for chunk in range(len(layers) + 1)]
    mine = ((0, 3), (1, 2))[rank] if layers is IN_A_V else tuple(range(rank, len(layers), PROCESSES))
    chunks = [Chunk(model, ends[chunk], ends[chunk + 1], precision) for chunk in mine]
    stages = [
        pipelining.PipelineStage(chunk, number, len(layers), torch.device("cpu"))
        for number, chunk in zip(mine, chunks, strict=True)
    ]
    kind = getattr(pipelining, schedule_name)
    schedule = kind(stages if len(layers) > PROCESSES else stages[0], MICRO_BATCHES, loss_fn=loss_of)
    first, last = 0 in mine, len(layers) - 1 in mine
    table = model.word.weight
    parameters = list(dict.fromkeys(parameter for chunk in chunks for parameter in chunk.parameters()))
    # both processes hold the tied table of a looped pipeline, and its norm counts once
    once = [parameter for parameter in parameters if parameter is not table or first]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step(batch: Tensor) -> float:
        losses: list[Tensor] = []
        inputs = (batch[:, :-1],) if first else ()
        schedule.step(*inputs, target=batch[:, 1:] if last else None, losses=losses, return_outputs=False)
        if first != last:
            dist.all_reduce(table.grad)
        squares = nn.utils.get_total_norm([p.grad for p in once if p.grad is not None]) ** 2
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(parameters, 1.0, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = torch.stack(losses).mean().detach() if last else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss)

    return step


def make(peer: str, precision: str, vocab: int, micro: int) -> Step:
    """The step function of a peer."""
    torch.manual_seed(0)
    if peer == "plain":
        return plain_on_one(precision, vocab, micro)
    if peer in TORCH:
        return torch_pipeline(*TORCH[peer], precision, vocab)
    if peer == "deepspeed":
        return with_deepspeed.pipeline(precision, vocab, micro, MICRO_BATCHES, ONCE)
    from benchmarks.trainer import pangu_step

    more = ("precision.fp32_matmul=highest",) if peer == UNTIMED else ()
    schedule = peer.removesuffix("_highest")
    layers = OURS[schedule]
    return pangu_step(
        precision,
        vocab,
        micro,
        f"parallel.pipeline={PROCESSES}",
        f"parallel.virtual_stages={len(layers) // PROCESSES}",
        f"parallel.schedule={schedule}",
        f"parallel.layers={list(layers)}",
        f"batch.micro_size={micro}",
        f"batch.global_size={MICRO_BATCHES * micro}",
        *more,
    )


if __name__ == "__main__":
    arguments = command_line(__doc__, PEERS, threads=1, vocab=(8192,), micro=1)
    arguments.peers = with_deepspeed.without_absent(arguments.peers)
    measure(make, PROCESSES, arguments)
