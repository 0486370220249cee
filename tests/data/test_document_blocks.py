"""Packing of whole documents in text that is read during training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.config.data import StreamData
from pangu.data import document_blocks
from pangu.data.batch import Row, Sample
from pangu.data.loader import Loader
from tests.data.test_text_stream import EOD, PACKING, SEQUENCE, WORDS, opened, stream_of, write

BOS = 257


def packed(path: Path, method: str = "best_fit", bos: int | None = None, **options: Any) -> StreamData:
    return stream_of(path, packing=replace(PACKING, method=method, bos=bos, reset_mask=True), **options)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in an epoch, which end among its documents."""
    monkeypatch.setattr(document_blocks, "BLOCK_TOKENS", 250)
    monkeypatch.setattr(document_blocks, "FEWEST_SAMPLES", 3)


def pieces(sample: Sample) -> list[list[int]]:
    """First input and labels of each piece of a sample, whose inputs are its labels but the last."""
    assert isinstance(sample, Row)
    size = int((~sample.padding).sum())
    assert (sample.counted == ~sample.padding).all()
    starts = np.flatnonzero(sample.begins[:size])
    parts = [slice(start, stop) for start, stop in zip(starts, [*starts[1:], size], strict=True)]
    assert all((sample.tokens[part][1:] == sample.labels[part][:-1]).all() for part in parts)
    return [[int(sample.tokens[part][0]), *sample.labels[part].tolist()] for part in parts]


def as_lists(samples: Sequence[Sample]) -> list[list[list[int]]]:
    return [pieces(sample) for sample in samples]


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=8, max_size=60),
    span=st.sampled_from([0, 40, 10**9]),
    method=st.sampled_from(["best_fit", "single"]),
    bos=st.sampled_from([None, BOS]),
)
def test_an_epoch_has_each_document_once_and_cuts_only_long_ones(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], span: int, method: str, bos: int | None
) -> None:
    path = write(
        tmp_path_factory.mktemp("text") / "a.jsonl", [chr(97 + i % 26) * n + str(i) for i, n in enumerate(lengths)]
    )
    documents = [[*f"{chr(97 + i % 26) * n}{i}".encode(), EOD] for i, n in enumerate(lengths)]
    first = EOD if bos is None else bos
    expected = sorted(
        [first if not start else labels[start - 1], *labels[start : start + SEQUENCE]]
        for labels in documents
        for start in range(0, len(labels), SEQUENCE)
    )
    stream = opened(packed(path, method, bos, shuffle=span)).train
    found: list[list[int]] = []
    index = 0
    for _ in range(2):
        epoch: list[list[int]] = []
        while len(epoch) < len(expected):
            epoch += pieces(stream[index])
            index += 1
        assert sorted(epoch) == expected
        found += epoch
    if method == "single":
        assert index == 2 * len(expected)


def test_samples_are_nearly_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document_blocks, "BLOCK_TOKENS", 10**5)
    stream = opened(packed(write(tmp_path / "a.jsonl", [f"{i:x}" * (1 + i % 9) for i in range(3000)])), 64).train
    padding = np.mean([sample.padding for sample in map(stream.__getitem__, range(300)) if isinstance(sample, Row)])
    assert padding < 0.02


@pytest.mark.parametrize("method", ["best_fit", "single"])
def test_a_run_goes_on_from_any_place(tmp_path: Path, method: str) -> None:
    data = packed(write(tmp_path / "a.jsonl"), method)
    stream = opened(data).train
    whole = as_lists([stream[index] for index in range(420)])
    stream = opened(data).train
    for index in range(390):
        stream[index]
        if index % 23 == 0:
            resumed = opened(data).train
            resumed.resume(json.loads(json.dumps(stream.position)))
            assert as_lists([resumed[i] for i in range(index + 1, index + 30)]) == whole[index + 1 : index + 30]


