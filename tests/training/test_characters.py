"""The benchmark of characters compares two models of the same size on the same batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.characters import BATCH, HIDDEN, LAYERS, SEQUENCE, CharacterGPT, batches, rate, train_plain, words
from pangu.config.schema import RunConfig
from pangu.data.batch import batch_of
from pangu.data.sources import open_sources
from pangu.models.size import num_parameters
from pangu.optim.lr_schedule import learning_rate
from pangu.prepare.indexed_writer import IndexedWriter
from tests.configs import config

VOCAB = 7


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for name, size in (("train", 5000), ("held_out", 1500)):
        with IndexedWriter(tmp_path / name, VOCAB) as writer:
            writer.add(np.arange(size) % VOCAB)
    return tmp_path


def ours(text: Path) -> RunConfig:
    return config("+config=gpt2_124m", *words(text, VOCAB, seed=3, steps=200, every=100))


def test_both_have_the_same_tensors_but_for_biases_of_norms(text: Path) -> None:
    plain = sum(parameter.numel() for parameter in CharacterGPT(VOCAB).parameters())
    assert num_parameters(ours(text).model) - plain == (2 * LAYERS + 1) * HIDDEN


def test_both_read_the_same_batches(text: Path) -> None:
    run = ours(text)
    sources = open_sources(run.data, run.model, run.train.seed)
    for step, samples in enumerate(batches(text, "train", VOCAB, run.train.seed, 3, BATCH)):
        indices = range(step * BATCH, (step + 1) * BATCH)
        batch = batch_of([sources.train[index] for index in indices], indices, run.data.packing)
        assert torch.equal(batch.tokens, samples[:, :-1])
        assert torch.equal(batch.labels, samples[:, 1:])
    held_out = torch.cat(list(batches(text, "held_out", VOCAB, None, None, 4)))
    assert held_out.shape == (1500 // SEQUENCE, SEQUENCE + 1)
    assert torch.equal(held_out[:, 1:-1], held_out[:, :-2].add(1).remainder(VOCAB))


def test_both_have_the_same_learning_rates(text: Path) -> None:
    run = ours(text)
    for update in (0, 50, 99, 100, 150, 199):
        expected = learning_rate(run.lr_schedule, run.optimizer.lr, run.train.steps, update)
        assert rate(update, run.train.steps) == pytest.approx(expected, rel=1e-12)


def test_the_plain_model_learns(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    curve, _ = train_plain(text, VOCAB, 1, 30, 15)
    assert [step for step, _ in curve] == [15, 30]
    assert curve[-1][1] < curve[0][1] < np.log(VOCAB)
