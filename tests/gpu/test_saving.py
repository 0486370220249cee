"""Saves whose copies run beside the next update. Run by scripts/gpu_suite.sh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_suite.setting import preset
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.determinism import deterministic
from pangu.training.saving import Saver
from pangu.training.step import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
LARGE = {"model.hidden": 1024, "model.layers": 4, "model.heads": 16, "model.vocab": 8192, "checkpoint.every": 1}
"""About 700 MB of state, whose copies take longer than a step of a few tokens."""


def checksums(folder: Path, asynchronous: bool) -> list[Any]:
    """Of the checkpoints of two steps, each followed at once by another update."""
    changes = LARGE | {"checkpoint.asynchronous": asynchronous, "train.output": str(folder), "checkpoint.keep": 0}
    config = build(RunConfig, preset("tiny", changes))
    trainer = Trainer(config, Mesh(Layout(), 0, choose_device("cuda", Launch())))
    stream, size = open_sources(config.data, config.model, config.train.seed).train, config.batch.global_size
    with Saver(config, trainer) as saver, Loader(stream, config.data.packing, size, 2, 0, 1) as loader:
        for step in range(2):
            trainer.train_step(loader.micro_batches(size * step))
            saver.save(size * (step + 1), {})
            trainer.read(trainer.update())
        saver.finish()
    return [json.loads(path.read_text())["files"] for path in sorted(folder.glob("checkpoints/*/index.json"))]


def test_a_save_has_the_state_of_its_step(tmp_path: Path) -> None:
    """Bit for bit that of a save that training waits for."""
    with deterministic():
        beside, waited = (checksums(tmp_path / str(mode), mode) for mode in (True, False))
    assert len(beside) == 2
    assert beside == waited
