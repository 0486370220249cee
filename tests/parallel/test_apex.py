"""Kernels of apex compute what torch's do, on every layout. apex is a stand-in here (`tests/apex.py`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pangu.common.errors import ConfigError
from pangu.layers.apex import NORMS, USES, candidates
from pangu.optim.build import implementation
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.autotune import Choices, choose
from pangu.training.step import Trainer
from pangu.zero.weight_gradients import add_matmul
from tests import apex
from tests.configs import tiny
from tests.parallel.harness import OVERRIDES, compare, one_process, parallel_keys, small_trainer, train
from tests.threads import Ranks

CPU = torch.device("cpu")
LAMB = ("optimizer=lamb", "optimizer.lr=0.01")
TOLERANCE = 1e-6
"""fp32 in another order over two steps; apex's 1 - beta2 is rounded to 1e-5 of itself."""


def trained(rank: int, world: int, layout: Layout, *overrides: str) -> dict[str, Any]:
    """What `harness.train` returns of a trainer with all kernels of apex."""
    config = tiny(*overrides, *parallel_keys(layout))
    choices = Choices("reference", "highest", "cpu", "fp32", **dict.fromkeys(USES, "apex"))
    trainer = Trainer(config, Mesh.connect(layout, CPU), choices=choices)
    assert implementation(trainer.optimizer) == "apex's multi-tensor kernels"
    return train(trainer, range(2))


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        (Layout(), ()),
        (Layout(data=2, zero=3), ("model.norm=rmsnorm",)),
        (Layout(tensor=2, sequence=True, data=2, zero=1), LAMB),
        (Layout(pipeline=2, data=2, zero=2), (*LAMB, "model.norm=rmsnorm", "memory.recompute=selective")),
        (Layout(tensor=2), ("optimizer.moments=bf16", "memory.recompute=full")),
    ],
    ids=str,
)
def test_a_run_with_apex_equals_one_with_torch(layout: Layout, overrides: tuple[str, ...], ranks: Ranks) -> None:
    with apex.installed() as calls:
        ours = ranks.run(layout.world, trained, layout, *OVERRIDES, *overrides)[0]
        norm = "rms norm" if "model.norm=rmsnorm" in overrides else "layer norm"
        assert calls.keys() == {norm, "norms", "adam"}
    compare(ours, one_process(2, *OVERRIDES, *overrides), TOLERANCE)


def steps_of_narrow_products(rank: int, world: int, layout: Layout) -> list[float]:
    """Losses of three steps in fp16, of which the first overflows."""
    words = ("precision=fp16", "precision.loss_scale.initial=1e9", "parallel.schedule=zb_h1", *LAMB, *OVERRIDES)
    trainer, batches = small_trainer(layout, *words)
    config = trainer.config
    choices = Choices("reference", "highest", "cpu", "fp16", **dict.fromkeys(USES, "apex"))
    narrow = Trainer(config, trainer.mesh, choices=choices)
    found = []
    for one in (trainer, narrow):
        results = [one.train_step(batches) for _ in range(4)]
        assert results[0].skipped
        found.append([result.loss for result in results])
    assert found[1] == pytest.approx(found[0], rel=2e-3)  # two units of fp16
    return found[1]


