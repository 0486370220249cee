"""Pictures and traces hold what the timeline says."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from pangu.common.errors import UserError
from pangu.schedule.actions import Durations
from pangu.schedule.draw import MARKERS, draw
from pangu.schedule.schedule import make_schedule
from pangu.schedule.simulate import gaps, simulate
from pangu.schedule.timeline import Timeline


def texts(svg: Path) -> list[str]:
    return [element.text or "" for element in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]


def timeline(name: str, p: int, v: int, m: int) -> Timeline:
    return simulate(make_schedule(name, p, v, m), Durations(1, 1, 1, 0.05))


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What is drawn, laid out but neither rendered nor written, which takes most of the time."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: found.append(figure))
    return found


def test_numbers_stages_and_bubble_are_in_the_picture(tmp_path: Path) -> None:
    drawn = timeline("zb_v", 3, 2, 4)
    draw(drawn, tmp_path / "plots" / "pipeline", "simulated")
    found = Counter(texts(tmp_path / "plots" / "pipeline.svg"))
    for micro in range(4):
        awaited = [found[f"{micro}{chunk} from stage {stage}"] for chunk in "ab" for stage in range(3)]
        short = [gap for gap in gaps(drawn, measured=False) if gap.awaited and gap.awaited[2] == micro]
        # F, I and W of both chunks on each stage, and what is waited for, if there is room
        boxes = found[f"{micro}a"] + found[f"{micro}b"]
        assert 2 * 3 * 3 <= boxes <= 2 * 3 * 3 + len(short) - sum(awaited)
    assert {"stage 0", "stage 1", "stage 2", "time (% of the step)"} <= set(found)
    assert {"forward", "backward for the input", "backward for the weights"} <= set(found)
    assert {"3b: micro-batch 3, the stage's second chunk"} <= set(found)
    assert "backward" not in found
    assert "zb_v, 3 stages of 2 chunks, 4 micro-batches, simulated" in found
    assert f"bubble {drawn.bubble:.1%} ({2 / 26:.1%} by formula for equal times)" in found
    assert (tmp_path / "plots" / "pipeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_it_says_what_a_stage_waits_for(tmp_path: Path, figures: list[Figure]) -> None:
    draw(timeline("1f1b", 3, 1, 3), tmp_path / "pipeline", "simulated")
    axes = figures[0].axes[0]
    waits = [text.get_text() for text in axes.texts if "from" in text.get_text()]
    # stage 2 waits for both forwards before it, stages 0 and 1 for the first gradient; then each for the next ones
    assert waits.count("0 from stage 1") == 2
    assert waits.count("0 from stage 2") == 1
    named = {text.get_text() for legend in figures[0].legends for text in legend.get_texts()}
    expected = {"waiting for an activation", "waiting for a gradient", "no work left", "3: micro-batch 3"}
    assert expected | {"sent to a stage above", "sent to a stage below"} <= named
    assert "other work" not in named


@pytest.mark.parametrize(("name", "v"), [("1f1b", 1), ("interleaved", 2), ("zb_v", 2)])
def test_every_message_has_a_mark_that_points_to_its_receiver(
    tmp_path: Path, figures: list[Figure], name: str, v: int
) -> None:
    drawn = timeline(name, 3, v, 4)
    draw(drawn, tmp_path / "pipeline", "simulated")
    marked = [
        (int(stage), height == MARKERS["v"][1])
        for marks in figures[0].axes[0].collections
        if isinstance(marks, PathCollection)
        for _, y in marks.get_offsets().tolist()
        for stage, height in [(y // 1, round(y % 1, 6))]
    ]
    sent = [(event.stage, event.action.peer > event.stage) for event in drawn.events if event.action.peer is not None]
    assert Counter(marked) == Counter(sent)
    assert sent


@pytest.mark.parametrize(("name", "v", "measured"), [("1f1b", 1, False), ("1f1b", 1, True), ("zb_v", 2, True)])
def test_title_and_legends_are_inside_the_picture(
    tmp_path: Path, figures: list[Figure], name: str, v: int, measured: bool
) -> None:
    draw(timeline(name, 2, v, 4), tmp_path / "pipeline", "simulated", measured)
    figure = figures[0]
    assert ("other work" in {text.get_text() for text in figure.legends[1].get_texts()}) == measured
    figure.draw_without_rendering()  # places the axis's label
    boxes = [
        part.get_window_extent()
        for part in [*figure.legends, figure.axes[0].xaxis.label, figure.axes[0]._left_title]  # type: ignore[attr-defined]
    ]
    assert len(boxes) == 4
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)
    assert all(box.y0 >= 0 and box.y1 <= figure.bbox.height for box in boxes)
    upper, lower, *_ = boxes
    assert lower.y1 <= upper.y0


def test_sixteen_stages_and_sixty_four_micro_batches_have_room(tmp_path: Path, figures: list[Figure]) -> None:
    draw(timeline("1f1b", 16, 1, 64), tmp_path / "pipeline", "simulated")
    axes = figures[0].axes[0]
    found = Counter(text.get_text() for text in axes.texts)
    assert all(found[str(micro)] >= 2 * 16 for micro in range(64))
    room = axes.get_window_extent()  # in pixels of the PNG
    assert room.width / (3 * (64 + 15)) > 20  # per forward
    assert room.height / 16 > 45  # per stage


def test_chunks_behind_the_twenty_sixth_have_two_letters(tmp_path: Path, figures: list[Figure]) -> None:
    draw(timeline("interleaved", 1, 28, 1), tmp_path / "pipeline", "simulated")
    assert {"0a", "0z", "0aa", "0ab"} <= {text.get_text() for text in figures[0].axes[0].texts}


def test_a_picture_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"part of the path is a file|a file with that name exists"):
        draw(timeline("gpipe", 1, 1, 1), tmp_path / "file" / "pipeline", "simulated")
