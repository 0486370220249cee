"""Reading text, and passing it through several processes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.config.errors import UserError
from pangu.data.documents import batched, find_inputs, parallel_map, read_documents

DOCUMENTS = ["one line", "two\nlines", "  indented, 你好", "tab\there"]


def write(path: Path, key: str = "text") -> None:
    """The documents as a file of the kind that the suffix says."""
    records = [{"id": i, key: document} for i, document in enumerate([*DOCUMENTS, " \n"])]
    table = pyarrow.Table.from_pylist(records)
    match path.suffix:
        case ".txt":
            path.write_text("\n\n \n".join(DOCUMENTS) + "\n", encoding="utf-8")
        case ".jsonl":
            path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
        case ".json":
            path.write_text(json.dumps(records, ensure_ascii=False, indent=1), encoding="utf-8")
        case ".parquet":
            pyarrow.parquet.write_table(table, path)
        case ".csv":
            table.to_pandas().to_csv(path)
        case ".arrow":
            with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
                writer.write_table(table)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".parquet", ".csv", ".arrow"])
def test_kinds(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a[1] b*{suffix}"
    write(path, "content")
    assert list(read_documents([path, path], "content")) == DOCUMENTS * 2


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"damaged{suffix}"
    path.write_bytes(b'{"text": "a\n\x00\xff[')
    with pytest.raises(UserError, match=rf"damaged\{suffix}"):
        list(read_documents([path], "text"))


def test_another_key(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "content")
    with pytest.raises(UserError, match=r"a.jsonl: a record has no text under 'text'; it has \['content', 'id'\]"):
        list(read_documents([tmp_path / "a.jsonl"], "text"))
    with pytest.raises(UserError, match="no text under 'id'"):
        list(read_documents([tmp_path / "a.jsonl"], "id"))


def test_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("你好".encode("gb18030"))
    with pytest.raises(UserError, match=r"a.txt is not UTF-8.*iconv"):
        list(read_documents([tmp_path / "a.txt"], "text"))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text", encoding="utf-8-sig")
    assert list(read_documents([tmp_path / "a.txt"], "text")) == ["text"]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_that_is_gone(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UserError, match=r"gone.*: cannot be read"):
        list(read_documents([tmp_path / f"gone{suffix}"], "text"))


def test_find_inputs(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "deep/er/c.txt", "deep/notes.md", "x[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")

    def found(*patterns: str) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in find_inputs([f"{tmp_path}/{name}" for name in patterns])]

    assert found("") == ["a.jsonl", "b.txt", "deep/er/c.txt", "x[1].txt"]
    assert found("b.txt", "*.txt", "b.txt") == ["b.txt", "x[1].txt"]
    assert found("x[1].txt") == ["x[1].txt"]
    assert found("**/c.txt") == ["deep/er/c.txt"]
    for pattern, words in [("none", "no such"), ("*.parquet", "no such"), ("deep/notes.md", "kind is unknown")]:
        with pytest.raises(UserError, match=words):
            found(pattern)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: the folder holds no"):
        found("empty")


@given(documents=st.lists(st.text("ab", max_size=9), max_size=30), characters=st.integers(1, 20))
def test_batches(documents: list[str], characters: int) -> None:
    batches = list(batched(documents, characters))
    assert [document for batch in batches for document in batch] == documents
    assert all(batches)
    for batch in batches:
        assert sum(map(len, batch[:-1])) < characters
    assert all(sum(map(len, batch)) >= characters for batch in batches[:-1])


@pytest.mark.parametrize("workers", [1, 2])
def test_parallel_map_keeps_order_and_reads_little_ahead(workers: int) -> None:
    taken = []

    def items() -> Iterator[int]:
        for item in range(40):
            taken.append(item)
            yield item

    results = parallel_map(math.sqrt, items(), workers)
    assert next(results) == 0
    assert len(taken) <= 4 * workers
    assert [0, *results] == [math.sqrt(item) for item in range(40)]


@pytest.mark.parametrize("workers", [1, 2])
def test_parallel_map_raises_what_the_function_raised(workers: int) -> None:
    with pytest.raises(ValueError, match=r"math domain|nonnegative"):
        list(parallel_map(math.sqrt, [1, -1, 1], workers))


def test_a_killed_worker_is_told() -> None:
    with pytest.raises(UserError, match=r"worker process was killed.*fewer --workers"):
        list(parallel_map(os._exit, [1] * 50, 2))
