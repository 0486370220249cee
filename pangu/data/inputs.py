"""Input files read in chunks from any position.

A chunk holds neighboring documents as they were read; its receiver bears the cost of parsing them. Not by `datasets`:
it parses in the reading process (30 times its time for JSON lines), and ends at a bad line without the line's number.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from pangu.common.errors import reading
from pangu.data.finding import TEXT, is_dataset, is_url, open_url, suffixes
from pangu.data.tables import CHUNK, MOST_ROWS, arrow_columns, parquet_columns, streamed_records

LONGEST = 64 << 20
"""Maximum bytes of a line, or of a document of a text file: a chunk holds at least one."""

MOST_VALUES = 1_000_000
"""Maximum number of values in one JSON record: an empty list of three bytes takes over 60 in memory."""

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


def _chunks(source: str, text_key: str, place: TextPosition, text_unit: Literal["file", "text"]) -> Iterator[TextChunk]:
    suffix, packed = ("", "") if is_dataset(source) else suffixes(source)
    if suffix in (".parquet", ".arrow"):
        columns = parquet_columns if suffix == ".parquet" else arrow_columns
        yield from _record_chunks(source, columns(source, text_key, place.offset), place)
    elif suffix == ".json" and _is_array(source, packed):
        with _open(source, packed) as file:
            texts = (value.get(text_key, value) if isinstance(value, dict) else value for value in _array(file))
            yield from _record_chunks(source, _parts(islice(texts, place.offset, None)), place)
    elif suffix in TEXT:
        with _open(source, packed) as file:
            if not packed and file.seekable():
                file.seek(place.offset)
            else:
                _skip(file, place.offset)
            yield from _text_chunks(source, file, text_unit if suffix == ".txt" else "lines", place)
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
                raise json.JSONDecodeError("no comma or bracket after it", text, end)  # a number may continue
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
    return re.sub(rb'"(?>(?:[^"\\]|\\.)*)(?:"|\Z)', b"", content).count(b",") >= MOST_VALUES


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
