"""Settings of another program as overrides of pretrain.py: those of Megatron-LM (also with Megatron-DeepSpeed and
MindSpeed-LLM), DeepSpeed, MindFormers, torchtitan up to v0.2.2, and config.json of transformers.

Prints the overrides, one per line, to append to `pretrain.py`, after building this project's configuration from
them; as comments, what has no counterpart, what you have to provide, and what differs in effect. If a setting that may
change the model would be lost, the command names it and exits with status 2."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.common.commands import as_typed
from pangu.common.errors import UserError
from pangu.common.exit_status import exit_status
from pangu.interop.translation.report import describe, refusal, tables
from pangu.interop.translation.sources import SOURCES, translate

_EXAMPLE = """examples:
  python tools/translate_config.py --from megatron train_gpt3_175b_distributed.sh DATA_PATH=/data/web
  python tools/translate_config.py --from megatron --num-layers 12 --hidden-size 768 --num-attention-heads 12 \\
      --seq-length 1024 --micro-batch-size 4 --global-batch-size 64 --lr 6e-4 --train-iters 1000 --vocab-size 50257
  python tools/translate_config.py --from deepspeed ds_config.json
  python tools/translate_config.py --from mindformers run_pangualpha_13b.yaml
  python tools/translate_config.py --from torchtitan llama3_8b.toml --keep-going
  python tools/translate_config.py --from huggingface config.json

A launch script is read, not run: give variables that only a run would set as NAME=VALUE after it. All known
settings are listed in docs/moving-over.md.
"""
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; what is not ours is the other program's."""
    parser = argparse.ArgumentParser(
        description=as_typed(str(__doc__)),
        epilog=as_typed(_EXAMPLE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s --from PROGRAM [--keep-going] FILE | ARGUMENTS",
    )
    parser.add_argument("--from", dest="source", choices=SOURCES, help="program whose settings they are")
    keep_going = "skip settings that are unknown or change the model, instead of exiting with status 2"
    parser.add_argument("--keep-going", action="store_true", help=keep_going)
    parser.add_argument("--tables", choices=("en", "zh"), help="print all known settings as Markdown")
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
    if not options.keep_going and (message := refusal(translation)):
        raise UserError(message)
    print(as_typed(describe(translation, _CONFIGS)))


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
