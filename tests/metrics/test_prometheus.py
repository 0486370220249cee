"""Prometheus reads the metrics of the last step, and each panel of the dashboard shows one that exists."""

from __future__ import annotations

import json
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pangu.metrics.record import StepRecord
from pangu.metrics.writers import CONTENT_TYPE, PrometheusWriter, exposed

Make = Callable[..., StepRecord]
LINE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*) (\S+)")
"""Line of a sample without labels (Prometheus documentation, exposition formats)."""
DASHBOARD = Path(__file__).parents[2] / "scripts" / "grafana.json"


def samples(text: str) -> dict[str, float]:
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines
    return {match[1]: float(match[2]) for match in matches if match}


def test_the_last_step_is_served_until_the_end(record: Make) -> None:
    writer = PrometheusWriter("127.0.0.1", 0)
    url = f"http://127.0.0.1:{writer.port}"
    try:
        for step in (1, 2):
            first: dict[str, Any] = {"loss": float("nan"), "validation_loss": 2.0} if step == 1 else {"loss": 3.25}
            writer.write(record(step=step, slow_ranks={3: 1.5}, **first))
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            found = samples(answer.read().decode())
        assert (found["pangu_step"], found["pangu_train_loss"], found["pangu_slow_rank_3"]) == (2, 3.25, 1.5)
        assert found["pangu_validation_loss"] == 2.0, "the last validation was after step 1"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/other", timeout=10)
    finally:
        writer.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/metrics", timeout=10)


def test_a_port_in_use_is_one_warning(record: Make, caplog: pytest.LogCaptureFixture) -> None:
    first = PrometheusWriter("127.0.0.1", 0)
    assert first.port is not None
    second = PrometheusWriter("127.0.0.1", first.port)
    second.write(record())
    second.close()
    first.close()
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelno >= logging.WARNING]
    assert "set another metrics.prometheus_port" in warning


def test_every_panel_of_the_dashboard_shows_a_metric_of_a_run(record: Make) -> None:
    full = record(failed_saves=1, failed_uploads=1, rollbacks=1, goodput=0.9, mfu=0.4, validation_loss=2.0)
    names = {*samples(exposed(full, 0.0))}
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"pangu_\w+", query)}
    assert asked <= names, asked - names
    assert {f"pangu_{name}" for name in ("train_loss", "speed_mfu", "speed_tokens_per_s", "speed_goodput")} <= asked
