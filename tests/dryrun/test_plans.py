"""Plans of layouts that a covering array of all keys draws, against dry runs of each stage."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.covering import Case
from tests.dryrun.conftest import SharedWorker
from tests.dryrun.plan_cases import LONG, SHORT, all_cases, chosen_of
from tests.dryrun.planned import assert_planned
from tests.parallel.cases import name_of

pytestmark = pytest.mark.usefixtures("commands_share_it", "session_cache")


@pytest.fixture(scope="module")
def drawn_cases() -> list[Case]:
    return list(islice(all_cases(), LONG))


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.long] * (number >= SHORT)) for number in range(LONG)]
)
def test_a_plan_is_what_a_dry_run_finds(number: int, drawn_cases: list[Case], process: SharedWorker) -> None:
    case = drawn_cases[number]
    assert_planned(chosen_of(case)[0], process, name_of(case))
