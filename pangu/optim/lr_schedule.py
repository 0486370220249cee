"""Learning rate and weight decay as pure functions of the number of updates so far."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from pangu.config.optimizer import LrScheduleConfig, WeightDecayScheduleConfig

_REMAINING: Mapping[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Shapes of a decay from 1 to 0, by its progress from 0 to 1."""


def learning_rate(schedule: LrScheduleConfig, peak: float, total: int, update: int) -> float:
    """Return the rate of update `update` (from 0, without skipped steps) of `total`; `peak`: rate after warm-up."""
    if update < schedule.warmup_steps:
        return peak * (update + 1) / schedule.warmup_steps
    if schedule.shape == "constant":
        return peak
    if schedule.shape == "inverse_sqrt":
        # Vaswani et al. 2017, section 5.3
        return max(schedule.min_lr, peak * math.sqrt(max(1, schedule.warmup_steps) / max(1, update)))
    if schedule.shape == "wsd":
        # warm-up, stable, decay (Hu et al. 2024, section 4.1; the shapes of the decay as in Megatron-LM)
        length = schedule.decay_steps if schedule.decay_steps is not None else max(1, total // 10)
        remaining = _REMAINING[schedule.decay_shape](_progress(update, total - length, total))
    else:
        end = schedule.decay_steps if schedule.decay_steps is not None else total
        start = schedule.warmup_steps if schedule.decay_from == "warmup" else 0
        remaining = _REMAINING[schedule.shape](_progress(update, start, end))
    return schedule.min_lr + (peak - schedule.min_lr) * remaining


def weight_decay(schedule: WeightDecayScheduleConfig | None, final: float, total: int, update: int) -> float:
    """Return the weight decay of update `update` (from 0, without skipped steps); `final`: that after `total`."""
    if schedule is None:
        return final
    return final + (schedule.start - final) * _REMAINING[schedule.shape](_progress(update, 0, total))


def _progress(update: int, start: int, end: int) -> float:
    return min(1.0, max(0.0, (update - start) / max(1, end - start)))
