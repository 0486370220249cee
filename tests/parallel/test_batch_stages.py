"""Stages of growing batches and sequences compute the same on every layout, also where runs are interrupted between
them. `tests/parallel/test_layouts.py` has two stages with every other option."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.resuming import load_checkpoint
from pangu.training.saving import Saver
from pangu.training.stages import BatchStages
from pangu.training.step import Trainer
from tests.configs import tiny
from tests.parallel.harness import OVERRIDES, loader_of, parallel_keys, whole
from tests.threads import Ranks

MODEL = (
    *(*OVERRIDES, "model.hidden=48", "model.heads=12", "model.ffn=96", "model.layers=5"),
    *("batch.global_size=12", "batch.micro_size=1", "train.check_step=true", "train.steps=5"),
    "batch.stages=[{until:1,global_size:4,sequence:4},{until:2,global_size:8,sequence:8},{until:3,global_size:8}]",
)
BORDERS, SAMPLES = (0, 1, 2, 3, 5), (0, 1, 5, 13, 37)
"""Steps that end a stage, and samples consumed by then."""
EXPERTS = ("model.experts=4", "model.expert_ffn=24")
LAYOUTS = {
    "tensor_zero_2": (Layout(2, 1, 2, 2, sequence=True), ("optimizer=muon",)),
    "interleaved": (Layout(1, 2, 2, 1, virtual_stages=2), ("parallel.schedule=interleaved", "optimizer=lamb")),
    "zero_bubble_v": (Layout(1, 2, 1, 0, virtual_stages=2), ("parallel.schedule=zb_v",)),
    "context": (Layout(1, 2, 1, 3, context=2), ("optimizer=muon",)),
    "experts": (Layout(1, 1, 4, 1, expert=2), EXPERTS),
    "recompute": (Layout(data=2, zero=3), ("memory.recompute=full", "memory.offload=[activations,optimizer]")),
}
IN_CI = "tensor_zero_2", "context", "recompute"
OTHERS = Layout(), Layout(data=2, zero=1), Layout(2, 2), Layout(data=4, zero=3)
"""Layouts under which runs are continued; the first one is that of one process."""
Run = tuple[list[float], dict[str, Tensor]]


def run(rank: int, world: int, layout: Layout, output: str, begin: int, end: int, *overrides: str) -> Run:
    """Losses and norms of the steps after `begin` up to `end`, and the weights then; a checkpoint is there, too."""
    words = (f"train.output={output}", "checkpoint.asynchronous=false", "checkpoint.keep=0")
    config = tiny(*MODEL, *words, *overrides, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu"), config.parallel.timeout_s))
    stages, samples, figures = BatchStages(config), 0, list[float]()
    if begin:
        checkpoint = Path(output) / "checkpoints" / f"step-{begin:08}"
        samples = load_checkpoint(checkpoint, config, trainer)["samples"]
    assert samples == SAMPLES[BORDERS.index(begin)]
    with loader_of(trainer, config) as loader, Saver(config, trainer) as saver:
        for step in range(begin, end):
            stages.enter(trainer)
            result = trainer.train_step(loader.micro_batches(samples, step))
            samples += stages.loader_stage_at(step).global_size // stages.loader_stage_at(step).parts
            figures += [result.loss, result.grad_norm]
        saver.save(samples, {})
    return figures, whole(trainer, of_gradients=False)


def interrupted(ranks: Ranks, layouts: Any, output: Path, *overrides: str) -> Run:
    """A run that ends with each stage and is continued, under the next one of the layouts with what it is told."""
    figures, weights = list[float](), dict[str, Tensor]()
    for (begin, end), (layout, own) in zip(pairwise(BORDERS), layouts, strict=True):
        words = (layout, str(output), begin, end, *overrides, *own)
        more, weights = ranks.run(layout.world, run, *words)[0]
        figures += more
    return figures, weights


def function_of(own: tuple[str, ...]) -> tuple[str, ...]:
    """What every layout has to be told."""
    return tuple(word for word in own if word.startswith(("model.", "optimizer=")))


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The run that is not interrupted, on one process, in float64."""

    @cache
    def made(*overrides: str) -> Run:
        return run(0, 1, Layout(), str(tmp_path_factory.mktemp("one")), 0, 5, "precision=fp64", *overrides)

    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_are_the_same_on_every_layout(ranks: Ranks, name: str, tmp_path: Path, one_process: Any) -> None:
    """1e-10 after five steps: sums of at most 96 products in another order, 1.1e-16 each, divided by second moments."""
    layout, own = LAYOUTS[name]
    figures, weights = ranks.run(layout.world, run, layout, str(tmp_path), 0, 5, "precision=fp64", *own)[0]
    expected, reference = one_process(*function_of(own))
    assert figures == pytest.approx(expected, rel=1e-10)
    for tensor, one in reference.items():
        torch.testing.assert_close(weights[tensor], one, rtol=1e-8, atol=1e-10, msg=tensor)


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_a_run_that_is_interrupted_at_every_border_gives_the_same_bits(ranks: Ranks, name: str, tmp_path: Path) -> None:
    (layout, own), precision = LAYOUTS[name], "precision=bf16" if name == "recompute" else "precision=fp32"
    figures, weights = ranks.run(layout.world, run, layout, str(tmp_path / "unbroken"), 0, 5, precision, *own)[0]
    found, broken = interrupted(ranks, [LAYOUTS[name]] * 4, tmp_path / "broken", precision)
    assert found == figures
    assert broken.keys() == weights.keys()
    assert [tensor for tensor, one in weights.items() if not torch.equal(broken[tensor], one)] == []


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_stage_may_have_another_layout(ranks: Ranks, name: str, tmp_path: Path, one_process: Any) -> None:
    layout, own = LAYOUTS[name]
    places, function = OTHERS[len(name) % 2 :], function_of(own)
    layouts = [(places[0], function), (layout, own), *((place, function) for place in places[1:3])]
    figures, weights = interrupted(ranks, layouts, tmp_path, "precision=fp64")
    expected, reference = one_process(*function)
    assert figures == pytest.approx(expected, rel=1e-12)
    for tensor, one in reference.items():
        torch.testing.assert_close(weights[tensor], one, rtol=0, atol=1e-12, msg=tensor)
