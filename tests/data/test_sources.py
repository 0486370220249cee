"""From the configuration to streams."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path

import pytest

from pangu.common.errors import UserError
from pangu.config.data import IndexedData, PackingConfig, StdlibData, SyntheticData, TokenizerConfig
from pangu.config.model import ModelConfig
from pangu.data.indexed import IndexedTokens
from pangu.data.sources import open_sources, tokenizer_of
from pangu.data.stdlib import StdlibPaths
from pangu.prepare.corpora import prepare
from tests.configs import tiny
from tests.library import FRACTION, PACKING, VOCAB

WriteTokens = Callable[[str, int, Sequence[Sequence[int]]], IndexedTokens]


def model(vocab: int = VOCAB, sequence: int = 16) -> ModelConfig:
    return replace(tiny().model, vocab=vocab, sequence=sequence)


def indexed(
    train: list[str], validation: list[str], tokenizer: str | None = None, weights: tuple[float, ...] | None = None
) -> IndexedData:
    config = TokenizerConfig("sentencepiece", tokenizer) if tokenizer else None
    return IndexedData("indexed", tuple(train), weights, tuple(validation), config, PACKING)


def stdlib(folder: Path, fraction: float = FRACTION) -> StdlibData:
    return StdlibData("stdlib", str(folder), fraction, PACKING)


def test_stdlib(prepared: StdlibPaths) -> None:
    data = stdlib(prepared.folder)
    prepare(data, model(), show_progress=False)
    sources = open_sources(data, model(), seed=1)
    assert sources.train[0].shape == (17,)
    assert sources.tokenizer is not None
    assert sources.validation is not None
    assert sources.tokenizer.eod == 9
    assert sources.validation.num_samples is not None
    assert sources.train.num_samples is not None
    assert 1000 < sources.validation.num_samples < sources.train.num_samples
    # In plain order the held-out samples begin with the first held-out file; the training samples are shuffled.
    first, second = sources.validation[0].tolist(), sources.validation[1].tolist()
    assert first[-1] == second[0]
    assert sources.train[0].tolist()[-1] != sources.train[1].tolist()[0]
    assert (open_sources(data, model(), seed=1).train[0] == sources.train[0]).all()
    assert (open_sources(data, model(), seed=2).train[0] != sources.train[0]).any()


@pytest.mark.parametrize(("vocab", "fraction"), [(VOCAB + 1, FRACTION), (VOCAB, 0.01)])
def test_opening_prepares_nothing(prepared: StdlibPaths, vocab: int, fraction: float) -> None:
    with pytest.raises(UserError, match=rf"data.folder = .* does not hold the standard library in {vocab} pieces"):
        open_sources(stdlib(prepared.folder, fraction), model(vocab), seed=0)


def test_prepare_makes_the_files(small_library: Path, tmp_path: Path) -> None:
    data = stdlib(tmp_path / "data", 0.3)
    prepare(data, model(400), show_progress=False)
    assert open_sources(data, model(400), seed=0).train[0].max() < 400


def test_whoever_waits_hears_of_progress_and_may_end_it(small_library: Path, tmp_path: Path) -> None:
    """For each file that is read, each few documents, and those that are packed."""
    data = replace(stdlib(tmp_path / "data", 0.3), packing=replace(PACKING, method="best_fit"))
    heard: list[None] = []

    def on_progress() -> None:
        heard.append(None)
        if len(heard) == 9:
            raise CancelledError

    with pytest.raises(CancelledError):
        prepare(data, model(400), False, on_progress)
    assert list((tmp_path / "data").iterdir()) == []
    prepare(data, model(400), False, on_progress)
    assert len(heard) > 9 + 7 + 2 + 1


def test_progress_goes_to_standard_error(
    small_library: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    prepare(stdlib(tmp_path / "quiet"), model(400), show_progress=False)
    assert capfd.readouterr() == ("", "")
    prepare(stdlib(tmp_path / "shown"), model(400), show_progress=True)
    out, err = capfd.readouterr()
    assert out == ""
    for phase in ("Reading the standard library", "Training a tokenizer of 400 pieces", "Encoding train documents"):
        assert phase in err


def test_indexed(write_tokens: WriteTokens, prepared: StdlibPaths) -> None:
    prefixes = [write_tokens(name, VOCAB, [range(start, start + 100)]).prefix for name, start in [("a", 0), ("b", 300)]]
    data = indexed(prefixes, prefixes[:1], str(prepared.tokenizer), (1.0, 3.0))
    prepare(data, model(), show_progress=False)
    sources = open_sources(data, model(), seed=0)
    assert sum(int(sources.train[index][0] >= 300) for index in range(40)) == 30
    assert sources.validation is not None
    assert sources.validation[0].tolist() == list(range(17))
    assert sources.validation.num_samples == 6
    assert sources.tokenizer is not None
    by_tokens = open_sources(indexed(prefixes, prefixes[:1]), model(), seed=0)
    assert sum(int(by_tokens.train[index][0] >= 300) for index in range(40)) == 20
    bare = open_sources(indexed(prefixes[:1], []), model(), seed=0)
    assert (bare.validation, bare.tokenizer) == (None, None)


@pytest.mark.parametrize("step", ["prepare", "open"])
def test_missing_prefixes_are_all_named(write_tokens: WriteTokens, tmp_path: Path, step: str) -> None:
    write_tokens("here_text_document", VOCAB, [range(100)])
    data = indexed([str(tmp_path / "here")], [str(tmp_path / "gone")])
    with pytest.raises(UserError) as caught:
        prepare(data, model(), False) if step == "prepare" else open_sources(data, model(), 0)
    for name in ("here.bin", "here.idx", "gone.bin", "gone.idx"):
        assert str(tmp_path / name) in str(caught.value)
    assert f"prefixes in the same folders: {tmp_path / 'here_text_document'}" in str(caught.value)


def test_a_tokenizer_larger_than_the_model(write_tokens: WriteTokens, prepared: StdlibPaths) -> None:
    prefix = write_tokens("a", 50, [range(50)]).prefix
    with pytest.raises(UserError, match=f"model.vocab = 50: must be at least {VOCAB}, the size of the tokenizer"):
        open_sources(indexed([prefix], [], str(prepared.tokenizer)), model(50), 0)


def test_synthetic() -> None:
    packing = PackingConfig(eod=3, pad=None, reset_mask=False, reset_positions=False)
    data = SyntheticData("synthetic", packing)
    prepare(data, model(8), show_progress=False)
    sources = open_sources(data, model(8, sequence=500), seed=0)
    assert set(sources.train[0].tolist()) == {0, 1, 2, 4, 5, 6, 7}
    assert (sources.validation, sources.tokenizer) == (None, None)


def test_another_tokenizer_than_was_written_is_named(prepared: StdlibPaths, tmp_path: Path) -> None:
    """A text for a model would else be cut into other pieces than it was trained on."""
    for name in ("tokenizer.model", "manifest.json"):
        shutil.copy(prepared.folder / name, tmp_path)
    assert tokenizer_of(stdlib(tmp_path)) is not None
    content = (tmp_path / "tokenizer.model").read_bytes()
    assert b"self" in content
    (tmp_path / "tokenizer.model").write_bytes(content.replace(b"self", b"flse"))
    with pytest.raises(UserError, match=r"tokenizer\.model: damaged: checksum mismatch with manifest\.json"):
        tokenizer_of(stdlib(tmp_path))
