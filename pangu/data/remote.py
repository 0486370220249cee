"""Files behind URLs: whatever fsspec opens, e.g. s3://, gs://, hf://, https://, file:// or memory://. All of it raises
many kinds of errors, those of the libraries that fsspec opens them by."""

from __future__ import annotations

from typing import Any, BinaryIO, cast


def is_url(name: str) -> bool:
    return "://" in name


def open_url(url: str) -> BinaryIO:
    system, path = _system(url)
    return cast(BinaryIO, system.open(path, "rb"))


def size_of(url: str) -> int:
    """Bytes of a file; 0 if its server does not say."""
    system, path = _system(url)
    return int(system.info(path).get("size") or 0)


def find_urls(pattern: str) -> list[tuple[str, list[str]]]:
    """The file or folder of a URL, or those of a glob, in order, each with its files: itself, or what a folder holds
    throughout."""
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
