"""Whole documents in samples: no token lost or doubled, none cut without need, and always the same samples."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pangu.common.errors import UserError
from pangu.config.data import PackingConfig
from pangu.data import packing as module
from pangu.data.batch import Row, batch_of
from pangu.data.indexed import IndexedTokens
from pangu.data.loader import Loader
from pangu.data.packing import Method, PackedDocuments, Packing, best_fit_decreasing, write_packing
from pangu.data.stream import SampleStream
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.schedule.schedule import forward_only
from pangu.tasks.scoring import ScoredSpan, score
from pangu.topology.layout import Layout
from pangu.training.run import run
from tests.configs import composed
from tests.end_to_end.commands import SAME_ATTENTION, SAME_PRODUCTS, SMALL, metrics
from tests.evaluation.models import random_model

WriteTokens = Callable[[str, int, Sequence[Sequence[int]]], IndexedTokens]
VOCAB, EOD, PAD = 5000, 4998, 4999
IDS = PackingConfig(EOD, PAD, reset_mask=True, reset_positions=True, method="best_fit")
SHARED = settings(max_examples=40)


def documents_of(lengths: Sequence[int]) -> list[list[int]]:
    """Documents of so many tokens, each different from all others but for the end of the document."""
    stops = np.cumsum(lengths).tolist()
    return [[*range(stop - length, stop - 1), EOD] for length, stop in zip(lengths, stops, strict=True)]


def opened(
    reader: IndexedTokens, sequence: int, method: Method = "best_fit", folder: str | None = None
) -> PackedDocuments:
    packing = Packing(reader.prefix, sequence, method, folder)
    write_packing(packing)
    return PackedDocuments(packing, VOCAB, IDS)


def stream_of(reader: IndexedTokens, documents: PackedDocuments, sequence: int, seed: int) -> SampleStream:
    return SampleStream([(reader, 1.0)], sequence, VOCAB, seed, packed=[documents])


def pieces(row: Row) -> list[list[tuple[int, int]]]:
    """Inputs and labels of each document of a row."""
    stop = int(row.counted.sum())
    assert row.counted[:stop].all()
    assert row.begins[0]
    assert stop == len(row.tokens) or row.begins[stop]
    assert not row.begins[stop + 1 :].any()
    begins = [*np.flatnonzero(row.begins[:stop]).tolist(), stop]
    pairs = list(zip(row.tokens.tolist(), row.labels.tolist(), strict=True))
    return [pairs[begin:end] for begin, end in pairwise(begins)]


@SHARED
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    sequence=st.integers(1, 16),
    seed=st.integers(0, 10**6),
    at_once=st.integers(1, 70),
    method=st.sampled_from(["best_fit", "single"]),
)
def test_each_token_is_predicted_once_in_an_epoch(
    write_tokens: WriteTokens,
    monkeypatch: pytest.MonkeyPatch,
    lengths: list[int],
    sequence: int,
    seed: int,
    at_once: int,
    method: Method,
) -> None:
    """The first of a document behind the end of one, each other one behind the one before it; over epochs, and from
    any place that a run is resumed at."""
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    texts = documents_of(lengths)
    reader = write_tokens("some", VOCAB, texts)
    expected = Counter(pair for text in texts for pair in pairwise([EOD, *text]))
    stream = stream_of(reader, opened(reader, sequence, method), sequence, seed)
    epoch = stream.num_samples
    orders = []
    for first in (0, epoch, 7 * epoch):
        rows = [stream[index] for index in range(first, first + epoch)]
        orders.append([row.labels.tolist() for row in rows if isinstance(row, Row)])
        seen = [piece for row in rows if isinstance(row, Row) for piece in pieces(row)]
        assert Counter(pair for piece in seen for pair in piece) == expected
        # a document is whole if it fits, and otherwise in as few parts as there can be
        assert len(seen) == sum(-(-length // sequence) for length in lengths)
        assert sum(stream.padding(index) for index in range(first, first + epoch)) == epoch * sequence - sum(lengths)
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    resumed = stream_of(
        reader, PackedDocuments(Packing(reader.prefix, sequence, method, None), VOCAB, IDS), sequence, seed
    )
    place = 7 * epoch + seed % epoch
    assert [resumed[i].labels.tolist() for i in range(place, 8 * epoch)] == orders[2][seed % epoch :]


def one_by_one(lengths: Sequence[int], capacity: int) -> list[int]:
    """The room that best-fit decreasing leaves in each bin, piece by piece."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        insort(rooms, (rooms.pop(place) if place < len(rooms) else capacity) - length)
    return rooms


@settings(max_examples=200)
@given(st.integers(1, 30).flatmap(lambda most: st.tuples(st.just(most), st.lists(st.integers(1, most), min_size=1))))
def test_best_fit_decreasing_is_that_of_one_piece_at_a_time(drawn: tuple[int, list[int]]) -> None:
    capacity, lengths = drawn
    bins = best_fit_decreasing(np.array(lengths), capacity)
    filled = np.bincount(bins, weights=lengths)
    assert (filled > 0).all()
    assert sorted((capacity - filled).tolist()) == one_by_one(lengths, capacity)


