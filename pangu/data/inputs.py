"""Finding the text that people have, and reading it in chunks from any place on.

A chunk holds neighbouring documents as they were read; what it costs to parse them is left to whom it is given to.
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

from pangu.config.errors import UserError, reading
from pangu.data.remote import find_urls, is_url, open_url, size_of

DATASET = "hf:"
"""Begins the name of what the `datasets` library streams: hf:NAME[:CONFIGURATION[:SPLIT]]."""
LONGEST = 64 << 20
"""Bytes of a line, or of a document of a text file, at most: a chunk holds at least one."""

_TEXT = (".txt", ".jsonl", ".json")
_KNOWN = (*_TEXT, ".parquet", ".arrow", ".csv")
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_KINDS = f"{', '.join(_KNOWN)}, and {', '.join(_TEXT)} with {', '.join(_PACKED)}"
_CHUNK = 1 << 20
"""Bytes of text of a chunk, unless one document has more."""
_MOST_ROWS = 4096
_ARRAY_BEGIN, _AFTER_VALUE = re.compile(r"\s*\[\s*(?P<end>\]\s*)?"), re.compile(r"\s*(,|(?P<end>\]\s*))\s*")
_LINE_END, _DOCUMENT_END = re.compile(rb"\n"), re.compile(rb"\n[^\S\n]*\n")


class Place(NamedTuple):
    """Where the next chunk begins."""

    source: int
    """Number of the input."""
    offset: int
    """Bytes of it, unpacked, or records."""
    line: int
    """Lines, or records, of it before that place."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring documents of one input."""

    source: str
    content: Any
    """bytes of whole lines, or a sequence of records' texts: strings, or what stands there instead."""
    kind: Literal["text", "lines", "records", "bad"]
    """Documents between blank lines; a JSON object in each line; records; no document, for the reason in `content`."""
    first: int
    """Number of the first line or record, from 1."""
    after: Place


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --input and --text-key, the arguments of `find_inputs` and `read_chunks`."""
    kinds = (
        f"files, folders or globs, or URLs of them: {_KINDS}; or {DATASET}NAME[:CONFIGURATION[:SPLIT]], which"
        " `datasets` streams"
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=kinds)
    parser.add_argument("--text-key", default="text", metavar="KEY", help="field of a record with its text (text)")


def find_inputs(patterns: Sequence[str], key: str = "--input") -> list[str]:
    """The files of names, folders (searched throughout), globs and URLs of these, in order and without repeats. Raises
    UserError, which says that they were given as `key`, for one without files or for a file of an unknown kind."""
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
                raise UserError(f"{key} {match}: its kind is unknown; known are {_KINDS}")
            if not known:
                raise UserError(f"{key} {match}: the folder holds no file of a known kind: {_KINDS}")
            inputs.update(dict.fromkeys(known))
    return list(inputs)


def _matches(pattern: str, key: str) -> list[tuple[str, list[str]]]:
    """The file or folder of a name, or those of a glob, each with its files: itself, or what the folder holds."""
    if is_url(pattern):
        with reading(f"{key} {pattern}", Exception, rule="cannot be found"):
            return find_urls(pattern)
    if not pattern:  # as of a variable of the shell that is not set
        raise UserError(f"{key}: an empty name")
    path = Path(pattern)
    # pathlib's own glob takes no absolute patterns
    globbed = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    matches = [path] if path.exists() else [Path(match) for match in globbed]
    with reading(f"{key} {pattern}"):
        return [(str(match), _files_below(match) if match.is_dir() else [str(match)]) for match in matches]


def _files_below(folder: Path) -> list[str]:
    """In order. Links are followed, and a folder that several of them lead to comes once. Raises OSError if one cannot
    be read."""
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
        files += [Path(place, name) for name in names]
    return [str(file) for file in sorted(files)]


def is_dataset(source: str) -> bool:
    """Whether the `datasets` library streams it; hf://PATH is a URL."""
    return source.startswith(DATASET) and not is_url(source)


def input_record(source: str) -> tuple[str, int, int]:
    """Name, bytes and time of change of an input, as far as it has them. Raises UserError if it cannot be found."""
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
    """What a name says of the content, and how it is packed, or an empty text."""
    path = PurePosixPath(name.partition("?")[0] if is_url(name) else name)
    packed = path.suffix if path.suffix in _PACKED else ""
    return PurePosixPath(path.name.removesuffix(packed)).suffix, packed


def read_chunks(inputs: Sequence[str], text_key: str, start: Place = Place(0, 0, 0)) -> Iterator[Chunk]:  # noqa: B008
    """The chunks of the inputs from a place on. Raises UserError, naming the input, if one cannot be read."""
    for number, source in enumerate(inputs[start.source :], start.source):
        place = start if number == start.source else Place(number, 0, 0)
        # the libraries' readers raise many kinds of errors
        with reading(source, Exception, rule="cannot be read"):
            yield from _chunks(source, text_key, place)


