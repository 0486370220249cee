"""Columns of tables: Parquet, Arrow, and what the `datasets` library streams."""

from __future__ import annotations

import glob
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from pangu.config.errors import UserError
from pangu.data.remote import is_url, open_url

DATASET = "hf:"
"""Begins the name of what the `datasets` library streams: hf:NAME[:CONFIGURATION[:SPLIT]]."""
CHUNK = 1 << 20
"""Bytes of text of a chunk, unless one document has more."""
MOST_ROWS = 4096
"""Rows of a chunk."""
MOST_EXPANDED = 256 << 20
"""Bytes that a part of a table may unpack to if it is stored in less than a hundredth of them."""


def is_dataset(source: str) -> bool:
    """Whether the `datasets` library streams it; hf://PATH is a URL."""
    return source.startswith(DATASET) and not is_url(source)


def parquet_columns(source: str, key: str, skipped: int) -> Iterator[Any]:
    """Parts of a column, after so many rows. Only pages of it are in memory, not whole groups of rows."""
    from pyarrow import parquet  # noqa: PLC0415 - optional package

    content: Any = open_url(source) if is_url(source) else source
    metadata = parquet.read_metadata(content)
    columns = [metadata.schema.column(place) for place in range(metadata.num_columns)]
    places = [place for place, column in enumerate(columns) if column.path.partition(".")[0] == key]
    _require(source, key, metadata.schema.to_arrow_schema().names)
    # A dictionary is kept as it is: a few bytes may repeat a long value in every row.
    kept = [key for column in columns if (column.path, column.physical_type) == (key, "BYTE_ARRAY")]
    options: dict[str, Any] = {"metadata": metadata, "read_dictionary": kept, "pre_buffer": False}
    with parquet.ParquetFile(content, buffer_size=CHUNK, **options) as file:
        for group in range(file.num_row_groups):
            facts = metadata.row_group(group)
            if skipped >= facts.num_rows:
                skipped -= facts.num_rows
                continue
            for column in map(facts.column, places):
                sizes = column.total_compressed_size, column.total_uncompressed_size
                _check_expansion(f"{source}, row group {group + 1}", *sizes)
            rows = _rows(facts.total_byte_size, facts.num_rows)
            for batch in file.iter_batches(rows, [group], [key], use_threads=False):
                yield from _column_parts(batch.column(key), skipped)
                skipped -= min(skipped, len(batch))


def arrow_columns(source: str, key: str, skipped: int) -> Iterator[Any]:
    """Parts of a column of a file of Arrow's, streamed or not, after so many rows."""
    import pyarrow  # noqa: PLC0415 - optional package

    remote = is_url(source)
    with pyarrow.PythonFile(open_url(source), mode="r") if remote else pyarrow.memory_map(source) as file:
        begin = file.read(6)
        if not remote:
            file.seek(8 if begin == b"ARROW1" else 0)
            _check_messages(source, pyarrow.ipc.MessageReader.open_stream(file))
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
            yield from _column_parts(column, skipped)
            skipped -= min(skipped, len(column))


def _column_parts(column: Any, skipped: int) -> Iterator[Any]:
    """Yield copies of parts of an array of about `CHUNK` bytes, after so many rows, with dictionaries decoded."""
    import pyarrow  # noqa: PLC0415 - optional package
    from pyarrow import compute  # noqa: PLC0415 - optional package

    is_dictionary = pyarrow.types.is_dictionary(column.type)
    rows, begin = _rows(column.nbytes, len(column)), skipped
    ends = None
    if is_dictionary and (
        pyarrow.types.is_string(column.type.value_type) or pyarrow.types.is_large_string(column.type.value_type)
    ):
        sizes = compute.binary_length(column.dictionary).take(column.indices).fill_null(0)
        ends = np.cumsum(sizes.to_numpy(zero_copy_only=False), dtype=np.int64)
    while begin < len(column):
        stop = begin + rows
        if ends is not None:
            read = ends[begin - 1] if begin else 0
            stop = max(begin + 1, min(begin + MOST_ROWS, int(np.searchsorted(ends, read + CHUNK, "right"))))
        part = column[begin:stop]
        # a slice would be sent with all that it is a slice of
        yield part.dictionary_decode() if is_dictionary else pyarrow.concat_arrays([part])
        begin = stop


def _check_expansion(where: str, stored: int, expanded: int) -> None:
    """Refuse what a small file unpacks to. Raises UserError."""
    if expanded > MOST_EXPANDED and expanded > 100 * stored:
        limit = f"more than {MOST_EXPANDED >> 20} MiB and 100 times the stored size"
        rule = f"{stored:,} bytes unpack to {expanded:,}, {limit}"
        raise UserError(f"{where}: {rule}; write it in smaller parts")


def _check_messages(source: str, messages: Iterable[Any]) -> None:
    """Refuse Arrow record batches that unpack to too much: each packed buffer begins with its size.

    Raises UserError.
    """
    for number, message in enumerate(messages):
        if message.type == "schema" or message.body is None:
            continue
        body = memoryview(message.body)
        header = memoryview(message.metadata)
        expanded = sum(
            max(struct.unpack_from("<q", body, offset)[0], 0)
            for offset in _packed_buffers(header)
            if offset + 8 <= len(body)
        )
        _check_expansion(f"{source}, record batch {number}", len(body), expanded)


def _packed_buffers(header: memoryview) -> list[int]:
    """Return the offsets of the compressed buffers of an Arrow message, read from its FlatBuffers header."""

    def unpack(kind: str, place: int) -> int:
        return int(struct.unpack_from(f"<{kind}", header, place)[0])

    def field(table: int, index: int) -> int:
        """Return where the field of a table lies that refers to another place; 0 if it is not there."""
        entries = table - unpack("i", table)
        offset = unpack("H", entries + 4 + 2 * index) if 4 + 2 * index < unpack("H", entries) else 0
        return table + offset if offset else 0

    def follow(place: int) -> int:
        return place + unpack("I", place)

    message = follow(0)
    batch = follow(field(message, 2))
    if header[field(message, 1)] == 2:  # a dictionary, whose values are a record batch
        batch = follow(field(batch, 1))
    if not (field(batch, 3) and field(batch, 2)):
        return []
    buffers = follow(field(batch, 2))
    places = [buffers + 4 + 16 * n for n in range(unpack("I", buffers))]
    return [unpack("q", place) for place in places if unpack("q", place + 8) > 0]


def _rows(size: int, rows: int) -> int:
    """Return how many rows make a chunk."""
    return min(max(CHUNK * rows // max(size, 1), 1), MOST_ROWS)


def streamed_records(source: str, key: str, skipped: int) -> Iterator[object]:
    """The text of records that the `datasets` library streams, of its own or of a table, after so many."""
    import datasets  # noqa: PLC0415 - optional package

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


def _require(source: object, key: str, names: Iterable[str]) -> None:
    if key not in names:
        rule = f"a record has no text under {key!r}; it has {sorted(names)}"
        raise UserError(f"{source}: {rule}; see --text-key, or data.text_key")
