"""Shows what indexed token files hold: documents, how long they are, and samples as a model gets them, with the borders
of documents, positions and where the loss counts. --verify reads every byte."""

from __future__ import annotations

import argparse
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np

from pangu.config.data import PackingConfig, TokenizerConfig
from pangu.config.errors import UserError, printable, reading, shown
from pangu.config.exit_status import exit_status
from pangu.data.batch import Batch, make_batch
from pangu.data.indexed import IndexedTokens, open_indexed
from pangu.data.manifest import find_damage, manifest_path, read_manifest
from pangu.data.statistics import length_statistics
from pangu.data.stream import SampleStream
from pangu.data.tokenizers import Tokenizer, load_tokenizer

_EXAMPLE = """example:
  python tools/inspect_data.py my/corpus --documents 2
  python tools/inspect_data.py my/web my/books --weights 0.7 0.3 --samples 3 --sequence 1024 --reset-mask
  python tools/inspect_data.py my/corpus --verify
"""
_KINDS = get_args(get_type_hints(TokenizerConfig)["kind"])


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", nargs="+", help="a path without .bin and .idx; several are blended")
    parser.add_argument("--verify", action="store_true", help="compare all files with the checksums of PREFIX.json")
    parser.add_argument("--documents", type=int, default=2, metavar="N", help="first documents to show (2)")
    parser.add_argument("--samples", type=int, default=0, metavar="N", help="first samples to show (0)")
    parser.add_argument("--sequence", type=int, default=1024, metavar="TOKENS", help="model.sequence (1024)")
    parser.add_argument("--seed", type=int, default=0, help="train.seed (0)")
    parser.add_argument("--weights", nargs="+", type=float, help="data.weights (in proportion to tokens)")
    parser.add_argument("--reset-mask", action="store_true", help="data.packing.reset_mask")
    parser.add_argument("--reset-positions", action="store_true", help="data.packing.reset_positions")
    parser.add_argument("--eod", type=int, metavar="ID", help="data.packing.eod (what PREFIX.json says)")
    parser.add_argument("--pad", type=int, metavar="ID", help="data.packing.pad (none)")
    parser.add_argument("--tokenizer", choices=_KINDS, help="of another tokenizer than PREFIX.json names")
    parser.add_argument("--tokenizer-path", default="", metavar="PATH")
    options = parser.parse_args(arguments)
    for name, least in (("documents", 0), ("samples", 0), ("sequence", 1), ("seed", 0)):
        if getattr(options, name) < least:
            parser.error(f"--{name} {getattr(options, name)}: must be at least {least}")
    if options.weights and len(options.weights) != len(options.prefix):
        parser.error(f"--weights: {len(options.weights)} of them for {len(options.prefix)} prefixes")
    if (options.tokenizer in (None, "bytes")) == bool(options.tokenizer_path):
        parser.error("--tokenizer and --tokenizer-path belong together (bytes has no path)")
    return options


def inspect(options: argparse.Namespace) -> None:
    """Carry out the command. Raises UserError if files cannot be read or are damaged."""
    manifests = [read_manifest(prefix) for prefix in options.prefix]
    if options.verify:
        _verify(options.prefix, manifests)
    readers = [open_indexed(prefix) for prefix in options.prefix]
    with _manifest(options.prefix[0]):
        tokenizer = _tokenizer(options, manifests[0])
    for reader, manifest in zip(readers, manifests, strict=True):
        _show_dataset(reader, manifest, options.documents, tokenizer)
    if options.samples:
        eod = options.eod
        if eod is None and manifests[0]:
            with _manifest(options.prefix[0]):
                eod = manifests[0]["recipe"]["eod"]
        packing = PackingConfig(eod, options.pad, options.reset_mask, options.reset_positions)
        _show_samples(options, readers, packing, tokenizer)


