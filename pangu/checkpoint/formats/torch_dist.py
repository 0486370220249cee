"""Folders of torch.distributed.checkpoint, without running what is in them.

.metadata         a pickle: names and shapes of all tensors, and where each chunk of a tensor lies
__0_0.distcp      items one after the other, each a file of torch.save: a chunk of a tensor, or other bytes
"""

from __future__ import annotations

import io
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor

from pangu.checkpoint.formats.fields import shown
from pangu.checkpoint.formats.pickles import Record, plain_entries, read_records
from pangu.config.errors import UserError

OPEN_FILES = 8
"""Files that are mapped into memory at a time."""
_MODULE = "torch.distributed.checkpoint."


@dataclass(frozen=True)
class Chunk:
    """A block of a tensor and the item of a file that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor of a folder and the chunks that make it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[Chunk]


class Folder:
    """The tensors of a folder whose names are wanted. Raises UserError if they cannot be read as a whole."""

    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self._path = path / ".metadata"
        self._maps: dict[Path, Tensor] = {}
        try:
            metadata = _state(read_records(self._path.read_bytes(), self._path), "metadata.Metadata")
            places = {}
            for index, info in metadata["storage_data"].items():
                at = _state(index, "metadata.MetadataIndex")
                places[at["fqn"], at.get("offset") or ()] = _state(info, "filesystem._StorageInfo")
            self.entries = {
                name: self._entry(name, found.state, places)
                for name, found in metadata["state_dict_metadata"].items()
                if wanted(name) and _is(found, "metadata.TensorStorageMetadata")
            }
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OSError, OverflowError) as error:
            raise UserError(
                f"{self._path}: is not the metadata of torch.distributed.checkpoint ({type(error).__name__})"
            ) from error

        chunks = sorted((chunk for entry in self.entries.values() for chunk in entry.chunks), key=_place_of)
        for one, other in pairwise(chunks):
            if one.file == other.file and one.start + one.length > other.start:
                raise UserError(f"{one.file}: two chunks of tensors share the bytes from {other.start} on")

    def _entry(self, name: str, found: dict[str, Any], places: dict[Any, dict[str, Any]]) -> Entry:
        dtype, shape = found["properties"].state[0], _whole_numbers(found["size"])
        if not isinstance(dtype, torch.dtype) or not shape or not prod(shape):
            raise UserError(f"{self._path}: {shown(name)} of shape {list(shape)} is not a tensor of numbers")
        chunks = []
        for state in (_state(chunk, "metadata.ChunkStorageMetadata") for chunk in found["chunks"]):
            offsets, sizes = _whole_numbers(state["offsets"]), _whole_numbers(state["sizes"])
            if len(offsets) != len(shape) or len(sizes) != len(shape) or (name, offsets) not in places:
                raise UserError(f"{self._path}: {shown(name)}: nothing says where the chunk at {list(offsets)} lies")
            chunks.append(self._place(name, offsets, sizes, places[name, offsets], dtype))
        if not _tile(chunks, shape):
            raise UserError(f"{self._path}: {shown(name)}: its chunks do not make the whole tensor {list(shape)}")
        return Entry(dtype, shape, chunks)

    def _place(
        self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: dict[str, Any], dtype: torch.dtype
    ) -> Chunk:
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if transforms := info.get("transform_descriptors"):
            raise UserError(f"{self._path}: {shown(name)} is stored by {shown(transforms)}, which is not read here")
        if not isinstance(file, str) or not file.isprintable() or Path(file).name != file:
            raise UserError(f"{self._path}: {shown(file)} is not the name of a file of this folder")
        path = self._path.parent / file
        if not path.is_file():
            raise UserError(f"{path}: is missing; it holds {shown(name)}")
        start, length = _whole_numbers((start, length))
        if start + length > path.stat().st_size or length < prod(sizes) * dtype.itemsize or not prod(sizes):
            raise UserError(f"{path}: is too short for {shown(name)}; {self._path} says how it should be")
        return Chunk(offsets, sizes, path, start, length)

    def read(self, name: str, row: int | None) -> Tensor:
        """A whole tensor, or what it has at one index of its dimension 0. Raises UserError if the file is damaged."""
        entry = self.entries[name]
        first, last = (0, entry.shape[0]) if row is None else (row, row + 1)
        whole = torch.empty(last - first, *entry.shape[1:], dtype=entry.dtype)
        for chunk in entry.chunks:
            begin, end = max(first, chunk.offsets[0]), min(last, chunk.offsets[0] + chunk.sizes[0])
            if begin >= end:
                continue
            target = whole[begin - first : end - first]
            for dim in range(1, len(chunk.sizes)):
                target = target.narrow(dim, chunk.offsets[dim], chunk.sizes[dim])
            target.copy_(self._rows(name, chunk, entry.dtype, begin - chunk.offsets[0], end - chunk.offsets[0]))
        return whole if row is None else whole[0]

    def _rows(self, name: str, chunk: Chunk, dtype: torch.dtype, first: int, last: int) -> Tensor:
        """Indices `first` to `last` of dimension 0 of a chunk; no other bytes of it are read."""
        where = f"{chunk.file}: {shown(name)}"
        with chunk.file.open("rb") as file:
            begin, shape, strides, found = _described(cast(IO[bytes], _Window(file, chunk.start, chunk.length)), where)
        if shape != chunk.sizes or found != dtype or len(strides) != len(shape):
            raise UserError(f"{where}: is not the tensor {list(chunk.sizes)} of {dtype} that .metadata says")
        sizes = (last - first, *shape[1:])
        count = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        begin += first * strides[0] * dtype.itemsize
        end = begin + count * dtype.itemsize
        if end > chunk.length:
            raise UserError(f"{where}: is cut off")
        span = self._bytes(chunk.file)[chunk.start + begin : chunk.start + end].clone().view(dtype)
        return span.as_strided(sizes, strides)

    def _bytes(self, file: Path) -> Tensor:
        """All bytes of a file, on the disk until they are used."""
        if file not in self._maps:
            if len(self._maps) >= OPEN_FILES:
                del self._maps[next(iter(self._maps))]
            self._maps[file] = torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
        return self._maps[file]


def _place_of(chunk: Chunk) -> tuple[Path, int]:
    return chunk.file, chunk.start


def _tile(chunks: Sequence[Chunk], shape: tuple[int, ...], dim: int = 0) -> bool:
    """Do chunks make the dimensions of a tensor from `dim` on, each element once? They must lie as a grid does: in
    slabs along one dimension, each cut along the next."""
    if dim == len(shape):
        return len(chunks) == 1
    slabs: dict[tuple[int, int], list[Chunk]] = {}
    for chunk in chunks:
        slabs.setdefault((chunk.offsets[dim], chunk.sizes[dim]), []).append(chunk)
    end = 0
    for start, size in sorted(slabs):
        end = end + size if start == end else -1
    return end == shape[dim] and all(_tile(slab, shape, dim + 1) for slab in slabs.values())


def _is(found: Any, name: str) -> bool:
    return isinstance(found, Record) and found.name == _MODULE + name and isinstance(found.state, dict)


def _state(found: Any, name: str) -> dict[str, Any]:
    if not _is(found, name):
        raise TypeError(f"no {name}")
    state: dict[str, Any] = found.state
    return state


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(isinstance(value, int) and 0 <= value < 2**62 for value in values):
        raise ValueError(f"not whole numbers: {shown(values)}")
    return values


_STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}
_REBUILD = "torch._utils._rebuild_tensor_v2"


def _described(file: IO[bytes], where: str) -> tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Where in a file of torch.save its only tensor begins, in bytes; its shape, strides and dtype.

    The bytes of the tensor are not read, which torch.load can do for files of their own only. Raises UserError.
    """
    if file.read(4) != b"PK\3\4":
        raise UserError(f"{where}: is not a tensor of torch.save")
    entries = plain_entries(file, where)
    try:
        found = read_records(_content(file, entries["data.pkl"]), where, (_REBUILD, *_STORAGES))
        if not isinstance(found, Record) or found.name != _REBUILD:
            raise TypeError("no tensor")
        storage, offset, shape, strides = found.arguments[:4]
        _, kind, key, *_ = storage
        dtype = _STORAGES[kind.name]
        entry = entries[f"data/{key}"]
        (offset,), shape, strides = _whole_numbers((offset,)), _whole_numbers(shape), _whole_numbers(strides)
        if "byteorder" in entries and _content(file, entries["byteorder"]) != b"little":
            raise TypeError("another order of bytes")
        begin = _begin(file, entry) + offset * dtype.itemsize
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OSError, struct.error) as error:
        raise UserError(f"{where}: is not a tensor of torch.save ({type(error).__name__})") from error
    return begin, shape, strides, dtype


