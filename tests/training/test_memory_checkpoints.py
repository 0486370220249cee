"""A run that loses a process and the memory of a node continues bit for bit from copies in memory, without the disk."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from pangu.checkpoint.files import partial_of
from pangu.common.errors import UserError
from pangu.training import loop, memory_checkpoints
from pangu.training.step import Trainer
from tests.end_to_end.commands import SAME_ATTENTION, SAME_PRODUCTS, SMALL, metrics, run_script
from tests.spawn import Program, repository, run_ranks
from tests.training.test_resume import first_file, flip, train

EVERY, STEPS, DIES_IN = 2, 9, 6
WORDS = (*SMALL, SAME_ATTENTION, SAME_PRODUCTS, "data=synthetic", "validation.every=0", "lr_schedule.warmup_steps=1")
LAYOUTS = {
    "zero 3": (2, ("parallel.zero=3",)),
    "pipeline 2": (2, ("parallel.pipeline=2",)),
    "tensor 2 x data 2": (4, ("parallel.tensor=2", "parallel.zero=1")),
}
POINTS = ("write_own", "exchange_bytes", "commit", "flush_figures")
"""Where the writer of a generation is killed; rank 0 flushes, the first rank of each node commits."""

SCRIPT = f"""
import os
from pathlib import Path

from pangu.checkpoint.files import partial_of
from pangu.common.errors import UserError
from pangu.pretrain import pretrain
from pangu.training import memory_checkpoints

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.environ["PANGU_MEMORY"] = f"NODES/{{2 * RANK // WORLD}}"
dies, point, calls = DIES, "POINT", [0]
original = getattr(memory_checkpoints, point)


