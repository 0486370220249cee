"""Every file that is read is damaged in every way: the answer is a result, or one message that names the file.

The short form damages each kind of file a few times, the long form hundreds of times. A crash of the interpreter, an
error of another kind, an answer that takes seconds, or an escape sequence in a message fails the test.
"""

from __future__ import annotations

import gzip
import json
import lzma
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet

from pangu.checkpoint.files import Slice, checkpoint_path, commit, list_checkpoints, start, write_slices
from pangu.checkpoint.index import checksum, find_damage, read_index, require_facts
from pangu.checkpoint.reading import trained_model
from pangu.checkpoint.run_folder import save_config
from pangu.common.errors import UserError, printable
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.data.documents import documents
from pangu.data.indexed import open_indexed
from pangu.data.inputs import read_chunks
from pangu.data.packing import PackedDocuments, Packing, write_packing
from pangu.data.stdlib import StdlibPaths, is_prepared
from pangu.data.stdlib import find_damage as damage_of_data
from pangu.data.tokenizers import SentencePieceTokenizer
from pangu.interop.formats.mindspore import MindSporeSource
from pangu.metrics.columns import read_columns
from pangu.metrics.record import StepRecord, to_json
from pangu.metrics.writers import JsonLinesWriter
from pangu.models.parameters import logical_shapes
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.prepare.stdlib import prepare_stdlib
from pangu.prepare.vocabulary import train_sentencepiece
from pangu.training.faults import SpikeDetector
from scripts.generate import read_prompts
from tests.checkpoint.test_index import FACTS
from tests.configs import composed
from tests.damage import crafted, damaged
from tests.data.conftest import library_files
from tests.end_to_end.commands import SMALL
from tests.library import PACKING
from tests.pace import processor_time_below
from tests.references import foreign_checkpoints as foreign
from tests.references.pangu_reference import pangu_shapes, random_weights
from tools.inspect_checkpoint import main as inspect
from tools.inspect_data import main as inspect_data
from tools.preprocess_data import main as preprocess

TEXT = "def f(x):\n    return '今天 是一个好天气' <eot> \0"
"""For tokenizers."""


@dataclass(frozen=True)
class Kind:
    """A kind of file."""

    path: str
    """Which file is damaged, below the folder that `files` makes; may hold wildcards."""
    read: Callable[[Path], object]
    """Reads it, given that folder."""
    crafted: bool = False
    """It is JSON, and what it says is changed."""


@cache
def config() -> RunConfig:
    """Of a small run."""
    return build(RunConfig, composed(*SMALL, "data=synthetic", "validation.every=0", "model.vocab=64"))


def _checkpoint(folder: Path) -> None:
    (path,) = list_checkpoints(folder / "run" / "checkpoints")
    index = read_index(path)
    if problems := find_damage(path, index):
        raise UserError("\n".join(problems))
    require_facts(path, index, "step", "skipped", "samples", "loss_scale", "identity")
    trained_model(path, index)
    watch = SpikeDetector(config().faults)
    watch.restore(index.get("watch", {}))
    inspect([str(path), "--diff", str(path)])


def _mindspore(folder: Path) -> None:
    source = MindSporeSource(folder / "mindspore")
    problems: list[str] = []
    found = source.inspect([], problems)
    assert problems or all(0 not in tensor.shape for tensor in found.values())


def _tokenizer(path: Path) -> None:
    tokenizer = SentencePieceTokenizer(path)
    tokenizer.decode(tokenizer.encode(TEXT))
    tokenizer.decode(range(tokenizer.vocab_size))


def _indexed(folder: Path) -> None:
    opened = open_indexed(folder / "tokens")
    opened.tokens[: 1 << 20].astype(np.int64)


def _packing(folder: Path) -> Packing:
    return Packing(str(folder / "whole_documents"), 4, "best_fit", None)


