"""Pictures of a finished run: its loss curve, pipeline timelines and profile. Needs matplotlib."""

from __future__ import annotations

import logging
from pathlib import Path

from matplotlib.figure import Figure

from pangu.metrics.plots import plot_loss, write_figure
from pangu.schedule.draw import draw
from pangu.schedule.simulate import simulate
from pangu.training.loop import Loop
from pangu.training.profile import PARTS, Profile, durations_of

log = logging.getLogger("pangu")


def draw_run(loop: Loop) -> None:
    """Draw the loss curve and, for a pipeline, the timeline of each stage, into `plots/` of the run folder."""
    output = Path(loop.config.train.output)
    if loop.trainer.mesh.layout.pipeline > 1:
        stages = loop.trainer.stages
        draw(simulate(stages.schedule, stages.durations), output / "plots" / "pipeline", "simulated")
    if loop.profile is not None:
        draw_profile(loop.profile, output / "plots")
    plot_loss(output / "metrics.jsonl", output / "plots" / "loss.png", output.name)


def draw_profile(profile: Profile, folder: Path) -> None:
    """Write profile.png, pipeline_measured.svg and .png, and log how long stages were idle."""
    rows = profile.bars()
    figure = Figure(figsize=(9, 1.7 + 0.25 * len(rows)), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    stops = [0.0] * len(rows)
    for part in PARTS:
        widths = [1000 * row.get(part, 0.0) for row in rows.values()]
        axes.barh(list(rows), widths, left=stops, label=part)
        stops = [stop + width for stop, width in zip(stops, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="time (ms)", title=f"step {profile.step}")
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize="small")
    write_figure(figure, folder / "profile.png")
    timeline = profile.timeline
    draw(timeline, folder / "pipeline_measured", "measured", measured=True)
    simulated = simulate(timeline.schedule, durations_of(timeline))
    log.info(
        "profile: pipeline bubble of %.1f %%; the simulator predicts %.1f %% for the same times",
        100 * timeline.bubble,
        100 * simulated.bubble,
    )
