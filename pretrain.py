"""Pretrains a GPT or PanGu-α model.

torchrun --nproc-per-node=2 pretrain.py +config=quickstart
"""

from pathlib import Path

from pangu.training.command import pretrain

if __name__ == "__main__":
    pretrain(Path(__file__).resolve().parent / "configs")
