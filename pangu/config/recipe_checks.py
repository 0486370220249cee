"""Contradictions between the keys of a recipe: loss scale, learning rate and weight decay over the run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from pangu.common.errors import Problem
from pangu.config.schema import RunConfig
from pangu.config.stages import stage_problems


def _loss_scale(config: RunConfig) -> Iterator[Problem]:
    precision, scale = config.precision, config.precision.loss_scale
    if (precision.compute == "fp16") != (scale is not None):
        rule = "precision.loss_scale is required for fp16, and must be null for other formats"
        yield Problem("precision.compute", precision.compute, rule, "set precision=fp16, bf16 or fp32, which sets both")
    if scale is not None and scale.initial < scale.minimum:
        rule = f"must be at least precision.loss_scale.minimum = {scale.minimum:g}"
        yield Problem("precision.loss_scale.initial", scale.initial, rule, "use e.g. 65536")


def _least_rate(config: RunConfig) -> Iterator[Problem]:
    schedule = config.lr_schedule
    if schedule.min_lr > config.optimizer.lr:
        rule = f"must not exceed optimizer.lr = {config.optimizer.lr:g}"
        yield Problem("lr_schedule.min_lr", schedule.min_lr, rule, "use 0")


def _decay(config: RunConfig) -> Iterator[Problem]:
    schedule, total = config.lr_schedule, config.train.steps
    if schedule.shape == "wsd":
        length = schedule.decay_steps if schedule.decay_steps is not None else max(1, total // 10)
        if schedule.warmup_steps + length > total:
            keys, values = "lr_schedule.warmup_steps, lr_schedule.decay_steps", f"{schedule.warmup_steps}, {length}"
            yield Problem(keys, values, f"together must not exceed train.steps = {total}", "lower one of them")
    elif schedule.shape in ("cosine", "linear") and (schedule.decay_steps or math.inf) < schedule.warmup_steps:
        rule = f"must not exceed lr_schedule.decay_steps = {schedule.decay_steps}, the step at which the decay ends"
        fix = "lower it, or raise lr_schedule.decay_steps"
        yield Problem("lr_schedule.warmup_steps", schedule.warmup_steps, rule, fix)


RECIPE_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    *(_loss_scale, _least_rate, _decay),
    stage_problems,
)
