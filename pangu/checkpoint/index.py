"""Index of a checkpoint, trusted only as far as it is checked: it may be damaged or crafted.

`index.json` is one object: `format`, `version`, facts of the run (`_FACTS`), `checksum` of all the rest, and

    tensors     KIND/NAME -> shape and dtype of the full tensor, and `pieces`, which cover it, each element once:
                {file, key: its name in the file, offsets: place in the full tensor, shape}
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from pangu.checkpoint.files import FORMAT, VERSION, checksum, list_checkpoints
from pangu.checkpoint.safetensors_file import CODES
from pangu.common.errors import UserError, writing
from pangu.common.files import flush, open_regular, read_json, write_atomically

_DTYPES = {str(dtype).removeprefix("torch."): (code, dtype.itemsize) for dtype, code in CODES.items()}
"""Safetensors code and bytes per element, by dtype name."""
_FILE_NAME = re.compile(r"tensors-[0-9]{5,}-[0-9]{5,}\.safetensors")
START = "start.json"
"""File next to the checkpoints of a run that went back to its beginning."""
MOST_DIMS = 8
"""Largest number of dimensions of a tensor; the corners of a piece double with each."""


class NewerFormatError(UserError):
    """Error for a checkpoint that a newer version of pangu has written."""


def read_index(path: Path) -> dict[str, Any]:
    """Return the index of a checkpoint. Raises NewerFormatError if a newer pangu wrote it, UserError if invalid."""
    file = path / "index.json"
    if not file.exists():
        inside = list_checkpoints(path / "checkpoints")
        more = f"; this is a run folder: use its newest checkpoint {inside[-1]}" if inside else ""
        if (path / "config.json").exists():
            more = "; this is a model of transformers: import it with tools/convert_checkpoint.py --from huggingface"
        raise UserError(f"{path}: no checkpoint here (index.json is missing){more}")
    index = read_json(file, shared=True)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise UserError(f"{file}: is not the index of a pangu checkpoint")
    version = index.get("version")
    if isinstance(version, int) and version > VERSION:
        raise NewerFormatError(
            f"{path}: format version {version} is newer than this pangu supports ({VERSION}); install the version "
            "that wrote the checkpoint, or a later one"
        )
    if version != VERSION:
        raise UserError(f"{path}: format version {version!r}; this version of pangu reads {VERSION}")
    if index.pop("checksum", None) != checksum(index):
        raise UserError(f"{file}: damaged: checksum mismatch")
    if problem := next(_problems(index), None):
        raise UserError(f"{file}: damaged: {problem}")
    return index


def read_start(folder: Path) -> dict[str, Any]:
    """Return `samples` and `watch` of a run that went back to its beginning, else {}; UserError if damaged."""
    file = folder / START
    if not file.exists():
        return {}
    facts = read_json(file, shared=True)
    if not _matches(facts, {"samples": _is_count, "watch": _FACTS["watch?"]}):
        raise UserError(f"{file}: damaged; delete it to start from the first sample")
    return facts


def write_start(folder: Path, facts: Mapping[str, Any]) -> None:
    """Atomically write the facts that `read_start` returns. Raises UserError if the disk refuses."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / START, json.dumps(facts).encode())
        flush(folder)


def require_facts(path: Path, index: Mapping[str, Any], *names: str) -> None:
    """Raise a UserError unless the index of `path` has these facts of a run."""
    if missing := [name for name in names if name not in index]:
        raise UserError(f"{path / 'index.json'}: damaged: {', '.join(missing)} missing")


def find_damage(path: Path, index: Mapping[str, Any], share: int = 0, shares: int = 1) -> list[str]:
    """Return the damage of a checkpoint's files; each of `shares` processes reads its share of them."""
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
    """Return how a file differs from the index's facts about it and its `pieces`, or an empty text."""
    status = file.lstat()
    if stat.S_ISREG(status.st_mode) and status.st_size != expected["bytes"]:
        return f"{status.st_size} bytes instead of {expected['bytes']}"
    with open_regular(file, "rb") as opened:
        if hashlib.file_digest(opened, "sha256").hexdigest() != expected["sha256"]:
            return "checksum mismatch"
    try:
        with safe_open(file, framework="pt") as header:
            keys = set(header.keys())
            for piece, code in pieces:
                part = header.get_slice(piece["key"]) if piece["key"] in keys else None
                if part is None or part.get_shape() != piece["shape"] or part.get_dtype() != code:
                    return f"no tensor {piece['key']!r} of shape {piece['shape']} and format {code}"
            # the norm of what is not finite is not finite, and it takes no memory
            suspects = [key for key in sorted(keys) if not header.get_tensor(key).norm().isfinite()]
            if spoiled := [key for key in suspects if not header.get_tensor(key).isfinite().all()]:
                more = f" and {len(spoiled) - 1} more" if len(spoiled) > 1 else ""
                return f"{spoiled[0]!r}{more}: has values that are not finite"
    except SafetensorError as error:
        return f"it is not a safetensors file ({error})"
    return ""


