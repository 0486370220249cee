"""`auto` takes the fastest kernel, on all ranks alike, and a resumed run keeps it. Nothing here is really timed: a
table says how long everything takes."""

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
from pangu.common.errors import LocalError, UserError
from pangu.interop.loading import load_model
from pangu.layers import fp8
from pangu.layers.kernel_choice import AttentionShape
from pangu.metrics.devices import processor_name
from pangu.metrics.timing import Timer, Trial
from pangu.models import compiled
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training import autotune
from pangu.training import run as running
from pangu.training.autotune import Choices, choose, save_choices, warn_of_slow_format
from pangu.training.layer_timing import warm_up
from pangu.training.saving import Saver
from pangu.training.step import Trainer
from tests.collective_counter import Traffic, counted
from tests.configs import composed, config, tiny
from tests.spawn import Pool
from tests.threads import Ranks

CPU = torch.device("cpu")
ONE = Mesh(Layout(), 0, CPU)


def table(seconds: Mapping[Any, float], asked: list[Any] | None = None) -> Timer:
    """A timer that looks a way up by its name, or by a word of it; what is not there takes for ever."""

    def look_up(name: Any) -> float:
        words = name if isinstance(name, tuple) else (name,)
        return next((seconds[word] for word in words if word in seconds), 1e6)

    def timer(
        candidates: Mapping[Any, Callable[[], object]], device: torch.device, budget_s: float
    ) -> dict[Any, float]:
        if asked is not None:
            asked.extend(candidates)
        return {name: look_up(name) for name in candidates}

    return timer


def two_kernels(*_: object) -> list[str]:
    """Kernels to choose from, as an accelerator has them."""
    return ["sdpa", "reference"]


@pytest.fixture
def choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "kernels_of", two_kernels)


@pytest.mark.usefixtures("choice")
def test_the_fastest_kernel_is_taken_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = tiny("model.layers=1", "precision.fp32_matmul=highest")
    assert choose(run, ONE, timer=table({"sdpa": 4.0, "reference": 3.0})).attention == "reference"
    found = choose(run, ONE, timer=table({"sdpa": 3.0, "reference": 4.0}))
    assert (found.attention, found.fp32_matmul) == ("sdpa", "highest")
    assert found.milliseconds["attention"]["sdpa"] == pytest.approx(3000)
    lines = [record.getMessage() for record in caplog.records][-2:]
    assert lines[0] == "attention    sdpa (model.attention=auto; ms of a micro-batch: sdpa 3e+03, reference 4e+03)"
    assert lines[1] == "fp32 matmul  highest (precision.fp32_matmul=highest)"


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

    with patch.object(fp8, "scaled_matmul", side_effect=fp8.scaled_matmul) as matmul:
        choose(tiny(*words, "precision=bf16", "precision.matmul=fp8"), ONE, timer=once_each)
    # forward and both gradients of four matrices, twice without and with, which compiles at first
    assert matmul.call_count == 3 * 4 * (2 + 2)

    def broken(*arguments: object) -> None:
        raise RuntimeError("no room for C++")

    monkeypatch.setattr(compiled, "BACKEND", broken)
    assert choose(run, ONE, timer=table({"true": 1.0, "false": 2.0})).compile == "false"
    assert "a layer cannot be compiled" in caplog.text


def test_what_is_asked_for_is_taken_and_what_leaves_no_choice_is_not_timed() -> None:
    asked: list[Any] = []
    keys = ("model.attention=reference", "precision.fp32_matmul=high")
    found = choose(tiny(*keys), ONE, timer=table({}, asked))
    assert (found.attention, found.fp32_matmul, found.milliseconds) == ("reference", "high", {})
    highest = "precision.fp32_matmul=highest"
    assert choose(tiny(highest, "model.attention_dropout=0.1"), ONE, timer=table({}, asked)).attention == "reference"
    assert choose(tiny(highest), ONE, timer=table({}, asked)).attention == "sdpa"
    assert asked == []


@pytest.mark.usefixtures("choice")
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
    assert asked == ["reference"]
    assert "attention    sdpa cannot run here: no available kernel" in [r.getMessage() for r in caplog.records]


