from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pangu.common.errors import UserError
from pangu.config.schema import MetricsConfig
from pangu.metrics.columns import read_columns
from pangu.metrics.record import StepRecord, to_json
from pangu.metrics.trackers import TensorBoardWriter, TrackerWriter
from pangu.metrics.writers import ConsoleWriter, JsonLinesWriter, make_writers, progress_line

Make = Callable[..., StepRecord]


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_progress_line_says_all_a_person_wants_to_know(record: Make) -> None:
    line = progress_line(record(), total_steps=4000, seconds_left=11_220).plain
    assert line == (
        "step  120/4000 | loss 5.1235 | lr 1.00e-04 | grad norm 0.912 | 12.3k tokens/s | MFU 38.2 % | 23.10 GiB"
        " | left 3 h 07 min"
    )
    special = record(mfu=None, loss_scale=65536.0, skipped=2, validation_loss=2.0, validation_perplexity=7.389)
    line = progress_line(special, total_steps=4000, seconds_left=0).plain
    assert "| MFU n/a |" in line
    assert line.endswith("| scale 65536 | skipped 2 | validation loss 2.0000 (perplexity 7.39)")
    sources = {"web": {"loss": 2.1, "perplexity": 8.166}}
    line = progress_line(record(padding=0.0042, validation_sources=sources), total_steps=4000, seconds_left=0).plain
    assert line.endswith("| padding 0.4 % | web 2.1000 (8.17)")
    assert "loss nan" in progress_line(record(loss=math.nan), 4000, 0).plain


def test_console_prints_first_every_nth_last_and_validated_steps(record: Make) -> None:
    out = io.StringIO()
    writer = ConsoleWriter(every=10, total_steps=34, console=Console(file=out, width=40))
    for step in range(3, 35):
        writer.write(record(step=step, validation_loss=1.0 if step == 25 else None, validation_perplexity=math.e))
    writer.close()
    lines = out.getvalue().splitlines()  # one line each, however narrow the terminal
    assert [line.split("/")[0] for line in lines] == [f"step {step:>2}" for step in (3, 10, 20, 25, 30, 34)]
    assert lines[1].endswith("left 48 s")  # 24 steps of 2 s


def test_time_left_is_the_median_of_recent_steps(record: Make) -> None:
    """A slow step does not disturb it, and it follows a lasting change of speed."""
    out = io.StringIO()
    writer = ConsoleWriter(every=1, total_steps=200, console=Console(file=out, width=200))
    for step, seconds in enumerate([60.0, *[1.0] * 49, *[2.0] * 50], start=1):
        writer.write(record(step=step, step_time_s=seconds))
    left = [line.rpartition("left ")[2] for line in out.getvalue().splitlines()]
    assert (left[0], left[2], left[-1]) == ("3 h 19 min", "3 min 17 s", "3 min 20 s")


def test_console_has_colours_only_on_a_terminal(record: Make, capsys: pytest.CaptureFixture[str]) -> None:
    ConsoleWriter(every=1, total_steps=1).write(record())
    assert "loss 5.1235" in (text := capsys.readouterr().out)
    assert "\x1b" not in text
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, color_system="standard", highlight=False)
    ConsoleWriter(every=1, total_steps=1, console=terminal).write(record())
    assert "\x1b[1mloss 5.1235" in out.getvalue()


