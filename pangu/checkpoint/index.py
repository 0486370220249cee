"""The index of a checkpoint, believed as far as it is checked: it may be damaged, or crafted by who can write it.

`index.json` is one object: `format`, `version`, facts of the run (`FACTS`), `checksum` of all the rest, and

    tensors     KIND/NAME -> shape and dtype of the whole tensor, and `pieces`, which cover it, each element once:
                {file, key: its name in the file, offsets: place in the whole tensor, shape}
    files       name -> {bytes, sha256}
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import stat
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pangu.checkpoint.safetensors_file import CODES
from pangu.config.errors import UserError
from pangu.config.files import open_regular, read_json

FORMAT = "pangu-checkpoint"
VERSION = 3
_DTYPES = {str(dtype).removeprefix("torch."): (code, dtype.itemsize) for dtype, code in CODES.items()}
"""Formats of tensors -> their names in a file and the bytes of an element."""
_FILE = re.compile(r"tensors-[0-9]{5,}-[0-9]{5,}\.safetensors")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MOST_DIMS = 8
"""Dimensions of a tensor; the corners of a piece double with each."""


class NewerFormatError(UserError):
    """A checkpoint that this version cannot read because it is too old itself: nothing is wrong with the checkpoint."""


def read_index(path: Path) -> dict[str, Any]:
    """The index of a checkpoint.

    Raises:
        NewerFormatError: if a newer version of pangu has written it.
        UserError: if the folder holds no checkpoint that this version can read, or the index is damaged.
    """
    file = path / "index.json"
    if not file.exists():
        raise UserError(f"{path}: no checkpoint here (index.json is missing)")
    index = read_json(file, shared=True)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{file}: this is not the index of a checkpoint of pangu")
    version = index.get("version")
    if isinstance(version, int) and version > VERSION:
        raise NewerFormatError(
            f"{path}: format version {version}: this pangu is too old for it and reads {VERSION}; install the version "
            "that wrote the checkpoint, or a later one"
        )
    if version != VERSION:
        raise UserError(f"{path}: format version {version!r}; this version of pangu reads {VERSION}")
    if index.pop("checksum", None) != checksum(index):
        raise UserError(f"{file}: damaged: its checksum is another one than was written")
    if problem := next(_problems(index), None):
        raise UserError(f"{file}: damaged: {problem}")
    return index


def checksum(index: Mapping[str, Any]) -> str:
    """Of an index without its checksum."""
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()


def require_facts(path: Path, index: Mapping[str, Any], *names: str) -> None:
    """Raise a UserError unless the index of `path` has these facts of a run."""
    if missing := [name for name in names if name not in index]:
        raise UserError(f"{path / 'index.json'}: damaged: {', '.join(missing)} must be given")


def find_damage(path: Path, index: Mapping[str, Any], share: int = 0, shares: int = 1) -> list[str]:
    """What is wrong with the files of a checkpoint; each of `shares` processes reads its share of them."""
    pieces = defaultdict(list)
    for entry in index["tensors"].values():
        for piece in entry["pieces"]:
            pieces[piece["file"]].append((piece, _DTYPES[entry["dtype"]][0]))
    problems = []
    for name in sorted(index["files"])[share::shares]:
        try:
            if problem := _damage_of(path / name, index["files"][name], pieces[name]):
                problems.append(f"{path / name}: damaged: {problem}")
        except OSError as error:
            problems.append(f"{path / name}: cannot be read ({error.strerror})")
        except UserError as error:
            problems.append(str(error))
    return problems


def _damage_of(file: Path, expected: Mapping[str, Any], pieces: Iterable[tuple[Mapping[str, Any], str]]) -> str:
    """What is wrong with a file, compared with what the index says of it and of its `pieces`, or nothing."""
    found = file.lstat()
    if stat.S_ISREG(found.st_mode) and found.st_size != expected["bytes"]:
        return f"{found.st_size} bytes, and {expected['bytes']} were written"
    with open_regular(file, "rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != expected["sha256"]:
            return "its checksum is another one than was written"
    try:
        with safe_open(file, framework="pt") as header:
            keys = set(header.keys())
            for piece, code in pieces:
                part = header.get_slice(piece["key"]) if piece["key"] in keys else None
                if part is None or part.get_shape() != piece["shape"] or part.get_dtype() != code:
                    return f"it does not hold {piece['key']!r} as {piece['shape']} in {code}"
            # the norm of what is not finite is not finite, and it takes no memory
            suspects = [key for key in sorted(keys) if not header.get_tensor(key).norm().isfinite()]
            if spoiled := [key for key in suspects if not header.get_tensor(key).isfinite().all()]:
                more = f" and {len(spoiled) - 1} more" if len(spoiled) > 1 else ""
                return f"{spoiled[0]!r}{more}: a value is not finite"
    except SafetensorError as error:
        return f"it is not a safetensors file ({error})"
    return ""


def _problems(index: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with an index in itself."""
    tensors, files = index.get("tensors"), index.get("files")
    if not isinstance(tensors, dict) or not isinstance(files, dict):
        yield "tensors and files must be given"
        return
    for name, fits in FACTS.items():
        if name in index and not fits(index[name]):
            yield f"{name} = {index[name]!r:.200}"
    if _is_count(index.get("step")) and _is_count(index.get("skipped")) and index["skipped"] > index["step"]:
        yield f"{index['skipped']} of {index['step']} steps are skipped"
    yield from (f"files: {name!r:.200}: {entry!r:.200}" for name, entry in files.items() if not _is_file(name, entry))
    keys: set[tuple[str, str]] = set()
    for name, entry in tensors.items():
        if not name.isprintable() or not _is_tensor(entry):
            yield f"tensors: {name!r:.200}: no shape, format and pieces of a tensor"
            continue
        for piece in entry["pieces"]:
            yield from (f"{name}: {problem}" for problem in _problems_of_piece(piece, entry, files))
            if (place := (piece["file"], piece["key"])) in keys:
                yield f"{name}: {piece['key']!r:.200} of {piece['file']} is used twice"
            keys.add(place)
        if not cover(entry["shape"], entry["pieces"]):
            yield f"{name}: its pieces do not cover {entry['shape']} exactly once"


