"""The standard library as data: what is made, when it is made again, and what a failure leaves."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.config.data import PackingConfig, TokenizerConfig
from pangu.data import stdlib as prepared_stdlib
from pangu.data.indexed import open_indexed
from pangu.data.stdlib import StdlibPaths, is_prepared
from pangu.data.tokenizers import load_tokenizer
from pangu.prepare import stdlib
from pangu.prepare.stdlib import prepare_stdlib, validation_split
from tests.data.conftest import library_files
from tests.documents import document_lengths
from tests.library import FRACTION, PACKING, VOCAB

SMALL_VOCAB = 400


def prepare(folder: Path, vocab: int = SMALL_VOCAB, fraction: float = 0.3) -> StdlibPaths:
    return prepare_stdlib(folder, vocab, fraction, PACKING)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def documents(prefix: Path, paths: StdlibPaths) -> list[str]:
    """The texts of an indexed file."""
    opened = open_indexed(prefix)
    tokenizer = load_tokenizer(TokenizerConfig("sentencepiece", str(paths.tokenizer)))
    parts = np.split(opened.tokens, np.cumsum(document_lengths(opened))[:-1])
    assert all(part[-1] == 9 and 9 not in part[:-1] for part in parts)
    return [tokenizer.decode(part[:-1].tolist()) for part in parts]


def test_real_library(prepared: StdlibPaths) -> None:
    """Sources come back exactly; source and docstrings of a file lie on the same side."""
    train, validation = documents(prepared.train, prepared), documents(prepared.validation, prepared)
    for path in library_files("argparse.py", "ast.py", "json/decoder.py", "asyncio/tasks.py"):
        text = path.read_text(encoding="utf-8")
        side = train if text in train else validation
        assert side[side.index(text) + 1] == stdlib.docstrings(text)
    assert 0.5 * FRACTION < len(validation) / len(train + validation) < 1.5 * FRACTION
    opened = open_indexed(prepared.train)
    assert len(opened.tokens) > 1_000_000
    assert opened.tokens.max() < VOCAB


def test_real_library_compresses(prepared: StdlibPaths) -> None:
    path = library_files("argparse.py")[0]
    tokenizer = load_tokenizer(TokenizerConfig("sentencepiece", str(prepared.tokenizer)))
    assert tokenizer.vocab_size == VOCAB
    assert path.stat().st_size / len(tokenizer.encode(path.read_text(encoding="utf-8"))) > 1.9


def test_prepared_is_found_again_at_once(prepared: StdlibPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the library is read."""
    before = {path.name: path.stat().st_mtime_ns for path in prepared.folder.iterdir()}
    monkeypatch.delattr(stdlib, "read_library")
    prepare_stdlib(prepared.folder, VOCAB, FRACTION, PACKING)
    assert {path.name: path.stat().st_mtime_ns for path in prepared.folder.iterdir()} == before


