"""Text that is encoded, shuffled and packed while it is read: exact on every layout, and after every resume."""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.config.data import PackingConfig, StreamData, TokenizerConfig
from pangu.config.model import ModelConfig
from pangu.data import inputs, packed_source, tables
from pangu.data import loader as loader_module
from pangu.data.documents import held_out
from pangu.data.finding import find_inputs
from pangu.data.loader import Loader
from pangu.data.sources import Sources, open_sources
from pangu.data.text_stream import TextStream
from pangu.prepare.corpora import prepare
from tests.configs import tiny

EOD, SEQUENCE = 256, 16
PACKING = PackingConfig(eod=None, pad=None, reset_mask=False, reset_positions=False)
WORDS = [f"document {i} " + "and more " * (i % 7) for i in range(60)]


def stream_of(*train: object, **options: Any) -> StreamData:
    values: dict[str, Any] = {
        "weights": None,
        "validation": (),
        "holdout": 0.0,
        "text_key": "text",
        "shuffle": 300,
        "max_bad": 0,
        "workers": 1,
        "tokenizer": TokenizerConfig("bytes"),
        "packing": PACKING,
    }
    return StreamData("stream", tuple(map(str, train)), **{**values, **options})


def model(sequence: int = SEQUENCE) -> ModelConfig:
    return replace(tiny().model, vocab=300, sequence=sequence)


def opened(data: StreamData, sequence: int = SEQUENCE, seed: int = 1, **sizes: int) -> Sources:
    prepare(data, model(sequence), show_progress=False)
    return open_sources(data, model(sequence), seed, **sizes)


def samples(data: StreamData, count: int, **options: Any) -> list[list[int]]:
    train = opened(data, **options).train
    return [train[index].tolist() for index in range(count)]


def texts_of(rows: Sequence[Sequence[int]]) -> list[str]:
    """The documents that samples hold, which overlap by a token; the last one may be cut."""
    row = [*rows[0], *(token for sample in rows[1:] for token in sample[1:])]
    text = bytes(token if token != EOD else 0 for token in row)
    return [part.decode() for part in text.split(b"\0")]


