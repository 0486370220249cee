"""The search of layouts: nothing is better than what it finds, and what it finds can be run."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pangu.common.errors import ConfigError, UserError
from pangu.config.cluster import ClusterConfig
from pangu.config.layout_checks import layout_problems
from pangu.planning import search as search_module
from pangu.planning.bounds import LayoutBounds, Least
from pangu.planning.cost import StepTime, memory_of, step_time
from pangu.planning.find import Outcome, overrides_of, refusals
from pangu.planning.program import KEYS, Plan, StepLedger, configured, key_values, shortest
from pangu.planning.search import (
    BUCKETS,
    LONG,
    Candidate,
    Space,
    enumerate_plans,
    problem_of,
    search,
    smaller,
    space_of,
    time_of,
)
from pangu.report.clusters import load_cluster
from pangu.report.intervals import expectation
from pangu.report.search_tables import KEPT, rows
from pangu.schedule.actions import Durations
from pangu.schedule.orders import SCHEDULES, NumbersError, Order, one_f_one_b, splits_backward
from pangu.schedule.schedule import make_schedule
from pangu.schedule.simulate import makespan
from tests.configs import config
from tests.report.narrow import CHROMIUM, check_in_browser, check_style
from tests.spawn import repository
from tools import plan as plan_tool
from tools.plan import main

pytestmark = pytest.mark.usefixtures("formulas")
A100 = load_cluster(repository() / "configs" / "cluster" / "a100.yaml")
SMALL = ("+config=pangu_2_6b", "batch.global_size=32")
SHORT = ("+config=pangu_2_6b", "batch.global_size=8", "model.layers=4")


def space(devices: int, *overrides: str, gib: float = 79.2) -> Space:
    """A configuration's space on some devices."""
    cluster = replace(A100, devices=devices, memory=replace(A100.memory, gib=gib))
    return space_of(config(*overrides), cluster, {})


def needed(where: Space, plan: Plan) -> float:
    """GiB of the fullest stage of a layout."""
    return max(memory_of(stage, where.cluster).total for stage in where.program.describe(plan).stages)


@pytest.mark.parametrize(("devices", "gib"), [(1, 79.2), (4, 6.0), (8, 5.0)])
def test_brute_force_finds_nothing_better(devices: int, gib: float) -> None:
    where = space(devices, *SHORT, gib=gib)
    times = []
    plans = list(enumerate_plans(where, Counter()))
    while plans:
        plan = plans.pop()
        if needed(where, plan) <= gib:
            times.append(time_of(where, plan).total)
        else:
            plans += smaller(where, plan)
    found = search(where, top=5)
    assert [one.time.total for one in found.best] == pytest.approx(sorted(times)[:5])


def test_the_fastest_layouts_are_tried_with_every_zero_group() -> None:
    """A tensor-parallel group fills a node, so no group of replicas is one of a node."""
    where = space(64, *SMALL, "batch.global_size=64")
    where = where._replace(fixed={"tensor": 8, "pipeline": 1, "zero": 3, "micro_size": 1})
    assert {plan.zero_group for plan in enumerate_plans(where, Counter())} == {0}
    pick = search(where).best[0]
    tried = {group: time_of(where, pick.plan._replace(zero_group=group)).total for group in (0, 2, 4)}
    assert pick.plan.zero_group == min(tried, key=tried.__getitem__) != 0
    given = search(where._replace(fixed={**where.fixed, "zero_group": 4}))
    assert {one.plan.zero_group for one in given.best} == {4}
    plans = [one.plan for one in search(space(8, *SHORT)).best]
    assert not any(plan.zero_group == plan.layout.replicas for plan in plans), "that is no group, but all replicas"


def test_the_fastest_layouts_are_tried_with_chunks_of_equal_measured_time() -> None:
    """FLOPs give the last chunk of GPT-3 2.7B with its head the right layers, but those before it too many."""
    where = space(16, "+config=gpt3_2_7b")
    where = where._replace(fixed={"tensor": 1, "pipeline": 4, "schedule": "zb_v", "zero": 1, "micro_size": 8})
    pick = search(where).best[0]
    by_flops = pick.plan._replace(layers=())
    assert sum(pick.plan.layers) == where.config.model.layers
    assert pick.plan.layers != where.program.layers(by_flops)
    assert pick.time.total < time_of(where, by_flops).total
    assert f"parallel.layers={list(pick.plan.layers)}".replace(" ", "") in overrides_of(pick.plan)
    assert configured(where.config, pick.plan).parallel.layers == pick.plan.layers
    given = search(where._replace(fixed={**where.fixed, "layers": None}))
    assert {one.plan.layers for one in given.best} == {()}


