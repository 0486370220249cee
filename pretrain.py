"""Pretrains a GPT or PanGu-α model.

torchrun --nproc-per-node=2 pretrain.py +config=quickstart
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pangu.config.help import show_help

CONFIGS = Path(__file__).resolve().parent / "configs"


def dry_run(values: Mapping[str, Any]) -> None:
    """What `dry_run` asks for; a run that trains does without the import."""
    from pangu.dryrun.report import show_dry_run

    show_dry_run(values)


if __name__ == "__main__" and not show_help(sys.argv[1:], CONFIGS):
    # after help, which is there at once: this imports Hydra and, to train, torch
    from pangu.training.command import pretrain

    pretrain(CONFIGS, dry_run)
