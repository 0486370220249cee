"""Checkpoints are copied to an object store while training goes on, and a run on another machine continues there."""

from __future__ import annotations

import errno
import itertools
import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from pangu.checkpoint import remote
from pangu.checkpoint.index import find_damage, read_index
from pangu.checkpoint.remote import RemoteRun
from pangu.checkpoint.status import CheckpointStatus, write_status
from pangu.common.errors import UserError
from pangu.training.uploading import Uploader
from tests.configs import config
from tests.training.test_faults import ROLLBACK, poisoned
from tests.training.test_resume import first_file, flip, train

URL = "memory://bucket/run"
COPIED = f"checkpoint.remote={URL}"


@pytest.fixture(autouse=True)
def store() -> Any:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return fsspec.filesystem("memory")


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder of a bucket on an S3 server of this machine (`pip install "moto[server]" s3fs`)."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "nobody")
    monkeypatch.setitem(fsspec.config.conf, "s3", {"endpoint_url": f"http://{host}:{port}"})
    fsspec.filesystem("s3").mkdir(f"bucket-{port}")  # the process has one store for all servers
    yield f"s3://bucket-{port}/run"
    server.stop()


def steps(url: str = URL) -> list[int]:
    return [int(name[5:13]) for name in RemoteRun(url).checkpoints()]


def folder(step: int) -> str:
    (name,) = [name for name in RemoteRun(URL).checkpoints() if int(name[5:13]) == step]
    return f"/bucket/run/checkpoints/{name}"


def test_a_run_continues_on_a_machine_with_an_empty_folder_bit_for_bit(tmp_path: Path) -> None:
    losses = train(tmp_path / "unbroken", 4)
    train(tmp_path / "first", 2, COPIED)
    assert steps() == [1, 2]
    assert train(tmp_path / "second", 4, COPIED) == losses, "figures of the steps before it are fetched, too"
    assert steps() == [1, 2, 3, 4]
    (tmp_path / "first").rename(tmp_path / "gone")
    for step in (2, 4):
        mine, fetched = (tmp_path / run / f"checkpoints/step-0000000{step}" for run in ("unbroken", "second"))
        assert read_index(mine)["files"] == read_index(fetched)["files"]


