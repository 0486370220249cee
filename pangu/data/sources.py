"""Streams of samples from the configured data source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pangu.config.data import DataConfig, IndexedData, StdlibData, SyntheticData, TokenizerConfig
from pangu.config.errors import UserError
from pangu.config.model import ModelConfig
from pangu.data.indexed import bin_path, idx_path, open_indexed
from pangu.data.stream import SampleStream, Stream, SyntheticStream

if TYPE_CHECKING:
    from pangu.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class Sources:
    train: Stream
    validation: Stream | None
    """Samples of the validation split in plain order, if there are any."""
    tokenizer: Tokenizer | None


def prepare(data: DataConfig, model: ModelConfig, show_progress: bool) -> None:
    """Make the files of a data source that needs it, and check those of the others. May write and take long; one
    process of each file system calls it, before `open_sources` of any. Raises UserError."""
    if isinstance(data, StdlibData):
        from pangu.data.stdlib import prepare_stdlib

        prepare_stdlib(data.folder, model.vocab, data.validation_fraction, data.packing, show_progress)
    elif isinstance(data, IndexedData):
        _check_exist([*data.train, *data.validation])


def open_sources(data: DataConfig, model: ModelConfig, seed: int) -> Sources:
    """Open a prepared data source on every process; writes nothing. Raises UserError."""
    if isinstance(data, SyntheticData):
        avoid = {token for token in (data.packing.eod, data.packing.pad) if token is not None}
        return Sources(SyntheticStream(model.sequence, model.vocab, seed, avoid), validation=None, tokenizer=None)
    if isinstance(data, StdlibData):
        data = _as_indexed(data, model)
    _check_exist([*data.train, *data.validation])
    tokenizer = None
    if data.tokenizer:
        from pangu.data.tokenizers import load_tokenizer

        tokenizer = load_tokenizer(data.tokenizer)
    if tokenizer and tokenizer.vocab_size > model.vocab:
        raise UserError(f"model.vocab = {model.vocab}, but the tokenizer of the data has {tokenizer.vocab_size} pieces")
    later = [(stage.sample, stage.weights) for stage in data.later_weights]
    train = _open(data.train, data.weights, model, seed, shuffle=True, later=later)
    validation = _open(data.validation, None, model, seed, shuffle=False) if data.validation else None
    return Sources(train, validation, tokenizer)


def tokenizer_of(data: DataConfig) -> TokenizerConfig | None:
    """The tokenizer that a data source names; None if it has none. Raises UserError if prepared data has another one
    than was written."""
    if isinstance(data, StdlibData):
        return _stdlib_tokenizer(data)
    return data.tokenizer if isinstance(data, IndexedData) else None


def _stdlib_tokenizer(data: StdlibData) -> TokenizerConfig:
    from pangu.data.stdlib import StdlibPaths, find_damage

    paths = StdlibPaths(Path(data.folder))
    if paths.manifest.is_file() and paths.tokenizer.is_file() and find_damage(paths, paths.tokenizer.name):
        raise UserError(
            f"{paths.tokenizer}: damaged: its checksum is not that of {paths.manifest.name}; a run with "
            f"data.folder = {data.folder} makes it anew"
        )
    return TokenizerConfig("sentencepiece", str(paths.tokenizer))


def _as_indexed(data: StdlibData, model: ModelConfig) -> IndexedData:
    """The indexed files and the tokenizer that `prepare` made."""
    from pangu.data.stdlib import StdlibPaths, is_prepared

    paths = StdlibPaths(Path(data.folder))
    if not is_prepared(paths, model.vocab, data.validation_fraction):
        raise UserError(
            f"data.folder = {data.folder} does not hold the standard library in {model.vocab} pieces, which is made"
            " when a run starts; if another run has made it anew since, give each model.vocab a folder of its own"
        )
    files = ((str(paths.train),), None, (str(paths.validation),))
    return IndexedData("indexed", *files, tokenizer_of(data), data.packing)


def _open(
    prefixes: tuple[str, ...],
    weights: tuple[float, ...] | None,
    model: ModelConfig,
    seed: int,
    shuffle: bool,
    later: Sequence[tuple[int, Sequence[float]]] = (),
) -> SampleStream:
    readers = [open_indexed(prefix) for prefix in prefixes]
    weights = weights or tuple(float(len(reader.tokens)) for reader in readers)
    return SampleStream(list(zip(readers, weights, strict=True)), model.sequence, model.vocab, seed, shuffle, later)


def _check_exist(prefixes: list[str]) -> None:
    """Raise one UserError for all files that are missing."""
    missing = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if missing:
        near = sorted({str(index.with_suffix("")) for path in missing for index in path.parent.glob("*.idx")})
        hint = f"; prefixes in the same folders: {', '.join(near[:8])}" if near else ""
        listed = ", ".join(str(path) for path in missing)
        raise UserError(
            f"data files do not exist: {listed}{hint}. A prefix is a path without .bin and .idx;"
            " tools/preprocess_data.py writes such files"
        )