def _problems_of_piece(piece: Mapping[str, Any], entry: Mapping[str, Any], files: Mapping[str, Any]) -> Iterator[str]:
    if piece["file"] not in files:
        yield f"{piece['file']!r:.200} is not among the files"
    elif math.prod(piece["shape"]) * _DTYPES[entry["dtype"]][1] > files[piece["file"]]["bytes"]:
        yield f"a piece {piece['shape']} does not fit into {piece['file']}"


def _is_file(name: str, entry: Any) -> bool:
    """Whether an entry of `files` is one; its name leads out of no folder."""
    return bool(
        _FILE.fullmatch(name)
        and isinstance(entry, dict)
        and _is_count(entry.get("bytes"))
        and isinstance(entry.get("sha256"), str)
        and _SHA256.fullmatch(entry["sha256"])
    )


def _is_tensor(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and _are_sizes(entry.get("shape"), None)
        and isinstance(entry.get("dtype"), str)
        and entry["dtype"] in _DTYPES
        and isinstance(entry.get("pieces"), list)
        and all(
            isinstance(piece, dict)
            and isinstance(piece.get("file"), str)
            and isinstance(piece.get("key"), str)
            and _are_sizes(piece.get("shape"), len(entry["shape"]))
            and _are_sizes(piece.get("offsets"), len(entry["shape"]))
            for piece in entry["pieces"]
        )
    )


def _are_sizes(value: Any, dims: int | None) -> bool:
    """Whether a value is a shape or a place, of so many dimensions."""
    fits = isinstance(value, list) and len(value) <= _MOST_DIMS and all(map(_is_count, value))
    return fits and (dims is None or len(value) == dims)


def cover(shape: Sequence[int], pieces: Sequence[Mapping[str, Any]]) -> bool:
    """Whether boxes cover a box, each element of it once.

    A box is a sum of orthants that begin at its corners, with signs that alternate along each dimension. Orthants are
    linearly independent, hence the boxes add up to the whole exactly if the signs at every corner do. This takes a time
    in proportion to the number of boxes, where comparing each with each does not.
    """
    if len(pieces) == 1 or not shape:
        return [(piece["offsets"], piece["shape"]) for piece in pieces] == [([0] * len(shape), list(shape))]
    whole = {"offsets": [0] * len(shape), "shape": shape}
    low, size = (np.array([box[key] for box in (whole, *pieces)], np.uint64) for key in ("offsets", "shape"))
    high = low + size  # all numbers are below 2^63
    if (high > high[0]).any():
        return False
    first = np.where(np.arange(len(low)) == 0, -1, 1)
    corners, signs = [], []
    for ends in itertools.product((0, 1), repeat=len(shape)):
        corners.append(np.where(ends, high, low))
        signs.append(first * (-1) ** sum(ends))
    places = np.concatenate(corners)
    order = np.lexsort(places.T)
    places = places[order]
    begins = np.flatnonzero(np.append(True, (places[1:] != places[:-1]).any(axis=1)))
    return not np.add.reduceat(np.concatenate(signs)[order], begins).any()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _is_rollback(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_count(value.get("step"))
        and _is_count(value.get("back_to"))
        and isinstance(value.get("fault"), str)
        and isinstance(value.get("left_out"), list)
        and len(value["left_out"]) == 2
        and all(map(_is_count, value["left_out"]))
    )


def _is_watch(value: Any) -> bool:
    """Whether a value is a state of `pangu.training.faults.Watch`."""
    if not isinstance(value, dict):
        return False
    losses, rollbacks = value.get("losses", []), value.get("rollbacks", [])
    counts = [value.get(name, 0) for name in ("skipped_in_a_row", "left_out")]
    lists = isinstance(losses, list) and isinstance(rollbacks, list)
    return lists and all(map(_is_number, losses)) and all(map(_is_rollback, rollbacks)) and all(map(_is_count, counts))


def _is_loss_scale(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and _is_number(value.get("scale"))
        and 0 < value["scale"] < math.inf
        and _is_count(value.get("clean_steps"))
    )


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _are_choices(value: Any) -> bool:
    """Whether a value is what `pangu.training.autotune.Choices` was, as far as it is told when a run continues."""
    times = value.get("milliseconds", {}) if isinstance(value, dict) else None
    return isinstance(times, dict) and all(
        isinstance(figures, dict) and all(map(_is_number, figures.values())) for figures in times.values()
    )


FACTS: dict[str, Callable[[Any], bool]] = {
    "step": _is_count,
    "skipped": _is_count,
    "samples": _is_count,
    "watch": _is_watch,
    "loss_scale": lambda value: value is None or _is_loss_scale(value),
    "order": _is_count,
    "choices": lambda value: value is None or _are_choices(value),
    "frozen": lambda value: isinstance(value, list) and all(isinstance(pattern, str) for pattern in value),
    "identity": _is_object,
    "layout": _is_object,
}
"""Facts of a run that an index may hold, and what each must be."""