def dying(*arguments):
    calls[0] += 1
    if point == "commit":
        files = sorted(partial_of(arguments[0]).glob("tensors-*"))
        with Path(f"NODES-files-{{RANK}}").open("a") as file:
            print(*(path.stat().st_ino for path in files), file=file)
        with Path(f"NODES-held-{{RANK}}").open("a") as file:
            print(*(path.name for path in arguments[0].parent.glob("step-*")), file=file)
        if calls[0] >= 4 and RANK == REFUSES:
            raise UserError("no room for the index")
    if calls[0] == {DIES_IN // EVERY} and RANK == dies:
        os._exit(9)
    return original(*arguments)


setattr(memory_checkpoints, point, dying)
if __name__ == "__main__":
    pretrain(Path({str(repository())!r}) / "configs")
"""


def start(folder: Path, layout: str, *words: str, dies: int = -1, point: str = "commit", refuses: int = -1) -> Program:
    """Run on two "nodes", each with half of the ranks and a folder for its memory; one `refuses` to commit."""
    world, keys = LAYOUTS[layout]
    folder.mkdir(exist_ok=True)
    script = folder / "dying.py"
    text = SCRIPT.replace("NODES", str(folder / "node")).replace("DIES", str(dies)).replace("POINT", point)
    text = text.replace("REFUSES", str(refuses))
    script.write_text(text, encoding="utf-8")
    every = (f"checkpoint.memory_every={EVERY}", "checkpoint.every=4", f"train.steps={STEPS}")
    return run_ranks(world, run_script, str(script), *WORDS, *keys, *every, f"train.output={folder / 'run'}", *words)


def cases() -> list[object]:
    """In CI the points of death take turns over layouts and nodes; each with each is tried with --all."""
    few = [("zero 3", "exchange_bytes", 1, 1), ("tensor 2 x data 2", "commit", 2, 0)]
    every = [
        (layout, point, dies, lost)
        for layout, (world, _) in LAYOUTS.items()
        for point in POINTS
        for dies in ((0,) if point == "flush_figures" else (0, world // 2))
        for lost in (0, 1)
    ]
    more = [pytest.param(*case, marks=pytest.mark.long) for case in every if case not in few]
    return [*few, *more]


@pytest.mark.parametrize(("layout", "point", "dies", "lost"), cases())
def test_a_run_that_lost_a_node_continues_from_memory(
    layout: str, point: str, dies: int, lost: int, tmp_path: Path
) -> None:
    assert start(tmp_path / "unbroken", layout, "checkpoint.memory_every=0").returncode == 0
    folder = tmp_path / "broken"
    died = start(folder, layout, dies=dies, point=point)
    assert 9 in died.statuses, died.stderr
    before = [line["loss"] for line in metrics(folder / "run")]
    shutil.rmtree(folder / "run" / "checkpoints")
    shutil.rmtree(folder / "node" / str(lost))
    done = start(folder, layout)
    assert done.returncode == 0, done.stderr
    assert (found := re.search(r"continuing from .*/node/.* \(step (\d)\)", done.stderr)), done.stderr
    assert int(found[1]) in (DIES_IN - EVERY, DIES_IN)
    assert len(before) - int(found[1]) <= 2 * EVERY
    losses = [line["loss"] for line in metrics(folder / "run")]
    assert losses == [line["loss"] for line in metrics(tmp_path / "unbroken" / "run")]
    assert metrics(folder / "run")[-1]["copies_sent_gib"] > 0
    assert not list((folder / "node").glob("*/*")), "an ended run leaves copies in memory"


def test_a_generation_is_written_into_the_memory_of_the_third_one_before_it(tmp_path: Path) -> None:
    assert start(tmp_path, "zero 3", "checkpoint.memory_every=1").returncode == 0
    for rank in (0, 1):
        files = [line.split() for line in (tmp_path / f"node-files-{rank}").read_text().splitlines()]
        assert len(files) == STEPS - 1
        assert {len(of_rank_and_buddy) for of_rank_and_buddy in files} == {2}
        assert files[3:] == files[:-3]
        assert len({*map(tuple, files)}) == 3


def test_generations_that_one_node_cannot_commit_leave_those_that_all_have(tmp_path: Path) -> None:
    done = start(tmp_path, "zero 3", "checkpoint.memory_every=1", refuses=1)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("no copy in memory: no room for the index") == STEPS - 1 - 3
    both = [(tmp_path / f"node-held-{rank}").read_text().splitlines() for rank in (0, 1)]
    newest = [max({*first.split()} & {*second.split()}, default="") for first, second in zip(*both, strict=True)]
    assert newest == ["", "step-00000001", "step-00000002", *["step-00000003"] * 5]


def test_the_disk_is_used_if_a_node_and_its_buddy_are_lost(tmp_path: Path) -> None:
    died = start(tmp_path, "zero 3", dies=1)
    assert 9 in died.statuses, died.stderr
    shutil.rmtree(tmp_path / "node")
    done = start(tmp_path, "zero 3")
    assert done.returncode == 0, done.stderr
    assert re.search(r"continuing from .*/run/checkpoints/step-00000004 \(step 4\)", done.stderr), done.stderr


def crash(output: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> list[Path]:
    """End a run of one process with an error in step 6, and return the generations of steps 2 and 4 in memory."""
    memory = output.with_name("memory")
    monkeypatch.setenv(memory_checkpoints.PLACE, str(memory))
    update = Trainer.update

    def fail(trainer: Trainer, flags: list[bool]) -> object:
        if trainer.step == 5:
            raise UserError("step 6 fails")
        return update(trainer, flags)

    monkeypatch.setattr(Trainer, "update", fail)
    with pytest.raises(UserError, match="step 6 fails"):
        train(output, 7, "checkpoint.memory_every=2", *words)
    monkeypatch.setattr(Trainer, "update", update)
    found = sorted(memory.glob("pangu-*/*/step-*"))
    assert [path.name for path in found] == ["step-00000002", "step-00000004"]
    return found


def test_damaged_copies_are_named_and_the_generation_before_or_the_disk_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = train(tmp_path / "unbroken", 7)
    for name, every, place in (("older", 100, "/memory/.*step 2"), ("disk", 3, "/disk/.*step 3")):
        words = (f"checkpoint.every={every}", "checkpoint.memory_every=2")
        *_, newest = crash(tmp_path / name, monkeypatch, *words)
        flip(file := first_file(newest))
        capsys.readouterr()
        assert train(tmp_path / name, 7, *words) == losses
        said = capsys.readouterr().err
        assert f"skipping a copy in memory: {file}: damaged: checksum" in said
        assert re.search(f"continuing from .*{place}", said), said
        assert not list((tmp_path / "memory").iterdir())


def test_a_damaged_checkpoint_does_not_replace_older_copies_nor_stray_files_stop_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = train(tmp_path / "unbroken", 7)
    words = ("checkpoint.every=5", "checkpoint.memory_every=2")
    *_, newest = crash(tmp_path / "run", monkeypatch, *words)
    flip(first_file(tmp_path / "run" / "checkpoints" / "step-00000005"))
    for folder in (newest.parent, newest.parent.parent):
        (folder / ".stray").write_text("", encoding="utf-8")
        (folder / ".link").symlink_to(tmp_path / "unbroken")
    capsys.readouterr()
    assert train(tmp_path / "run", 7, *words) == losses
    assert re.search(r"continuing from .*/memory/.*step 4", capsys.readouterr().err)
    assert (tmp_path / "unbroken" / "metrics.jsonl").exists()


def test_a_run_folder_with_a_pipe_for_the_name_of_the_copies_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(memory_checkpoints.PLACE, str(tmp_path / "memory"))
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / memory_checkpoints.ID)
    with pytest.raises(UserError, match="is not a regular file"):
        train(tmp_path / "run", 3, "checkpoint.memory_every=2")


def test_the_update_after_a_copy_waits_until_the_copy_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a crash never repeats more than `checkpoint.memory_every` steps."""
    monkeypatch.setenv(memory_checkpoints.PLACE, str(tmp_path / "memory"))
    update, write_own, newest = Trainer.update, memory_checkpoints.write_own, []

    def late(*arguments: Any) -> Any:
        time.sleep(0.3)
        return write_own(*arguments)

    def note(trainer: Trainer, *arguments: Any) -> Any:
        newest.append(max((path.name for path in (tmp_path / "memory").glob("*/*/step-*")), default=""))
        return update(trainer, *arguments)

    monkeypatch.setattr(memory_checkpoints, "write_own", late)
    monkeypatch.setattr(Trainer, "update", note)
    train(tmp_path / "run", 6, "checkpoint.memory_every=2")
    assert newest == ["", "", *["step-00000002"] * 2, *["step-00000004"] * 2]


def test_a_mistyped_checkpoint_keeps_the_copies_and_a_new_beginning_deletes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = crash(tmp_path / "run", monkeypatch, "checkpoint.every=100")
    with pytest.raises(UserError, match="nowhere: no checkpoint here"):
        train(tmp_path / "run", 7, "checkpoint.memory_every=2", "checkpoint.resume=nowhere")
    assert all(path.is_dir() for path in found)
    for path in found:
        path.rename(partial_of(path))  # as two that were being written when their processes died
    held, update = [], Trainer.update

    def note(trainer: Trainer, *arguments: Any) -> Any:
        held.append([path.name for path in found[0].parent.iterdir()])
        return update(trainer, *arguments)

    monkeypatch.setattr(Trainer, "update", note)
    train(tmp_path / "run", 1, "checkpoint.memory_every=2")
    assert held == [[]]


def test_copies_of_another_run_in_the_same_folder_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    crash(tmp_path / "run", monkeypatch, "checkpoint.every=100")
    shutil.rmtree(tmp_path / "run")
    train(tmp_path / "run", 3, "checkpoint.memory_every=2")
    assert "continuing from" not in capsys.readouterr().err


def test_a_full_memory_is_a_warning_and_a_fault_deletes_the_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = crash(tmp_path / "run", monkeypatch, "checkpoint.every=100")
    used = sum(file.stat().st_size for file in found[0].parent.rglob("*") if file.is_file())
    sizes = [(line.get("copies_gib"), line.get("copies_sent_gib")) for line in metrics(tmp_path / "run")]
    assert (sizes[0], sizes[-1]) == ((None, None), (used / 2**30, 0.0))

    def full(*_: object) -> None:
        raise UserError("no space is left")

    monkeypatch.setattr(memory_checkpoints, "write_own", full)
    monkeypatch.setattr(loop, "find_replica_difference", lambda trainer: "weight/a" if trainer.step == 7 else None)
    words = ("checkpoint.every=100", "checkpoint.memory_every=1", "train.check_replicas=7")
    with pytest.raises(UserError, match="after step 7 replicas differ"):
        train(tmp_path / "run", 9, *words)
    assert capsys.readouterr().err.count("no copy in memory: no space is left") == 2
    assert [line.get("failed_copies") for line in metrics(tmp_path / "run")][4:] == [None, 1, 2]
    assert found[0].parent.is_dir()
    assert not list(found[0].parent.iterdir())
