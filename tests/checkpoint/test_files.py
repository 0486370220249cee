"""Checkpoints are whole or absent, and damage is found and named."""

from __future__ import annotations

import errno
import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pangu.checkpoint import files
from pangu.checkpoint.files import (
    FORMAT,
    Slice,
    checkpoint_path,
    commit,
    list_checkpoints,
    prune,
    start,
    superseded,
    tidy,
    write_slices,
)
from pangu.checkpoint.index import NewerFormatError, find_damage, read_index
from pangu.checkpoint.reading import load, newest_checkpoint
from pangu.checkpoint.status import CheckpointStatus, continuation_order, read_status, write_status
from pangu.common.errors import UserError
from pangu.config.checkpoint import CheckpointConfig
from tests.configs import config

TENSORS = {"weight/a": torch.arange(6.0).view(2, 3), "exp_avg/a": torch.ones(2, 3), "weight/b": torch.zeros(4).double()}


def whole(tensor: torch.Tensor) -> Slice:
    return Slice(tensor, tuple(tensor.shape), (0,) * tensor.dim())


def write(folder: Path, step: int = 3) -> Path:
    path = checkpoint_path(folder, step)
    start(path)
    written = write_slices(path, 0, [(name, whole(tensor)) for name, tensor in TENSORS.items()])
    commit(path, [written], {"step": step})
    return path


def read(path: Path) -> dict[str, torch.Tensor]:
    wanted = {name: torch.full_like(tensor, -1.0) for name, tensor in TENSORS.items()}
    load(path, read_index(path), [(name, whole(tensor)) for name, tensor in wanted.items()])
    return wanted


@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_any_cut_can_be_read_by_any_other(rows: int, columns: int, data: st.DataObject) -> None:
    tensor = torch.arange(float(rows * columns)).view(rows, columns)

    def cuts(size: int) -> list[int]:
        return [0, *sorted(data.draw(st.sets(st.integers(1, size)) if size > 1 else st.just(set()))), size]

    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint_path(Path(folder), 1)
        start(path)
        bounds, dim = cuts(rows), 0
        if data.draw(st.booleans()):
            bounds, dim = cuts(columns), 1
        parts = []
        for writer, (low, high) in enumerate(itertools.pairwise(bounds)):
            part = tensor.narrow(dim, low, high - low)
            offsets = (low, 0) if dim == 0 else (0, low)
            parts.append(write_slices(path, writer, [("weight/a", Slice(part, (rows, columns), offsets))]))
        commit(path, parts, {})
        top, left = data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))
        wanted = torch.full((rows - top, columns - left), -1.0)
        load(path, read_index(path), [("weight/a", Slice(wanted, (rows, columns), (top, left)))])
        assert torch.equal(wanted, tensor[top:, left:])


