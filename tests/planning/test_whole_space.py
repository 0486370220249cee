"""Small spaces whose layouts are all priced, by dry runs: those too that a search tries only if they are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from pangu.planning.clusters import load_cluster
from pangu.planning.cost import memory_of
from pangu.planning.program import Plan
from pangu.planning.search import Space, enumerate_plans, search, space_of, time_of
from pangu.schedule.orders import SCHEDULES, SIMPLEST
from tests.configs import config
from tests.spawn import repository

A100 = load_cluster(repository() / "configs" / "cluster" / "a100.yaml")


def every_plan(where: Space) -> Iterator[Plan]:
    """Yield layouts without recompute by every schedule, ZeRO stage and group, and with shared short sequences."""
    sizes = [size for size in range(1, where.cluster.devices + 1) if where.cluster.devices % size == 0]
    batch = where.config.batch.global_size
    micro_sizes = [size for size in range(1, batch + 1) if batch % size == 0]
    fields = ("tensor", "context", "zero_group", "micro_size", "schedule", "zero", "recompute")
    for values in product(sizes, sizes, sizes, micro_sizes, SCHEDULES, range(4), ["none"]):
        fixed = where._replace(fixed=dict(zip(fields, values, strict=True)))
        yield from (
            plan for plan in enumerate_plans(fixed, Counter()) if plan.pipeline > 1 or plan.schedule == SIMPLEST
        )


@pytest.mark.long
def test_no_layout_of_two_nodes_is_faster_than_the_pick() -> None:
    gib = 20.0
    cluster = replace(A100, devices=4, node=2, memory=replace(A100.memory, gib=gib))
    where = space_of(config("+config=pangu_2_6b", "model.layers=4", "batch.global_size=6"), cluster, {})
    pick = search(where, top=3).best[0]
    plans = list(dict.fromkeys(every_plan(where)))
    where.program.prepare(plans)
    fit = [plan for plan in plans if max(one.total for one in memory_of(where.program.describe(plan), cluster)) <= gib]
    assert len(plans) > 300
    assert len(fit) > 50
    fastest = min(time_of(where, plan).total for plan in fit)
    assert pick.time.total <= 1.02 * fastest, "the error bar of a plan is 1.5"
