"""Input files: finding them, and reading them in chunks from any position.

A chunk holds neighboring documents as they were read; its receiver bears the cost of parsing them.
"""

from __future__ import annotations

import argparse
import bz2
import glob
import gzip
import io
import json
import lzma
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from pangu.common.errors import UserError, reading, shown
from pangu.common.files import read_json_object
from pangu.data.remote import find_urls, is_url, open_url, size_of
from pangu.data.tables import (
    CHUNK,
    DATASET,
    MOST_ROWS,
    arrow_columns,
    is_dataset,
    parquet_columns,
    streamed_records,
)

LONGEST = 64 << 20
"""Maximum bytes of a line, or of a document of a text file: a chunk holds at least one."""

MOST_VALUES = 1_000_000
"""Maximum number of values in one JSON record: an empty list of three bytes takes over 60 in memory."""

_TEXT = (".txt", ".jsonl", ".json")
_KNOWN = (*_TEXT, ".parquet", ".arrow", ".csv")
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_KINDS = f"{', '.join(_KNOWN)}, and {', '.join(_TEXT)} with {', '.join(_PACKED)}"
_ARRAY_BEGIN, _AFTER_VALUE = re.compile(r"\s*\[\s*(?P<end>\]\s*)?"), re.compile(r"\s*(,|(?P<end>\]\s*))\s*")
_ENDS = {"lines": re.compile(rb"\n"), "text": re.compile(rb"\n[^\S\n]*\n"), "file": re.compile(rb"(?!)")}
"""Separators of lines and of documents; a whole file has none."""
_ENDLESS = {"lines": "it does not end", "text": "no blank line ends the document", "file": "the file does not end"}
TextKind = Literal["text", "file", "lines"]
ChunkKind = Literal[TextKind, "records", "bad"]


class TextPosition(NamedTuple):
    """Position where the next chunk begins."""

    source: int
    """Index of the input."""
    offset: int
    """Offset in uncompressed bytes, or in records."""
    line: int
    """Number of lines or records before this position."""