def test_the_fastest_layouts_are_tried_with_other_buckets() -> None:
    where = space(64, "+config=pangu_2_6b", "batch.global_size=1024")
    where = where._replace(fixed={"tensor": 1, "pipeline": 1, "zero": 1, "zero_group": None, "micro_size": 16})
    assert {plan.bucket_mib for plan in enumerate_plans(where, Counter())} == {None}
    found = search(where)
    pick = found.best[0]
    tried = {size: time_of(where, pick.plan._replace(bucket_mib=size)).total for size in (None, *BUCKETS)}
    assert pick.plan.bucket_mib == min(tried, key=tried.__getitem__) is not None
    assert configured(where.config, pick.plan).parallel.bucket_mib == pick.plan.bucket_mib
    cell = next(rows(Outcome(where, found)))["ZeRO"]
    assert cell == f"1, {pick.plan.bucket_mib:g} MiB"
    given = search(where._replace(fixed={**where.fixed, "bucket_mib": None}))
    assert {one.plan.bucket_mib for one in given.best} == {None}


def test_micro_batches_divide_the_batch() -> None:
    plans = enumerate_plans(space(2, *SHORT, "batch.global_size=24"), Counter())
    assert {plan.micro_size for plan in plans} == {1, 2, 3, 4, 6, 8, 12, 24}


def recomputes(plans: Iterable[Plan]) -> set[str]:
    """What the layouts recompute."""
    return {plan.recompute if isinstance(plan.recompute, str) else "some layers" for plan in plans}


def test_what_saves_memory_is_never_faster() -> None:
    """So it is tried where a layout does not fit only, also with parts in host memory that are given."""
    where = space(8, *SMALL)
    for plan in Random(1).sample(list(enumerate_plans(where, Counter())), 25):
        others = list(smaller(where, plan))
        assert recomputes(others) - {"some layers"} == {"none", "selective", "full"}
        assert all(time_of(where, other).total >= time_of(where, plan).total for other in others), plan
    given = where._replace(fixed={"offload": ("optimizer",)})
    plan = next(enumerate_plans(given, Counter()))
    assert recomputes(smaller(given, plan)) == {"some layers", "selective", "full"}
    assert {other.offload for other in smaller(given, plan)} == {("optimizer",)}


def test_a_layout_that_a_dry_run_refuses_is_tried_with_less_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    where = space(8, *SHORT)

    def carried_out(_: Space, tried: Sequence[Candidate]) -> Iterator[Candidate]:
        for one in tried:
            yield one._replace(measured=70.0 if one.plan.recompute == "full" else 80.0)

    monkeypatch.setattr(search_module, "carried_out", carried_out)
    given = where._replace(fixed={"tensor": 1, "pipeline": 1, "micro_size": 1, "offload": ()})
    found = search(given, top=2)
    assert [one.plan.recompute for one in found.best] == ["full", "full"]
    assert all(one.measured == 70.0 for one in found.best)


def test_ranks_share_long_sequences() -> None:
    """Where there are fewer of them than devices nothing else is left, and what is found can be run."""
    long = (*SHORT, "batch.global_size=2", f"model.sequence={LONG}")
    where = space(8, *long)._replace(fixed={"bucket_mib": None})
    plans = list(enumerate_plans(where, Counter()))
    assert {plan.context for plan in plans} == {1, 2, 4, 8}
    assert all(plan.tensor * plan.pipeline * plan.context * plan.data == 8 for plan in plans)
    times = [time_of(where, plan).total for plan in plans if needed(where, plan) <= 79.2]
    best = search(where, top=1).best[0]
    assert best.time.total == pytest.approx(min(times))
    assert not problem_of(where, best.plan)
    given = where._replace(fixed={"context": 4})
    assert {plan.context for plan in enumerate_plans(given, Counter())} == {4}
    short = space(8, *long, f"model.sequence={LONG - 1024}")
    assert {plan.context for plan in enumerate_plans(short, Counter())} == {1}


