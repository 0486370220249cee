"""Files of others are read with one message, and never through a link; what is written is whole or absent."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from pangu.common import files
from pangu.common.errors import PrintableFormatter, UserError, printable, writing
from pangu.common.exit_status import exit_status
from pangu.common.files import open_regular, parse_json, read_json, refuse_links, write_atomically


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


@pytest.mark.usefixtures("_both_kinds")
@pytest.mark.parametrize("planted", ["a", ".a.{pid}.tmp"])
def test_a_planted_link_is_replaced_and_not_followed(tmp_path: Path, planted: str) -> None:
    (tmp_path / "mine").write_text("mine")
    folder = tmp_path / "shared"
    folder.mkdir()
    (folder / planted.format(pid=os.getpid())).symlink_to(tmp_path / "mine")
    write_atomically(folder / "a", b"new")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (folder / "a").read_bytes() == b"new"
    assert not (folder / "a").is_symlink()


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


@pytest.mark.parametrize("mode", ["rb", "a+b", "w"])
def test_links_and_pipes_are_no_files(tmp_path: Path, mode: str) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="link: is a symbolic link"):
        open_regular(tmp_path / "link", mode)
    with pytest.raises((UserError, OSError), match=r"pipe: is not a regular file|No such device|seekable"):
        open_regular(tmp_path / "pipe", mode)
    assert (tmp_path / "mine").read_text() == "mine"
    with pytest.raises(UserError) as caught:
        refuse_links([tmp_path / "mine", tmp_path / "link", tmp_path / "absent"])
    assert str(caught.value).count("is a symbolic link") == 1


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 500 + "1" + "}" * 500, "[" * 101 + "]" * 101, "1" * 5000])
def test_what_is_no_json_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_json(text)


def test_json_that_is_read() -> None:
    assert parse_json("[" * 100 + "]" * 100)
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}


@pytest.mark.parametrize("content", [b"[" * 100_000, b"\xff\xfe", b"{", b""])
def test_a_file_that_is_no_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.json: is not JSON in UTF-8"):
        read_json(path)


def test_nothing_that_a_terminal_obeys_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;title\x07 \x9b31m \r \u202e \x7f \udc80 plain 今天\n\tnext"
    shown = "\\x1b]0;title\\x07 \\x9b31m \\r \\u202e \\x7f \\udc80 plain 今天\n\tnext"
    assert printable(hostile) == shown

    def fail() -> None:
        raise UserError(hostile)

    assert exit_status(fail) == 2
    assert capsys.readouterr().err.endswith(f": error: {shown}\n")
    record = logging.LogRecord("pangu", logging.INFO, "", 0, "%s is there", (hostile,), None)
    assert PrintableFormatter("%(message)s").format(record) == f"{shown} is there"


def test_what_never_ends_is_not_read(tmp_path: Path) -> None:
    """A pipe that nobody writes into, and a link to a device."""
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "device.json").symlink_to("/dev/zero")
    for name in ("pipe.json", "device.json"):
        with pytest.raises(UserError, match=f"{name}: is not a regular file"):
            read_json(tmp_path / name)
