"""Corpus of the standard library's sources and docstrings: built by the first run, found by its manifest later."""

from __future__ import annotations

import ast
import json
import logging
import platform
import shutil
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Collection
from pathlib import Path

import sentencepiece

from pangu.common.cores import available_cores
from pangu.common.errors import UserError, writing
from pangu.common.files import write_atomically
from pangu.config.data import PackingConfig
from pangu.data.stdlib import StdlibPaths, file_record, find_damage, is_prepared, stdlib_recipe
from pangu.metrics.progress import ProgressBar
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.prepare.vocabulary import END_OF_TEXT, train_sentencepiece
from pangu.topology.random import random_key

log = logging.getLogger("pangu")

# Installed packages, tests, and generated tables.
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "encodings", "pydoc_data"}

_ENCODED_AT_ONCE = 32
_LEFTOVER_SECONDS = 3600


def prepare_stdlib(
    folder: str | Path,
    vocab: int,
    validation_fraction: float,
    packing: PackingConfig,
    show_progress: bool = False,
    on_progress: Callable[[], None] = lambda: None,
) -> StdlibPaths:
    """Create a tokenizer of `vocab` pieces and the indexed files, unless the folder has them.

    A folder whose manifest is missing, or does not match the arguments or the files (some 8 MB, whose checksums are
    compared), is rebuilt. `on_progress` is called for each file and every few documents. Raises UserError if the
    folder is not writable, the library has no text, or `vocab` does not suit it.
    """
    paths = StdlibPaths(Path(folder))
    if packing.eod not in (None, END_OF_TEXT):
        raise UserError(
            f"data.packing.eod = {packing.eod}: documents of data=stdlib end with {END_OF_TEXT}; use it or null"
        )
    prepared = is_prepared(paths, vocab, validation_fraction)
    damaged = find_damage(paths) if prepared else []
    if damaged:
        log.warning("%s: prepared again because of checksum mismatches: %s", paths.folder, ", ".join(damaged))
    if damaged or not prepared:
        with writing(paths.folder), ProgressBar(show_progress, on_progress) as progress:
            _build(paths, vocab, validation_fraction, progress)
    return paths


def read_library(root: Path, progress: ProgressBar) -> dict[str, list[str]]:
    """Return the documents of the library's files below `root`: text, and docstrings if there are any.

    Keys are paths relative to `root` with forward slashes, sorted. Raises UserError unless there are at least two.
    """
    names = sorted(
        relative.as_posix()
        for relative in (path.relative_to(root) for path in root.rglob("*.py"))
        if _LEFT_OUT.isdisjoint(relative.parts) and not relative.name.startswith("_sysconfigdata")
    )
    sources = {}
    for name in progress.through(names, "Reading the standard library"):
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if documents := [document for document in (text, docstrings(text)) if document.strip()]:
            sources[name] = documents
    if len(sources) < 2:
        raise UserError(
            f"data=stdlib: Python's standard library in {root} has fewer than two readable .py files; use a"
            " Python installed with its sources, or data=indexed with your own text"
        )
    return sources


def docstrings(source: str) -> str:
    """Return the docstrings of a module, its classes and its functions, separated by blank lines."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about invalid escapes in other people's strings
        try:
            nodes = ast.walk(ast.parse(source))
        except (SyntaxError, ValueError):
            return ""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n\n".join(filter(None, (ast.get_docstring(node) for node in nodes if isinstance(node, documented))))


def validation_split(names: Collection[str], fraction: float) -> set[str]:
    """Return the names of the validation files: hash below `fraction`, but at least one and never all."""
    hashes = sorted((random_key("held out", name) / 2**64, name) for name in names)
    count = sum(value < fraction for value, _ in hashes)
    return {name for _, name in hashes[: min(max(count, 1), len(hashes) - 1)]}


def _build(paths: StdlibPaths, vocab: int, validation_fraction: float, progress: ProgressBar) -> None:
    """Build everything in a temporary subfolder, move it into place, and write the manifest last."""
    paths.folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(paths.folder)
    # the folder is also removed if the process ends while one of its threads still trains the tokenizer
    with tempfile.TemporaryDirectory(prefix=".building-", dir=paths.folder, ignore_cleanup_errors=True) as folder:
        temporary = StdlibPaths(Path(folder))
        sources = read_library(Path(sysconfig.get_paths()["stdlib"]), progress)
        _write_tokenizer(temporary, sources, vocab, progress)
        _write_documents(temporary, sources, validation_fraction, vocab, progress)
        manifest = {
            "recipe": stdlib_recipe(vocab, validation_fraction),
            "python": platform.python_version(),
            "files": {path.name: file_record(path) for path in sorted(temporary.folder.iterdir())},
        }
        paths.manifest.unlink(missing_ok=True)
        for name in manifest["files"]:
            (temporary.folder / name).replace(paths.folder / name)
        write_atomically(paths.manifest, json.dumps(manifest, indent=2).encode())


def _write_tokenizer(paths: StdlibPaths, sources: dict[str, list[str]], vocab: int, progress: ProgressBar) -> None:
    task = progress.add_task(f"Training a tokenizer of {vocab} pieces", total=1)
    try:
        model = train_sentencepiece((documents[0] for documents in sources.values()), vocab, "bpe")
    except UserError as error:
        raise UserError(f"model.vocab = {vocab} does not work with data=stdlib: {error}") from error
    write_atomically(paths.tokenizer, model)
    progress.update(task, completed=1)


def _write_documents(
    paths: StdlibPaths, sources: dict[str, list[str]], validation_fraction: float, vocab: int, progress: ProgressBar
) -> None:
    processor = sentencepiece.SentencePieceProcessor(model_file=str(paths.tokenizer))
    names = validation_split(sources, validation_fraction)
    for prefix, held_out in ((paths.train, False), (paths.validation, True)):
        documents = [text for name, texts in sources.items() if (name in names) == held_out for text in texts]
        starts = range(0, len(documents), _ENCODED_AT_ONCE)
        with IndexedWriter(prefix, vocab) as writer:
            for start in progress.through(starts, f"Encoding {prefix.name} documents"):
                texts = documents[start : start + _ENCODED_AT_ONCE]
                for ids in processor.encode(texts, num_threads=min(8, available_cores())):
                    writer.add([*ids, END_OF_TEXT])


def _remove_leftovers(folder: Path) -> None:
    """Remove the folders of killed builds; recent ones may belong to another run that is building now."""
    for leftover in folder.glob(".building-*"):
        if time.time() - leftover.stat().st_mtime > _LEFTOVER_SECONDS:
            shutil.rmtree(leftover, ignore_errors=True)
