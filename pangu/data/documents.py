"""Reading text documents from the files people have, and passing them through several processes."""

from __future__ import annotations

import argparse
import glob
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import TypeVar

from pangu.config.errors import UserError, reading

READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
"""Suffix -> loader of the `datasets` library; `.txt` is read without it."""

_KNOWN = {".txt", *READERS}

Item = TypeVar("Item")
Result = TypeVar("Result")


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --input and --text-key, the arguments of `find_inputs` and `read_documents`."""
    kinds = f".txt (documents separated by blank lines), {', '.join(READERS)}"
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=f"files, folders or globs: {kinds}")
    parser.add_argument("--text-key", default="text", metavar="KEY", help="field of a record with its text (text)")


def find_inputs(patterns: Sequence[str]) -> list[Path]:
    """The files of names, folders (searched throughout) and globs, in order and without repeats. Raises UserError for
    one without files or for a file of an unknown kind."""
    inputs: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        # pathlib's own glob takes no absolute patterns
        globbed = sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
        matches = [path] if path.exists() else [Path(match) for match in globbed]
        if not matches:
            raise UserError(f"--input {pattern}: no such file or folder")
        for match in matches:
            if match.is_dir():
                files = sorted(file for file in match.rglob("*") if file.suffix in _KNOWN and file.is_file())
                if not files:
                    raise UserError(f"--input {match}: the folder holds no {', '.join(sorted(_KNOWN))} file")
                inputs.update(dict.fromkeys(files))
            elif match.suffix in _KNOWN:
                inputs[match] = None
            else:
                raise UserError(f"--input {match}: its kind is unknown; known are {', '.join(sorted(_KNOWN))}")
    return list(inputs)


def read_documents(files: Sequence[Path], text_key: str) -> Iterator[str]:
    """The documents of the files, without blank ones. Blank lines separate those of a `.txt` file; records of the other
    kinds have their text under `text_key`. Raises UserError, naming the file, if one cannot be read."""
    for file in files:
        documents = _read_text(file) if file.suffix == ".txt" else _read_records(file, text_key)
        yield from (document for document in documents if document.strip())


def _read_text(path: Path) -> Iterator[str]:
    lines: list[str] = []
    try:
        with reading(path), path.open(encoding="utf-8-sig") as file:
            for line in file:
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield "".join(lines).rstrip("\n")
                    lines = []
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8; convert it first, e.g. iconv -f GB18030 -t UTF-8") from error
    if lines:
        yield "".join(lines).rstrip("\n")


def _read_records(path: Path, text_key: str) -> Iterator[str]:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # the library's readers raise many kinds of errors
    with reading(path, Exception, rule=f"cannot be read as {READERS[path.suffix]}"):
        path.open("rb").close()  # the library does not say which file is missing
        name = glob.escape(str(path))
        records = datasets.load_dataset(READERS[path.suffix], data_files=name, split="train", streaming=True)
        for record in records:
            if not isinstance(record.get(text_key), str):
                raise UserError(
                    f"{path}: a record has no text under {text_key!r}; it has {sorted(record)}; see --text-key"
                )
            yield record[text_key]


def batched(documents: Iterable[str], characters: int) -> Iterator[list[str]]:
    """Lists of consecutive documents, of at least `characters` each but the last."""
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def parallel_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """`map` over several processes, in order, with only a few items in memory; one worker means this process. The
    workers end with this process, however it ends. Raises the errors of `function`, and UserError if a worker was
    killed."""
    if workers == 1:
        yield from map(function, items)
        return
    # Forking is unsafe beside the threads of progress bars and tokenizers.
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:
        pending: deque[Future[Result]] = deque()
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) >= 4 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process was killed, most likely for lack of memory; use fewer --workers"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _end_with_parent() -> None:
    """End this process when its parent ends: a parent that was killed cannot say so, and its workers would wait for
    work for ever."""
    parent = parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    Thread(target=wait, name="parent", daemon=True).start()