def test_layers_with_and_without_a_window_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that is fastest for the four layers with a window is too slow for the two without."""
    seconds = {("triton", 3): 1.0, ("triton", None): 9.0, ("flex", 3): 2.0, ("flex", None): 4.0}
    shapes: dict[str, AttentionShape] = {}

    def trial(kernel: str, shape: AttentionShape, *_: object) -> Callable[[], object]:
        shapes[kernel] = shape
        return lambda: None

    def timer(trials: Any, *_: object) -> dict[str, float]:
        return {name: seconds[name, shapes[name].window] for name in trials}

    monkeypatch.setattr(autotune, "kernels_of", lambda *_: ["triton", "flex"])
    monkeypatch.setattr(autotune, "attention_trial", trial)
    given = tiny("model.layers=6", "model.window=3", "model.full_layers=3", "precision.fp32_matmul=highest")
    found = choose(given, ONE, timer=timer)
    assert found.attention == "flex"
    assert found.milliseconds["attention"] == {"triton": 22000.0, "flex": 16000.0}


def test_halves_of_micro_batches_are_timed_where_layers_compute_these(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: set[int] = set()

    def trial(kernel: str, shape: AttentionShape, *_: object) -> Callable[[], object]:
        rows.add(shape.rows)
        return lambda: None

    def product_trial(device: object, dtype: object, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        rows.add(shapes[0][0])
        raise RuntimeError

    monkeypatch.setattr(autotune, "kernels_of", two_kernels)
    monkeypatch.setattr(autotune, "attention_trial", trial)
    monkeypatch.setattr(autotune, "random", product_trial)
    words = "model.experts=4 parallel.data=2 parallel.expert=2 parallel.two_batch_overlap=true batch.micro_size=3"
    given = tiny(*words.split(), "batch.global_size=6", "precision.fp32_matmul=highest")
    found = choose(given, ONE, timer=table({"sdpa": 1.0, "reference": 2.0}))
    assert rows == {2}
    assert found.milliseconds["attention"] == {
        "sdpa": 1500.0 * given.model.layers,
        "reference": 3000.0 * given.model.layers,
    }
    rows.clear()
    for use in ("norm", "weight_gradient"):
        autotune.time_uses(use, ["torch", "apex"], given, ONE, table({}))
    assert rows == {2 * given.model.sequence}


def test_with_dropout_the_fastest_of_those_that_drop_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their trials drop as the run does. A run that is resumed keeps its own."""
    given, asked = tiny("model.attention_dropout=0.1"), []
    drops: list[float] = []

    def trial(kernel: str, shape: AttentionShape, *_: object) -> Callable[[], object]:
        drops.append(shape.dropout)
        return lambda: None

    monkeypatch.setattr(autotune, "kernels_of", lambda *_: ["triton", "flex"])
    monkeypatch.setattr(autotune, "attention_trial", trial)
    timer = table({"triton": 9.0, "flex": 1.0}, asked)
    first = choose(given, ONE, timer=timer)
    assert first.attention == "flex"
    assert set(drops) == {0.1}
    assert choose(given, ONE, asdict(replace(first, attention="triton")), timer).attention == "triton"


