"""Held-out losses: of the whole split and of each of its sources."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pangu.checkpoint.status import read_status
from pangu.common.errors import UserError
from pangu.data.batch import Batch, batch_of
from pangu.data.sources import open_sources
from pangu.evaluation.inference import mean_loss
from pangu.prepare.corpora import prepare
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.topology.layout import Layout
from pangu.topology.random import generator
from pangu.training.run import run
from pangu.training.validation import Split, Validation
from tests.configs import composed, tiny
from tests.end_to_end.commands import SAME_ATTENTION, SAME_PRODUCTS, SMALL, metrics
from tests.parallel.harness import parallel_keys, small_trainer
from tests.threads import Ranks

LAYOUTS = [Layout(data=2), Layout(tensor=2), Layout(pipeline=2)]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prefixes of one name, with as many tokens of different kinds. Not to be changed."""
    folder = tmp_path_factory.mktemp("corpora")
    for name, most in (("web", 20), ("books", 60)):
        with IndexedWriter(folder / name / "held_out", 64) as writer:
            writer.add(generator(name).integers(0, most, size=32 * 5 + 1))
    return folder


def prefixes(folder: Path, *names: str) -> str:
    return f"[{','.join(f'{folder}/{name}/held_out' for name in names)}]"


def test_each_source_is_measured_as_if_it_were_alone(corpora: Path, tmp_path: Path) -> None:
    """Bit for bit; what both have is the mean of what each has, for they are equally large."""

    def train(*names: str) -> dict[str, Any]:
        output = tmp_path / "-".join(names)
        files = (f"data.train={prefixes(corpora, 'web')}", f"data.validation={prefixes(corpora, *names)}")
        same = (SAME_ATTENTION, SAME_PRODUCTS, "lr_schedule.warmup_steps=1", "validation.sequences=10")
        words = ("data=indexed", *files, *same, "model.vocab=64", "validation.every=1", "train.device=cpu")
        run(composed(*SMALL, *words, "train.steps=1", "checkpoint.every=1", f"train.output={output}"))
        (line,) = metrics(output)
        assert read_status(output / "checkpoints/step-00000001").validation_loss == line["validation_loss"]
        return line

    both = train("web", "books")
    alone = {name: train(name) for name in ("web", "books")}
    assert all("validation_sources" not in line for line in alone.values())
    assert both["validation_sources"] == {
        f"{name}/held_out": {"loss": line["validation_loss"], "perplexity": math.exp(line["validation_loss"])}
        for name, line in alone.items()
    }
    losses = [line["validation_loss"] for line in alone.values()]
    assert losses[0] != losses[1]
    assert both["validation_loss"] == pytest.approx(sum(losses) / 2, rel=1e-6)


def figures(rank: int, world: int, layout: Layout, folder: Path, method: str) -> dict[str, Any]:
    """On one rank of a layout."""
    files = (f"data.train={prefixes(folder, 'web')}", f"data.validation={prefixes(folder, 'web', 'books')}")
    data = tiny("data=indexed", *files, f"data.packing.method={method}", "data.packing.eod=3").data
    trainer, _ = small_trainer(layout, "precision=fp64", "validation.sequences=7", *parallel_keys(layout))
    prepare(data, trainer.config.model, show_progress=False)
    sources = open_sources(data, trainer.config.model, seed=0)
    return Validation(trainer.config, sources, trainer.mesh).figures(trainer)


@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_every_layout_measures_the_same(corpora: Path, ranks: Ranks, method: str) -> None:
    one = figures(0, 1, Layout(), corpora, method)
    assert len(one["validation_sources"]) == 2
    for layout in LAYOUTS:
        for measured in ranks.run(layout.world, figures, layout, corpora, method):
            assert measured["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-12), layout
            for name, of_source in one["validation_sources"].items():
                assert measured["validation_sources"][name] == pytest.approx(of_source, rel=1e-12), layout


def test_samples_of_like_length_are_measured_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One document in a sample: hardly any padding is computed, and the loss is that of one sample at a time."""
    lengths = [1 + 7 * number % 16 for number in range(40)]
    with IndexedWriter(tmp_path / "short", 64) as writer:
        for number, length in enumerate(lengths):
            writer.add(generator("short", number).integers(4, 64, size=length))
    words = ("data=indexed", f"data.train=[{tmp_path}/short]", f"data.validation=[{tmp_path}/short]")
    packing = ("data.packing.method=single", "data.packing.eod=3", "data.packing.reset_mask=true")
    data = tiny(*words, *packing).data
    trainer, _ = small_trainer(Layout(), "precision=fp64", "validation.sequences=40", "batch.micro_size=4")
    prepare(data, trainer.config.model, show_progress=False)
    stream = open_sources(data, trainer.config.model, seed=0).validation
    assert stream is not None
    config = replace(trainer.config, data=data)
    computed: list[int] = []
    forward = trainer.runner.forward

    def counting(schedule: Any, batches: Sequence[Batch], *rest: Any) -> Any:
        computed.extend(batch.tokens.numel() for batch in batches)
        return forward(schedule, batches, *rest)

    monkeypatch.setattr(trainer.runner, "forward", counting)
    measured = Split(config, stream, trainer.mesh).loss(trainer)
    assert sum(computed) < 1.1 * sum(lengths)
    each = [batch_of([stream[number]], [number], data.packing) for number in range(40)]
    assert measured == pytest.approx(mean_loss(trainer.runner, trainer.stages.schedule, each, trainer.mesh), rel=1e-12)


def test_a_run_that_no_command_starts_says_how_benchmarks_are_read(tmp_path: Path) -> None:
    """At once, before data is prepared."""
    words = (
        "evaluate.every=2",
        "evaluate.tasks=[lambada]",
        f"evaluate.data={tmp_path}",
        f"train.output={tmp_path}/run",
    )
    with pytest.raises(UserError, match=r"evaluate\.every: .*pass `read_benchmarks`, or set evaluate\.every=0"):
        run(composed("+config=quickstart", *words))
    assert not (tmp_path / "run").exists()
