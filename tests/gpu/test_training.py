"""What the CPU tests show, on an accelerator. Run by scripts/gpu_suite.sh."""

from __future__ import annotations

import pytest
import torch

from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.dryrun.run import dry_run, micro_batches
from pangu.metrics.devices import peak_memory_gib
from pangu.planning.layouts import choose_layout
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from tests.configs import composed, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]
QUIET = ("model.dropout=0", "model.attention_dropout=0", "lr_schedule.warmup_steps=0", "optimizer.lr=0.01")


def losses(device: torch.device, *overrides: str, steps: int = 5) -> list[float]:
    """Losses of a few steps on one device."""
    config = tiny(*QUIET, *overrides)
    trainer = Trainer(config, Mesh(Layout(), 0, device))
    stream = open_sources(config.data, config.model, config.train.seed).train
    size = config.batch.global_size
    with Loader(stream, config.data.packing, size, config.batch.micro_size, 0, 1) as loader:
        return [trainer.train_step(loader.micro_batches(size * step)).loss for step in range(steps)]


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("offload", ["[]", "[activations]"])
def test_fp32_equals_the_cpu(optimizer: str, recompute: str, offload: str) -> None:
    """1e-4 after 5 updates: other kernels, the same sums in another order."""
    overrides = (f"optimizer={optimizer}", f"memory.recompute={recompute}", f"memory.offload={offload}")
    device = choose_device("auto", Launch())
    assert losses(device, *overrides) == pytest.approx(losses(torch.device("cpu"), *overrides), abs=1e-4)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.1), ("fp16", 0.02)])
def test_16_bit_formats_stay_near_fp32(precision: str, tolerance: float) -> None:
    device = choose_device("auto", Launch())
    assert losses(device, f"precision={precision}") == pytest.approx(losses(device), abs=tolerance)


KERNELS = [
    *(("flex", "fp32", positions, 1e-4) for positions in ("learned", "alibi", "relative")),
    *(("flash_attn", "bf16", positions, 0.1) for positions in ("learned", "alibi")),
]


@pytest.mark.parametrize(("kernel", "precision", "positions", "tolerance"), KERNELS)
@pytest.mark.parametrize("mask", ["data.packing.reset_mask=false", "data.packing.reset_mask=true", "model.window=5"])
def test_kernels_equal_reference(kernel: str, precision: str, positions: str, tolerance: float, mask: str) -> None:
    """Tolerances as above."""
    if kernel == "flash_attn":
        pytest.importorskip("flash_attn")
    device = choose_device("auto", Launch())
    common = (f"precision={precision}", f"model.positions={positions}", "model.heads=2", "data.packing.eod=3", mask)
    expected = losses(device, *common, "model.attention=reference")
    assert losses(device, *common, f"model.attention={kernel}") == pytest.approx(expected, abs=tolerance)


def test_peak_memory_is_measured() -> None:
    device = choose_device("auto", Launch())
    losses(device)
    assert 0 < peak_memory_gib(device) < 80


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_dry_run_takes_what_the_allocator_gives(recompute: str) -> None:
    """1 %: the peak of a step's tensors, of a model whose tensors are large beside what the allocator rounds up."""
    words = (
        "precision=bf16",
        "model.hidden=512",
        "model.sequence=512",
        "model.layers=4",
        f"memory.recompute={recompute}",
    )
    words += ("data=synthetic", "validation.every=0", "model.dropout=0", "model.attention_dropout=0")
    chosen = choose_layout({**composed(*words), "dry_run": True}, 1)
    told = dry_run(chosen, 0, choose_device("auto", Launch()), whole=True)
    trainer = Trainer(chosen.config, Mesh(Layout(), 0, choose_device("auto", Launch())), chosen.stages)
    batches = micro_batches(chosen.config, chosen.layout)
    trainer.train_step(batches)
    torch.accelerator.reset_peak_memory_stats()
    trainer.train_step(batches)
    assert torch.accelerator.max_memory_allocated() == pytest.approx(told.peak, rel=0.01)
