"""Sample streams of the configured data source, prepared conversations among them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from pangu.common.errors import UserError, reading
from pangu.config.data import (
    DataConfig,
    IndexedData,
    InstructionsData,
    PackingConfig,
    StdlibData,
    StreamData,
    SyntheticData,
    TokenizerConfig,
)
from pangu.config.model import ModelConfig
from pangu.data.boundaries import packing_with_ids
from pangu.data.indexed import bin_path, idx_path, open_indexed
from pangu.data.packing import PackedDocuments, Packing, packings, write_packing
from pangu.data.stdlib import StdlibPaths, find_damage, is_prepared
from pangu.data.stream import SampleStream, Stream, SyntheticStream
from pangu.data.text_stream import check_exist, open_held_out, open_text
from pangu.data.tokenizers import Tokenizer, cached_tokenizer, fitting_tokenizer


@dataclass(frozen=True)
class Sources:
    """Sample streams and tokenizer of a data source."""

    train: Stream
    validation: Stream | None
    """Samples of the validation split in unshuffled order; None without validation data."""
    tokenizer: Tokenizer | None
    validation_sources: Mapping[str, Stream] = field(default_factory=dict)
    """Stream of each part of the validation split by name, if there are several parts."""


def pack(data: DataConfig, model: ModelConfig, on_progress: Callable[[], None] = lambda: None) -> None:
    """Check that the files of a data source exist, and write the index of packed documents if it needs one.

    One process per file system calls this, or `prepare.corpora.prepare`, before any process calls `open_sources`.
    `on_progress` is called from the calling thread on progress, and an error it raises ends the work. Raises
    UserError.
    """
    data = with_ids(data)
    if isinstance(data, IndexedData):
        _check_exist([*data.train, *data.validation])
    elif isinstance(data, StreamData):
        check_exist(data, on_progress)
    if isinstance(data, (StdlibData, IndexedData)) and data.packing.method != "concat":
        files = _as_indexed(data, model) if isinstance(data, StdlibData) else data
        for packing in packings([*files.train, *files.validation], data.packing, model.sequence):
            write_packing(packing, on_progress)


def open_sources(
    data: DataConfig,
    model: ModelConfig,
    seed: int,
    global_size: int = 1,
    num_validation: int = 0,
    on_progress: Callable[[], None] = lambda: None,
) -> Sources:
    """Open a prepared data source, on every process; writes nothing. Raises UserError.

    An epoch of streamed text must have `global_size` samples, and at most `num_validation` samples are held out. They
    are read here; `on_progress` is called as in `pack`.
    """
    data = with_ids(data)
    if isinstance(data, SyntheticData):
        avoid = {token for token in (data.packing.eod, data.packing.pad) if token is not None}
        return Sources(SyntheticStream(model.sequence, model.vocab, seed, avoid), validation=None, tokenizer=None)
    if isinstance(data, StdlibData):
        data = _as_indexed(data, model)
    if isinstance(data, IndexedData):
        _check_exist([*data.train, *data.validation])
    tokenizer = fitting_tokenizer(data.tokenizer, model.vocab) if data.tokenizer else None
    if isinstance(data, StreamData):
        text, recipes = open_text(data, model, seed, global_size, on_progress)
        if not num_validation or not (data.holdout or data.validation):
            return Sources(text, None, tokenizer)
        validation, entry_streams = open_held_out(data, recipes, num_validation, on_progress)
        names = _short_names(list(entry_streams))
        return Sources(text, validation, tokenizer, {name: entry_streams[entry] for name, entry in names.items()})
    train, held_out = data.train, data.validation
    if isinstance(data, InstructionsData):
        train, held_out = dataset_names("train", data.train), dataset_names("validation", data.validation)
    stream = partial(_open, data, model, seed)
    parts = {name: held_out[data.validation.index(entry)] for name, entry in _short_names(data.validation).items()}
    alone: dict[str, Stream] = {name: stream((dataset,)) for name, dataset in parts.items()} if len(parts) > 1 else {}
    return Sources(stream(train, shuffle=True), stream(held_out) if held_out else None, tokenizer, alone)


def _short_names(prefixes: Sequence[str]) -> dict[str, str]:
    different, depth = {Path(prefix).absolute(): prefix for prefix in prefixes}, 1
    while len(names := {"/".join(path.parts[-depth:]): prefix for path, prefix in different.items()}) < len(different):
        depth += 1
    return names


def with_ids(data: DataConfig) -> DataConfig:
    """Return the data with its tokenizer's ids for `packing.eod: null` and `packing.bos: auto`.

    Raises UserError if the tokenizer cannot be loaded.
    """
    config = None if isinstance(data, (StdlibData, SyntheticData)) else data.tokenizer
    own_end = isinstance(data, (StreamData, InstructionsData))
    if data.packing.bos != "auto" and (data.packing.eod is not None or not own_end):
        return data
    tokenizer = None if config is None else cached_tokenizer(config)
    return replace(data, packing=packing_with_ids(data.packing, tokenizer, own_end=own_end))


def tokenizer_of(data: DataConfig) -> TokenizerConfig | None:
    """Return the tokenizer of a data source, or None. Raises UserError if a prepared tokenizer file has changed."""
    if not isinstance(data, StdlibData):
        return None if isinstance(data, SyntheticData) else data.tokenizer
    paths = StdlibPaths(Path(data.folder))
    if paths.manifest.is_file() and paths.tokenizer.is_file() and find_damage(paths, paths.tokenizer.name):
        raise UserError(
            f"{paths.tokenizer}: damaged: checksum mismatch with {paths.manifest.name}; start a run with "
            f"data.folder={data.folder} to prepare it again"
        )
    return TokenizerConfig("sentencepiece", str(paths.tokenizer))


def _as_indexed(data: StdlibData, model: ModelConfig) -> IndexedData:
    paths = StdlibPaths(Path(data.folder))
    if not is_prepared(paths, model.vocab, data.validation_fraction):
        raise UserError(
            f"data.folder = {data.folder} does not hold the standard library in {model.vocab} pieces, which"
            " pretrain.py prepares; if another run has replaced it, use one folder per model.vocab"
        )
    files = ((str(paths.train),), None, (str(paths.validation),))
    return IndexedData("indexed", *files, tokenizer_of(data), data.packing)


def _open(
    data: IndexedData | InstructionsData,
    model: ModelConfig,
    seed: int,
    names: tuple[str, ...],
    *,
    shuffle: bool = False,
) -> SampleStream:
    """Open prefixes, or prepared conversations by their names in the folder."""
    if isinstance(data, InstructionsData):
        chosen = [conversation_packing(data, model, name) for name in names]
        packed = [open_dataset(packing, model.vocab, data.packing) for packing in chosen]
    else:
        chosen = packings(names, data.packing, model.sequence)
        packed = [PackedDocuments(packing, model.vocab, data.packing) for packing in chosen]
    readers = [one.reader for one in packed] or [open_indexed(prefix) for prefix in names]
    weights = (data.weights if shuffle else None) or tuple(float(len(reader.tokens)) for reader in readers)
    stages = data.weight_schedule if shuffle and isinstance(data, IndexedData) else ()
    schedule = [(stage.sample, stage.weights) for stage in stages]
    pairs = list(zip(readers, weights, strict=True))
    return SampleStream(pairs, model.sequence, model.vocab, seed, shuffle, schedule, packed)


def _check_exist(prefixes: list[str]) -> None:
    missing = [path for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix)) if not path.is_file()]
    if missing:
        near = sorted({str(index.with_suffix("")) for path in missing for index in path.parent.glob("*.idx")})
        hint = f"; prefixes in the same folders: {', '.join(near[:8])}" if near else ""
        listed = ", ".join(str(path) for path in missing)
        raise UserError(
            f"data files do not exist: {listed}{hint}. A prefix is a path without .bin and .idx;"
            " tools/preprocess_data.py writes such files"
        )


PREPARED = "instructions"
"""Subfolder of `data.folder` with the prepared files."""


def counted_path(prefix: str | Path) -> Path:
    """Return the loss mask of a prefix, a file with a byte for each token."""
    return Path(f"{prefix}.counted")


def open_dataset(packing: Packing, vocab: int, ids: PackingConfig) -> PackedDocuments:
    """Open packed conversations with their loss mask. Raises UserError."""
    path = counted_path(packing.prefix)
    with reading(path, ValueError):  # an empty file cannot be mapped
        counted = np.memmap(path, np.uint8, "r")
    documents = PackedDocuments(packing, vocab, ids, counted)
    if len(counted) != len(documents.reader.tokens):
        raise UserError(f"{path}: damaged; remove {path.parent}, and pretrain.py prepares it again")
    return documents


def conversation_packing(data: InstructionsData, model: ModelConfig, name: str) -> Packing:
    """Return the packing of one prepared dataset, e.g. `train-0`."""
    assert data.packing.method != "concat"
    prefix = str(Path(data.folder) / PREPARED / name)
    return Packing(prefix, model.sequence, data.packing.method, data.packing.index, first_is_input=True)


def dataset_names(split: str, files: Sequence[str]) -> tuple[str, ...]:
    """Return the names in the folder of the datasets of a split."""
    return tuple(f"{split}-{number}" for number in range(len(files)))
