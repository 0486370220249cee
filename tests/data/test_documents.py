"""Reading text of all kinds, from any place on, and naming what is none."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import re
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.data import inputs, tables
from pangu.data.documents import BadLine, Document, documents, read_documents
from pangu.data.finding import find_inputs
from pangu.data.inputs import read_chunks

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


def pack(path: Path, packing: str) -> Path:
    """The same file, packed."""
    content = path.read_bytes()
    if packing == ".zst":
        content = pyarrow.compress(content, "zstd", asbytes=True)
    elif packing:
        compress = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}[packing]
        half = content[: len(content) // 2]
        content = compress(half) + compress(content[len(half) :])  # as programs on several cores write them
    packed = path.with_name(path.name + packing)
    packed.write_bytes(content)
    return packed


KINDS = [".txt", ".jsonl", ".json", ".parquet", ".csv", ".arrow", ".txt.gz", ".jsonl.zst", ".txt.xz", ".jsonl.bz2"]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(tmp_path: Path, kind: str) -> None:
    _, suffix, packing = f"{kind}.".split(".")[:3]
    path = tmp_path / f"a[1] b*.{suffix}"
    write(path, "content")
    packed = pack(path, packing and f".{packing}")
    assert list(read_documents([str(packed)] * 2, "content")) == DOCUMENTS * 2


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_arrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """In parts, from any place on, and whatever stands in them."""
    monkeypatch.setattr(inputs, "CHUNK", chunk)
    monkeypatch.setattr(tables, "CHUNK", chunk)
    path, begin = tmp_path / "a.json.zst", '\ufeff \n[ {"text": "你 [1]"},\n {"id": 7, "text": "]"} , 123'
    for whole, says in (
        ("\ufeff [\n]\n", []),
        (begin + "]", ["你 [1]", "]", "has 123 instead of a string"]),
        (
            begin + ', [], {"body": 1}, {"text": null} ]\n',
            ["你 [1]", "]", "has 123", "has []", "has {body: 1}", "has null"],
        ),
        (begin, "value 3 of its array is not JSON: no comma or bracket after it"),
        (begin + ", x]", "value 4 of its array is not JSON: Expecting value"),
        (begin + ' "text"]', "value 4 of its array is not JSON"),
        (begin + "][1]", "more text follows the 3 values"),
    ):
        path.write_bytes(pyarrow.compress(whole.encode(), "zstd", asbytes=True))
        if isinstance(says, str):
            with pytest.raises(UserError, match=rf"a\.json\.zst: cannot be read \({says}"):
                everything(path)
            continue
        found = everything(path)
        assert all(words in str(item[-1]) or words == item[0] for words, item in zip(says, found, strict=True)), found
        for part in read_chunks([str(path)], "text"):
            rest = [item for other in read_chunks([str(path)], "text", part.after) for item in documents(other, "text")]
            assert rest == found[len(found) - len(rest) :]


def test_files_of_arrow_and_json_lines_named_json(tmp_path: Path) -> None:
    table = pyarrow.table({"text": DOCUMENTS})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=3)
    write(tmp_path / "a.jsonl")
    (tmp_path / "a.jsonl").rename(tmp_path / "b.json")
    pack(tmp_path / "b.json", ".gz")
    for name in ("a.arrow", "b.json", "b.json.gz"):
        assert list(read_documents([str(tmp_path / name)], "text")) == DOCUMENTS


def test_a_dataset_is_streamed(tmp_path: Path) -> None:
    """By its folder, as by its name where there is a network."""
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl")
    name = f"hf:{tmp_path}/set::train"
    assert find_inputs([name]) == [name]
    assert list(read_documents([name], "text")) == DOCUMENTS


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", ".csv"])
def test_reading_goes_on_at_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(inputs, "CHUNK", 40)
    monkeypatch.setattr(tables, "CHUNK", 40)
    _, suffix, packing = f"{kind}.".split(".")[:3]
    write(tmp_path / f"a.{suffix}")
    files = [str(pack(tmp_path / f"a.{suffix}", packing and f".{packing}"))] * 2
    chunks = list(read_chunks(files, "text"))
    assert len(chunks) > 2
    for number, chunk in enumerate(chunks):
        rest = [text for later in chunks[number + 1 :] for _, text in texts_of(later)]
        again = [text for later in read_chunks(files, "text", chunk.after) for _, text in texts_of(later)]
        assert again == rest
    assert [text for chunk in chunks for _, text in texts_of(chunk)] == DOCUMENTS * 2


def texts_of(chunk: inputs.TextChunk) -> list[tuple[int, str]]:
    """Bytes and text of each document."""
    found = list(documents(chunk, "text"))
    assert not any(isinstance(document, BadLine) for document in found)
    return [(document.size, document.text) for document in found]


@given(
    lines=st.lists(st.sampled_from(["a", " b ", "", " ", "\t", "\u3000", "\r", "c\x1c", "你"]), max_size=30),
    newline=st.sampled_from(["\n", "\r\n"]),
    chunk=st.integers(1, 20),
)
def test_documents_are_what_is_between_blank_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], newline: str, chunk: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "lines.txt"
    path.write_bytes(newline.join(lines).encode())
    expected, document = [], []
    with path.open(encoding="utf-8") as file:
        for line in [*file, "\n"]:
            if line.strip():
                document.append(line)
            elif document:
                expected.append("".join(document).rstrip("\n"))
                document = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(inputs, "CHUNK", chunk)
        patched.setattr(tables, "CHUNK", chunk)
        assert list(read_documents([str(path)], "text")) == expected


def everything(path: Path) -> list[Document | BadLine]:
    return [document for chunk in read_chunks([str(path)], "text") for document in documents(chunk, "text")]


def test_bad_lines_are_named_and_the_others_are_there(tmp_path: Path) -> None:
    lines = [
        b'{"text": "first"}',
        b'{"text": 3}',
        b"",
        b'{"text": "a"',
        b"[" * 100_000,
        b'["text"]',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"\\u001b[31m": 1}',
        b'{"text": "last"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    found = everything(tmp_path / "a.jsonl")
    assert [document.text for document in found if not isinstance(document, BadLine)] == ["first", "last"]
    bad = [document for document in found if isinstance(document, BadLine)]
    assert [line.line for line in bad] == [2, 4, 5, 6, 7, 8, 9]
    assert str(bad[0]) == f"{tmp_path}/a.jsonl, line 2: has 3 instead of a string under 'text'"
    reasons = ["instead of a string", "not JSON", "not JSON", "a JSON object", "not UTF-8", "surrogate", "no text"]
    for line, words in zip(bad, reasons, strict=True):
        assert words in line.reason
        assert "\x1b" not in str(line)


def test_the_documents_around_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\n\xff\n\n\n\nthree\n\n\xfe\n\nfour")
    found = everything(tmp_path / "a.txt")
    assert [getattr(document, "text", None) for document in found] == ["one", None, "three", None, "four"]
    assert [document.line for document in found if isinstance(document, BadLine)] == [4, 10]


def test_a_table_with_other_values(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    one, bad, two = everything(tmp_path / "a.parquet")
    assert (one, two) == (("a", 1), ("b", 1))
    assert str(bad) == f"{tmp_path}/a.parquet, line 2: has null instead of a string under 'text'"


def test_a_line_without_an_end_is_named_before_it_takes_all_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "LONGEST", 3 << 20)
    for name, words in (("a.jsonl", "it does not end"), ("a.txt", "no blank line ends the document")):
        (tmp_path / name).write_bytes(b'{"text": "a"}\n\n' + b"x\x00" * (4 << 20))
        with pytest.raises(UserError, match=rf"{name}, line 3: {words} within 3 MiB"):
            list(read_documents([str(tmp_path / name)], "text"))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow", ".jsonl.gz", ".jsonl.zst", ".jsonl.xz"])
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"damaged{suffix}"
    path.write_bytes(b'{"text": "a\n\x00\xff[')
    with pytest.raises(UserError, match=rf"damaged\{suffix}"):
        list(read_documents([str(path)], "text"))


def test_tables_of_text_are_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('id,text\n1,007\n2,NA\n3,\n4,"1e5\n"\n')
    assert list(read_documents([str(tmp_path / "a.csv")], "text")) == ["007", "NA", "1e5\n"]


def test_two_columns_of_one_name_are_told(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["text", "text"])
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name in ("a.arrow", "a.parquet"):
        with pytest.raises(UserError, match=rf"{name}: cannot be read .*exists 2 times"):
            list(read_documents([str(tmp_path / name)], "text"))


def test_a_pipe_is_read_once(tmp_path: Path) -> None:
    """One that is named .json too, of which nobody may look at the beginning first."""
    os.mkfifo(tmp_path / "a.json")
    lines = "".join(json.dumps({"text": f"{number} " + "word " * 50}) + "\n" for number in range(100))
    with ThreadPoolExecutor(1) as thread:
        written = thread.submit((tmp_path / "a.json").write_text, lines)
        assert len(list(read_documents([str(tmp_path / "a.json")], "text"))) == 100
        written.result()


def test_another_key(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "content")
    with pytest.raises(UserError, match=r"a.jsonl, line 1: has no text under 'text'; its keys are \[content, id\]"):
        list(read_documents([str(tmp_path / "a.jsonl")], "text"))
    write(tmp_path / "a.parquet", "content")
    with pytest.raises(
        UserError, match=(r"a.parquet: a record has no text under 'text'; its keys are \[content, id\]")
    ):
        list(read_documents([str(tmp_path / "a.parquet")], "text"))


def test_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("你好".encode("gb18030"))
    with pytest.raises(UserError, match=r"a.txt, line 1: is not UTF-8.*iconv"):
        list(read_documents([str(tmp_path / "a.txt")], "text"))


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    for name, text in (("a.txt", "text"), ("a.jsonl", '{"text": "text"}')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert list(read_documents([str(tmp_path / name)], "text")) == ["text"]
    (tmp_path / "a.txt").write_bytes("text".encode("utf-8-sig") + b"\n\n\xff")
    assert everything(tmp_path / "a.txt")[0] == Document("text", 4)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet", ".arrow", ".csv", ".jsonl.zst"])
def test_a_file_that_is_gone(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(UserError, match=r"gone.*: cannot be read"):
        list(read_documents([str(tmp_path / f"gone{suffix}")], "text"))


def test_find_inputs(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl.gz", "deep/er/c.txt", "deep/notes.md", "deep/a.parquet.gz", "x[1].txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")

    def found(*patterns: str) -> list[str]:
        return [path.removeprefix(f"{tmp_path}/") for path in find_inputs([f"{tmp_path}/{name}" for name in patterns])]

    assert found("") == ["a.jsonl.gz", "b.txt", "deep/er/c.txt", "x[1].txt"]
    assert found("b.txt", "*.txt", "b.txt") == ["b.txt", "x[1].txt"]
    assert found("x[1].txt") == ["x[1].txt"]
    assert found("**/c.txt") == ["deep/er/c.txt"]
    for pattern, words in [("none", "no such"), ("*.parquet", "no such"), ("deep/notes.md", "unknown type of file")]:
        with pytest.raises(UserError, match=words):
            found(pattern)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: the folder has no"):
        found("empty")
    with pytest.raises(UserError, match="--input: a name is empty"):
        find_inputs([""])


def test_folders_behind_links_are_searched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("elsewhere/a.txt", "elsewhere/in/b.txt", "set/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    for link, target in (("set/link", "elsewhere"), ("set/same", "elsewhere"), ("set/link/in/round", "set")):
        (tmp_path / link).symlink_to(tmp_path / target)
    found = find_inputs([str(tmp_path / "set")])
    assert [name.removeprefix(f"{tmp_path}/set/") for name in found] == ["c.txt", "link/a.txt", "link/in/b.txt"]

    def refuse(place: str) -> object:
        if str(place).endswith("/in"):
            raise PermissionError(13, "Permission denied", str(place))
        return scan(place)

    scan = os.scandir
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"--input .*/set: cannot be read \(.*/link/in: Permission denied\)"):
        find_inputs([str(tmp_path / "set")])


@pytest.mark.parametrize("chunk", [7, 40])
def test_a_line_that_is_too_long_is_a_bad_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Exactly those of more bytes than the limit, with their end, wherever parts of the file begin."""
    monkeypatch.setattr(inputs, "CHUNK", chunk)
    monkeypatch.setattr(tables, "CHUNK", chunk)
    monkeypatch.setattr(inputs, "LONGEST", 50)

    def line(size: int) -> str:
        return json.dumps({"text": "a" * (size - len(json.dumps({"text": ""})))})

    sizes = [20, 49, 50, 20, 300, 49, 51, 20, 90]
    for newline in ("", "\n"):
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(map(line, sizes)) + newline)
        whole = [item for part in read_chunks([str(path)], "text") for item in documents(part, "text")]
        assert [isinstance(item, BadLine) for item in whole] == [size > 49 for size in sizes]
        assert [item.line for item in whole if isinstance(item, BadLine)] == [3, 5, 7, 9]
        assert {item.reason for item in whole if isinstance(item, BadLine)} == {
            "it does not end within 0 MiB; split it into documents"
        }
        for part in read_chunks([str(path)], "text"):
            rest = [item for other in read_chunks([str(path)], "text", part.after) for item in documents(other, "text")]
            assert rest == whole[len(whole) - len(rest) :]


