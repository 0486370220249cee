"""Documents parsed from chunks of text files and tables; lines without one are reported with their place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from pangu.common.errors import UserError, shown
from pangu.common.files import parse_json
from pangu.data.inputs import MOST_VALUES, TextChunk, has_too_many_values, read_chunks
from pangu.data.tables import decoded
from pangu.topology.random import random_key

_BLANK_LINES = re.compile(r"\n\s*\n")
_NAMED = 100  # bad lines that `leave_out` warns about


class Document(NamedTuple):
    """Text of one document."""

    text: str
    size: int
    """Size in bytes of UTF-8."""


class BadLine(NamedTuple):
    """Line or record that holds no document."""

    source: str
    line: int
    """Line or record number, from 1."""
    reason: str

    def __str__(self) -> str:
        """Return the place and the reason."""
        return f"{self.source}, line {self.line}: {self.reason}"


def read_documents(inputs: Sequence[str], text_key: str, *, whole_files: bool = False) -> Iterator[str]:
    """Yield the nonblank documents of inputs. Raises UserError, naming the input, for unreadable ones and bad lines."""
    for chunk in read_chunks(inputs, text_key, whole_files=whole_files):
        for document in documents(chunk, text_key):
            if isinstance(document, BadLine):
                raise UserError(str(document))
            yield document.text


def leave_out(line: BadLine, count: int, most: int, limit: str, warn: Callable[[str], object]) -> bool:
    """Leave out a bad line, the `count`-th (from 1), and return whether `warn` was called: only for the first hundred.

    Raises UserError, which quotes the `limit` text, for more than `most`.
    """
    if count > most:
        raise UserError(f"{line}; limit reached: {limit}; correct the line, or raise the limit")
    if count <= _NAMED:
        warn(f"skipped: {line}")
    return count <= _NAMED


def held_out(text: str, share: float) -> bool:
    """Return whether a document belongs to the held-out share of all documents, chosen by a hash of its text."""
    return share > 0 and random_key("held out", text) < share * 2**64


def documents(chunk: TextChunk, text_key: str) -> Iterator[Document | BadLine]:
    """Yield the documents of a chunk, without blank ones, and its bad lines."""
    read = {"lines": _in_lines, "records": _in_records, "bad": _in_lines}.get(chunk.kind, _in_text)
    for line, text in read(chunk, text_key):
        if isinstance(text, BadLine):
            yield text
        elif text and not text.isspace():
            try:
                yield Document(text, len(text.encode()))
            except UnicodeEncodeError:
                yield BadLine(chunk.source, line, "its text has a lone surrogate, which is not a character")


def _in_text(chunk: TextChunk, _: str) -> Iterator[tuple[int, str | BadLine]]:
    content: bytes = chunk.content
    begin, line, stops = 0, chunk.first, list[int]()
    try:
        content.decode()
    except UnicodeDecodeError:  # document by document, so that only the bad ones are lost
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


def _paragraphs(text: str, kind: str) -> list[str]:
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = [text] if kind == "file" else _BLANK_LINES.split(f"\n{text}\n")
    return [part.strip("\n") for part in parts]


def json_lines(chunk: TextChunk) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each nonblank line of a chunk; the value is a BadLine where it is not JSON."""
    if chunk.kind == "bad":
        yield chunk.first, BadLine(chunk.source, chunk.first, chunk.content)
        return
    for line, content in enumerate(chunk.content.split(b"\n"), chunk.first):
        if content.strip():
            yield line, _parsed(content, chunk.source, line)


def _parsed(content: bytes, source: str, line: int) -> Any:
    if has_too_many_values(content):
        return BadLine(source, line, f"has more than {MOST_VALUES:,} values; split it into several lines")
    try:
        return parse_json(content.decode("utf-8-sig" if line == 1 else "utf-8"))
    except UnicodeDecodeError:
        return BadLine(source, line, "is not UTF-8")
    except ValueError as error:
        return BadLine(source, line, f"is not JSON ({shown(str(error))})")


def _in_lines(chunk: TextChunk, key: str) -> Iterator[tuple[int, str | BadLine]]:
    for line, record in json_lines(chunk):
        yield line, record if isinstance(record, BadLine) else _text_of(record, key, chunk.source, line)


def _text_of(record: Any, key: str, source: str, line: int) -> str | BadLine:
    if not isinstance(record, dict):
        return BadLine(source, line, "is not a JSON object")
    text = record.get(key)
    if isinstance(text, str):
        return text
    if key in record:
        return BadLine(source, line, f"has {shown(text)} instead of a string under {key!r}")
    has = shown(sorted(record))
    return BadLine(source, line, f"has no text under {key!r}; its keys are {has}: set --text-key or data.text_key")


def _in_records(chunk: TextChunk, key: str) -> Iterator[tuple[int, str | BadLine]]:
    for line, text in enumerate(_values(chunk.content), chunk.first):
        if isinstance(text, str):
            yield line, text
        else:
            yield line, BadLine(chunk.source, line, f"has {shown(text)} instead of a string under {key!r}")


def _values(column: Any) -> list[object]:
    if isinstance(column, list):
        return column
    try:
        return column.to_pylist()
    except UnicodeDecodeError:  # a library wrote another encoding, or the file is damaged
        return [decoded(value) for value in column.cast("large_binary").to_pylist()]
