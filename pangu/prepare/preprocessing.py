"""Conversion of text to indexed token files: workers encode chunks, this process writes their results in order."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pangu.common.errors import UserError
from pangu.common.files import remove, write_atomically
from pangu.config.data import TokenizerConfig
from pangu.data.documents import BadLine, Document, documents, held_out, leave_out
from pangu.data.indexed import bin_path, idx_path
from pangu.data.inputs import TextChunk, TextPosition, read_chunks
from pangu.data.tokenizers import encode
from pangu.data.workers import parallel_map
from pangu.metrics.plots import write_figure
from pangu.prepare.indexed_writer import ResumableWriter
from pangu.prepare.journal import Journal
from pangu.prepare.manifest import FORMAT, manifest_path

_JOURNAL = "journal.sqlite"
_BINS = 16  # histogram bins per doubling of the length
_QUANTILES = {"median": 50, "p90": 90, "p99": 99}  # percent of the documents that are not longer
_AT_ONCE = 1 << 22
_HASHES = 128
_SHINGLE = 8  # characters per shingle; the similarity of two documents is the share of shingles they have in common
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Recipe:
    """Settings that determine the contents of the output files."""

    inputs: tuple[tuple[str, int, int], ...]
    """Name, size in bytes and modification time of each input file."""
    text_key: str
    tokenizer: TokenizerConfig
    tokenizer_digest: str
    vocab: int
    eod: int | None
    """Id appended to each document."""
    holdout: float
    """Fraction of the documents, chosen by a hash of their text, that goes to a separate pair of files."""
    exact_duplicates: bool
    """True to drop documents whose text occurred before."""
    near_duplicates: float | None
    """Shingle similarity at which documents are dropped as near duplicates of an earlier one; None keeps them."""
    whole_files: bool = False
    """True if each text file is one document."""
    bos: int | None = None
    """Id prepended to each document."""


@dataclass(frozen=True)
class Encoded:
    """Encoded chunk, the result of a worker."""

    ids: NDArray[np.int32]
    """Concatenated ids of all documents of the chunk."""
    lengths: NDArray[np.int32]
    sizes: NDArray[np.int64]
    """Text size of each document in bytes."""
    validation: NDArray[np.bool_]
    digests: list[bytes]
    """Digest of each text, if exact duplicates are dropped."""
    bands: NDArray[np.int64]
    """MinHash bands of each text, [documents, bands], if near duplicates are dropped."""
    bad: list[BadLine]
    after: TextPosition


@dataclass
class Progress:
    """Progress of a preprocessing run, apart from the tokens written."""

    place: Sequence[int] = TextPosition(0, 0, 0)
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    exact_duplicates: int = 0
    near_duplicates: int = 0
    finished: bool = False
    """True once all input is read; the files may already have their final names."""


def encode_chunk(recipe: Recipe, chunk: TextChunk) -> Encoded:
    """Encode a chunk, in a worker process."""
    found = list(documents(chunk, recipe.text_key))
    texts = [document for document in found if isinstance(document, Document)]
    strings = [document.text for document in texts]
    tokens, lengths = encode(strings, recipe.tokenizer, recipe.vocab, recipe.eod, recipe.bos)
    return Encoded(
        ids=tokens,
        lengths=lengths,
        sizes=np.array([document.size for document in texts], dtype=np.int64),
        validation=np.array([held_out(text, recipe.holdout) for text in strings], dtype=bool),
        digests=[blake2b(text.encode(), digest_size=16).digest() for text in strings]
        if recipe.exact_duplicates
        else [],
        bands=_bands(recipe, strings),
        bad=[document for document in found if isinstance(document, BadLine)],
        after=chunk.after,
    )


def _bands(recipe: Recipe, texts: Sequence[str]) -> NDArray[np.int64]:
    if recipe.near_duplicates is None:
        return np.empty((0, 0), dtype=np.int64)
    rows = [bands_of(text, recipe.near_duplicates) for text in texts]
    return np.array(rows, dtype=np.int64).reshape(len(texts), bands_and_rows(recipe.near_duplicates)[0])


@cache
def bands_and_rows(threshold: float) -> tuple[int, int]:
    """Return (bands, hashes per band) that find documents of shingle similarity `threshold` with probability 1/2."""
    pairs = [(_HASHES // rows, rows) for rows in range(1, _HASHES + 1)]
    return min(pairs, key=lambda pair: abs((1 - 0.5 ** (1 / pair[0])) ** (1 / pair[1]) - threshold))


def bands_of(text: str, threshold: float) -> NDArray[np.int64]:
    """Return a key per MinHash band, [bands]; texts sharing one are near duplicates. Raises UserError without rensa.

    Broder 1997; Leskovec, Rajaraman & Ullman, "Mining of Massive Datasets", section 3.4.
    """
    try:
        from rensa import RMinHash  # noqa: PLC0415 - optional package
    except ImportError as error:
        fix = "pip install rensa (or this package's extra: preprocess)"
        raise UserError(f"near-duplicate detection needs the package rensa; {fix}") from error
    text = _SPACE.sub(" ", text).lower()
    sketch = RMinHash(num_perm=_HASHES, seed=1)
    sketch.update([text[begin : begin + _SHINGLE] for begin in range(max(len(text) - _SHINGLE, 0) + 1)])
    bands, rows = bands_and_rows(threshold)
    values = np.array(sketch.digest()[: bands * rows], dtype=np.uint64).reshape(bands, rows)
    keys = np.arange(1, bands + 1, dtype=np.uint64)  # equal hashes in different bands give different keys
    for column in values.T:
        keys = (keys ^ column) * np.uint64(0x9E3779B97F4A7C15)
        keys ^= keys >> np.uint64(29)
    return keys.view(np.int64)


class Preprocessing:
    """Run that produces the files of one output, resuming an interrupted run with the same recipe.

    The committed state is kept if it is closed before it is published.
    """

    def __init__(self, output: str, recipe: Recipe, overwrite: bool) -> None:
        """Start or resume. Raises UserError if files exist or belong to another recipe, OSError if not writable."""
        self.recipe = recipe
        self.prefixes = [output, *([f"{output}-validation"] if recipe.holdout else [])]
        self._wanted = json.loads(json.dumps(asdict(recipe)))
        self._folder = Path(f"{output}.partial")
        state = self._begin(overwrite)
        self.resumed = bool(state)
        self.progress = Progress(**state.get("progress", {}))
        written = state.get("written", [{}] * len(self.prefixes))
        self.writers = [
            ResumableWriter(prefix, self._folder, recipe.vocab, one)
            for prefix, one in zip(self.prefixes, written, strict=True)
        ]

    def _begin(self, overwrite: bool) -> dict[str, Any]:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(self._folder / _JOURNAL)
        if (state := self._journal.state) is not None and state["recipe"] != self._wanted:
            self._journal.close()
            if overwrite:
                remove(self._folder)
                return self._begin(overwrite)
            different = [key for key, value in self._wanted.items() if state["recipe"].get(key) != value]
            raise UserError(
                f"{self._folder} was started with other inputs or options ({', '.join(different)}); use the"
                " same options to continue, remove the folder, or add --overwrite"
            )
        paths = [path(prefix) for prefix in self.prefixes for path in (bin_path, idx_path, manifest_path)]
        existing = [str(path) for path in paths if path.exists()] if state is None and not overwrite else []
        if existing:
            self._journal.close()
            remove(self._folder)
            raise UserError(f"{', '.join(existing)} already exist; choose another --output or add --overwrite")
        return state or {}

    def run(
        self, workers: int, max_bad: int, every: float, add: Callable[[int], object], warn: Callable[[str], object]
    ) -> None:
        """Encode the remaining input and commit every `every` seconds. Raises UserError beyond `max_bad` bad lines.

        `add` is called with the number of documents of each chunk, `warn` with a message for bad lines.
        """
        if self.progress.finished:
            return
        sources = [source for source, *_ in self.recipe.inputs]
        chunks = read_chunks(
            sources, self.recipe.text_key, TextPosition(*self.progress.place), whole_files=self.recipe.whole_files
        )
        committed = time.monotonic()
        for encoded in parallel_map(partial(encode_chunk, self.recipe), chunks, workers):
            for line in encoded.bad:
                self.progress.num_bad += 1
                if leave_out(line, self.progress.num_bad, max_bad, f"--max-bad {max_bad} bad lines", warn):
                    self.progress.bad.append(str(line))
            self._add(encoded)
            self.progress.place = encoded.after
            add(len(encoded.lengths))
            if time.monotonic() - committed >= every:
                self._commit()
                committed = time.monotonic()

    def _add(self, encoded: Encoded) -> None:
        stays = np.ones(len(encoded.lengths), dtype=bool)
        if self.recipe.exact_duplicates:
            stays = self._journal.unseen(encoded.digests)
            self.progress.exact_duplicates += int(np.count_nonzero(~stays))
        if self.recipe.near_duplicates is not None:
            unlike = self._journal.unlike(encoded.bands[stays])
            self.progress.near_duplicates += int(np.count_nonzero(~unlike))
            stays[stays] = unlike
        for writer, chosen in zip(
            self.writers, (~encoded.validation & stays, encoded.validation & stays), strict=False
        ):
            ids = encoded.ids if chosen.all() else encoded.ids[np.repeat(chosen, encoded.lengths)]
            writer.extend(ids, encoded.lengths[chosen], int(encoded.sizes[chosen].sum()))

    def _commit(self) -> None:
        written = [writer.commit() for writer in self.writers]
        self._journal.commit({"recipe": self._wanted, "progress": asdict(self.progress), "written": written})

    def publish(self) -> list[dict[str, Any]]:
        """Rename all files and return the statistics of each pair. After a kill, the same command finishes the job."""
        self.progress.finished = True
        self._commit()
        statistics = []
        for writer in self.writers:
            manifest_path(writer.prefix).unlink(missing_ok=True)
            files = writer.publish()
            summary = self._statistics(writer)
            plot_lengths(summary, Path(f"{writer.prefix}.png"), Path(writer.prefix).name)
            manifest = {"format": FORMAT, "files": files, "recipe": self._wanted, "statistics": summary}
            write_atomically(manifest_path(writer.prefix), json.dumps(manifest, indent=2, ensure_ascii=False).encode())
            statistics.append(summary)
        self._journal.close()
        # first: a command that finds the journal considers the files unfinished
        (self._folder / _JOURNAL).unlink()
        remove(self._folder)
        return statistics

    def _statistics(self, writer: ResumableWriter) -> dict[str, Any]:
        counts = length_statistics(writer.lengths())
        return {
            **counts,
            "bytes": writer.num_bytes,
            "bytes_per_token": writer.num_bytes / counts["tokens"],
            "exact_duplicates": self.progress.exact_duplicates,
            "near_duplicates": self.progress.near_duplicates,
            "bad_lines": {"count": self.progress.num_bad, "first": self.progress.bad},
        }

    def close(self) -> None:
        """Close the files; remove the folder if nothing was committed."""
        for writer in self.writers:
            writer.close()
        self._journal.close()
        if self._journal.state is None:
            remove(self._folder)


def length_statistics(lengths: NDArray[np.int32]) -> dict[str, Any]:
    """Summarize document lengths in tokens, [documents], which may be memory-mapped.

    The median and other quantiles are lengths of actual documents; `histogram` has 16 bins per doubling of the length.
    """
    # Few entries: documents of n different lengths have at least n²/2 tokens
    counter: Counter[int] = Counter()
    for begin in range(0, len(lengths), _AT_ONCE):
        values, times = np.unique(lengths[begin : begin + _AT_ONCE], return_counts=True)
        counter.update(dict(zip(values.tolist(), times.tolist(), strict=True)))
    found = np.array(sorted(counter.items()) or [(0, 0)], dtype=np.int64)
    each, reached, total = found[:, 0], np.cumsum(found[:, 1]), int(np.prod(found, axis=1).sum())
    ranks = {name: -(-percent * len(lengths) // 100) for name, percent in _QUANTILES.items()}
    bins = np.floor(_BINS * np.log2(np.maximum(each, 1))).astype(np.int64)
    counts = np.bincount(bins, found[:, 1]).astype(np.int64).tolist()
    return {
        "documents": len(lengths),
        "tokens": total,
        "lengths": {
            "shortest": int(each[0]),
            **{name: int(each[np.searchsorted(reached, rank)]) for name, rank in ranks.items()},
            "longest": int(each[-1]),
            "mean": total / max(len(lengths), 1),
        },
        "histogram": {str(math.ceil(2 ** (n / _BINS))): count for n, count in enumerate(counts) if count},
    }


def plot_lengths(statistics: dict[str, Any], path: Path, title: str) -> None:
    """Plot the share of documents and of tokens by document length. Raises UserError if the file cannot be written."""
    lengths = np.array([int(length) for length in statistics["histogram"]])
    counts = np.array(list(statistics["histogram"].values()))
    octaves = np.floor(np.log2(lengths)).astype(int)
    figure = Figure(figsize=(7, 4), dpi=100)
    axes = figure.add_subplot()
    for values, label, shift in ((counts, "documents", -0.2), (counts * lengths, "tokens", 0.2)):
        shares = np.bincount(octaves, values) / values.sum()
        axes.bar(np.arange(len(shares)) + shift, 100 * shares, width=0.4, label=label)
    axes.set_xticks(range(octaves.max() + 1), [f"{2**octave:,}" for octave in range(octaves.max() + 1)], rotation=60)
    axes.set(xlabel="tokens per document, at least", ylabel="%")
    axes.set_title(title, parse_math=False)
    axes.legend(frameon=False)
    figure.subplots_adjust(bottom=0.25)
    write_figure(figure, path)
