"""Configurations of the stages in which batch and sequence length grow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pangu.common.errors import Problem
from pangu.config.data import InstructionsData
from pangu.config.schema import RunConfig
from pangu.config.suggest import any_of, divisors_near, multiples_near


def stage_at(config: RunConfig, step: int) -> int:
    """Return the number of the stage of step `step` (from 0); the final one follows those of `batch.stages`."""
    return sum(step >= stage.until for stage in config.batch.stages)


def in_stage(config: RunConfig, number: int) -> RunConfig:
    """Return a configuration with batch and sequence length of stage `number` in place of the final ones."""
    if number >= len(config.batch.stages):
        return config
    stage = config.batch.stages[number]
    size, sequence = stage.global_size or config.batch.global_size, stage.sequence or config.model.sequence
    batch, model = replace(config.batch, global_size=size), replace(config.model, sequence=sequence)
    return replace(config, batch=batch, model=model)


def stages_of(config: RunConfig, steps: int) -> Iterator[tuple[int, int, RunConfig]]:
    """Yield the stages that the first `steps` steps reach: steps before the stage and up to its end, configuration."""
    begin = 0
    for number, until in enumerate([*(stage.until for stage in config.batch.stages), steps]):
        if (end := min(until, steps)) > begin:
            yield begin, end, in_stage(config, number)
            begin = end


def describe_stages(config: RunConfig) -> list[str]:
    """Return one text per stage that the run reaches, e.g. `steps 1 to 100: 16 sequences of 512 tokens`."""
    texts = []
    for begin, end, one in stages_of(config, config.train.steps):
        span = f"steps {begin + 1:,} to {end:,}" if end > begin + 1 else f"step {end:,}"
        texts.append(f"{span}: {one.batch.global_size:,} sequences of {one.model.sequence:,} tokens")
    return texts


def num_samples(config: RunConfig, steps: int) -> int:
    """Return how many samples of `model.sequence` tokens the first `steps` steps take."""
    return sum(
        (end - begin) * one.batch.global_size * one.model.sequence // config.model.sequence
        for begin, end, one in stages_of(config, steps)
    )


def stage_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the contradictions of stages with the final batch and among themselves, each with the stage's key."""
    size, longest, before = config.batch.global_size, config.model.sequence, 0
    for number, stage in enumerate(config.batch.stages):
        key = f"batch.stages[{number}]"
        if stage.until <= before:
            rule = f"must be above {before}, where the previous stage ends"
            yield Problem(f"{key}.until", stage.until, rule, "list stages in order")
        before = stage.until
        if stage.global_size is not None and stage.global_size > size:
            rule = f"must not exceed batch.global_size = {size}, which memory and plans are made for"
            yield Problem(f"{key}.global_size", stage.global_size, rule, "raise batch.global_size, or lower it")
        sequence = stage.sequence or longest
        if longest % sequence:
            rule = f"must divide model.sequence = {longest}, whose samples are cut"
            yield Problem(f"{key}.sequence", sequence, rule, any_of(divisors_near(longest, sequence)))
        elif (given := stage.global_size or size) % (parts := longest // sequence):
            rule = f"must be a multiple of model.sequence / sequence = {parts}, so that a step takes whole samples"
            yield Problem(f"{key}.global_size", given, rule, any_of(multiples_near(parts, given)))
        if sequence < longest and (config.data.packing.method != "concat" or isinstance(config.data, InstructionsData)):
            rule = "would cut packed documents"
            yield Problem(f"{key}.sequence", sequence, rule, "use null, or data.packing.method=concat")
