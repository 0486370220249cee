"""From chunks of text files and tables to documents; what is none is named by its place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pangu.config.errors import UserError, shown
from pangu.config.files import parse_json
from pangu.data.inputs import MOST_VALUES, Chunk, has_too_many_values, read_chunks

_BLANK_LINES = re.compile(r"\n\s*\n")
_NAMED = 100
"""Bad lines of which `leave_out` warns."""


class Document(NamedTuple):
    text: str
    size: int
    """Bytes of UTF-8."""


class BadLine(NamedTuple):
    """A line or record that holds no document."""

    source: str
    line: int
    """From 1."""
    reason: str

    def __str__(self) -> str:
        return f"{self.source}, line {self.line}: {self.reason}"


def read_documents(inputs: Sequence[str], text_key: str, *, whole_files: bool = False) -> Iterator[str]:
    """The documents of inputs, without blank ones. Raises UserError, naming the input, if one cannot be read or has a
    line that is none."""
    for chunk in read_chunks(inputs, text_key, whole_files=whole_files):
        for document in documents(chunk, text_key):
            if isinstance(document, BadLine):
                raise UserError(str(document))
            yield document.text


def leave_out(line: BadLine, count: int, most: int, limit: str, warn: Callable[[str], object]) -> bool:
    """Leave out a bad line, the `count`-th (from 1), with a message to `warn` for the first hundred; returns whether
    there was one. Raises UserError, which names the `limit` in words, for more than `most`."""
    if count > most:
        raise UserError(f"{line}; more than {limit} are not left out")
    if count <= _NAMED:
        warn(f"left out: {line}")
    return count <= _NAMED


def documents(chunk: Chunk, text_key: str) -> Iterator[Document | BadLine]:
    """What a chunk holds, without blank documents."""
    read = {"lines": _in_lines, "records": _in_records, "bad": _in_lines}.get(chunk.kind, _in_text)
    for line, text in read(chunk, text_key):
        if isinstance(text, BadLine):
            yield text
        elif text and not text.isspace():
            try:
                yield Document(text, len(text.encode()))
            except UnicodeEncodeError:
                yield BadLine(chunk.source, line, "its text holds half of a surrogate pair, which is no character")


def _in_text(chunk: Chunk, _: str) -> Iterator[tuple[int, str | BadLine]]:
    content: bytes = chunk.content
    try:
        texts = _paragraphs(content.decode("utf-8-sig" if chunk.first == 1 else "utf-8"), chunk.kind)
    except UnicodeDecodeError:
        yield from _one_by_one(chunk)
        return
    for text in texts:
        yield chunk.first, text


def _paragraphs(text: str, kind: str) -> list[str]:
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = [text] if kind == "file" else _BLANK_LINES.split(f"\n{text}\n")
    return [part.strip("\n") for part in parts]


def _one_by_one(chunk: Chunk) -> Iterator[tuple[int, str | BadLine]]:
    """The documents of a text that is not UTF-8 throughout."""
    content: bytes = chunk.content
    begin, line = 0, chunk.first
    stops = [match.end() for match in re.finditer(rb"\n\s*\n", content) if chunk.kind == "text"]
    for stop in (*stops, len(content)):
        part = content[begin:stop]
        try:
            for text in _paragraphs(part.decode("utf-8-sig" if line == 1 else "utf-8"), chunk.kind):
                yield line, text
        except UnicodeDecodeError as error:
            place = line + part.count(b"\n", 0, error.start)
            reason = "is not UTF-8; convert the file first, e.g. iconv -f GB18030 -t UTF-8"
            yield place, BadLine(chunk.source, place, reason)
        begin, line = stop, line + part.count(b"\n")


def json_lines(chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """Number and value of each line of a chunk that is not blank; a BadLine for one that is no JSON."""
    if chunk.kind == "bad":
        yield chunk.first, BadLine(chunk.source, chunk.first, chunk.content)
        return
    for line, content in enumerate(chunk.content.split(b"\n"), chunk.first):
        if content.strip():
            yield line, _parsed(content, chunk.source, line)


def _parsed(content: bytes, source: str, line: int) -> Any:
    if has_too_many_values(content):
        return BadLine(source, line, f"holds more than {MOST_VALUES:,} values; cut it into several lines")
    try:
        return parse_json(content.decode("utf-8-sig" if line == 1 else "utf-8"))
    except UnicodeDecodeError:
        return BadLine(source, line, "is not UTF-8")
    except ValueError as error:
        return BadLine(source, line, f"is not JSON ({shown(str(error))})")


def _in_lines(chunk: Chunk, key: str) -> Iterator[tuple[int, str | BadLine]]:
    for line, record in json_lines(chunk):
        yield line, record if isinstance(record, BadLine) else _text_of(record, key, chunk.source, line)


def _text_of(record: Any, key: str, source: str, line: int) -> str | BadLine:
    if not isinstance(record, dict):
        return BadLine(source, line, "is no JSON object")
    text = record.get(key)
    if isinstance(text, str):
        return text
    if key in record:
        return BadLine(source, line, f"has no text under {key!r}, but {shown(text)}")
    has = shown(sorted(record))
    return BadLine(source, line, f"has no text under {key!r}; it has {has}; see --text-key, or data.text_key")


def _in_records(chunk: Chunk, key: str) -> Iterator[tuple[int, str | BadLine]]:
    for line, text in enumerate(_values(chunk.content), chunk.first):
        if isinstance(text, str):
            yield line, text
        else:
            yield line, BadLine(chunk.source, line, f"has no text under {key!r}, but {shown(text)}")


def _values(column: Any) -> list[object]:
    if isinstance(column, list):
        return column
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # a library wrote something else there, or the file is damaged
        return [_decoded(value) for value in column.cast("large_binary").to_pylist()]


def _decoded(value: bytes | None) -> object:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value