def _problems(index: Mapping[str, Any]) -> Iterator[str]:
    tensors, files = index.get("tensors"), index.get("files")
    if not isinstance(tensors, dict) or not isinstance(files, dict):
        yield "tensors or files are missing"
        return
    for fact, pattern in _FACTS.items():
        if not _matches(index, {fact: pattern}):
            yield f"{fact[:-1]} = {index[fact[:-1]]!r:.200}"
    if _is_count(index.get("step")) and _is_count(index.get("skipped")) and index["skipped"] > index["step"]:
        yield f"{index['skipped']} of {index['step']} steps are marked as skipped"
    for name, entry in files.items():
        if not (_FILE_NAME.fullmatch(name) and _matches(entry, _FILE)):  # a name leads out of no folder
            yield f"files: {name!r:.200}: {entry!r:.200}"
    keys: set[tuple[str, str]] = set()
    for name, entry in tensors.items():
        dims = len(entry["shape"]) if _matches(entry, _TENSOR) else -1
        pieces = entry["pieces"] if dims >= 0 else ()
        alike = all(len(piece["shape"]) == len(piece["offsets"]) == dims for piece in pieces)
        if not name.isprintable() or dims < 0 or not alike:
            yield f"tensors: {name!r:.200}: not a valid tensor entry"
            continue
        for piece in entry["pieces"]:
            if piece["file"] not in files:
                yield f"{name}: {piece['file']!r:.200} is not among the files"
            elif math.prod(piece["shape"]) * _DTYPES[entry["dtype"]][1] > files[piece["file"]]["bytes"]:
                yield f"{name}: a piece {piece['shape']} does not fit into {piece['file']}"
            if (place := (piece["file"], piece["key"])) in keys:
                yield f"{name}: {piece['key']!r:.200} of {piece['file']} is used twice"
            keys.add(place)
        if not cover(entry["shape"], entry["pieces"]):
            yield f"{name}: its pieces do not cover {entry['shape']} exactly once"


def cover(shape: Sequence[int], pieces: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether boxes cover a box, each element once, in time proportional to their number.

    A box is a sum of orthants that begin at its corners, with signs that alternate along each dimension. Orthants are
    linearly independent, hence the boxes add up to the whole exactly if the signs at every corner do.
    """
    # [0, 4) and [4, 6) cover [0, 6): the signs at every corner add up to 0
    #
    #     corner      0    4    6
    #     [0, 6)     -1        +1
    #     [0, 4)     +1   -1
    #     [4, 6)          +1   -1
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


def _is_sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MOST_DIMS and all(map(_is_count, value))


def _matches(value: Any, pattern: Any) -> bool:
    """Return whether a value fits a type, test, regex, [pattern] of any length, or {key or optional key?: pattern}."""
    if isinstance(pattern, dict):
        return isinstance(value, dict) and all(
            _matches(value[name], inner) if (name := key.rstrip("?")) in value else key.endswith("?")
            for key, inner in pattern.items()
        )
    if isinstance(pattern, list):
        return isinstance(value, list) and all(_matches(one, pattern[0]) for one in value)
    if isinstance(pattern, type):
        return isinstance(value, pattern)
    if isinstance(pattern, re.Pattern):
        return isinstance(value, str) and pattern.fullmatch(value) is not None
    return bool(pattern(value))


_FILE = {"bytes": _is_count, "sha256": re.compile(r"[0-9a-f]{64}")}
_TENSOR = {
    "shape": _is_sizes,
    "dtype": re.compile("|".join(_DTYPES)),
    "pieces": [{"file": str, "key": str, "shape": _is_sizes, "offsets": _is_sizes}],
}
_ROLLBACK = {
    "step": _is_count,
    "back_to": _is_count,
    "fault": str,
    "left_out": lambda value: _matches(value, [_is_count]) and len(value) == 2,
}
_LOSS_SCALE = {
    "scale": lambda value: _is_number(value) and 0 < value < math.inf,
    "clean_steps": _is_count,
    "overflows?": _is_count,
}
_UNREAD = {
    "numbers": [_is_number],
    "fields": [lambda value: isinstance(value, bool)],
    "lr": _is_number,
    "seconds": _is_number,
    "stragglers": lambda value: value is None or _matches(value, [lambda pair: len(pair) == 2]),
    "details": dict,
}
_FACTS: dict[str, Any] = {
    "step?": _is_count,
    "skipped?": _is_count,
    "samples?": _is_count,
    # `pangu.training.faults`
    "watch?": {
        "losses?": [_is_number],
        "rollbacks?": [_ROLLBACK],
        "skipped_in_a_row?": _is_count,
        "left_out?": _is_count,
        "good_steps?": _is_count,
    },
    "loss_scale?": lambda value: value is None or _matches(value, _LOSS_SCALE),
    # `pangu.layers.fp8`
    "fp8?": lambda value: value is None or _are_exponents(value),
    "order?": _is_count,
    # the times of autotuning, as far as a continued run reports them
    "choices?": lambda value: value is None or _are_choices(value),
    "frozen?": [str],
    # `pangu.training.survivors`
    "unread?": lambda value: value is None or _matches(value, _UNREAD),
    "moments_since?": lambda value: isinstance(value, dict) and all(map(_is_count, value.values())),
    "identity?": dict,
    "layout?": dict,
}
"""Patterns of the facts of a run that an index may hold."""


def _are_exponents(value: Any) -> bool:
    rows = [value[name] for name in value] if isinstance(value, dict) else [()]
    return all(
        _matches(three, [[lambda exponent: _is_count(exponent) and exponent < 255]])
        and [len(row) for row in three] == [16] * 3
        for three in rows
    )


def _are_choices(value: Any) -> bool:
    times = value.get("milliseconds", {}) if isinstance(value, dict) else None
    return isinstance(times, dict) and all(
        isinstance(figures, dict) and all(map(_is_number, figures.values())) for figures in times.values()
    )
