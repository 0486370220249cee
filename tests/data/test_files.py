"""Files that are whole or absent."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from pangu.config.errors import UserError, writing
from pangu.data import files
from pangu.data.files import progress_bar, write_atomically


@pytest.fixture(params=["unnamed", "named"])
def _both_kinds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With files without a name, where there are any, and as on a file system that has none."""
    if request.param == "named":
        monkeypatch.setattr(files, "_OPEN_FILES", Path("/nowhere"))


@pytest.mark.usefixtures("_both_kinds")
def test_write_atomically(tmp_path: Path) -> None:
    for content in (b"first", b"second"):
        write_atomically(tmp_path / "a", content)
        assert [path.name for path in tmp_path.iterdir()] == ["a"]
        assert (tmp_path / "a").read_bytes() == content
    (tmp_path / "plain").write_bytes(b"")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.usefixtures("_both_kinds")
@pytest.mark.parametrize("place", ["os.fsync", "pathlib.Path.replace"])
def test_a_failure_leaves_the_old_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_atomically(tmp_path / "a", b"old")
    monkeypatch.setattr(place, refuse)
    with pytest.raises(OSError, match="No space"):
        write_atomically(tmp_path / "a", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENOSPC, "x"), "disk is full"),
        (OSError(errno.EDQUOT, "x"), "quota is used up"),
        (OSError(errno.EIO, "Input/output error"), "Input/output error"),
        (OSError("without a number"), "without a number"),
    ],
)
def test_writing_names_the_target(error: OSError, words: str) -> None:
    with pytest.raises(UserError, match=f"cannot write some/folder: .*{words}"), writing(Path("some/folder")):
        raise error


def test_writing_leaves_other_errors_alone() -> None:
    with pytest.raises(ZeroDivisionError), writing(Path("some/folder")):
        raise ZeroDivisionError


@pytest.mark.parametrize("show", [True, False])
def test_progress_bar(capfd: pytest.CaptureFixture[str], show: bool) -> None:
    with progress_bar(show) as progress:
        assert list(progress.track([1, 2], description="Counting")) == [1, 2]
    out, err = capfd.readouterr()
    assert out == ""
    assert ("Counting" in err) == show
