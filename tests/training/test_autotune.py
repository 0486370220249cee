"""`auto` takes the fastest of the ways that are exact, on all ranks alike, and a resumed run keeps it. Nothing here is
really timed: a table says how long everything takes."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pangu.checkpoint.index import read_index
from pangu.collectives.algorithms import RepeatedCollective
from pangu.collectives.reduce import start_reduce_scatter
from pangu.common.errors import LocalError, UserError
from pangu.interop.loading import load_model
from pangu.layers import fp8, fp32_matmul
from pangu.layers.fp32_matmul import MatmulShape, matmul_precisions
from pangu.layers.kernel_choice import AttentionShape
from pangu.metrics.devices import processor_name
from pangu.metrics.timing import Timer
from pangu.models import compiled
from pangu.topology.layout import Layout
from pangu.topology.mesh import Algorithms, Mesh
from pangu.topology.recorder import AxisGroup
from pangu.training import autotune
from pangu.training import run as running
from pangu.training.autotune import Choices, choose, save_choices, warn_of_slow_format
from pangu.training.saving import Saver
from pangu.training.step import Trainer
from tests.configs import composed, config, tiny
from tests.spawn import Pool

CPU = torch.device("cpu")
ONE = Mesh(Layout(), 0, CPU)
SDPA_SLOW = {"medium": 1.0, "highest": 2.0, ("sdpa", "medium"): 9.0, "sdpa": 3.0, "reference": 4.0}
"""Products are faster by `medium`, which slows `sdpa` down by more."""


def table(seconds: Mapping[Any, float], asked: list[Any] | None = None) -> Timer:
    """A timer that looks a way up by its whole name, or by its first word; what is not there takes for ever."""

    def look_up(name: Any) -> float:
        words = (name, *name[:1]) if isinstance(name, tuple) else (name,)
        return next((seconds[word] for word in words if word in seconds), 1e6)

    def timer(
        candidates: Mapping[Any, Callable[[], object]], device: torch.device, budget_s: float | None
    ) -> dict[Any, float]:
        if asked is not None:
            asked.extend(candidates)
        return {name: look_up(name) for name in candidates}

    return timer


@pytest.fixture
def two_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if both ways to fp32 products were exact, whatever processor this is."""
    monkeypatch.setattr(fp32_matmul, "_error_of_medium", lambda matmul: 0.0)


@pytest.mark.usefixtures("two_ways")
def test_products_and_attention_are_chosen_together(caplog: pytest.LogCaptureFixture) -> None:
    """Products alone would say `medium`; with the only kernels that are fast then a micro-batch takes longer."""
    caplog.set_level(logging.INFO)
    with_sdpa = choose(tiny("model.layers=1"), ONE, timer=table(SDPA_SLOW | {("reference", "medium"): 90.0}))
    assert (with_sdpa.attention, with_sdpa.products) == ("sdpa", "highest")
    explicit = choose(tiny("model.layers=1"), ONE, timer=table(SDPA_SLOW | {("reference", "medium"): 0.5}))
    assert (explicit.attention, explicit.products) == ("reference", "medium")
    assert with_sdpa.milliseconds["attention"]["sdpa"] == pytest.approx(3000)
    lines = [record.getMessage() for record in caplog.records]
    timed = "ms of a micro-batch on one thread"
    assert lines[0].startswith(f"attention    sdpa (model.attention=auto; {timed}: sdpa 3e+03, ")
    assert lines[1].startswith(f"products     highest (precision.fp32_matmul=auto; {timed}: highest ")


def test_layers_whose_compilation_needs_too_much_memory_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has")

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(compiled, "BACKEND", full)
    run = tiny("compile=auto", "model.attention=sdpa", "model.dropout=0.1")
    assert choose(run, ONE, timer=table({"true": 1.0, "false": 2.0})).compile == "false"
    assert any(re.match("compile +.*CUDA out of memory", line) for line in caplog.messages)


