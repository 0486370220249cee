"""Folders of torch.distributed.checkpoint, read without executing anything in them.

.metadata         a pickle: names and shapes of all tensors, and the place of each chunk of a tensor
__0_0.distcp      items one after the other, each a torch.save file: a chunk of a tensor, or other bytes
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pangu.checkpoint.index import MOST_DIMS, cover
from pangu.common.errors import UserError, reading, shown
from pangu.interop.formats.pickles import Record, load_item, read_records

_MODULE = "torch.distributed.checkpoint."


@dataclass(frozen=True)
class StoredChunk:
    """TensorBlock of a tensor, and the item of a file that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """Tensor of a folder and the chunks that it consists of."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: list[StoredChunk]


class Folder:
    """Weights in a folder. Raises UserError if they are incomplete or invalid."""

    def __init__(self, path: Path, is_weight: Callable[[str], bool]) -> None:
        """Read the metadata of the folder."""
        self._path = path / ".metadata"
        rule = "is not the metadata of torch.distributed.checkpoint"
        with reading(self._path, LookupError, TypeError, ValueError, AttributeError, OverflowError, rule=rule):
            metadata = _state(read_records(self._path.read_bytes(), self._path), "metadata.Metadata")
            places = {}
            for index, info in metadata["storage_data"].items():
                at = _state(index, "metadata.MetadataIndex")
                places[at["fqn"], at.get("offset") or ()] = _state(info, "filesystem._StorageInfo")
            self.entries = {
                name: self._entry(name, record.state, places)
                for name, record in metadata["state_dict_metadata"].items()
                if is_weight(name) and _is(record, "metadata.TensorStorageMetadata")
            }
        chunks = [chunk for entry in self.entries.values() for chunk in entry.chunks]
        chunks.sort(key=lambda chunk: (chunk.file, chunk.start))
        for one, other in pairwise(chunks):
            if one.file == other.file and one.start + one.length > other.start:
                raise UserError(f"{one.file}: two chunks of tensors overlap from byte {other.start} on")

    def _entry(self, name: str, state: dict[str, Any], places: dict[Any, dict[str, Any]]) -> StoredTensor:
        dtype, shape = state["properties"].state[0], _whole_numbers(state["size"])
        if not isinstance(dtype, torch.dtype) or not 0 < len(shape) <= MOST_DIMS or not prod(shape):
            raise UserError(f"{self._path}: {shown(name)} of shape {list(shape)} is not a tensor of numbers")
        chunks = []
        for chunk in (_state(chunk, "metadata.ChunkStorageMetadata") for chunk in state["chunks"]):
            offsets, sizes = _whole_numbers(chunk["offsets"]), _whole_numbers(chunk["sizes"])
            if len(offsets) != len(shape) or len(sizes) != len(shape) or (name, offsets) not in places:
                raise UserError(f"{self._path}: {shown(name)}: the location of the chunk at {list(offsets)} is missing")
            chunks.append(self._place(name, offsets, sizes, places[name, offsets], dtype))
        if not cover(list(shape), [{"offsets": list(c.offsets), "shape": list(c.sizes)} for c in chunks]):
            raise UserError(f"{self._path}: {shown(name)}: its chunks do not cover the tensor {list(shape)}")
        return StoredTensor(dtype, shape, chunks)

    def _place(
        self, name: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: dict[str, Any], dtype: torch.dtype
    ) -> StoredChunk:
        file, start, length = info["relative_path"], info["offset"], info["length"]
        if transforms := info.get("transform_descriptors"):
            raise UserError(f"{self._path}: {shown(name)} is stored by {shown(transforms)}, which is not supported")
        if not isinstance(file, str) or not file.isprintable() or Path(file).name != file:
            raise UserError(f"{self._path}: {shown(file)} is not the name of a file in this folder")
        path = self._path.parent / file
        if not path.is_file():
            raise UserError(f"{path}: is missing; it holds {shown(name)}")
        start, length = _whole_numbers((start, length))
        if start + length > path.stat().st_size or length < prod(sizes) * dtype.itemsize or not prod(sizes):
            raise UserError(f"{path}: is too short for {shown(name)}, as {self._path} describes it")
        return StoredChunk(offsets, sizes, path, start, length)

    def read(self, name: str, index: tuple[int, ...]) -> Tensor:
        """Return the part of a tensor at an index of its first dimensions. Raises UserError if a file is damaged."""
        entry = self.entries[name]
        starts = (*index, *(0 for _ in entry.shape[len(index) :]))
        ends = (*(i + 1 for i in index), *entry.shape[len(index) :])
        part = torch.empty([end - start for start, end in zip(starts, ends, strict=True)], dtype=entry.dtype)
        for chunk in entry.chunks:
            firsts = [max(start, offset) for start, offset in zip(starts, chunk.offsets, strict=True)]
            lasts = [min(end, o + size) for end, o, size in zip(ends, chunk.offsets, chunk.sizes, strict=True)]
            if all(first < last for first, last in zip(firsts, lasts, strict=True)):
                values = self._chunk(name, chunk, entry.dtype)
                _block(part, firsts, lasts, starts).copy_(_block(values, firsts, lasts, chunk.offsets))
        return part[(0,) * len(index)]

    def _chunk(self, name: str, chunk: StoredChunk, dtype: torch.dtype) -> Tensor:
        where = f"{chunk.file}: {shown(name)}"
        with chunk.file.open("rb") as file:
            file.seek(chunk.start)
            tensor = load_item(file.read(chunk.length), where)
        if tuple(tensor.shape) != chunk.sizes or tensor.dtype != dtype:
            raise UserError(f"{where}: is not the tensor {list(chunk.sizes)} of {dtype} that .metadata says")
        return tensor


def _block(tensor: Tensor, firsts: Sequence[int], lasts: Sequence[int], origin: Sequence[int]) -> Tensor:
    return tensor[tuple(slice(a - o, b - o) for a, b, o in zip(firsts, lasts, origin, strict=True))]


def _is(value: Any, name: str) -> bool:
    return isinstance(value, Record) and value.name == _MODULE + name and isinstance(value.state, dict)


def _state(value: Any, name: str) -> dict[str, Any]:
    if not _is(value, name):
        raise TypeError(f"no {name}")
    state: dict[str, Any] = value.state
    return state


def _whole_numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or not all(isinstance(value, int) and 0 <= value < 2**62 for value in values):
        raise ValueError(f"not whole numbers: {shown(values)}")
    return values


@dataclass(frozen=True)
class TensorBlock:
    """TensorBlock of a tensor to be written: the tensor's name and shape, and the block's place in it."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype


def write_folder(
    path: Path, blocks: Sequence[TensorBlock], contents: Iterator[Tensor], objects: Sequence[str] = ()
) -> None:
    """Write blocks with the values `contents` with torch.distributed.checkpoint, and `[None]` for each of `objects`."""
    # only this format writes with it, and it imports sympy
    from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, save  # noqa: PLC0415
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties  # noqa: PLC0415
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType  # noqa: PLC0415

    class Planner(DefaultSavePlanner):
        """Planner that requests each block only when it is written."""

        def create_local_plan(self) -> SavePlan:
            tensors = [
                WriteItem(
                    MetadataIndex(block.name, block.offsets),
                    WriteItemType.SHARD,
                    tensor_data=TensorWriteData(
                        ChunkStorageMetadata(torch.Size(block.offsets), torch.Size(block.sizes)),
                        TensorProperties(dtype=block.dtype),
                        torch.Size(block.shape),
                    ),
                )
                for block in blocks
            ]
            bytes_items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in objects]
            self.order = iter(tensors)
            self.plan = SavePlan([*tensors, *bytes_items])
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
