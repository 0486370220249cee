"""Conversations for fine-tuning, encoded once into a folder as tokens and loss masks."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pangu.common.errors import UserError, writing
from pangu.common.files import new_path, read_json_object, remove
from pangu.config.data import InstructionsData
from pangu.config.model import ModelConfig
from pangu.data.documents import BadLine, json_lines, leave_out
from pangu.data.finding import find_inputs, input_record
from pangu.data.inputs import TextChunk, read_chunks
from pangu.data.packing import write_packing
from pangu.data.sources import PREPARED, conversation_packing, counted_path, dataset_names
from pangu.data.token_spans import encode_parts
from pangu.data.tokenizers import Tokenizer, fitting_tokenizer, load_tokenizer, tokenizer_digest
from pangu.data.workers import parallel_map
from pangu.metrics.progress import ProgressBar, with_progress
from pangu.prepare import sandbox
from pangu.prepare.chat import TEMPLATES, ChatTemplate, read_template, spelled_end
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.prepare.messages import read_dialog
from pangu.prepare.sandbox import Allowance

log = logging.getLogger("pangu")

_FORMAT = 2  # version of the recipe; raise it when the files it writes change
_SECONDS_PER_LINE = 2e-3  # minimum time that a template has for each line of a chunk
_LINES = re.compile(r"\.jsonl(\.(gz|zst|xz|bz2))?$")


@dataclass
class Counts:
    """Conversation counts of some files."""

    conversations: int = 0
    """Number of conversations used."""
    truncated: int = 0
    """Number of used conversations that are truncated."""
    too_long: int = 0
    """Number of conversations left out as too long."""
    bad_lines: int = 0
    """Number of lines left out because they hold no conversation."""

    def __str__(self) -> str:
        """Return the counts as text for the log."""
        return (
            f"{self.conversations:,} conversations, {self.truncated:,} of them truncated; left out: {self.too_long:,}"
            f" longer than model.sequence, {self.bad_lines:,} lines without one"
        )


class Conversation(NamedTuple):
    """Encoded conversation that fits into a sample."""

    ids: NDArray[np.int32]
    counted: NDArray[np.uint8]
    """Loss mask: 1 for each id whose prediction counts in the loss, [tokens]."""
    truncated: bool


@dataclass
class EncodedChunk:
    """Encoded conversations of a chunk, returned by a worker."""

    conversations: list[Conversation] = field(default_factory=list)
    too_long: int = 0
    bad: list[BadLine] = field(default_factory=list)


class TooLongError(ValueError):
    """Conversation that does not fit into a sample."""


class Encoder:
    """Encoder of conversations as tokens."""

    def __init__(self, data: InstructionsData, sequence: int) -> None:
        """Load the tokenizer and the template of data whose ids are known. Raises UserError if one cannot be read."""
        assert data.tokenizer is not None
        assert data.packing.bos != "auto"
        self._data, self._sequence, self._bos = data, sequence, data.packing.bos
        self._tokenizer: Tokenizer = load_tokenizer(data.tokenizer)
        self._eod = self._tokenizer.eod if data.packing.eod is None else data.packing.eod
        spelled, self._end = spelled_end(self._tokenizer, self._eod)
        self._template = ChatTemplate(data.template, self._tokenizer.special, spelled, self._bos)
        # A template file writes the beginning of a text where its model needs it
        self._before = [self._bos] if self._bos is not None and data.template in TEMPLATES else []

    def encode(self, record: Any, allowance: Allowance) -> Conversation:
        """Encode the conversation of a record; `allowance` is the time that the template has left.

        Raises ValueError, with the reason, if the record holds none; TooLongError if it is too long.
        """
        data = self._data
        dialog = read_dialog(record, data.messages_key, data.prompt_key, data.response_key, data.turns)
        parts = self._template.parts(dialog, allowance)
        ids: list[int] = []
        counted: list[int] = []
        for (_, counts), some in zip(parts, encode_parts(self._tokenizer, [text for text, _ in parts]), strict=True):
            ids += [self._end.get(token, token) for token in some]
            counted += [int(counts)] * len(some)
        if ids[:1] != self._before:
            ids, counted = [*self._before, *ids], [0] * len(self._before) + counted
        if any(counted[:1]):  # no token precedes the response
            first = self._eod if self._bos is None else self._bos
            if first is None:
                raise ValueError("has nothing before its response, and the tokenizer has no end-of-document token")
            ids, counted = [first, *ids], [0, *counted]
        if not any(counted):
            raise ValueError("its response has no tokens")
        most = self._sequence + 1
        if len(ids) > most and (data.too_long != "truncate" or not any(counted[:most])):
            raise TooLongError(f"has {len(ids):,} tokens, more than model.sequence + 1 = {most:,}")
        return Conversation(np.array(ids[:most], np.int32), np.array(counted[:most], np.uint8), len(ids) > most)


_encoder = cache(Encoder)  # one per process


def encode_chunk(data: InstructionsData, sequence: int, chunk: TextChunk) -> EncodedChunk:
    """Encode a chunk, up to one bad line too many. Raises UserError for a conversation too long if that is refused."""
    encoder, encoded = _encoder(data, sequence), EncodedChunk()
    lines = list(json_lines(chunk))
    with Allowance(max(sandbox.SECONDS, _SECONDS_PER_LINE * len(lines))) as allowance:
        for line, record in lines:
            if len(encoded.bad) > data.max_bad:
                break
            if isinstance(record, BadLine):
                encoded.bad.append(record)
                continue
            try:
                encoded.conversations.append(encoder.encode(record, allowance))
            except TooLongError as error:
                if data.too_long == "refuse":
                    raise UserError(
                        f"{BadLine(chunk.source, line, str(error))}; set data.too_long=truncate or leave_out"
                    ) from error
                encoded.too_long += 1
            except ValueError as error:
                encoded.bad.append(BadLine(chunk.source, line, str(error)))
    return encoded


def prepare_instructions(
    data: InstructionsData, model: ModelConfig, show_progress: bool, on_progress: Callable[[], None]
) -> None:
    """Encode and pack the conversations, unless the folder has them.

    `on_progress` is called for each file and each chunk of one. Raises UserError if a file cannot be read or has
    more lines without a conversation than `data.max_bad`, or if the folder cannot be written.
    """
    assert data.tokenizer is not None
    inputs = _inputs(data, on_progress)
    wanted = json.loads(json.dumps(_recipe(data, model) | {"inputs": inputs}))
    folder = Path(data.folder) / PREPARED
    manifest = _manifest(folder)
    if manifest is None or manifest["recipe"] != wanted or [*manifest["counts"]] != [*inputs]:
        fitting_tokenizer(data.tokenizer, model.vocab)
        with writing(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with new_path(folder) as partial, ProgressBar(show_progress, on_progress) as progress:
                partial.mkdir()
                counts = {}
                for name, records in progress.through(inputs.items(), "Encoding conversations"):
                    sources, report = [source for source, *_ in records], progress.on_progress
                    counts[name] = asdict(_write(partial / name, data, model, sources, report))
                sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
                manifest = {"recipe": wanted, "counts": counts, "files": sizes}
                (partial / "manifest.json").write_text(json.dumps(manifest, indent=1), encoding="utf-8")
                remove(folder)
    for pattern, found in zip((*data.train, *data.validation), manifest["counts"].values(), strict=True):
        log.info("%-12s %s: %s", "data", pattern, Counts(**found))
    for prefix in manifest["counts"]:
        write_packing(conversation_packing(data, model, prefix), on_progress)


def _recipe(data: InstructionsData, model: ModelConfig) -> dict[str, Any]:
    """Return the settings that determine the tokens of a conversation, as the manifest has them."""
    assert data.tokenizer is not None
    keys = ("template", "messages_key", "prompt_key", "response_key", "too_long", "turns")
    return {
        **{key: getattr(data, key) for key in keys},
        "format": _FORMAT,
        "tokenizer": asdict(data.tokenizer),
        "tokenizer_digest": tokenizer_digest(data.tokenizer.path),
        "template_digest": blake2b(json.dumps(read_template(data.template)).encode(), digest_size=16).hexdigest(),
        "sequence": model.sequence,
        "eod": data.packing.eod,
        "bos": data.packing.bos,
    }


def _inputs(data: InstructionsData, on_progress: Callable[[], None]) -> dict[str, list[tuple[str, int, int]]]:
    """Return the files of each dataset by the dataset's name in the folder. Raises UserError."""
    inputs = {}
    for split, patterns in (("train", data.train), ("validation", data.validation)):
        for name, pattern in zip(dataset_names(split, patterns), patterns, strict=True):
            sources = find_inputs([pattern], f"data.{split}")
            if wrong := next((source for source in sources if not _LINES.search(source)), None):
                raise UserError(f"data.{split} {wrong}: must be a .jsonl file with one conversation per line")
            inputs[name] = [input_record(source) for source in with_progress(sources, on_progress)]
    return inputs


