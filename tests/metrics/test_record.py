from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.metrics.record import StepRecord, from_json, perplexity, read_records, speed, to_json
from pangu.metrics.trackers import tracked

from .conftest import RECORD

Make = Callable[..., StepRecord]


def test_a_line_holds_the_promised_fields(record: Make) -> None:
    promised = ["step", "tokens", "loss", "lr", "grad_norm", "step_time_s", "tokens_per_s", "tflops_per_device", "mfu"]
    promised += ["peak_memory_gib", "skipped", "loss_scale", "data_wait_s"]
    assert list(json.loads(to_json(record()))) == promised
    validated = record(validation_loss=2.0, validation_perplexity=math.e**2)
    assert list(json.loads(to_json(validated))) == [*promised, "validation_loss", "validation_perplexity"]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_come_back_bit_for_bit(loss: float) -> None:
    fields = RECORD.as_dict() | {"loss": loss}
    read = from_json(to_json(StepRecord(**fields)))
    assert read is not None
    assert math.copysign(1, read["loss"]) == math.copysign(1, loss)
    assert read == fields


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_strict_parsers_can_read_a_step_that_overflowed(record: Make, value: float) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    line = to_json(record(loss=value, grad_norm=value, validation_loss=value))
    read = json.loads(line, parse_constant=refuse)
    assert read["loss"] is None
    assert read["grad_norm"] is None
    assert read["validation_loss"] is None
    assert read["lr"] == 1e-4


def test_only_the_end_of_a_line_separates_records(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """JSON allows other separators of lines in texts; only a last line without its end may be cut off."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "a": "b\u2028c"}\n{"step": 2}\n', encoding="utf-8")
    assert [fields["step"] for fields in read_records(tmp_path / "metrics.jsonl")] == [1, 2]
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo')
    assert len(read_records(tmp_path / "metrics.jsonl")) == 1
    assert not caplog.messages
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "lo\n')
    assert len(read_records(tmp_path / "metrics.jsonl")) == 1
    assert "damaged lines skipped: 1 (line 2): " in caplog.text


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        '{"step": 3, "lo',
        "[1]",
        "3",
        "null",
        '{"loss": 1.0}',
        '{"step": null}',
        '{"step": NaN}',
        '{"step": -1}',
        '{"step": true}',
    ],
)
def test_what_is_not_a_whole_record_is_none(line: str) -> None:
    assert from_json(line) is None


def test_trackers_get_every_field_but_the_step_and_nothing_unknown(record: Make) -> None:
    nested = {"trust_ratios": {"w": 0.25}, "slow_ranks": {3: 1.75}, "evaluation": {"c3/accuracy": 50.5}}
    nested |= {"experts": {"load": 1.5}, "validation_sources": {"web": {"loss": 2.5, "perplexity": 12.25}}}
    plain_figures = {"padding": 0.125, "continued_from": 119, "validation_loss": 2.0, "validation_perplexity": 7.4}
    plain_figures |= {
        "failed_saves": 2,
        "failed_copies": 1,
        "copies_gib": 6.5,
        "copies_sent_gib": 1.25,
        "failed_uploads": 1,
        "damaged_checkpoints": 3,
        "rollbacks": 4,
        "goodput": 0.75,
        "mtp_loss": 5.5,
        "max_attention_logit": 88.5,
    }
    full = record(loss_scale=65536.0, **plain_figures, **nested)
    plain = [value for name, value in full.as_dict().items() if name not in ("step", *nested) and value is not None]
    assert sorted(tracked(full).values()) == sorted([*plain, 0.25, 1.5, 1.75, 50.5, 2.5, 12.25])
    assert (tracked(full)["trust_ratio/w"], tracked(full)["slow_rank/3"]) == (0.25, 1.75)
    assert tracked(full)["evaluation/c3/accuracy"] == 50.5
    assert len(tracked(full)) == len(fields(StepRecord)) - 1 + 1  # a source has two figures
    assert tracked(full)["validation/web/loss"] == 2.5
    assert tracked(full)["train/padding"] == 0.125
    assert "speed/mfu" not in tracked(record(mfu=None))
    assert tracked(full)["validation/loss"] == 2.0


def test_rates_by_hand() -> None:
    """2000 tokens a second, of 6 GFLOP each, on 4 devices: 3 TFLOP/s each."""
    figures = speed(1000, 0.5, flops_per_token=6e9, num_devices=4, peak_tflops=10.0)
    assert (figures["step_time_s"], figures["tokens_per_s"]) == (0.5, 2000)
    assert figures["tflops_per_device"] == pytest.approx(3)
    assert figures["mfu"] == pytest.approx(0.3)
    unknown = speed(1000, 0.5, flops_per_token=6e9, num_devices=4, peak_tflops=None)
    assert unknown["mfu"] is None
    assert unknown["tflops_per_device"] == pytest.approx(3)


def test_perplexity_of_a_diverged_model_is_infinite() -> None:
    assert perplexity(0.0) == 1
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))
