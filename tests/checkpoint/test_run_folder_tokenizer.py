"""A run folder keeps its tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pangu.checkpoint.run_folder import keep_tokenizer
from pangu.common.errors import UserError
from pangu.config.data import TokenizerConfig
from pangu.interop.loading import load_model
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.autotune import Choices
from pangu.training.run import _describe_folder
from tests.configs import config
from tests.interop.test_formats import HEADS, convert, weights
from tests.interop.test_formats_transformers import small_vocabulary
from tests.references import foreign_checkpoints as foreign


def test_a_run_that_was_moved_knows_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer was named by a path below another directory and is gone; the run can be converted as well."""
    monkeypatch.chdir(tmp_path)
    path = Path(small_vocabulary(Path()))
    words = path.read_bytes()
    foreign.write_huggingface(Path("theirs"), weights(), HEADS)
    convert(
        "huggingface", "pangu", Path("theirs"), Path("here"), f"data.tokenizer={{kind: sentencepiece, path: {path}}}"
    )
    path.unlink()
    Path("elsewhere").mkdir()
    Path("here").rename("elsewhere/moved")
    monkeypatch.chdir("elsewhere")
    model = load_model(Path("moved"), Mesh(Layout(), 0, torch.device("cpu")))
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer.encode("def f(x):")) == "def f(x):"
    out = convert("pangu", "huggingface", Path("moved"), tmp_path / "out")
    assert (out / "vocab.model").read_bytes() == words


def test_training_keeps_a_copy(tmp_path: Path) -> None:
    """Of a run on the standard library too, whose tokenizer lies with its data."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "tokenizer.model").write_bytes(b"pieces")
    (tmp_path / "run").mkdir()
    choices = Choices("sdpa", "highest", "cpu", "fp32")
    _describe_folder(tmp_path / "run", config(f"data.folder={data}"), choices, [], None)
    assert (tmp_path / "run" / "tokenizer.model").read_bytes() == b"pieces"
    assert (tmp_path / "run" / "config.yaml").is_file()


def test_folders_are_copied_whole_and_replaced(tmp_path: Path) -> None:
    run_folder, theirs = tmp_path / "run", tmp_path / "theirs"
    run_folder.mkdir()
    theirs.mkdir()
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (theirs / name).write_text("1")
    tokenizer = TokenizerConfig("huggingface", str(theirs))
    assert keep_tokenizer(run_folder, tokenizer) == "tokenizer"
    (theirs / "tokenizer.json").write_text("2")
    keep_tokenizer(run_folder, tokenizer)
    assert sorted(file.name for file in (run_folder / "tokenizer").iterdir()) == ["config.json", "tokenizer.json"]
    assert (run_folder / "tokenizer" / "tokenizer.json").read_text() == "2"
    keep_tokenizer(run_folder, TokenizerConfig("huggingface", str(run_folder / "tokenizer")))
    assert [file.name for file in run_folder.iterdir()] == ["tokenizer"]
    with pytest.raises(UserError, match=r"data.tokenizer.path = .*gone\.model: does not exist"):
        keep_tokenizer(run_folder, TokenizerConfig("pangu", str(tmp_path / "gone.model")))