def read_prepared(folder: Path) -> dict[str, Any]:
    """Return the manifest of a folder of prepared conversations. Raises UserError if it is missing or incomplete."""
    manifest = _manifest(folder)
    if manifest is None:
        files = sorted([*folder.glob("*.idx"), *folder.glob("data/*.idx")])  # of a run folder too
        more = f"to see its token files, give {files[0].with_suffix('')}" if files else "to see text, encode it"
        raise UserError(
            f"{folder}: prepared conversations are missing or incomplete; the next run prepares them; {more}"
        )
    return manifest


def _manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of the folder; None if it is incomplete."""
    try:
        manifest = read_json_object(folder / "manifest.json")
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        is_complete = sizes == manifest["files"] and all(Counts(**counts) for counts in manifest["counts"].values())
        return manifest if is_complete and isinstance(manifest["recipe"], dict) else None
    except (UserError, OSError, KeyError, TypeError, AttributeError):
        return None


def _write(
    prefix: Path, data: InstructionsData, model: ModelConfig, sources: Sequence[str], on_progress: Callable[[], None]
) -> Counts:
    """Write the tokens and the loss mask of one dataset, and return its counts."""
    counts, limit = Counts(), f"data.max_bad = {data.max_bad} bad lines"
    chunks = read_chunks(sources, data.messages_key)
    with IndexedWriter(prefix, model.vocab) as writer, counted_path(prefix).open("wb") as file:
        for encoded in parallel_map(partial(encode_chunk, data, model.sequence), chunks, data.workers):
            on_progress()
            for line in encoded.bad:
                counts.bad_lines += 1
                leave_out(line, counts.bad_lines, data.max_bad, limit, log.warning)
            for conversation in encoded.conversations:
                writer.add(conversation.ids)
                file.write(conversation.counted.tobytes())
                counts.truncated += conversation.truncated
            counts.conversations += len(encoded.conversations)
            counts.too_long += encoded.too_long
        if not counts.conversations:
            raise UserError(f"{', '.join(sources)}: no conversations left ({counts}); set data.messages_key")
    return counts
