"""Columns of Parquet and Arrow tables, and records streamed by the libraries of datasets and shards.

Tables not by `datasets`: it reads full row groups, whatever they decompress to, and cannot resume within one.
"""

from __future__ import annotations

import glob
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np

from pangu.common.errors import UserError, shown
from pangu.common.files import parse_json
from pangu.data.finding import DATASET, MDS, WEBDATASET, is_dataset, is_url, open_url

CHUNK = 1 << 20
"""Bytes of text per chunk, unless a single document has more."""
MOST_ROWS = 4096
"""Maximum number of rows per chunk."""
MOST_EXPANDED = 256 << 20
"""Maximum decompressed bytes of a part of a table whose compression ratio exceeds 100."""


def parquet_columns(source: str, key: str, skipped: int) -> Iterator[Any]:
    """Yield parts of a Parquet column after `skipped` rows; only pages of it are in memory, not full row groups."""
    from pyarrow import parquet  # noqa: PLC0415 - optional package

    content: Any = open_url(source) if is_url(source) else source
    metadata = parquet.read_metadata(content)
    columns = [metadata.schema.column(place) for place in range(metadata.num_columns)]
    places = [place for place, column in enumerate(columns) if column.path.partition(".")[0] == key]
    _require(source, key, metadata.schema.to_arrow_schema().names)
    # Dictionaries stay encoded: a few bytes may repeat a long value in every row.
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
    """Yield parts of a column of an Arrow file, in the file or stream format, after `skipped` rows."""
    import pyarrow  # noqa: PLC0415 - optional package

    remote = is_url(source)
    with pyarrow.PythonFile(open_url(source), mode="r") if remote else pyarrow.memory_map(source) as file:
        begin = file.read(6)
        if not remote:
            file.seek(8 if begin == b"ARROW1" else 0)
            _check_messages(source, pyarrow.ipc.MessageReader.open_stream(file))
        file.seek(0)
        if begin == b"ARROW1":
            reader = pyarrow.ipc.open_file(file)
            batches: Iterable[Any] = (reader.get_batch(i) for i in range(reader.num_record_batches))
            names = reader.schema.names
        else:
            batches = stream = pyarrow.ipc.open_stream(file)
            names = stream.schema.names
        _require(source, key, names)
        for batch in batches:
            column = batch.column(key)
            column.validate(full=True)  # a damaged file may have offsets out of bounds
            yield from _column_parts(column, skipped)
            skipped -= min(skipped, len(column))


def _column_parts(column: Any, skipped: int) -> Iterator[Any]:
    """Yield copies of parts of an array, about `CHUNK` bytes each, after `skipped` rows, with dictionaries decoded."""
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
        # a copy, because pickling a slice would send the full array
        yield part.dictionary_decode() if is_dictionary else pyarrow.concat_arrays([part])
        begin = stop


def _check_expansion(where: str, stored: int, expanded: int) -> None:
    if expanded > MOST_EXPANDED and expanded > 100 * stored:
        limit = f"more than {MOST_EXPANDED >> 20} MiB and 100 times the stored size"
        rule = f"{stored:,} bytes decompress to {expanded:,}, {limit}"
        raise UserError(f"{where}: {rule}; write it in smaller parts")


def _check_messages(source: str, messages: Iterable[Any]) -> None:
    """Raise UserError for Arrow record batches that decompress to too much; each packed buffer begins with its size."""
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
    return min(max(CHUNK * rows // max(size, 1), 1), MOST_ROWS)


def streamed_records(source: str, key: str, skipped: int) -> Iterator[object]:
    """Yield the texts of records that a library streams, from a dataset, shards or CSV, after `skipped` records."""
    if source.startswith(MDS):
        records = _mds_records(source, skipped)
    elif source.startswith(WEBDATASET):
        records = _webdataset_records(source, key, skipped)
    else:
        records = _dataset_records(source, key, skipped)
    for record in records:
        _require(source, key, record)
        yield record[key]


def _dataset_records(source: str, key: str, skipped: int) -> Iterator[Mapping[str, object]]:
    import datasets  # noqa: PLC0415 - optional package

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    if is_dataset(source):
        name, configuration, split, *_ = [*source.removeprefix(DATASET).split(":"), "", ""]
        records = datasets.load_dataset(name, configuration or None, split=split or "train", streaming=True)
    else:
        # every cell of a text table is text: 007, NA and an empty cell
        options: dict[str, Any] = {"keep_default_na": False, "converters": {key: str}}
        path = glob.escape(source)
        records = datasets.load_dataset("csv", data_files=path, split="train", streaming=True, **options)
    yield from records.skip(skipped) if skipped else records


def _mds_records(source: str, skipped: int) -> Iterator[Mapping[str, object]]:
    """Yield the samples of MosaicML shards, one shard at a time as a temporary copy; pickled columns are refused."""
    library = _library("streaming", "mosaicml-streaming", source)
    one_process = import_module("streaming.base.world").World(1, 1, 1, 0)
    with tempfile.TemporaryDirectory() as folder:
        place = {"remote": source.removeprefix(MDS), "local": folder}
        stream = library.Stream(**place, download_retry=2, download_timeout=600, keep_zip=False)
        for shard in stream.get_shards(one_process, allow_unsafe_types=False):
            if skipped < len(shard):
                stream.prepare_shard(shard)
                yield from (shard[number] for number in range(skipped, len(shard)))
                shard.evict()
            skipped -= min(skipped, len(shard))


def _webdataset_records(source: str, key: str, skipped: int) -> Iterator[Mapping[str, object]]:
    """Yield the samples of tar files: text by extension, or the object of a `json` file. Nothing else is decoded."""
    library = _library("webdataset", "webdataset", source)
    shards = library.SimpleShardList(source.removeprefix(WEBDATASET))
    for sample in islice(library.DataPipeline(shards, library.tarfile_to_samples()), skipped, None):
        if key in sample or "json" not in sample:
            yield {**sample, key: decoded(sample[key])} if key in sample else sample
            continue
        try:
            record = parse_json(sample["json"])
        except ValueError:
            record = sample["json"]  # no document
        yield record if isinstance(record, dict) else {key: record}


def decoded(value: bytes | None) -> object:
    """Return bytes of UTF-8 as text, and what is no text as it is."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return value


def _library(module: str, package: str, source: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        fix = f"pip install {package} (or this package's extra: streaming)"
        raise UserError(f"{source}: needs {package}, which cannot be imported ({error}): {fix}") from error


def _require(source: object, key: str, names: Iterable[str]) -> None:
    if key not in names:
        rule = f"a record has no text under {key!r}; its keys are {shown(sorted(names))}"
        raise UserError(f"{source}: {rule}; set --text-key or data.text_key")
