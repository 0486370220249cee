"""What modules do, measured in shortened chunks, against the same modules in whole runs: every span to the byte,
and what the host does for all of them but for the hooks of sharded weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice
from typing import Any

import pytest

from pangu.dryrun.traces import shortened
from pangu.dryrun.worker import ENVIRONMENT
from tests.dryrun.layouts import LAYOUTS, values
from tests.dryrun.plan_cases import all_cases, chosen_of

MORE = (
    "train.frozen=[embedding.*] parallel.data=2 parallel.zero=1",
    "train.frozen=[layers.0.*] parallel.pipeline=2 model.layers=6",
    "model.residual_scores=true parallel.pipeline=2 model.layers=8 model.positions=relative",
    "model.layers=9 memory.recompute=3 parallel.pipeline=2 parallel.schedule=zb_h1",
    "model.layers=9 memory.offload=[activations] memory.recompute=2 parallel.pipeline=2 parallel.data=2 "
    "parallel.zero=3",
)


def differences(configurations: list[dict[str, Any]]) -> list[list[str]]:
    """What a process finds to differ in each run."""
    lines = "".join(f"{json.dumps(one)}\n" for one in configurations)
    command = [sys.executable, "-m", "tests.dryrun.replay"]
    done = subprocess.run(
        command, input=lines, capture_output=True, text=True, env={**os.environ, **ENVIRONMENT}, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_modules_do_the_same_at_every_zero_stage() -> None:
    """What is measured without sharding holds for all stages, replicas, sizes of buckets and schedules."""
    keys = "model.layers=6 batch.global_size=16 parallel.data=2 parallel.pipeline=2"
    schedules = ("gpipe", "1f1b", "zb_h1", "interleaved parallel.virtual_stages=2", "zb_v parallel.virtual_stages=2")
    layouts = [f"{keys} parallel.zero={zero} parallel.schedule=1f1b" for zero in (0, 1, 2, 3)]
    layouts += [f"{keys} parallel.zero=2 parallel.schedule={schedule}" for schedule in schedules]
    found = differences([values(layout) for layout in layouts])
    assert found == [[]] * len(layouts)


def test_layouts_are_made_of_what_was_measured() -> None:
    layouts = [*MORE, *LAYOUTS[-4:]]
    assert differences([values(layout) for layout in layouts]) == [[]] * len(layouts)


@pytest.mark.slow
def test_covering_cases_are_made_of_what_was_measured() -> None:
    """In fp8 it depends on the schedule which micro-batch casts a weight: whole plans are compared (test_plans)."""
    plain = (case for case in all_cases() if case["matmul"] == "compute")
    cases = [chosen_of(case)[0] for case in islice(plain, 4)]
    assert differences(cases) == [[]] * len(cases)


@pytest.mark.long
def test_all_layouts_are_made_of_what_was_measured() -> None:
    cases = [values(layout) for layout in LAYOUTS] + [chosen_of(case)[0] for case in islice(all_cases(), 100)]
    assert differences(cases) == [[]] * len(cases)


def test_long_chunks_are_shortened_to_all_their_neighbours() -> None:
    assert shortened(("embedding", *["layer"] * 40, "head")) == ("embedding", "layer", "layer", "layer", "head")
    assert shortened(("dense", *["moe", "dense"] * 20)) == ("dense", "moe", "dense", "moe", "dense")
    assert shortened(("a", "b", "c")) == ("a", "b", "c")
