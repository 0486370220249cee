"""Metrics of one training step: the fields of a line of metrics.jsonl."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pangu.common.errors import printable
from pangu.common.files import open_regular, parse_json

log = logging.getLogger("pangu")

_MOST_NAMED = 5
"""Largest number of damaged lines that a warning names."""
_NULLABLE = "mfu", "loss_scale"
"""Fields that may be null in a line; the others are left out."""


@dataclass(frozen=True)
class StepRecord:
    """Metrics of one optimizer step; the field names are those of metrics.jsonl."""

    step: int
    """Number of optimizer steps so far, including this one."""
    tokens: int
    """Number of tokens seen since the beginning of the run, including this step."""
    loss: float
    """Mean negative log likelihood over the target tokens of the step, in nats."""
    lr: float
    """Learning rate of the step."""
    grad_norm: float
    """Global gradient norm before clipping."""
    step_time_s: float
    """Seconds since the end of the previous step, without validation, evaluation and saving."""
    tokens_per_s: float
    """Throughput over all devices, in tokens per second."""
    tflops_per_device: float
    """Model TFLOP/s per device, not counting recomputation."""
    mfu: float | None
    """Model FLOPs utilization in [0, 1] (Chowdhery et al. 2022, appendix B); None if the peak is unknown."""
    peak_memory_gib: float
    """Peak device memory so far, in GiB."""
    skipped: int
    """Number of steps skipped so far because of a non-finite gradient."""
    loss_scale: float | None
    """Loss scale of the step; None unless the format is fp16."""
    mtp_loss: float | None = None
    """Mean loss of the modules of multi-token prediction, without `loss.mtp_weight`; None without such modules."""
    max_attention_logit: float | None = None
    """Largest attention logit of all heads, without position bias; None unless `optimizer.qk_clip` is set."""
    continued_from: int | None = None
    """Step of the checkpoint that the run was resumed from, or went back to, before this step."""
    rollbacks: int | None = None
    """Number of rollbacks so far, also before a restart; None if there were none."""
    goodput: float | None = None
    """Fraction of the time since the process started that went into steps that count: neither skipped nor undone."""
    failed_saves: int | None = None
    """Number of consecutive failed saves so far; None if the last one succeeded."""
    failed_copies: int | None = None
    """Number of consecutive failed copies in memory so far; None if the last one succeeded."""
    copies_gib: float | None = None
    """Memory that copies in memory take on the node of the first rank, in GiB; None before the first one."""
    copies_sent_gib: float | None = None
    """Data that the first rank sends to its buddy on another node for each of them, in GiB."""
    failed_uploads: int | None = None
    """Number of consecutive failed attempts to copy checkpoints to `checkpoint.remote`; None if there are none."""
    damaged_checkpoints: int | None = None
    """Checkpoints that `checkpoint.verify_every_hours` has found damaged; None if there are none."""
    data_wait_s: float = 0.0
    """Seconds that the first rank waited for its micro-batches, which are read one step ahead."""
    padding: float | None = None
    """Fraction of positions without a token over all replicas; None unless documents are packed into samples."""
    validation_loss: float | None = None
    """Mean negative log likelihood of held-out text in nats, if this step was followed by a validation."""
    validation_perplexity: float | None = None
    """Perplexity of held-out text: exp(`validation_loss`)."""
    validation_sources: dict[str, dict[str, float]] | None = None
    """`loss` and `perplexity` of each source of held-out text, if there are several."""
    evaluation: dict[str, float] | None = None
    """Benchmark scores by name (`afqmc/accuracy`), if this step was followed by an evaluation."""
    trust_ratios: dict[str, float] | None = None
    """LAMB trust ratio of each tensor, if requested; 0 in a skipped step."""
    slow_ranks: dict[int, float] | None = None
    """Ranks slower than `faults.straggler_factor` allows -> their compute time relative to the median."""

    # the losses in `experts` are means over layers and sequences, without their factors.
    experts: dict[str, float] | None = None
    """Largest and least expert `load` relative to the layer mean, fraction of `dropped` choices, and both losses."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields that are not None, and of those that are None the ones that every line has."""
        return {name: value for name, value in vars(self).items() if value is not None or name in _NULLABLE}


def speed(
    tokens: int, seconds: float, flops_per_token: float, num_devices: int, peak_tflops: float | None
) -> dict[str, Any]:
    """Return the fields of a record that say how fast a step was.

    `flops_per_token` counts forward and backward pass of the whole model; `peak_tflops` is per device, None if unknown.
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
    """Return exp(loss), or infinity if a double cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def to_json(record: StepRecord) -> str:
    """Return one line of strict JSON, in which non-finite numbers (as in a step that overflows) are null."""

    # `repr` keeps every digit of a double, so that runs can be compared exactly.
    def finite(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: finite(part) for name, part in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(record.as_dict()), allow_nan=False)


def from_json(line: str) -> dict[str, Any] | None:
    """Return the fields of a line, or None if it is not a complete record, as after a killed run."""
    try:
        fields = parse_json(line)
    except ValueError:
        return None
    step = fields.get("step") if isinstance(fields, dict) else None
    return fields if type(step) is int and step >= 0 else None


def read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the complete records of a metrics.jsonl with their lines, or none if there is no file.

    Warn of damaged lines, once in a process; a kill may cut off the last one. Raise `OSError` if the file cannot be
    read, `UserError` if it is not a regular file.
    """
    if not path.exists() and not path.is_symlink():
        return []
    with open_regular(path, "r", encoding="utf-8", errors="replace") as file:
        lines = [(line, from_json(line)) for line in file.read().split("\n")]
    damaged = [f"{number}" for number, (line, fields) in enumerate(lines[:-1], 1) if line and fields is None]
    if damaged:
        named = ", ".join([*damaged[:_MOST_NAMED], *["..."] * (len(damaged) > _MOST_NAMED)])
        _warn_once(f"{path}: damaged lines skipped: {len(damaged)} (line {named})")
    return [(line, fields) for line, fields in lines if fields is not None]


@cache
def _warn_once(text: str) -> None:
    log.warning("%s: a record is a JSON object whose step is an integer from 0 on", printable(text))


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the complete records of a metrics.jsonl; warn and raise like `read_lines`."""
    return [fields for _, fields in read_lines(path)]
