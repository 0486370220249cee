"""Converts text to indexed token files, PREFIX.bin and PREFIX.idx."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import get_args, get_type_hints

from rich.progress import Progress

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.common.commands import as_typed
from pangu.common.cores import available_cores
from pangu.common.errors import UserError, printable, writing
from pangu.common.exit_status import exit_status
from pangu.config.data import TokenizerConfig
from pangu.data.boundaries import begin_id, describe_ids
from pangu.data.finding import add_input_arguments, find_inputs, input_record
from pangu.data.tokenizers import Tokenizer, load_tokenizer, tokenizer_digest
from pangu.metrics.progress import ProgressBar
from pangu.prepare.indexed_writer import ResumableWriter
from pangu.prepare.preprocessing import Preprocessing, Recipe, bands_of

_EXAMPLE = """example:
  printf 'A first document.\\n\\nA second one,\\nof two lines.\\n' > /tmp/text.txt
  python tools/train_tokenizer.py --input /tmp/text.txt --output /tmp/tokenizer --vocab-size 300
  python tools/preprocess_data.py --input /tmp/text.txt --output /tmp/corpus \\
      --tokenizer sentencepiece --tokenizer-path /tmp/tokenizer.model --overwrite
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="the files are PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--tokenizer",
        choices=get_args(get_type_hints(TokenizerConfig)["kind"]),
        default="pangu",
        help="pangu (the default): jieba, then SentencePiece; huggingface: a folder or a tokenizer.json; gpt2: a folder"
        " with vocab.json and merges.txt; r50k_base to o200k_base: a .tiktoken file; bytes: no file",
    )
    parser.add_argument("--tokenizer-path", default="", metavar="PATH", help="the file, or the folder")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the end-of-document id (default)",
    )
    parser.add_argument(
        "--eod", type=int, metavar="ID", help="end-of-document id (the tokenizer's own, e.g. <eot>, 9 for PanGu-α)"
    )
    parser.add_argument(
        "--bos",
        type=_id_or_word,
        default="auto",
        metavar="ID",
        help="id before each document; auto: the one that the tokenizer adds, if any; none: no id (auto)",
    )
    _add_selection(parser)
    parser.add_argument("--workers", type=int, default=min(8, available_cores()), help="processes (CPUs, at most 8)")
    parser.add_argument(
        "--commit-every",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="seconds between commits; if killed, the same command continues from the last commit (60)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    options = parser.parse_args(arguments)
    if problem := _problem(options):
        parser.error(problem)
    return options


def _add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which documents are held out or left out."""
    parser.add_argument(
        "--holdout",
        type=float,
        default=0.0,
        metavar="FRACTION",
        help="fraction of the documents, chosen by a hash of their text, for PREFIX-validation (0)",
    )
    parser.add_argument(
        "--max-bad",
        type=int,
        default=0,
        metavar="N",
        help="skip and log up to N lines without a document (0: the first one is an error)",
    )
    parser.add_argument("--remove-duplicates", action="store_true", help="skip exact duplicates of earlier documents")
    parser.add_argument(
        "--remove-near-duplicates",
        type=float,
        metavar="SHARE",
        help="skip documents that share about this fraction of their 8-character substrings with an earlier"
        " one, e.g. 0.8 (MinHash; needs rensa)",
    )


def _problem(options: argparse.Namespace) -> str:
    """Return what is wrong with the options, or an empty text."""
    if Path(options.output).name in ("", "..") or options.output.endswith("/"):
        return f"--output {options.output!r}: must end with the name that the files begin with"
    if options.workers < 1:
        return f"--workers {options.workers}: must be at least 1"
    if not 0 <= options.holdout < 1:
        return f"--holdout {options.holdout}: must be at least 0 and less than 1"
    if bool(options.tokenizer_path) == (options.tokenizer == "bytes"):
        needed = "no" if options.tokenizer_path else "a"
        return f"--tokenizer {options.tokenizer} needs {needed} --tokenizer-path"
    if options.max_bad < 0:
        return f"--max-bad {options.max_bad}: must be at least 0"
    if options.remove_near_duplicates is not None and not 0.1 <= options.remove_near_duplicates < 1:
        return f"--remove-near-duplicates {options.remove_near_duplicates}: must be from 0.1 to less than 1"
    if not options.commit_every >= 0:
        return f"--commit-every {options.commit_every}: must be at least 0"
    return ""


def preprocess(options: argparse.Namespace) -> None:
    """Carry out the command. Raises UserError, after which the same command continues from the last commit."""
    inputs = find_inputs(options.input)
    if options.remove_near_duplicates:
        bands_of("", options.remove_near_duplicates)  # which needs a library
    config = TokenizerConfig(options.tokenizer, options.tokenizer_path)
    tokenizer = load_tokenizer(config)
    eod = _end_of_document(options, tokenizer.eod, tokenizer.vocab_size)
    bos = _beginning_of_text(options, tokenizer)
    print(printable(describe_ids(tokenizer, eod, bos)))
    recipe = Recipe(
        inputs=tuple(input_record(source) for source in inputs),
        text_key=options.text_key,
        tokenizer=config,
        tokenizer_digest=tokenizer_digest(options.tokenizer_path),
        vocab=tokenizer.vocab_size,
        eod=eod,
        bos=bos,
        holdout=options.holdout,
        exact_duplicates=options.remove_duplicates,
        near_duplicates=options.remove_near_duplicates,
        whole_files=options.whole_files,
    )
    started = time.perf_counter()
    with writing(Path(options.output)), closing(Preprocessing(options.output, recipe, options.overwrite)) as work:
        before = sum(writer.num_bytes for writer in work.writers)
        with ProgressBar(True) as progress:
            if work.resumed:
                done = sum(writer.num_documents for writer in work.writers)
                progress.console.print(f"continuing after {done:,} documents", highlight=False)
            task = progress.add_task("Encoding documents", total=None)
            work.run(
                options.workers,
                options.max_bad,
                options.commit_every,
                add=partial(progress.advance, task),
                warn=partial(_warn, progress),
            )
        num_bytes = sum(writer.num_bytes for writer in work.writers) - before
        _check_filled(options, work.writers)
        statistics = work.publish()
    seconds = time.perf_counter() - started
    for prefix, summary in zip(work.prefixes, statistics, strict=True):
        print(
            f"{prefix}: {summary['documents']:,} documents, {summary['tokens']:,} tokens,"
            f" {summary['lengths']['mean']:.1f} per document, {summary['bytes_per_token']:.2f} bytes per token"
        )
    for count, what in (
        (work.progress.exact_duplicates, "duplicates"),
        (work.progress.near_duplicates, "near duplicates"),
        (work.progress.num_bad, "bad lines"),
    ):
        if count:
            print(f"left out: {count:,} {what}")
    print(f"{num_bytes / 1e6:.2f} MB of text in {seconds:.1f} s, {num_bytes / 1e6 / seconds:.2f} MB/s")


def _warn(progress: Progress, message: str) -> None:
    progress.console.print(printable(message), markup=False, highlight=False, soft_wrap=True)


def _end_of_document(options: argparse.Namespace, eod: int | None, vocab: int) -> int | None:
    if not options.append_eod:
        return None
    eod = eod if options.eod is None else options.eod
    if eod is None:
        raise UserError("the tokenizer has no end-of-document id; set --eod or --no-append-eod")
    if not 0 <= eod < vocab:
        raise UserError(f"--eod {eod} is outside the tokenizer's vocabulary of {vocab} ids")
    return eod


def _id_or_word(value: str) -> int | str:
    """Parse --bos."""
    if value in ("auto", "none") or value.isdecimal():
        return int(value) if value.isdecimal() else value
    raise argparse.ArgumentTypeError(f"{value}: must be an id, auto or none")


def _beginning_of_text(options: argparse.Namespace, tokenizer: Tokenizer) -> int | None:
    bos = begin_id(None if options.bos == "none" else options.bos, tokenizer)
    if bos is not None and bos >= tokenizer.vocab_size:
        raise UserError(f"--bos {bos} is outside the tokenizer's vocabulary of {tokenizer.vocab_size} ids")
    return bos


def _check_filled(options: argparse.Namespace, writers: list[ResumableWriter]) -> None:
    """Raise UserError, while the files have no name yet, if one of them would be empty."""
    if not any(writer.num_tokens for writer in writers):
        raise UserError(f"--input {' '.join(options.input)}: has no text")
    if not all(writer.num_tokens for writer in writers):
        raise UserError(
            f"--holdout {options.holdout} leaves one split without a document; use more text or another fraction"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: preprocess(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