def test_layers_are_compiled_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As a resumed run keeps it, and not where the compiler fails."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    words = ("compile=auto", "model.attention=sdpa", "model.dropout=0.1")
    run = tiny(*words)
    faster = choose(run, ONE, timer=table({"true": 1.0, "false": 2.0}))
    slower = choose(run, ONE, timer=table({"true": 2.0, "false": 1.0}))
    assert (faster.compile, slower.compile) == ("true", "false")
    assert faster.milliseconds["compile"] == {"false": 6000, "true": 3000}
    assert "compile      true (compile=auto; ms of a micro-batch: false 6e+03, true 3e+03)" in caplog.messages
    assert isinstance(Trainer(run, ONE, choices=faster).model.compute, compiled.CompiledBlocks)
    assert not isinstance(Trainer(run, ONE, choices=slower).model.compute, compiled.CompiledBlocks)
    assert choose(run, ONE, asdict(faster), timer=table({"false": 1.0})).compile == "true"
    assert choose(tiny("compile=auto", "train.deterministic=true"), ONE, timer=table({"true": 1.0})).compile == "false"

    def once_each(trials: Mapping[str, Callable[[], object]], *_: object) -> dict[str, float]:
        return {name: float(trial() is None) for name, trial in trials.items()}

    with patch.object(fp8, "product", side_effect=fp8.product) as product:
        choose(tiny(*words, "precision=bf16", "precision.matmul=fp8"), ONE, timer=once_each)
    # forward and both gradients of four matrices: without, and twice with, which compiles at first
    assert product.call_count == 3 * 4 * (1 + 2)

    def broken(*arguments: object) -> None:
        raise RuntimeError("no room for C++")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    assert choose(run, ONE, timer=table({"true": 1.0, "false": 2.0})).compile == "false"
    assert "a layer cannot be compiled" in caplog.text


def test_an_inexact_way_is_not_even_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp32_matmul, "_error_of_medium", lambda matmul: 1e-2)
    asked: list[Any] = []
    assert choose(tiny(), ONE, timer=table({"medium": 1e-6, "sdpa": 1.0}, asked)).products == "highest"
    assert asked
    assert not any("medium" in way for way in asked)


@pytest.mark.usefixtures("two_ways")
def test_what_is_asked_for_is_taken_and_what_leaves_no_choice_is_not_timed() -> None:
    asked: list[Any] = []
    keys = ("model.attention=reference", "precision.fp32_matmul=highest")
    found = choose(tiny(*keys), ONE, timer=table({}, asked))
    assert (found.attention, found.products, found.milliseconds, asked) == ("reference", "highest", {}, [])
    drops = choose(
        tiny("model.attention_dropout=0.1"), ONE, timer=table({"reference": 0.0, "medium": 1.0, "highest": 2.0})
    )
    assert (drops.attention, drops.products) == ("reference", "medium")


def test_a_kernel_that_fails_here_is_left_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(kernel: str, *_: object) -> Callable[[], object]:
        if kernel == "sdpa":
            raise RuntimeError("no available kernel\nand why")
        return lambda: None

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(autotune, "attention_trial", failing)
    asked: list[Any] = []
    found = choose(tiny("precision.fp32_matmul=highest"), ONE, timer=table({"reference": 9.0}, asked))
    assert (found.attention, set(found.milliseconds["attention"])) == ("reference", {"reference"})
    assert asked == [("reference", "highest")]
    assert "attention    sdpa cannot run here: no available kernel" in [r.getMessage() for r in caplog.records]


def test_with_dropout_the_fastest_of_those_that_drop_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trials drop as the run does. A run that is resumed keeps its own."""
    given, asked = tiny("model.attention_dropout=0.1"), []
    drops: list[float] = []

    def trial(kernel: str, shape: AttentionShape, *_: object) -> Callable[[], object]:
        drops.append(shape.dropout)
        return lambda: None

    monkeypatch.setattr(autotune, "kernels_of", lambda *_: ["triton", "flex"])
    monkeypatch.setattr(autotune, "attention_trial", trial)
    timer = table({"triton": 9.0, "flex": 1.0, "medium": 1.0, "highest": 1.0}, asked)
    first = choose(given, ONE, timer=timer)
    assert first.attention == "flex"
    assert set(drops) == {0.1}
    assert choose(given, ONE, asdict(replace(first, attention="triton")), timer).attention == "triton"


def test_a_kernel_that_drops_others_in_every_layout_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `auto` took it before there was one that does not, and the log says how to keep it."""
    given, timer = tiny("model.attention_dropout=0.1"), table({"medium": 1.0, "highest": 1.0})
    monkeypatch.setattr(autotune, "kernels_of", lambda *_: ["triton"])
    monkeypatch.setattr(autotune, "attention_trial", lambda *_: lambda: None)
    monkeypatch.setattr(autotune, "matmul_precisions", lambda *_: ["highest"])
    before = asdict(choose(given, ONE, timer=timer))
    with caplog.at_level(logging.INFO, "pangu"):
        assert choose(given, ONE, before | {"attention": "flash"}, timer).attention == "triton"
    said = [record.getMessage() for record in caplog.records]
    words = "'flash' drops other elements in each layout; set model.attention=flash to keep it"
    assert f"attention    the checkpoint's {words}" in said
    assert not any("cannot be had" in line for line in said)