def _manifest(prefix: str) -> AbstractContextManager[None]:
    """For what takes values of a manifest, which others may have written."""
    errors = (KeyError, TypeError, ValueError, AttributeError)
    return reading(manifest_path(prefix), *errors, rule="is no manifest of these files")


def _verify(prefixes: list[str], manifests: list[dict[str, Any] | None]) -> None:
    for prefix, manifest in zip(prefixes, manifests, strict=True):
        if manifest is None:
            raise UserError(
                f"{manifest_path(prefix)} does not exist, so there are no checksums to compare {prefix} with"
            )
        with reading(prefix):
            problems = find_damage(prefix, manifest)
        if problems:
            raise UserError("\n".join(problems))
        print(f"{prefix}: all bytes are as they were written")


def _tokenizer(options: argparse.Namespace, manifest: dict[str, Any] | None) -> Tokenizer | None:
    """What turns ids into text, if it is known and at hand."""
    if options.tokenizer:
        return load_tokenizer(TokenizerConfig(options.tokenizer, options.tokenizer_path))
    if manifest is None:
        return None
    named = manifest["recipe"]["tokenizer"]
    if named.get("kind") not in _KINDS or not Path(str(named.get("path"))).exists():
        print(f"the tokenizer {shown(named.get('path'))} is not here: ids are shown; see --tokenizer")
        return None
    return load_tokenizer(TokenizerConfig(**named))


def _show_dataset(
    reader: IndexedTokens, manifest: dict[str, Any] | None, num_documents: int, tokenizer: Tokenizer | None
) -> None:
    found = length_statistics(reader.sequence_lengths)
    lengths = ", ".join(f"{name} {value:,.0f}" for name, value in found["lengths"].items())
    print(f"{reader.prefix}: {found['documents']:,} documents, {found['tokens']:,} tokens of {reader.tokens.dtype}")
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
    options: argparse.Namespace, readers: list[IndexedTokens], packing: PackingConfig, tokenizer: Tokenizer | None
) -> None:
    weights = options.weights or [float(len(reader.tokens)) for reader in readers]
    vocab = tokenizer.vocab_size if tokenizer else 2**31
    stream = SampleStream(list(zip(readers, weights, strict=True)), options.sequence, vocab, options.seed)
    for number in range(options.samples):
        prefix, start = stream.origin(number)
        batch = make_batch(stream[number][None], [number], packing)
        loss = int(batch.weights.sum())
        print(f"sample {number}: {prefix} from token {start:,}, loss at {loss:,} of {options.sequence:,}")
        for line in _parts(batch, packing, tokenizer):
            print(f"  {line}")


def _parts(batch: Batch, packing: PackingConfig, tokenizer: Tokenizer | None) -> list[str]:
    """A line for each stretch of a sample between the ends of documents."""
    tokens, positions, weights = (value[0].numpy() for value in (batch.tokens, batch.positions, batch.weights))
    ends = np.flatnonzero(tokens == packing.eod) + 1 if packing.eod is not None else np.array([], dtype=np.int64)
    lines = []
    for begin, stop in zip([0, *ends], [*ends, len(tokens)], strict=True):
        if begin < stop:
            seen = "" if batch.documents is None else f", document {int(batch.documents[0, begin])}"
            loss = f", loss at {int(weights[begin:stop].sum())}" if (weights[begin:stop] == 0).any() else ""
            place = f"tokens {begin}-{stop - 1}, positions {positions[begin]}-{positions[stop - 1]}{seen}{loss}"
            lines.append(f"{place}: {_text(tokens[begin:stop].tolist(), tokenizer)}")
    return lines


def _text(ids: list[int], tokenizer: Tokenizer | None) -> str:
    """The text of ids, or the ids, cut where it is long."""
    if tokenizer is None:
        return shown(ids)
    return printable(shown(tokenizer.decode(ids[:1000])))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: inspect(parse(arguments)), "inspect_data")


if __name__ == "__main__":
    sys.exit(main())
