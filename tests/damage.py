"""Damage to files: bytes that change, and well-formed texts that say something else."""

from __future__ import annotations

import copy
import random
from typing import Any

ODD: tuple[Any, ...] = (-1, 0, 3, 2**63, 2**200, 0.5, 1e308, True, None, "", "x", "../../x", "/dev/zero", "\x1b[31m")
ODD += ([], [-1], [[]], {}, {"a": 1}, ["tensors-00000-00000.safetensors"])


def damaged(content: bytes, seed: int) -> bytes:
    """A file with a bit flipped, a few bytes replaced, its end cut off, or a stretch left out, repeated or replaced."""
    draw, changed = random.Random(seed), bytearray(content)
    place = draw.randrange(len(changed))
    length = draw.randrange(1, 40)
    match seed % 5:
        case 0:
            changed[place] ^= 1 << draw.randrange(8)
        case 1:
            for _ in range(8):
                changed[draw.randrange(len(changed))] = draw.choice((0, 127, 128, 255, draw.randrange(256)))
        case 2:
            del changed[place:]
        case 3:
            changed[place : place + length] = changed[place : place + length] * draw.randrange(4)
        case _:
            changed[place : place + draw.randrange(length)] = draw.randbytes(draw.randrange(20))
    return bytes(changed)


def crafted(value: Any, seed: int) -> Any:
    """A JSON value in which one part, at any depth, is another one, is missing or is there under another name."""
    draw, whole = random.Random(seed), copy.deepcopy(value)
    parent: Any = whole
    while True:
        key = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        child = parent[key]
        if not isinstance(child, dict | list) or not child or draw.random() < 0.1:
            break
        parent = child
    match draw.randrange(4):
        case 0:
            del parent[key]
        case 1 if isinstance(parent, dict):
            parent[draw.choice(("../x", "\x1b[31m", "weight/b", ""))] = parent.pop(key)
        case 2 if type(child) is int:
            parent[key] = child + draw.choice((-1, 1, 2**31, -(2**40)))
        case _:
            parent[key] = draw.choice(ODD)
    return whole
