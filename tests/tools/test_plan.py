"""tools/plan.py as its users start it."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest

from pangu.dryrun.roles import DryRunError
from pangu.report import auto
from tests.configs import RECIPES, config
from tests.end_to_end.commands import called, command
from tests.prepare.test_preprocess_data import shell
from tests.spawn import repository
from tools import plan

PRESETS = re.findall(
    r"^\| `(\w+)` .* \| (\d+) devices? \| ([\d.]+) s, ([\d.]+) GiB \|$",
    (repository() / "docs" / "presets.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
"""Rows of the table: recipe, devices, seconds and GiB of a step on H100s."""
SMALL = ("model.layers=4", "model.hidden=64", "model.heads=4", "parallel.tensor=2", "batch.micro_size=2")


def test_sharding_without_the_devices_or_the_data() -> None:
    done = called("tools/plan", "+config=pangu_13b", "--sharding", "parallel.sequence=true")
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("counting") for line in done.stderr.splitlines())
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    for line in (
        "layer recomputed (39, layers.0 to layers.38): [s/t, b, h] -> [s/t, b, h]",
        "attention.output.weight [5120, 5120] [5120, 640] rows (inputs) over 8 ranks "
        "[1024, 4, 640] -> [128, 4, 5120] MatMul ((dp,mp),(mp,1)) + ReduceScatter to ((dp*mp,1))",
        "layer recomputed (each of 39) forward tensor all-gather 2 80.0 MiB 70.0 MiB",
        "layer recomputed (each of 39) backward tensor all-gather 6 0.23 GiB 0.21 GiB",
        "layer query recomputed backward tensor reduce-scatter 3 0.12 GiB 0.10 GiB",
        "head forward tensor all-reduce 2 48.0 KiB 84.0 KiB",
        "whole model forward tensor all-gather 81 3.16 GiB 2.77 GiB",
    ):
        assert line in lines, done.stdout
    assert "X [tokens, inputs] times A [inputs, outputs]" in done.stdout


@pytest.mark.parametrize(
    ("recipe", "devices", "seconds", "gib"),
    [pytest.param(*row, marks=() if row[0] == "gpt3_2_7b" else pytest.mark.long) for row in PRESETS],
)
def test_the_table_of_presets_has_their_plans(recipe: str, devices: str, seconds: str, gib: str) -> None:
    """To 5 %, as estimates of single operators change."""
    parallel = config(f"+config={recipe}").parallel
    replicas = int(devices) // (parallel.tensor * parallel.pipeline)
    cluster = ("cluster=h100", f"cluster.devices={devices}", f"parallel.data={replicas}")
    done = called("tools/plan", f"+config={recipe}", *cluster)
    found = re.search(r"step time ([\d.]+) s .*memory ([\d.]+) of", done.stdout)
    assert found is not None, done.stderr
    assert tuple(map(float, found.groups())) == pytest.approx((float(seconds), float(gib)), rel=0.05)


def test_every_preset_has_a_plan_in_the_table() -> None:
    assert {row[0] for row in PRESETS} == {name for name in RECIPES if not name.startswith("quickstart")}


def test_without_sharding_it_describes() -> None:
    done = called("tools/plan", *SMALL)
    assert done.returncode == 0, done.stderr
    assert "tensor 2 x pipeline 1 x data 1 = 2 devices" in done.stdout
    assert "mlp.up" not in done.stdout


def test_the_stages_of_a_pipeline() -> None:
    done = called("tools/plan", "+config=pangu_200b", "parallel.data=1")
    assert done.returncode == 0, done.stderr
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert "0 embedding, layers 0-3 7.4% 16 32.0 MiB to stage 1 embedding.word.weight 0.31 GiB" in lines, done.stdout
    assert "1 layers 4-7 7.4% 15 32.0 MiB to stage 2; 32.0 MiB to stage 0" in lines


def test_plans_and_composed_configurations_do_without_torch() -> None:
    """Importing it takes longer than both; `None` in `sys.modules` is what refuses an import."""
    script = """
import sys

sys.modules["torch"] = None
from pathlib import Path
from pangu.pretrain import pretrain
from tools.plan import main

