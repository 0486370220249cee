"""From a configuration to what each pipeline stage holds and does."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pangu.config.errors import ConfigError, Problem
from pangu.config.schema import RunConfig
from pangu.models.language_model import Part
from pangu.models.size import head_flops, layer_flops
from pangu.pipeline.balance import split_layers
from pangu.pipeline.orders import SCHEDULES
from pangu.pipeline.schedule import Schedule, make_schedule
from pangu.pipeline.simulate import Durations
from pangu.topology.layout import Layout


@dataclass(frozen=True)
class Stages:
    """The model cut into chunks, and the schedule of a step."""

    parts: tuple[Part, ...]
    """Chunk -> its part of the model."""
    schedule: Schedule
    durations: Durations
    """Expected times of the chunks' forwards and backwards, in FLOPs for one token."""

    def of(self, stage: int) -> dict[int, Part]:
        """The chunks of one stage."""
        return {chunk: self.parts[chunk] for chunk, at in enumerate(self.schedule.stage_of) if at == stage}


def plan_stages(config: RunConfig, layout: Layout) -> Stages:
    """Cut the model into chunks that take equal time, or as `parallel.layers` says, and make the schedule.

    Raises:
        ConfigError: naming the keys, if the schedule does not allow these numbers or the layers do not fit.
    """
    parallel, chunks = config.parallel, layout.pipeline * layout.virtual
    micro_batches = config.batch.global_size // (config.batch.micro_size * layout.data)
    # the lookup of the embedding takes no time to speak of
    costs = [layer_flops(config.model)] * config.model.layers
    costs[-1] += head_flops(config.model)
    problems = []
    try:
        schedule = make_schedule(parallel.schedule, layout.pipeline, layout.virtual, micro_batches)
    except ValueError as error:
        key = "virtual" if parallel.schedule in SCHEDULES else "schedule"
        problems.append(_problem(key, getattr(parallel, key), error))
    try:
        ranges = split_layers(config.model.layers, chunks, parallel.layers, costs)
    except ValueError as error:
        problems.append(_problem("layers", "null" if parallel.layers is None else list(parallel.layers), error))
    if problems:
        raise ConfigError(problems)
    parts = [Part(layers) for layers in ranges]
    parts[0] = replace(parts[0], first=True)
    parts[-1] = replace(parts[-1], last=True)
    forward = [sum(costs[layer] for layer in layers) for layers in ranges]
    recomputed = config.memory.recomputed_layers
    again = [sum(costs[layer] for layer in layers[:recomputed]) for layers in ranges]
    backward = [once + twice for once, twice in zip(forward, again, strict=True)]
    return Stages(tuple(parts), schedule, Durations(forward, backward, forward))


def _problem(key: str, value: object, error: ValueError) -> Problem:
    """What is wrong with `parallel.KEY`: the error without its first words, which say the value."""
    return Problem(f"parallel.{key}", value, str(error).partition(": ")[2])