def write(path: Path, texts: Sequence[str] = WORDS) -> Path:
    """A file of the kind that its name says."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    match "".join(path.suffixes):
        case ".jsonl":
            path.write_bytes(lines)
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(lines))
        case ".jsonl.zst":
            path.write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
        case ".txt":
            path.write_text("\n\n".join(texts), encoding="utf-8")
        case ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), path, row_group_size=7)
        case ".arrow":
            table = pyarrow.table({"text": list(texts)})
            with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=7)
    return path


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks, and several parts of each."""
    monkeypatch.setattr(inputs, "CHUNK", 200)
    monkeypatch.setattr(tables, "CHUNK", 200)
    monkeypatch.setattr(packed_source, "_AT_ONCE", 60)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=5, max_size=60),
    span=st.sampled_from([0, 1, 40, 300, 10**9]),
    files=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_an_epoch_has_each_document_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], span: int, files: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    texts = [chr(97 + number % 26) * length + str(number) for number, length in enumerate(lengths)]
    for number in range(files):
        write(folder / f"{number}.jsonl", texts[number::files])
    tokens = sum(len(text) + 1 for text in texts)
    rows = samples(stream_of(folder, shuffle=span), 3 * tokens // 4 + 2, sequence=4, seed=seed)
    read = texts_of(rows)
    for epoch in range(3):
        assert sorted(read[epoch * len(texts) : (epoch + 1) * len(texts)]) == sorted(texts)
    if not span:
        assert read[: len(texts)] == [text for number in range(files) for text in texts[number::files]]


def test_each_file_and_each_held_out_sample_is_progress(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl") for name in "ab"]
    data, heard = stream_of(*files, holdout=0.3), list[None]()
    prepare(data, model(), False, lambda: heard.append(None))
    assert len(heard) == len(files)
    heard.clear()
    sources = open_sources(data, model(), 1, 1, 3, lambda: heard.append(None))
    assert sources.validation is not None
    assert sources.validation.num_samples == 3
    assert len(heard) == len(files) + 3


def test_seeds_and_epochs_have_orders_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    data, count = stream_of(tmp_path), 2 * sum(len(text) + 1 for text in WORDS) // SEQUENCE
    first, other = (texts_of(samples(data, count, seed=seed)) for seed in (1, 2))
    assert samples(data, 20, seed=1) == samples(data, 20, seed=1)
    assert first[:60] != other[:60]
    assert first[:60] != first[60:119] != WORDS[:59]


KINDS = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.txt", "a.parquet", "a.arrow"]


@pytest.mark.parametrize("kind", [*KINDS, "hf"])
def test_a_run_goes_on_from_any_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Through the text of a checkpoint, in the middle of files, chunks, documents and what is being shuffled."""
    path = write(tmp_path / "set" / ("train.jsonl" if kind == "hf" else kind))
    data = stream_of(f"hf:{path.parent}::train" if kind == "hf" else path)
    whole = samples(data, 260)
    epoch = sum(len(text) + 1 for text in WORDS) // SEQUENCE
    assert epoch < 190
    stream = opened(data).train
    for index in range(200):
        stream[index]
        if index in (0, 1, 2, 37, epoch - 1, epoch, 199):
            resumed = opened(data).train
            resumed.resume(json.loads(json.dumps(stream.position)))
            assert [resumed[i].tolist() for i in range(index + 1, index + 30)] == whole[index + 1 : index + 30]


def test_going_on_reads_what_is_shuffled_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", WORDS * 20)
    stream = opened(stream_of(path)).train
    stream[2000]
    resumed = opened(stream_of(path)).train
    resumed.resume(stream.position)
    read = 0
    original = inputs._text_chunks

    def counted(*arguments: Any) -> Any:
        nonlocal read
        for chunk in original(*arguments):
            read += len(chunk.content)
            yield chunk

    monkeypatch.setattr(inputs, "_text_chunks", counted)
    assert resumed[2001].tolist() == stream[2001].tolist()
    assert 0 < read < 3000 < path.stat().st_size / 10


def test_any_sample_can_be_asked_for(tmp_path: Path) -> None:
    """What a rollback does: back, beyond what it leaves out, and to before a position."""
    data = stream_of(write(tmp_path / "a.jsonl"))
    whole = samples(data, 100)
    stream = opened(data).train
    for index in (50, 51, 50, 3, 99, 60):
        assert stream[index].tolist() == whole[index]
    resumed = opened(data).train
    resumed.resume(stream.position)
    for index in (90, 61, 10):
        assert resumed[index].tolist() == whole[index]
    resumed.close()
    assert resumed[61].tolist() == whole[61]


def test_sources_are_blended_by_their_weights(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.jsonl", [name * 40] * 30) for name in "ab"]
    data = stream_of(*paths, weights=(1.0, 3.0))
    rows = samples(data, 200)
    of_b = [ord("b") in row for row in rows]
    assert sum(of_b[:100]) == 75
    assert not any(ord("a") in row and ord("b") in row for row in rows)
    stream = opened(data).train
    stream[77]
    resumed = opened(data).train
    resumed.resume(json.loads(json.dumps(stream.position)))
    assert [resumed[index].tolist() for index in range(78, 120)] == rows[78:120]
    with pytest.raises(UserError, match=r"a\.jsonl: weight 1e-05 is less than 1/10000 of the sum"):
        opened(stream_of(*paths, weights=(1e-5, 3.0)))


def test_every_layout_has_the_same_batches_after_a_resume_under_another(tmp_path: Path) -> None:
    data = stream_of(write(tmp_path / "a.jsonl"))
    whole = samples(data, 96)

    def batch(loaders: Sequence[Loader], consumed: int) -> dict[int, list[int]]:
        rows = [micro for loader in loaders for micro in loader.micro_batches(consumed)]
        pairs = [(i, tokens) for micro in rows for i, tokens in zip(micro.samples, micro.tokens.tolist(), strict=True)]
        return dict(pairs)

    position = None
    consumed = 0
    for size, micro in ((1, 12), (3, 2), (2, 3), (4, 1)):
        loaders = []
        for rank in range(size):
            stream = opened(data).train
            stream.resume(position)
            loaders.append(Loader(stream, PACKING, 12, micro, rank, size))
        for _ in range(2):
            expected = {index: whole[index][:-1] for index in range(consumed, consumed + 12)}
            assert batch(loaders, consumed) == expected
            consumed += 12
        position = json.loads(json.dumps(loaders[-1].position))
        assert position["samples"] == consumed
        for loader in loaders:
            loader.close()


def test_files_behind_urls(tmp_path: Path) -> None:
    import fsspec

    for name in KINDS:
        local = write(tmp_path / name)
        expected = samples(stream_of(local), 150)
        with fsspec.open(f"memory://corpus-{name}/{name}", "wb") as file:
            file.write(local.read_bytes())
        for url in (
            f"file://{local}",
            f"memory://corpus-{name}/{name}",
            f"memory://corpus-{name}/",
            "memory://corpus-a*/",
        ):
            if "*" not in url:
                assert samples(stream_of(url), 150) == expected, url
        stream = opened(stream_of(f"file://{local}")).train
        stream[60]
        resumed = opened(stream_of(local)).train  # the same file by another name
        resumed.resume(stream.position)
        assert resumed[61].tolist() == expected[61]
    assert find_inputs(["memory://corpus-*/*.jsonl"]) == ["memory:///corpus-a.jsonl/a.jsonl"]


def test_documents_are_held_out_by_their_hash(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    data = stream_of(tmp_path / "a.jsonl", holdout=0.3)
    outside = [text for text in WORDS if held_out(text, 0.3)]
    assert 5 < len(outside) < 35
    sources = opened(data, num_validation=1000)
    assert sources.validation is not None
    assert sources.validation.num_samples is not None
    rows = [sources.validation[index].tolist() for index in range(sources.validation.num_samples)]
    assert texts_of(rows)[: len(outside) - 1] == outside[:-1]
    tokens = sum(len(text) + 1 for text in WORDS if text not in outside)
    trained = texts_of([sources.train[index].tolist() for index in range(tokens // SEQUENCE + 1)])
    assert set(trained[:-1]) == set(WORDS) - set(outside)
    assert opened(data, num_validation=3).validation.num_samples == 3
    assert opened(data).validation is None


def test_held_out_files(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.txt", ["held out, " * 5, "the end"])
    sources = opened(stream_of(tmp_path / "a.jsonl", validation=(str(tmp_path / "b.txt"),)), num_validation=100)
    assert sources.validation is not None
    assert sources.validation.num_samples == (50 + 1 + 7 + 1 - 1) // SEQUENCE
    assert bytes(sources.validation[0].tolist()) == b"held out, held ou"


def test_worker_processes_change_nothing(tmp_path: Path) -> None:
    data = stream_of(write(tmp_path / "a.jsonl"))
    with_workers = opened(replace(data, workers=2)).train
    assert [with_workers[index].tolist() for index in range(150)] == samples(data, 150)
    with_workers.close()


def test_ids_of_the_configuration_end_documents(tmp_path: Path) -> None:
    data = stream_of(write(tmp_path / "a.jsonl"), packing=replace(PACKING, eod=299))
    row = [token for sample in samples(data, 20) for token in sample]
    assert 299 in row
    assert EOD not in row


def resumed_with(data: StreamData, position: dict[str, Any] | None) -> None:
    stream = opened(data).train
    stream.resume(position)
    stream[51]


CHANGES: list[tuple[Callable[[Path], dict[str, Any]], str]] = [
    (lambda path: {"shuffle": 5}, r"  data\.shuffle = 5: the checkpoint has 300"),
    (lambda path: {"holdout": 0.1}, r"  data\.holdout = 0\.1: the checkpoint has 0\.0"),
    (
        lambda path: {"train": (f"{path}/a.jsonl", f"{path}/b.jsonl")},
        r"data\.train: b\.jsonl of 20 bytes, but the checkpoint has",
    ),
    (lambda path: {"packing": replace(PACKING, eod=299)}, r"data\.packing\.eod = 299: the checkpoint has 256"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=["shuffle", "holdout", "files", "eod"])
def test_a_checkpoint_of_other_data_is_refused(
    tmp_path: Path, change: Callable[[Path], dict[str, Any]], message: str
) -> None:
    write(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text('{"text": "a text !"}', encoding="utf-8")
    data = stream_of(tmp_path / "a.jsonl")
    stream = opened(data).train
    stream[50]
    position = stream.position
    resumed_with(data, position)
    with pytest.raises(UserError, match=message) as caught:
        resumed_with(replace(data, **change(tmp_path)), position)
    assert "restore these files and values, or set another train.output" in str(caught.value)


def test_text_that_has_changed_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    stream = opened(stream_of(path)).train
    stream[50]
    position = stream.position
    content = path.read_bytes()
    path.write_bytes(content.replace(b"document", b"Document"))
    with pytest.raises(UserError, match=r"a\.jsonl: has changed since the checkpoint was written"):
        resumed_with(stream_of(path), position)
    path.write_bytes(content[:-5])
    with pytest.raises(
        UserError, match=rf"a\.jsonl of {len(content) - 5} bytes, but the checkpoint has .* of {len(content)}"
    ):
        resumed_with(stream_of(path), position)


@pytest.mark.parametrize("damage", [{"facts": {}}, {"samples": "x"}, {"sources": []}, {"sources": [{"epoch": 0}]}])
def test_a_damaged_place_is_one_message(tmp_path: Path, damage: dict[str, Any]) -> None:
    stream = opened(stream_of(write(tmp_path / "a.jsonl"))).train
    stream[50]
    with pytest.raises(UserError, match="the data position of the checkpoint: is damaged"):
        resumed_with(stream_of(tmp_path / "a.jsonl"), {**(stream.position or {}), **damage})


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_truncated_file_is_named_again_and_again(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [f"{number} {number * 7919 % 1000}" for number in range(2000)])
    path.write_bytes(path.read_bytes()[:-40])
    stream = opened(stream_of(path)).train
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{name}: cannot be read") as caught:
            stream[3000]
        assert "\n" not in str(caught.value)


def test_what_cannot_be_read(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    for entry, message in (
        (tmp_path / "gone.jsonl", r"data\.train .*gone\.jsonl: no such file or folder"),
        ("memory://nowhere/a.jsonl", r"data\.train memory://nowhere/a\.jsonl: no such file or folder"),
        ("nothing://a/b.jsonl", r"data\.train nothing://a/b\.jsonl: cannot be found \(Protocol not known: nothing"),
        (tmp_path / "a.doc", r"a\.doc: unknown type of file; supported types: \.txt, \.jsonl"),
    ):
        (tmp_path / "a.doc").write_text("text")
        with pytest.raises(UserError, match=message):
            opened(stream_of(entry))
    with pytest.raises(UserError, match=r"data\.validation .*gone\.jsonl: no such file"):
        opened(stream_of(tmp_path / "a.jsonl", validation=(str(tmp_path / "gone.jsonl"),)))
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(UserError, match=r"data\.train .*pipe\.txt: is not a regular file, but each epoch"):
        opened(stream_of(tmp_path / "pipe.txt"))
    (tmp_path / "binary.jsonl").write_bytes(b"\x80\x04\x95")
    with pytest.raises(UserError, match=r"binary\.jsonl, line 1: is not UTF-8; limit reached: data\.max_bad = 0"):
        samples(stream_of(tmp_path / "binary.jsonl"), 1)
    with pytest.raises(UserError, match=r"a\.jsonl, line 1: has no text under 'body'.*data\.text_key"):
        samples(stream_of(tmp_path / "a.jsonl", text_key="body"), 1)


def test_bad_lines_are_left_out_up_to_a_number(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl")
    expected = samples(stream_of(path), 150)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:3], b"{\n", *lines[3:50], b'{"texts": 1}\n', *lines[50:]]))
    assert samples(stream_of(path, max_bad=2), 150) == expected  # in each of two epochs
    assert f"skipped: {path}, line 4: is not JSON" in caplog.text
    with pytest.raises(
        UserError, match=r"line 52: has no text .*; limit reached: data.max_bad = 1 bad lines per epoch"
    ):
        samples(stream_of(path, max_bad=1), 150)
    stream = opened(stream_of(path, max_bad=2)).train
    stream[85]
    assert stream.position is not None
    assert stream.position["sources"][0]["bad"] in (1, 2)


def test_text_that_is_too_short(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["a" * 100])
    assert samples(stream_of(path), 8)[0][0] == ord("a")
    message = r"a\.jsonl: an epoch has 101 tokens, but a batch needs 113 \(7 x model\.sequence = 16, .*; use more text"
    with pytest.raises(UserError, match=message):
        samples(stream_of(path), 8, global_size=7)
    blank = write(tmp_path / "b.jsonl", [" "])
    with pytest.raises(UserError, match="an epoch has 0 tokens"):
        samples(stream_of(blank), 1)
    with pytest.raises(UserError, match=r"b\.jsonl: an epoch has 0 tokens"):
        opened(stream_of(path, validation=(str(blank),)), num_validation=1)


def test_what_waits_is_bounded(tmp_path: Path) -> None:
    stream = opened(stream_of(write(tmp_path / "a.jsonl", WORDS * 20), shuffle=500)).train
    assert isinstance(stream, TextStream)
    most = 0
    for index in range(1500):
        stream[index]
        waiting = stream._sources[0]._shuffle._waiting
        most = max(most, sum(len(ids) for _, (_, ids) in waiting))
    assert 250 < most < 500 + 200 + max(map(len, WORDS))


def test_samples_are_what_loaders_expect(tmp_path: Path) -> None:
    first = opened(stream_of(write(tmp_path / "a.jsonl"))).train[0]
    assert first.shape == (SEQUENCE + 1,)
    assert first.dtype == np.int64


def test_a_source_that_waits_for_its_turn_keeps_its_place(tmp_path: Path) -> None:
    """In a checkpoint between a resume and its next sample."""
    paths = [write(tmp_path / f"{name}.jsonl") for name in "ab"]
    data = stream_of(*paths, weights=(1.0, 20.0))
    whole = samples(data, 130)
    position = None
    for index in range(100, 125):
        stream = opened(data).train
        stream.resume(position)
        assert stream[index].tolist() == whole[index]
        position = json.loads(json.dumps(stream.position))


def test_a_slow_disk_is_hidden_behind_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that each read of a part of the file moves on by a second: nobody waits for what is read beside."""
    clock = 0.0

    class Disk(io.BufferedReader):
        def read(self, size: int | None = -1, /) -> bytes:
            nonlocal clock
            clock += 1
            return super().read(size)

    monkeypatch.setattr(inputs, "_open", lambda source, packed: Disk(io.FileIO(source)))
    monkeypatch.setattr(loader_module, "time", SimpleNamespace(perf_counter=lambda: clock))
    data = stream_of(write(tmp_path / "a.jsonl", WORDS * 10), shuffle=0)
    with Loader(opened(data).train, PACKING, 32, 32, 0, 1) as loader:
        loader.micro_batches(0)
        assert loader.waited_s >= 2
        for step in range(1, 5):
            before = clock
            assert loader._ahead is not None
            loader._ahead[1].result()  # as long as the step takes
            loader.micro_batches(32 * step)
            assert loader.waited_s == 0
            assert clock >= before
        assert clock >= 10