sys.argv[1:] = ["+config=quickstart", "--cfg", "job"]
pretrain(Path("configs").resolve())
sys.exit(main(["+config=pangu_13b", "parallel.pipeline=2", "parallel.data=2", "parallel.zero=3"]))
"""
    done = command("-c", script)
    assert done.returncode == 0, done.stderr
    assert "output: runs/quickstart" in done.stdout
    assert "tensor 8 x pipeline 2 x data 2 = 32 devices, ZeRO stage 3" in done.stdout


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.heads=7", "model.heads = 7: must divide model.hidden = 64"),
        ("+model.layres=3", "unknown key; did you mean model.layers?"),
        ("model.layres=3", "unknown key; did you mean model.layers?"),
        ("+config=nowhere", "config = nowhere: unknown option; use one of deepseek_v3_671b, gpt2_124m,"),
        ("model.heads=[", "plan.py: error: model.heads=[: "),
        ("parallel.data=${nowhere}", "Interpolation key 'nowhere' not found"),
        ("dry_run=[]", "dry_run = []: must be true, false or all"),
        ("~memory", "memory = (missing): is required: a group of keys"),
    ],
)
def test_bad_input_is_one_message(override: str, words: str) -> None:
    done = called("tools/plan", *SMALL, override, "--sharding")
    assert done.returncode == 2
    assert done.stderr.count(words) == 1, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--top 3", "--top: only for --search"),
        ("--explain --tokens 1e9 --html page.html --dry-run", "--explain, --tokens, --html: only for --search"),
        ("--json", "--json needs --dry-run, --modules or --search"),
        ("--json --sharding --dry-run", "--json prints no tables: leave out --sharding"),
        ("--search --dry-run", "--search covers all layouts"),
        ("--search --sharding", "--search covers all layouts"),
        ("--modules --dry-run", "--modules prints nothing but JSON"),
        ("--search --top 0", "--top 0: must be at least 1; use e.g. --top 10"),
        ("--search --tokens nan", "--tokens nan: must be above 0"),
        ("--search --tokens inf", "--tokens inf: must be above 0 and below 1e+20"),
        ("--search --tokens -3", "--tokens -3: must be above 0"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options: str, says: str) -> None:
    done = called("tools/plan", *SMALL, "cluster=a100", *options.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert f"error: {says}" in done.stderr


@pytest.mark.usefixtures("formulas")
def test_a_plan_of_an_automatic_layout_searches_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searches = []
    search, names = auto.find_layouts, ("dry_run_roles", "print_dry_run")
    monkeypatch.setattr(auto, "find_layouts", lambda *words, **named: searches.append(words) or search(*words, **named))
    for name in names:
        monkeypatch.setattr(plan, name, lambda *words: None)
    words = (*SMALL, "cluster=a100", "parallel=auto", "parallel.data=4")
    assert called("tools/plan", *words, "--dry-run").returncode == 0
    assert len(searches) == 1


@pytest.mark.usefixtures("formulas")
def test_modules_are_those_of_the_layout_that_is_chosen() -> None:
    words = (*SMALL, "cluster=a100", "parallel=auto", "parallel.tensor=4")
    spans = json.loads(called("tools/plan", *words, "--modules", "--json").stdout)
    layer = next(span for span in spans if (span["action"], span["module"]) == ("F", "layer"))
    assert layer["work"]["collectives"][0]["axis"] == "tensor"


def test_modules_as_data() -> None:
    done = called("tools/plan", *SMALL, "--modules")
    assert done.returncode == 0, done.stderr
    spans = {(span["action"], span["module"]): span for span in json.loads(done.stdout)}
    kinds = {"start", "embedding", "layer", "layer query", "head", "end"}
    assert set(spans) == {(action, module) for action in "FB" for module in kinds}
    forward, backward = spans["F", "layer"], spans["B", "layer"]
    assert forward["work"]["launches"] > 0
    assert {one["kind"] for one in forward["work"]["collectives"]} == {"all_reduce"}
    assert len(backward["work"]["matmuls"]) > len(forward["work"]["matmuls"])
    assert backward["segments"][-1]["end"] < 0 < forward["segments"][-1]["end"]
    assert backward["segments"][0]["mark"]["event"] == "add"


def test_a_plan_without_a_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise DryRunError("no memory")

    monkeypatch.setattr(plan.Forecast, "of", fail)
    done = called("tools/plan", *SMALL, "cluster=a100")
    assert done.returncode == 0
    assert "tensor 2 x pipeline 1" in done.stdout
    assert "expected     no forecast: no memory" in done.stdout


def test_a_plan_in_bf16_for_devices_without_it_warns(caplog: pytest.LogCaptureFixture) -> None:
    for precision in ("bf16", "fp16"):
        assert called("tools/plan", *SMALL, "cluster=ascend910", f"precision={precision}").returncode == 0
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "plan"]
    assert warning.startswith("precision.compute = bf16: ascend910 has no bf16")
    assert warning.endswith("set precision=fp16")


def test_a_reader_that_stops_reading() -> None:
    done = shell(f"{shlex.quote(sys.executable)} tools/plan.py --sharding | true")
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr


def test_help_has_an_example() -> None:
    done = called("tools/plan", "--help")
    assert done.returncode == 0
    assert "python tools/plan.py +config=pangu_13b" in done.stdout