def test_a_recorded_kernel_that_can_be_compiled_no_longer_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are timed; nothing is said to be kept."""

    def trial(kernel: str, *_: object) -> Callable[[], object]:
        if kernel == "flex":
            raise LocalError("no compiler")
        return lambda: None

    given, timer = tiny("model.attention_dropout=0.1"), table({"triton": 2.0, "reference": 3.0, "flex": 1.0})
    monkeypatch.setattr(autotune, "matmul_precisions", lambda *_: ["highest"])
    monkeypatch.setattr(autotune, "kernels_of", lambda *_: ["triton", "flex", "reference"])
    monkeypatch.setattr(autotune, "attention_trial", lambda *_: lambda: None)
    recorded = choose(given, ONE, timer=timer)
    assert recorded.attention == "flex"
    monkeypatch.setattr(autotune, "attention_trial", trial)
    caplog.clear()
    with caplog.at_level(logging.INFO, "pangu"):
        found = choose(given, ONE, asdict(recorded), timer)
    assert found.attention == "triton"
    assert set(found.milliseconds["attention"]) == {"triton", "reference"}
    lines = [line for line in caplog.messages if line.startswith("attention    ")]
    assert lines[0] == "attention    flex cannot run here: no compiler"
    assert "kept from the checkpoint" not in lines[1]


@pytest.mark.parametrize("kernels", [["triton", "reference"], ["triton", "flex", "reference"]], ids=str)
def test_where_no_kernel_can_be_compiled_the_scores_are_computed(
    kernels: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where they take so much memory that they are no candidate, and the only one left is tried all the same."""

    def fails(kernel: str, *_: object) -> Callable[[], object]:
        raise LocalError("model.attention = triton cannot run on this device (no compiler)")

    monkeypatch.setattr(autotune, "kernels_of", lambda *_: kernels)
    monkeypatch.setattr(autotune, "attention_trial", fails)
    given = tiny("model.attention_dropout=0.1", "model.sequence=1024", "precision=bf16")
    with caplog.at_level(logging.INFO, "pangu"):
        assert choose(given, ONE, timer=table({})).attention == "reference"
    assert "cannot run here: model.attention = triton cannot run on this device" in caplog.text
    named = tiny("model.attention_dropout=0.1", "model.sequence=1024", "precision=bf16", "model.attention=sdpa")
    monkeypatch.setattr(autotune, "kernels_of", lambda *_: ["sdpa"])
    assert choose(named, ONE, timer=table({})).attention == "sdpa"


def test_explicit_scores_that_take_much_memory_are_no_candidate() -> None:
    asked: list[Any] = []
    for sequence in (16, 1024):
        choose(tiny(f"model.sequence={sequence}", "precision=bf16"), ONE, timer=table({"sdpa": 1.0}, asked))
        assert any("reference" in way for way in asked) == (sequence == 16)
        asked.clear()


def ranks_choose(rank: int, world: int, *overrides: str) -> tuple[dict[str, Any], list[str]]:
    """Choices of one of two ranks, each of which finds another way the fastest."""
    given = config(*overrides)
    mesh = Mesh.connect(Layout(data=2, zero=1), CPU)
    own: list[dict[Any, float]] = [
        {"sdpa": 1.0, "flex": 5.0, "reference": 2.0, "exchange": 1.0, "own": 3.0},
        {"sdpa": 9.0, "flex": 4.0, "reference": 2.5, "exchange": 4.0, "own": 2.0},
    ]
    group = mesh.group("gather")
    assert group is not None
    algorithms = RepeatedCollective("gather", group, 2, torch.float32).algorithms
    return asdict(choose(given, mesh, timer=table(own[rank]))), algorithms


def test_the_slowest_rank_decides_for_all(pool: Pool) -> None:
    keys = ("model=pangu_quickstart", "data=synthetic", "precision.fp32_matmul=highest", "parallel.zero=1")
    (first, ways), second = pool.run(2, ranks_choose, *keys)
    assert (first, ways) == second
    assert ways == ["exchange", "own"]
    assert (first["attention"], first["gather"], first["scatter"]) == ("reference", "own", "own")


def both_ways(rank: int, world: int) -> tuple[list[str], bool]:
    """Algorithms to scatter, and whether they give the same bits."""
    assert dist.group.WORLD is not None
    group = AxisGroup(dist.group.WORLD, "world")
    whole = torch.randn(world * 1000, generator=torch.Generator().manual_seed(rank))
    parts, ways = [], RepeatedCollective("scatter", group, len(whole), whole.dtype).algorithms
    for way in ways:
        parts.append(torch.empty(1000))
        work = start_reduce_scatter(parts[-1], whole.clone(), group, Algorithms(scatter=way))
        assert work is not None
        work.wait()
    return ways, all(torch.equal(part, parts[0]) for part in parts)


def test_ways_to_scatter_add_up_in_the_same_order(pool: Pool) -> None:
    assert pool.run(2, both_ways) == [(["exchange", "own"], True)] * 2
    assert pool.run(4, both_ways) == [(["exchange"], True)] * 4


HERE = Choices(
    "reference", "medium", "exchange", "exchange", processor_name(CPU), "fp32", {"attention": {"reference": 7.0}}
)


