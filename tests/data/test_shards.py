"""Shards of WebDataset and of MosaicML, read by their own libraries where these are installed."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from pangu.common.errors import UserError
from pangu.data import tables
from pangu.data.documents import BadLine, documents, read_documents
from pangu.data.finding import find_inputs
from pangu.data.inputs import read_chunks

DOCUMENTS = ["one line", "two\nlines", "  indented, 你好", "tab\there", "the last one"]


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            facts = tarfile.TarInfo(name)
            facts.size = len(content)
            file.addfile(facts, io.BytesIO(content))


def webdataset(folder: Path) -> str:
    pytest.importorskip("webdataset")
    for number, texts in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        samples = {f"{number}{place}.json": json.dumps({"text": text}).encode() for place, text in enumerate(texts)}
        write_tar(folder / f"{number}.tar", samples)
    return f"wds:{folder}/{{0..1}}.tar"


def mds(folder: Path, compression: str | None = "zstd") -> str:
    writer = pytest.importorskip("streaming").MDSWriter
    columns = {"text": "str", "id": "int"}
    with writer(out=str(folder / "mds"), columns=columns, size_limit=100, compression=compression) as out:
        for number, text in enumerate(DOCUMENTS):
            out.write({"text": text, "id": number})
    assert len(list((folder / "mds").glob("shard*"))) > 2
    return f"mds:{folder}/mds"


def everything(name: str, key: str = "text") -> list[str]:
    """The texts, or why there is none."""
    found = (document for chunk in read_chunks([name], key) for document in documents(chunk, key))
    return [str(one) if isinstance(one, BadLine) else one.text for one in found]


@pytest.mark.parametrize("shards", [webdataset, mds])
def test_shards_are_read_from_any_place_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: Callable[[Path], str]
) -> None:
    """Nothing is written beside them, as they may be on a file system that takes no more."""
    name = shards(tmp_path)
    monkeypatch.setattr(tables, "MOST_ROWS", 2)
    before = sorted(tmp_path.rglob("*"))
    assert find_inputs([name]) == [name]
    assert list(read_documents([name], "text")) == DOCUMENTS
    monkeypatch.setattr("pangu.data.inputs.MOST_ROWS", 2)
    chunks = list(read_chunks([name, name], "text"))
    assert [len(chunk.content) for chunk in chunks] == [2, 2, 1] * 2
    for number, chunk in enumerate(chunks):
        assert list(read_chunks([name, name], "text", chunk.after)) == chunks[number + 1 :]
    with pytest.raises(UserError, match=r"a record has no text under 'content'; its keys are \[text\].*--text-key"):
        list(read_documents([name], "content"))
    with pytest.raises(UserError, match=r"gone.*: cannot be read"):
        list(read_documents([name.replace(str(tmp_path), f"{tmp_path}/gone")], "text"))
    assert sorted(tmp_path.rglob("*")) == before


def test_texts_of_webdataset_by_extension(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 or no JSON are bad lines with their place, and nothing is unpickled."""
    pytest.importorskip("webdataset")
    write_tar(tmp_path / "a.tar", {"a.txt": "你好".encode(), "a.pickle": b"\x80", "b.txt": b"\xff"})
    write_tar(tmp_path / "b.tar", {"a.json": b"{", "b.json": b"[1]", "c.json": b'{"text": "c"}'})
    assert everything(f"wds:{tmp_path}/a.tar", "txt") == [
        "你好",
        f"wds:{tmp_path}/a.tar, line 2: has b'\\xff' instead of a string under 'txt'",
    ]
    places = [line.partition(", ")[2][:6] for line in everything(f"wds:{tmp_path}/b.tar")[:2]]
    assert places == ["line 1", "line 2"]
    assert everything(f"wds:{tmp_path}/b.tar")[2:] == ["c"]


def test_pickled_columns_are_refused(tmp_path: Path) -> None:
    writer = pytest.importorskip("streaming").MDSWriter
    with writer(out=str(tmp_path / "mds"), columns={"text": "pkl"}) as out:
        out.write({"text": "text"})
    with pytest.raises(UserError, match=r"mds: cannot be read \(.*unsafe type: pkl"):
        list(read_documents([f"mds:{tmp_path}/mds"], "text"))


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("wds:a.tar", "webdataset", "webdataset"), ("mds:a", "streaming", "mosaicml-streaming")],
)
def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"{name}: needs {package}.*pip install {package} .*extra: streaming"):
        list(read_documents([name], "text"))
