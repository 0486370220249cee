"""One step of a run, recorded: what each stage did when, beside what the simulator makes of the same times."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch

from pangu.collectives.reduce import all_reduce, gather_objects
from pangu.data.batch import Batch
from pangu.pipeline.actions import Kind
from pangu.pipeline.simulate import Durations, Timeline, simulate
from pangu.training.step import StepResult, Trainer

log = logging.getLogger("pangu")


def record_step(trainer: Trainer, micro_batches: Sequence[Batch]) -> tuple[StepResult, Timeline]:
    """`trainer.train_step`, and on every rank what the stages of its pipeline did, in seconds from a common start."""
    runner, group = trainer.runner, trainer.mesh.group("pipeline")
    # clocks of different machines differ: the stages begin together, and each counts from there
    all_reduce(torch.zeros((), device=trainer.mesh.device), group)
    runner.events = []
    began = runner.now()
    result = trainer.train_step(micro_batches)
    own = [event._replace(start=event.start - began, stop=event.stop - began) for event in runner.events]
    runner.events = None
    events = tuple(event for stage in gather_objects(own, group) for event in stage)
    return result, Timeline(trainer.stages.schedule, events)


def durations_of(timeline: Timeline) -> Durations:
    """Mean times of the chunks' actions in a measured step, for the simulator."""
    times: dict[tuple[Kind, int], list[float]] = {}
    for event in timeline.events:
        times.setdefault((event.action.kind, event.action.chunk), []).append(event.stop - event.start)
    chunks = range(len(timeline.schedule.stage_of))

    def mean(*kinds: Kind) -> list[float]:
        return [sum(fmean(times[kind, chunk]) for kind in kinds if (kind, chunk) in times) for chunk in chunks]

    # a whole backward is entered as one for the input: the simulator adds the two
    return Durations(mean(Kind.FORWARD), mean(Kind.BACKWARD, Kind.BACKWARD_INPUT), mean(Kind.BACKWARD_WEIGHT))


def show(timeline: Timeline, folder: Path) -> None:
    """Write pipeline_measured.svg, .png and .json (a trace for ui.perfetto.dev) and say what was idle."""
    from pangu.pipeline.draw import draw, write_trace  # and matplotlib with it, which only this function needs

    draw(timeline, folder / "pipeline_measured", "measured", measured=True)
    write_trace(timeline, folder / "pipeline_measured.json")
    expected = simulate(timeline.schedule, durations_of(timeline))
    log.info(
        "profile: stages were idle %.1f %% of the step's forwards and backwards; the simulator says %.1f %% for the "
        "same times",
        100 * timeline.bubble,
        100 * expected.bubble,
    )
