"""A checkpoint of any run is asked on any layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pangu.common.errors import UserError
from pangu.evaluation.generation import Sampling, draw, generate
from pangu.interop.loading import load_model
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.run import run
from tests.configs import composed
from tests.end_to_end.commands import SMALL
from tests.parallel.harness import grown_texts
from tests.spawn import Pool

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
LAYOUTS = [
    Layout(tensor=2),
    Layout(tensor=2, sequence=True),
    Layout(pipeline=2),
    Layout(pipeline=3),
    Layout(tensor=2, pipeline=2),
    Layout(data=2),
]
KINDS = [
    ("model.kind=pangu",),
    ("model.kind=gpt",),
    ("model.residual_scores=true", "model.positions=relative", "model.tied_head=false", "model.kv_heads=2"),
]
"""What a stage receives, ties and gathers differs."""


@pytest.fixture(scope="module", params=KINDS, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with checkpoints of two steps, in fp64."""
    path = tmp_path_factory.mktemp("run")
    words = (*SMALL, *request.param, "model.layers=3", "data=synthetic", "data.packing.eod=3", "model.vocab=101")
    more = ("precision=fp64", "validation.every=0", "train.steps=2", "checkpoint.every=1", "train.device=cpu")
    run(composed(*words, *more, "lr_schedule.warmup_steps=1", "optimizer.lr=0.1", f"train.output={path}"))
    return path


def ask(rank: int, world: int, path: Path, layout: Layout) -> dict[str, Any]:
    """Scores and texts of a model on one rank of a layout."""
    mesh = Mesh.connect(layout, torch.device("cpu"))
    model = load_model(path, mesh, rows=2)
    return {
        "logits": grown_texts(model),
        "greedy": generate(model, PROMPTS, Sampling(9, 0.0, repetition_penalty=1.3)),
        "drawn": list(draw(model, PROMPTS, Sampling(9, 1.5, seed=3))),
        "eod": model.eod,
        "numbers": sum(parameter.numel() for parameter in model.runner.model.parameters()),
    }


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_gives_the_scores_and_the_texts_of_one_process(pool: Pool, folder: Path, layout: Layout) -> None:
    """fp64; scores to 1e-12, texts exactly, on every rank; no rank holds more than its part."""
    one = ask(0, 1, folder, Layout())
    assert one["eod"] == 3
    assert any(one["greedy"])
    for ours in pool.run(layout.world, ask, folder, layout):
        torch.testing.assert_close(ours["logits"], one["logits"], rtol=1e-12, atol=1e-12)
        assert all(ours[key] == one[key] for key in ("greedy", "drawn"))
        assert (ours["numbers"] < one["numbers"]) == (layout.tensor * layout.pipeline > 1)


def test_the_newest_checkpoint_of_a_run_folder_or_the_one_that_is_named(folder: Path) -> None:
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    newest, first, second = (
        grown_texts(load_model(folder / name, mesh))
        for name in ("", "checkpoints/step-00000001", "checkpoints/step-00000002")
    )
    assert torch.equal(newest, second)
    assert not torch.equal(newest, first)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_another_precision(folder: Path, precision: str) -> None:
    """Scores of the first layers' size, to 16 roundings of the format."""
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    exact, rounded = grown_texts(load_model(folder, mesh)), grown_texts(load_model(folder, mesh, precision))
    assert rounded.dtype == torch.float32
    step = {"fp32": 2**-24, "bf16": 2**-8}[precision]
    assert 0 < float((rounded - exact).abs().max() / exact.abs().max()) < 16 * step


def message(path: Path, layout: Layout) -> str:
    """What is wrong with loading it."""
    with pytest.raises(UserError) as error:
        load_model(path, Mesh(layout, 0, torch.device("cpu")))
    return str(error.value)


def test_what_cannot_be_loaded_is_named(folder: Path, tmp_path: Path) -> None:
    one = Layout()
    assert message(tmp_path, one).startswith(f"{tmp_path}: neither a run folder")
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    config = copy / "config.yaml"
    text = config.read_text()
    for content, expected in (
        ("model: [", f"{config}: the configuration of the run cannot be read"),
        (text.replace("\ndata:", "\ndate:"), f"{config}: the configuration of the run cannot be read ('data')"),
        (text.replace("layers: 3", "layers: three", 1), "model.layers = 'three': must be an integer"),
        (text.replace("layers: 3", "layers: 2", 1), "layers.2.mlp.up.weight: not in the model"),
    ):
        config.write_text(content)
        assert expected in message(copy, one)
    config.unlink()
    assert message(copy, one).startswith(f"{config}: the configuration of the run cannot be read")
    config.write_text(text)
    file = min((copy / "checkpoints" / "step-00000002").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-8])
    assert message(copy, one).startswith(f"{file}: damaged")


def test_a_layout_that_does_not_fit_is_named(folder: Path) -> None:
    assert "parallel.tensor = 3: must divide model." in message(folder, Layout(tensor=3))
    fix = "each stage needs at least one of model.layers = 3; use 1 to 3"
    assert f"parallel.pipeline = 4: {fix}" in message(folder, Layout(pipeline=4))
