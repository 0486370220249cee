"""Our trainer on the work of the plain loop. Imported by none of the other peers, whose memory it would count in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.side_by_side import SHAPE, Step
from pangu.config.build import build
from pangu.config.data import PackingConfig
from pangu.config.layout_checks import data_size
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, make_batch
from pangu.topology.launch import choose_settings
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.autotune import choose
from pangu.training.step import Trainer


def composed(*words: str) -> dict[str, Any]:
    """Return the configuration that pretrain.py would run from, given these overrides."""
    from pangu.training.command import compose

    return compose(Path(__file__).resolve().parent.parent / "configs", words)


def pangu_trainer(precision: str, vocab: int, *overrides: str) -> Trainer:
    """Our trainer, on all processes of the default group; `overrides` are configuration keys."""
    choose_settings()
    shape = [f"model.{key}={value}" for key, value in SHAPE.items()]
    fixed = ["model=gpt2_124m", "data=synthetic", "model.dropout=0", "model.attention_dropout=0"]
    words = (*fixed, *shape, f"model.vocab={vocab}", f"precision={precision}", *overrides)
    config = build(RunConfig, composed(*words))
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
            products = trainer.choices["fp32_matmul"]
        torch.set_float32_matmul_precision(products)
        loss = trainer.train_step(micro_batches(batch, micro)).loss
        torch.set_float32_matmul_precision("highest")  # what the others run with
        return loss

    return step
