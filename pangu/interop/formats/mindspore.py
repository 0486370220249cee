"""MindSpore checkpoints of PanGu-α, without MindSpore: one file, or slices of many devices and a strategy file.

The files are protocol buffers, of which this module reads the needed fields (checkpoint.proto, node_strategy.proto):

    Checkpoint           repeated Value value = 1
    Value                string tag = 1, TensorProto tensor = 2; a large tensor takes several with the same tag
    TensorProto          repeated int64 dims = 1, string tensor_type = 2, bytes tensor_content = 3
    ParallelStrategyMap  repeated item = 3 {string param_name = 1, layouts = 2 {dev_matrix = 1 {repeated dim = 1},
                         tensor_map = 2 {repeated dim = 1}, int opt_weight_shard_step = 6, opt_weight_shard_size = 7}}
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pangu.checkpoint.safetensors_file import bytes_of
from pangu.common.errors import ConfigError, UserError, reading
from pangu.common.protobuf import read_message, read_varint
from pangu.config.model import ModelConfig
from pangu.interop.formats.card import card_name, write_card
from pangu.interop.formats.stored import PANGU_PADDING, Job, Stored, WeightSource, inexpressible, make_table

CONTENT_BYTES = 512 * 2**20
"""Largest part of a tensor in one Value, bytes."""
MOST_NUMBERS = 64
"""Longest list: dimensions of a tensor, or axes of the device matrix."""
MOST_DEVICES = 2**16
"""Largest number of devices of a model; PanGu-α 200B took 2048."""
_TYPES = {"Float64": torch.float64, "Float32": torch.float32, "Float16": torch.float16, "BFloat16": torch.bfloat16}
_TABLES = ("word_embedding", "position_embedding", "top_query_embedding")
_STATE = re.compile(r"(adam_[mv]|moment[12]|accu_grads)\b.*")


def table(model: ModelConfig, tensor: int) -> list[Stored]:
    """Return the tensors of a model in one file. Raises ConfigError if it is not PanGu-α."""
    if problems := inexpressible(model, "mindspore"):
        raise ConfigError(problems)
    return make_table(model, "mindspore", spare=PANGU_PADDING)


@dataclass
class _Piece:
    """Slice of a tensor in one file."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """Format of the values; None: one that no weight has."""
    chunks: list[tuple[Path, int, int]] = field(default_factory=list)
    """File, first byte and number of bytes of each part."""

    def read(self) -> Tensor:
        """Return the values of the slice."""
        content = bytearray(sum(length for _, _, length in self.chunks))
        room = memoryview(content)
        for path, start, length in self.chunks:
            with path.open("rb") as file:
                file.seek(start)
                file.readinto(room[:length])
            room = room[length:]
        assert self.dtype is not None
        return torch.frombuffer(content, dtype=self.dtype).view(self.shape)


@dataclass(frozen=True)
class _Layout:
    """Sharding of a tensor over devices, from a strategy file."""

    devices: tuple[int, ...] = ()
    """Sizes of the axes of the device matrix."""
    dims: tuple[int, ...] = ()
    """Axis of the device matrix that cuts each dimension, counted from the right; -1: none."""
    step: int = 0
    """Rank stride of optimizer parallelism, which cuts dimension 0 again; 0: it does not."""
    size: int = 0
    """Number of ranks of optimizer parallelism; -1: as many as there are."""

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible layout."""
        used, world = [dim for dim in self.dims if dim != -1], math.prod(self.devices)
        if min(self.devices, default=1) < 1 or world > MOST_DEVICES:
            raise ValueError(f"a device matrix {self.devices}")
        if len(set(used)) < len(used) or not all(0 <= dim < len(self.devices) for dim in used):
            raise ValueError(f"dimensions {self.dims} over a device matrix {self.devices}")
        if not 0 <= self.step <= world or not -1 <= self.size <= world:
            raise ValueError(f"{self.size} shards, {self.step} ranks apart, over a device matrix {self.devices}")

    def place(self, rank: int, dims: int) -> tuple[tuple[int, int], ...]:
        """Return index and count of a rank's slice in each dimension."""
        # a device matrix [2, 4] has rank 4 a + b at (a, b); axes are counted from the right: axis 0 is b, with a stride
        # of 1 rank, and axis 1 is a, with a stride of 4. dims [1, -1] cut rows in 2: ranks 0 to 3 have the first half.
        # The optimizer then cuts dimension 0 again, among ranks `step` apart.
        places = []
        for axis in (*self.dims, *[-1] * (dims - len(self.dims))):
            count = self.devices[-1 - axis] if axis >= 0 else 1
            stride = math.prod(self.devices[len(self.devices) - axis :]) if axis > 0 else 1
            places.append((rank // stride % count, count))
        if self.step > 0:
            count = self.size if self.size > 0 else math.prod(self.devices) // self.step
            index, pieces = places[0]
            places[0] = (index * count + rank // self.step % count, pieces * count)
        return tuple(places)


class MindSporeSource(WeightSource):
    """MindSpore checkpoint: a .ckpt file, or a folder with one, or with those of all ranks.

    Rank numbers end the names, or are those of folders rank_N; *strategy*.ckpt and .npy embedding tables may lie there.
    """

    def __init__(self, path: Path) -> None:
        """Open the files. Raises UserError if they cannot be converted."""
        files = [path] if path.is_file() else sorted(path.rglob("*.ckpt"))
        strategies = [file for file in files if "strategy" in file.name]
        ranks = {_rank(file): file for file in files if file not in strategies}
        if not ranks:
            raise UserError(f"{path}: no .ckpt file here")
        if len(ranks) + len(strategies) < len(files):
            raise UserError(f"{path}: several .ckpt files of one rank; keep one of them")
        if len(ranks) > 1 and len(strategies) != 1:
            raise UserError(
                f"{path}: {len(ranks)} slices need one strategy file, *strategy*.ckpt; found {len(strategies)}"
            )
        layouts = _read_strategy(strategies[0]) if len(ranks) > 1 else {}
        slices: dict[str, dict[int, _Piece]] = {}
        for rank, file in ranks.items():
            for name, piece in _read_checkpoint(file).items():
                slices.setdefault(name.replace("backbone.embedding.", "backbone."), {})[rank] = piece
        self.problems: list[str] = []
        self._pieces: dict[str, dict[tuple[int, ...], _Piece]] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, pieces in slices.items():
            shape = next(iter(pieces.values())).shape
            # a single number, which is no weight, has the shape [0]
            if not _STATE.fullmatch(name) and shape and 0 not in shape:
                full, self._pieces[name] = _full_shape(name, pieces, layouts.get(name, _Layout()), self.problems)
                self.tensors[name] = torch.empty(full, dtype=next(iter(pieces.values())).dtype, device="meta")
        self._arrays = {
            f"backbone.{name}.embedding_table": _read_array(file)
            for name in _TABLES
            for file in ([] if path.is_file() else path.rglob(f"{name}.npy"))
        }
        for name, array in self._arrays.items():
            self.tensors[name] = torch.from_numpy(np.empty(0, array.dtype)).new_empty(array.shape, device="meta")
        shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        try:
            vocab, hidden = shapes["backbone.word_embedding.embedding_table"]
            sequence, _ = shapes["backbone.position_embedding.embedding_table"]
            (ffn,) = shapes["backbone.top_query_layer.output.mapping.bias"]
        except (KeyError, ValueError) as error:
            raise UserError(f"{path}: is not a PanGu-α model: {error}") from error
        blocks = {name.split(".")[2] for name in shapes if name.startswith("backbone.blocks.")}
        self.model_keys = {
            "kind": "pangu",
            "layers": len(blocks) + 1,
            "hidden": hidden,
            "ffn": ffn,
            "vocab": vocab,
            "sequence": sequence,
        }

    def table(self, model: ModelConfig) -> list[Stored]:
        """Return the tensors of a model in this format."""
        return table(model, 1)

    def read(self, stored: Stored) -> Tensor:
        """Return one full tensor."""
        if stored.name in self._arrays:
            return torch.from_numpy(np.array(self._arrays[stored.name]))
        pieces = self._pieces[stored.name]
        if len(pieces) == 1:
            return next(iter(pieces.values())).read()
        full = torch.empty_like(self.tensors[stored.name], device="cpu")
        for place, piece in pieces.items():
            room = tuple(slice(i * size, (i + 1) * size) for i, size in zip(place, piece.shape, strict=True))
            full[room].copy_(piece.read())
        return full


def _full_shape(
    name: str, slices: dict[int, _Piece], layout: _Layout, problems: list[str]
) -> tuple[tuple[int, ...], dict[tuple[int, ...], _Piece]]:
    """Return the shape of a tensor, and its slices by position; append what is wrong with them to `problems`."""
    first = next(iter(slices.values()))
    if len(layout.dims) > len(first.shape):
        cuts = f"the strategy file cuts {len(layout.dims)} dimensions"
        raise UserError(f"{name}: {list(first.shape)} in the files, but {cuts}")
    places = {rank: layout.place(rank, len(first.shape)) for rank in slices}
    counts = [count for _, count in next(iter(places.values()))]
    pieces = {tuple(index for index, _ in places[rank]): piece for rank, piece in slices.items()}
    if missing := math.prod(counts) - len(pieces):
        problems.append(f"{name}: {missing} of its {math.prod(counts)} slices are missing")
    if any(piece.shape != first.shape or piece.dtype != first.dtype for piece in pieces.values()):
        problems.append(f"{name}: its slices differ in shape or format")
    if first.dtype is None:
        problems.append(f"{name}: its format is none of {', '.join(_TYPES)}")
    return tuple(size * count for size, count in zip(first.shape, counts, strict=True)), pieces


def _rank(file: Path) -> int:
    folder = re.fullmatch(r"rank_(\d+)", file.parent.name)
    number = folder or re.search(r"(\d+)$", file.stem)
    return int(number[1]) if number else 0


def _read_array(file: Path) -> np.ndarray:
    # numpy parses the header with Python's own parser
    with reading(file, Exception, rule="is not an array of numbers"):
        # np.load would open a zip file of arrays too
        array = np.lib.format.open_memmap(file, mode="r")
    if array.dtype not in (np.float64, np.float32, np.float16) or array.ndim != 2:
        raise UserError(f"{file}: {array.dtype} {list(array.shape)}; expected an array of floating-point numbers")
    return array


def _read_checkpoint(file: Path) -> dict[str, _Piece]:
    """Return the slices in a file by tensor name, without their values."""
    pieces: dict[str, _Piece] = {}
    rule = "is not a MindSpore checkpoint, or is encrypted"
    with (
        reading(file, ValueError, KeyError, IndexError, rule=rule),
        file.open("rb") as opened,
        mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        for value in read_message(data, slice(0, len(data)))[1]:
            named = read_message(data, value)
            tensor = read_message(data, named[2][0])
            kind = _TYPES.get(data[tensor[2][0]].decode())
            part = _Piece(_integers(data, tensor.get(1, [])), kind)
            name = data[named[1][0]].decode()
            piece = pieces.setdefault(name, part)
            if (piece.shape, piece.dtype) != (part.shape, part.dtype) or min(part.shape, default=0) < 0:
                raise ValueError(f"{name}: parts {list(piece.shape)} and {list(part.shape)} of one tensor")
            piece.chunks += [(file, content.start, content.stop - content.start) for content in tensor.get(3, [])]
    for name, piece in pieces.items():
        length = sum(length for _, _, length in piece.chunks)
        if piece.dtype is not None and math.prod(piece.shape) * piece.dtype.itemsize != length and piece.shape != (0,):
            raise UserError(f"{file}: {name}: {length} bytes for a tensor {list(piece.shape)} of {piece.dtype}")
    return pieces


def _read_strategy(file: Path) -> dict[str, _Layout]:
    layouts = {}
    with reading(file, ValueError, KeyError, IndexError, rule="is not a strategy file of MindSpore"):
        data = file.read_bytes()
        for item in read_message(data, slice(0, len(data)))[3]:
            named = read_message(data, item)
            layout = read_message(data, named[2][0])
            devices, dims = (_integers(data, read_message(data, layout[key][0]).get(1, [])) for key in (1, 2))
            step, size = (next(iter(_integers(data, layout.get(key, []))), 0) for key in (6, 7))
            layouts[data[named[1][0]].decode()] = _Layout(devices, dims, step, size)
    return layouts


def _integers(data: bytes | mmap.mmap, places: Sequence[slice]) -> tuple[int, ...]:
    """Return the signed integers of a repeated field, packed or each with its key."""
    numbers: list[int] = []
    for place in places:
        at = place.start
        while at < place.stop:
            number, at = read_varint(data, at)
            numbers.append(number - 2**64 if number >= 2**63 else number)
            if at > place.stop or len(numbers) > MOST_NUMBERS:
                raise ValueError(f"no list of numbers at byte {place.start}")
    return tuple(numbers)


def write(path: Path, job: Job) -> None:
    """Write a model as one .ckpt file, and its card next to it."""
    types = {dtype: name for name, dtype in _TYPES.items()}
    with path.open("wb") as file:
        for stored, tensor in zip(job.table, job.contents, strict=True):
            content = bytes_of(tensor)
            for start in range(0, len(content), CONTENT_BYTES):
                part = content[start : start + CONTENT_BYTES]
                head = b"".join(b"\x08" + _number(size) for size in tensor.shape)
                head += _text(0x12, types[tensor.dtype]) + b"\x1a" + _number(len(part))
                before = _text(0x0A, stored.name) + b"\x12" + _number(len(head) + len(part)) + head
                file.write(b"\x0a" + _number(len(before) + len(part)) + before)
                file.write(part)

    usage = f'`mindspore.load_checkpoint("{card_name(job)}")` loads this file.'
    write_card(Path(f"{job.output}.md"), job, job.config.model.kind, usage)


def _number(value: int) -> bytes:
    parts = []
    while value >= 128:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def _text(key: int, text: str) -> bytes:
    content = text.encode()
    return bytes([key]) + _number(len(content)) + content
