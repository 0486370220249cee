"""Ledgers of steps: few micro-batches tell of all."""

from __future__ import annotations

from itertools import product

import pytest

from pangu.planning import program
from pangu.planning.cost import step_time
from pangu.planning.program import Plan, Program
from pangu.report.clusters import load_cluster
from pangu.schedule.orders import SCHEDULES
from tests.configs import config
from tests.dryrun.planned import collectives_of
from tests.spawn import repository

pytestmark = pytest.mark.usefixtures("formulas")
A100 = load_cluster(repository() / "configs" / "cluster" / "a100.yaml")
CONFIG = config("+config=pangu_2_6b", "model.layers=8")


def plan_of(schedule: str, zero: int, micro_batches: int) -> Plan:
    """A layout of four stages."""
    virtual_stages = SCHEDULES[schedule].virtual_stages[0]
    layers = (8 // (4 * virtual_stages),) * (4 * virtual_stages)
    return Plan(1, 4, virtual_stages, 2, 1, zero, False, "none", 1, micro_batches, schedule, layers)


@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
@pytest.mark.parametrize(("zero", "micro_batches"), product((1, 3), (24, 37, 39)))
def test_few_micro_batches_tell_of_all(
    schedule: str, zero: int, micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(schedule, zero, micro_batches)
    short = Program(CONFIG).describe(plan)
    monkeypatch.setattr(program, "shortest", lambda plan: plan.micro_batches)
    whole = Program(CONFIG).describe(plan)
    assert whole.message == short.message
    for stage, other in zip(whole.stages, short.stages, strict=True):
        assert (stage.peak, stage.lasting) == (other.peak, other.lasting)
        assert collectives_of(stage) == collectives_of(other)
        assert (stage.groups, stage.update) == (other.groups, other.update)
    assert step_time(whole, plan, A100).total == pytest.approx(step_time(short, plan, A100).total, rel=1e-9)


def test_stages_after_one_that_does_not_fit_are_not_described() -> None:
    plan = plan_of("1f1b", 1, 8)
    program = Program(CONFIG)
    whole = program.describe(plan).stages
    assert len({id(stage) for stage in whole}) > 2
    described = program.describe(plan, fits=lambda stage: stage.peak < whole[0].peak).stages
    assert [stage.peak for stage in described] == [whole[0].peak]
