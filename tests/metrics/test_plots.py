from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import _pylab_helpers
from matplotlib.image import imread

from pangu.common.errors import UserError
from pangu.metrics.columns import read_columns, smooth
from pangu.metrics.plots import plot_loss

BLUE, ORANGE = (0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E)


def write_run(path: Path, steps: int, **fields: Any) -> Path:
    lines = [
        {"step": step, "tokens": 1000 * step, "loss": 9 * math.exp(-step / 20), "lr": 1e-4}
        for step in range(1, steps + 1)
    ]
    if lines:
        lines[-1] |= fields
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def pixels(png: Path, colour: tuple[int, int, int]) -> int:
    """Number of pixels of exactly this colour."""
    image = (imread(png)[..., :3] * 255).round().astype(int)
    return int((image == colour).all(axis=-1).sum())


def test_curve_and_validation_are_drawn(tmp_path: Path) -> None:
    png = tmp_path / "plots" / "loss.png"
    plot_loss(write_run(tmp_path / "metrics.jsonl", 100), png, "PanGu-α")
    assert pixels(png, BLUE) > 1000
    assert pixels(png, ORANGE) == 0
    plot_loss(write_run(tmp_path / "metrics.jsonl", 100, validation_loss=5.0), png, "PanGu-α")
    assert pixels(png, ORANGE) > 20
    assert _pylab_helpers.Gcf.figs == {}, "a figure was left in pyplot's list"


@pytest.mark.filterwarnings("error")
def test_any_folder_name_will_do_as_title(tmp_path: Path) -> None:
    plot_loss(write_run(tmp_path / "metrics.jsonl", 3), tmp_path / "loss.png", "盘古 $\\frac{ $ run_1")
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_nulls_and_half_lines_are_tolerated(tmp_path: Path) -> None:
    jsonl = write_run(tmp_path / "metrics.jsonl", 100, loss=None, validation_loss=None)
    with jsonl.open("a") as file:
        file.write('{"step": 101, "lo')
    columns = read_columns(jsonl, ("tokens", "loss", "validation_loss"))
    assert columns["tokens"].tolist() == [1000.0 * step for step in range(1, 101)]
    assert np.isfinite(columns["loss"]).sum() == 99
    assert np.isnan(columns["validation_loss"]).all()
    plot_loss(jsonl, tmp_path / "loss.png", "with gaps")
    assert pixels(tmp_path / "loss.png", BLUE) > 1000


@pytest.mark.parametrize("content", [None, "", '{"step": 1, "tokens": 10, "loss": null, "lr": 0.0}\n'])
def test_a_run_without_losses_gives_an_empty_picture(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png", "nothing yet")
    assert pixels(tmp_path / "loss.png", BLUE) == 0


def test_unwritable_picture_is_named(tmp_path: Path) -> None:
    (tmp_path / "plots").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"plots/loss\.png"):
        plot_loss(write_run(tmp_path / "metrics.jsonl", 3), tmp_path / "plots" / "loss.png", "")


def test_smoothing_keeps_a_line_and_calms_noise() -> None:
    line = np.linspace(5, 2, 1000)
    smoothed = smooth(line)
    np.testing.assert_allclose(smoothed[10:-10], line[10:-10])  # no lag, unlike an average over the past
    noise = np.random.default_rng(0).normal(size=1000)
    assert smooth(noise).std() < 0.4 * noise.std()


def test_smoothing_passes_over_gaps() -> None:
    values = np.full(30, 2.0)
    values[7] = math.nan
    smoothed = smooth(values)
    assert math.isnan(smoothed[7])
    np.testing.assert_allclose(np.delete(smoothed, 7), 2.0)


@pytest.mark.parametrize("count", [1, 2, 7, 250, 1001])
def test_smoothing_is_the_mean_of_neighbours(count: int) -> None:
    """A huge value is in the means of its neighbours, and in no others."""
    values, half = np.random.default_rng(0).normal(5, 1, count), max(1, count // 100)
    values[count // 2] = 1e300
    means = [values[max(0, n - half) : n + half + 1].mean() for n in range(count)]
    np.testing.assert_allclose(smooth(values), means, rtol=1e-12)
