"""Shows what indexed token files hold: documents, how long they are, and samples as a model gets them, with the
boundaries of documents, positions, where the loss counts, and padding; or the same for the conversations of a
fine-tuning run. --verify reads every byte."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.common.commands import as_typed
from pangu.common.errors import UserError, printable, reading, shown
from pangu.common.exit_status import exit_status
from pangu.config.data import PackingConfig, TokenizerConfig
from pangu.data.batch import Batch, batch_of
from pangu.data.boundaries import describe_ids
from pangu.data.indexed import IndexedTokens, idx_path, open_indexed
from pangu.data.packing import PackedDocuments, Packing, write_packing
from pangu.data.sources import open_dataset
from pangu.data.stream import SampleStream
from pangu.data.tokenizers import Tokenizer, load_tokenizer
from pangu.prepare.instructions import read_prepared
from pangu.prepare.manifest import find_damage, manifest_path, read_manifest
from pangu.prepare.preprocessing import length_statistics

_EXAMPLE = """example:
  python tools/inspect_data.py my/corpus --documents 2
  python tools/inspect_data.py my/web my/books --weights 0.7 0.3 --samples 3 --sequence 1024 --reset-mask
  python tools/inspect_data.py my/corpus --verify
  python tools/inspect_data.py my/corpus --samples 2 --packing best_fit --reset-mask
  python tools/inspect_data.py runs/chat/data/instructions --samples 2
