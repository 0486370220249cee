"""Small spaces whose layouts are all priced, by dry runs: those too that a search tries only if they are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from pangu.planning.cost import memory_of, step_time
from pangu.planning.program import Plan
from pangu.planning.search import Space, enumerate_plans, search, space_of
from pangu.report.clusters import load_cluster
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


def assert_nothing_is_faster(where: Space, layouts: int, fitting: int) -> None:
    """No layout of a space is faster than the search's pick by more than 2 %; the error bar of a plan is 50 %."""
    pick = search(where, top=3).best[0]
    plans = list(dict.fromkeys(every_plan(where)))
    where.program.prepare(plans)
    ledgers = {plan: where.program.describe(plan) for plan in plans}
    peaks = {plan: max(memory_of(stage, where.cluster).total for stage in ledgers[plan].stages) for plan in plans}
    fit = [plan for plan in plans if peaks[plan] <= where.cluster.memory.gib]
    assert len(plans) > layouts
    assert len(fit) > fitting
    fastest = min(step_time(ledgers[plan], plan, where.cluster).total for plan in fit)
    assert pick.time.total <= 1.02 * fastest


def two_nodes(devices: int, gib: float, *words: str) -> Space:
    """A space of four layers on two nodes."""
    cluster = replace(A100, devices=devices, node=devices // 2, memory=replace(A100.memory, gib=gib))
    return space_of(config("+config=pangu_2_6b", "model.layers=4", *words), cluster, {})


SPACES = [
    (4, 8.0, ["batch.global_size=4", "model.sequence=512"], 300, 200),
    (4, 10.0, ["batch.global_size=6"], 300, 50),
    (2, 12.0, ["batch.global_size=12"], 50, 30),
]


@pytest.mark.long
@pytest.mark.parametrize(("devices", "gib", "words", "layouts", "fitting"), SPACES)
def test_no_layout_of_two_nodes_is_faster_than_the_pick(
    devices: int, gib: float, words: list[str], layouts: int, fitting: int
) -> None:
    assert_nothing_is_faster(two_nodes(devices, 2 * gib, *words), layouts, fitting)


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize(("devices", "gib", "words", "layouts", "fitting"), SPACES)
def test_no_layout_by_formulas_is_faster_than_the_pick(
    devices: int, gib: float, words: list[str], layouts: int, fitting: int
) -> None:
    assert_nothing_is_faster(two_nodes(devices, gib, *words), layouts, fitting)
