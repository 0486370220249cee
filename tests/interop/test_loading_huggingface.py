"""A folder of transformers is asked on any layout, without a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pangu.common.errors import UserError
from pangu.evaluation.generation import Sampling, generate
from pangu.interop.loading import load_model
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.interop.test_formats import HEADS, convert, weights
from tests.parallel.harness import grown_texts
from tests.references import foreign_checkpoints as foreign
from tests.spawn import Pool

transformers = pytest.importorskip("transformers")

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11]]
LAYOUTS = [Layout(), Layout(tensor=2), Layout(pipeline=2), Layout(tensor=2, pipeline=2)]


def ask(rank: int, world: int, path: Path, layout: Layout) -> dict[str, Any]:
    """Scores and texts of a model on one rank of a layout."""
    model = load_model(path, Mesh.connect(layout, torch.device("cpu")), "fp64")
    return {"logits": grown_texts(model), "texts": generate(model, PROMPTS, Sampling(9, 0.0)), "eod": model.eod}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gpt2_says_what_it_does_in_transformers(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=67, n_positions=24, n_layer=2, n_embd=32, n_head=4, initializer_range=0.2, eos_token_id=66
    )
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path)
    theirs = theirs.double()
    for found in pool.run(layout.world, ask, tmp_path, layout):
        assert found["eod"] == 66
        for prompt, text in zip(PROMPTS, found["texts"], strict=True):
            ids = torch.tensor([prompt])
            expected = theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9)
            assert prompt + text == [token for token in expected[0].tolist() if token != 66]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_pangu_scores_as_after_conversion(pool: Pool, tmp_path: Path, layout: Layout) -> None:
    """Bit for bit on the same layout: the same weights."""
    foreign.write_huggingface(tmp_path / "theirs", weights(), HEADS)
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    found, expected = (pool.run(layout.world, ask, path, layout)[0] for path in (tmp_path / "theirs", run))
    assert torch.equal(found["logits"], expected["logits"])
    assert found["texts"] == expected["texts"]


def test_tensors_that_are_not_there_are_named(tmp_path: Path) -> None:
    foreign.write_huggingface(tmp_path / "theirs", weights(), HEADS)
    config = tmp_path / "theirs" / "config.json"
    config.write_text(config.read_text().replace('"num_layers": 3', '"num_layers": 4'))
    with pytest.raises(UserError, match=r"transformer\.h\.3\.attn\.q_proj\.weight: missing"):
        load_model(tmp_path / "theirs", Mesh(Layout(), 0, torch.device("cpu")))
