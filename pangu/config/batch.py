"""Configuration of the batch, and of the stages in which it grows."""

from __future__ import annotations

from dataclasses import dataclass

from pangu.config.bounds import Count, Length


@dataclass(frozen=True)
class BatchStage:
    """First steps of a run, with smaller batches or shorter sequences."""

    until: Count
    """Number of steps of the run, skipped ones included, after which the stage ends: it begins where the one before
    ends."""
    global_size: Length | None = None
    """Sequences per step; at most `batch.global_size`. null: `batch.global_size`."""
    sequence: Length | None = None
    """Tokens per sequence; a divisor of `model.sequence`, whose samples are cut into as many sequences. null:
    `model.sequence`."""


@dataclass(frozen=True)
class BatchConfig:
    """Sequences per step. Gradient accumulation = global_size / (micro_size x data-parallel size), rounded up."""

    global_size: Length
    """Sequences per optimizer step, over all replicas."""
    micro_size: Length
    """Sequences per micro-batch of one replica."""
    # younger than the first run folders
    stages: tuple[BatchStage, ...] = ()
    """Stages of growing batches and sequences, e.g. [{until: 100, global_size: 16, sequence: 512}]. After the last one,
    `global_size` and `model.sequence` hold. A step's tokens are a multiple of `model.sequence`."""

    def accumulation(self, replicas: int) -> int:
        """Return the number of micro-batches per replica and step."""
        return -(-self.global_size // (self.micro_size * replicas))
