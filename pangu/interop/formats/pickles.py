"""Safe reading of pickles: only tensors and plain values are read, and nothing in them is executed.

Files of torch.save go through torch's restricted unpickler, plain pickles through `read_records`. Anything but
tensors and plain values (enumerations, paths and signals among options, the state of numpy's random numbers) becomes an
inert `Record`.
"""

from __future__ import annotations

import argparse
import io
import pickle
import warnings
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from pangu.common.errors import UserError, reading, shown


class Record:
    """Inert stand-in for an object of another program: its name, arguments and state."""

    name = ""
    state: Any = None

    def __init__(self, *arguments: Any) -> None:
        """Keep the arguments."""
        self.arguments = arguments

    def __setstate__(self, state: object) -> None:
        """Keep the state."""
        self.state = state

    def __repr__(self) -> str:
        """Return the name in angle brackets."""
        return f"<{self.name}>"


_INERT = (
    *("megatron.", "transformer_engine.", "numpy.", "signal.", "pathlib.", "enum.", "datetime."),
    *("torch.distributed.", "torch.nn.functional.", "torch._C._nn.", "torch.serialization._get_layout"),
    *("types.SimpleNamespace", "_codecs.encode", "_io.BytesIO", "builtins.getattr", "__builtin__.getattr"),
)
"""Prefixes of names of objects that training stores besides the weights, and that a conversion does not need."""
MOST_KINDS = 200
"""Largest number of kinds of objects in a file, more than any file of Megatron has."""


def _record(name: str) -> type[Record]:
    """Return a new class for each name of each file, so that no file can change what another one finds."""
    return type("Record", (Record,), {"name": name})


def load_pickle(path: Path) -> dict[str, Any]:
    """Return the dictionary in a torch.save file; raises UserError if it holds anything but tensors and plain values.

    Its tensors stay on disk until they are used, except in the format of torch before 1.6.
    """
    if zipped := zipfile.is_zipfile(path):
        with path.open("rb") as file:
            _require_stored(file, path)
    content = _load(path, path, mmap=zipped)
    if not isinstance(content, dict):
        raise UserError(f"{path}: has a {type(content).__name__} instead of a dictionary of tensors")
    for name, tensor in tensors_of(content):
        require_plain_tensor(tensor, f"{path}: {shown(name)}")
    return content


def load_item(content: bytes, where: str) -> Tensor:
    """Return the tensor in the bytes of a torch.save file. Raises UserError if they hold anything else."""
    _require_stored(io.BytesIO(content), where)
    tensor = _load(io.BytesIO(content), where, mmap=False)
    if not isinstance(tensor, Tensor):
        raise UserError(f"{where}: is not a tensor of torch.save")
    require_plain_tensor(tensor, where)
    return tensor


def tensors_of(content: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of nested dictionaries and lists with their dotted names."""
    seen = set()
    stack: list[tuple[str, Any]] = [("", content)]
    while stack:
        prefix, value = stack.pop()
        if isinstance(value, Tensor):
            yield prefix, value
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            stack += [(f"{prefix}.{key}" if prefix else str(key), inner) for key, inner in items]


def _load(file: Path | IO[bytes], where: object, mmap: bool) -> Any:
    """Load with torch.load. Raises UserError for anything but tensors and plain values."""
    inert: dict[str, type[Record]] = {}
    while True:
        try:
            allowed = [argparse.Namespace, *((kind, name) for name, kind in inert.items())]
            with _only(allowed), warnings.catch_warnings(action="ignore"):  # torch warns of unusual pickle protocols
                return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
        except pickle.UnpicklingError as error:
            message = str(error)
            name = message.partition("GLOBAL ")[2].split(" ")[0]
            if not name.startswith(_INERT) or name in inert or len(inert) >= MOST_KINDS:
                reason = message.rpartition("WeightsUnpickler error:")[2].partition("\n\nCheck")[0].strip()
                raise _no_tensor(where, name or reason) from error
            inert[name] = _record(name)
        except Exception as error:  # whatever damaged bytes bring about
            raise UserError(f"{where}: is not a file of torch.save ({type(error).__name__})") from error


def _no_tensor(where: object, name: str) -> UserError:
    return UserError(
        f"{where}: holds {shown(name)}, which is not a tensor and is not loaded, as it could run code; save only the "
        "weights (torch.save of a dictionary of tensors)"
    )


@contextmanager
def _only(allowed: list[Any]) -> Iterator[None]:
    """Disallow classes that other libraries allow in this process, within the block."""
    previous = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(allowed):
            yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(previous)


def _require_stored(file: IO[bytes], where: object) -> None:
    """Raise UserError for a compressed entry: torch never writes one, and a small file could unpack to any size."""
    # whatever damaged bytes bring about
    with reading(where, Exception, rule="is not a file of torch.save"), zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    end = file.seek(0, io.SEEK_END)
    for entry in entries:
        if entry.header_offset + entry.file_size > end:
            raise UserError(f"{where}: the entry {shown(entry.filename)} is longer than the file")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise UserError(
                f"{where}: the entry {shown(entry.filename)} is compressed, but torch.save compresses nothing; zip the "
                "files again without compression (zip -0)"
            )


def require_plain_tensor(tensor: Tensor, where: str) -> None:
    """Raise UserError unless every element of a tensor has separate bytes in the file."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else str(tensor.layout)[6:]
        raise UserError(f"{where} is {kind}, but only dense tensors are converted")
    if tensor.device.type != "cpu":
        raise UserError(f"{where} is on the device {tensor.device}, so the file has no values for it")
    if any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True)):
        raise UserError(
            f"{where} of shape {shown(list(tensor.shape))} repeats elements (a stride is 0); save a copy of it"
        )


class _RecordReader(pickle._Unpickler):
    """Unpickler of records and plain values only, in Python: the one in C allocates whatever a damaged file says."""

    def __init__(self, file: IO[bytes], where: object) -> None:
        """Prepare to read `file`; `where` is its name in messages."""
        super().__init__(file)
        self._where = where
        self._kinds: dict[str, type[Record]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return an allowed class or a new kind of `Record`. Raises UserError otherwise."""
        full = f"{module}.{name}"
        if full in ("torch.Size", "collections.OrderedDict"):
            return tuple if name == "Size" else dict
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if full.startswith(_INERT):
            return self._kinds.setdefault(full, _record(full))
        raise _no_tensor(self._where, full)


def read_records(content: bytes, where: object) -> Any:
    """Return the values in a plain pickle, other objects as `Record`; raises UserError for names not in `_INERT`."""
    with reading(where, Exception):  # whatever damaged bytes bring about
        return _RecordReader(io.BytesIO(content), where).load()
