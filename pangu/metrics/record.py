"""One training step in figures: what a line of metrics.jsonl holds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypedDict

from pangu.config.files import open_regular, parse_json

_OPTIONAL = ("validation_", "evaluation", "trust_", "slow_", "experts", "padding", "continued_", "failed_")
"""Beginnings of the fields that a line lacks if there is nothing to say."""


@dataclass(frozen=True)
class StepRecord:
    """The figures of one optimizer step. The field names are those of metrics.jsonl."""

    step: int
    """Optimizer steps made, this one included."""
    tokens: int
    """Tokens seen since the beginning of the run, this step's included."""
    loss: float
    """Mean negative log likelihood (nats) over the step's target tokens."""
    lr: float
    """Learning rate that the step used."""
    grad_norm: float
    """Global gradient norm before clipping."""
    step_time_s: float
    """Seconds from the end of the step before, without validation, evaluation and saving: all that a device was given
    to do."""
    tokens_per_s: float
    """Tokens per second over all devices."""
    tflops_per_device: float
    """Model TFLOP/s of one device: what the model needs, without recomputation."""
    mfu: float | None
    """Model FLOPs utilisation in [0, 1] (Chowdhery et al. 2022, appendix B); None where the peak is unknown."""
    peak_memory_gib: float
    """Most device memory used so far."""
    skipped: int
    """Steps skipped so far because a gradient was not finite."""
    loss_scale: float | None
    """Loss scale of the step; None unless the format is fp16."""
    continued_from: int | None = None
    """Step of the checkpoint that the run went on from before this step: it was started again, or went back."""
    failed_saves: int | None = None
    """Saves in a row that had failed by then, if any."""
    data_wait_s: float = 0.0
    """Seconds of the step in which the first rank waited for its micro-batches, which are read one step ahead."""
    padding: float | None = None
    """Share of the step's positions, over all replicas, that hold no token, where documents are packed into samples."""
    validation_loss: float | None = None
    """Mean negative log likelihood of held-out text, if this step was followed by a validation."""
    validation_perplexity: float | None = None
    """exp(`validation_loss`)."""
    validation_sources: dict[str, dict[str, float]] | None = None
    """`loss` and `perplexity` of each source of held-out text by itself, if there are several."""
    evaluation: dict[str, float] | None = None
    """Figures of benchmarks (`afqmc/accuracy`), if this step was followed by an evaluation."""
    trust_ratios: dict[str, float] | None = None
    """LAMB's ratio of each tensor, 0 in a step that was skipped, if asked for."""
    slow_ranks: dict[int, float] | None = None
    """Ranks that computed longer than `faults.slow_factor` allows, and how many times the median."""

    experts: dict[str, float] | None = None
    """Of a model with experts: the largest `load` of an expert and the least over the mean of its layer, the share of
    choices that were `dropped`, and the means over layers and sequences of both losses, without their factors."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields; those of padding, validation and benchmarks, the ratios, slow ranks, experts, a checkpoint
        and failed saves are left out if there are none."""
        return {
            name: value for name, value in asdict(self).items() if value is not None or not name.startswith(_OPTIONAL)
        }


class Speed(TypedDict):
    """The fields of a record that say how fast a step was."""

    step_time_s: float
    tokens_per_s: float
    tflops_per_device: float
    mfu: float | None


def speed(tokens: int, seconds: float, flops_per_token: float, num_devices: int, peak_tflops: float | None) -> Speed:
    """How fast a step was that saw `tokens` tokens, over all devices.

    `flops_per_token`: forward and backward of the whole model; `peak_tflops`: of one device, None if unknown.
    """
    rate = tokens / seconds
    tflops = rate * flops_per_token / num_devices / 1e12
    return {
        "step_time_s": seconds,
        "tokens_per_s": rate,
        "tflops_per_device": tflops,
        "mfu": None if peak_tflops is None else tflops / peak_tflops,
    }


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a double cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def to_json(record: StepRecord) -> str:
    """One line of strict JSON. Floats keep every digit of their double (`repr`), so that runs can be compared exactly.

    JSON has no word for infinity and NaN, which appear when a step overflows: they are written as null.
    """

    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(part) for name, part in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(record.as_dict()), allow_nan=False)


def from_json(line: str) -> dict[str, Any] | None:
    """The fields of one line, or None if it is not a whole record, as the last line of a killed run may be."""
    try:
        fields = parse_json(line)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) and isinstance(fields.get("step"), int) else None


def read_lines(path: Path) -> list[str]:
    """The lines of a metrics.jsonl, whole or not; none of a file that does not exist. Raises OSError, and UserError if
    it is no regular file."""
    if not path.exists() and not path.is_symlink():
        return []
    with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
        return file.read().splitlines()


def read_records(path: Path) -> list[dict[str, Any]]:
    """The whole records of a metrics.jsonl. Raises as `read_lines`."""
    return [fields for line in read_lines(path) if (fields := from_json(line)) is not None]
