"""Commands of an installed package, and the files that a checkout has in their place."""

from __future__ import annotations

import re
import sys
from pathlib import Path

FILES = {
    "train": "pretrain",
    "launch": "scripts/launch",
    "plan": "tools/plan",
    "prepare": "tools/preprocess_data",
    "tokenizer": "tools/train_tokenizer",
    "data": "tools/inspect_data",
    "convert": "tools/convert_checkpoint",
    "inspect": "tools/inspect_checkpoint",
    "translate": "tools/translate_config",
    "generate": "scripts/generate",
    "evaluate": "scripts/evaluate",
    "report": "tools/report",
    "calibrate": "tools/calibrate",
}
"""Mapping from a command of `pangu` to its file in a checkout, without suffix."""
_COMMANDS = {f"{file}.py": command for command, file in FILES.items()}
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