"""
_KINDS = get_args(get_type_hints(TokenizerConfig)["kind"])
_ERRORS = (KeyError, TypeError, ValueError, AttributeError)
"""Errors raised by a manifest whose values have other types."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "prefix", nargs="+", help="a path without .bin and .idx (several are blended), or a folder of conversations"
    )
    parser.add_argument("--verify", action="store_true", help="check all files against the checksums in PREFIX.json")
    parser.add_argument("--documents", type=int, default=2, metavar="N", help="number of first documents to show (2)")
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="number of first samples to show (0)")
    parser.add_argument("--sequence", type=int, default=1024, metavar="TOKENS", help="model.sequence (1024)")
    parser.add_argument("--seed", type=int, default=0, help="train.seed (0)")
    parser.add_argument("--weights", nargs="+", type=float, help="data.weights (in proportion to tokens)")
    parser.add_argument(
        "--packing",
        choices=["concat", "best_fit", "single"],
        help="data.packing.method (concat; conversations: best_fit)",
    )
    parser.add_argument("--reset-mask", action="store_true", help="data.packing.reset_mask")
    parser.add_argument("--reset-positions", action="store_true", help="data.packing.reset_positions")
    parser.add_argument("--eod", type=int, metavar="ID", help="data.packing.eod (what PREFIX.json says)")
    parser.add_argument("--pad", type=int, metavar="ID", help="data.packing.pad (none)")
    parser.add_argument("--tokenizer", choices=_KINDS, help="kind of tokenizer, if not that of PREFIX.json")
    parser.add_argument("--tokenizer-path", default="", metavar="PATH")
    options = parser.parse_args(arguments)
    for name, least in (("documents", 0), ("samples", 0), ("sequence", 1), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: must be at least {least}")
    if options.weights and len(options.weights) != len(options.prefix):
        parser.error(f"--weights: {len(options.weights)} weights for {len(options.prefix)} prefixes")
    if (options.tokenizer in (None, "bytes")) == bool(options.tokenizer_path):
        parser.error("--tokenizer and --tokenizer-path belong together (bytes has no path)")
    return options


def inspect(options: argparse.Namespace) -> None:
    """Carry out the command. Raises UserError if files cannot be read or are damaged."""
    with ExitStack() as stack:
        options.indexes = stack.enter_context(TemporaryDirectory())
        folders = [prefix for prefix in options.prefix if Path(prefix).is_dir() and not idx_path(prefix).exists()]
        if folders:
            _inspect_conversations(options, folders)
        else:
            _inspect_tokens(options)


def _inspect_conversations(options: argparse.Namespace, folders: list[str]) -> None:
    """Print what a folder of conversations holds that a fine-tuning run has prepared."""
    if folders != options.prefix or len(folders) > 1 or options.verify:
        raise UserError(f"{folders[0]}: is a folder of conversations; give only this folder, without --verify")
    folder = Path(folders[0])
    manifest = read_prepared(folder)
    with reading(folder / "manifest.json", *_ERRORS, rule="is damaged"):
        tokenizer, options.sequence = _tokenizer(options, manifest), int(manifest["recipe"]["sequence"])
        prefixes = [str(folder / Path(name).name) for name in manifest["counts"] if name.startswith("train")]
    readers = [open_indexed(prefix) for prefix in prefixes]
    for reader in readers:
        _show_dataset(reader, None, options.documents, tokenizer)
    options.packing = options.packing or "best_fit"
    if options.samples:
        _show_samples(options, readers, _ids(options, None), tokenizer, conversations=True)


def _inspect_tokens(options: argparse.Namespace) -> None:
    manifests = [read_manifest(prefix) for prefix in options.prefix]
    if options.verify:
        _verify(options.prefix, manifests)
    readers = [open_indexed(prefix) for prefix in options.prefix]
    with _manifest(options.prefix[0]):
        tokenizer = _tokenizer(options, manifests[0])
    if tokenizer is not None and manifests[0]:
        with _manifest(options.prefix[0]):
            recipe = manifests[0]["recipe"]
            print(printable(describe_ids(tokenizer, recipe["eod"], recipe.get("bos"))))
    for reader, manifest in zip(readers, manifests, strict=True):
        _show_dataset(reader, manifest, options.documents, tokenizer)
    if options.samples:
        eod, bos = options.eod, None
        if manifests[0]:
            with _manifest(options.prefix[0]):
                recipe = manifests[0]["recipe"]
                eod = recipe["eod"] if eod is None else eod
                # a ValueError for all but an id
                bos = None if recipe.get("bos") is None else range(2**31).index(recipe["bos"])
        _show_samples(options, readers, _ids(options, eod, bos), tokenizer)


def _ids(options: argparse.Namespace, eod: int | None, bos: int | None = None) -> PackingConfig:
    method: Literal["concat", "best_fit", "single"] = options.packing or "concat"
    return PackingConfig(eod, options.pad, options.reset_mask, options.reset_positions, method=method, bos=bos)


def _manifest(prefix: str) -> AbstractContextManager[None]:
    """For what takes values of a manifest, which others may have written."""
    return reading(manifest_path(prefix), *_ERRORS, rule="is not a manifest of these files")


def _verify(prefixes: list[str], manifests: list[dict[str, Any] | None]) -> None:
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        if manifest is None:
            raise UserError(f"no {manifest_path(prefix)} to compare with (Megatron-LM writes none); leave out --verify")
        with reading(prefix):
            problems = find_damage(prefix, manifest)
        if problems:
            raise UserError("\n".join(problems) + "; copy the files again, or write them again")
        print(f"{prefix}: all checksums match")


def _tokenizer(options: argparse.Namespace, manifest: dict[str, Any] | None) -> Tokenizer | None:
    """Return the tokenizer of a file, given or named in its manifest; None if it is unknown or not here."""
    if options.tokenizer:
        return load_tokenizer(TokenizerConfig(options.tokenizer, options.tokenizer_path))
    if manifest is None:
        return None
    named = manifest["recipe"]["tokenizer"]
    if named.get("kind") not in _KINDS or not Path(str(named.get("path"))).exists():
        print(f"the tokenizer {shown(named.get('path'))} does not exist, so ids are shown; set --tokenizer")
        return None
    return load_tokenizer(TokenizerConfig(**named))


def _show_dataset(
    reader: IndexedTokens, manifest: dict[str, Any] | None, num_documents: int, tokenizer: Tokenizer | None
) -> None:
    totals = length_statistics(reader.sequence_lengths)
    lengths = ", ".join(f"{name} {value:,.0f}" for name, value in totals["lengths"].items())
    print(f"{reader.prefix}: {totals['documents']:,} documents, {totals['tokens']:,} tokens of {reader.tokens.dtype}")
    print(f"  tokens of a document: {lengths}")
    if manifest:
        with _manifest(reader.prefix):
            made = manifest["statistics"]
            parts = [f"{made['bytes']:,} bytes of text, {made['bytes_per_token']:.2f} per token"]
            parts += [f"{made[f'{kind}_duplicates']:,} {kind} duplicates left out" for kind in ("exact", "near")]
            parts.append(f"{made['bad_lines']['count']:,} bad lines left out")
            print(printable(f"  {', '.join(parts)}"))
    starts = np.concatenate([[0], np.cumsum(reader.sequence_lengths[:num_documents], dtype=np.int64)])
    for number in range(len(starts) - 1):
        print(f"  document {number}: {_text(reader.tokens[starts[number] : starts[number + 1]].tolist(), tokenizer)}")


def _show_samples(
    options: argparse.Namespace,
    readers: list[IndexedTokens],
    ids: PackingConfig,
    tokenizer: Tokenizer | None,
    conversations: bool = False,
) -> None:
    weights = options.weights or [float(len(reader.tokens)) for reader in readers]
    vocab = tokenizer.vocab_size if tokenizer else 2**31
    packed = []
    if ids.method != "concat":
        if ids.eod is None and ids.bos is None and not conversations:
            raise UserError("--eod is required: packed samples need the id that ends a document")
        bos = None if ids.bos is None else int(ids.bos)
        for reader in readers:
            packing = Packing(reader.prefix, options.sequence, ids.method, options.indexes, conversations, bos)
            write_packing(packing)
            packed.append(open_dataset(packing, vocab, ids) if conversations else PackedDocuments(packing, vocab, ids))
    pairs = list(zip(readers, weights, strict=True))
    stream = SampleStream(pairs, options.sequence, vocab, options.seed, packed=packed)
    for number in range(options.samples):
        batch, borders = (batch_of([stream[number]], [number], one) for one in (ids, replace(ids, reset_mask=True)))
        loss, size = int(batch.weights.sum()), options.sequence
        padding = stream.padding(number)
        filled = f", {padding:,} of padding" if packed else ""
        print(f"sample {number}: {stream.origin(number)}, loss at {loss:,} of {size:,}{filled}")
        assert borders.documents is not None
        for line in _parts(batch, borders.documents[0].numpy(), padding, tokenizer):
            print(f"  {line}")


def _parts(batch: Batch, borders: NDArray[np.int64], padding: int, tokenizer: Tokenizer | None) -> list[str]:
    """A line for each document of a sample, and one for each stretch of it where the loss counts, if that is not all.
    `borders`: number of each token's document."""
    tokens, labels, positions, weights = (
        value[0].numpy() for value in (batch.tokens, batch.labels, batch.positions, batch.weights)
    )
    size = len(tokens) - padding
    begins = [0, *(np.flatnonzero(np.diff(borders[:size])) + 1).tolist(), size]
    lines = []
    for begin, stop in pairwise(begins):
        seen = "" if batch.documents is None else f", document {int(batch.documents[0, begin])}"
        counted = weights[begin:stop] != 0
        loss = "" if counted.all() else f", loss at {int(counted.sum())}"
        place = f"tokens {begin}-{stop - 1}, positions {positions[begin]}-{positions[stop - 1]}{seen}{loss}"
        lines.append(f"{place}: {_text(tokens[begin:stop].tolist(), tokenizer)}")
        edges = np.flatnonzero(np.diff(counted.astype(np.int8), prepend=0, append=0)).tolist() if loss else []
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            text = _text(labels[begin + first : begin + last].tolist(), tokenizer)
            lines.append(f"  loss at {begin + first}-{begin + last - 1}, of: {text}")
    return [*lines, f"tokens {size}-{len(tokens) - 1}: padding"] if padding else lines


def _text(ids: list[int], tokenizer: Tokenizer | None) -> str:
    """The text of ids, or the ids, cut where it is long."""
    if tokenizer is None:
        return shown(ids)
    return printable(shown(tokenizer.decode(ids[:1000])))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: inspect(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