def test_manifest(prepared: StdlibPaths) -> None:
    manifest = json.loads(prepared.manifest.read_text())
    files = contents(prepared.folder)
    del files["manifest.json"]
    assert manifest["recipe"]["vocab"] == VOCAB
    assert manifest["recipe"]["validation_fraction"] == FRACTION
    assert manifest["files"] == {
        name: {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()
    }


def test_small_library(small_library: Path, tmp_path: Path) -> None:
    paths = prepare(tmp_path / "data")
    train, validation = documents(paths.train, paths), documents(paths.validation, paths)
    assert train
    assert validation
    assert not set(train) & set(validation)
    texts = train + validation
    expected = [path.read_text() for path in sorted(small_library.glob("*.py")) if path.name != "latin.py"]
    assert set(expected) < set(texts)
    code = (small_library / "package" / "code.py").read_text()
    assert texts[texts.index(code) + 1] == "Says a.\n\nSays b."
    assert not any("left_out = True" in text for text in texts)


@given(names=st.sets(st.text("abc", min_size=1, max_size=4), min_size=2, max_size=50), fraction=st.floats(0, 1))
def test_held_out_is_a_matter_of_the_name(names: set[str], fraction: float) -> None:
    sources = sorted(names)
    chosen = validation_split(sources, fraction)
    assert chosen < names
    assert chosen
    assert validation_split(sources[::-1], fraction) == chosen
    assert chosen <= validation_split(sources, min(1.0, fraction + 0.2))
    less = validation_split(sources[1:], fraction) if len(sources) > 2 else chosen
    assert len(less ^ chosen) <= 2  # at the bounds one may come in for one that goes


def test_the_same_library_gives_the_same_files(small_library: Path, tmp_path: Path) -> None:
    assert contents(prepare(tmp_path / "a").folder) == contents(prepare(tmp_path / "b").folder)


@pytest.mark.parametrize("change", ["vocab", "fraction", "format"])
def test_a_stale_folder_is_built_anew(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    paths = prepare(tmp_path / "data")
    if change == "format":
        monkeypatch.setattr(prepared_stdlib, "_FORMAT", 99)
    vocab, fraction = (500 if change == "vocab" else SMALL_VOCAB), (0.5 if change == "fraction" else 0.3)
    assert not is_prepared(paths, vocab, fraction)
    prepare(tmp_path / "data", vocab, fraction)
    assert is_prepared(paths, vocab, fraction)
    assert contents(paths.folder) == contents(prepare(tmp_path / "fresh", vocab, fraction).folder)


@pytest.mark.parametrize("name", ["manifest.json", "train.bin", "train.idx", "validation.idx", "tokenizer.model"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "empty"])
def test_a_damaged_folder_is_built_anew(small_library: Path, tmp_path: Path, name: str, damage: str) -> None:
    paths = prepare(tmp_path / "data")
    whole = contents(paths.folder)
    if damage == "missing":
        (paths.folder / name).unlink()
    else:
        (paths.folder / name).write_bytes(whole[name][: len(whole[name]) // 2 if damage == "truncated" else 0])
    assert not is_prepared(paths, SMALL_VOCAB, 0.3)
    prepare(tmp_path / "data")
    assert contents(paths.folder) == whole


@pytest.mark.parametrize("name", ["train.bin", "train.idx", "tokenizer.model"])
def test_flipped_bytes_are_found(
    small_library: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the same size, so that only the manifest's checksum tells."""
    paths = prepare(tmp_path / "data")
    whole = contents(paths.folder)
    (paths.folder / name).write_bytes(bytes(byte ^ 1 for byte in whole[name]))
    prepare(tmp_path / "data")
    assert contents(paths.folder) == whole
    assert f"prepared again because of checksum mismatches: {name}" in caplog.text


def test_links_are_replaced_and_not_followed(small_library: Path, tmp_path: Path) -> None:
    paths = prepare(tmp_path / "data")
    whole = contents(paths.folder)
    for name in whole:
        (tmp_path / name).write_bytes(whole[name])
        (paths.folder / name).unlink()
        (paths.folder / name).symlink_to(tmp_path / name)
    prepare(tmp_path / "data")
    assert contents(paths.folder) == whole
    assert not any(path.is_symlink() for path in paths.folder.iterdir())
    assert all((tmp_path / name).read_bytes() == content for name, content in whole.items())


@pytest.mark.parametrize(
    "manifest", ["[" * 9999, "[]", "{}", '{"files": 3}', '{"recipe": {}, "files": {"a": {}}}', "\x00"]
)
def test_foreign_manifests_are_not_believed(tmp_path: Path, manifest: str) -> None:
    paths = StdlibPaths(tmp_path)
    paths.manifest.write_text(manifest)
    assert not is_prepared(paths, SMALL_VOCAB, 0.3)


@pytest.mark.parametrize("renames", range(6))
@pytest.mark.parametrize("vocab_before", [None, 500])
def test_a_kill_at_any_rename_is_mended(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int, vocab_before: int | None
) -> None:
    """Five files and the manifest get their names one after the other, over those of another vocabulary or of none."""
    folder = tmp_path / "data"
    if vocab_before:
        prepare(folder, vocab_before)
    rename = Path.replace
    done: list[Path] = []

    def killed(path: Path, target: Path) -> Path:
        if target.parent == folder:
            if len(done) == renames:
                raise SystemExit("killed")
            done.append(target)
        return rename(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        with pytest.raises(SystemExit):
            prepare(folder)
    assert not any(is_prepared(StdlibPaths(folder), vocab, 0.3) for vocab in (SMALL_VOCAB, 500))
    prepare(folder)
    assert contents(folder) == contents(prepare(tmp_path / "fresh").folder)


def test_a_real_kill_is_mended(small_library: Path, tmp_path: Path) -> None:
    """A process that ends without any clean-up; what it left is removed when it is an hour old."""
    program = (
        "import os, sysconfig, sys\n"
        "from pangu.config.data import PackingConfig\n"
        "from pangu.prepare import stdlib\n"
        "library, folder = sys.argv[1:]\n"
        "sysconfig.get_paths = lambda: {'stdlib': library}\n"
        "stdlib.file_record = lambda path: os._exit(77)\n"
        f"stdlib.prepare_stdlib(folder, {SMALL_VOCAB}, 0.3, PackingConfig(9, 6, True, True))\n"
    )
    folder = tmp_path / "data"
    command = [sys.executable, "-c", program, str(small_library), str(folder)]
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, check=False).returncode == 77
    (leftover,) = folder.iterdir()
    prepare(folder)
    assert is_prepared(StdlibPaths(folder), SMALL_VOCAB, 0.3)
    assert leftover.exists()  # young: it might belong to a run that is building now
    os.utime(leftover, (0, 0))
    prepare(folder, vocab=500)
    assert not leftover.exists()
    assert contents(folder) == contents(prepare(tmp_path / "fresh", vocab=500).folder)


@pytest.mark.parametrize("place", ["os.fsync", "tempfile.mkdtemp", "pathlib.Path.mkdir"])
@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "disk is full: free some space"), (errno.EACCES, "no permission"), (errno.EROFS, "read-only")],
)
def test_a_disk_that_refuses(
    small_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, code: int, words: str
) -> None:
    folder = tmp_path / "data"

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched:
        patched.setattr(place, refuse)
        with pytest.raises(UserError, match=words) as caught:
            prepare(folder)
    assert str(folder) in str(caught.value)
    assert not folder.exists() or not list(folder.iterdir())
    assert contents(prepare(folder).folder) == contents(prepare(tmp_path / "fresh").folder)


def test_a_file_in_the_way(small_library: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file")
    for folder in (tmp_path / "data", tmp_path / "data" / "below"):
        with pytest.raises(UserError, match=f"cannot write {folder}: .*choose another folder"):
            prepare(folder)


def test_a_python_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "library").mkdir()
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "library")})
    with pytest.raises(UserError, match=r"library has fewer than two readable .py files.*data=indexed"):
        prepare(tmp_path / "data")
    assert not list((tmp_path / "data").iterdir())


@pytest.mark.parametrize(("vocab", "words"), [(100, "at least"), (200_000, "at most")])
def test_a_vocabulary_that_does_not_suit(small_library: Path, tmp_path: Path, vocab: int, words: str) -> None:
    with pytest.raises(UserError, match=f"model.vocab = {vocab} .*{words} \\d+"):
        prepare(tmp_path / "data", vocab)
    assert not list((tmp_path / "data").iterdir())


def test_another_end_of_document(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.packing.eod = 8.* 9"):
        prepare_stdlib(tmp_path, SMALL_VOCAB, 0.3, PackingConfig(8, 6, True, True))
