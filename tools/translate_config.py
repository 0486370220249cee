"""Settings of another program as overrides of pretrain.py: those of Megatron-LM (and Megatron-DeepSpeed), DeepSpeed,
MindFormers, torchtitan, and config.json of transformers.

Prints the overrides, one a line, to be pasted behind `pretrain.py`, once our configuration could be built from them;
and, as comments, what has no counterpart, what has to be given besides, and what is different in effect."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pangu.config.errors import UserError
from pangu.config.exit_status import exit_status
from pangu.translation.checked import check
from pangu.translation.report import describe, tables
from pangu.translation.sources import SOURCES, translate

_EXAMPLE = """examples:
  python tools/translate_config.py --from megatron train_gpt3_175b_distributed.sh DATA_PATH=/data/web
  python tools/translate_config.py --from megatron --num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
      --seq-length 1024 --micro-batch-size 4 --global-batch-size 64 --lr 6e-4 --train-iters 1000 --vocab-size 50257
  python tools/translate_config.py --from deepspeed ds_config.json
  python tools/translate_config.py --from mindformers run_pangualpha_13b.yaml
  python tools/translate_config.py --from torchtitan llama3_8b.toml --strict
  python tools/translate_config.py --from huggingface config.json

A launch script is read, not run: variables that only running would tell are given as NAME=VALUE behind it. All settings
that are known are in docs/moving-over.md.
"""
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; what is not ours is the other program's."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s --from PROGRAM [--strict] FILE | ARGUMENTS",
    )
    parser.add_argument("--from", dest="source", choices=SOURCES, help="the program whose settings they are")
    parser.add_argument("--strict", action="store_true", help="end with status 2 if a setting is not known")
    parser.add_argument("--tables", choices=("en", "zh"), help="print all settings that are known, as Markdown")
    options, words = parser.parse_known_args(arguments)
    options.words = words
    if (options.source is None) == (options.tables is None):
        parser.error("--from names the program")
    return options


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises UserError."""
    if options.tables:
        print(tables(options.tables))
        return
    translation = translate(options.source, options.words)
    checked = check(translation, _CONFIGS)
    print(describe(translation, checked))
    if options.strict and translation.unknown:
        raise UserError(f"not known: {', '.join(map(translation.shown, translation.unknown))}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: run(parse(arguments)), "translate_config")


if __name__ == "__main__":
    sys.exit(main())
