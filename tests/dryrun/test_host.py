"""Host time in a forecast: a device cannot run kernels faster than the host launches them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pangu.config.cluster import ClusterConfig
from pangu.pipeline.layouts import choose_layout
from pangu.planning.cost import StepTime, step_time
from pangu.planning.program import Program, StepLedger, plan_of
from pangu.report.clusters import load_cluster
from pangu.report.forecast import Forecast
from tests.configs import composed
from tests.spawn import repository

pytestmark = pytest.mark.usefixtures("commands_share_it", "session_cache")
H200 = load_cluster(repository() / "configs" / "cluster" / "h200.yaml")
MEASURED_S = 0.1077
"""Step of `pangu_350m` on an H200 at commit dac3f0c, which waited for the host (results/gpu_h200)."""
THEN = {"operators": 3540, "calls": 11962}
"""What the host did at that commit for a micro-batch, as traces count it."""


def step_of(cluster: ClusterConfig, *words: str) -> tuple[StepTime, StepLedger, int]:
    """Time and ledger of a step of 16 sequences, and its number of micro-batches."""
    plain = (
        "data=synthetic",
        "validation.every=0",
        "model.dropout=0",
        "model.attention_dropout=0",
        "batch.global_size=16",
    )
    config, layout, _ = choose_layout(composed("+config=pangu_350m", *plain, *words), 1)
    plan = plan_of(config, layout)
    ledger = Program(config).describe(plan)
    return step_time(ledger, plan, cluster), ledger, plan.micro_batches


def test_a_step_that_waited_for_the_host_is_forecast_from_the_counts_of_its_commit() -> None:
    _, ledger, _ = step_of(H200, "batch.micro_size=8")
    spans = [span.work for stage in ledger.stages for one in stage.passes.values() for span in one.spans]
    operators, calls = (number / sum(getattr(work, what) for work in spans) for what, number in THEN.items())
    then = replace(H200, operator_us=H200.operator_us * operators, call_us=H200.call_us * calls)
    time, *_ = step_of(then, "batch.micro_size=8")
    assert time.host > 0
    assert time.total == pytest.approx(MEASURED_S, rel=0.05)
    assert step_of(replace(then, operator_us=0.0, call_us=0.0), "batch.micro_size=8")[0].total < 0.87 * MEASURED_S


@pytest.mark.parametrize("size", [2, 8])
def test_a_step_takes_at_least_as_long_as_its_host(size: int) -> None:
    time, ledger, count = step_of(H200, f"batch.micro_size={size}")
    (stage,) = ledger.stages
    works = [span.work for one in stage.passes.values() for span in one.spans]
    host = count * 1e-6 * sum(one.operators * H200.operator_us + one.calls * H200.call_us for one in works)
    device = time.total - time.update - time.host
    assert device + time.host == pytest.approx(max(device, host))
    assert (time.host > 0) == (size == 2)


def test_a_forecast_names_a_layout_that_waits_for_its_host() -> None:
    words = ("cluster=h200", "data=synthetic", "validation.every=0", "batch.global_size=16", "batch.micro_size=1")
    config, layout, stages = choose_layout(composed("+config=pangu_350m", *words), 1)
    assert "host-bound: the device waits" in Forecast.of(config, layout, stages).lines()
    larger = replace(config, batch=replace(config.batch, micro_size=16))
    assert "host-bound" not in Forecast.of(larger, layout, stages).lines()
