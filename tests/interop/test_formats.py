"""Conversion through every format and back, bit for bit; the inputs come from tests/references/foreign_checkpoints.py,
which shares nothing with the converter."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pangu.checkpoint.files import list_checkpoints
from pangu.checkpoint.index import read_index
from pangu.checkpoint.reading import read_tensor
from pangu.interop.formats import huggingface, mindspore
from tests.references import foreign_checkpoints as foreign
from tests.references.pangu_reference import pangu_shapes, random_weights
from tools.convert_checkpoint import main

LAYERS, HIDDEN, HEADS, VOCAB, SEQUENCE = 3, 32, 8, 67, 24
HEADS_GIVEN = "model.heads=8"


def weights(dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    return random_weights(pangu_shapes(LAYERS, HIDDEN, VOCAB, SEQUENCE), dtype=dtype)


def convert(source: str, target: str, given: Path, output: Path, *more: str) -> Path:
    words = ["--from", source, "--to", target, "--input", str(given), "--output", str(output), *more]
    assert main(words) == 0
    return output


def logical(run: Path) -> dict[str, Tensor]:
    """The weights in a run folder of ours."""
    (path,) = list_checkpoints(run / "checkpoints")
    index = read_index(path)
    return {name.removeprefix("weight/"): read_tensor(path, index, name) for name in index["tensors"]}


def require_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same names, formats and bits."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def require_same_export(found: Path, expected: Path) -> None:
    """The same tensors and config.json of two folders of Hugging Face, but for the ids of a tokenizer."""
    require_equal(*(load_file(folder / "model.safetensors") for folder in (found, expected)))
    fields, others = (json.loads((folder / "config.json").read_text()) for folder in (found, expected))
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    assert {name: x for name, x in fields.items() if name not in ids} == {
        name: x for name, x in others.items() if name not in ids
    }


def given(format_: str, folder: Path, tensors: dict[str, Tensor]) -> Path:
    """A synthetic checkpoint of another program."""
    if format_ == "huggingface":
        foreign.write_huggingface(folder, tensors, HEADS)
    elif format_ == "megatron":
        foreign.write_megatron_port(folder, tensors, ranks=1, rows=128, heads=HEADS, extras=True)
    else:
        folder = folder / "pangu.ckpt"
        state = {f"adam_m.{name}": tensor for name, tensor in foreign.mindspore_tensors(tensors).items()}
        foreign.write_checkpoint(folder, foreign.mindspore_tensors(tensors) | state)
    return folder


class Attack:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.folder,)


@pytest.mark.parametrize(("first", "second"), itertools.permutations(["huggingface", "megatron", "mindspore"], 2))
def test_through_every_pair_of_formats(first: str, second: str, tmp_path: Path) -> None:
    """Theirs -> ours -> another one -> ours."""
    expected = weights()
    start = given(first, tmp_path / "start", expected)
    more = [HEADS_GIVEN, "model.vocab=67"]
    ours = convert(first, "pangu", start, tmp_path / "ours", *more)
    require_equal(logical(ours), expected)
    end = ".ckpt" if second == "mindspore" else ""
    theirs = convert("pangu", second, ours, tmp_path / f"theirs{end}")
    require_equal(logical(convert(second, "pangu", theirs, tmp_path / "back", *more)), expected)
    direct = convert(first, second, start, tmp_path / f"direct{end}", *more)
    require_equal(logical(convert(second, "pangu", direct, tmp_path / "again", *more)), expected)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("extras", [False, True])
def test_megatron_port_of_any_size_in_and_out(ranks: int, extras: bool, tmp_path: Path) -> None:
    """The files written are those that the reference makes, tensor by tensor; the released ones lack options."""
    expected = weights()
    heads = HEADS if extras else None
    foreign.write_megatron_port(tmp_path / "in", expected, ranks, rows=128, heads=heads, extras=extras)
    ours = convert("megatron", "pangu", tmp_path / "in", tmp_path / "ours", "model.vocab=67", HEADS_GIVEN)
    require_equal(logical(ours), expected)
    out = convert("pangu", "megatron", ours, tmp_path / "out", "--tensor", str(ranks))
    assert (out / "latest_checkpointed_iteration.txt").read_text() == "release"
    for rank in range(ranks):
        file = Path(f"mp_rank_{rank:02d}") / "model_optim_rng.pt"
        theirs, made = (
            torch.load(folder / file, weights_only=False)
            for folder in (tmp_path / "in" / "iter_0001000", out / "release")
        )
        require_equal(flat(made["model"]), flat(theirs["model"]))
        assert made["args"].num_attention_heads == HEADS
        assert made["args"].num_layers == LAYERS - 1


def flat(values: dict, prefix: str = "") -> dict[str, Tensor]:
    """Nested dictionaries by joined names."""
    found = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}/") if isinstance(value, dict) else {prefix + key: value}
    return found


def test_megatron_port_between_sizes(tmp_path: Path) -> None:
    expected = weights()
    folder = tmp_path / "in"
    foreign.write_megatron_port(folder, expected, 8, rows=128, heads=HEADS, extras=False)
    for ranks in (4, 1, 2):
        folder = convert(
            "megatron", "megatron", folder, tmp_path / str(ranks), "model.vocab=67", "--tensor", str(ranks)
        )
    require_equal(logical(convert("megatron", "pangu", folder, tmp_path / "ours")), expected)


def test_released_rows_are_cut_to_the_vocabulary(tmp_path: Path) -> None:
    """40,064 rows in, 40,000 kept, 40,064 out, for any number of ranks."""
    expected = random_weights(pangu_shapes(2, 8, 40000, 4), dtype=torch.float16)
    foreign.write_megatron_port(tmp_path / "in", expected, 2, rows=40064, heads=2, extras=False)
    ours = convert("megatron", "pangu", tmp_path / "in", tmp_path / "ours")
    require_equal(logical(ours), expected)
    out = convert("pangu", "megatron", ours, tmp_path / "out", "--tensor", "2")
    made = torch.load(out / "release" / "mp_rank_01" / "model_optim_rng.pt", weights_only=False)
    rows = made["model"]["language_model"]["embedding"]["word_embeddings"]["weight"]
    assert torch.equal(rows, foreign.padded(expected["embedding.word.weight"], 40064)[20032:])


@pytest.mark.parametrize(("data", "model"), [(1, 1), (4, 2), (2, 8), (8, 4)])
def test_mindspore_slices(data: int, model: int, tmp_path: Path) -> None:
    """Slices of all devices, strategy file and .npy tables -> the single file of the reference."""
    expected = weights(torch.float32)
    foreign.write_slices(tmp_path / "in", expected, data, model)
    single = convert("mindspore", "mindspore", tmp_path / "in", tmp_path / "out.ckpt", HEADS_GIVEN)
    require_equal(foreign.read_checkpoint(single), foreign.mindspore_tensors(expected))
    ours = convert("mindspore", "pangu", tmp_path / "in", tmp_path / "ours", HEADS_GIVEN)
    require_equal(logical(ours), expected)


def test_mindspore_tensors_in_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mindspore, "CONTENT_BYTES", 1000)
    expected = weights()
    start = given("mindspore", tmp_path, expected)
    single = convert("mindspore", "mindspore", start, tmp_path / "out.ckpt", HEADS_GIVEN)
    require_equal(foreign.read_checkpoint(single), foreign.mindspore_tensors(expected))
    require_equal(logical(convert("mindspore", "pangu", single, tmp_path / "ours", HEADS_GIVEN)), expected)


def test_newer_mindspore_names(tmp_path: Path) -> None:
    expected = weights()
    tensors = {
        name.replace("backbone.word", "backbone.embedding.word").replace(
            "backbone.pos", "backbone.embedding.pos"
        ): tensor
        for name, tensor in foreign.mindspore_tensors(expected).items()
    }
    assert "backbone.embedding.position_embedding.embedding_table" in tensors
    foreign.write_checkpoint(tmp_path / "a.ckpt", tensors)
    require_equal(logical(convert("mindspore", "pangu", tmp_path / "a.ckpt", tmp_path / "ours", HEADS_GIVEN)), expected)


def test_shards_of_huggingface(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The community's names in files of the given size, and an index of them."""
    expected = weights()
    start = given("huggingface", tmp_path / "in", expected)
    monkeypatch.setattr(huggingface, "SHARD_BYTES", 20_000)
    out = convert("huggingface", "huggingface", start, tmp_path / "out")
    files = sorted(out.glob("model-*.safetensors"))
    assert len(files) > 3
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    tensors: dict[str, Tensor] = {}
    for file in files:
        assert file.stat().st_size < 25_000
        tensors |= load_file(file)
    require_equal(tensors, foreign.huggingface_tensors(expected))
    require_equal(logical(convert("huggingface", "pangu", out, tmp_path / "ours")), expected)
