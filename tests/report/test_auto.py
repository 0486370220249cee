"""The planner chooses a layout, says what a run will take, and refuses what does not fit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pangu.common.errors import ConfigError, UserError
from pangu.dryrun.roles import DryRunError
from pangu.pipeline.layouts import choose_layout
from pangu.plan_run import cluster_here, plan_layout, with_cluster_here
from pangu.planning import search
from pangu.planning.search import Candidate, Space
from pangu.report import auto, forecast
from pangu.report.auto import choose_automatically, with_plan
from pangu.report.clusters import cluster_names, cluster_of_device
from pangu.report.forecast import Forecast
from pangu.topology.launch import Launch
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training import run as running
from pangu.training.command import given_keys
from tests.configs import composed
from tests.end_to_end.commands import called, pretrain
from tests.end_to_end.test_pretrain import SYNTHETIC
from tests.spawn import Pool, free_port, repository

pytestmark = pytest.mark.usefixtures("formulas")
CLUSTERS = repository() / "configs" / "cluster"
NO_DATA = ("data=synthetic", "validation.every=0")
RECIPE = ("+config=pangu_2_6b", "cluster=a100", "parallel=auto", *NO_DATA)


def chosen(*words: str, given: tuple[str, ...] = (), devices: int = 16) -> tuple[dict[str, Any], list[str]]:
    return choose_automatically(composed(*RECIPE, *words), set(given), devices, 8)


def test_the_choice_is_a_layout_that_can_be_run_and_fits() -> None:
    values, lines = chosen()
    config, layout, stages = choose_layout(values, 16)
    assert layout.world == 16
    expected = Forecast.of(config, layout, stages)
    expected.require_room(config, layout, stages)
    assert f"expected step time {expected.time.total:.3g} s, memory {expected.memory.total:.3g} of 79.2 GiB" in lines[1]
    assert lines[2].startswith(f"{'':<12} +")
    assert "% time (too close to call), " in lines[2]  # published steps differ by more than these predictions


def test_a_layout_that_does_not_fit_when_it_is_carried_out_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (fastest, _), needed = chosen(), chain([80.0], repeat(1.0))
    asked: list[Candidate] = []

    def carried_out(space: Space, tried: Sequence[Candidate]) -> Iterator[Candidate]:
        for one in tried:
            asked.append(one)
            yield one._replace(measured=next(needed))

    monkeypatch.setattr(search, "carried_out", carried_out)
    values, _ = chosen()
    assert with_plan(values, asked[0].plan) == fastest
    assert with_plan(values, min(asked[1:], key=lambda one: one.time.total).plan) == values != fastest


def test_memory_that_fragmentation_decides_is_too_close_to_call() -> None:
    expected = Forecast.of(*choose_layout(chosen()[0], 16))
    most, least, verdicts = expected.memory.total, expected.least_gib, list[str]()
    for expected.room_gib in (most, (most + least) / 2, 0.99 * least):
        verdicts.append(expected.verdict)
        assert f" GiB ({expected.verdict})" in expected.lines()
    assert verdicts == ["fits", "too close to call", "does not fit"]


def test_what_is_given_is_kept_and_costs_what_it_costs() -> None:
    (free, _), (fixed, _) = chosen(), chosen("parallel.tensor=8", given=("parallel.tensor",))
    assert free["parallel"]["tensor"] < 8
    assert fixed["parallel"]["tensor"] == 8
    free_time, fixed_time = (Forecast.of(*choose_layout(values, 16)).time.total for values in (free, fixed))
    assert free_time < fixed_time


def test_a_forecast_takes_matmuls_in_the_precision_of_the_run() -> None:
    """An A100 has 312 TFLOP/s of bf16 and 19.5 of fp32: matmuls take 16 times as long, all else of a step stays."""
    words = ("+config=pangu_2_6b", "cluster=a100", "parallel.tensor=1", "parallel.data=16", *NO_DATA)
    lower, full = (
        Forecast.of(*choose_layout(composed(*words, f"precision={precision}"), 16)).time.compute
        for precision in ("bf16", "fp32")
    )
    assert full > 4 * lower


def test_a_layout_that_does_not_fit_is_refused_with_layouts_that_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only where a dry run of that very layout needs as much, too."""
    measured = [90.0]
    monkeypatch.setattr(forecast, "measured_gib", lambda *what: measured)
    values = {**composed("+config=pangu_13b", "cluster=a100", "parallel.tensor=1", "parallel.pipeline=1", *NO_DATA)}
    values["cluster"] = {**values["cluster"], "devices": 16}
    run = choose_layout(values, 16)
    with pytest.raises(UserError, match=r"needs 90 GiB, and a100 has 79.2 GiB; these layouts fit: parallel") as refused:
        Forecast.of(*run).require_room(*run)
    measured[0] = 79.0
    with caplog.at_level("WARNING", "pangu"):
        Forecast.of(*run).require_room(*run)
    assert "a dry run of the stage with the highest peak needs 79 GiB, which fits" in caplog.text
    measured[0] = 90.0
    for frozen, fits in (("layers.*", True), ("embedding.*", False)):  # these have no gradients and no moments
        other = run._replace(config=replace(run.config, train=replace(run.config.train, frozen=(frozen,))))
        with nullcontext() if fits else pytest.raises(UserError, match="these layouts fit: parallel"):
            replace(Forecast.of(*other), room_gib=60.0).require_room(*other)
    first = str(refused.value).partition("these layouts fit: ")[2].partition(" (")[0]
    for word in first.split():
        group, _, rest = word.partition(".")
        key, _, value = rest.partition("=")
        values[group][key] = json.loads(value.lower()) if value[0] in "0123456789[tfn" and value != "none" else value
    run = choose_layout(values, 16)
    caplog.clear()
    Forecast.of(*run).require_room(*run)
    assert not caplog.text