def _begin(file: IO[bytes], entry: zipfile.ZipInfo) -> int:
    """Where the content of an entry begins, behind its local header."""
    file.seek(entry.header_offset + 26)
    name, extra = struct.unpack("<HH", file.read(4))
    return int(entry.header_offset + 30 + name + extra)


def _content(file: IO[bytes], entry: zipfile.ZipInfo) -> bytes:
    file.seek(_begin(file, entry))
    return file.read(entry.file_size)


class _Window(io.RawIOBase):
    """Part of a file as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), max(0, self._length - self._at))
        self._file.seek(self._start + self._at)
        found = self._file.read(wanted)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


@dataclass(frozen=True)
class Part:
    """A block of a tensor that is to be written: the tensor's name and shape, and where the block lies in it."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


def write_folder(path: Path, parts: Sequence[Part], contents: Iterator[Tensor], objects: Sequence[str] = ()) -> None:
    """Write a folder by torch.distributed.checkpoint, block by block.

    Args:
        path: the folder, which is made.
        parts: all blocks of all tensors.
        contents: the blocks, one at a time, in the same order.
        objects: names of objects without tensors; each is written as `[None]`.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    class Planner(DefaultSavePlanner):
        """Plans the blocks and makes each when it is written."""

        def create_local_plan(self) -> SavePlan:
            tensors = [
                WriteItem(
                    MetadataIndex(part.name, part.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)),
                        TensorProperties(dtype=part.dtype),
                        torch.Size(part.shape),
                    ),
                )
                for part in parts
            ]
            others = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]
            self.order = iter(tensors)
            self.plan = SavePlan([*tensors, *others])
            return self.plan

        def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
            if write_item.type is WriteItemType.BYTE_IO:
                torch.save([None], nothing := io.BytesIO())
                return nothing
            assert write_item.index == next(self.order).index, "torch writes the items in another order"
            assert write_item.tensor_data is not None
            return next(contents).reshape(write_item.tensor_data.chunk.sizes)

    # without copies ahead, which would also sort the blocks by size
    writer = FileSystemWriter(path, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        save({}, storage_writer=writer, planner=Planner(flatten_state_dict=False), no_dist=True)
