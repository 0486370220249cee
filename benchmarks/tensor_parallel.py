"""One training step of a GPT whose matrices two gloo processes share, ours beside torch's DTensor and megatron-core.

    python -m benchmarks.tensor_parallel --output benchmarks/results/tensor_parallel.json

`plain` is the loop of one process with as many threads as all processes have together, while the others wait.
megatron-core is measured if it can be imported (`pip install --no-deps --target DIR megatron-core==0.16.1`, DIR on
PYTHONPATH); its layers run on a CPU once `torch.cuda.current_device`, where they allocate, names the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import PlainGPT, loop, plain_on_one
from benchmarks.side_by_side import SHAPE, Step, command_line, measure

PROCESSES = 2
PEERS = ("plain", "pangu", "pangu_sp", "dtensor", "dtensor_sp", "megatron", "megatron_sp")


def dtensor(precision: str, vocab: int, micro: int, sequence: bool) -> Step:
    """The plain model cut by `parallelize_module`, with the vocabulary-parallel loss of `loss_parallel`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    between = Shard(1) if sequence else Replicate()
    model = PlainGPT(vocab)
    column, row = ColwiseParallel(input_layouts=between), RowwiseParallel(output_layouts=between)
    table = RowwiseParallel(input_layouts=Replicate(), output_layouts=between)
    head = ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False)
    plan: dict[str, Any] = {"word": table, "position": table, "head": head}
    plan |= {f"blocks.*.{name}": column for name in ("qkv", "up")}
    plan |= {f"blocks.*.{name}": row for name in ("out", "down")}
    if sequence:
        plan |= {name: SequenceParallel() for name in ("blocks.*.norm1", "blocks.*.norm2", "norm")}
    parallelize_module(model, init_device_mesh("cpu", (PROCESSES,)), plan)
    model.head.weight = model.word.weight
    return loop(model, model, precision, micro, loss_parallel)