@pytest.mark.usefixtures("two_ways")
@pytest.mark.parametrize(
    ("recorded", "overrides", "expected", "says"),
    [
        (asdict(HERE), (), ("reference", "medium"), "reference (model.attention=auto; kept from the checkpoint; ms"),
        (
            asdict(HERE),
            ("model.attention=sdpa",),
            ("sdpa", "medium"),
            "sdpa (model.attention=sdpa)",
        ),
        (asdict(replace(HERE, device="another")), (), ("sdpa", "highest"), "chosen on 'another', 'fp32': timed again"),
        (asdict(HERE), ("precision=bf16",), ("sdpa", "highest"), "timed again"),
        (
            asdict(replace(HERE, attention="blocked")),
            (),
            ("sdpa", "medium"),
            "'blocked' is not available in this layout",
        ),
        (None, (), ("sdpa", "highest"), "sdpa (model.attention=auto; ms"),
        ("hostile", (), ("sdpa", "highest"), "sdpa (model.attention=auto; ms"),
        ({"device": HERE.device, "compute": "fp32", "attention": ["\x1b"], "milliseconds": 3}, (), None, "timed again"),
    ],
    ids=["kept", "explicit", "device", "format", "impossible", "new", "hostile", "damaged"],
)
def test_a_resumed_run_keeps_its_choices_where_it_can(
    recorded: object,
    overrides: tuple[str, ...],
    expected: tuple[str, str] | None,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found = choose(tiny("model.layers=1", *overrides), ONE, recorded, table({"sdpa": 1.0, "highest": 1.0}))
    assert expected is None or (found.attention, found.products) == expected
    assert says in caplog.text
    assert "\x1b" not in caplog.text
    if recorded == asdict(HERE) and not overrides:
        assert found == HERE


def test_checkpoints_and_the_run_folder_hold_the_choices(tmp_path: Path) -> None:
    """A checkpoint keeps them for a resumed run, and for who asks the model; choices.json is for people."""
    given = tiny(f"train.output={tmp_path}", "checkpoint.asynchronous=false", "data.packing.eod=3")
    trainer = Trainer(given, ONE, choices=HERE)
    (tmp_path / "metrics.jsonl").touch()  # which a save brings to the disk
    saver = Saver(given, trainer)
    saver.save(0, {})
    saver.finish()
    save_choices(tmp_path, HERE)
    assert read_index(tmp_path / "checkpoints" / "step-00000000")["choices"] == asdict(HERE)
    assert json.loads((tmp_path / "choices.json").read_text()) == asdict(HERE)
    running.save_config(tmp_path, given)
    assert load_model(tmp_path, ONE).runner.model.kernel.__name__ == "Reference"


def test_the_trainer_computes_as_it_was_chosen() -> None:
    trainer = Trainer(tiny(), ONE, choices=replace(HERE, gather="own", scatter="own"))
    assert trainer.model.kernel.__name__ == "Reference"
    assert trainer.mesh.algorithms == Algorithms("own", "own")
    assert Trainer(tiny(), ONE).model.kernel.__name__ == "Sdpa"


def test_a_dry_run_times_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a dry run measures")

    monkeypatch.setattr(autotune, "time_candidates", refuse)
    monkeypatch.setattr(running, "choose", refuse)
    monkeypatch.setattr(running, "warn_of_slow_format", refuse)
    running.run(composed("+config=quickstart", "dry_run=true", f"train.output={tmp_path / 'run'}"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("precision", "times", "says"),
    [
        ("bf16", {"fp32": 1.0, "bf16": 38.0}, "matmuls take 38.0 times as long as in fp32; set precision=fp32"),
        ("fp16", {"fp32": 2.0, "bf16": 1.0, "fp16": 20.0}, "20.0 times as long as in bf16; set precision=bf16"),
        ("bf16", {"fp32": 1.0, "bf16": 0.5}, ""),
        ("fp32", {}, ""),
    ],
)
def test_a_format_without_instructions_is_named(
    precision: str, times: dict[str, float], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_slow_format(tiny(f"precision={precision}"), ONE, table(times))
    assert says in caplog.text
    assert bool(caplog.records) == bool(says)


def test_a_kernel_that_cannot_run_here_is_refused() -> None:
    with pytest.raises(UserError, match="needs a device of type cuda"):
        choose(tiny("model.attention=flex", "model.hidden=64"), ONE)


def test_really_timed_once(caplog: pytest.LogCaptureFixture) -> None:
    """The real timer, for what it returns: every candidate that this processor has gets a time."""
    found = choose(tiny(), ONE)
    assert set(found.milliseconds["attention"]) >= {"sdpa", "reference"}
    assert found.products in matmul_precisions("auto", CPU, torch.float32, MatmulShape(128, 128, 128))