def test_every_layout_has_the_same_batches(tmp_path: Path) -> None:
    data = packed(write(tmp_path / "a.jsonl"))

    def batches(ranks: int, micro: int) -> dict[int, tuple[Any, ...]]:
        loaders = [Loader(opened(data).train, data.packing, 12, micro, rank, ranks) for rank in range(ranks)]
        rows = [batch for loader in loaders for batch in loader.micro_batches(12)]
        for loader in loaders:
            loader.close()
        tensors = ("tokens", "labels", "weights", "documents", "padding")
        return {
            number: tuple(getattr(batch, name)[row].tolist() for name in tensors)
            for batch in rows
            for row, number in enumerate(batch.samples)
        }

    assert batches(1, 12) == batches(3, 2) == batches(4, 1)
    assert sorted(batches(4, 1)) == list(range(12, 24))


def test_the_padding_of_a_batch_is_that_of_its_samples(tmp_path: Path) -> None:
    """On the first of several ranks, which reads some of the samples, and after it has gone back."""
    path = write(tmp_path / "a.jsonl")
    data = packed(path, "single", validation=(str(path),))
    sources, reread = opened(data, num_validation=9), opened(data).train
    paddings = [int(sample.padding.sum()) for sample in map(reread.__getitem__, range(36)) if isinstance(sample, Row)]
    with Loader(sources.train, data.packing, 12, 2, 0, 3) as loader:
        for first in (0, 12, 24, 12):
            loader.micro_batches(first)
            assert loader.padding == sum(paddings[first : first + 12]) / (12 * SEQUENCE) > 0
    assert sources.validation is not None
    held_out = [sources.validation[index] for index in range(9)]
    assert [sources.validation.padding(index) for index in range(9)] == [
        int(sample.padding.sum()) for sample in held_out if isinstance(sample, Row)
    ]


@pytest.mark.parametrize("method", ["best_fit", "single"])
@pytest.mark.parametrize("longer", [SEQUENCE // 2, 2 * SEQUENCE])
def test_a_run_continues_a_block_with_samples_of_another_length(tmp_path: Path, method: str, longer: int) -> None:
    """After as many tokens of the block, or with the next block if it has fewer samples; a save in between is exact."""
    data = packed(write(tmp_path / "a.jsonl"), method)
    stream = opened(data).train
    for index in range(0, 60, 3):
        stream[index]
        position, following = json.loads(json.dumps(stream.position)), -(-(index + 1) * SEQUENCE // longer)
        (block,) = position["sources"]
        resumed = opened(data, longer).train
        resumed.resume({**position, "samples": following})
        assert resumed.position is not None
        assert resumed.position["sources"] == position["sources"]
        sample = pieces(resumed[following])
        assert resumed.position["sources"][0]["sequence"] == longer
        again = opened(data, longer).train
        again.resume(json.loads(json.dumps(resumed.position)))
        assert pieces(again[following + 1]) == pieces(resumed[following + 1])
        first = opened(data, longer).train
        first.resume({"facts": position["facts"], "samples": 0, "sources": [{"block": block["block"], "taken": 0}]})
        whole = [pieces(first[0])]
        while (first.position or {})["sources"][0]["block"] == block["block"]:
            whole.append(pieces(first[len(whole)]))
        assert sample == whole[min(-(-block["taken"] * SEQUENCE // longer), len(whole) - 1)]


def test_held_out_documents_come_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    sources = opened(packed(path, validation=(str(path),)), num_validation=10**4)
    assert sources.validation is not None
    samples = [sources.validation[index] for index in range(sources.validation.num_samples or 0)]
    labels = [label for sample in as_lists(samples) for piece in sample for label in piece[1:]]
    assert len(labels) == sum(len(text) + 1 for text in WORDS)


def test_a_checkpoint_of_other_samples_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    stream = opened(packed(path)).train
    stream[5]
    position = json.loads(json.dumps(stream.position))
    with pytest.raises(UserError, match=r"data\.packing\.method = null: the checkpoint has best_fit"):
        opened(stream_of(path)).train.resume(position)
    position["sources"][0]["taken"] = 10**6
    resumed = opened(packed(path)).train
    resumed.resume(position)
    with pytest.raises(UserError, match="has changed since the checkpoint was written"):
        resumed[6]
