"""Learning rate as a pure function of the number of updates so far."""

from __future__ import annotations

import math

from pangu.config.optimizer import LrScheduleConfig


def learning_rate(schedule: LrScheduleConfig, peak: float, total: int, update: int) -> float:
    """Return the rate of update `update` (from 0, without skipped steps) of `total`; `peak`: rate after warm-up."""
    if update < schedule.warmup_steps:
        return peak * (update + 1) / schedule.warmup_steps
    if schedule.shape == "constant":
        return peak
    if schedule.shape == "wsd":
        # warm-up, stable, decay (Hu et al. 2024, section 4.1), with linear decay
        length = schedule.decay_steps if schedule.decay_steps is not None else max(1, total // 10)
        progress = _progress(update, total - length, total)
        return schedule.min_lr + (peak - schedule.min_lr) * (1.0 - progress)
    end = schedule.decay_steps if schedule.decay_steps is not None else total
    start = schedule.warmup_steps if schedule.decay_from == "warmup" else 0
    progress = _progress(update, start, end)
    remaining = 1.0 - progress if schedule.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.min_lr + (peak - schedule.min_lr) * remaining


def _progress(update: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (update - start) / max(1, end - start)))