def test_a_forecast_that_nothing_confirms_refuses_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*what: object) -> float:
        raise DryRunError("no device")

    monkeypatch.setattr(forecast, "measured_gib", fail)
    run = choose_layout({**composed("+config=pangu_2_6b", "cluster=a100", *NO_DATA)}, 16)
    expected = replace(Forecast.of(*run), room_gib=1.0)
    with caplog.at_level("WARNING", "pangu"):
        expected.require_room(*run)
    assert "a100 has 1 GiB; this run may run out of memory, which no dry run could check (no device)" in caplog.text


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("Ascend910B2", None),
        ("x86_64 CPU", None),
        ("", None),
    ],
)
def test_devices_are_known_by_their_makers_name(name: str, file: str | None) -> None:
    assert cluster_of_device(name, cluster_names(CLUSTERS)) == file


def there_are(monkeypatch: pytest.MonkeyPatch, name: str, gib: float) -> None:
    """Two such devices."""
    properties = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def found(monkeypatch: pytest.MonkeyPatch, name: str, gib: float) -> dict[str, Any] | None:
    """The cluster of the second of two such devices on each of two nodes."""
    there_are(monkeypatch, name, gib)
    return cluster_here(CLUSTERS, Launch(1, 4, 1, 2))


def test_the_memory_is_the_devices_own(monkeypatch: pytest.MonkeyPatch) -> None:
    large, small = (found(monkeypatch, f"NVIDIA A100-SXM4-{n}GB", gib) for n, gib in ((80, 79.25), (40, 39.5)))
    assert large is not None
    assert small is not None
    assert (small["name"], small["devices"], small["node"]) == ("a100_40gb", 4, 2)
    assert (large["memory"]["gib"], small["memory"]["gib"]) == (79.25, 39.5)
    chosen = [
        choose_automatically({**composed(*RECIPE), "cluster": cluster}, set(), 2, 2)[0] for cluster in (large, small)
    ]
    assert chosen[0]["memory"] != chosen[1]["memory"]
    assert Forecast.of(*choose_layout(chosen[1], 2)).memory.total < 39.5


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA H100 NVL", "Apple M3", "NVIDIA L4"])
def test_a_device_without_a_file_is_not_planned_for(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert found(monkeypatch, name, 80) is None


def test_a_device_that_is_not_there_or_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, "NVIDIA H100 80GB HBM3", 80) is not None
    assert cluster_here(CLUSTERS, Launch(2, 3, 2, 3)) is None
    monkeypatch.delattr(torch.cuda, "get_device_properties")
    assert cluster_here(CLUSTERS, Launch()) is None
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert cluster_here(CLUSTERS, Launch()) is None


