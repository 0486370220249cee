"""Where the figures of a run go. Only one process of a run makes writers."""

from __future__ import annotations

import math
import statistics
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

from pangu.config.errors import writing
from pangu.config.files import flush, open_regular, write_atomically
from pangu.config.schema import MetricsConfig
from pangu.metrics.record import StepRecord, from_json, read_lines, to_json
from pangu.metrics.text import compact, duration


class Writer(Protocol):
    """Takes the figures of every step."""

    def write(self, record: StepRecord) -> None:
        """Take one step's figures. Steps come in ascending order."""

    def close(self) -> None:
        """Finish; nothing is written afterwards."""


class ForecastWriter(Writer, Protocol):
    """Compares the steps with what they were expected to take."""

    def as_dict(self) -> dict[str, Any]:
        """Return what was expected, seconds of each part of a step as `terms_s`, and what was measured."""


class ConsoleWriter:
    """A progress line for the first and every `every`-th step, the last one, and every validation and evaluation."""

    def __init__(self, every: int, total_steps: int, console: Console | None = None) -> None:
        self._every = every
        self._total_steps = total_steps
        self._recent_s: deque[float] = deque(maxlen=50)
        self._first = True
        # rich leaves colours out when the output is a file or a pipe.
        self._console = console or Console(highlight=False)

    def write(self, record: StepRecord) -> None:
        """Print the step's line if it is due."""
        self._recent_s.append(record.step_time_s)
        # the median of recent steps, which a checkpoint or a warm-up does not disturb
        seconds_left = statistics.median(self._recent_s) * max(0, self._total_steps - record.step)
        measured = record.validation_loss is not None or record.evaluation is not None
        due = record.step % self._every == 0 or record.step == self._total_steps or measured
        if due or self._first:
            self._console.print(progress_line(record, self._total_steps, seconds_left), soft_wrap=True)
        self._first = False

    def close(self) -> None:
        """Nothing is held open."""


def progress_line(record: StepRecord, total_steps: int, seconds_left: float) -> Text:
    """`step 120/400 | loss 5.1234 | lr 1.00e-04 | grad norm 0.912 | 12.3k tokens/s | MFU 38.2 % | 4.20 GiB | ...`."""
    parts = [
        (f"step {record.step:>{len(str(total_steps))}}/{total_steps}", ""),
        (f"loss {record.loss:.4f}", "bold" if math.isfinite(record.loss) else "bold red"),
        (f"lr {record.lr:.2e}", ""),
        (f"grad norm {record.grad_norm:.3f}", "" if math.isfinite(record.grad_norm) else "red"),
        (f"{compact(record.tokens_per_s)} tokens/s", ""),
        (f"MFU {'n/a' if record.mfu is None else f'{100 * record.mfu:.1f} %'}", ""),
        (f"{record.peak_memory_gib:.2f} GiB", ""),
        (f"left {duration(seconds_left)}", ""),
    ]
    if record.loss_scale is not None:
        parts.append((f"scale {record.loss_scale:g}", ""))
    if record.padding is not None:
        parts.append((f"padding {100 * record.padding:.1f} %", ""))
    if record.skipped:
        parts.append((f"skipped {record.skipped}", "yellow"))
    if record.validation_loss is not None:
        text = f"validation loss {record.validation_loss:.4f} (perplexity {record.validation_perplexity:.2f})"
        parts.append((text, "bold cyan"))
    for name, figures in (record.validation_sources or {}).items():
        parts.append((f"{name} {figures['loss']:.4f} ({figures['perplexity']:.2f})", "cyan"))
    parts += [(f"{name} {figure:.2f}", "cyan") for name, figure in (record.evaluation or {}).items()]
    return Text(" | ").join(Text(text, style) for text, style in parts)


class JsonLinesWriter:
    """metrics.jsonl: one JSON object per step, which others can read as soon as it is written. It is on the disk once
    the file is flushed, as a run does before each checkpoint."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        """Keeps the lines of a file that is there up to `resumed_step`; later ones, and a line that a killed process
        left half-written, are dropped, because those steps will be made again.

        Raises UserError if the file cannot be written.
        """
        self._path = path
        with writing(path):
            lines = read_lines(path)
            lines = [line for line in lines if (fields := from_json(line)) and fields["step"] <= resumed_step]
            # Replaced in one go: a crash here must not lose what the run has measured so far.
            write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
            flush(path.parent)
            self._file = open_regular(path, "a", encoding="utf-8")

    def write(self, record: StepRecord) -> None:
        """Append the step's line. Raises UserError if the disk is full."""
        with writing(self._path):
            self._file.write(to_json(record) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with writing(self._path):
            self._file.close()


def make_writers(
    config: MetricsConfig, output: Path, total_steps: int, resumed_step: int, resolved_config: dict[str, Any]
) -> list[Writer]:
    """The writers that a configuration asks for, writing into the run folder `output`.

    `resumed_step` is the step of the checkpoint that the run continues from, 0 for a new run; `resolved_config` is what
    wandb shows as configuration. Raises UserError if the run folder cannot be written.
    """
    with writing(output):
        output.mkdir(parents=True, exist_ok=True)
    writers: list[Writer] = [
        JsonLinesWriter(output / "metrics.jsonl", resumed_step),
        ConsoleWriter(config.every, total_steps),
    ]
    if config.tensorboard:
        from pangu.metrics.trackers import TensorBoardWriter

        writers.append(TensorBoardWriter(output / "tensorboard", resumed_step))
    if config.wandb != "off":
        from pangu.metrics.trackers import WandbWriter

        writers.append(WandbWriter(output, config.wandb, config.wandb_project, resumed_step, resolved_config))
    return writers
