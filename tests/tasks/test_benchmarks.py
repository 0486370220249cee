"""Benchmarks during training."""

from __future__ import annotations

from pathlib import Path

import pytest

from pangu.tasks.ask import read_benchmarks
from pangu.topology.layout import Layout
from pangu.training.validation import in_training
from tests.evaluation.models import Characters
from tests.parallel.harness import small_trainer
from tests.spawn import Pool
from tests.tasks.files import write_benchmarks

LAYOUTS = [
    (Layout(tensor=2, sequence=True), ()),
    (Layout(pipeline=2), ("parallel.schedule=zb_h1",)),
    (Layout(data=2), ()),
    (Layout(data=2, zero=3), ()),
]


def train(rank: int, world: int, layout: Layout, folder: str, every: int, *overrides: str) -> list[dict[str, float]]:
    """Figures after each of two steps, with the losses of the steps."""
    tasks = "evaluate.tasks=[afqmc,cmrc2018,lambada]"
    keys = (f"evaluate.data={folder}", tasks, "evaluate.limit=2", "evaluate.shots=0", "precision=fp64")
    trainer, batches = small_trainer(layout, *keys, "model.init_std=0.5", "optimizer.lr=0.01", *overrides)
    ask = read_benchmarks(trainer.config)
    found = []
    for step in (1, 2):
        loss = trainer.train_step(batches).loss
        figures = ask(in_training(trainer.config, trainer, Characters())) if step % every == 0 else {}
        found.append({"loss": loss, **figures})
    return found


def test_every_layout_measures_the_same_and_training_does_not_notice(pool: Pool, tmp_path: Path) -> None:
    """Chosen, written and scored answers, on every rank, in fp64; the loss of the second step is that of a run without
    evaluation, bit for bit."""
    folder = str(write_benchmarks(tmp_path))
    one = train(0, 1, Layout(), folder, 1)
    assert one[0].keys() == {
        "loss",
        *("afqmc/accuracy", "cmrc2018/exact_match", "cmrc2018/f1"),
        *("lambada/accuracy", "lambada/perplexity", "lambada/word_perplexity"),
    }
    assert one[0]["lambada/perplexity"] != one[1]["lambada/perplexity"]
    assert [step["loss"] for step in train(0, 1, Layout(), folder, 3)] == [step["loss"] for step in one]
    for layout, overrides in LAYOUTS:
        for found in pool.run(layout.world, train, layout, folder, 1, *overrides):
            for step, expected in zip(found, one, strict=True):
                assert step == pytest.approx(expected, rel=1e-10), layout
