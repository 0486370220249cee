"""Columns of tables: Parquet, Arrow, and what the `datasets` library streams."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from typing import Any

from pangu.config.errors import UserError
from pangu.data.remote import is_url, open_url

DATASET = "hf:"
"""Begins the name of what the `datasets` library streams: hf:NAME[:CONFIGURATION[:SPLIT]]."""
CHUNK = 1 << 20
"""Bytes of text of a chunk, unless one document has more."""
MOST_ROWS = 4096
"""Rows of a chunk."""


def is_dataset(source: str) -> bool:
    """Whether the `datasets` library streams it; hf://PATH is a URL."""
    return source.startswith(DATASET) and not is_url(source)


def parquet_columns(source: str, key: str, skipped: int) -> Iterator[Any]:
    """Parts of a column, after so many rows. Only pages of it are in memory, not whole groups of rows."""
    import pyarrow
    from pyarrow import parquet

    content: Any = open_url(source) if is_url(source) else source
    with parquet.ParquetFile(content, pre_buffer=False, buffer_size=CHUNK) as file:
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


def arrow_columns(source: str, key: str, skipped: int) -> Iterator[Any]:
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
    return min(max(CHUNK * rows // max(size, 1), 1), MOST_ROWS)


def streamed_records(source: str, key: str, skipped: int) -> Iterator[object]:
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


def _require(source: object, key: str, names: Iterable[str]) -> None:
    if key not in names:
        rule = f"a record has no text under {key!r}; it has {sorted(names)}"
        raise UserError(f"{source}: {rule}; see --text-key, or data.text_key")
