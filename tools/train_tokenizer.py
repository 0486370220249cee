"""Trains a SentencePiece vocabulary with PanGu-α's special ids (end of document 9, padding 6)."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.progress import Progress

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.common.commands import as_typed
from pangu.common.errors import UserError, writing
from pangu.common.exit_status import exit_status
from pangu.common.files import write_atomically
from pangu.data.boundaries import describe_ids
from pangu.data.documents import read_documents
from pangu.data.finding import add_input_arguments, find_inputs
from pangu.data.tokenizers import SentencePieceTokenizer
from pangu.metrics.progress import ProgressBar
from pangu.prepare.vocabulary import train_sentencepiece

_EXAMPLE = """example:
  printf 'A first document.\\n\\nA second one,\\nof two lines.\\n' > /tmp/text.txt
  python tools/train_tokenizer.py --input /tmp/text.txt --output /tmp/tokenizer --vocab-size 300
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_input_arguments(parser)
    parser.add_argument("--output", required=True, metavar="PREFIX", help="the file is PREFIX.model")
    parser.add_argument("--vocab-size", type=int, required=True, metavar="N", help="pieces, special ids included")
    parser.add_argument("--model-type", choices=["bpe", "unigram"], default="bpe", help="bpe by default")
    parser.add_argument(
        "--character-coverage",
        type=float,
        default=0.9995,
        metavar="SHARE",
        help="fraction of characters that get their own piece, 0.98 to 1 (0.9995)",
    )
    parser.add_argument(
        "--jieba",
        action="store_true",
        help="split the text into words first, as PanGu-α does; use the"
        " result with --tokenizer pangu. Without it, decoding restores the text exactly",
    )
    parser.add_argument(
        "--max-sentences",
        type=int,
        default=200_000,
        metavar="N",
        help="chunks of about 1,000 characters to train on, sampled evenly (200,000)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    options = parser.parse_args(arguments)
    if not 0.98 <= options.character_coverage <= 1:
        parser.error(f"--character-coverage {options.character_coverage}: must be from 0.98 to 1")
    if options.max_sentences < 1:
        parser.error(f"--max-sentences {options.max_sentences}: must be at least 1")
    if options.vocab_size < 1:
        parser.error(f"--vocab-size {options.vocab_size}: must be at least 1")
    return options


def train(options: argparse.Namespace) -> None:
    """Carry out the command. Raises UserError and then leaves no file."""
    path = Path(f"{options.output}.model")
    if path.exists() and not options.overwrite:
        raise UserError(f"{path} exists already; choose another --output or add --overwrite")
    files = find_inputs(options.input)
    started = time.perf_counter()
    with writing(path), ProgressBar(True) as progress:
        path.parent.mkdir(parents=True, exist_ok=True)
        documents = _counted(read_documents(files, options.text_key, whole_files=options.whole_files), progress)
        model = train_sentencepiece(
            documents,
            options.vocab_size,
            options.model_type,
            options.character_coverage,
            options.jieba,
            options.max_sentences,
        )
        write_atomically(path, model)
    print(f"{path}: {options.vocab_size} pieces in {time.perf_counter() - started:.1f} s")
    tokenizer = SentencePieceTokenizer(path)
    print(describe_ids(tokenizer, tokenizer.eod, tokenizer.bos))


def _counted(documents: Iterator[str], progress: Progress) -> Iterator[str]:
    task = progress.add_task("Reading documents", total=None)
    for document in documents:
        progress.advance(task)
        yield document
    progress.add_task("Training", total=None)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: train(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
