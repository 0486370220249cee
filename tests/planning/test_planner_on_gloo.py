"""The parts of benchmarks/planner_on_gloo.py that take no time."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from benchmarks.planner_on_gloo import configuration, drawn, rank_correlation
from pangu.planning.program import configured
from pangu.planning.search import problem_of, space_of
from pangu.report.clusters import load_cluster
from tests.spawn import repository


def test_layouts_are_drawn_by_a_seed_from_every_combination_of_degrees() -> None:
    cluster = load_cluster(repository() / "configs" / "cluster" / "a100.yaml")
    space = space_of(configuration(), replace(cluster, devices=4, node=4), {})
    plans = drawn(space, 12, Random(0))
    assert plans == drawn(space, 12, Random(0)) != drawn(space, 12, Random(1))
    assert len({(plan.tensor, plan.pipeline, plan.data) for plan in plans}) == 6
    assert len(set(plans)) == 12
    assert len({plan.recompute for plan in plans}) > 2
    for plan in plans:
        assert problem_of(space, plan) == ""
        assert configured(space.config, plan).parallel.data == plan.data


def test_ranks_are_compared() -> None:
    rows = [{"expected_s": expected, "measured_s": measured} for expected, measured in ((1, 2), (2, 3), (9, 4))]
    assert rank_correlation(rows) == pytest.approx(1.0)
    assert rank_correlation([*rows, {"expected_s": 10, "measured_s": 1}]) < 0
