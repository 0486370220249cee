"""Indexed files: bytes on disk, damage, and writes that fail half way."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.data.indexed import bin_path, idx_path, open_indexed, token_format
from pangu.prepare.indexed_writer import IndexedWriter
from tests.documents import document_lengths


def write(prefix: Path, documents: Iterable[list[int]], vocab: int = 100) -> None:
    with IndexedWriter(prefix, vocab) as writer:
        for document in documents:
            writer.add(document)


@settings(max_examples=30)
@given(
    vocab=st.sampled_from([70, 65499, 65500, 200_000]),
    shape=st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any),
    seed=st.integers(0, 1000),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, vocab: int, shape: list[int], seed: int) -> None:
    draw = np.random.default_rng(seed)
    documents = [draw.integers(vocab, size=length).tolist() for length in shape]
    prefix = tmp_path_factory.mktemp("indexed") / "my.data"
    write(prefix, documents, vocab)
    opened = open_indexed(prefix)
    assert opened.tokens.tolist() == [token for document in documents for token in document]
    assert document_lengths(opened).tolist() == shape
    assert opened.tokens.dtype == (np.uint16 if vocab < 65500 else np.int32)
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["my.data.bin", "my.data.idx"]


def test_bytes_are_megatrons(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1, 2, 3], [], [4]])
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 4)
    expected += struct.pack("<3i", 3, 0, 1) + struct.pack("<3q", 0, 6, 6) + struct.pack("<4q", 0, 1, 2, 3)
    assert idx_path(tmp_path / "a").read_bytes() == expected
    assert bin_path(tmp_path / "a").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)


def test_reads_several_sequences_per_document(tmp_path: Path) -> None:
    """As Megatron's tools write with --split-sentences, here in int64."""
    tokens = list(range(10))
    bin_path(tmp_path / "m").write_bytes(struct.pack("<10q", *tokens))
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 5, 4, 3)
    body = struct.pack("<4i", 2, 3, 1, 4) + struct.pack("<4q", 0, 16, 40, 48) + struct.pack("<3q", 0, 2, 4)
    idx_path(tmp_path / "m").write_bytes(header + body)
    opened = open_indexed(tmp_path / "m")
    assert opened.tokens.tolist() == tokens
    assert opened.sequence_lengths.tolist() == [2, 3, 1, 4]
    assert document_lengths(opened).tolist() == [5, 5]


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    for bad in (100, -1):
        with pytest.raises(ValueError, match="vocabulary of 100"):
            write(tmp_path / "a", [[1], [bad]])
    assert not list(tmp_path.iterdir())


def test_format_bound() -> None:
    assert (token_format(65499).itemsize, token_format(65500).itemsize) == (2, 4)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_every_truncation_is_found(tmp_path: Path, suffix: str) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    path = tmp_path / f"a{suffix}"
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"a\.(idx|bin)"):
            open_indexed(tmp_path / "a")
    path.write_bytes(whole + b"\0")
    with pytest.raises(UserError, match=r"a\.(idx|bin)"):
        open_indexed(tmp_path / "a")


@pytest.mark.parametrize(
    ("place", "new", "words"),
    [
        (0, b"TNTIDX\x00\x00\x08", "old"),
        (0, b"PK\x03\x04", "does not begin with MMIDIDX"),
        (9, struct.pack("<Q", 2), "version 2"),
        (17, b"\x07", "number format 7"),
        (18, struct.pack("<Q", 3), "damaged"),
        (18, struct.pack("<Q", 2**60), "damaged"),
        (26, struct.pack("<Q", 2), "damaged"),
        (38, struct.pack("<i", 1), "describes"),
        (58, struct.pack("<q", 1), "document index"),
        (74, struct.pack("<q", 1), "document index"),
    ],
)
def test_flipped_fields_are_found(tmp_path: Path, place: int, new: bytes, words: str) -> None:
    write(tmp_path / "a", [[1, 2, 3], [4, 5]])
    content = bytearray(idx_path(tmp_path / "a").read_bytes())
    content[place : place + len(new)] = new
    idx_path(tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        open_indexed(tmp_path / "a")
    assert str(tmp_path / "a") in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    write(tmp_path / "a", [[1]])
    bin_path(tmp_path / "a").unlink()
    with pytest.raises(UserError, match=r"a\.bin: No such file"):
        open_indexed(tmp_path / "a")
    write(tmp_path / "b", [[], []])
    with pytest.raises(UserError, match=r"b\.bin has no tokens"):
        open_indexed(tmp_path / "b")
    write(tmp_path / "c", [])
    with pytest.raises(UserError, match=r"c\.bin has no tokens"):
        open_indexed(tmp_path / "c")


def test_an_exception_leaves_nothing(tmp_path: Path) -> None:
    def documents() -> Iterator[list[int]]:
        yield [1, 2, 3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", documents())
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path / "a", [[1, 2, 3]])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_while_overwriting_never_pairs_old_with_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Two files of equal sizes, which a look at the sizes could not tell apart."""
    write(tmp_path / "a", [[1, 2], [3]])
    rename = Path.replace
    done: list[Path] = []

    def killed(path: Path, target: Path) -> Path:
        if len(done) == renames:
            raise SystemExit("killed")
        done.append(target)
        return rename(path, target)

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(SystemExit):
        write(tmp_path / "a", [[7], [8, 9]])
    with pytest.raises(UserError, match=r"a\.idx"):
        open_indexed(tmp_path / "a")