@dataclass(frozen=True)
class TextChunk:
    """Neighboring documents of one input."""

    source: str
    content: Any
    """Bytes of whole lines, or a sequence of records' values: strings, or what a record has instead."""
    kind: ChunkKind
    """Format of the content: documents between blank lines; one document; a JSON object in each line; records; or no
    document, for the reason in `content`."""
    first: int
    """Number of the first line or record, from 1."""
    after: TextPosition


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --input, --text-key and --whole-files, the arguments of `find_inputs` and `read_chunks`."""
    kinds = (
        f"files, folders or globs, or URLs of them: {_KINDS}; or {DATASET}NAME[:CONFIGURATION[:SPLIT]], which"
        " `datasets` streams"
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=kinds)
    parser.add_argument("--text-key", default="text", metavar="KEY", help="field of a record that has the text (text)")
    parser.add_argument(
        "--whole-files",
        action="store_true",
        help="treat each .txt file as one document instead of splitting it at blank lines",
    )


def find_inputs(patterns: Sequence[str], key: str = "--input") -> list[str]:
    """Return the files of names, folders (searched recursively), globs and URLs of these, in order, without repeats.

    Raises UserError, naming `key` as their origin, for a pattern without files or a file of an unknown kind.
    """
    inputs: dict[str, None] = {}
    for pattern in patterns:
        if is_dataset(pattern):
            inputs[pattern] = None
            continue
        matches = _matches(pattern, key)
        if not matches:
            raise UserError(f"{key} {pattern}: no such file or folder")
        for match, files in matches:
            known = [file for file in files if _is_known(file)]
            if not known and files == [match]:
                raise UserError(f"{key} {match}: unknown kind of file; supported are {_KINDS}")
            if not known:
                raise UserError(f"{key} {match}: the folder has no file of a supported kind: {_KINDS}")
            inputs.update(dict.fromkeys(known))
    return list(inputs)


def _matches(pattern: str, key: str) -> list[tuple[str, list[str]]]:
    """Return the matches of a name or glob, each with its files: itself, or what the folder holds."""
    if is_url(pattern):
        with reading(f"{key} {pattern}", Exception, rule="cannot be found"):
            return find_urls(pattern)
    if not pattern:  # e.g. from an unset shell variable
        raise UserError(f"{key}: a name is empty")
    path = Path(pattern)
    # pathlib's own glob takes no absolute patterns
    globbed = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    matches = [path] if path.exists() else [Path(match) for match in globbed]
    with reading(f"{key} {pattern}"):
        return [(str(match), _files_below(match) if match.is_dir() else [str(match)]) for match in matches]


def _files_below(folder: Path) -> list[str]:
    """Return the files below a folder, sorted. Follows links, and visits each folder once. Raises OSError."""
    files: list[Path] = []
    seen = set()

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        facts = Path(place).stat()
        if (facts.st_dev, facts.st_ino) in seen:
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        folders.sort()
        saved = _saved_dataset(Path(place), folders) if {"state.json", "dataset_dict.json"} & {*names} else None
        files += [Path(place, name) for name in names] if saved is None else saved
    return [str(file) for file in sorted(files)]


def _saved_dataset(folder: Path, folders: Sequence[str]) -> list[Path] | None:
    """Return the data files of a folder that `datasets` saved, in order; None for other folders.

    There are none if its splits are in `folders`. Other files of the library, e.g. results of `map`, are excluded.
    Raises UserError for several splits, or for a selection of rows that is stored separately.
    """
    if (folder / "dataset_dict.json").is_file():
        if len(folders) > 1:
            raise UserError(f"{folder}: has the splits {', '.join(folders)}; name one, e.g. {folder / folders[0]}")
        return []
    state = read_json_object(folder / "state.json")
    files = state.get("_data_files")
    if not isinstance(files, list):
        return None
    if any(state.get(key) for key in ("_indices_files", "_indices_data_files")):
        raise UserError(f"{folder}: stores the order of its rows separately; save it again after flatten_indices()")
    names = [file.get("filename") if isinstance(file, dict) else None for file in files]
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise UserError(f"{folder / 'state.json'}: {shown(wrong[0])} is not the name of a data file")
    return [folder / name for name in names if isinstance(name, str)]


def input_record(source: str) -> tuple[str, int, int]:
    """Return name, bytes and mtime in ns of an input, 0 if it has none. Raises UserError if it cannot be found."""
    if is_dataset(source):
        return source, 0, 0
    with reading(source, Exception, rule="cannot be found"):
        if is_url(source):
            return source, size_of(source), 0
        facts = Path(source).stat()
    return source, facts.st_size, facts.st_mtime_ns


def _is_known(name: str) -> bool:
    suffix, packed = _suffixes(name)
    return suffix in (_TEXT if packed else _KNOWN)


def _suffixes(name: str) -> tuple[str, str]:
    path = PurePosixPath(name.partition("?")[0] if is_url(name) else name)
    packed = path.suffix if path.suffix in _PACKED else ""
    return PurePosixPath(path.name.removesuffix(packed)).suffix, packed


def read_chunks(
    inputs: Sequence[str],
    text_key: str,
    start: TextPosition = TextPosition(0, 0, 0),  # noqa: B008
    *,
    whole_files: bool = False,
) -> Iterator[TextChunk]:
    """Read chunks from a place on; `whole_files`: one document per text file. Raises UserError, naming a bad input."""
    for number, source in enumerate(inputs[start.source :], start.source):
        place = start if number == start.source else TextPosition(number, 0, 0)
        # the libraries' readers raise many kinds of errors
        with reading(source, Exception, rule="cannot be read"):
            yield from _chunks(source, text_key, place, "file" if whole_files else "text")


def _chunks(source: str, text_key: str, place: TextPosition, of_text: Literal["file", "text"]) -> Iterator[TextChunk]:
    suffix, packed = ("", "") if is_dataset(source) else _suffixes(source)
    if suffix in (".parquet", ".arrow"):
        columns = parquet_columns if suffix == ".parquet" else arrow_columns
        yield from _record_chunks(source, columns(source, text_key, place.offset), place)
    elif suffix == ".json" and _is_array(source, packed):
        with _open(source, packed) as file:
            texts = (value.get(text_key, value) if isinstance(value, dict) else value for value in _array(file))
            yield from _record_chunks(source, _parts(islice(texts, place.offset, None)), place)
    elif suffix in _TEXT:
        with _open(source, packed) as file:
            if not packed and file.seekable():
                file.seek(place.offset)
            else:
                _skip(file, place.offset)
            yield from _text_chunks(source, file, of_text if suffix == ".txt" else "lines", place)
    else:
        yield from _record_chunks(source, _parts(streamed_records(source, text_key, place.offset)), place)


def _open(source: str, packed: str) -> BinaryIO:
    file: Any = open_url(source) if is_url(source) else source
    if packed == ".zst":
        import pyarrow  # noqa: PLC0415 - optional package

        raw = pyarrow.PythonFile(file, mode="r") if is_url(source) else pyarrow.OSFile(file)
        return cast(BinaryIO, pyarrow.CompressedInputStream(raw, "zstd"))
    openers: dict[str, Callable[[Any], object]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    if packed:
        return cast(BinaryIO, openers[packed](file))
    return cast(BinaryIO, file if is_url(source) else Path(source).open("rb"))


def _is_array(source: str, packed: str) -> bool:
    """Return whether a JSON file is one array. A pipe, which can be read only once, has an object in each line."""
    if not (is_url(source) or Path(source).is_file()):
        return False
    with _open(source, packed) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _array(file: BinaryIO) -> Iterator[object]:
    """Yield the values of a JSON array, with only a part of it in memory. Raises ValueError, RecursionError."""
    decoder, stream = json.JSONDecoder(), io.TextIOWrapper(file, encoding="utf-8-sig")
    text, place, number = "", 0, 0
    while True:
        before = (_AFTER_VALUE if number else _ARRAY_BEGIN).match(text, place)
        try:
            if before and before["end"]:
                break
            value, end = decoder.raw_decode(text, before.end() if before else len(text))
            if end == len(text):
                raise json.JSONDecodeError("no comma or bracket after it", text, end)  # a number may go on
        except json.JSONDecodeError as error:
            if has_too_many_values(text[place:].encode(errors="replace")):
                raise ValueError(f"value {number + 1} of its array has more than {MOST_VALUES:,} values") from error
            more = "" if len(text) - place > LONGEST else stream.read(max(CHUNK, len(text) - place))
            if not more:
                raise ValueError(f"value {number + 1} of its array is not JSON: {error.msg}") from error
            text, place = text[place:] + more, 0
            continue
        yield value
        place, number = end, number + 1
    if (text[before.end() :] + stream.read(CHUNK)).strip():
        raise ValueError(f"more text follows the {number:,} values of its array")


def has_too_many_values(content: bytes) -> bool:
    """Return whether a JSON text has more than `MOST_VALUES` values, judging by its commas outside of strings."""
    if content.count(b",") < MOST_VALUES:
        return False
    return re.sub(rb'"(?:[^"\\]|\\.)*+(?:"|\Z)', b"", content).count(b",") >= MOST_VALUES


def _text_chunks(source: str, file: BinaryIO, kind: TextKind, place: TextPosition) -> Iterator[TextChunk]:
    """Yield chunks that end with a line or a document. One that is too long becomes a chunk without a document."""
    _, offset, line = place
    held = b""

    def chunk(content: bytes | str, kind: ChunkKind, size: int, lines: int) -> TextChunk:
        nonlocal offset, line
        offset, first, line = offset + size, line + 1, line + lines
        return TextChunk(source, content, kind, first, TextPosition(place.source, offset, line))

    while block := file.read(CHUNK):
        known, held = len(held), held + block
        if len(held) > LONGEST and not _ENDS[kind].search(held, 0, LONGEST):
            size, lines, held = _pass_over(file, held, kind)
            yield chunk(f"{_ENDLESS[kind]} within {LONGEST >> 20} MiB; split it into documents", "bad", size, lines)
            known = 0
        if stop := _last_end(held, known, kind):
            content, held = held[:stop], held[stop:]
            yield chunk(content, kind, stop, content.count(b"\n"))
    if held:
        yield chunk(held, kind, len(held), held.count(b"\n"))


def _pass_over(file: BinaryIO, held: bytes, kind: str) -> tuple[int, int, bytes]:
    """Skip the first line or document, begun in `held`; return its bytes, its lines and what was read after it."""
    size = lines = overlap = 0
    while True:
        end = _ENDS[kind].search(held)
        stop = len(held) if end is None else end.end()
        size, lines = size + stop - overlap, lines + held.count(b"\n", overlap, stop)
        block = b"" if end else file.read(CHUNK)
        if not block:
            return size, lines, held[stop:]
        # a line that is blank so far may end the document
        _, newline, last = held.rpartition(b"\n")
        before = b"" if last.strip() else newline
        held, overlap = before + block, len(before)


def _skip(file: BinaryIO, size: int) -> None:
    while size and (block := file.read(min(size, CHUNK))):
        size -= len(block)


def _last_end(text: bytes, known: int, kind: TextKind) -> int:
    """Return where the last line or document ends; 0 if none ends in the last line of `known` bytes or after it."""
    if kind != "text":
        return text.rfind(b"\n") + 1 if kind == "lines" else 0
    end, least = text.rfind(b"\n"), text.rfind(b"\n", 0, known)
    while end > least:
        before = text.rfind(b"\n", 0, end)
        if not text[before + 1 : end].strip():
            return end + 1
        end = before
    return 0


def _record_chunks(source: str, columns: Iterable[Sequence[object]], place: TextPosition) -> Iterator[TextChunk]:
    offset = place.offset
    for column in columns:
        offset += len(column)
        after = TextPosition(place.source, offset, offset)
        yield TextChunk(source, column, "records", offset - len(column) + 1, after)


def _parts(texts: Iterable[object]) -> Iterator[list[object]]:
    """Group the texts of records into lists of the size of a chunk."""
    size, chunk = 0, []
    for text in texts:
        chunk.append(text)
        size += len(text) if isinstance(text, str) else 1
        if size >= CHUNK // 2 or len(chunk) == MOST_ROWS:
            yield chunk
            size, chunk = 0, []
    if chunk:
        yield chunk