def test_a_run_on_an_s3_server_continues_on_another_machine(
    s3: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Objects have no folders and no names that change, and what is listed is cached. It has gone back before."""
    copied, words = f"checkpoint.remote={s3}", (*ROLLBACK, "checkpoint.keep=3")
    poisoned([21], monkeypatch)
    losses = train(tmp_path / "unbroken", 8, *words)
    poisoned([21], monkeypatch, dies_at=36)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "first", 8, *words, copied)
    seen = poisoned([], monkeypatch)
    assert train(tmp_path / "second", 8, *words, copied) == losses
    assert seen[0] == 32
    assert steps(s3) == [int(path.name[5:]) for path in sorted((tmp_path / "second/checkpoints").glob("step-*"))]
    name, system = max(RemoteRun(s3).checkpoints()), fsspec.filesystem("s3")
    (file,) = system.glob(f"{s3}/checkpoints/{name}/*.safetensors")
    system.pipe_file(file, system.cat_file(file)[:-1])
    assert train(tmp_path / "third", 8, *words, copied) == losses
    assert f"{name}/tensors-00000-00000.safetensors: damaged: " in capsys.readouterr().err


@pytest.mark.parametrize("number", range(0, 40, 8))
def test_an_upload_to_an_s3_server_that_is_killed_is_finished_later(
    s3: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path, 2)
    old, new = (tmp_path / f"checkpoints/step-0000000{step}" for step in (1, 2))
    assert RemoteRun(s3).send(old, 0, 1)
    RemoteRun(s3).commit(old)
    with monkeypatch.context() as patch:
        kill_at(number, s3, patch)
        with suppress(Killed):
            RemoteRun(s3).send(new, 0, 1)
            RemoteRun(s3).commit(new)
    found = newest_complete(s3, tmp_path / "fetched")
    assert found is not None
    assert RemoteRun(s3).send(new, 0, 1)
    RemoteRun(s3).commit(new)
    assert steps(s3) == [1, 2]
    found = newest_complete(s3, tmp_path / "again")
    assert found is not None
    assert read_index(found)["files"] == read_index(new)["files"]


def test_only_what_is_missing_is_sent_again(
    tmp_path: Path, store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pangu.checkpoint.files.FILE_BYTES", 2**14)
    train(tmp_path, 1)
    path = tmp_path / "checkpoints/step-00000001"
    sent: list[str] = []
    left = [2]
    send = RemoteRun._send_file

    def noted(self: RemoteRun, source: Path, *arguments: Any) -> None:
        if len(sent) == left[0]:
            raise UserError("the network is gone")
        send(self, source, *arguments)
        sent.append(source.name)

    monkeypatch.setattr(RemoteRun, "_send_file", noted)
    with pytest.raises(UserError, match="the network is gone"):
        RemoteRun(URL).send(path, 0, 1)
    whole, short = sent
    part = f"/bucket/run/checkpoints/{remote.remote_name(path, read_index(path))}/{short}"
    store.pipe_file(part, store.cat_file(part)[:-1])  # a file system shows a file before it is whole
    sent.clear()
    left.append(left.pop() + 100)
    assert RemoteRun(URL).send(path, 0, 1)
    assert set(sent) == read_index(path)["files"].keys() - {whole}


class Killed(BaseException):
    """End of a process, which no handler of errors sees."""


def kill_at(number: int, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Die before the `number`th change of the file system of `url`, or half way through it."""
    changes = itertools.count()
    system = type(fsspec.url_to_fs(url)[0])
    names = ("makedirs", "info", "rm_file", "rm", "mv")
    before = {name: getattr(system, name) for name in names}

    def dies() -> None:
        if next(changes) == number:
            raise Killed

    for name in names:

        def call(*arguments: Any, name: str = name, **options: Any) -> Any:
            dies()
            return before[name](*arguments, **options)

        monkeypatch.setattr(system, name, call)

    monkeypatch.setattr(remote, "CHUNK_BYTES", 2**13)
    monkeypatch.setattr(RemoteRun, "_on_progress", property(lambda _: dies), raising=False)
    monkeypatch.setattr(RemoteRun, "__setattr__", lambda self, name, value: self.__dict__.update({name: value}))


def newest_complete(url: str, folder: Path) -> Path | None:
    """Return the newest checkpoint at `url` that can be fetched, and holds what was written."""
    for name in reversed(RemoteRun(url).checkpoints()):
        path = folder / "checkpoints" / name[:13]
        try:
            RemoteRun(url).fetch_index(name, path)
            RemoteRun(url).fetch(name, path, 0, 1)
            RemoteRun(url).finish(path)
        except UserError as error:
            if remote.DAMAGED not in str(error):
                raise
        else:
            return path
    return None


def test_an_upload_that_is_killed_anywhere_leaves_a_whole_checkpoint_and_is_finished_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/remote"
    train(tmp_path / "run", 2)
    old, new = (tmp_path / f"run/checkpoints/step-0000000{step}" for step in (1, 2))
    assert RemoteRun(url).send(old, 0, 1)
    RemoteRun(url).commit(old)
    shutil.copytree(tmp_path / "remote", tmp_path / "before")
    write_status(new, CheckpointStatus(proven=True))
    shutil.move(old, tmp_path / "gone")  # the local one is pruned, and its copy after it

    def upload() -> None:
        assert RemoteRun(url).send(new, 0, 1)
        RemoteRun(url).commit(new)
        RemoteRun(url).prune(new.parent, replace(config().checkpoint, keep=1))

    kills = 0
    for number in itertools.count():
        shutil.rmtree(tmp_path / "remote")
        shutil.copytree(tmp_path / "before", tmp_path / "remote")
        with monkeypatch.context() as patch:
            kill_at(number, url, patch)
            try:
                upload()
            except Killed:
                kills += 1
        found = newest_complete(url, tmp_path / f"fetched-{number}")
        assert found is not None
        assert read_index(found)["files"] == read_index(tmp_path / "gone" if found.name == old.name else new)["files"]
        assert find_damage(found, read_index(found)) == []
        upload()
        assert steps(url) == [2]
        if kills == number:
            break
    assert kills > 20


def test_each_rank_sends_and_fetches_its_share(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    path = tmp_path / "run/checkpoints/step-00000001"
    assert not RemoteRun(URL).send(path, 1, 2), "rank 0 wrote the only file"
    assert RemoteRun(URL).send(path, 0, 2)
    RemoteRun(URL).commit(path)
    (name,) = RemoteRun(URL).checkpoints()
    copy = tmp_path / "other/checkpoints/step-00000001"
    RemoteRun(URL).fetch_index(name, copy)
    for rank in (1, 0):
        RemoteRun(URL).fetch(name, copy, rank, 2)
    RemoteRun(URL).finish(copy)
    assert find_damage(copy, read_index(copy)) == []


def test_a_damaged_file_is_replaced_by_its_copy_and_a_damaged_copy_is_passed_over(
    tmp_path: Path, store: MemoryFileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = train(tmp_path / "unbroken", 4)
    train(tmp_path / "run", 3, COPIED)
    flip(first_file(tmp_path / "run/checkpoints/step-00000003"))
    assert train(tmp_path / "run", 4, COPIED) == losses
    assert "fetching step-00000003" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run")
    file = f"{folder(4)}/tensors-00000-00000.safetensors"
    content = bytearray(store.cat_file(file))
    content[-1] ^= 1
    store.pipe_file(file, bytes(content))
    assert train(tmp_path / "run", 4, COPIED) == losses
    told = capsys.readouterr().err
    assert "tensors-00000-00000.safetensors: damaged: its SHA-256 is " in told
    assert "continuing from" in told
    assert "set aside; delete it" in told


HOSTILE = {
    "no JSON": lambda index: b"{",
    "another step's index": lambda index: json.dumps({**json.loads(index), "files": {}}).encode(),
    "a file elsewhere": lambda index: index.replace(b"tensors-00000-00000", b"../../../../evil"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_copy_is_named_and_writes_nothing_outside(
    change: Any, tmp_path: Path, store: MemoryFileSystem, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = train(tmp_path / "run", 2, COPIED)
    shutil.rmtree(tmp_path / "run")
    store.pipe_file(f"{folder(2)}/index.json", change(store.cat_file(f"{folder(2)}/index.json")))
    store.pipe_file("/bucket/run/checkpoints/step-00000009-0123456789abcdef/../index.json", b"{}")
    store.pipe_file("/bucket/run/checkpoints/step-99999999/index.json", b"{}")
    assert train(tmp_path / "run", 2, COPIED) == losses
    assert f"{Path(folder(2)).name}: damaged: " in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_store_that_fails_is_told_and_counted_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = train(tmp_path / "unbroken", 4)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Forbidden")

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "open", refuse)
        assert train(tmp_path / "run", 2, COPIED) == losses[:2]
    assert "checkpoint.remote cannot be used (Forbidden)" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "commit", refuse)  # a disk of this machine that fails
        assert train(tmp_path / "run", 3, COPIED) == losses[:3]
    assert "Forbidden; training continues" in capsys.readouterr().err
    assert json.loads((tmp_path / "run/heartbeat.json").read_text())["failed_uploads"] >= 1
    assert steps() == []
    assert train(tmp_path / "run", 4, COPIED) == losses
    assert steps() == [1, 2, 3, 4], "the next start sends what was left"
    monkeypatch.setattr(MemoryFileSystem, "ls", refuse)
    with pytest.raises(UserError, match=r"Forbidden.*or set checkpoint.remote=null"):
        train(tmp_path / "other", 4, COPIED)


def test_old_copies_are_deleted_like_old_checkpoints(tmp_path: Path, store: MemoryFileSystem) -> None:
    train(tmp_path, 5, COPIED, "checkpoint.keep=1", "checkpoint.keep_every=2", "faults.proven_after=1")
    kept = [int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*")]
    assert steps() == sorted(kept)
    assert 1 not in kept


def test_another_machine_follows_a_rollback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither continues from the condemned checkpoint nor trains on the batches that were left out."""
    poisoned([21], monkeypatch)
    losses = train(tmp_path / "unbroken", 8, *ROLLBACK)
    poisoned([21], monkeypatch, dies_at=36)
    limits: list[float] = []
    wait = Uploader.wait
    monkeypatch.setattr(Uploader, "wait", lambda self, limit_s, *note: limits.append(limit_s) or wait(self, limit_s))
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "first", 8, *ROLLBACK, COPIED, "parallel.timeout_s=40")
    assert limits[0] == 20, "the other ranks wait for the one that waits for the store"
    seen = poisoned([], monkeypatch)
    assert train(tmp_path / "second", 8, *ROLLBACK, COPIED) == losses
    assert seen[0] == 32


def test_another_machine_follows_a_rollback_to_the_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no checkpoint is left, it leaves out the batches that the first machine left out."""
    words = (*ROLLBACK, "checkpoint.every=3")
    poisoned([9], monkeypatch)
    losses = train(tmp_path / "unbroken", 6, *words)
    poisoned([9], monkeypatch, dies_at=24)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "first", 6, *words, COPIED)
    assert steps() == []
    seen = poisoned([], monkeypatch)
    assert train(tmp_path / "second", 6, *words, COPIED) == losses
    assert seen[0] == 20
    assert (tmp_path / "second/checkpoints/start.json").exists()


def test_a_machine_that_trained_before_gets_the_figures_of_the_one_in_between(tmp_path: Path) -> None:
    losses = train(tmp_path / "unbroken", 5)
    for machine, steps_made in ("first", 2), ("second", 4), ("first", 5):
        assert train(tmp_path / machine, steps_made, COPIED) == losses[:steps_made]


def test_a_fetch_that_fails_is_made_again_with_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = train(tmp_path / "first", 2, COPIED)
    fetch = RemoteRun._fetch_file

    def fails(self: RemoteRun, source: str, *arguments: Any) -> None:
        if source.endswith("metrics.jsonl"):
            raise UserError("the network is gone")
        fetch(self, source, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteRun, "_fetch_file", fails)
        with pytest.raises(UserError, match="the network is gone"):
            train(tmp_path / "second", 3, COPIED)
    assert train(tmp_path / "second", 3, COPIED)[:2] == losses


@pytest.mark.parametrize("call", ["ls", "info"])
def test_a_file_system_that_fails_hides_no_checkpoint(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = f"checkpoint.remote=file://{tmp_path}/remote"
    train(tmp_path / "run", 2, copied)
    shutil.rmtree(tmp_path / "run")
    works = getattr(LocalFileSystem, call)

    def fails(self: LocalFileSystem, path: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(path, str) and "step-00000002-" in path:
            raise OSError(errno.ESTALE, "Stale file handle")
        return works(self, path, *arguments, **options)

    monkeypatch.setattr(LocalFileSystem, call, fails)
    with pytest.raises(UserError, match="Stale file handle"):
        train(tmp_path / "run", 3, copied)


def test_a_full_disk_damages_nothing_that_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"file://{tmp_path}/remote"
    train(tmp_path / "run", 2, f"checkpoint.remote={url}")

    def contents() -> dict[Path, bytes]:
        files = (path for path in (tmp_path / "remote").rglob("*") if path.is_file() and path.suffix != ".partial")
        return {path: path.read_bytes() for path in files}

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = contents()
    path = tmp_path / "run/checkpoints/step-00000002"
    for patterns in remote.RUN_FILES, ():  # the index, too
        with monkeypatch.context() as patch:
            patch.setattr(remote, "RUN_FILES", patterns)
            patch.setattr(LocalFileOpener, "write", full, raising=False)
            with pytest.raises(UserError, match="No space left on device"):
                RemoteRun(url).commit(path)
        assert contents() == before


def test_a_damaged_checkpoint_does_not_keep_old_copies(tmp_path: Path) -> None:
    train(tmp_path, 4)
    flip(first_file(tmp_path / "checkpoints/step-00000003"))
    train(tmp_path, 8, COPIED, "checkpoint.keep=1", "checkpoint.keep_every=3", "faults.proven_after=1")
    kept = [int(path.name[5:]) for path in sorted((tmp_path / "checkpoints").glob("step-*"))]
    assert kept[0] == 3
    assert steps() == kept[1:]


def test_links_in_a_run_folder_are_not_followed(tmp_path: Path, store: MemoryFileSystem) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private/key").write_text("secret")
    train(tmp_path / "run", 1)
    (tmp_path / "run/tokenizer").symlink_to(tmp_path / "private")
    train(tmp_path / "run", 2, COPIED)
    assert steps() == [1, 2]
    assert not store.exists("/bucket/run/tokenizer/key")
