"""Files of kilobytes that stand for gigabytes: little memory, or one message."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pangu.common.errors import UserError
from pangu.data import inputs, tables
from pangu.data.documents import read_documents
from pangu.data.inputs import read_chunks
from pangu.data.tokenizers import HuggingFaceTokenizer

ROWS = 300


def repeated() -> Any:
    """A megabyte that a dictionary repeats in every row."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * ROWS, pyarrow.int32()), pyarrow.array(["a" * 2**20]))


def write_arrow(path: Path, table: Any, open_writer: Callable[..., Any] = pyarrow.ipc.new_file, **options: Any) -> None:
    options = {"options": pyarrow.ipc.IpcWriteOptions(**options)}
    with pyarrow.OSFile(str(path), "wb") as sink, open_writer(sink, table.schema, **options) as writer:
        writer.write_table(table)


@pytest.mark.parametrize("stores_schema", [True, False])
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_dictionary_expands_in_parts(tmp_path: Path, suffix: str, stores_schema: bool) -> None:
    path, table = tmp_path / f"a.{suffix}", pyarrow.table({"text": repeated()})
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, path, compression="zstd", store_schema=stores_schema)
    else:
        write_arrow(path, table, pyarrow.ipc.new_file if stores_schema else pyarrow.ipc.new_stream)
    parts = [len(chunk.content) for chunk in read_chunks([str(path)], "text")]
    assert parts == [1] * ROWS


@pytest.mark.parametrize("open_writer", [pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
@pytest.mark.parametrize("dictionary", [True, False])
def test_a_record_batch_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_writer: Callable[..., Any], dictionary: bool
) -> None:
    monkeypatch.setattr(tables, "MOST_EXPANDED", 2**19)
    path = tmp_path / "a.arrow"
    table = pyarrow.table({"text": repeated() if dictionary else pyarrow.array(["a" * 2**20])})
    write_arrow(path, table, open_writer, compression="zstd")
    with pytest.raises(
        UserError, match=r"a.arrow, record batch 1: .* bytes decompress to 1,0.* 100 times the stored size"
    ):
        list(read_documents([str(path)], "text"))
    write_arrow(path, table, open_writer)
    assert sum(len(chunk.content) for chunk in read_chunks([str(path)], "text")) == table.num_rows


def test_a_page_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_EXPANDED", 2**19)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 2**20]}), tmp_path / "a.parquet", compression="zstd")
    with pytest.raises(UserError, match=r"a.parquet, row group 1: .* bytes decompress to 1,0"):
        list(read_documents([str(tmp_path / "a.parquet")], "text"))


@pytest.mark.parametrize(("name", "begin", "end"), [("a.jsonl.gz", "", "\n"), ("a.json.gz", "[", "]")])
def test_a_record_of_countless_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, begin: str, end: str
) -> None:
    monkeypatch.setattr(inputs, "MOST_VALUES", 1000)
    text = ',\\"' * 2000
    record = f'{{"text": "{text}", "more": [{"[]," * 998}[]]}}'
    path = tmp_path / name
    path.write_bytes(gzip.compress(f"{begin}{record}{end}".encode()))
    assert list(read_documents([str(path)], "text")) == [',"' * 2000]
    many = record.replace("[[]", f"[{'[],' * 800_000}[]")
    path.write_bytes(gzip.compress(f"{begin}{many}{end}".encode()))
    with pytest.raises(UserError, match=r"has more than [\d,]+ values"):
        list(read_documents([str(path)], "text"))


def test_code_beside_a_tokenizer_is_not_run_whatever_the_user_would_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers would ask at a terminal whether to run it."""
    pytest.importorskip("transformers")
    code, trace = tmp_path / "tokenization_x.py", tmp_path / "ran"
    code.write_text(
        f"from transformers import PreTrainedTokenizerFast\nopen({str(trace)!r}, 'w')\n"
        "class X(PreTrainedTokenizerFast): pass\n"
    )
    facts = {"tokenizer_class": "X", "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(facts))
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(UserError, match="custom code"):
        HuggingFaceTokenizer(tmp_path)
    assert not trace.exists()
