"""What the CPU tests show, on an accelerator. Run by scripts/gpu_suite.sh, where Hydra need not be installed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import yaml

from benchmarks.gpu_suite.setting import preset
from pangu.config.attention import ABILITIES
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.dryrun.roles import run_jobs
from pangu.dryrun.run import micro_batches
from pangu.metrics.devices import peak_memory_gib
from pangu.pipeline.layouts import choose_layout
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.step import Trainer
from tests.spawn import repository

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator"),
]


def option(group: str, name: str) -> dict[str, Any]:
    """A file of configs/ that refers to no other."""
    return yaml.safe_load((repository() / "configs" / group / f"{name}.yaml").read_text(encoding="utf-8"))


def losses(device: torch.device, changes: dict[str, Any] | None = None, steps: int = 5) -> list[float]:
    """Losses of a few steps on one device; `changes`: dotted key -> value."""
    config = build(RunConfig, preset("tiny", changes))
    trainer = Trainer(config, Mesh(Layout(), 0, device))
    stream = open_sources(config.data, config.model, config.train.seed).train
    size = config.batch.global_size
    with Loader(stream, config.data.packing, size, config.batch.micro_size, 0, 1) as loader:
        return [trainer.train_step(loader.micro_batches(size * step)).loss for step in range(steps)]


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("offload", [[], ["activations"]], ids=str)
def test_fp32_equals_the_cpu(optimizer: str, recompute: str, offload: list[str]) -> None:
    """1e-4 after 5 updates: other kernels, the same sums in another order."""
    changes = {"optimizer": {**option("optimizer", optimizer), "lr": 0.01}}
    changes |= {"memory.recompute": recompute, "memory.offload": offload}
    device = choose_device("auto", Launch())
    assert losses(device, changes) == pytest.approx(losses(torch.device("cpu"), changes), abs=1e-4)


@pytest.mark.parametrize(("precision", "tolerance"), [("bf16", 0.1), ("fp16", 0.02)])
def test_16_bit_formats_stay_near_fp32(precision: str, tolerance: float) -> None:
    device = choose_device("auto", Launch())
    found = losses(device, {"precision": option("precision", precision)})
    assert found == pytest.approx(losses(device), abs=tolerance)


KERNELS = [
    *(("flex", "fp32", positions, 1e-4) for positions in ("learned", "alibi", "relative")),
    *((kernel, "bf16", "learned", 0.1) for kernel in ("cudnn", "flash", "triton")),
    *(("flash_attn", "bf16", positions, 0.1) for positions in ("learned", "alibi")),
]


SPARSE = {"kind": "bigbird", "block": 4, "local_blocks": 1, "global_blocks": 1, "random_blocks": 1, "seed": 1}
MASKS = [{}, {"data.packing.reset_mask": True}, {"model.window": 5}, {"model.sparse": SPARSE}]
MASKS.append({"data.packing.reset_mask": True, "model.sparse": SPARSE})


@pytest.mark.parametrize(("kernel", "precision", "positions", "tolerance"), KERNELS)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_kernels_equal_reference(
    kernel: str, precision: str, positions: str, tolerance: float, mask: dict[str, Any]
) -> None:
    """Tolerances as above."""
    if kernel == "flash_attn":
        pytest.importorskip("flash_attn")
    if "model.sparse" in mask and not ABILITIES[kernel].sparse:
        pytest.skip("knows no blocks")
    device = choose_device("auto", Launch())
    if device.type not in (ABILITIES[kernel].devices or (device.type,)):
        pytest.skip(f"{kernel} does not run on {device.type}")
    common = {"precision": option("precision", precision), "model.positions": positions, "model.heads": 2}
    common |= {"data.packing.eod": 3, **mask}
    expected = losses(device, {**common, "model.attention": "reference"})
    assert losses(device, {**common, "model.attention": kernel}) == pytest.approx(expected, abs=tolerance)


def test_peak_memory_is_measured() -> None:
    device = choose_device("auto", Launch())
    losses(device)
    assert 0 < peak_memory_gib(device) < 80


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_dry_run_takes_what_the_allocator_gives(recompute: str) -> None:
    """1 %: the peak of a step's tensors, of a model whose tensors are large beside what the allocator rounds up."""
    sizes = {"model.hidden": 512, "model.sequence": 512, "model.layers": 4, "model.vocab": 1024}
    batch = {"batch.global_size": 16, "batch.micro_size": 4}
    changes = {"precision": option("precision", "bf16"), "memory.recompute": recompute, "dry_run": True}
    values = preset("tiny", {**sizes, **batch, **changes})
    chosen = choose_layout(values, 1)
    (report,) = run_jobs([(values, 0, {"whole": True})])
    trainer = Trainer(chosen.config, Mesh(Layout(), 0, choose_device("auto", Launch())), chosen.stages)
    batches = micro_batches(chosen.config, chosen.layout)
    trainer.train_step(batches)
    torch.accelerator.reset_peak_memory_stats()
    trainer.train_step(batches)
    assert torch.accelerator.max_memory_allocated() == pytest.approx(report["peak"], rel=0.01)
