"""Commands of an installed package, and the files that a checkout has in their place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

PROGRAMS = {
    "train": ("pretrain", "train a model, or show its configuration or dry run"),
    "launch": ("scripts/launch", "start a command on several processes, with torchrun's options"),
    "plan": ("tools/plan", "estimate a layout's memory, communication and time, or search for the fastest ones"),
    "prepare": ("tools/preprocess_data", "encode text into indexed token files"),
    "tokenizer": ("tools/train_tokenizer", "train a SentencePiece vocabulary"),
    "data": ("tools/inspect_data", "show and verify indexed token files"),
    "convert": ("tools/convert_checkpoint", "convert checkpoints to and from other formats"),
    "inspect": ("tools/inspect_checkpoint", "show what a checkpoint holds"),
    "translate": ("tools/translate_config", "translate settings from Megatron-LM, DeepSpeed and others"),
    "generate": ("scripts/generate", "continue prompts, or answer them"),
    "evaluate": ("scripts/evaluate", "measure perplexity, or accuracy on tasks"),
    "report": ("tools/report", "compare runs on an HTML page"),
    "calibrate": ("tools/calibrate", "measure this machine for the planner"),
}
"""Command of `pangu` -> its file in a checkout, without suffix, and what it does."""
_COMMANDS = {f"{file}.py": command for command, (file, _) in PROGRAMS.items()}
_LAUNCHED = r"(?:(?:torchrun|scripts/launch\.py) ((?:--\S+ )+))?"
_FILE = re.compile(rf"(?:python )?(?<![\w/]){_LAUNCHED}({'|'.join(map(re.escape, _COMMANDS))})")


def is_installed_command() -> bool:
    """Return whether this process was started by the name of a command or module, not by a file of a checkout."""
    package = Path(__file__).resolve().parent.parent
    return sys.argv[0].startswith("pangu ") or Path(sys.argv[0]).resolve().parent == package


def as_typed(text: str) -> str:
    """Return a text with `pangu COMMAND` in place of files of a checkout, if this process was started that way."""
    if not is_installed_command():
        return text
    return _FILE.sub(lambda file: f"pangu {'launch ' + file[1] if file[1] else ''}{_COMMANDS[file[2]]}", text)


def print_error(text: str) -> None:
    """Print the message that a command ends with, in the form of argparse's own: `pangu plan: error: ...`."""
    print(as_typed(f"{Path(sys.argv[0]).name}: error: {text}"), file=sys.stderr, flush=True)
