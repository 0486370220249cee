"""An index is believed only as far as it is checked, whoever wrote it; its own checksum is right in all of these."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from pangu.checkpoint.files import Slice, checkpoint_path, commit, list_checkpoints, start, write_slices
from pangu.checkpoint.index import checksum, cover, find_damage, read_index, require_facts
from pangu.checkpoint.reading import load
from pangu.checkpoint.safetensors_file import write_safetensors
from pangu.common.errors import UserError
from tests.pace import processor_time_below

FACTS = {
    "step": 5,
    "skipped": 1,
    "samples": 20,
    "loss_scale": {"scale": 1.0, "clean_steps": 0},
    "watch": {"losses": [1.5], "skipped_in_a_row": 0, "rollbacks": [], "left_out": 0},
    "identity": {"optimizer.name": "adam"},
    "layout": {"tensor": 2},
}


def write_checkpoint(folder: Path, step: int = 5) -> Path:
    """Two tensors, one of them in two pieces."""
    path = checkpoint_path(folder, step)
    start(path)
    whole = torch.arange(6.0).view(2, 3)
    pieces = [("weight/a", Slice(whole[:, i : i + 2], (2, 3), (0, i))) for i in (0, 2)]
    others = [("weight/b", Slice(torch.ones(4, dtype=torch.bfloat16), (4,), (0,)))]
    commit(path, [write_slices(path, 0, pieces[:1]), write_slices(path, 1, pieces[1:] + others)], FACTS)
    return path


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    """Change an index by the way, and its checksum with it."""
    index = json.loads((path / "index.json").read_text())
    del index["checksum"]
    changed = change(index) or index
    text = json.dumps({**changed, "checksum": checksum(changed)} if isinstance(changed, dict) else changed)
    (path / "index.json").write_text(text)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoints")


def piece(index: Any, name: str = "weight/a", number: int = 0) -> Any:
    return index["tensors"][name]["pieces"][number]


FILE = "tensors-00000-00000.safetensors"
CRAFTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a piece is missing": (lambda i: i["tensors"]["weight/a"]["pieces"].pop(), "do not cover"),
    "no pieces": (lambda i: i["tensors"]["weight/a"].update(pieces=[]), "do not cover"),
    "a piece twice": (lambda i: i["tensors"]["weight/a"]["pieces"].append(piece(i)), "used twice|do not cover"),
    "pieces overlap": (lambda i: piece(i, number=1).update(offsets=[0, 1]), "do not cover"),
    "beyond the tensor": (lambda i: piece(i, number=1).update(offsets=[0, 7]), "do not cover"),
    "a larger tensor": (lambda i: i["tensors"]["weight/a"].update(shape=[2, 10**15]), "do not cover"),
    "a huge piece": (
        lambda i: [entry.update(shape=[10**15]) for entry in (i["tensors"]["weight/b"], piece(i, "weight/b"))],
        "does not fit into",
    ),
    "negative dimensions": (
        lambda i: [entry.update(shape=[-2, -3]) for entry in (i["tensors"]["weight/a"], piece(i))],
        "not a valid tensor entry",
    ),
    "sixty dimensions": (
        lambda i: [entry.update(shape=[1] * 60) for entry in (i["tensors"]["weight/b"], piece(i, "weight/b"))],
        "not a valid tensor entry",
    ),
    "a fraction": (lambda i: i["tensors"]["weight/a"].update(shape=[2.0, 3]), "not a valid tensor entry"),
    "another function of torch": (lambda i: i["tensors"]["weight/a"].update(dtype="load"), "not a valid tensor"),
    "out of the folder": (lambda i: piece(i).update(file=f"../{FILE}"), "is not among the files"),
    "an absolute path": (lambda i: piece(i).update(file="/etc/passwd"), "is not among the files"),
    "a file that is not listed": (lambda i: i["files"].pop(FILE), "is not among the files"),
    "a listed file out of the folder": (lambda i: i["files"].update({f"../{FILE}": i["files"][FILE]}), "files: "),
    "no checksum": (lambda i: i["files"][FILE].pop("sha256"), "files: "),
    "a negative size": (lambda i: i["files"][FILE].update(bytes=-1), "files: "),
    "a file that is a number": (lambda i: i["files"].update({FILE: 1}), "files: "),
    "no tensors": (lambda i: i.pop("tensors"), "tensors or files are missing"),
    "a list": (lambda _: [1], "not the index"),
    "a negative step": (lambda i: i.update(step=-5), "step = -5"),
    "samples in words": (lambda i: i.update(samples="many"), "samples = 'many'"),
    "a loss scale of 0": (lambda i: i["loss_scale"].update(scale=0), "loss_scale = "),
    "more steps skipped than made": (lambda i: i.update(skipped=6), "6 of 5 steps are marked as skipped"),
    "choices without figures": (lambda i: i.update(choices={"milliseconds": {"attention": 5}}), "choices = "),
    "choices with words": (lambda i: i.update(choices={"milliseconds": {"attention": {"a": "x"}}}), "choices = "),
    "a watch of another shape": (lambda i: i["watch"].update(rollbacks=[{"step": 1}]), "watch = "),
    "a layout that is a text": (lambda i: i.update(layout="x"), "layout = 'x'"),
    "an escape sequence": (
        lambda i: i["tensors"].update({"weight/\x1b[31m": i["tensors"].pop("weight/b")}),
        "not a valid tensor",
    ),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_a_crafted_index_is_refused(checkpoint: Path, name: str) -> None:
    change, words = CRAFTED[name]

    def apply(index: Any) -> Any:
        changed = change(index)
        return changed if isinstance(changed, list) and name == "a list" else None

    rewrite(checkpoint, apply)
    with processor_time_below(1.0), pytest.raises(UserError, match=words) as caught:
        read_index(checkpoint)
    assert str(caught.value).startswith(f"{checkpoint / 'index.json'}: ")
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("fact", ["step", "samples", "skipped", "loss_scale", "identity"])
def test_a_run_needs_its_facts(checkpoint: Path, fact: str) -> None:
    rewrite(checkpoint, lambda index: {key: value for key, value in index.items() if key != fact})
    index = read_index(checkpoint)
    with pytest.raises(UserError, match=rf"index\.json: damaged: {fact} missing"):
        require_facts(checkpoint, index, "step", "skipped", "samples", "loss_scale", "identity")


@pytest.mark.parametrize(
    ("described", "key"),
    [
        ({"weight/a@0,0": torch.zeros(2, 2)}, "weight/a@0,0"),  # as it should be
        ({"weight/a@0,0": torch.zeros(4)}, "weight/a@0,0"),
        ({"weight/a@0,0": torch.zeros(2, 2, dtype=torch.float64)}, "weight/a@0,0"),
        ({"weight/other": torch.zeros(2, 2)}, "weight/a@0,0"),
    ],
    ids=["as listed", "shape", "format", "name"],
)
def test_files_hold_what_the_index_says(checkpoint: Path, described: dict[str, Tensor], key: str) -> None:
    (checkpoint / FILE).unlink()
    digest = write_safetensors(checkpoint / FILE, described, described.values())
    size = (checkpoint / FILE).stat().st_size
    rewrite(checkpoint, lambda index: index["files"].update({FILE: {"bytes": size, "sha256": digest}}))
    problems = find_damage(checkpoint, read_index(checkpoint))
    as_listed = list(described) == [key] and described[key].shape == (2, 2) and described[key].dtype == torch.float32
    assert problems == (
        [] if as_listed else [f"{checkpoint / FILE}: damaged: no tensor '{key}' of shape [2, 2] and format F32"]
    )


def test_a_file_that_is_no_safetensors_file_is_named(checkpoint: Path) -> None:
    content = b"\xff" * 100
    (checkpoint / FILE).write_bytes(content)
    entry = {"bytes": 100, "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(checkpoint, lambda index: index["files"].update({FILE: entry}))
    index = read_index(checkpoint)
    (problem,) = find_damage(checkpoint, index)
    assert problem.startswith(f"{checkpoint / FILE}: damaged: it is not a safetensors file")
    with pytest.raises(UserError, match=f"{FILE}: cannot be read"):
        load(checkpoint, index, [("weight/a", Slice(torch.empty(2, 3), (2, 3), (0, 0)))])


@pytest.mark.parametrize("name", ["index.json", FILE])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_links_and_pipes_in_a_checkpoint_are_refused(checkpoint: Path, tmp_path: Path, name: str, kind: str) -> None:
    moved = tmp_path / name
    shutil.move(checkpoint / name, moved)
    if kind == "link":
        (checkpoint / name).symlink_to(moved)
    else:
        os.mkfifo(checkpoint / name)
    words = "is a symbolic link" if kind == "link" else "is not a regular file"
    with pytest.raises(UserError, match=f"{name}: {words}"):
        raise UserError("\n".join(find_damage(checkpoint, read_index(checkpoint))))


def test_links_are_no_checkpoints_of_a_run(checkpoint: Path) -> None:
    folder = checkpoint.parent
    (folder / "step-00000009").symlink_to(checkpoint)
    (folder / "step-abcdefgh").mkdir()
    (folder / "step-00000008").write_text("a file")
    assert list_checkpoints(folder) == [checkpoint]
    assert read_index(folder / "step-00000009")["step"] == 5  # a link that the user names is followed


def test_a_planted_folder_of_a_save_is_not_written_into(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".step-00000005.partial").symlink_to(elsewhere)
    write_checkpoint(tmp_path / "checkpoints")
    assert [file.name for file in elsewhere.iterdir()] == ["mine"]


Box = tuple[tuple[int, int], tuple[int, int]]


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 4))] * 2), max_size=5),
    st.booleans(),
)
@example((1, 1), [((0, 0), (0, 2)), ((0, 1), (0, 1))], False)
def test_covering_is_that_every_element_is_in_one_box(shape: tuple[int, int], boxes: list[Box], cut: bool) -> None:
    """Against counting the elements one by one; random boxes, and half of the time those of a cut. Not even an empty
    box may reach outside."""
    if cut:
        low, wide = 1 + shape[0] // 2, shape[1]
        boxes = [((0, low), (0, wide)), ((low, shape[0] - low), (0, wide - wide // 2))]
        boxes.append(((low, shape[0] - low), (wide - wide // 2, wide // 2)))
        boxes = [box for box in boxes if box[0][0] + box[0][1] <= shape[0]]
    counts = torch.zeros(10, 10, dtype=torch.int64)
    for (top, height), (left, width) in boxes:
        counts[top : top + height, left : left + width] += 1
    expected = torch.zeros(10, 10, dtype=torch.int64)
    expected[: shape[0], : shape[1]] = 1
    pieces = [{"offsets": [top, left], "shape": [height, width]} for (top, height), (left, width) in boxes]
    inside = all(top + height <= shape[0] and left + width <= shape[1] for (top, height), (left, width) in boxes)
    assert cover(list(shape), pieces) == (inside and torch.equal(counts, expected))


def test_many_pieces_take_a_time_in_proportion_to_their_number() -> None:
    """Cut along either dimension. Comparing each piece with each would take some 10^8 steps."""
    count = 20_000
    with processor_time_below(10.0):
        for dim in (0, 1):
            pieces = [{"offsets": [0, i][:: 1 - 2 * dim], "shape": [1, 1]} for i in range(count)]
            assert cover([1, count][:: 1 - 2 * dim], pieces)
            assert not cover([1, count][:: 1 - 2 * dim], copy.copy(pieces[1:]))