def test_a_run_is_told_of_a_broken_file_if_it_asks_for_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "h100.yaml").write_text("devices: 8\n")
    there_are(monkeypatch, "NVIDIA H100 80GB HBM3", 79.2)
    values = composed("+config=quickstart")
    assert with_cluster_here(tmp_path, values, Launch(), planned=False) is values
    with pytest.raises(ConfigError, match=r"matmul = \(missing\)"):
        with_cluster_here(tmp_path, values, Launch(), planned=True)
    assert with_cluster_here(CLUSTERS, values, Launch(), planned=False)["cluster"]["name"] == "h100"
    for words in (("train.device=cpu",), ("dry_run=true",), ("cluster=a100",)):
        values = composed("+config=quickstart", *words)
        assert with_cluster_here(tmp_path, values, Launch(), planned=True) is values


def test_where_no_file_is_for_the_devices_the_message_says_what_to_do() -> None:
    done = called("pretrain", "+config=quickstart", "parallel=auto", "train.device=cpu")
    assert done.returncode == 2
    assert (
        "parallel=auto needs the description of a cluster: set cluster=NAME, where NAME is one of a100," in done.stderr
    )
    assert done.stderr.count("a100,") == 1


@pytest.mark.parametrize(
    ("word", "rule"), [("cluster.devices=x", "must be an integer"), ("cluster.node=null", "must be an integer")]
)
def test_a_cluster_that_is_none_is_one_message(word: str, rule: str) -> None:
    for done in (called("pretrain", *RECIPE, word, "dry_run=true"), called("tools/plan", *RECIPE[:2], *NO_DATA, word)):
        assert done.returncode == 2
        assert f"{word.partition('=')[0]} = " in done.stderr
        assert rule in done.stderr


def test_a_run_plans_itself_and_compares_what_it_took(tmp_path: Path) -> None:
    words = (*SYNTHETIC, "parallel=auto", "cluster=a100", "train.steps=20", "checkpoint.every=0", "profile=true")
    done = pretrain(tmp_path / "run", *words)
    assert "auto         parallel.tensor=1" in done.stdout
    assert "ZeRO stage 0, chosen by the planner" in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    forecast = summary["forecast"]
    assert forecast["step_time_s"] == pytest.approx(sum(forecast["terms_s"].values()))
    low, high = forecast["step_time_interval_s"]
    place = "inside" if low <= forecast["measured_step_time_s"] <= high else "outside"
    assert f"against the forecast, {place} its interval)" in done.stderr
    assert low <= (median := forecast["step_time_median_s"]) <= high
    assert f"between {low:.3g} and {high:.3g} s, median {median:.3g} s: {forecast['interval']}" in done.stderr
    assert f"step time {forecast['measured_step_time_s']:.3g} s" in done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "in seconds: compute" in line)
    parts = re.findall(r"\w+ (\S+) \(forecast: (\S+)\)", line)
    for times, total in zip(zip(*parts, strict=True), ("measured_step_time_s", "step_time_s"), strict=True):
        assert sum(map(float, times)) == pytest.approx(forecast[total], rel=0.02)