def test_ranks_exchange_heads_in_a_ring_where_that_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here where messages go around a shorter ring in less time; four heads are too few for eight. Given keys stay."""

    def timed(ledger: StepLedger, plan: Plan, cluster: ClusterConfig) -> StepTime:
        share = 1 / plan.context_ulysses if plan.context_kind == "ring" else 2.0
        return replace(step_time(ledger, plan, cluster), tensor=share)

    monkeypatch.setattr(search_module, "step_time", timed)
    where = space(8, *SHORT, "batch.global_size=1", f"model.sequence={LONG}", "model.heads=4")
    fixed = {"context": 8, "micro_size": 1, "zero": 3, "offload": (), "recompute": "none"}
    best = search(where._replace(fixed=fixed), top=1).best[0].plan
    assert (best.context_kind, best.context_ulysses) == ("ring", 4)
    assert key_values(best)["parallel.context_ulysses"] == 4
    for given in ({"context_kind": "ring", "context_ulysses": 2}, {"context_kind": "gather"}):
        plan = search(where._replace(fixed=fixed | given), top=1).best[0].plan
        assert given.items() <= plan._asdict().items()


@pytest.mark.parametrize(("sequences", "allowed"), [(9, False), (10, True), (100, True), (101, False)])
def test_a_search_leaves_out_numbers_that_a_registered_schedule_refuses(
    sequences: int, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def even(stages: int, virtual_stages: int, micro_batches: int) -> list[Order]:
        if micro_batches % 2:
            raise NumbersError(f"{micro_batches} micro-batches", "must be even")
        return one_f_one_b(stages, virtual_stages, micro_batches)

    monkeypatch.setitem(SCHEDULES, "even", replace(SCHEDULES["1f1b"], order=even))
    refused: Counter[str] = Counter()
    where = space(2, *SHORT, f"batch.global_size={sequences}")
    where = where._replace(fixed={"pipeline": 2, "schedule": "even", "micro_size": 1})
    assert bool(list(enumerate_plans(where, refused))) == allowed
    reasons = [reason for reason in refused if "must be even" in reason]
    assert reasons == [f"parallel.schedule: even refuses {sequences} micro-batches: must be even"] * (not allowed)
    assert not splits_backward("even")


@pytest.mark.parametrize(
    ("words", "load"),
    [
        ((), "1"),
        (("parallel.expert_imbalance=1.25",), "1.25"),
        (("parallel.expert_imbalance=1e9",), "4"),  # both experts of every token are on one of four ranks
        (("parallel.expert_imbalance=1e9", "model.expert_capacity=1.5"), "1.5"),
        (("parallel.expert_imbalance=1e9", "parallel.fixed_exchange=true"), None),
    ],
)
def test_a_plan_names_the_load_that_it_assumes(words: tuple[str, ...], load: str | None) -> None:
    where = space(8, *SMALL, "model.experts=8", "model.experts_per_token=2", *words)
    for plan in enumerate_plans(where, Counter()):
        said = expectation(where, plan).assumed
        if plan.expert == 4 and load is not None:
            assert f"the fullest device that shares experts gets {load} times the mean" in said
        if plan.expert == 1 or load is None:
            assert not said


@pytest.mark.parametrize("given", ["true", "auto"])
def test_a_plan_says_that_it_does_not_count_compiled_layers(given: str) -> None:
    where = space(8, *SMALL, f"compile={given}")
    plan = next(enumerate_plans(where, Counter()))
    assert f"compile = {given} is not counted" in expectation(where, plan).words


def test_experts_are_tried_on_all_ranks_that_can_share_them() -> None:
    """Divisors of the experts and of the ranks, with experts that tensor ranks cut and with whole ones."""
    where = space(8, *SMALL, "model.experts=12")
    plans = list(enumerate_plans(where, Counter()))
    assert not [plan for plan in plans if problem_of(where, plan)]
    shared = {(plan.tensor, plan.pipeline, plan.expert, plan.expert_tensor) for plan in plans}
    assert {one for one in shared if one[:2] == (2, 1)} == {(2, 1, expert, 0) for expert in (1, 2, 4)} | {
        (2, 1, expert, 1) for expert in (1, 2, 4)
    }
    assert {one[2:] for one in shared if one[:2] == (1, 2)} == {(1, 0), (2, 0), (4, 0)}
    assert {one[2:] for one in shared if one[:2] == (8, 1)} == {(1, 0), (1, 1), (2, 1), (4, 1)}
    given = where._replace(fixed={"expert": 2, "expert_tensor": None, "zero_group": 4})
    assert {(plan.expert, plan.expert_tensor) for plan in enumerate_plans(given, Counter())} == {(2, 0)}
    refused = Counter[str]()
    assert not list(enumerate_plans(where._replace(fixed={"expert": 5}), refused))
    assert any(reason.startswith("parallel.expert: must divide model.experts = 12") for reason in refused)


@pytest.mark.parametrize(
    ("devices", "drawn", "words"),
    [
        (8, 75, SMALL),
        (64, 30, ("+config=pangu_13b", "batch.global_size=512")),
        (8, 30, ("+config=pangu_2_6b", "batch.global_size=4", f"model.sequence={LONG}")),
        (64, 30, ("+config=pangu_2_6b", "parallel.overlap=false")),
        (2048, 10, ("+config=pangu_200b",)),
    ],
)
def test_no_bound_is_above_what_a_layout_takes_and_needs(devices: int, drawn: int, words: tuple[str, ...]) -> None:
    """As measured modules do in tests/dryrun/test_bounds.py, for layouts of all kinds drawn at random: before their
    modules are measured, by those of other micro-batches, and behind it."""
    where = space(devices, *words)
    bounds, plans = LayoutBounds(where.program, where.cluster), list(enumerate_plans(where, Counter()))
    plans += [other for plan in plans for other in smaller(where, plan)]
    for plan in Random(0).sample(plans, drawn):
        sketched = bounds.seconds(plan), bounds.gib(plan)
        time, gib = time_of(where, plan).total, needed(where, plan)
        scheduled = bounds.scheduled_seconds(plan, math.inf)
        assert bounds.seconds(plan) <= scheduled, plan
        for seconds, least in (sketched, (scheduled, bounds.gib(plan))):
            assert 0 < seconds <= time, plan
            assert 0 < least <= gib, plan


def test_a_search_finds_the_time_that_a_plan_has() -> None:
    """It folds one of the stages with the same modules, and the end of a step hides most on the last of them."""
    where = space(512, "+config=pangu_200b")
    plan = Plan(8, 16, 2, 4, 1, 1, False, "none", 1, 64, "zb_v", (2,) * 32)
    ledger = where.program.describe(plan, every=False)
    assert len({id(stage) for stage in ledger.stages}) < 4
    assert step_time(ledger, plan, where.cluster).total == pytest.approx(time_of(where, plan).total, rel=1e-12)


def test_no_bound_is_above_the_time_of_a_pipeline_with_many_chunks() -> None:
    """The others hide what is sent of one chunk, longer than a micro-batch takes."""
    where = space(512, "+config=pangu_200b")
    plan = Plan(8, 8, 8, 8, 1, 1, False, "none", 1, 64, "interleaved", (1,) * 64)
    time = time_of(where, plan).total  # first, as measured modules have the highest bounds
    assert 0 < LayoutBounds(where.program, where.cluster).scheduled_seconds(plan, math.inf) <= time


def test_further_micro_batches_take_no_longer_in_a_bound_than_in_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of 16 are no part of the simulation, and fill bubbles of those that are."""
    forward, back = (70.0, 10.0, 70.0), (90.0, 10.0, 80.0)
    where = space(4, *SHORT)
    plan = Plan(1, 3, 1, 1, 1, 0, False, "none", 1, 16, "1f1b", (2, 1, 1))
    assert shortest(plan) == 13
    least = [Least(*one) for one in zip(forward, back, strict=True)]
    monkeypatch.setattr(LayoutBounds, "_least", lambda _, __, part: [least[part.stages[0]]])
    time = makespan(make_schedule("1f1b", 3, 1, 16), Durations(forward, back, 0.0, 0.01))  # links are faster
    assert 0.99 * time < LayoutBounds(where.program, where.cluster).scheduled_seconds(plan, math.inf) <= time