@pytest.mark.parametrize("chunk", [3, 40])
def test_a_document_that_is_too_long_is_a_bad_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(inputs, "CHUNK", chunk)
    monkeypatch.setattr(tables, "CHUNK", chunk)
    monkeypatch.setattr(inputs, "LONGEST", 50)
    path = tmp_path / "a.txt"
    parts = ["a", "b\n" * 30, "c", "d" * 48, "e" * 47, "\nf" * 40, "g", "h" * 200]
    path.write_text("\n \n".join(parts))
    whole = [item for part in read_chunks([str(path)], "text") for item in documents(part, "text")]
    assert ["bad" if isinstance(item, BadLine) else item.text[:1] for item in whole] == [
        *("a", "bad", "c", "bad", "e", "bad", "g", "bad")
    ]
    bad = [item for item in whole if isinstance(item, BadLine)]
    assert [item.line for item in bad[:2]] == [3, 3 + 30 + 2 + 2]
    assert bad[0].reason == "no blank line ends the document within 0 MiB; split it into documents"
    with pytest.raises(UserError, match=r"a\.txt, line 3: no blank line ends the document"):
        list(read_documents([str(path)], "text"))


def test_a_line_without_an_end_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "LONGEST", 1 << 20)
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n')
        file.truncate(64 << 20)  # zeros without an end, which take no room on the disk
        file.seek(0, 2)
        file.write(b'\n{"text": "b"}\n')
    tracemalloc.start()
    whole = [item for part in read_chunks([str(path)], "text") for item in documents(part, "text")]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [getattr(item, "text", "bad") for item in whole] == ["a", "bad", "b"]
    assert peak < 8 << 20


