"""A recorded step on an accelerator: times of device events. Run by scripts/gpu_suite.sh."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu_suite.setting import preset
from pangu.collectives.reduce import start_all_reduce
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import ActiveRecording, AxisGroup, Recorder
from pangu.training.profile import Profile
from pangu.training.step import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def test_a_recorded_step_makes_no_host_sync_and_its_parts_add_up() -> None:
    device = choose_device("cuda", Launch())
    config = build(RunConfig, preset("tiny"))
    size, micro = config.batch.global_size, config.batch.micro_size
    trainer = Trainer(config, Mesh(Layout(), 0, device))
    stream = open_sources(config.data, config.model, config.train.seed).train
    with Loader(stream, config.data.packing, size, micro, 0, 1, device) as loader:
        trainer.train_step(loader.micro_batches(0))
        batches = loader.micro_batches(size)
        torch.cuda.synchronize()
        began = time.perf_counter()
        Profile.begin(trainer.mesh)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with trainer.mesh.recorder.span("update"):
                trainer.forward_backward(batches)
                pending = trainer.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        recording = trainer.mesh.recorder.stop()
    whole = recording.spans[0].stop
    parts = Profile.of(trainer, recording).ranks[0].parts
    assert trainer.read(pending).loss > 0
    assert 0 < whole < time.perf_counter() - began
    assert sum(parts.values()) == pytest.approx(whole, rel=1e-6)
    assert parts["compute"] > 0
    assert parts["update"] > 0


def test_the_end_of_a_collective_is_known_without_waiting_for_it() -> None:
    device = choose_device("cuda", Launch())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        values, matrix = torch.ones(2**24, device=device), torch.randn(4096, 4096, device=device)
        dist.all_reduce(values)
        recorder = Recorder(ActiveRecording("logging", device), watches=True)
        work = start_all_reduce(values, AxisGroup(dist.group.WORLD, "data", recorder))
        for _ in range(20):
            matrix @ matrix
        work.wait()
        recording = recorder.stop()
    finally:
        dist.destroy_process_group()
    ((came, ended),) = recording.messages["data"]
    whole, waited = recording.spans
    assert 0 <= came <= ended < waited.start <= waited.stop <= whole.stop