def planned_on(rank: int, world: int, port: int) -> tuple[int, int, list[str]]:
    """Choices of this rank, and the layout that it is given. The ranks would choose other ones."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world)}
    num_choices = 0

    def choose(values: dict[str, Any], *_: Any) -> tuple[dict[str, Any], list[str]]:
        nonlocal num_choices
        num_choices += 1
        return {**values, "parallel": {**values["parallel"], "tensor": 4 + rank}}, [f"rank {rank} counted"]

    with patch.dict(os.environ, place), patch.object(auto, "choose_automatically", choose):
        planned, lines, _mesh = plan_layout(CLUSTERS, composed(*RECIPE), set(), Launch(rank, world))
    return num_choices, planned["parallel"]["tensor"], lines


def test_one_process_counts_for_all_nodes(pool: Pool) -> None:
    assert pool.run(2, planned_on, free_port()) == [(1, 4, ["rank 0 counted"]), (0, 4, ["rank 0 counted"])]


def forecast_on(rank: int, world: int) -> tuple[int, Any]:
    """Forecasts that this rank makes, and the one that it is given."""
    mesh, made = Mesh.connect(Layout(data=world), torch.device("cpu"), 60.0), []

    def forecast(*_: Any) -> Any:
        made.append(rank)
        return f"rank {rank}'s"

    watchdog: Any = SimpleNamespace(set_activity=lambda *_: None)
    given = running._do_long_work(mesh, watchdog, "measuring the layers", forecast, mesh.is_first)
    return len(made), given


def test_one_process_makes_the_forecast(pool: Pool) -> None:
    assert pool.run(2, forecast_on) == [(1, "rank 0's"), (0, None)]


def test_the_tool_plans_what_would_be_run() -> None:
    done = called("tools/plan", *RECIPE, "cluster.devices=16")
    assert done.returncode == 0, done.stderr
    assert "= 16 devices, ZeRO stage" in done.stdout
    assert "chosen by the planner" in done.stdout


def test_every_key_of_a_layout_that_is_given_is_kept() -> None:
    words = ("parallel.data=8", "parallel.zero=1", "parallel.zero_group=4", "memory.offload=[optimizer]")
    values, _ = chosen(*words, given=tuple(word.partition("=")[0] for word in words))
    assert (values["parallel"]["data"], values["parallel"]["zero"], values["parallel"]["zero_group"]) == (8, 1, 4)
    assert values["memory"]["offload"] == ["optimizer"]


@pytest.mark.parametrize("words", [("parallel.layers=[8,8]",), ("parallel.layouts=[{tensor: 2}]",)])
def test_what_a_search_cannot_keep_is_refused(words: tuple[str, ...]) -> None:
    recipe = ("+config=quickstart", "cluster=a100", *words)
    for done in (
        called("pretrain", *recipe, "parallel=auto", "dry_run=true"),
        called("tools/plan", *recipe, "parallel=auto"),
        called("tools/plan", *recipe, "--search"),
    ):
        assert done.returncode == 2
        assert done.stderr.count(f"{words[0].partition('=')[0]} = ") == 1
        assert "leave it out, or set parallel=data" in done.stderr


def test_keys_that_no_search_chooses_stay() -> None:
    words = ("parallel.overlap_chunks=2", "parallel.bucket_mib=3", "parallel.layers=null")
    values, _ = chosen(*words, given=tuple(word.partition("=")[0] for word in words))
    assert (values["parallel"]["overlap_chunks"], values["parallel"]["bucket_mib"]) == (2, 3)


def test_the_keys_that_are_given() -> None:
    words = (
        "+config=quickstart",
        "++parallel.tensor=2",
        "memory={recompute: full}",
        "train.seed=1,2",
        "-m",
        "--config-dir=x",
        "~data",
    )
    assert given_keys(words) == {"config", "parallel.tensor", "memory.recompute", "train.seed"}


def test_what_cannot_go_together_is_refused_and_no_sharding_is_kept() -> None:
    assert chosen("parallel.zero=0", given=("parallel.zero",))[0]["parallel"]["zero"] == 0
    with pytest.raises(UserError, match=r"each and parallel.data=8 and parallel.zero_group=3: "):
        chosen("parallel.data=8", "parallel.zero_group=3", given=("parallel.data", "parallel.zero_group"))
    with pytest.raises(UserError, match=r"parallel.tensor=32: the degrees do not multiply to the number of devices"):
        chosen("parallel.tensor=32", given=("parallel.tensor",))