def _packed(folder: Path) -> None:
    documents = PackedDocuments(_packing(folder), 100, PACKING)
    for number in range(documents.num_samples):
        documents.row(number)


def _metrics(folder: Path) -> None:
    JsonLinesWriter(folder / "metrics.jsonl", resumed_step=10).close()
    read_columns(folder / "metrics.jsonl", ("tokens", "loss", "lr", "validation_loss"))


def _data(folder: Path) -> None:
    paths = StdlibPaths(folder / "data")
    if is_prepared(paths, 400, 0.3):
        damage_of_data(paths)


def _documents(path: Path) -> None:
    """Every document, or what stands in its place."""
    for chunk in read_chunks([str(path)], "text"):
        for document in documents(chunk, "text"):
            str(document)


def _inspect_data(folder: Path) -> None:
    if inspect_data([str(folder / "corpus"), "--samples", "1", "--sequence", "8"]):
        raise UserError(f"{folder / 'corpus'}.json, as the command said")


KINDS = {
    "index": Kind("run/checkpoints/*/index.json", _checkpoint),
    "crafted index": Kind("run/checkpoints/*/index.json", _checkpoint, crafted=True),
    "tensors": Kind("run/checkpoints/*/*.safetensors", _checkpoint),
    "configuration": Kind("run/config.yaml", _checkpoint),
    "MindSpore checkpoint": Kind("mindspore/part_0/filerted_0.ckpt", _mindspore),
    "MindSpore strategy": Kind("mindspore/*strategy.ckpt", _mindspore),
    "array": Kind("mindspore/word_embedding.npy", _mindspore),
    "tokens": Kind("tokens.bin", _indexed),
    "index of tokens": Kind("tokens.idx", _indexed),
    "index of packed documents": Kind("*.packing", _packed),
    "SentencePiece": Kind("exact.model", lambda folder: _tokenizer(folder / "exact.model")),
    "unigrams": Kind("jieba.model", lambda folder: _tokenizer(folder / "jieba.model")),
    "manifest": Kind("data/manifest.json", _data),
    "crafted manifest": Kind("data/manifest.json", _data, crafted=True),
    "metrics": Kind("metrics.jsonl", _metrics),
    "crafted metrics": Kind("metrics.jsonl", _metrics, crafted=True),
    "Parquet": Kind("text.parquet", lambda folder: _documents(folder / "text.parquet")),
    "Arrow": Kind("text.arrow", lambda folder: _documents(folder / "text.arrow")),
    "file of Arrow": Kind("file.arrow", lambda folder: _documents(folder / "file.arrow")),
    "packed by zstd": Kind("text.jsonl.zst", lambda folder: _documents(folder / "text.jsonl.zst")),
    "packed by gzip": Kind("text.jsonl.gz", lambda folder: _documents(folder / "text.jsonl.gz")),
    "packed by xz": Kind("text.jsonl.xz", lambda folder: _documents(folder / "text.jsonl.xz")),
    "manifest of tokens": Kind("corpus.json", _inspect_data),
    "crafted manifest of tokens": Kind("corpus.json", _inspect_data, crafted=True),
    "prompts": Kind("prompts.jsonl", lambda folder: read_prompts(folder / "prompts.jsonl")),
}


