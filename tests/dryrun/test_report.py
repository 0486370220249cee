"""The commands that carry out a step without devices, and what they say."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from pangu.common.errors import UserError
from pangu.dryrun import roles
from pangu.dryrun.roles import run_jobs
from pangu.report.dry_run import _fit, _fits, role_ranks
from pangu.topology.layout import Layout
from tests.configs import config
from tests.dryrun.conftest import SharedWorker
from tests.dryrun.layouts import SMALL, values
from tests.end_to_end.commands import called

PIPELINE = (*SMALL, "parallel.pipeline=2", "parallel.tensor=2", "parallel.data=64", "batch.global_size=256")
GIB = 2**30
SHARED = pytest.mark.usefixtures("commands_share_it")


@SHARED
def test_a_plan_gives_the_step_as_data() -> None:
    done = called("tools/plan", *PIPELINE, "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert [role["stage"] for role in plan["roles"]] == [0, 1]
    assert plan["needed_bytes"] == max(role["needed_bytes"] for role in plan["roles"]) == plan["peak"]
    assert sum(plan["peak_bytes"].values()) == plan["peak"]
    assert plan["collectives"]["tensor"]["all_reduce"]["calls"] > 0
    sent = plan["collectives"]["pipeline"]["send"]
    assert sent["calls"] == 4
    assert sent["hidden_bytes"] == sent["bytes"]  # nothing waits for them
    assert plan["launches"] > 0 < plan["memory_bound_bytes"]
    assert plan["host_syncs"] == plan["blocking_copies"] == {}
    assert plan["races"] == {}
    assert plan["fits"] is None


@SHARED
def test_a_dry_run_prints_the_fullest_device() -> None:
    done = called("pretrain", *SMALL, "dry_run=true", "compile=true")
    assert done.returncode == 0, done.stderr
    for words in (
        "not seen     compile=true: counted without compilation",
        "peak on      rank 0",
        "host waits",
        "races        0 races",
        "cluster=NAME",
    ):
        assert words in done.stderr
    assert "\nrank" not in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("each device"))
    assert re.search(r"needs at most [\d.]+ MiB for tensors: parameters .*, activations ", line)


def test_all_prints_every_role() -> None:
    """Each in a process of its own."""
    done = called("pretrain", *SMALL, "parallel.tensor=2", "dry_run=all")
    assert done.returncode == 0, done.stderr
    assert "2 roles of 2 ranks" in done.stderr
    assert "replica" in done.stderr


def test_json_is_the_dry_runs() -> None:
    done = called("tools/plan", *SMALL, "--json")
    assert done.returncode == 2
    assert "--json needs --dry-run" in done.stderr


def test_roles_are_the_corners_of_each_stage() -> None:
    layout = Layout(tensor=8, pipeline=16, data=16)
    assert role_ranks(layout, every=False) == [stage * 128 for stage in range(16)]
    assert role_ranks(layout, every=True)[:5] == [0, 7, 120, 127, 128]
    assert role_ranks(Layout(), every=True) == [0]


@pytest.mark.parametrize(("gib", "fits", "words"), [(80.0, True, "fits on small"), (4.0, False, "does not fit")])
def test_what_is_no_tensor_counts_as_well(gib: float, fits: bool, words: str) -> None:
    beside = {"gib": gib, "context_gib": 0.5, "workspace_gib": 0.25, "communicator_gib": 0.125}
    memory = [f"cluster.memory.{name}={value}" for name, value in beside.items()]
    small = config("cluster=a100", "cluster.name=small", *memory)
    found = _fit(small, {"peak": 4 * GIB, "groups": 2})
    assert found == {
        "cluster": "small",
        "needed_bytes": 5 * GIB,
        "fits": fits,
        "room_bytes": round((gib - 5) * GIB),
    }
    said = _fits({**found, "groups": 2})
    assert said.startswith(words)
    assert "5.00 GiB" in said


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tensors are then a CPU's."""
    (tmp_path / "c++").symlink_to("/bin/false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    assert os.environ["CXX"]
    monkeypatch.setattr(roles, "_workers", None)
    (found,) = run_jobs([(values(""), 0, {})])
    assert "cannot compile device.cpp" in found["device"]
    assert found["peak"] > 0


def test_a_rank_that_cannot_be_carried_out_is_one_message(process: SharedWorker) -> None:
    with pytest.raises(UserError, match="the dry run of rank 7 failed"):
        process.report(values(""), 7)


@pytest.mark.parametrize("option", ["--dry-run", "--modules"])
def test_kernels_of_other_packages_are_refused(option: str) -> None:
    done = called("tools/plan", *SMALL, "precision=bf16", "model.attention=flash_attn", option, "--json")
    assert done.returncode == 2
    assert "a dry run cannot run a kernel of an external package" in done.stderr
    assert "set model.attention=auto" in done.stderr


@SHARED
@pytest.mark.usefixtures("formulas")
def test_a_dry_run_says_whether_it_fits() -> None:
    fits, not_ = (called("tools/plan", *SMALL, "cluster=a100", f"cluster.memory.gib={n}", "--dry-run") for n in (40, 1))
    assert "memory       fits on a100" in fits.stdout
    assert "memory       does not fit on a100" in not_.stdout


@SHARED
def test_what_no_product_hides_is_told_of_each_axis() -> None:
    """Sums of tensor ranks wait; gradients of replicas hide behind backward, but for those of the last products."""
    done = called("tools/plan", *SMALL, "parallel.tensor=2", "parallel.data=2", "parallel.zero=1", "--dry-run")
    said = dict(line.split(maxsplit=2)[1:] for line in done.stdout.splitlines() if line.startswith("over "))
    assert said["tensor"].endswith(" exposed")
    assert " exposed" in said["shard"]


def test_the_next_steps_products_hide_gathers_after_an_update(process: SharedWorker) -> None:
    """But that of the words, which come before the first product."""
    layout = "parallel.data=2 parallel.zero=1"
    hidden, waited = (
        process.report(values(f"{layout} parallel.overlap={overlap}"), 0)["collectives"]["gather"]["all_gather"]
        for overlap in ("true", "false")
    )
    assert 0 < hidden["hidden_bytes"] < hidden["bytes"]
    assert "hidden_bytes" not in waited


def test_postponed_weight_gradients_hide_the_reduction_of_those_before_them(process: SharedWorker) -> None:
    layout = "parallel.pipeline=2 parallel.schedule=zb_h1 parallel.data=2 parallel.zero=1 model.layers=4"
    reduced = process.report(values(layout), 0)["collectives"]["shard"]["reduce_scatter"]
    assert reduced.get("hidden_bytes", 0) > 0
