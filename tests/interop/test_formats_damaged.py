"""MindSpore's files, crafted: what their numbers say is compared with what is there before anything is made of it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pangu.common import protobuf
from pangu.common.errors import UserError
from pangu.interop.formats.mindspore import MindSporeSource
from tests.pace import processor_time_below
from tests.references import foreign_checkpoints as foreign
from tests.references.pangu_reference import pangu_shapes, random_weights


def weights() -> dict[str, Tensor]:
    return random_weights(pangu_shapes(2, 8, 20, 8), dtype=torch.float32)


def message(path: Path) -> str:
    """What is wrong with a file, told within a second or so."""
    with processor_time_below(2.0), pytest.raises(UserError) as caught:
        MindSporeSource(path).inspect([], [])
    return str(caught.value)


def field(number: int, content: bytes) -> bytes:
    """A field of bytes."""
    length, size = len(content), []
    while length >= 128:
        size.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *size, length]) + content


def numbers(*values: int) -> bytes:
    """Dimensions, one field each; int64 in two's complement."""
    written = b""
    for value in values:
        value %= 2**64
        written += b"\x08"
        while value >= 128:
            written += bytes([value & 127 | 128])
            value >>= 7
        written += bytes([value])
    return written


def value(name: bytes, dims: bytes, content: bytes) -> bytes:
    return field(1, field(1, name) + field(2, dims + field(2, b"Float32") + field(3, content)))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff" * 300_000, "no number at byte 0"),
        (b"\x08" + b"\xff" * 300_000, "no number"),
        (b"\x0a" + b"\x80" * 11 + b"\x00", "no number"),
        (b"\x08\x00" * 2000, "more than 1000 fields"),
        (value(b"a", numbers(-2, -3), bytes(24)), "is not a MindSpore checkpoint"),
        (value(b"a", numbers(2**62, 4), bytes(24)), "24 bytes for a tensor"),
        (value(b"a", numbers(2, 3), bytes(20)), "20 bytes for a tensor"),
        (value(b"a", numbers(*[1] * 65), bytes(4)), "no list of numbers"),
        (value(b"a", numbers(6), bytes(12)) + value(b"a", numbers(3, 2), bytes(12)), "parts"),
        (value(b"\xff", numbers(6), bytes(24)), "is not a MindSpore checkpoint"),
        (field(1, field(1, b"a")), "is not a MindSpore checkpoint"),
        (b"", "is not a MindSpore checkpoint"),
    ],
    ids=range(12),
)
def test_crafted_files_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    """An unending number used to take a time in proportion to the square of its length: 17 s for 300 KB."""
    monkeypatch.setattr(protobuf, "MOST_FIELDS", 1000)
    path = tmp_path / "a.ckpt"
    path.write_bytes(content)
    told = message(path)
    assert told.startswith(f"{path}: ")
    assert words in told


@pytest.mark.parametrize("kind", ["zip", "pickle", "negative", "huge", "text", "deep"])
def test_tables_that_are_no_arrays(tmp_path: Path, kind: str) -> None:
    foreign.write_slices(tmp_path / "in", weights(), 1, 2)
    path = tmp_path / "in" / "word_embedding.npy"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a.npy", b"\x93NUMPY")
    elif kind == "pickle":
        np.save(path, np.array([{}], dtype=object), allow_pickle=True)
    elif kind == "text":
        np.save(path, np.array([["a", "b"]]))
    else:
        shape = {"negative": "(-20, -8)", "huge": "(1000000000000, 8)", "deep": "(" * 3000}[kind]
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".encode()
        header += b" " * (-(len(header) + 11) % 64) + b"\n"
        path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(640))
    told = message(tmp_path / "in")
    assert told.startswith(f"{path}: ")
    assert "is not an array of numbers" in told or "expected an array of floating-point numbers" in told


@pytest.mark.parametrize(
    ("devices", "dims", "step", "size"),
    [
        ([1, 2], [5, -1], 0, 0),
        ([1, 2], [-2, -1], 0, 0),
        ([1, 2], [0, 0], 0, 0),
        ([0, 2], [0, -1], 0, 0),
        ([-1, -2], [0, -1], 0, 0),
        ([2**31, 2**31], [0, 1], 0, 0),
        ([1, 2], [-1, -1, -1, -1], 0, 0),
        ([1, 2], [-1, -1], 7, -1),
        ([1, 2], [-1, -1], 1, 2**31 - 1),
        ([1, 2], [-1, -1], -1, 0),
    ],
)
def test_crafted_strategies_are_refused(
    tmp_path: Path, devices: list[int], dims: list[int], step: int, size: int
) -> None:
    foreign.write_slices(tmp_path / "in", weights(), 1, 2)
    layouts = field(1, numbers(*devices)) + field(2, numbers(*dims))
    for key, number in ((6, step), (7, size)):
        layouts += bytes([key << 3]) + numbers(number)[1:]
    item = field(3, field(1, b"backbone.top_query_layer.output.mapping.weight") + field(2, layouts))
    path = tmp_path / "in" / "pangu_alpha_ckpt_strategy.ckpt"
    path.write_bytes(item)
    told = message(tmp_path / "in")
    assert "is not a strategy file of MindSpore" in told or "the strategy file cuts 4 dimensions" in told
