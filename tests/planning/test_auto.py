"""The planner chooses a layout, says what a run will take, and refuses what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pangu.config.errors import UserError
from pangu.planning.auto import choose_automatically, cluster_of_device
from pangu.planning.cluster import load_clusters
from pangu.planning.forecast import Forecast
from pangu.planning.layouts import choose_layout
from tests.configs import composed
from tests.end_to_end.commands import called, pretrain
from tests.end_to_end.test_pretrain import SYNTHETIC
from tests.spawn import repository

CLUSTERS = repository() / "configs" / "cluster"
NO_DATA = ("data=synthetic", "validation.every=0")
RECIPE = ("+config=pangu_2_6b", "cluster=a100", "parallel=auto", *NO_DATA)


def chosen(*words: str, given: tuple[str, ...] = (), devices: int = 16) -> tuple[dict[str, Any], list[str]]:
    return choose_automatically(composed(*RECIPE, *words), given, devices, 8)


def test_the_choice_is_a_layout_that_can_be_run_and_fits() -> None:
    values, lines = chosen()
    config, layout, stages = choose_layout(values, 16)
    assert layout.world == 16
    forecast = Forecast.of(config, layout, stages)
    forecast.require_room(config, layout, stages)
    assert f"a step of {forecast.time.total:.3g} s and {forecast.memory.total:.3g} of 79.2 GiB" in lines[1]


def test_what_is_given_is_kept_and_costs_what_it_costs() -> None:
    (free, _), (fixed, _) = chosen(), chosen("parallel.tensor=8", given=("parallel.tensor",))
    assert free["parallel"]["tensor"] < 8
    assert fixed["parallel"]["tensor"] == 8
    free_time, fixed_time = (Forecast.of(*choose_layout(values, 16)).time.total for values in (free, fixed))
    assert free_time < fixed_time


def test_a_layout_that_does_not_fit_is_refused_with_layouts_that_do() -> None:
    values = {**composed("+config=pangu_13b", "cluster=a100", "parallel.tensor=1", "parallel.pipeline=1", *NO_DATA)}
    values["cluster"] = {**values["cluster"], "devices": 16}
    run = choose_layout(values, 16)
    with pytest.raises(UserError, match=r"needs about \d+ GiB, and a100 has 79.2; these fit: parallel") as refused:
        Forecast.of(*run).require_room(*run)
    first = str(refused.value).partition("these fit: ")[2].partition(" (")[0]
    for word in first.split():
        group, _, rest = word.partition(".")
        key, _, value = rest.partition("=")
        values[group][key] = json.loads(value.lower()) if value[0] in "0123456789[tfn" and value != "none" else value
    run = choose_layout(values, 16)
    Forecast.of(*run).require_room(*run)


def test_devices_are_known_by_their_makers_name() -> None:
    files = load_clusters(CLUSTERS)
    assert cluster_of_device("NVIDIA H100 80GB HBM3", files) == "h100"
    assert cluster_of_device("NVIDIA A100-SXM4-80GB", files) == "a100"
    assert cluster_of_device("x86_64 CPU", files) is None


def test_where_no_file_is_for_the_devices_the_message_says_what_to_do() -> None:
    done = called("pretrain", "+config=quickstart", "parallel=auto", "train.device=cpu")
    assert done.returncode == 2
    assert "parallel=auto: no file of" in done.stderr
    assert "cluster=NAME says for which to plan (one of a100," in done.stderr


@pytest.mark.parametrize(
    ("word", "rule"), [("cluster.devices=x", "must be an integer"), ("cluster.node=null", "must be an integer")]
)
def test_a_cluster_that_is_none_is_one_message(word: str, rule: str) -> None:
    done = called("pretrain", *RECIPE, word, "dry_run=true")
    assert done.returncode == 2
    assert f"{word.partition('=')[0]} = " in done.stderr
    assert rule in done.stderr


def test_a_run_plans_itself_and_compares_what_it_took(tmp_path: Path) -> None:
    words = (*SYNTHETIC, "parallel=auto", "cluster=a100", "train.steps=20", "checkpoint.every=0")
    done = pretrain(tmp_path / "run", *words)
    assert "auto         parallel.tensor=1" in done.stdout
    assert "ZeRO stage 0, as the planner chose" in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    forecast = summary["forecast"]
    assert forecast["step_time_s"] == pytest.approx(sum(forecast["terms_s"].values()))
    assert f"a step of {forecast['measured_step_time_s']:.3g} s" in done.stderr


def test_the_tool_plans_what_would_be_run() -> None:
    done = called("tools/plan", *RECIPE, "cluster.devices=16")
    assert done.returncode == 0, done.stderr
    assert "= 16 devices, ZeRO stage" in done.stdout
    assert "as the planner chose" in done.stdout


def test_every_key_of_a_layout_that_is_given_is_kept() -> None:
    words = ("parallel.data=8", "parallel.zero=1", "parallel.zero_group=4", "memory.offload=[optimizer]")
    values, _ = chosen(*words, given=tuple(word.partition("=")[0] for word in words))
    assert (values["parallel"]["data"], values["parallel"]["zero"], values["parallel"]["zero_group"]) == (8, 1, 4)
    assert values["memory"]["offload"] == ["optimizer"]


def test_what_cannot_go_together_is_refused_and_no_sharding_is_kept() -> None:
    assert chosen("parallel.zero=0", given=("parallel.zero",))[0]["parallel"]["zero"] == 0
    with pytest.raises(UserError, match="no layout of 16 devices"):
        chosen("parallel.data=8", "parallel.zero_group=3", given=("parallel.data", "parallel.zero_group"))