def _write_texts(folder: Path, texts: list[str]) -> None:
    """The same documents in several kinds of files."""
    table = pyarrow.table({"text": [part for text in texts for part in text.split("\n\n")[:20]]})
    parquet.write_table(table, folder / "text.parquet", row_group_size=20)
    for name, opened in (("text.arrow", pyarrow.ipc.new_stream), ("file.arrow", pyarrow.ipc.new_file)):
        with pyarrow.OSFile(str(folder / name), "wb") as sink, opened(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
    lines = "\n".join(json.dumps(record) for record in table.to_pylist()).encode()
    for suffix, packed in ((".gz", gzip.compress(lines)), (".xz", lzma.compress(lines))):
        (folder / f"text.jsonl{suffix}").write_bytes(packed)
    (folder / "text.jsonl.zst").write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One intact file of each kind, small."""
    folder = tmp_path_factory.mktemp("files")
    checkpoint = checkpoint_path(folder / "run" / "checkpoints", 1)
    start(checkpoint)
    shapes = logical_shapes(config().model).items()
    slices = [(f"weight/{name}", Slice(torch.zeros(shape), shape, (0,) * len(shape))) for name, shape in shapes]
    commit(checkpoint, [write_slices(checkpoint, 0, slices)], FACTS)
    save_config(folder / "run", config())
    weights = random_weights(pangu_shapes(2, 8, 20, 8), dtype=torch.float32)
    foreign.write_slices(folder / "mindspore", weights, 2, 2)
    for name in ("tokens", "whole_documents"):
        with IndexedWriter(folder / name, 100) as writer:
            for length in (3, 0, 5):
                writer.add(range(length))
    write_packing(_packing(folder))
    texts = [path.read_text(encoding="utf-8") for path in library_files("bisect.py", "textwrap.py", "heapq.py")]
    (folder / "exact.model").write_bytes(train_sentencepiece(texts, 400, "bpe"))
    (folder / "jieba.model").write_bytes(train_sentencepiece(texts, 400, "unigram", jieba=True))
    _write_texts(folder, texts)
    words = ("--tokenizer", "sentencepiece", "--tokenizer-path", str(folder / "exact.model"), "--workers", "1")
    assert preprocess(["--input", str(folder / "text.jsonl.gz"), "--output", str(folder / "corpus"), *words]) == 0
    record = StepRecord(1, 100, 5.0, 0.1, 1.0, 0.1, 1000.0, 0.1, None, 0.5, 0, None)
    (folder / "metrics.jsonl").write_text(to_json(record) + "\n")
    (folder / "prompts.jsonl").write_text('{"prompt": "今天"}\n{"prompt": "a ${b}"}\n', encoding="utf-8")
    with pytest.MonkeyPatch.context() as patched:
        library = tmp_path_factory.mktemp("library")
        for path in library_files("bisect.py", "textwrap.py", "heapq.py", "queue.py", "shlex.py"):
            shutil.copy(path, library)
        patched.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
        prepare_stdlib(folder / "data", 400, 0.3, PACKING)
    return folder


def _break(content: bytes, kind: Kind, seed: int) -> bytes:
    if not kind.crafted:
        return damaged(content, seed)
    value = json.loads(content)
    value.pop("checksum", None)
    value = crafted(value, seed)
    return json.dumps({**value, "checksum": checksum(value)} if "tensors" in value else value).encode()


def _try(files: Path, name: str, seeds: range) -> None:
    kind = KINDS[name]
    path = min(files.glob(kind.path))
    intact = path.read_bytes()
    kind.read(files)
    refused = 0
    try:
        for seed in seeds:
            path.write_bytes(_break(intact, kind, seed))
            try:
                with processor_time_below(5.0):
                    kind.read(files)
            except UserError as error:
                refused += 1
                message = printable(str(error))
                assert str(path.name) in message or str(path.parent) in message, (seed, message)
                assert "\x1b" not in message
                assert len(message) < 20_000, (seed, message[:2000])
            except BaseException as error:
                raise AssertionError(f"{name}, damage {seed}: {error!r}") from error
            path.unlink()
    finally:
        path.unlink(missing_ok=True)
        path.write_bytes(intact)
    if name not in ("tokens", "manifest", "crafted manifest", "metrics", "crafted metrics"):
        assert refused, "nothing was refused"


@pytest.mark.parametrize("name", KINDS)
def test_damage_ends_in_one_message(files: Path, name: str) -> None:
    _try(files, name, range(10))


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_damage_ends_in_one_message_hundreds_of_times(files: Path, name: str) -> None:
    _try(files, name, range(10, 410))
