"""Samples of text that is read, encoded, shuffled and packed during training.

A sample is a function of the text, the configuration and the sample's number. A position only avoids reading the text
before it, so any position before the requested sample works, and the position of any rank works for all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any

import numpy as np

from pangu.common.errors import UserError, reading, shown
from pangu.config.data import StreamData
from pangu.config.model import ModelConfig
from pangu.data.batch import Row, Sample, padding_of
from pangu.data.document_blocks import DocumentBlocks
from pangu.data.finding import find_inputs, input_record, is_dataset, is_url
from pangu.data.order import Blend
from pangu.data.packed_source import PackedSource, StreamRecipe
from pangu.data.stream import RAREST, Stream, too_rare
from pangu.data.tokenizers import encode, tokenizer_digest
from pangu.metrics.progress import with_progress


class TextStream(Stream):
    """Sample stream of weighted text sources (see `Blend`). Raises UserError for unreadable, changed or short text."""

    num_samples = None

    def __init__(
        self, recipes: Sequence[StreamRecipe], weights: Sequence[float], facts: Mapping[str, Any], recent: int = 1
    ) -> None:
        """Prepare the sources; JSON-compatible `facts` and seed and sequence length determine the samples.

        The padding of the last `recent` samples is remembered, for the global batch that a rank reads a part of.
        """
        self._sources: list[PackedSource | DocumentBlocks] = [
            PackedSource(recipe) if recipe.data.packing.method == "concat" else DocumentBlocks(recipe)
            for recipe in recipes
        ]
        self._blend, self._facts = Blend(weights), facts
        self._lock = Lock()
        self._known: tuple[int, list[Any]] = (0, [None] * len(recipes))  # sample number, position of each source there
        self._paddings, self._recent = dict[int, int](), recent  # padding tokens of the last samples
        self._next: int | None = None  # number of the sources' next sample; None: they must restart from `_known`

    @property
    def position(self) -> dict[str, Any]:
        """JSON-compatible position to resume from."""
        with self._lock:
            samples, sources = self._known
            if self._next is not None:
                samples, sources = self._next, [source.position for source in self._sources]
            return {"facts": self._facts, "samples": samples, "sources": sources}

    def resume(self, position: Mapping[str, Any] | None) -> None:
        """Resume from a position of an earlier process. Raises UserError if it belongs to other data."""
        if position is None:
            return
        with _of_checkpoint():
            _require_same(position["facts"], self._facts)
            with self._lock:
                self._known = int(position["samples"]), list(position["sources"])
                self._next = None

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`."""
        with self._lock:
            if self._next is None or index < self._next:
                self._go_back(index)
            assert self._next is not None
            number, self._next = self._next, None  # on failure, everything restarts
            for place in range(number, index + 1):
                sample = self._sources[self._blend.locate(place)[0]].take()
                self._paddings[place] = padding_of(sample)
                self._paddings.pop(place - self._recent, None)
            self._next = index + 1
            return sample if isinstance(sample, Row) else sample.astype(np.int64)

    def padding(self, index: int) -> int:
        """Return the number of padding tokens in a sample; only the last `recent` ones are not read again."""
        if index not in self._paddings:
            self[index]
        return self._paddings[index]

    def first(self, most: int, on_progress: Callable[[], None]) -> list[Sample]:
        """Return the first samples, at most `most`, before any text repeats; `on_progress` is called for each."""
        samples: list[Sample] = []
        try:
            for index in range(most):
                on_progress()
                sample = self[index]
                if any(source.epoch for source in self._sources):
                    break
                samples.append(sample)
        finally:
            self.close()
        return samples

    def close(self) -> None:
        """Stop prefetching; the next access to a sample restarts it."""
        with self._lock:
            self._next = None
            for source in self._sources:
                source.close()

    def _go_back(self, index: int) -> None:
        if index < self._known[0]:
            self._known = 0, [None] * len(self._sources)
        with _of_checkpoint():
            samples, positions = self._known
            for source, position in zip(self._sources, positions, strict=True):
                source.begin(position)
        self._next = samples


