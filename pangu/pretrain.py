"""`python -m pangu.pretrain`: what pretrain.py of a checkout does, wherever pangu is installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pangu.training.interrupts import ending_at_once


def find_configs() -> Path:
    """The folder with base.yaml: in an installed package, or beside the package of a checkout."""
    package = Path(__file__).resolve().parent
    return next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())


def dry_run(values: Mapping[str, Any]) -> None:
    """What `dry_run` asks for; a run that trains does without the import."""
    from pangu.dryrun.report import show_dry_run

    show_dry_run(values)


def main() -> None:
    """Help, or the run that the command line asks for; ends the process with its status."""
    configs = find_configs()
    with ending_at_once():
        from pangu.config.help import show_help

        if show_help(sys.argv[1:], configs):
            return
        # after help, which is there at once: this imports Hydra and, to train, torch
        from pangu.training.command import pretrain
    pretrain(configs, dry_run)


if __name__ == "__main__":
    main()
