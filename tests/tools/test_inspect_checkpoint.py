"""The inspector tells what a checkpoint holds, finds damage, and compares two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pangu.checkpoint.files import Slice, amend, checkpoint_path, commit, start, write_slices
from pangu.checkpoint.index import checksum, read_index
from pangu.checkpoint.status import CheckpointStatus, write_status
from tools.inspect_checkpoint import main

FACTS = {
    "step": 5,
    "samples": 20,
    "skipped": 0,
    "layout": {"tensor": 2, "sequence": False},
    "identity": {"optimizer.name": "adam", "model.window": None},
}


def write(folder: Path, step: int, tensors: dict[str, torch.Tensor]) -> Path:
    path = checkpoint_path(folder, step)
    start(path)
    slices = [(name, Slice(tensor, tuple(tensor.shape), (0,) * tensor.dim())) for name, tensor in tensors.items()]
    commit(path, [write_slices(path, 0, slices)], {**FACTS, "step": step})
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write(tmp_path, 5, {"weight/a": torch.zeros(2, 3), "exp_avg/a": torch.ones(2, 3), "weight/c": torch.ones(2)})


def test_words_and_json_say_the_same(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(checkpoint), "--verify"]) == 0
    words = capsys.readouterr().out
    for expected in (
        "step 5, 20 samples",
        "tensor 2, sequence false\n",
        "model.window null\n",
        ", intact",
        "weight       2 tensors, 8 elements",
        "[2, 3]",
    ):
        assert expected in words
    assert main([str(checkpoint), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["kinds"] == {"weight": {"tensors": 2, "elements": 8}, "exp_avg": {"tensors": 1, "elements": 6}}
    assert told["tensors"]["weight/a"] == {"shape": [2, 3], "dtype": "float32", "pieces": 1}
    assert told["bytes"] == sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert not told["verified"]


def test_a_run_stands_for_its_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (write(tmp_path / "checkpoints", step, {"weight/a": torch.ones(1)}) for step in (5, 7))
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"{two}: step 7, ")
    assert main([str(one), "--diff", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["difference"]["other"] == str(two)


def test_rollbacks_are_told(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    event = {"step": 9, "fault": "the loss is nan", "back_to": 5, "left_out": [20, 40]}
    amend(checkpoint, {**read_index(checkpoint), "watch": {"rollbacks": [event]}})
    assert main([str(checkpoint), "--verify"]) == 0
    expected = "went back    from step 9 to 5, skipping samples 20 to 39: the loss is nan"
    assert expected in capsys.readouterr().out


def test_the_standing_is_told(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fault = "step 7: the loss is nan"
    for status, told in (
        (None, "not proven yet"),
        (CheckpointStatus(proven=True), "proven"),
        (CheckpointStatus().with_fault(fault), f"condemned ({fault})"),
    ):
        if status is not None:
            write_status(checkpoint, status)
        assert main([str(checkpoint)]) == 0
        assert f"\nstatus       {told}\n" in capsys.readouterr().out
    assert main([str(checkpoint), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["standing"]
    assert told | {"proven": False, "condemned": True, "faults": [fault]} == told


def test_damage_is_an_error(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (file,) = checkpoint.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert main([str(checkpoint)]) == 0
    assert main([str(checkpoint), "--verify"]) == 2
    assert f"error: {file}: damaged" in capsys.readouterr().err


def test_two_checkpoints_are_compared(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = torch.zeros(2, 3)
    values[1, 2] = -0.5
    there = {"weight/a": values, "exp_avg/a": torch.ones(3, 2), "weight/b": torch.ones(2)}
    other = write(checkpoint.parent, 6, there)
    assert main([str(checkpoint), "--diff", str(other), "--json"]) == 0
    difference = json.loads(capsys.readouterr().out)["difference"]
    assert difference["largest"] == {"weight/a": 0.5, "exp_avg/a": "[2, 3] here, [3, 2] there"}
    assert (difference["only_here"], difference["only_there"]) == (["weight/c"], ["weight/b"])
    assert main([str(checkpoint), "--diff", str(other)]) == 0
    words = capsys.readouterr().out
    assert "0.5" in words
    assert f"only in {other}: weight/b" in words


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("damage", ["a bit", "missing", "cut", "no index"])
def test_damaged_checkpoints_are_not_compared(
    checkpoint: Path, side: int, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    both = [checkpoint, write(checkpoint.parent, 6, {"weight/a": torch.zeros(2, 3)})]
    (file,) = both[side].glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    if damage == "no index":
        (both[side] / "index.json").unlink()
    elif damage == "missing":
        file.unlink()
    else:
        file.write_bytes(content if damage == "a bit" else content[:-4])
    assert main([str(both[0]), "--diff", str(both[1])]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert f": error: {both[side]}" in err
    assert err.count("\n") == 1


def test_escape_sequences_are_shown_as_such(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Facts of a run may be any text, and their checksum anyone can compute."""
    index = json.loads((checkpoint / "index.json").read_text())
    del index["checksum"]
    index["identity"] = {"optimizer.name": "\x1b]0;title\x07"}
    index["layout"] = {"\x9b31m": "\r"}
    index["watch"] = {"rollbacks": [{"step": 1, "fault": "\x1b[2J", "back_to": 0, "left_out": [0, 1]}]}
    (checkpoint / "index.json").write_text(json.dumps({**index, "checksum": checksum(index)}))
    assert main([str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert all(shown in out for shown in ("\\x1b]0;title\\x07", "\\x9b31m \\r", "\\x1b[2J"))
    assert not {"\x1b", "\x9b", "\r", "\x07"} & set(out)
