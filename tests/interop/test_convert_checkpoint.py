"""What the converter refuses, and with which words; what it takes of memory."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch._subclasses.fake_tensor import FakeTensorMode

from pangu.interop.formats.convert import convert as convert_tensors
from pangu.interop.formats.fields import load_table
from pangu.interop.formats.stored import inexpressible
from tests.configs import config
from tests.interop.test_formats import HEADS, HEADS_GIVEN, Attack, convert, logical, weights
from tests.references import foreign_checkpoints as foreign
from tests.references.pangu_reference import pangu_shapes
from tests.spawn import run_ranks
from tools.convert_checkpoint import main


def refusal(capsys: pytest.CaptureFixture[str], source: str, given: Path, *more: str, to: str = "pangu") -> str:
    """What the command says when it fails; it must leave nothing behind."""
    folder = given.parent / "output"
    folder.mkdir(exist_ok=True)
    words = ["--from", source, "--to", to, "--input", str(given), "--output", str(folder / "made"), *more]
    capsys.readouterr()
    assert main(words) == 2
    assert list(folder.iterdir()) == []
    return capsys.readouterr().err


def test_the_run_folder_can_be_trained_from(tmp_path: Path) -> None:
    """Its configuration is a run's, and a run begins with its weights."""
    from pangu.config.build import build
    from pangu.config.schema import RunConfig
    from tests.end_to_end.commands import SMALL, pretrain

    foreign.write_huggingface(tmp_path / "in", weights(torch.float32), HEADS)
    run = convert("huggingface", "pangu", tmp_path / "in", tmp_path / "run", "model.activation=gelu_tanh")
    config = build(RunConfig, yaml.safe_load((run / "config.yaml").read_text()))
    model = config.model
    assert (model.kind, model.layers, model.hidden, model.heads, model.vocab) == ("pangu", 3, 32, HEADS, 67)
    assert (model.activation, model.ffn_size, model.sequence) == ("gelu_tanh", 128, 24)
    assert (config.data.packing.eod, config.data.packing.pad) == (9, 6)
    checkpoint = run / "checkpoints" / "step-00000000"
    shape = (
        "model.layers=3",
        "model.heads=8",
        "model.positions=learned",
        "model.vocab=67",
        "model.sequence=24",
        "optimizer.lr=1e-30",
    )
    settings = (*SMALL, *shape, "data=synthetic", "train.steps=1", "validation.every=0", "lr_schedule=constant")
    done = pretrain(tmp_path / "trained", *settings, f"checkpoint.init_from={checkpoint}", "optimizer.weight_decay=0")
    assert done.returncode == 0, done.stderr
    found = logical(tmp_path / "trained")
    for name, tensor in weights(torch.float32).items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_the_tokenizer_of_the_data_goes_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run on the standard library too; one that is gone is named."""
    foreign.write_huggingface(tmp_path / "in", weights(), HEADS)
    run = convert("huggingface", "pangu", tmp_path / "in", tmp_path / "run")
    config = yaml.safe_load((run / "config.yaml").read_text())
    folder = tmp_path / "data"
    config["data"] = {
        "kind": "stdlib",
        "folder": str(folder),
        "validation_fraction": 0.05,
        "packing": config["data"]["packing"],
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert f"data.tokenizer.path = {folder / 'tokenizer.model'}: does not exist" in refusal(capsys, "pangu", run)
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(b"pieces")
    out = convert("pangu", "huggingface", run, tmp_path / "out")
    assert (out / "vocab.model").read_bytes() == b"pieces"
    assert json.loads((out / "tokenizer_config.json").read_text())["jieba"] is False


def test_documents_end_as_the_given_tokenizer_says(tmp_path: Path) -> None:
    """Files of Megatron name no such id, and that of the preset is another tokenizer's."""
    tokenizers = pytest.importorskip("tokenizers")
    foreign.write_megatron_port(tmp_path / "in", weights(), 1, rows=128, heads=HEADS, extras=False)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    words.add_special_tokens(["<|endoftext|>"])
    words.save(str(tmp_path / "tokenizer.json"))
    given = f"data.tokenizer={{kind: huggingface, path: {tmp_path / 'tokenizer.json'}}}"
    cases = {1: ("data=indexed_pangu",), 5: ("data.packing.eod=5",), 7: ("data.packing={eod: 7}",)}
    for eod, more in cases.items():
        run = convert("megatron", "pangu", tmp_path / "in", tmp_path / f"run{eod}", HEADS_GIVEN, given, *more)
        packing = yaml.safe_load((run / "config.yaml").read_text())["data"]["packing"]
        assert (packing["eod"], packing["pad"]) == (eod, None)


