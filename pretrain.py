"""Pretrains a GPT or PanGu-α model.

torchrun --nproc-per-node=2 pretrain.py +config=quickstart
"""

import sys
from pathlib import Path

from pangu.config.help import show_help

CONFIGS = Path(__file__).resolve().parent / "configs"

if __name__ == "__main__" and not show_help(sys.argv[1:], CONFIGS):
    # after help, which is there at once: this imports Hydra and, to train, torch
    from pangu.training.command import pretrain

    pretrain(CONFIGS)
