"""The pictures of schedules that docs/parallelism.md shows.

python -m tests.schedule.pictures docs/pictures    # draws them
"""

from __future__ import annotations

import sys
from pathlib import Path

from pangu.schedule.actions import Durations
from pangu.schedule.draw import draw
from pangu.schedule.orders import SCHEDULES
from pangu.schedule.schedule import make_schedule
from pangu.schedule.simulate import simulate

STAGES, MICRO_BATCHES = 4, 8


def draw_schedule(name: str, folder: Path) -> Path:
    """Draw a schedule, with two chunks if it takes several; forward and both parts of backward take equal times."""
    least, most = SCHEDULES[name].virtual_stages
    schedule = make_schedule(name, STAGES, least if most is not None else 2, MICRO_BATCHES)
    draw(simulate(schedule, Durations()), folder / name, "simulated")
    (folder / f"{name}.png").unlink()
    return folder / f"{name}.svg"


if __name__ == "__main__":
    for each in SCHEDULES:
        draw_schedule(each, Path(sys.argv[1]))
