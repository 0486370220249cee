"""Reading of protocol buffers, without their schema and in files of any size."""

from __future__ import annotations

import mmap

MOST_FIELDS = 2**20
"""Largest number of fields in a message. PanGu-α 200B and vocabularies have fewer; crafted files could otherwise fill
the memory."""
_VARINT_BYTES = 10
"""Longest encoding of a 64-bit integer, bytes."""
_FIXED = {1: 8, 5: 4}
"""Bytes of a value by wire type, where its size is fixed."""


def read_message(data: bytes | mmap.mmap, where: slice) -> dict[int, list[slice]]:
    """Return the places of a message's values, by field number. Raises ValueError."""
    fields: dict[int, list[slice]] = {}
    at, count = where.start, 0
    while at < where.stop:
        count += 1
        if count > MOST_FIELDS:
            raise ValueError(f"more than {MOST_FIELDS} fields in one message")
        key, at = read_varint(data, at)
        start = at
        if key & 7 == 0:
            _, at = read_varint(data, at)
        elif key & 7 == 2:
            length, start = read_varint(data, at)
            at = start + length
        elif key & 7 in _FIXED:
            at += _FIXED[key & 7]
        else:
            raise ValueError(f"wire type {key & 7} at byte {at}")
        if key >= 2**32:  # other readers take the lower 32 bits
            raise ValueError(f"field {key >> 3} before byte {start}")
        if at > where.stop:
            raise ValueError(f"cut short at byte {start}")
        fields.setdefault(key >> 3, []).append(slice(start, at))
    return fields


def read_varint(data: bytes | mmap.mmap, at: int) -> tuple[int, int]:
    """Return a varint (7 bits per byte, lowest first) and the position after it. Raises ValueError."""
    value = 0
    for place, byte in enumerate(data[at : at + _VARINT_BYTES]):
        value |= (byte & 127) << 7 * place
        if byte < 128:
            return value % 2**64, at + place + 1
    raise ValueError(f"no number at byte {at}")
