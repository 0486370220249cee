"""DeepSpeed as a peer: ZeRO and pipeline, on the plain model. README.md says how to install it."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import PlainGPT, loss_of
from benchmarks.side_by_side import Step


def without_absent(peers: Sequence[str]) -> list[str]:
    """The peers, less DeepSpeed's (by their names) where it cannot be imported."""
    if importlib.util.find_spec("deepspeed") is not None:
        return list(peers)
    print("deepspeed is not installed: its rows are left out", file=sys.stderr)
    return [peer for peer in peers if not peer.startswith("deepspeed")]


def _library() -> Any:
    """DeepSpeed, told of the process group that there is."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)
    return deepspeed


def _engine(model: nn.Module, precision: str, micro: int, accumulation: int, stage: int) -> Any:
    """DeepSpeed's engine with torch's AdamW."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
        "steps_per_print": 10**9,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return _library().initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]


def zero(precision: str, vocab: int, micro: int, stage: int) -> Step:
    """ZeRO of one stage. One micro-batch a step."""
    engine = _engine(PlainGPT(vocab), precision, micro, 1, stage)

    def step(batch: Tensor) -> float:
        value = engine(batch[:, :-1], batch[:, 1:])
        engine.backward(value)
        engine.step()
        return float(value.detach())

    return step


class _First(nn.Module):
    """Adds positions, then blocks."""

    def __init__(self, position: nn.Embedding, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.position, self.blocks = position, blocks

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        x = x + self.position(torch.arange(x.shape[1])[None])
        for block in self.blocks:
            x = block(x)
        return x


def pipeline(precision: str, vocab: int, micro: int, micro_batches: int, layers: tuple[int, int]) -> Step:
    """DeepSpeed's 1F1B on two processes; `layers` are those of each."""
    _library()
    from deepspeed.pipe import PipelineModule, TiedLayerSpec

    plain = PlainGPT(vocab)

    class Table(nn.Embedding):
        """Created again by DeepSpeed on each process that uses it."""

        def __init__(self) -> None:
            super().__init__(*plain.word.weight.shape, _weight=plain.word.weight.detach().clone())

    def project(module: nn.Embedding, x: Tensor) -> Tensor:
        return F.linear(x, module.weight)

    first, second = plain.blocks[: layers[0]], plain.blocks[layers[0] :]
    specifications = [
        TiedLayerSpec("table", Table),
        _First(plain.position, first),
        nn.Sequential(*second, plain.norm),
        TiedLayerSpec("table", Table, forward_fn=project),
    ]
    model = PipelineModule(specifications, num_stages=2, loss_fn=loss_of, partition_method="uniform")
    engine = _engine(model, precision, micro, micro_batches, 0)

    def step(batch: Tensor) -> float:
        def parts() -> Iterator[tuple[Tensor, Tensor]]:
            for part in batch.split(micro):
                yield part[:, :-1].contiguous(), part[:, 1:].contiguous()

        return float(engine.train_batch(data_iter=parts()))

    return step