def test_little_is_left_empty() -> None:
    """Of a corpus whose lengths are as varied as those of real ones."""
    lengths = np.ceil(np.exp(np.random.default_rng(0).normal(5, 1.2, 20_000))).astype(np.int64)
    remainders = lengths[lengths > 1024] % 1024
    sizes = np.concatenate([lengths[lengths <= 1024], remainders[remainders > 0]])
    bins = best_fit_decreasing(sizes, 1024)
    assert sizes.sum() / (1024 * (bins.max() + 1)) > 0.999


def test_epochs_and_seeds_differ_in_order_only(write_tokens: WriteTokens) -> None:
    reader = write_tokens("some", VOCAB, documents_of([5, 3, 8, 2, 2, 7, 4, 9, 30] * 9))
    documents = opened(reader, 16)

    def labels(seed: int, epoch: int) -> list[list[int]]:
        stream = stream_of(reader, documents, 16, seed)
        first = epoch * stream.num_samples
        return [stream[index].labels.tolist() for index in range(first, first + stream.num_samples)]

    orders = [labels(seed, epoch) for seed, epoch in ((1, 0), (1, 1), (2, 0))]
    assert len({str(order) for order in orders}) == 3
    assert len({str(sorted(order)) for order in orders}) == 1
    assert labels(1, 1) == orders[1]


def test_several_sequences_are_one_document(tmp_path: Path, write_tokens: WriteTokens) -> None:
    """As Megatron writes them where it splits sentences; an empty one is none."""
    reader = write_tokens("some", VOCAB, [[1, 2], [3, EOD], [], [4, 5, EOD]])
    index = Path(f"{reader.prefix}.idx")
    content = bytearray(index.read_bytes())
    content[-40:] = np.array([0, 2, 3, 4], "<i8").tobytes()
    content[26:34] = np.array([4], "<i8").tobytes()
    index.write_bytes(content)
    documents = opened(module.open_indexed(reader.prefix), 4, "single")
    assert [pieces(documents.row(number)) for number in range(documents.num_samples)] == [
        [[(EOD, 1), (1, 2), (2, 3), (3, EOD)]],
        [[(EOD, 4), (4, 5), (5, EOD)]],
    ]


def test_the_index_is_made_once_and_anew_for_other_files(write_tokens: WriteTokens, tmp_path: Path) -> None:
    reader = write_tokens("some", VOCAB, documents_of([5, 3, 8]))
    packing = Packing(reader.prefix, 8, "best_fit", None)
    write_packing(packing)
    made = packing.path.stat().st_mtime_ns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["some.best_fit-8.packing", "some.bin", "some.idx"]
    write_packing(packing)
    assert packing.path.stat().st_mtime_ns == made
    write_tokens("some", VOCAB, documents_of([5, 8, 3]))
    with pytest.raises(UserError, match=r"best_fit-8\.packing: does not match the current .*some\.bin"):
        PackedDocuments(packing, VOCAB, IDS)
    write_packing(packing)
    assert PackedDocuments(packing, VOCAB, IDS).num_samples == 2