def _chunks(source: str, text_key: str, place: Place) -> Iterator[Chunk]:
    suffix, packed = ("", "") if is_dataset(source) else _suffixes(source)
    if suffix in (".parquet", ".arrow"):
        columns = _parquet if suffix == ".parquet" else _arrow
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
            yield from _text_chunks(source, file, "text" if suffix == ".txt" else "lines", place)
    else:
        yield from _record_chunks(source, _parts(_streamed(source, text_key, place.offset)), place)


def _open(source: str, packed: str) -> BinaryIO:
    file: Any = open_url(source) if is_url(source) else source
    if packed == ".zst":
        import pyarrow

        raw = pyarrow.PythonFile(file, mode="r") if is_url(source) else pyarrow.OSFile(file)
        return cast(BinaryIO, pyarrow.CompressedInputStream(raw, "zstd"))
    openers: dict[str, Callable[[Any], object]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
    if packed:
        return cast(BinaryIO, openers[packed](file))
    return cast(BinaryIO, file if is_url(source) else Path(source).open("rb"))


def _is_array(source: str, packed: str) -> bool:
    """Whether a JSON file is one array rather than an object in each line, as a pipe is, which is read once."""
    if not (is_url(source) or Path(source).is_file()):
        return False
    with _open(source, packed) as file:
        return file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _array(file: BinaryIO) -> Iterator[object]:
    """The values of a JSON array, of which only a part is in memory. Raises ValueError, RecursionError."""
    decoder, stream = json.JSONDecoder(), io.TextIOWrapper(file, encoding="utf-8-sig")
    text, place, number = "", 0, 0
    while True:
        before = (_AFTER_VALUE if number else _ARRAY_BEGIN).match(text, place)
        try:
            if before and before["end"]:
                break
            value, end = decoder.raw_decode(text, before.end() if before else len(text))
            if end == len(text):
                raise json.JSONDecodeError("no comma or bracket behind it", text, end)  # or the rest of a number
        except json.JSONDecodeError as error:
            more = "" if len(text) - place > LONGEST else stream.read(max(_CHUNK, len(text) - place))
            if not more:
                raise ValueError(f"value {number + 1} of its array is not JSON: {error.msg}") from error
            text, place = text[place:] + more, 0
            continue
        yield value
        place, number = end, number + 1
    if (text[before.end() :] + stream.read(_CHUNK)).strip():
        raise ValueError(f"more text follows the {number:,} values of its array")


def _text_chunks(source: str, file: BinaryIO, kind: Literal["text", "lines"], place: Place) -> Iterator[Chunk]:
    """Chunks that end with a line, or with a document. One that is too long is a chunk without a document."""
    _, offset, line = place
    held = b""
    while block := file.read(_CHUNK):
        known, held = len(held), held + block
        if len(held) > LONGEST and _first_size(held, kind) > LONGEST:
            size, lines, held = _pass_over(file, held, kind)
            what = "no blank line ends its document" if kind == "text" else "it does not end"
            reason = f"{what} within {LONGEST >> 20} MiB; cut it into documents"
            offset, first, line = offset + size, line + 1, line + lines
            yield Chunk(source, reason, "bad", first, Place(place.source, offset, line))
            known = 0
        stop = _end_of_lines(held) if kind == "lines" else _end_of_documents(held, known)
        if stop:
            content, held = held[:stop], held[stop:]
            offset, first, line = offset + stop, line + 1, line + content.count(b"\n")
            yield Chunk(source, content, kind, first, Place(place.source, offset, line))
    if held:
        after = Place(place.source, offset + len(held), line + held.count(b"\n"))
        yield Chunk(source, held, kind, line + 1, after)


def _first_size(text: bytes, kind: Literal["text", "lines"]) -> int:
    """Bytes of the first line, or document, with its end."""
    end = (_LINE_END if kind == "lines" else _DOCUMENT_END).search(text)
    return len(text) if end is None else end.end()


def _pass_over(file: BinaryIO, held: bytes, kind: Literal["text", "lines"]) -> tuple[int, int, bytes]:
    """Bytes and lines of the first line, or document, of which `held` has been read, and what was read after it."""
    size = lines = overlap = 0
    while True:
        end = (_LINE_END if kind == "lines" else _DOCUMENT_END).search(held)
        stop = len(held) if end is None else end.end()
        size, lines = size + stop - overlap, lines + held.count(b"\n", overlap, stop)
        block = b"" if end else file.read(_CHUNK)
        if not block:
            return size, lines, held[stop:]
        # a line that is blank so far may end the document
        _, newline, last = held.rpartition(b"\n")
        before = b"" if last.strip() else newline
        held, overlap = before + block, len(before)


def _skip(file: BinaryIO, size: int) -> None:
    """Go on by so many bytes, of what is unpacked or a pipe."""
    while size and (block := file.read(min(size, _CHUNK))):
        size -= len(block)


def _end_of_lines(text: bytes) -> int:
    return text.rfind(b"\n") + 1


def _end_of_documents(text: bytes, known: int) -> int:
    """Where the last blank line ends; 0 if there is none, as in the first `known` bytes but for their last line."""
    end = text.rfind(b"\n")
    least = text.rfind(b"\n", 0, known)
    while end > least:
        before = text.rfind(b"\n", 0, end)
        if not text[before + 1 : end].strip():
            return end + 1
        end = before
    return 0


def _record_chunks(source: str, columns: Iterable[Sequence[object]], place: Place) -> Iterator[Chunk]:
    offset = place.offset
    for column in columns:
        offset += len(column)
        after = Place(place.source, offset, offset)
        yield Chunk(source, column, "records", offset - len(column) + 1, after)


def _parquet(source: str, key: str, skipped: int) -> Iterator[Any]:
    """Parts of a column, after so many rows. Only pages of it are in memory, not whole groups of rows."""
    import pyarrow
    from pyarrow import parquet

    content: Any = open_url(source) if is_url(source) else source
    with parquet.ParquetFile(content, pre_buffer=False, buffer_size=_CHUNK) as file:
        _require(source, key, file.schema_arrow.names)
        for group in range(file.num_row_groups):
            facts = file.metadata.row_group(group)
            if skipped >= facts.num_rows:
                skipped -= facts.num_rows
                continue
            rows = _rows(facts.total_byte_size, facts.num_rows)
            for batch in file.iter_batches(rows, [group], [key], use_threads=False):
                part = batch.column(key)[skipped:]
                skipped -= len(batch) - len(part)
                if len(part):
                    yield pyarrow.concat_arrays([part])  # a slice would be sent with all that it is a slice of


def _arrow(source: str, key: str, skipped: int) -> Iterator[Any]:
    """Parts of a column of a file of Arrow's, streamed or not, after so many rows."""
    import pyarrow

    remote = is_url(source)
    with pyarrow.PythonFile(open_url(source), mode="r") if remote else pyarrow.memory_map(source) as file:
        begin = file.read(6)
        file.seek(0)
        if begin == b"ARROW1":
            whole = pyarrow.ipc.open_file(file)
            batches: Iterable[Any] = (whole.get_batch(i) for i in range(whole.num_record_batches))
            names = whole.schema.names
        else:
            batches = stream = pyarrow.ipc.open_stream(file)
            names = stream.schema.names
        _require(source, key, names)
        for batch in batches:
            column = batch.column(key)
            column.validate(full=True)  # offsets of a damaged file would lead anywhere
            rows = _rows(column.nbytes, len(column))
            for begin in range(min(skipped, len(column)), len(column), rows):
                part = column[begin : begin + rows]
                yield pyarrow.concat_arrays([part])
            skipped -= min(skipped, len(column))


def _rows(size: int, rows: int) -> int:
    """As many rows as make a chunk."""
    return min(max(_CHUNK * rows // max(size, 1), 1), _MOST_ROWS)


def _streamed(source: str, key: str, skipped: int) -> Iterator[object]:
    """The text of records that the `datasets` library streams, of its own or of a table, after so many."""
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if is_dataset(source):
        name, configuration, split, *_ = [*source.removeprefix(DATASET).split(":"), "", ""]
        records = datasets.load_dataset(name, configuration or None, split=split or "train", streaming=True)
    else:
        # what stands in a table of text is text: 007, NA and nothing at all
        options: dict[str, Any] = {"keep_default_na": False, "converters": {key: str}}
        path = glob.escape(source)
        records = datasets.load_dataset("csv", data_files=path, split="train", streaming=True, **options)
    for record in records.skip(skipped) if skipped else records:
        _require(source, key, record)
        yield record[key]


def _parts(texts: Iterable[object]) -> Iterator[list[object]]:
    """The texts of records, as many at once as make a chunk."""
    size, chunk = 0, []
    for text in texts:
        chunk.append(text)
        size += len(text) if isinstance(text, str) else 1
        if size >= _CHUNK // 2 or len(chunk) == _MOST_ROWS:
            yield chunk
            size, chunk = 0, []
    if chunk:
        yield chunk


def _require(source: object, key: str, names: Iterable[str]) -> None:
    if key not in names:
        rule = f"a record has no text under {key!r}; it has {sorted(names)}"
        raise UserError(f"{source}: {rule}; see --text-key, or data.text_key")
