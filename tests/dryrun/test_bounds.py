"""Lower bounds of the search, with measured modules: no layout is faster, and none needs less memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import pytest

from pangu.planning.bounds import LayoutBounds
from pangu.planning.cost import memory_of
from pangu.planning.program import Plan, configured, shortest
from pangu.planning.search import (
    OFFLOADED,
    Candidate,
    Space,
    carried_out,
    enumerate_plans,
    problem_of,
    smaller,
    space_of,
    time_of,
)
from pangu.report.clusters import load_cluster
from tests.configs import config
from tests.dryrun.conftest import SharedWorker
from tests.spawn import repository

pytestmark = pytest.mark.usefixtures("commands_share_it", "session_cache")
A100 = load_cluster(repository() / "configs" / "cluster" / "a100.yaml")
SMALL = (
    *("model=pangu_quickstart", "data=synthetic", "model.hidden=256", "model.sequence=128", "model.layers=8"),
    *("model.heads=4", "precision=bf16", "validation.every=0"),
)


def assert_bounded(where: Space, plans: Iterable[Plan]) -> None:
    """Each layout takes and needs at least as much as its bounds say."""
    bounds = LayoutBounds(where.program, where.cluster)
    for plan in plans:
        sketched = bounds.seconds(plan), bounds.gib(plan)
        gib = max(memory_of(stage, where.cluster).total for stage in where.program.describe(plan).stages)
        time = time_of(where, plan).total
        for seconds, least in (sketched, (bounds.seconds(plan), bounds.gib(plan))):
            assert 0 < seconds <= time, plan
            assert least <= gib, plan
        assert not problem_of(where, plan)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_no_bound_is_above_the_time_on_slow_links(schedule: str) -> None:
    """ZeRO-3 sends once what other schedules send for each micro-batch."""
    cluster = replace(A100, devices=8, node=1, between=replace(A100.between, gb_s=0.1))
    given = {"micro_size": 1, "tensor": 1, "recompute": "none", "schedule": schedule}
    where = space_of(config(*SMALL, "batch.global_size=64"), cluster, given)
    plans = [plan for plan in enumerate_plans(where, Counter()) if plan.zero == 3]
    assert plans
    assert_bounded(where, plans)


@pytest.mark.parametrize(("recompute", "micro_size"), [("none", 1), ("none", 4), (2, 1)])
def test_no_bound_is_above_what_a_layout_takes_and_needs_with_parts_on_the_host(
    recompute: str | int, micro_size: int
) -> None:
    """Where copies to the host take longer than computing, and where they do not."""
    cluster = replace(A100, devices=4, host_gb_s=2.0 * micro_size**2)
    given = {"micro_size": micro_size, "tensor": 1, "recompute": recompute}
    where = space_of(config(*SMALL, "batch.global_size=16", "model.sequence=2048"), cluster, given)
    plans = list(enumerate_plans(where, Counter()))[::4]
    for plan in plans:
        plans += smaller(where, plan)
    # activations that are computed again do not wait on the host, too
    parts = [part for part in OFFLOADED if recompute == "none" or part != "activations"]
    assert {plan.offload for plan in plans} == {
        tuple(part for part, is_away in zip(parts, bits, strict=True) if is_away)
        for bits in product((False, True), repeat=len(parts))
    }
    assert_bounded(where, plans)


@pytest.mark.parametrize("fixed", [{"recompute": "none"}, {"recompute": 1, "zero": 1, "schedule": "1f1b"}])
def test_no_bound_is_above_what_a_layout_of_experts_takes_and_needs(fixed: dict[str, Any]) -> None:
    """Layers of both kinds, on all numbers of ranks, over slow links."""
    keys = ("model.kind=gpt", "model.experts=2", "model.dense_layers=2", "model.expert_every=2", "model.layers=7")
    cluster = replace(A100, devices=8, node=4, between=replace(A100.between, gb_s=1.0))
    given = {"micro_size": 1, "tensor": 2, "sequence": True, **fixed}
    where = space_of(config(*SMALL, "batch.global_size=16", *keys), cluster, given)
    plans = list(enumerate_plans(where, Counter()))
    assert {(plan.expert, plan.expert_tensor) for plan in plans} == {(1, 0), (2, 0), (1, 1), (2, 1)}
    assert_bounded(where, plans[::3])


def test_what_a_layout_needs_is_confirmed_by_few_micro_batches_of_it(process: SharedWorker) -> None:
    """The reported memory is that of a dry run of all micro-batches."""
    cluster = replace(A100, devices=4)
    where = space_of(config(*SMALL, "batch.global_size=24"), cluster, {})
    plan = Plan(1, 2, 1, 2, 1, 1, False, "none", 1, 12, "1f1b", layers=(4, 4))
    candidate = Candidate(plan, time_of(where, plan), ())
    (found,) = carried_out(where, [candidate])
    chosen = configured(where.config, plan)
    report = process.report({**asdict(chosen), "dry_run": True}, 0)
    assert shortest(plan) < 12
    assert found.peak_gib == pytest.approx(report["peak"] / 2**30 + cluster.memory.overhead_gib(report["groups"]), 1e-3)
    assert found.peak_gib == pytest.approx(max(stage.total for stage in found.memory), 0.02)