@pytest.mark.parametrize("source", ["huggingface", "megatron", "mindspore", "pangu"])
def test_malicious_pickles_run_nothing(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, attack = tmp_path / "in", Attack(tmp_path / "attacked")
    if source == "huggingface":
        foreign.write_huggingface(folder, weights(), HEADS)
        file = folder / "pytorch_model.bin"
        torch.save({"transformer.wte.weight": attack}, file)
        expected = f"{file}: holds posix.mkdir, which is not a tensor"
    elif source == "megatron":
        foreign.write_megatron_port(folder, weights(), 2, rows=128, heads=HEADS, extras=False)
        file = folder / "iter_0001000" / "mp_rank_01" / "model_optim_rng.pt"
        torch.save({"model": {}, "args": attack}, file)
        expected = f"{file}: holds posix.mkdir, which is not a tensor"
    elif source == "mindspore":
        foreign.write_slices(folder, weights(), 2, 2)
        file = folder / "word_embedding.npy"
        np.save(file, np.array([[attack]], dtype=object), allow_pickle=True)
        expected = f"{file}: is not an array of numbers"
    else:
        path = folder / "checkpoints" / "step-00000000"
        path.mkdir(parents=True)
        (path / "index.json").write_bytes(pickle.dumps(attack))
        expected = "index.json: is not JSON in UTF-8 ('utf-8' codec can't decode byte 0x80 in position 0: invalid start"
    assert expected in refusal(capsys, source, folder, HEADS_GIVEN)
    assert not attack_happened(tmp_path)


def attack_happened(folder: Path) -> bool:
    return (folder / "attacked").exists()


def test_a_plain_pickle_runs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither does a file in the format of before torch 1.6, which is no archive; and the attack is one."""
    for make in (lambda: pickle.dumps(Attack(tmp_path / "attacked")), None):
        folder = tmp_path / ("plain" if make else "legacy")
        foreign.write_megatron_port(folder, weights(), 1, rows=128, heads=HEADS, extras=False)
        file = folder / "iter_0001000" / "mp_rank_00" / "model_optim_rng.pt"
        if make:
            file.write_bytes(make())
        else:
            state = {"model": Attack(tmp_path / "attacked")}
            torch.save(state, file, _use_new_zipfile_serialization=False)
        assert str(file) in refusal(capsys, "megatron", folder)
        assert not attack_happened(tmp_path)
    pickle.loads(pickle.dumps(Attack(tmp_path / "attacked")))
    assert attack_happened(tmp_path)


def test_legacy_files_are_read(tmp_path: Path) -> None:
    """The format of before torch 1.6, in which the port's first users saved."""
    foreign.write_megatron_port(tmp_path / "in", weights(), 1, rows=128, heads=HEADS, extras=True)
    file = tmp_path / "in" / "iter_0001000" / "mp_rank_00" / "model_optim_rng.pt"
    torch.save(torch.load(file, weights_only=False), file, _use_new_zipfile_serialization=False)
    run = convert("megatron", "pangu", tmp_path / "in", tmp_path / "run", "model.vocab=67")
    assert torch.equal(logical(run)["layers.2.mlp.up.weight"], weights()["layers.2.mlp.up.weight"])


def test_everything_that_does_not_fit_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = foreign.mindspore_tensors(weights())
    del tensors["backbone.blocks.1.attention.dense2.weight"]
    tensors["backbone.blocks.0.output.projection.bias"] = torch.zeros(33, dtype=torch.float16)
    tensors["backbone.blocks.0.attention.rotary.weight"] = torch.zeros(2, 2, dtype=torch.float16)
    foreign.write_checkpoint(tmp_path / "a.ckpt", tensors)
    said = refusal(capsys, "mindspore", tmp_path / "a.ckpt", HEADS_GIVEN)
    for line in (
        "backbone.blocks.1.attention.dense2.weight: missing",
        "backbone.blocks.0.output.projection.bias: [33] in the files, [32] in the model",
        "backbone.blocks.0.attention.rotary.weight: [2, 2], not in the model",
    ):
        assert line in said


def test_ranks_and_slices_that_disagree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign.write_megatron_port(tmp_path / "megatron", weights(), 2, rows=128, heads=HEADS, extras=False)
    file = tmp_path / "megatron" / "iter_0001000" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    transformer = state["model"]["language_model"]["transformer"]
    del transformer["layers.0.attention.key.bias"]
    transformer["layers.1.mlp.dense_h_to_4h.weight"] = torch.zeros(3, 32)
    torch.save(state, file)
    said = refusal(capsys, "megatron", tmp_path / "megatron", "model.vocab=67")
    assert "language_model.transformer.layers.0.attention.key.bias: only in one of" in said
    assert "language_model.transformer.layers.1.mlp.dense_h_to_4h.weight: [3, 32] in" in said

    foreign.write_slices(tmp_path / "slices", weights(), 2, 2)
    next((tmp_path / "slices").rglob("filerted_3.ckpt")).unlink()
    said = refusal(capsys, "mindspore", tmp_path / "slices", HEADS_GIVEN)
    assert "backbone.blocks.0.attention.dense1.weight: 1 of its 4 slices are missing" in said
    assert "backbone.blocks.0.layernorm1.gamma" not in said


def test_heads_are_asked_for_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign.write_checkpoint(tmp_path / "a.ckpt", foreign.mindspore_tensors(weights()))
    said = refusal(capsys, "mindspore", tmp_path / "a.ckpt")
    assert "model.heads = (missing): the files do not store it" in said
    assert "model.heads = 5: must divide model.hidden = 32" in refusal(
        capsys, "mindspore", tmp_path / "a.ckpt", "model.heads=5"
    )
    foreign.write_huggingface(tmp_path / "in", weights(), HEADS)
    said = refusal(capsys, "huggingface", tmp_path / "in", "model.heads=4", "model.hidden=64")
    assert "model.heads = 4: the files have 8" in said
    assert "model.hidden = 64: the files have 32" in said
    foreign.write_megatron_port(tmp_path / "megatron", weights(), 1, rows=128, heads=HEADS, extras=False)
    said = refusal(capsys, "megatron", tmp_path / "megatron", "model=pangu_2_6b")
    assert "model.heads = 32: the files have 8" in said
    assert "model.layers = 32: the files have 3" in said


def test_models_that_a_format_cannot_express(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign.write_huggingface(tmp_path / "in", weights(), HEADS)
    said = refusal(capsys, "huggingface", tmp_path / "in", "model.final_norm=after_query", to="megatron")
    assert "model.final_norm = after_query: cannot be expressed in Megatron's PanGu-α port" in said
    sparse = "model.sparse={kind:strided,block:4,local_blocks:1,stride:2}"
    said = refusal(capsys, "huggingface", tmp_path / "in", sparse, to="megatron")
    assert "the files have null" in said
    assert "model.sparse = " in said
    said = refusal(capsys, "huggingface", tmp_path / "in", "--tensor", "3", to="megatron")
    assert "tensor-parallel size 3: must divide the 8 (key) heads" in said
    config = json.loads((tmp_path / "in" / "config.json").read_text())
    for changed, words in (
        ({"model_type": "bert"}, "model_type = bert: is not supported"),
        ({"scale_attn_weights": False}, "scale_attn_weights = false: is not supported"),
        ({"activation_function": "relu"}, "activation_function = relu: is none of gelu_new, gelu"),
    ):
        (tmp_path / "in" / "config.json").write_text(json.dumps({**config, **changed}))
        assert words in refusal(capsys, "huggingface", tmp_path / "in")


@pytest.mark.parametrize("preset", ["pangu_350m", "qwen3_8b", "deepseek_v3_671b"])
def test_refusals_write_values_as_yaml(preset: str) -> None:
    model = config(f"+config={preset}").model
    kinds = [name for name, entry in load_table("model_types").items() if "means" in entry]
    refusals = [str(problem) for kind in kinds for problem in inexpressible(model, kind)]
    assert any("; [false] can" in said for said in refusals)
    assert not [said for said in refusals if re.search(r"\b(True|False|None)\b|'[a-z_]+'", said)]


def test_files_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for source, words in (
        ("pangu", "no checkpoint here"),
        (
            "huggingface",
            ("config.json: cannot be read"),
        ),
        ("megatron", "no mp_rank_00 folder"),
        ("mindspore", "no .ckpt file here"),
    ):
        assert words in refusal(capsys, source, folder)
    (folder / "a.ckpt").write_bytes(b"this is text and no protocol buffer")
    assert "is not a MindSpore checkpoint" in refusal(capsys, "mindspore", folder)
    output = tmp_path / "made"
    output.mkdir()
    words = ["--from", "pangu", "--input", str(folder), "--output"]
    assert main([*words, str(output), "--to", "pangu"]) == 2
    assert "exists already" in capsys.readouterr().err
    card = tmp_path / "made.ckpt.md"
    card.touch()
    assert main([*words, str(tmp_path / "made.ckpt"), "--to", "mindspore"]) == 2
    assert f"{card} exists already" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "other"), "--to", "mindspore"]) == 2
    assert f"must end in .ckpt for MindSpore, e.g. {tmp_path}/other.ckpt\n" in capsys.readouterr().err