def test_a_kernel_that_drops_others_in_every_layout_is_not_gone_on_with(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As `auto` took it before there was one that does not, and the log says how to keep it."""
    given, timer = tiny("model.attention_dropout=0.1"), table({})
    monkeypatch.setattr(autotune, "kernels_of", lambda *_: ["triton"])
    monkeypatch.setattr(autotune, "attention_trial", lambda *_: lambda: None)
    before = asdict(choose(given, ONE, timer=timer))
    with caplog.at_level(logging.INFO, "pangu"):
        assert choose(given, ONE, before | {"attention": "flash"}, timer).attention == "triton"
    said = [record.getMessage() for record in caplog.records]
    words = "'flash' drops different elements in each layout; set model.attention=flash to keep it"
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


@pytest.mark.usefixtures("choice")
def test_explicit_scores_that_take_much_memory_are_no_candidate() -> None:
    asked: list[Any] = []
    for sequence in (16, 1024):
        choose(tiny(f"model.sequence={sequence}", "precision=bf16"), ONE, timer=table({"sdpa": 1.0}, asked))
        assert any("reference" in way for way in asked) == (sequence == 16)
        asked.clear()


def ranks_choose(rank: int, world: int, *overrides: str) -> dict[str, Any]:
    """Choices of one of two ranks, each of which finds another way the fastest."""
    given = config(*overrides)
    mesh = Mesh.connect(Layout(data=2, zero=1), CPU)
    own: list[dict[Any, float]] = [{"sdpa": 1.0, "reference": 2.0}, {"sdpa": 9.0, "reference": 2.5}]
    with patch.object(autotune, "kernels_of", two_kernels):
        return asdict(choose(given, mesh, timer=table(own[rank])))


def test_the_slowest_rank_decides_for_all(pool: Pool) -> None:
    first, second = pool.run(2, ranks_choose, "model=pangu_quickstart", "data=synthetic", "parallel.zero=1")
    assert first == second
    assert first["attention"] == "reference"


HERE = Choices("reference", "highest", processor_name(CPU), "fp32", {"attention": {"reference": 7.0}})


@pytest.mark.usefixtures("choice")
@pytest.mark.parametrize(
    ("recorded", "overrides", "expected", "says"),
    [
        (asdict(HERE), (), "reference", "reference (model.attention=auto; kept from the checkpoint; ms"),
        (asdict(replace(HERE, device="another")), (), "sdpa", "chosen on 'another', 'fp32': chosen again"),
        (asdict(HERE), ("precision=bf16",), "sdpa", "chosen again"),
        (asdict(replace(HERE, attention="blocked")), (), "sdpa", "'blocked' is not available in this run"),
        (None, (), "sdpa", "sdpa (model.attention=auto; ms"),
        ("hostile", (), "sdpa", "sdpa (model.attention=auto; ms"),
        (
            {"device": HERE.device, "compute": "fp32", "attention": ["\x1b"], "milliseconds": 3},
            (),
            None,
            "chosen again",
        ),
    ],
    ids=["kept", "device", "format", "impossible", "new", "hostile", "damaged"],
)
def test_a_resumed_run_keeps_its_choices_where_it_can(
    recorded: object,
    overrides: tuple[str, ...],
    expected: str | None,
    says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found = choose(tiny("model.layers=1", *overrides), ONE, recorded, table({"sdpa": 1.0}))
    assert expected is None or found.attention == expected
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
    assert Trainer(tiny(), ONE, choices=HERE).model.kernel.__name__ == "Reference"
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


def test_products_by_which_whole_layers_are_faster_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside compiled layers, of which each is timed by each."""
    monkeypatch.setattr(autotune, "precisions", lambda *_: ["highest", "medium"])
    assert choose(tiny(), ONE, timer=table({"highest": 2.0, "medium": 1.0})).fp32_matmul == "medium"
    assert choose(tiny(), ONE, timer=table({"highest": 1.05, "medium": 1.0})).fp32_matmul == "highest"
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    times: dict[Any, float] = {("highest", "false"): 2.0, ("medium", "false"): 4.0, ("highest", "true"): 3.0}
    found = choose(tiny("compile=auto"), ONE, timer=lambda ways, *_: {way: times.get(way, 1.0) for way in ways})
    assert (found.fp32_matmul, found.compile) == ("medium", "true")
    assert found.milliseconds["fp32_matmul"] == {"highest": 9000, "medium": 3000}
    assert choose(tiny("train.deterministic=true"), ONE, timer=table({"medium": 1.0})).fp32_matmul == "highest"
    earlier = asdict(found)
    earlier["products"] = earlier.pop("fp32_matmul")  # as in checkpoints of earlier versions
    assert choose(tiny(), ONE, earlier, timer=table({"highest": 1.0})).fp32_matmul == "medium"


@pytest.mark.usefixtures("choice")
def test_really_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real timer, for what it returns: every candidate gets a time."""
    monkeypatch.setattr(autotune, "precisions", lambda *_: ["highest", "medium"])
    found = choose(tiny(), ONE).milliseconds
    assert set(found["attention"]) == {"sdpa", "reference"}
    assert set(found["fp32_matmul"]) == {"highest", "medium"}


def warmed_up(rank: int, world: int, layout: Layout, *overrides: str) -> tuple[dict[str, Traffic], bool]:
    """What a rank sends for its warm-up, and whether every rank had computed its layer when this one went on."""
    mesh, store = Mesh.connect(layout, CPU), dist.distributed_c10d._get_default_store()

    def once(trials: Mapping[Any, Trial], device: torch.device, budget_s: float) -> dict[Any, float]:
        gradients: Any = trials["layer"]()
        assert all(gradient is None or gradient.isfinite().all() for gradient in gradients)
        assert sum(gradient is not None for gradient in gradients) > 1
        store.set(f"computed-{rank}", "")
        return {"layer": 1.0}

    with counted() as sent:
        warm_up(tiny("batch.global_size=16", *overrides), mesh, "sdpa", False, once)
    return sent, store.check([f"computed-{rank}" for rank in range(world)])


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        (Layout(pipeline=2), ("model.positions=relative", "model.dropout=0.1")),
        (Layout(tensor=2, data=2, sequence=True), ("model.positions=rope", "memory.recompute=full")),
        (Layout(context=2), ("model.kind=gpt", "model.positions=alibi")),
        (Layout(data=2), ("model.layers=1",)),
        (Layout(data=2, expert=2), ("model.experts=4", "model.experts_per_token=2")),
    ],
    ids=str,
)
def test_all_ranks_compute_a_layer_before_the_first_step_and_send_nothing(
    ranks: Ranks, layout: Layout, overrides: tuple[str, ...]
) -> None:
    parallel = [f"parallel.{name}={getattr(layout, name)}" for name in ("tensor", "pipeline", "context", "expert")]
    assert ranks.run(layout.world, warmed_up, layout, *parallel, *overrides) == [({}, True)] * layout.world
