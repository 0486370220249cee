"""A step that waits for nothing, on an accelerator. Run by scripts/gpu_suite.sh."""

from __future__ import annotations

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
from pangu.training.step import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_makes_no_host_sync(ahead: bool) -> None:
    """Steps whose synchronizations are errors, with batches that are copied in the step or by the loader before it;
    both read the result of the step before, and give the losses of steps that are waited for."""
    device = choose_device("cuda", Launch())
    config = build(RunConfig, preset("tiny"))
    size, micro = config.batch.global_size, config.batch.micro_size
    losses: dict[bool, list[float]] = {}
    for waits in (True, False):
        trainer = Trainer(config, Mesh(Layout(), 0, device))
        stream = open_sources(config.data, config.model, config.train.seed).train
        pending, losses[waits] = None, []
        with Loader(stream, config.data.packing, size, micro, 0, 1, device if ahead else None) as loader:
            for step in range(5):
                batches = loader.micro_batches(size * step)
                torch.cuda.set_sync_debug_mode("default" if waits or step == 0 else "error")
                try:
                    trainer.forward_backward(batches)
                    if pending is not None:
                        losses[waits].append(trainer.read(pending).loss)
                    pending = trainer.update()
                    if waits:
                        torch.cuda.synchronize()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
    assert losses[True] == pytest.approx(losses[False], rel=1e-5)  # atomic additions come in any order
    assert len(losses[True]) == 4