def anonymous() -> int:
    """Bytes of this process's memory that no file stands behind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def growth(words: list[str]) -> int:
    """Bytes by which memory grows at most while the tensors are converted."""
    grew, over = [0], threading.Event()

    def measured(*arguments: Any) -> None:
        before = anonymous()

        def watch() -> None:
            while not over.wait(0.0005):
                grew[0] = max(grew[0], anonymous() - before)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            convert_tensors(*arguments)
        finally:
            over.set()
            watcher.join()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("tools.convert_checkpoint.convert", measured)
        assert main(words) == 0
    return grew[0]


def tell_growth(commands: list[list[str]]) -> None:
    """Print the growth of each command, which runs in a process of its own."""
    with FakeTensorMode():  # what it imports takes 80 MB once
        fake = torch.empty(1)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(fake, io.BytesIO())
    for words in commands:
        if (child := os.fork()) == 0:
            print(f"grew {growth(words)}", flush=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """52 MiB of weights, the largest of 4 MiB: memory grows by at most four of it, and 8 MiB for all else."""
    shapes = pangu_shapes(16, 256, 4096, 16)
    tensors = {name: torch.zeros(shape) + 1 for name, shape in shapes.items()}
    largest = max(tensor.nbytes for tensor in tensors.values())
    assert (largest, sum(tensor.nbytes for tensor in tensors.values()) // 2**20) == (4 * 2**20, 52)
    foreign.write_checkpoint(tmp_path / "a.ckpt", foreign.mindspore_tensors(tensors))
    ways = [("mindspore", "pangu", "a.ckpt")]
    ways += [("pangu", target, "to_pangu") for target in ("huggingface", "megatron", "mindspore")]
    commands = []
    for source, target, start in ways:
        output = tmp_path / f"to_{target}{'.ckpt' * (target == 'mindspore')}"
        words = ["--from", source, "--to", target, "--input", tmp_path / start, "--output", output]
        commands.append([*map(str, words), "model.heads=4"])
    done = run_ranks(1, tell_growth, commands)
    assert done.returncode == 0, done.stderr
    grew = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("grew ")]
    assert len(grew) == len(commands)
    assert max(grew) < 4 * largest + 8 * 2**20, grew