def test_overflow_is_skipped_and_gradients_of_weights_are_added_in_pipelines(ranks: Ranks) -> None:
    with apex.installed() as calls:
        ranks.run(2, steps_of_narrow_products, Layout(pipeline=2))
        assert calls["weight gradient"] > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_product_is_added_by_apex_where_its_kernel_reads_the_operands_as_they_are(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(0)
    grad, x = (torch.randn(32, width, generator=source).to(dtype) for width in (12, 8))
    expected = grad.double().t() @ x.double()
    for left, is_dense in ((grad.t(), True), (grad.t().contiguous(), False)):
        with apex.installed() as calls:
            total = torch.full((12, 8), torch.nan)
            add_matmul(total, left, x, True, with_apex=True)
            assert not calls  # the kernel cannot begin a sum
            add_matmul(total, left, x, False, with_apex=True)
            assert calls["weight gradient"] == (is_dense and dtype != torch.float32)
        unit = torch.finfo(dtype).eps * float(expected.abs().max())
        torch.testing.assert_close(total.double(), 2 * expected, rtol=0, atol=4 * unit)


@pytest.mark.parametrize(
    ("use", "overrides", "said"),
    [
        ("norm", ("compile=true",), "kernels.norm = apex: a compiled layer fuses its norms; set compile=false, or "),
        (
            "weight_gradient",
            (),
            "adds matmuls of bf16 or fp16 to fp32, got precision.compute = fp32; set kernels.weig",
        ),
        ("optimizer", ("memory.offload=[optimizer]",), r"updates fp32 on the device, not with precision=fp64 or mem"),
        ("optimizer", ("precision=fp64",), r"updates .* or memory.offload=\[optimizer\]; set kernels.optimizer=auto"),
    ],
)
def test_who_asks_for_apex_hears_why_it_cannot_run(use: str, overrides: tuple[str, ...], said: str) -> None:
    """`auto` takes torch's then. On a CPU, and where apex is not installed, no kernel of it can run."""
    asked, auto = tiny(f"kernels.{use}=apex", *overrides), tiny(*overrides)
    with apex.installed():
        with pytest.raises(ConfigError, match=said):
            candidates(use, asked, CPU)
        assert candidates(use, auto, CPU) == ["torch"]
    with pytest.raises(ConfigError, match=rf"kernels.{use} = apex: needs a GPU, got cpu; set kernels.{use}=auto"):
        candidates(use, asked, CPU)
    with pytest.raises(ConfigError, match=r"cannot be imported \(No module named '.*; install NVIDIA's apex"):
        candidates("norm", tiny("kernels.norm=apex"), torch.device("cuda"))


@pytest.mark.parametrize("fast", ["torch", "apex"])
def test_the_start_of_a_run_times_both_and_takes_the_faster(fast: str, caplog: pytest.LogCaptureFixture) -> None:
    def timer(trials: Any, device: torch.device, budget_s: float) -> dict[Any, float]:
        for trial in trials.values():
            trial()
        return {name: 0.001 if name == fast else 0.002 for name in trials}

    caplog.set_level("INFO", logger="pangu")
    config, mesh = tiny("precision=bf16", "precision.fp32_matmul=highest"), Mesh(Layout(), 0, CPU)
    with apex.installed() as calls:
        chosen = choose(config, mesh, timer=timer)
        assert calls.keys() == {"layer norm", "weight gradient", "norms", "adam"}
        assert {getattr(chosen, use) for use in USES} == {fast}
        figures = {"torch": 1.0 if fast == "torch" else 2.0, "apex": 1.0 if fast == "apex" else 2.0}
        assert {use: chosen.milliseconds[use] for use in USES} == dict.fromkeys(USES, figures)
        assert (
            f"norm         {fast} (kernels.norm=auto; ms of one norm: torch {figures['torch']:g}, apex" in caplog.text
        )
        asked = choose(tiny("precision=bf16", "kernels.optimizer=apex", "train.deterministic=true"), mesh)
        assert (asked.norm, asked.optimizer) == ("torch", "apex")
        kept = choose(config, mesh, {"device": chosen.device, "compute": "bf16", "norm": "apex"}, timer)
        assert kept.norm == "apex"
    assert {getattr(choose(config, mesh), use) for use in USES} == {"torch"}


def test_a_version_of_apex_with_other_functions_is_no_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    with apex.installed():
        monkeypatch.setattr(apex.FusedRMSNormAffineFunction, "forward", lambda ctx, x: x)
        with pytest.raises(TypeError):
            NORMS["apex"][1](torch.ones(1, 2), (2,), torch.ones(2), 1e-5)
        assert choose(tiny("model.norm=rmsnorm"), Mesh(Layout(), 0, CPU)).norm == "torch"
