"""Pictures and traces hold what the timeline says."""

from __future__ import annotations

import json
import struct
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from pangu.config.errors import UserError
from pangu.pipeline.draw import draw, write_trace
from pangu.pipeline.schedule import make_schedule
from pangu.pipeline.simulate import Durations, Timeline, simulate


def texts(svg: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


def timeline(name: str, p: int, v: int, m: int) -> Timeline:
    return simulate(make_schedule(name, p, v, m), Durations(1, 1, 1, 0.05))


def test_numbers_stages_and_bubble_are_in_the_picture(tmp_path: Path) -> None:
    drawn = timeline("zb_v", 3, 2, 4)
    draw(drawn, tmp_path / "plots" / "pipeline", "simulated")
    found = Counter(texts(tmp_path / "plots" / "pipeline.svg"))
    for micro in range(4):
        assert found[f"{micro}a"] == found[f"{micro}b"] == 3 * 3  # F, I and W on each stage
    assert {
        "stage 0",
        "stage 1",
        "stage 2",
        "time (% of the step)",
        "3b: micro-batch 3, second chunk",
    } <= set(found)
    assert {"forward", "backward for the input", "backward for the weights"} <= set(found)
    assert "backward" not in found
    assert "zb_v, 3 stages of 2 chunks, 4 micro-batches, simulated" in found
    assert f"bubble {drawn.bubble:.1%} ({2 / 26:.1%} by formula for equal times)" in found
    assert (tmp_path / "plots" / "pipeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("zb_v", 2)])
def test_title_and_legend_are_inside_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, v: int
) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (figures.append(figure), save(figure, *a, **k)))
    draw(timeline(name, 2, v, 4), tmp_path / "pipeline", "simulated")
    figure = figures[0]
    boxes = [part.get_window_extent() for part in [figure.axes[0]._left_title, *figure.legends]]
    assert len(boxes) == 2
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)


def test_sixteen_stages_and_sixty_four_micro_batches_have_room(tmp_path: Path) -> None:
    draw(timeline("1f1b", 16, 1, 64), tmp_path / "pipeline", "simulated")
    found = Counter(texts(tmp_path / "pipeline.svg"))
    assert all(found[str(micro)] >= 2 * 16 for micro in range(64))
    width, height = struct.unpack(">II", (tmp_path / "pipeline.png").read_bytes()[16:24])
    assert width / (3 * (64 + 15)) > 20  # pixels per forward
    assert height / 16 > 45  # pixels per stage


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"part of the path is a file|a file of that name is in the way"):
        draw(timeline("gpipe", 1, 1, 1), tmp_path / "file" / "pipeline", "simulated")


def test_a_trace_has_every_event(tmp_path: Path) -> None:
    drawn = timeline("interleaved", 2, 2, 3)
    write_trace(drawn, tmp_path / "plots" / "trace.json")
    records = json.loads((tmp_path / "plots" / "trace.json").read_text())["traceEvents"]
    spans = [record for record in records if record["ph"] == "X"]
    found = [(span["tid"], span["cat"], span["args"]["micro"], span["ts"], span["dur"]) for span in spans]
    computing = [event for events in drawn.computing for event in events]
    assert sorted(found) == sorted(
        (stage, str(action.kind), action.micro, start * 1e6, (stop - start) * 1e6)
        for stage, action, start, stop in computing
    )
    begun = {record["id"]: record["ts"] for record in records if record["ph"] == "b"}
    ended = {record["id"]: record["ts"] for record in records if record["ph"] == "e"}
    assert begun.keys() == ended.keys()
    assert len(begun) == len(drawn.events) - len(spans) > 0
    assert all(ended[number] - begun[number] == pytest.approx(0.05e6) for number in begun)
    assert [record["args"]["name"] for record in records if record["ph"] == "M"] == ["stage 0", "stage 1"]
