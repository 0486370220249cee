"""Access to files at URLs through fsspec, e.g. s3://, gs://, hf://, https://, file:// or memory://.

All functions raise arbitrary errors: those of the libraries behind fsspec.
"""

from __future__ import annotations

from typing import Any, BinaryIO, cast


def is_url(name: str) -> bool:
    """Return whether a name is a URL."""
    return "://" in name


def open_url(url: str) -> BinaryIO:
    """Open the file at a URL for reading."""
    system, path = _system(url)
    return cast(BinaryIO, system.open(path, "rb"))


def size_of(url: str) -> int:
    """Return the size of a file in bytes; 0 if its server does not report it."""
    system, path = _system(url)
    return int(system.info(path).get("size") or 0)


def find_urls(pattern: str) -> list[tuple[str, list[str]]]:
    """Return the matches of a URL or glob in order, each with its files: itself, or all files in the folder's tree."""
    system, path = _system(pattern)
    if system.isfile(path):
        return [(pattern, [pattern])]
    names = [path] if system.isdir(path) else sorted(system.glob(path))
    matches = [(name, sorted(system.find(name)) if system.isdir(name) else [name]) for name in names]
    whole = system.unstrip_protocol
    return [(whole(name), [whole(file) for file in files]) for name, files in matches]


def _system(url: str) -> tuple[Any, str]:
    import fsspec  # noqa: PLC0415 - optional package

    return fsspec.url_to_fs(url)