@pytest.mark.parametrize("content", ["one\n\nstill one\r\n", "\ufeffone\n\n\n\nstill one"])
def test_a_text_file_may_be_one_document(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.txt").write_bytes(content.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two\n\nof them\n" * 200_000))
    paths = find_inputs([str(tmp_path)])
    one, two = read_documents(paths, "text", whole_files=True)
    assert re.sub(r"\n+", "|", one) == "one|still one"
    assert two == ("two\n\nof them\n" * 200_000).strip("\n")
    (tmp_path / "a.txt").write_bytes(b"one\n\n\xff")
    with pytest.raises(UserError, match=r"a\.txt, line 3: is not UTF-8"):
        list(read_documents(paths, "text", whole_files=True))


def test_folders_that_datasets_has_saved(tmp_path: Path) -> None:
    """In order, without what the library keeps beside them; of several splits one has to be named."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [f"document {n}" for n in range(20)], "more": [*range(20)]})
    expected = [f"document {n}" for n in range(1, 20, 2)]
    selected = rows.select(range(1, 20, 2))
    selected.save_to_disk(str(tmp_path / "one"), num_shards=3)
    cache = datasets.load_from_disk(str(tmp_path / "one")).map(lambda row: {"text": "x"}, load_from_cache_file=False)
    assert any(Path(file["filename"]).parent == tmp_path / "one" for file in cache.cache_files)
    datasets.DatasetDict({"train": selected}).save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": selected, "test": rows}).save_to_disk(str(tmp_path / "several"))
    for name in ("one", "single", "several/train"):
        assert list(read_documents(find_inputs([str(tmp_path / name)]), "text")) == expected
    with pytest.raises(UserError, match=r"several: has the splits test, train; choose one, e.g. .*several/test"):
        find_inputs([str(tmp_path / "several")])
