"""A step that waits for nothing, on an accelerator. Run by scripts/gpu_suite.sh."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu_suite.setting import preset
from pangu.collectives.reduce import start_reduce_scatter
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.topology.copy_stream import CopyStream
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import AxisGroup
from pangu.training.step import Trainer
from pangu.zero.gradients import start_sum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize(("ahead", "compiled"), [(False, False), (True, False), (True, True)])
def test_a_step_makes_no_host_sync(ahead: bool, compiled: bool) -> None:
    """Steps whose synchronizations are errors, with batches that are copied in the step or by the loader before it;
    both read the result of the step before, and give the losses of steps that are waited for."""
    device = choose_device("cuda", Launch())
    config = build(RunConfig, preset("tiny", {"compile": compiled}))
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


def test_a_sum_over_copies_waits_for_its_reduction_beside_the_computation() -> None:
    """Of a reduction that is late, on one device: what is computed meanwhile is done before it."""
    device = choose_device("cuda", Launch())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        whole, part = torch.ones(2**20, device=device), torch.zeros(2**20, device=device)
        dist.all_reduce(part)
        shard, copies = (AxisGroup(dist.group.WORLD, axis) for axis in ("shard", "copies"))
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(2**31)
            scattered = start_reduce_scatter(part, whole, shard)
        summed = start_sum(part, scattered, copies, CopyStream(device))
        torch.cuda.current_stream().record_event().synchronize()
        assert isinstance(summed, dist.Work)
        assert not summed.is_completed()
        summed.wait()
        assert bool((part == 1).all())
    finally:
        dist.destroy_process_group()