def test_bounds_of_pipelines_on_slow_links_are_tight() -> None:
    """Where reductions and gathers take longer than compute, the slack of the bounds cannot hide a wrong one."""
    where = space(8, *SHORT)
    slow = replace(where.cluster.inside, gb_s=where.cluster.inside.gb_s / 50)
    where = where._replace(cluster=replace(where.cluster, inside=slow))
    bounds, ratios = LayoutBounds(where.program, where.cluster), []
    for plan in enumerate_plans(where, Counter()):
        if plan.pipeline > 1 and plan.data > 1 and plan.zero < 3:
            time = time_of(where, plan).total
            ratios.append(bounds.scheduled_seconds(plan, math.inf) / time)
            assert ratios[-1] <= 1, plan
    assert sorted(ratios)[len(ratios) // 2] > 0.75
    assert max(ratios) > 0.9


def test_no_bound_is_above_the_time_where_collectives_were_timed() -> None:
    """On links that are slow up to some size, above which more bytes take hardly longer."""
    where = space(8, *SHORT)
    timed = tuple(
        (kind, ranks, size, microseconds)
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
        for ranks in (2, 4, 8)
        for size, microseconds in ((1e6, 1e3), (1e9, 1e6), (1e11, 1.2e6))
    )
    links = replace(where.cluster.inside, measured=timed)
    where = where._replace(cluster=replace(where.cluster, inside=links, queued=False, alone=1.5))
    bounds, times = LayoutBounds(where.program, where.cluster), []
    for plan in enumerate_plans(where, Counter()):
        times.append(time_of(where, plan).total)
        assert bounds.scheduled_seconds(plan, math.inf) <= times[-1], plan
    assert search(where, top=1).best[0].time.total == pytest.approx(min(times))


def test_what_is_found_passes_the_checks_and_fits() -> None:
    where = space(64, "+config=pangu_13b", "batch.global_size=512")
    found = search(where)
    assert len(found.best) == 10
    for one in found.best:
        assert not layout_problems(configured(where.config, one.plan), 64)
        assert one.plan.layout.tensor * one.plan.pipeline * one.plan.data == 64
        assert one.peak_gib <= 79.2
        assert sum(where.program.layers(one.plan)) == where.config.model.layers


@pytest.mark.parametrize(
    ("devices", "given"),
    [
        (1, {"zero": 2}),
        (1, {"offload": ("parameters",)}),
        (4, {"offload": ("parameters",)}),
        (8, {"offload": ("activations",), "pipeline": 8}),
    ],
)
def test_what_is_given_goes_only_with_what_the_checks_accept(devices: int, given: dict[str, Any]) -> None:
    where = space(devices, *SMALL)._replace(fixed=given)
    plans = list(enumerate_plans(where, Counter()))
    assert plans
    assert not [plan for plan in plans if problem_of(where, plan)]


def test_a_cluster_without_fp8_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision.matmul = fp8: a100 has no fp8 matmuls .* set precision=bf16"):
        space(8, *SMALL, "precision=fp8")


def test_few_of_the_layouts_of_200b_on_2048_devices_are_costed() -> None:
    """LayoutBounds decide most of them, which is what makes the search quick."""
    found = search(space(2048, "+config=pangu_200b"))
    assert found.layouts > 4_000
    assert 10 <= found.costed < found.layouts / 100


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status and output of tools/plan.py."""
    status = main(list(arguments))
    output = capsys.readouterr()
    return status, output.out, output.err


PLAN = ("+config=pangu_13b", "cluster=a100", "cluster.devices=64", "batch.global_size=512", "--search")


def test_the_tool_prints_layouts_and_reasons(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    status, out, _ = run(capsys, *PLAN, "--explain", "--tokens", "300e9", "--html", str(page))
    assert status == 0
    words = ["layouts on 64 x a100", "the first: parallel.tensor=", "days and", "failures a day", "recompute full: "]
    words += ["interval: 90% of ", "memory of the first, by stage: "]
    words += ["not tried unless given: schedules breadth_first, gpipe; batch.micro_size above 32; ZeRO 0 "]
    assert all(one in out for one in words)
    assert re.search(r"goodput 9\d\.\d%\) with checkpoint\.every=\d+$", out, re.MULTILINE)
    written = page.read_text(encoding="utf-8")
    assert written.count("<svg viewBox") == 4
    check_style(written)
    if CHROMIUM is not None:
        check_in_browser(written, tmp_path)
    assert "http" not in written
    assert written.count('class="limit"') == 2, "the memory of a device is a line in both charts of memory"
    assert re.search(r'class="axis">[\d.]+ s<', written)


@pytest.mark.parametrize("given", ["memory.recompute=3", "memory.recompute=selective", "parallel.virtual_stages=2"])
def test_other_keys_that_are_given_stay_too(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *PLAN, given, "--json", "--top", "2")
    assert status == 0
    for one in json.loads(out)["best"]:
        assert given in one["overrides"]
        assert given != "parallel.virtual_stages=2" or "parallel.schedule=1f1b" not in one["overrides"]


def test_what_is_given_stays(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, *PLAN, "parallel.tensor=8", "--json", "--top", "3")
    assert status == 0
    told = json.loads(out)
    assert len(told["best"]) == 3
    of_run = config("+config=pangu_13b")
    assert "tensor parallelism across nodes" not in told["not_tried"], "it was given"
    assert {"parallel.virtual_stages other than 1, 2, 3, 4, 6, 8", "parallel.overlap_chunks other than 1, 2, 4"} <= {
        *told["not_tried"]
    }
    assert [attrgetter(key)(of_run) for key in KEPT]  # they exist
    assert {*KEPT}.isdisjoint(KEYS.values())
    for one in told["best"]:
        assert "parallel.tensor=8" in one["overrides"]
        assert one["step_time_s"] == pytest.approx(sum(one["terms_s"].values()))
        assert max(one["memory_gib"]) <= told["device_memory_gib"]
        # what it prints is what pretrain.py takes
        assert config("+config=pangu_13b", "batch.global_size=512", *one["overrides"]).parallel.tensor == 8


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("+config=pangu_13b", "parameter_groups=[{names:[nope.*]}]"), "[0].names = nope.*: matches no trained tensor"),
        (("+config=pangu_13b", "--search"), "--search needs the description of a cluster: set cluster=NAME"),
        ((*PLAN, "cluster.memory.gib=1"), "the smallest one needs "),
        ((*PLAN, "cluster.node=48"), "cluster.devices = 64: must be a multiple of cluster.node = 48, "),
        ((*PLAN, "parallel.expert=2"), "each and parallel.expert=2: "),
        ((*PLAN, "train.frozen=[nothing.*]"), "train.frozen = nothing.*: matches no tensor in the model"),
        ((*PLAN, "cluster.memory.gib=-1"), "cluster.memory.gib"),
        ((*PLAN, "--html", "/nowhere/page.html"), "/nowhere/page.html"),
    ],
)
def test_impossible_requests_end_in_one_message(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = run(capsys, *arguments)
    assert status != 0
    assert says in error
    assert "Traceback" not in error


def test_reasons_that_differ_in_numbers_are_counted_together() -> None:
    batch = "batch.global_size: must be a multiple of batch.micro_size x data-parallel size"
    experts = "parallel.expert: needs a model with experts, but model.experts = null"
    divides = "parallel.expert: must divide model.experts = 6"
    reasons = {f"{batch} = 8 x 4 = 32": 2, f"{batch} = 8 x 2 = 16": 3, experts: 4, divides: 1}
    assert refusals(reasons) == f"{batch} (5); {experts} (4); {divides.replace(' = 6', '')} (1)"


def test_a_page_that_cannot_be_written_is_refused_before_the_search(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def find(_: object) -> None:
        raise UserError("the search began")

    monkeypatch.setattr(plan_tool, "find", find)
    for page, says in ((tmp_path, "Is a directory"), (tmp_path / "page.html", "the search began")):
        status, _, error = run(capsys, *PLAN, "--html", str(page))
        assert status == 2
        assert says in error
    assert not list(tmp_path.iterdir())
