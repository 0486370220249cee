"""Input files: names, folders, globs, URLs and datasets. URLs are opened by fsspec, e.g. s3://, gs://, hf://, https://."""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from pangu.common.errors import UserError, reading, shown
from pangu.common.files import read_json_object

DATASET = "hf:"
"""Name prefix of a dataset streamed by the `datasets` library: hf:NAME[:CONFIGURATION[:SPLIT]]."""
MDS, WEBDATASET = "mds:", "wds:"
"""Name prefixes of a folder of MosaicML shards, and of WebDataset's tar files; their libraries open paths and URLs."""
TEXT = (".txt", ".jsonl", ".json")
"""Suffixes of text files, which may be compressed."""
_KNOWN = (*TEXT, ".parquet", ".arrow", ".csv")
_PACKED = (".gz", ".zst", ".xz", ".bz2")
_KINDS = f"{', '.join(_KNOWN)}, and {', '.join(TEXT)} with {', '.join(_PACKED)}"


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --input, --text-key and --whole-files, the arguments of `find_inputs` and `read_chunks`."""
    kinds = (
        f"files, folders or globs, or URLs of them: {_KINDS}; or {DATASET}NAME[:CONFIGURATION[:SPLIT]], which"
        f" `datasets` streams; {MDS}FOLDER of MosaicML shards; {WEBDATASET}SHARD-{{000..099}}.tar of WebDataset"
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=kinds)
    parser.add_argument("--text-key", default="text", metavar="KEY", help="record field that holds the text (text)")
    parser.add_argument(
        "--whole-files",
        action="store_true",
        help="treat each .txt file as one document instead of splitting it at blank lines",
    )


def find_inputs(patterns: Sequence[str], key: str = "--input") -> list[str]:
    """Return the files of names, folders (searched recursively), globs and URLs of these, in order, without repeats.

    Raises UserError, naming `key` as their origin, for a pattern without files or a file of an unknown kind.
    """
    inputs: dict[str, None] = {}
    for pattern in patterns:
        if is_dataset(pattern):
            inputs[pattern] = None
            continue
        matches = _matches(pattern, key)
        if not matches:
            raise UserError(f"{key} {pattern}: no such file or folder")
        for match, files in matches:
            known = [file for file in files if (parts := suffixes(file))[0] in (TEXT if parts[1] else _KNOWN)]
            if not known and files == [match]:
                raise UserError(f"{key} {match}: unknown type of file; supported types: {_KINDS}")
            if not known:
                raise UserError(f"{key} {match}: the folder has no file of a supported type: {_KINDS}")
            inputs.update(dict.fromkeys(known))
    return list(inputs)


def _matches(pattern: str, key: str) -> list[tuple[str, list[str]]]:
    """Return the matches of a name or glob, each with its files: itself, or what the folder holds."""
    if is_url(pattern):
        with reading(f"{key} {pattern}", Exception, rule="cannot be found"):
            return find_urls(pattern)
    if not pattern:  # e.g. from an unset shell variable
        raise UserError(f"{key}: a name is empty")
    path = Path(pattern)
    # pathlib's own glob takes no absolute patterns
    globbed = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    matches = [path] if path.exists() else [Path(match) for match in globbed]
    with reading(f"{key} {pattern}"):
        return [(str(match), _files_below(match) if match.is_dir() else [str(match)]) for match in matches]


def _files_below(folder: Path) -> list[str]:
    """Return the files below a folder, sorted. Follows links, and visits each folder once. Raises OSError."""
    files: list[Path] = []
    seen = set()

    def fail(error: OSError) -> None:
        raise error

    for place, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        facts = Path(place).stat()
        if (facts.st_dev, facts.st_ino) in seen:
            folders.clear()
            continue
        seen.add((facts.st_dev, facts.st_ino))
        folders.sort()
        saved = _saved_dataset(Path(place), folders) if {"state.json", "dataset_dict.json"} & {*names} else None
        files += [Path(place, name) for name in names] if saved is None else saved
    return [str(file) for file in sorted(files)]


def _saved_dataset(folder: Path, folders: Sequence[str]) -> list[Path] | None:
    """Return the data files of a folder that `datasets` saved, in order; None for other folders.

    There are none if its splits are in `folders`. Other files of the library, e.g. results of `map`, are excluded.
    Raises UserError for several splits, or for a selection of rows that is stored separately.
    """
    if (folder / "dataset_dict.json").is_file():
        if len(folders) > 1:
            raise UserError(f"{folder}: has the splits {', '.join(folders)}; choose one, e.g. {folder / folders[0]}")
        return []
    state = read_json_object(folder / "state.json")
    files = state.get("_data_files")
    if not isinstance(files, list):
        return None
    if any(state.get(key) for key in ("_indices_files", "_indices_data_files")):
        raise UserError(f"{folder}: stores the order of its rows separately; save it again after flatten_indices()")
    names = [file.get("filename") if isinstance(file, dict) else None for file in files]
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise UserError(f"{folder / 'state.json'}: {shown(wrong[0])} is not the name of a data file")
    return [folder / name for name in names if isinstance(name, str)]


def input_record(source: str) -> tuple[str, int, int]:
    """Return name, bytes and mtime in ns of an input, 0 if it has none. Raises UserError if it cannot be found."""
    if is_dataset(source):
        return source, 0, 0
    with reading(source, Exception, rule="cannot be found"):
        if is_url(source):
            return source, size_of(source), 0
        facts = Path(source).stat()
    return source, facts.st_size, facts.st_mtime_ns


def suffixes(name: str) -> tuple[str, str]:
    """Return the suffixes of the content and of the compression, each "" if missing."""
    path = PurePosixPath(name.partition("?")[0] if is_url(name) else name)
    packed = path.suffix if path.suffix in _PACKED else ""
    return PurePosixPath(path.name.removesuffix(packed)).suffix, packed


def is_dataset(source: str) -> bool:
    """Return whether a library streams a source, by its prefix; hf://PATH is a URL instead."""
    return source.startswith((DATASET, MDS, WEBDATASET)) and not source.startswith(f"{DATASET}//")


def is_url(name: str) -> bool:
    """Return whether a name is a URL."""
    return "://" in name


def open_url(url: str) -> BinaryIO:
    """Open the file at a URL for reading."""
    system, path = file_system(url)
    return cast(BinaryIO, system.open(path, "rb"))


def size_of(url: str) -> int:
    """Return the size of a file in bytes; 0 if its server does not report it."""
    system, path = file_system(url)
    return int(system.info(path).get("size") or 0)


def find_urls(pattern: str) -> list[tuple[str, list[str]]]:
    """Return the matches of a URL or glob in order, each with its files: itself, or all files in the folder's tree."""
    system, path = file_system(pattern)
    if system.isfile(path):
        return [(pattern, [pattern])]
    names = [path] if system.isdir(path) else sorted(system.glob(path))
    matches = [(name, sorted(system.find(name)) if system.isdir(name) else [name]) for name in names]
    full_url = system.unstrip_protocol
    return [(full_url(name), [full_url(file) for file in files]) for name, files in matches]


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL, and the path in it."""
    import fsspec  # noqa: PLC0415 - optional package

    return fsspec.url_to_fs(url)