class MegatronBlock(nn.Module):
    """The plain block on megatron-core's layers. Hidden states are [sequence (/ ranks), batch, hidden]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        hidden = config.hidden_size
        self.head_size = hidden // config.num_attention_heads
        common: dict[str, Any] = {"config": config, "init_method": config.init_method, "bias": True}
        rows: dict[str, Any] = {"input_is_parallel": True, "skip_bias_add": False, **common}
        self.norm1, self.norm2 = (nn.LayerNorm(hidden, dtype=config.params_dtype) for _ in range(2))
        self.qkv = ColumnParallelLinear(hidden, 3 * hidden, gather_output=False, **common)
        self.out = RowParallelLinear(hidden, hidden, **rows)
        self.up = ColumnParallelLinear(hidden, 4 * hidden, gather_output=False, **common)
        self.down = RowParallelLinear(4 * hidden, hidden, **rows)

    def forward(self, x: Tensor) -> Tensor:
        """[sequence (/ ranks), batch, hidden] -> the same."""
        query, key, value = self.qkv(self.norm1(x))[0].unflatten(-1, (-1, 3, self.head_size)).permute(3, 1, 2, 0, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.permute(2, 0, 1, 3).flatten(2))[0]
        return x + self.down(F.gelu(self.up(self.norm2(x))[0], approximate="tanh"))[0]


class MegatronGPT(nn.Module):
    """The plain model on megatron-core's layers."""

    def __init__(self, vocab: int, config: Any, length: int) -> None:
        super().__init__()
        from megatron.core.tensor_parallel import VocabParallelEmbedding

        hidden, dtype = config.hidden_size, config.params_dtype
        self.config = config
        self.word = VocabParallelEmbedding(
            vocab,
            hidden,
            init_method=config.init_method,
            config=config,
            reduce_scatter_embeddings=config.sequence_parallel,
        )
        self.position = nn.Embedding(length, hidden, dtype=dtype)
        self.blocks = nn.ModuleList(MegatronBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(hidden, dtype=dtype)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """int64 [batch, sequence] both -> mean loss."""
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
        from megatron.core.tensor_parallel.layers import linear_with_grad_accumulation_and_async_allreduce

        words, places = self.word(tokens), torch.arange(tokens.shape[1], device=tokens.device)
        if self.config.sequence_parallel:  # the embedding has turned [batch, sequence] already
            x = words + self.position(places.chunk(PROCESSES)[dist.get_rank()])[:, None]
        else:
            x = words.transpose(0, 1).contiguous() + self.position(places)[:, None]
        for block in self.blocks:
            x = block(x)
        logits = linear_with_grad_accumulation_and_async_allreduce(
            self.norm(x),
            self.word.weight,
            None,
            False,
            not self.config.sequence_parallel,
            self.config.sequence_parallel,
        )
        return vocab_parallel_cross_entropy(logits.float(), labels.t().contiguous()).mean()


def megatron_config(
    precision: str, ranks: int, sequence: bool, shape: Mapping[str, int] = SHAPE, **further: Any
) -> Any:
    """megatron-core's configuration of a model that so many ranks share; `further` fields of it."""
    from megatron.core import parallel_state
    from megatron.core.transformer import TransformerConfig

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(ranks, create_gloo_process_groups=False)
    return TransformerConfig(
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        num_attention_heads=shape["heads"],
        tensor_model_parallel_size=ranks,
        sequence_parallel=sequence,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16 if precision == "bf16" else torch.float32,
        **further,
    )


def megatron(precision: str, vocab: int, micro: int, sequence: bool) -> Step:
    """megatron-core's layers and loss; in bf16 as its trainer does it: bf16 weights, fp32 masters and gradient sums."""
    torch.cuda.current_device = lambda: "cpu"
    model = MegatronGPT(vocab, megatron_config(precision, PROCESSES, sequence), SHAPE["sequence"])
    weights = list(model.parameters())
    masters = [nn.Parameter(weight.detach().float().clone()) for weight in weights]
    cut = [getattr(weight, "tensor_model_parallel", False) for weight in weights]
    # every rank has the gradient of its own part of the sequence only
    partial = [i for i, weight in enumerate(weights) if sequence and getattr(weight, "sequence_parallel", not cut[i])]
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    for weight, master in zip(weights, masters, strict=True):
        master.grad = torch.zeros_like(master)
        weight.register_post_accumulate_grad_hook(_adder(master.grad))

    def step(batch: Tensor) -> float:
        total = 0.0
        parts = batch.split(micro)
        gradients = [master.grad for master in masters if master.grad is not None]
        torch._foreach_zero_(gradients)
        for part in parts:
            loss = model(part[:, :-1], part[:, 1:]) / len(parts)
            loss.backward()
            total += float(loss.detach())
        if partial:
            joined = torch.cat([gradients[i].flatten() for i in partial])
            dist.all_reduce(joined)
            split = joined.split([gradients[i].numel() for i in partial])
            for i, summed in zip(partial, split, strict=True):
                gradients[i].copy_(summed.view_as(gradients[i]))
        squares = torch.stack(torch._foreach_norm(gradients)).square()
        shared = squares[torch.tensor(cut)].sum()
        dist.all_reduce(shared)
        nn.utils.clip_grads_with_norm_(masters, 1.0, (shared + squares[~torch.tensor(cut)].sum()).sqrt())
        optimizer.step()
        torch._foreach_copy_([weight.detach() for weight in weights], [master.detach() for master in masters])
        return total

    return step


def _adder(total: Tensor) -> Any:
    def add(weight: Tensor) -> None:
        assert weight.grad is not None
        total.add_(weight.grad)
        weight.grad = None

    return add


def make(peer: str, precision: str, vocab: int, micro: int) -> Step:
    """The step function of a peer."""
    torch.manual_seed(0)
    sequence = peer.endswith("_sp")
    match peer.removesuffix("_sp"):
        case "plain":
            return plain_on_one(precision, vocab, micro)
        case "dtensor":
            return dtensor(precision, vocab, micro, sequence)
        case "megatron":
            return megatron(precision, vocab, micro, sequence)
        case _:
            from benchmarks.trainer import pangu_step

            overrides = (f"parallel.tensor={PROCESSES}", f"parallel.sequence={str(sequence).lower()}")
            return pangu_step(precision, vocab, micro, *overrides)


if __name__ == "__main__":
    measure(make, PROCESSES, command_line(__doc__, PEERS, threads=1))