def test_every_step_is_on_disk_as_soon_as_it_is_written(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    for step in (1, 2):
        writer.write(record(step=step, loss=1 / 3))
        assert steps_of(path) == list(range(1, step + 1))
    assert '"loss": 0.3333333333333333,' in path.read_text()
    writer.close()


def test_resume_drops_later_steps_and_a_half_written_line(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonLinesWriter(path)
    for step in range(1, 6):
        writer.write(record(step=step))
    writer.close()
    kept = path.read_text().splitlines(keepends=True)[:3]
    with path.open("a") as file:
        file.write('{"step": 2, "tokens": 4')

    resumed = JsonLinesWriter(path, resumed_step=3)
    assert path.read_text() == "".join(kept)
    resumed.write(record(step=4))
    resumed.close()
    assert steps_of(path) == [1, 2, 3, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_new_run_in_an_old_folder_begins_a_new_file(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        writer = JsonLinesWriter(path)
        writer.write(record(step=1))
        writer.close()
    assert steps_of(path) == [1]


def test_unwritable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the folder should be")
    with pytest.raises(UserError, match=r"run/metrics\.jsonl"):
        JsonLinesWriter(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(UserError, match="run/tensorboard"):
        TensorBoardWriter(tmp_path / "run" / "tensorboard")
    with pytest.raises(UserError, match=rf"{tmp_path}/run\b"):
        make_writers(MetricsConfig(1, False, "off", "p", False), tmp_path / "run", 10, 0, {})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_disk_that_fills_up_is_reported_as_such(tmp_path: Path, record: Make, monkeypatch: Any) -> None:
    writer = JsonLinesWriter(tmp_path / "metrics.jsonl")
    full = Path("/dev/full").open("a")  # noqa: SIM115
    monkeypatch.setattr(writer, "_file", full)
    with pytest.raises(UserError, match=r"metrics\.jsonl: the disk is full"):
        writer.write(record())
    with pytest.raises(UserError, match=r"metrics\.jsonl: the disk is full"):
        writer.close()


def test_tensorboard_shows_a_resumed_run_as_one(tmp_path: Path, record: Make) -> None:
    writer = TensorBoardWriter(tmp_path)
    for step in (1, 2, 3):
        writer.write(record(step=step, loss=float(step), mfu=None))
    writer.close()
    resumed = TensorBoardWriter(tmp_path, resumed_step=2)
    resumed.write(record(step=3, loss=30.0, mfu=None, validation_loss=2.0, validation_perplexity=7.4))
    resumed.close()

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert [event.step for event in events.Scalars("validation/loss")] == [3]
    assert "speed/mfu" not in events.Tags()["scalars"]


@pytest.mark.parametrize(
    ("tensorboard", "wandb", "kinds"),
    [
        (False, "off", [JsonLinesWriter, ConsoleWriter]),
        (True, "off", [JsonLinesWriter, ConsoleWriter, TensorBoardWriter]),
        (False, "offline", [JsonLinesWriter, ConsoleWriter, TrackerWriter]),
    ],
)
def test_configuration_chooses_the_writers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensorboard: bool,
    wandb: Literal["offline", "off"],
    kinds: list[type],
) -> None:
    monkeypatch.setattr(TrackerWriter, "_work", lambda *_: None)
    output = tmp_path / "new" / "run"
    (tmp_path / "new").mkdir()
    writers = make_writers(
        MetricsConfig(5, tensorboard, wandb, "project", False), output, 100, 0, {"model": {"layers": 2}}
    )
    assert [type(writer) for writer in writers] == kinds
    for writer in writers:
        writer.close()
    assert (output / "metrics.jsonl").exists()
    assert (output / "tensorboard").exists() == tensorboard


@pytest.mark.parametrize("name", ["metrics.jsonl", ".metrics.jsonl.{pid}.tmp"])
def test_a_planted_link_is_not_followed(tmp_path: Path, record: Make, name: str) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name.format(pid=os.getpid())).symlink_to(tmp_path / "mine")
    if name == "metrics.jsonl":
        with pytest.raises(UserError, match=r"metrics\.jsonl: is a symbolic link"):
            JsonLinesWriter(tmp_path / "run" / "metrics.jsonl")
    else:
        writer = JsonLinesWriter(tmp_path / "run" / "metrics.jsonl")
        writer.write(record())
        writer.close()
    assert (tmp_path / "mine").read_text() == "mine"


def test_lines_of_others_are_passed_over(tmp_path: Path, record: Make) -> None:
    path = tmp_path / "metrics.jsonl"
    kept = to_json(record(step=1))
    path.write_text("\n".join(["[" * 9999, kept, '{"step": "1"}', '{"step": 1, "loss": [1], "tokens": "x"}']))
    JsonLinesWriter(path, resumed_step=1).close()
    assert len(path.read_text().splitlines()) == 2
    columns = read_columns(path, ("tokens", "loss"))
    assert [math.isnan(value) for value in columns["loss"]] == [False, True]
