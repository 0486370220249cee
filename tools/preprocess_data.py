"""Turns text into indexed token files, PREFIX.bin and PREFIX.idx."""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pangu.config.data import TokenizerConfig
from pangu.config.errors import UserError, writing
from pangu.config.exit_status import exit_status
from pangu.data.documents import add_input_arguments, batched, find_inputs, parallel_map, read_documents
from pangu.data.indexed import bin_path, idx_path
from pangu.data.indexed_writer import IndexedWriter
from pangu.data.progress import progress_bar
from pangu.data.tokenizers import load_tokenizer
from pangu.topology.random import random_key

_EXAMPLE = """example:
  printf 'A first document.\\n\\nA second one,\\nof two lines.\\n' > /tmp/text.txt
  python tools/train_tokenizer.py --input /tmp/text.txt --output /tmp/tokenizer --vocab-size 300
  python tools/preprocess_data.py --input /tmp/text.txt --output /tmp/corpus \\
      --tokenizer sentencepiece --tokenizer-path /tmp/tokenizer.model --overwrite
"""
_CHARACTERS_AT_ONCE = 200_000


@dataclass(frozen=True)
class Encoded:
    """One document as a worker returns it."""

    ids: NDArray[np.int32]
    validation: bool
    num_bytes: int


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="the files are PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--tokenizer",
        choices=["sentencepiece", "pangu", "huggingface"],
        default="pangu",
        help="pangu (the default): jieba, then SentencePiece",
    )
    parser.add_argument("--tokenizer-path", required=True, metavar="PATH", help="the .model file, or the folder")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-document id (default)",
    )
    parser.add_argument(
        "--eod", type=int, metavar="ID", help="that id (the tokenizer's: <eot>, which is 9 for PanGu-α)"
    )
    parser.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="share of the documents, chosen by a hash of their text, for PREFIX-validation (0)",
    )
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="processes (CPUs, at most 8)")
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    options = parser.parse_args(arguments)
    if options.workers < 1:
        parser.error(f"--workers {options.workers}: must be at least 1")
    if not 0 <= options.holdout < 1:
        parser.error(f"--holdout {options.holdout}: must be at least 0 and less than 1")
    return options


def preprocess(options: argparse.Namespace) -> None:
    """Carry out the command. Raises UserError and then leaves no file."""
    prefixes = [options.output, *([f"{options.output}-validation"] if options.holdout else [])]
    existing = [str(path) for prefix in prefixes for path in (bin_path(prefix), idx_path(prefix)) if path.exists()]
    if existing and not options.overwrite:
        raise UserError(f"{', '.join(existing)} exist already; choose another --output or add --overwrite")
    files = find_inputs(options.input)
    config = TokenizerConfig(options.tokenizer, options.tokenizer_path)
    tokenizer = load_tokenizer(config)
    eod = _end_of_document(options, tokenizer.eod, tokenizer.vocab_size)
    encode = partial(encode_documents, config, eod, options.holdout)
    batches = batched(read_documents(files, options.text_key), _CHARACTERS_AT_ONCE)
    started, num_bytes = time.perf_counter(), 0
    with writing(Path(options.output)), progress_bar(True) as progress, ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, tokenizer.vocab_size)) for prefix in prefixes]
        task = progress.add_task("Encoding documents", total=None)
        for documents in parallel_map(encode, batches, options.workers):
            for document in documents:
                writers[document.validation].add(document.ids)
                num_bytes += document.num_bytes
            progress.advance(task, len(documents))
        _check_filled(options, writers)
    seconds = time.perf_counter() - started
    for prefix, writer in zip(prefixes, writers, strict=True):
        mean = writer.num_tokens / writer.num_documents
        print(f"{prefix}: {writer.num_documents:,} documents, {writer.num_tokens:,} tokens, {mean:.1f} per document")
    print(f"{num_bytes / 1e6:.2f} MB of text in {seconds:.1f} s, {num_bytes / 1e6 / seconds:.2f} MB/s")


def encode_documents(config: TokenizerConfig, eod: int | None, holdout: float, documents: list[str]) -> list[Encoded]:
    """What a worker does with a batch of documents."""
    tokenizer = _tokenizer(config)
    end = [] if eod is None else [eod]
    return [
        Encoded(
            ids=np.array([*tokenizer.encode(document), *end], dtype=np.int32),
            validation=random_key("held out", document) < holdout * 2**64,
            num_bytes=len(document.encode()),
        )
        for document in documents
    ]


_tokenizer = cache(load_tokenizer)  # each process loads it once


def _end_of_document(options: argparse.Namespace, eod: int | None, vocab: int) -> int | None:
    if not options.append_eod:
        return None
    eod = eod if options.eod is None else options.eod
    if eod is None:
        raise UserError("the tokenizer has no end-of-document id; give one with --eod, or --no-append-eod")
    if not 0 <= eod < vocab:
        raise UserError(f"--eod {eod} is outside the tokenizer's vocabulary of {vocab} ids")
    return eod


def _check_filled(options: argparse.Namespace, writers: list[IndexedWriter]) -> None:
    """Raise UserError, while the files have no name yet, if one of them would be empty."""
    if not any(writer.num_tokens for writer in writers):
        raise UserError(f"--input {' '.join(options.input)}: there is no text in it")
    if not all(writer.num_tokens for writer in writers):
        raise UserError(
            f"--holdout {options.holdout} leaves one side without a document; give more text or another share"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: preprocess(parse(arguments)), "preprocess_data")


if __name__ == "__main__":
    sys.exit(main())