class HeldOut(Stream):
    """Finite stream of samples held in memory."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Wrap samples."""
        self._samples = samples

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self._samples)

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`."""
        return self._samples[index]

    def padding(self, index: int) -> int:
        """Return the number of padding tokens in a sample."""
        return padding_of(self._samples[index])


def check_exist(data: StreamData, on_progress: Callable[[], None]) -> None:
    """Raise UserError unless all configured files exist; `on_progress` is called for each file."""
    for key, patterns in (("data.train", data.train), ("data.validation", data.validation)):
        for source in with_progress(find_inputs(patterns, key), on_progress):
            input_record(source)
            if not (is_url(source) or is_dataset(source) or Path(source).is_file()):
                rule = "is not a regular file, but each epoch and process reads the text again"
                raise UserError(f"{key} {source}: {rule}; encode it first with tools/preprocess_data.py")


def open_text(
    data: StreamData, model: ModelConfig, seed: int, global_size: int, on_progress: Callable[[], None]
) -> tuple[TextStream, list[StreamRecipe]]:
    """Return the stream of training samples and the recipes of its sources.

    Args:
        data: Data source, with ids resolved by `packing_with_ids`.
        model: Model, for its sequence length and vocabulary size.
        seed: Random seed of the order.
        global_size: Samples per batch, the minimum per epoch.
        on_progress: Callback, called for each file.

    Raises:
        UserError: If a file is missing, no id ends a document, or a weight is too small.
    """
    assert data.tokenizer is not None
    assert data.packing.bos != "auto"
    eod, bos = data.packing.eod, data.packing.bos
    if eod is None:
        raise UserError("data.packing.eod = null: the tokenizer has no end-of-document id either; set an id")
    entries = [data.train] if data.weights is None else [(entry,) for entry in data.train]
    weights = data.weights or (1.0,)
    for entry, weight in zip(entries, weights, strict=True):
        if weight * RAREST < sum(weights):
            raise too_rare(" ".join(entry), weight, sum(weights), "entry")
    files = [find_inputs(entry, "data.train") for entry in entries]
    recipes = [
        StreamRecipe(
            inputs=tuple(inputs),
            data=data,
            held_out=False,
            encode=partial(encode, tokenizer=data.tokenizer, vocab=model.vocab, eod=eod, bos=bos),
            sequence=model.sequence,
            least=int(-(-global_size * weight // sum(weights))),
            shuffle=data.shuffle,
            keys=(seed, "stream", number),
        )
        for number, (inputs, weight) in enumerate(zip(files, weights, strict=True))
    ]
    facts = {
        "train": [
            [(PurePosixPath(name).name, size) for name, size, _ in map(input_record, inputs)]
            for inputs in (with_progress(inputs, on_progress) for inputs in files)
        ],
        "weights": weights,
        "text_key": data.text_key,
        "holdout": data.holdout,
        "shuffle": data.shuffle,
        "tokenizer": [data.tokenizer.kind, tokenizer_digest(data.tokenizer.path)],
        "packing.eod": eod,
        **({"whole_files": True} if data.whole_files else {}),  # checkpoints before this key lack it
        **({} if bos is None else {"packing.bos": bos}),  # likewise
        **({} if data.packing.method == "concat" else {"packing.method": data.packing.method}),  # likewise
    }
    return TextStream(recipes, weights, json.loads(json.dumps(facts)), global_size), recipes


def open_held_out(
    data: StreamData, recipes: Sequence[StreamRecipe], most: int, on_progress: Callable[[], None]
) -> tuple[HeldOut, dict[str, HeldOut]]:
    """Return the first samples of the validation split and, if it has several sources, of each source by name.

    Each stream has at most `most` samples. `recipes` are those of the training samples; `on_progress` is called for
    each sample. Raises UserError if there is too little text for one sample.
    """

    def first(recipes: Sequence[StreamRecipe], weights: Sequence[float]) -> HeldOut:
        return HeldOut(TextStream(recipes, weights, {}).first(most, on_progress))

    names, weights = data.train if data.weights else (), data.weights or (1.0,)
    plain = [replace(recipe, held_out=data.holdout > 0, least=1, shuffle=0) for recipe in recipes]
    if data.validation:
        names, weights = data.validation, (1.0,) * len(data.validation)
        plain = [replace(plain[0], inputs=tuple(find_inputs([name], "data.validation"))) for name in names]
    parts = dict(zip(names, plain, strict=False)) if len(plain) > 1 else {}
    alone = {name: first([recipe], (1.0,)) for name, recipe in parts.items()}
    return first(plain, weights), alone


def _of_checkpoint() -> AbstractContextManager[None]:
    return reading(
        "the data position of the checkpoint", KeyError, TypeError, ValueError, AttributeError, rule="is damaged"
    )


def _require_same(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    wrong = [
        f"  data.{key} = {shown(current.get(key))}: the checkpoint has {shown(saved.get(key))}"
        for key in {**saved, **current}
        if key != "train" and saved.get(key) != current.get(key)
    ]
    pairs = zip_longest(chain(*current["train"]), chain(*saved["train"]), fillvalue=("none", 0))
    wrong += [
        f"  data.train: {shown(name)} of {size} bytes, but the checkpoint has {shown(other)} of {bytes_}"
        for (name, size), (other, bytes_) in pairs
        if (name, size) != (other, bytes_)
    ][:3]
    if wrong:
        advice = "restore these files and values, or set another train.output to start a new run"
        raise UserError(f"the data differs from that of the checkpoint; {advice}:\n" + "\n".join(wrong))