def test_round_trip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "FILE_BYTES", 30)  # several files
    path = write(tmp_path)
    assert len(list(path.glob("*.safetensors"))) > 1
    assert read_index(path)["step"] == 3
    restored = read(path)
    assert all(
        torch.equal(restored[name], tensor) and restored[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def retention(keep: int, **keys: Any) -> CheckpointConfig:
    return replace(config().checkpoint, keep=keep, **keys)


def test_half_written_checkpoints_are_not_listed_and_the_oldest_go(tmp_path: Path) -> None:
    for step in (1, 2, 10):
        write(tmp_path, step)
    (tmp_path / ".step-00000011.partial").mkdir()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001", "step-00000002", "step-00000010"]
    prune(tmp_path, retention(0))
    assert len(list_checkpoints(tmp_path)) == 3
    prune(tmp_path, retention(1, keep_every=2))  # 2 and 10 stay for ever
    assert len(list_checkpoints(tmp_path)) == 3
    write_status(tmp_path / "step-00000010", CheckpointStatus(proven=True))
    prune(tmp_path, retention(2))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002", "step-00000010"]


def test_what_a_rollback_may_need_is_not_pruned(tmp_path: Path) -> None:
    """The last proven checkpoint, and the one that is proven next; not what is condemned."""
    for step in range(1, 8):
        write(tmp_path, step)
    for step, status in {1: {"proven": True}, 2: {"proven": True}, 3: {"condemned": True}}.items():
        write_status(tmp_path / f"step-0000000{step}", CheckpointStatus(**status))
    prune(tmp_path, retention(1))
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["2", "4", "7"]
    prune(tmp_path, retention(3))
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["2", "4", "7"]


def test_the_first_checkpoint_of_a_period_and_the_best_stay() -> None:
    """Pruned after every save, as in a run; those of versions that noted neither, and condemned ones, are nothing."""
    hours = (0.0, 0.4, 0.9, 1.6, 2.1, 2.4, None, 2.9, 3.8)
    losses = (5.0, 4.0, 1.0, 3.0, None, 2.0, 9.0, 8.0, 7.0)

    def left(keys: dict[str, Any], condemned: int = 0) -> str:
        kept: list[tuple[Path, CheckpointStatus]] = []
        for step, (hour, loss) in enumerate(zip(hours, losses, strict=True), start=1):
            saved_s = None if hour is None else 3600 * (500_000 + hour)
            status = CheckpointStatus(step != condemned, step == condemned, saved_s=saved_s, validation_loss=loss)
            kept.append((Path(f"step-{step:08d}"), status))
            old = superseded(kept, retention(2, **keys))
            kept = [entry for entry in kept if entry[0] not in old]
        return "".join(path.name[-1] for path, _ in kept)

    assert left({}) == "89"
    assert left({"keep_every_hours": 1.0}) == "14589"
    assert left({"keep_every_hours": 2.0}) == "1589"
    assert left({"keep_every_hours": 1.0}, condemned=1) == "24589"
    assert left({"keep_best": 1}) == "389"
    assert left({"keep_best": 3}) == "34689"
    assert left({"keep_best": 1}, condemned=3) == "689"
    assert left({"keep_best": 1, "keep_every_hours": 2.0, "keep_every": 7}) == "135789"


def test_where_a_run_continues() -> None:
    """From the newest checkpoint; if that is condemned, from the newest proven one before any that is not."""
    new, proven, condemned = CheckpointStatus(), CheckpointStatus(proven=True), CheckpointStatus(condemned=True)
    for statuses, order in (
        ([], ""),
        ([proven, new, new], "210"),
        ([proven, condemned, new], "20"),
        ([new, proven, new, condemned], "120"),
        ([condemned, condemned], ""),
    ):
        found = continuation_order([(Path(str(i)), status) for i, status in enumerate(statuses)])
        assert "".join(map(str, found)) == order
    assert new.with_fault("x").condemned
    assert not proven.with_fault("x").condemned
    assert proven.with_fault("x").with_fault("y").condemned


def test_a_run_folder_stands_for_its_newest_checkpoint_that_is_not_condemned(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) == tmp_path
    paths = [write(tmp_path / "checkpoints", step) for step in (1, 2)]
    assert newest_checkpoint(tmp_path) == paths[1]
    write_status(paths[1], CheckpointStatus(condemned=True))
    assert newest_checkpoint(tmp_path) == paths[0]
    write_status(paths[0], CheckpointStatus(condemned=True))
    assert newest_checkpoint(tmp_path) == paths[1]


@pytest.mark.parametrize("content", ["", "[]", '{"proven": 1}', '{"faults": [3], "condemned": true}', "\0"])
def test_a_standing_that_cannot_be_read_says_nothing(content: str, tmp_path: Path) -> None:
    (tmp_path / "standing.json").write_text(content)
    assert read_status(tmp_path) == CheckpointStatus()
    status = CheckpointStatus(True, True, ("step 3: the loss is nan",))
    write_status(tmp_path, status)
    assert read_status(tmp_path) == status


@pytest.mark.parametrize("fails", ["_write_file", "_write_index", "flush"])
def test_a_full_disk_is_told_and_the_older_checkpoint_stays(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, fails, full)
    with pytest.raises(UserError, match=r"step-00000002: the checkpoint could not be written .*No space left"):
        write(tmp_path, 2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000001"]
    monkeypatch.undo()
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000001"]
    write(tmp_path, 2)
    assert len(list(tmp_path.iterdir())) == 2  # what the failed attempt left is gone


def test_damage_is_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    index = read_index(path)
    assert find_damage(path, index) == []
    file = next(path.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert find_damage(path, index) == [f"{file}: damaged: checksum mismatch"]
    assert find_damage(path, index, 1, 2) == []  # the one file is the first process's to read
    file.write_bytes(content[:-4])
    assert find_damage(path, index) == [f"{file}: damaged: {len(content) - 4} bytes instead of {len(content)}"]
    file.unlink()
    assert find_damage(path, index) == [f"{file}: cannot be read (No such file or directory)"]


def test_any_changed_figure_of_the_index_is_found(tmp_path: Path) -> None:
    path = write(tmp_path) / "index.json"
    path.write_text(path.read_text().replace('"step": 3', '"step": 4'))
    with pytest.raises(UserError, match=r"index\.json: damaged"):
        read_index(path.parent)


def test_later_checkpoints_and_remains_make_way(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    for rest in (".step-00000004.partial", ".step-00000001.old"):
        (tmp_path / rest).mkdir()
    assert tidy(tmp_path, 1) == [tmp_path / "step-00000002.aside", tmp_path / "step-00000003.aside"]
    assert list_checkpoints(tmp_path) == [tmp_path / "step-00000001"]
    assert len(list(tmp_path.iterdir())) == 3
    write(tmp_path, 2)
    assert tidy(tmp_path, 1) == [tmp_path / "step-00000002.aside"]  # replaces the one of that name


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no checkpoint here \(index.json is missing\)$"):
        read_index(tmp_path)
    write(tmp_path / "run" / "checkpoints", 3)
    with pytest.raises(UserError, match=r"run: no checkpoint here .* use its newest checkpoint .*/step-00000003$"):
        read_index(tmp_path / "run")
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        read_index(tmp_path)
    (tmp_path / "index.json").write_text("{}")
    with pytest.raises(UserError, match="is not the index of a pangu checkpoint"):
        read_index(tmp_path)
    (tmp_path / "index.json").write_text(json.dumps({"format": FORMAT, "version": 99}))
    with pytest.raises(NewerFormatError, match=r"format version 99 is newer than this pangu supports \(3\)"):
        read_index(tmp_path)


def test_values_that_are_not_finite_are_damage(tmp_path: Path) -> None:
    """They make a run that continues from them lose its work, whoever has written them."""
    path = checkpoint_path(tmp_path, 3)
    start(path)
    tensors = {"weight/a": torch.full((2, 3), 3e38), "weight/b": torch.tensor([1.0, float("nan")])}
    commit(path, [write_slices(path, 0, [(name, whole(tensor)) for name, tensor in tensors.items()])], {})
    (said,) = find_damage(path, read_index(path))
    assert said == f"{path}/tensors-00000-00000.safetensors: damaged: 'weight/b@0': has values that are not finite"


def test_tensors_that_do_not_fit_are_all_named(tmp_path: Path) -> None:
    path = write(tmp_path)
    wanted = {"weight/a": torch.empty(3, 2), "weight/b": torch.empty(4), "weight/c": torch.empty(1)}
    with pytest.raises(UserError) as caught:
        load(path, read_index(path), [(name, whole(tensor)) for name, tensor in wanted.items()])
    assert "weight/a: [2, 3] in the checkpoint, [3, 2] in the model" in str(caught.value)
    assert "weight/c: not in the checkpoint" in str(caught.value)
