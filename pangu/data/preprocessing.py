"""From text to indexed token files: workers encode chunks, this process writes what they return, in order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pangu.config.data import TokenizerConfig
from pangu.config.errors import UserError
from pangu.config.files import remove, write_atomically
from pangu.data.documents import BadLine, Document, documents, leave_out
from pangu.data.encoding import encode, held_out
from pangu.data.indexed import bin_path, idx_path
from pangu.data.inputs import Chunk, Place, read_chunks
from pangu.data.journal import Journal
from pangu.data.manifest import FORMAT, manifest_path
from pangu.data.near_duplicates import bands_and_rows, bands_of
from pangu.data.resumable_writer import ResumableWriter
from pangu.data.statistics import length_statistics, plot_lengths
from pangu.data.workers import parallel_map

_JOURNAL = "journal.sqlite"


@dataclass(frozen=True)
class Recipe:
    """What decides the contents of the files."""

    inputs: tuple[tuple[str, int, int], ...]
    """Name, bytes and time of change of each file."""
    text_key: str
    tokenizer: TokenizerConfig
    tokenizer_digest: str
    vocab: int
    eod: int | None
    """Id that ends each document."""
    holdout: float
    """Share of the documents, chosen by a hash of their text, for a pair of files of their own."""
    exact_duplicates: bool
    """Documents whose text came before are left out."""
    near_duplicates: float | None
    """So are those that share about that much with one before."""
    whole_files: bool = False
    """Each text file is one document."""
    bos: int | None = None
    """Id before each document."""


@dataclass(frozen=True)
class Encoded:
    """A chunk as a worker returns it."""

    ids: NDArray[np.int32]
    """Of all its documents."""
    lengths: NDArray[np.int32]
    sizes: NDArray[np.int64]
    """Bytes of text of each document."""
    validation: NDArray[np.bool_]
    digests: list[bytes]
    """Of each text, if duplicates are left out."""
    bands: NDArray[np.int64]
    """Of each text, if near duplicates are, [documents, bands]."""
    bad: list[BadLine]
    after: Place


@dataclass
class Progress:
    """What is known so far beside the tokens."""

    place: Sequence[int] = Place(0, 0, 0)
    num_bad: int = 0
    bad: list[str] = field(default_factory=list)
    exact_duplicates: int = 0
    near_duplicates: int = 0
    finished: bool = False
    """All is read; the files may have their names already."""


def encode_chunk(recipe: Recipe, chunk: Chunk) -> Encoded:
    """What a worker does."""
    texts: list[Document] = []
    bad: list[BadLine] = []
    for document in documents(chunk, recipe.text_key):
        if isinstance(document, BadLine):
            bad.append(document)
        else:
            texts.append(document)
    strings = [document.text for document in texts]
    tokens, lengths = encode(strings, recipe.tokenizer, recipe.vocab, recipe.eod, recipe.bos)
    return Encoded(
        ids=tokens,
        lengths=lengths,
        sizes=np.array([document.size for document in texts], dtype=np.int64),
        validation=np.array([held_out(document.text, recipe.holdout) for document in texts], dtype=bool),
        digests=[_digest(document) for document in texts] if recipe.exact_duplicates else [],
        bands=_bands(recipe, texts),
        bad=bad,
        after=chunk.after,
    )


def _digest(document: Document) -> bytes:
    return blake2b(document.text.encode(), digest_size=16).digest()


def _bands(recipe: Recipe, texts: Sequence[Document]) -> NDArray[np.int64]:
    if recipe.near_duplicates is None:
        return np.empty((0, 0), dtype=np.int64)
    rows = [bands_of(document.text, recipe.near_duplicates) for document in texts]
    return np.array(rows, dtype=np.int64).reshape(len(texts), bands_and_rows(recipe.near_duplicates)[0])


class Preprocessing:
    """A command that makes the files of one output, from where an earlier one with the same recipe was stopped. A
    context manager, which keeps what was committed if the block ends with an exception."""

    def __init__(self, output: str, recipe: Recipe, overwrite: bool) -> None:
        """Raises UserError if files are in the way or belong to another recipe, OSError if they cannot be written."""
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
        """Open the journal, and return the state to go on from; {} if there is none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._journal = Journal(self._folder / _JOURNAL)
        state = self._journal.state
        begun = {} if state is None else state["recipe"]
        if begun == self._wanted or (overwrite and state is None):
            return state or {}
        if overwrite:
            self._journal.close()
            remove(self._folder)
            return self._begin(overwrite)
        different = [key for key, value in self._wanted.items() if begun.get(key) != value]
        message = (
            f"{self._folder} is what a command with other inputs or options has begun ({', '.join(different)}); give"
            " its options to go on, remove the folder, or add --overwrite"
        )
        if state is None:
            paths = [path(prefix) for prefix in self.prefixes for path in (bin_path, idx_path, manifest_path)]
            existing = [str(path) for path in paths if path.exists()]
            if not existing:
                return {}
            message = f"{', '.join(existing)} exist already; choose another --output or add --overwrite"
        self._journal.close()
        if state is None:
            remove(self._folder)
        raise UserError(message)

    def run(
        self, workers: int, max_bad: int, every: float, tell: Callable[[int], object], warn: Callable[[str], object]
    ) -> None:
        """Encode all that is left, and commit every so many seconds. `tell` hears of each number of documents, `warn`
        of bad lines. Raises UserError if there are more than `max_bad`."""
        if self.progress.finished:
            return
        sources = [source for source, *_ in self.recipe.inputs]
        chunks = read_chunks(
            sources, self.recipe.text_key, Place(*self.progress.place), whole_files=self.recipe.whole_files
        )
        committed = time.monotonic()
        for encoded in parallel_map(partial(encode_chunk, self.recipe), chunks, workers):
            self._count_bad(encoded.bad, max_bad, warn)
            self._add(encoded)
            self.progress.place = encoded.after
            tell(len(encoded.lengths))
            if time.monotonic() - committed >= every:
                self._commit()
                committed = time.monotonic()

    def _count_bad(self, bad: list[BadLine], max_bad: int, warn: Callable[[str], object]) -> None:
        for line in bad:
            self.progress.num_bad += 1
            if leave_out(line, self.progress.num_bad, max_bad, f"--max-bad {max_bad} such lines", warn):
                self.progress.bad.append(str(line))

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
            writer.add(ids, encoded.lengths[chosen], int(encoded.sizes[chosen].sum()))

    def _commit(self) -> None:
        written = [writer.commit() for writer in self.writers]
        self._journal.commit({"recipe": self._wanted, "progress": asdict(self.progress), "written": written})

    def publish(self) -> list[dict[str, Any]]:
        """Give all files their names, and return the statistics of each pair. A kill leaves them to be finished by the
        same command."""
        self.progress.finished = True
        self._commit()
        statistics = []
        for writer in self.writers:
            manifest_path(writer.prefix).unlink(missing_ok=True)
            files = writer.publish()
            of_pair = self._statistics(writer)
            plot_lengths(of_pair, Path(f"{writer.prefix}.png"), Path(writer.prefix).name)
            manifest = {"format": FORMAT, "files": files, "recipe": self._wanted, "statistics": of_pair}
            write_atomically(manifest_path(writer.prefix), json.dumps(manifest, indent=2, ensure_ascii=False).encode())
            statistics.append(of_pair)
        self._journal.close()
        # first: a command that finds it takes the files for unfinished
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
        """Let go of the files. What has nothing committed is removed."""
        for writer in self.writers:
            with suppress(OSError):  # closing flushes, which fails again on a full disk
                writer.close()
        self._journal.close()
        if self._journal.state is None:
            remove(self._folder)

    def __enter__(self) -> Preprocessing:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