def test_an_index_that_cannot_be_written_is_kept_elsewhere(
    write_tokens: WriteTokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = [write_tokens(name, VOCAB, documents_of([5, 3, 8])) for name in ("some", "x/some")]
    elsewhere = str(tmp_path / "indexes")
    assert [opened(reader, 8, folder=elsewhere).num_samples for reader in readers] == [2, 2]
    assert len(list(Path(elsewhere).iterdir())) == 2

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(module, "NewFile", refuse)
    with pytest.raises(UserError, match=r"no permission to write there.*data\.packing\.index=FOLDER"):
        opened(readers[0], 8)


def test_the_ids_of_a_sample_are_checked(write_tokens: WriteTokens) -> None:
    reader = write_tokens("some", VOCAB, documents_of([5, 3, 8]))
    write_packing(Packing(reader.prefix, 8, "best_fit", None))
    documents = PackedDocuments(Packing(reader.prefix, 8, "best_fit", None), 4, IDS)
    with pytest.raises(UserError, match=r"contains the id 4998, but model\.vocab = 4; use the tokenizer"):
        documents.row(0)


def test_documents_and_padding_do_not_see_one_another(write_tokens: WriteTokens) -> None:
    """A packed row as a batch; a token that is the padding's in the text loses its weight as ever."""
    reader = write_tokens("some", VOCAB, [[1, 2, EOD], [3, PAD, 4, EOD], [5] * 6 + [EOD]])
    documents = opened(reader, 8)
    batch = batch_of([documents.row(number) for number in range(2)], [3, 4], IDS)
    assert batch.documents is not None
    assert batch.bounds is not None
    rows = sorted(
        zip(
            batch.labels.tolist(),
            batch.documents.tolist(),
            batch.positions.tolist(),
            batch.weights.tolist(),
            strict=True,
        )
    )
    first, second = rows if rows[0][0][0] < 5 else rows[::-1]
    assert second == ([5] * 6 + [EOD, PAD], [0] * 7 + [1], [0, 1, 2, 3, 4, 5, 6, 0], [1] * 7 + [0])
    assert first[1:3] in (
        ([0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 2, 0, 1, 2, 3, 0]),
        ([0, 0, 0, 0, 1, 1, 1, 2], [0, 1, 2, 3, 0, 1, 2, 0]),
    )
    assert sum(first[3]) == 6
    assert first[3][first[0].index(4)] == first[3][-1] == 0
    assert batch.samples == (3, 4)
    assert len(batch.bounds) == 9
    assert batch.bounds[-1] == 16


def test_the_loss_of_a_packed_sample_is_that_of_its_documents_alone(write_tokens: WriteTokens) -> None:
    lengths = [5, 3, 8, 2, 7, 16, 1, 20]
    texts = [[token % 90 for token in text[:-1]] + [100] for text in documents_of(lengths)]
    reader = write_tokens("some", VOCAB, texts)
    ids = PackingConfig(100, 99, reset_mask=True, reset_positions=True, method="best_fit")
    write_packing(Packing(reader.prefix, 16, "best_fit", None))
    documents = PackedDocuments(Packing(reader.prefix, 16, "best_fit", None), 101, ids)
    model = random_model(Layout())
    batch = batch_of(
        [documents.row(number) for number in range(documents.num_samples)], range(documents.num_samples), ids
    )
    (loss,) = model.runner.forward(forward_only(model.schedule, 1), [batch], model.runner.model.loss_of)
    spans = [ScoredSpan((100, *text[:16]), 1) for text in texts] + [ScoredSpan(tuple(texts[-1][15:]), 1)]
    assert int(batch.weights.sum()) == sum(lengths)
    assert float(loss) == pytest.approx(sum(one.loss for one in score(model, spans)), rel=1e-12)


def test_ranks_share_the_same_global_batches(write_tokens: WriteTokens) -> None:
    reader = write_tokens("some", VOCAB, documents_of([5, 3, 8, 2, 2, 7, 4, 9, 30] * 3))
    stream = stream_of(reader, opened(reader, 16), 16, seed=5)

    def rows(micro: int, size: int, consumed: int) -> list[list[int]]:
        seen: dict[int, list[int]] = {}
        for rank in range(size):
            with Loader(stream, IDS, 12, micro, rank, size) as loader:
                for batch in loader.micro_batches(consumed):
                    seen |= dict(zip(batch.samples, batch.labels.tolist(), strict=True))
        return [seen[index] for index in range(consumed, consumed + 12)]

    one = rows(12, 1, 24)
    assert all(rows(micro, size, 24) == one for micro, size in ((1, 1), (2, 3), (3, 4), (1, 6)))


def test_a_run_resumes_exactly_and_says_how_much_is_padding(tmp_path: Path) -> None:
    """With a source more, too, that is drawn from its third step on."""
    for name, lengths in (("corpus", [5, 3, 18, 2, 40, 7, 4, 9, 33, 12]), ("added", [31, 1, 30, 2])):
        with IndexedWriter(tmp_path / name, 64) as writer:
            for text in documents_of(lengths * 4):
                writer.add([token % 60 for token in text[:-1]] + [63])
    both = (f"data.train=[{tmp_path}/corpus,{tmp_path}/added]", "data.weights=[1,0]")
    both += ("data.weight_schedule=[{sample: 8, weights: [1, 3]}]",)

    def train(output: Path, steps: int, *sources: str) -> list[dict[str, float]]:
        files = (*sources, f"data.validation=[{tmp_path}/corpus]", "data.packing.eod=63")
        words = ("data=indexed", *files, "data.packing.method=best_fit", "model.vocab=64", "validation.sequences=4")
        same = (SAME_ATTENTION, SAME_PRODUCTS, "lr_schedule.warmup_steps=1", "lr_schedule.decay_steps=9")
        many = ("checkpoint.every=2", "validation.every=4", "train.device=cpu", f"train.output={output}")
        run(composed(*SMALL, *words, *same, *many, f"train.steps={steps}"))
        return metrics(output)

    whole = train(tmp_path / "whole", 4, *both)
    train(tmp_path / "parts", 2, f"data.train=[{tmp_path}/corpus]")
    (tmp_path / "corpus.best_fit-32.packing").unlink()  # it is made anew, and the same
    parts = train(tmp_path / "parts", 4, *both)
    for one, other in zip(whole, parts, strict=True):
        assert (one["loss"], one["padding"]) == (other["loss"], other["padding"])
    assert whole[-1]["validation_loss"] == parts[-1]["validation_loss"]
    packing = Packing(str(tmp_path / "corpus"), 32, "best_fit", None)
    epoch = PackedDocuments(packing, 64, PackingConfig(63, None, False, False)).num_samples
    assert 0 < np.mean([line["padding"] for line in whole]) < 0.5
    assert epoch == -(-133 * 4 // 32)
