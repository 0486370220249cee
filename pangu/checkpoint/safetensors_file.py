"""Writer of safetensors files: the length of the header, the header, the tensors' bytes.

The library's writer is not used: it takes all tensors of a file at once, holds Python's lock while it writes and would
stop a training thread, and cannot compute the checksum meanwhile.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from pangu.common.files import flush, open_regular

CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Safetensors codes of weight formats."""


def write_safetensors(
    path: Path, described: Mapping[str, Tensor], contents: Iterable[Tensor], facts: Mapping[str, str] | None = None
) -> str:
    """Write a file, or overwrite one, flush it to disk, and return its SHA-256 in hexadecimal digits.

    `described`: tensors by name, possibly on the meta device; `contents`: their values, in that order; `facts`:
    metadata.
    """
    header: dict[str, object] = {"__metadata__": dict(facts)} if facts else {}
    end = 0
    for name, tensor in described.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    chunks: Iterator[bytes | memoryview] = itertools.chain(
        [struct.pack("<Q", len(head)), head], (bytes_of(tensor) for tensor in contents)
    )
    digest = hashlib.sha256()
    # a link that somebody planted under this name is not followed
    with open_regular(path, "r+b") if path.exists() else path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        file.truncate()
    flush(path)
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in index order, without a copy if it is contiguous in host memory."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
