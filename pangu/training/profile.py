"""Steps whose actions are recorded: a picture of what each stage did when, and the search for slow ranks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median_low

import torch

from pangu.collectives.reduce import all_reduce, gather_objects
from pangu.data.batch import Batch
from pangu.pipeline.actions import COMPUTE, Durations, Kind
from pangu.pipeline.simulate import simulate
from pangu.pipeline.timeline import Timeline
from pangu.training.step import Trainer

log = logging.getLogger("pangu")


def record_step(trainer: Trainer, micro_batches: Sequence[Batch]) -> Timeline:
    """`trainer.forward_backward`, and on every rank what the stages of its pipeline did, in seconds from a common
    start."""
    runner, group = trainer.runner, trainer.mesh.group("pipeline")
    # clocks of different machines differ: the stages begin together, and each counts from there
    all_reduce(torch.zeros((), device=trainer.mesh.device), group)
    runner.events = []
    began = runner.now()
    trainer.forward_backward(micro_batches)
    events = [event._replace(start=event.start - began, stop=event.stop - began) for event in runner.events]
    runner.events = None
    of_all_stages = tuple(event for stage in gather_objects(events, group) for event in stage)
    return Timeline(trainer.stages.schedule, of_all_stages)


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


def draw_profile(timeline: Timeline, folder: Path) -> None:
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


def find_stragglers(trainer: Trainer, micro_batches: Sequence[Batch], factor: float) -> dict[int, float]:
    """`trainer.forward_backward`, and the stragglers, which are named in the log.

    Compared is the time that forwards and backwards take, waiting for other stages not included, per FLOP of the layers
    that a rank has. As in a profiled step, an accelerator finishes each action before the next is begun.
    """
    runner, schedule = trainer.runner, trainer.stages.schedule
    runner.events = []
    trainer.forward_backward(micro_batches)
    events = [event for event in runner.events if event.action.kind in COMPUTE]
    runner.events = None
    durations = trainer.stages.durations.per_chunk(len(schedule.stage_of))
    flops = sum(durations[event.action.kind][event.action.chunk] for event in events)
    seconds = sum(event.stop - event.start for event in events)
    stragglers = above_median(gather_objects(seconds / flops, trainer.mesh.group("world")), factor)
    for rank, times in stragglers.items():
        log.warning("step %d: rank %d computes %.1f times as long as the median rank", trainer.step + 1, rank, times)
    return stragglers


def above_median(seconds: Sequence[float], factor: float) -> dict[int, float]:
    """Ranks whose time is more than `factor` times the median, of an even number the lower one, and how many times."""
    median = median_low(seconds)
    return {rank: time / median for rank, time in enumerate(seconds) if time > factor * median}
