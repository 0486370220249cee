"""Whole steps that torch compiles, and in fp8: the trainer beside a plain loop."""

from __future__ import annotations

from benchmarks.gpu_suite.setting import Setting
from benchmarks.gpu_suite.speed import Rounds, compare

ROUNDS: Rounds = (
    (("pangu in fp8",), ("pangu_2_6b",)),
    (("pangu compiled", "plain compiled"), ("pangu_2_6b", "pangu_350m", "gpt3_1_3b")),
    (("pangu compiled with dropout", "pangu compiled in fp8"), ("pangu_2_6b", "pangu_350m")),
    (("pangu in fp8",), ("pangu_350m", "gpt3_1_3b")),
)


def measure(setting: Setting) -> None:
    """A row for each size and peer."""
    compare(setting, ROUNDS)
