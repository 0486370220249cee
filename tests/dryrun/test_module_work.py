"""What a module does, counted: against formulas, and against the steps of whole stages."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from pangu.models.size import layer_flops
from pangu.pipeline.layouts import choose_layout
from pangu.planning import module_work
from pangu.planning.cluster import load_cluster
from pangu.planning.forecast import plan_of
from pangu.planning.layout_work import Plan
from pangu.planning.lower_bounds import Bounds
from pangu.planning.memory import memory_of_stages
from pangu.planning.module_work import ModuleCounts, Piece
from pangu.planning.program import Program
from pangu.planning.search import OFFLOADED, enumerate_plans, offloaded, problem_of, space_of, time_of
from pangu.planning.workload import Workload
from pangu.topology.layout import Coordinates
from tests.dryrun.conftest import SharedWorker
from tests.dryrun.layouts import SMALL, values
from tests.end_to_end.commands import called
from tests.spawn import repository

pytestmark = pytest.mark.usefixtures("commands_share_it")
A100 = load_cluster(repository() / "configs" / "cluster" / "a100.yaml")
SHAPE = ("model.hidden=512", "model.heads=8", "model.sequence=256", "model.vocab=4096", "precision=bf16")
LARGER = ("model.hidden=256", "model.sequence=128", "model.layers=8", "precision=bf16")
PLANNED = (
    "batch.global_size=12 batch.micro_size=3 parallel.data=2 parallel.zero=2 model.vocab=8192 model.sequence=1024",
    "batch.global_size=16 parallel.pipeline=4 parallel.schedule=zb_h1 parallel.tensor=2 parallel.sequence=true",
    "batch.global_size=16 parallel.pipeline=2 parallel.schedule=zb_v parallel.virtual=2 memory.recompute=1",
    "batch.global_size=16 parallel.pipeline=2 parallel.schedule=interleaved parallel.virtual=2 parallel.data=2 "
    "parallel.zero=2 memory.recompute=full model.kind=gpt model.vocab=32768 model.layers=4",
    "batch.global_size=16 parallel.pipeline=2 batch.micro_size=2 parallel.data=2 memory.offload=[optimizer]",
    "batch.global_size=8 optimizer=lamb model.positions=relative parallel.pipeline=2",
    "batch.global_size=32 parallel.data=4 parallel.pipeline=2 parallel.zero=3 parallel.zero_group=2 model.vocab=8192 "
    "batch.micro_size=2 loss.chunk=90",
    "batch.global_size=32 parallel.data=2 parallel.pipeline=4 parallel.zero=3 parallel.schedule=gpipe model.vocab=8192 "
    "batch.micro_size=2 loss.chunk=256 model.sequence=512 model.layers=4 memory.recompute=full",
    "batch.global_size=16 parallel.data=2 parallel.pipeline=2 parallel.zero=3 parallel.schedule=gpipe "
    "model.vocab=32768 batch.micro_size=2 model.sequence=1024 memory.recompute=full",
    "batch.global_size=8 parallel.data=2 parallel.pipeline=2 parallel.virtual=2 parallel.zero=3 model.vocab=8192 "
    "parallel.schedule=breadth_first batch.micro_size=2 loss.chunk=256 model.sequence=512 model.layers=4",
    "parallel.data=2 parallel.zero=1 precision.reduce=bf16",
    "batch.global_size=16 parallel.context=2 parallel.data=2 parallel.zero=2 model.attention=flash",
    "batch.global_size=16 parallel.context=4 parallel.context_kind=ring parallel.pipeline=2 model.attention=flash",
    "batch.global_size=24 parallel.pipeline=2 parallel.schedule=gpipe memory.recompute=full model.layers=4 "
    "memory.offload=[activations]",
    "batch.global_size=24 parallel.pipeline=2 parallel.schedule=gpipe memory.recompute=1 model.layers=3 "
    "memory.offload=[activations]",
    "batch.global_size=8 parallel.data=2 parallel.zero=3 memory.offload=[optimizer,parameters,activations]",
    "batch.global_size=16 precision=fp8 parallel.pipeline=2 parallel.schedule=zb_h1",
    "batch.global_size=16 parallel.pipeline=2 model.kind=gpt model.experts=4 parallel.tensor=2 parallel.sequence=true",
    "batch.global_size=32 model.experts=8 parallel.data=4 parallel.expert=4 parallel.zero=1 parallel.pipeline=2 "
    "parallel.schedule=zb_h1 memory.recompute=full",
    "batch.global_size=32 model.kind=gpt model.experts=4 parallel.data=4 parallel.expert=2 parallel.zero=2 "
    "parallel.overlap_chunks=2 model.shared_experts=1",
    "batch.global_size=32 model.kind=gpt model.experts=4 parallel.data=4 parallel.expert=2 parallel.zero=3 "
    "parallel.zero_group=2 memory.offload=[optimizer,parameters]",
    "batch.global_size=16 model.experts=8 parallel.tensor=2 parallel.sequence=true parallel.data=2 parallel.expert=4 "
    "parallel.expert_tensor=1 parallel.pipeline=2",
    "batch.global_size=16 model.kind=gpt model.experts=4 model.dense_layers=1 model.expert_every=2 parallel.data=2 "
    "parallel.expert=2 parallel.zero=1 parallel.pipeline=2 memory.recompute=1",
    "batch.global_size=16 model.experts=4 parallel.context=2 parallel.context_kind=ring parallel.expert=2 "
    "parallel.zero=3 model.attention=flash",
    "batch.global_size=24 batch.micro_size=6 model.sequence=1024 model.vocab=16384 model.kind=gpt model.experts=8 "
    "model.dense_layers=1 parallel.data=4 parallel.expert=4 parallel.zero=2 memory.recompute=full",
    "batch.global_size=24 batch.micro_size=2 model.sequence=1024 model.vocab=8192 model.kind=gpt model.experts=4 "
    "model.dense_layers=1 model.expert_every=2 parallel.data=2 parallel.expert=2 parallel.zero=1 parallel.pipeline=2 "
    "memory.recompute=1",
    "batch.global_size=24 batch.micro_size=3 model.sequence=1024 model.vocab=16384 model.kind=gpt parallel.data=2 "
    "parallel.zero=3",
    "batch.global_size=8 batch.micro_size=2 model.sequence=1024 model.vocab=1024 model.kind=gpt precision=fp32 "
    "parallel.pipeline=4 loss.chunk=300 memory.offload=[activations]",
    "batch.global_size=8 parallel.data=2 parallel.zero=3 parallel.bucket_mib=20",
    "batch.global_size=8 parallel.data=2 parallel.zero=2 parallel.bucket_mib=20 parallel.pipeline=2",
    "batch.global_size=8 parallel.data=2 parallel.zero=3 parallel.bucket_mib=7 parallel.schedule=zb_h1 "
    "parallel.pipeline=2",
    "batch.global_size=8 parallel.data=2 parallel.zero=3 parallel.overlap=false",
    "batch.global_size=8 parallel.data=2 parallel.zero=3 parallel.overlap=false parallel.bucket_mib=10 "
    "parallel.pipeline=2 parallel.virtual=2 parallel.schedule=interleaved",
    "batch.global_size=16 parallel.pipeline=4 model.residual_scores=true parallel.tensor=2 parallel.sequence=true",
)
NAMES = {"gather": "shard", "replicas": "data", "expert_gather": "expert_shard", "expert_replicas": "expert_data"}
"""Axis of a process group -> what the cost model calls it, if other."""
OFF = 0.06
"""Most by which the formulas that are made of counted modules may be off the peak of a dry run."""


@pytest.fixture(autouse=True)
def own_cache(session_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the tests of a session count, and nothing else."""
    folder = session_folder / "cache"
    folder.mkdir(exist_ok=True)
    monkeypatch.setattr(module_work, "cache_folder", lambda: folder)
    return folder


@pytest.mark.parametrize("piece", [Piece(1, False), Piece(2, True)])
def test_a_layer_is_what_formulas_say(piece: Piece) -> None:
    """Activations to 0.1 % (the kernel keeps its random state as well), products and collectives exactly."""
    config = choose_layout(values("", *SHAPE), 1).config
    counts = ModuleCounts(config)
    tensor, tokens = piece.tensor, 3 * config.model.sequence
    modules = counts.of(piece, 3)
    layer = modules["layer"]
    # Korthikanti et al. 2022, table 2: 34, without the two masks of dropout; a fused kernel keeps no scores but their
    # sums, and norms keep two statistics
    saved = tokens * (32 * config.model.hidden + 4 * config.model.heads + 16) / tensor
    assert layer.saved_bytes == pytest.approx(saved, rel=1e-3)
    # half of the fused products is masked
    flops = sum(matmul.flops * (2 if matmul.fused else 1) for matmul in layer.forward.matmuls)
    assert flops * tensor == tokens * layer_flops(config.model)
    weights = [matmul for matmul in layer.forward.matmuls if not matmul.fused]
    assert sum(matmul.flops for matmul in layer.backward_weight.matmuls) == sum(matmul.flops for matmul in weights)
    sent = {one.kind: one.calls for one in layer.forward.collectives}
    assert sent == ({"all_gather": 2, "reduce_scatter": 2} if tensor > 1 else {})
    assert all(one.bytes == 2 * tokens * config.model.hidden for one in layer.forward.collectives)
    # tensors of one sequence need no copies to be turned; from two on each kernel is started once, however many
    assert counts.of(piece, 16)["layer"].forward.launches == counts.of(piece, 2)["layer"].forward.launches
    assert modules["head"].saved_bytes > 2 * tokens * config.model.vocab / tensor
    again = counts.of(piece._replace(recompute="full"), 3)["layer"]
    assert again.saved_bytes == 2 * tokens * config.model.hidden / tensor
    # the last product of a layer is not computed again
    assert 0 < again.recompute.launches < layer.forward.launches


@pytest.mark.parametrize("piece", [Piece(1, False), Piece(2, True)])
def test_a_layer_of_experts_is_what_formulas_say(piece: Piece) -> None:
    """The products of a token's experts, in one kernel for all experts; the router's, which each tensor-parallel rank
    carries out for all tokens."""
    experts = ("model.experts=8", "model.experts_per_token=2", "model.shared_experts=1", "model.activation=swiglu")
    config = choose_layout(values("", *SHAPE, *experts, "model.biases=false", "model.expert_ffn=256"), 1).config
    layer, tokens = ModuleCounts(config).of(piece, 4)["layer"], 4 * config.model.sequence
    grouped = [matmul for matmul in layer.forward.matmuls if matmul.batch == 8]
    assert {(one.rows, one.columns, one.depth) for one in grouped} == {
        (tokens * 2 // 8, 512 // piece.tensor, 512),
        (tokens * 2 // 8, 512, 256 // piece.tensor),
    }
    flops = sum(matmul.flops * (2 if matmul.fused else 1) for matmul in layer.forward.matmuls)
    router = 2 * tokens * 512 * 8
    assert (flops - router) * piece.tensor + router == tokens * layer_flops(config.model)
    again = layer.backward_weight.matmuls
    assert sum(one.flops for one in again) == sum(one.flops for one in layer.forward.matmuls if not one.fused) - router


def test_experts_on_many_ranks_do_what_those_on_few_tell() -> None:
    """Products and collectives exactly; the rest but for masks of rows by experts, of which this layer has many."""
    experts = ("model.experts=8", "model.expert_ffn=256", "model.shared_experts=1", "model.biases=false")
    config = choose_layout(values("", *SHAPE, *experts), 1).config
    piece = Piece(2, True, chunks=2, expert=8, expert_tensor=1)
    extrapolated, counted = (ModuleCounts(config, exact).of(piece, 4) for exact in (False, True))
    assert piece.counted.expert == 2
    for kind, part in product(counted, ("forward", "backward_input", "backward_weight")):
        one, other = getattr(extrapolated[kind], part), getattr(counted[kind], part)
        assert sorted(one.matmuls) == sorted(other.matmuls)
        assert sorted(one.collectives) == sorted(other.collectives)
        assert one.waits == other.waits
        assert one.launches == pytest.approx(other.launches, rel=0.03)
        assert one.bytes == pytest.approx(other.bytes, rel=0.03)
    layer = extrapolated["layer"]
    assert layer.forward.waits == 1
    assert layer.saved_bytes == pytest.approx(counted["layer"].saved_bytes, rel=0.03)
    assert layer.working_bytes >= counted["layer"].working_bytes


@pytest.mark.parametrize(("tensor", "of_each"), [(1, 0), (2, 0), (2, 1)])
def test_a_layer_sends_tokens_to_experts_as_formulas_say(tensor: int, of_each: int) -> None:
    """As in tests/parallel/test_experts.py: of each choice hidden states and a weight go there, outputs come
    back, gradients go the other way; numbers of rows are int64. A tensor rank sends all tokens, or with whole experts
    its share."""
    experts, count, rows = 8, 2, 4
    keys = (f"model.experts={experts}", f"model.experts_per_token={count}", "model.expert_ffn=256")
    config = choose_layout(values("", *SHAPE, *keys), 1).config
    layer = ModuleCounts(config).of(Piece(tensor, False, expert=4, expert_tensor=of_each), rows)["layer"]
    choices = rows * config.model.sequence * count // (tensor if of_each else 1)
    for work, told in ((layer.forward, 8 * experts), (layer.backward_input, 0)):
        sent = sum(one.bytes * one.calls for one in work.collectives if one.axis == "expert")
        assert sent == choices * (2 * config.model.hidden + 1) * 2 + told
    grouped = {(one.batch, one.rows) for one in layer.forward.matmuls if one.grouped}
    assert grouped == {(experts // 4, choices // (experts // 4))}


@pytest.mark.parametrize("kind", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize(("ranks", "key_heads"), [(2, 4), (4, 2)])
def test_a_layer_sends_what_formulas_say_to_ranks_that_share_sequences(kind: str, ranks: int, key_heads: int) -> None:
    """Bytes of docs/context.md, exactly, and as many products as one rank's share of the scores takes."""
    keys = (f"parallel.context_kind={kind}", f"model.kv_heads={key_heads}", "model.attention=flash", *SHAPE)
    config = choose_layout(values("", *keys, "parallel.context=2"), 1).config
    rows, model = 3, config.model
    layer = ModuleCounts(config).of(Piece(1, False, context=ranks, context_kind=kind), rows)["layer"]
    sent = Counter[str]()
    for work in (layer.forward, layer.backward_input):
        for one in work.collectives:
            assert one.axis == "context"
            sent[one.kind] += int(one.bytes * one.calls)
    tokens, size = rows * model.sequence, model.head_size * 2
    gathered = 2 * tokens * key_heads * size
    if kind == "gather":
        assert sent == {"all_gather": 2 * gathered, "reduce_scatter": gathered}
    elif kind == "ring":
        assert sent == {"send": 3 * (ranks - 1) * gathered // ranks}
    else:
        copies = math.lcm(key_heads, ranks)
        assert sent == {"all_to_all": 2 * tokens * (2 * model.heads + 2 * copies) * size // ranks}
    hidden = sum(one.calls * one.hidden for one in layer.forward.collectives)
    assert hidden == (ranks - 1 if kind == "ring" else 0)
    back = sum(one.calls * one.hidden for one in layer.backward_input.collectives)
    # keys and values come, their gradients go: behind the last of these nothing is left to compute
    assert back == (2 * (ranks - 1) - 1 if kind == "ring" else 0)
    scores = sum(matmul.flops for matmul in layer.forward.matmuls if matmul.fused)
    half = 2 * rows * model.sequence**2 * model.heads * model.head_size
    assert scores == pytest.approx(half / ranks)


def test_of_blocks_that_nobody_sees_nothing_is_computed() -> None:
    """FlexAttention in tiles of 128: 4 x 4, of which 10 are causal; blocks see themselves and every other one. Where
    probabilities are dropped it attends twice, the second time to few columns of values."""
    sparse = "model.sparse={kind:strided,block:128,local_blocks:1,stride:2}"
    counts = [
        ModuleCounts(choose_layout(values("", *SHAPE, "model.sequence=512", *more), 1).config)
        for more in ((), [sparse], [sparse, "model.attention_dropout=0.1"])
    ]
    dense, skipping, dropping = (count.of(Piece(1, False), 3)["layer"] for count in counts)
    for part in ("forward", "backward_input"):
        whole, left, twice = (
            sum(m.flops for m in getattr(one, part).matmuls if m.fused) for one in (dense, skipping, dropping)
        )
        assert left == 0.6 * whole > 0
        assert left < twice < 1.8 * left
    assert skipping.saved_bytes == dense.saved_bytes


def test_flexattention_that_drops_attends_twice() -> None:
    """The second time to 16 columns of values: two products of scores, and one of them, in forward, eight and two in
    backward. It keeps the output before it is scaled, and the second one with its sums."""
    counts = [
        ModuleCounts(choose_layout(values("", *SHAPE, "model.attention=flex", *more), 1).config)
        for more in ((), ["model.attention_dropout=0.1"])
    ]
    whole, twice = (count.of(Piece(1, False), 3)["layer"] for count in counts)
    model = counts[0].config.model
    size, width, tokens = model.head_size, 16, 3 * model.sequence
    for part, before, after in (
        ("forward", 2 * size, 3 * size + width),
        ("backward_input", 5 * size, 8 * size + 2 * width),
    ):
        once, both = (sum(m.flops for m in getattr(one, part).matmuls if m.fused) for one in (whole, twice))
        assert both * before == once * after > 0
    kept = tokens * (2 * model.hidden + model.heads * (2 * width + 6))
    assert twice.saved_bytes - whole.saved_bytes == pytest.approx(kept, rel=1e-3)


def sent(workload: Workload, plan: Plan, stage: int) -> Counter[tuple[str, str]]:
    """Bytes that a stage sends in a step besides messages, by axis and collective."""
    total = Counter({(one.axis, one.kind): one.bytes * one.calls for one in workload.steps[stage].collectives})
    for number, chunk in enumerate(workload.chunks):
        for kind, count in chunk.items() if plan.steps.stage_of[number] == stage else ():
            module = workload.modules[kind]
            for work in (module.forward, module.backward_input, module.backward_weight, module.recompute):
                for one in work.collectives:
                    total[one.axis, one.kind] += count * plan.micro_batches * one.bytes * one.calls
    return total


def copied(workload: Workload, plan: Plan, stage: int) -> float:
    """Bytes that a stage sends to and from the host in a step besides batches."""
    total = workload.steps[stage].host_bytes
    for number, chunk in enumerate(workload.chunks):
        for kind, count in chunk.items() if plan.steps.stage_of[number] == stage else ():
            module = workload.modules[kind]
            works = (module.forward, module.backward_input, module.backward_weight, module.recompute)
            total += count * plan.micro_batches * sum(work.host_bytes for work in works)
    return total


@pytest.mark.parametrize("layout", PLANNED)
def test_memory_from_counted_modules_is_that_of_the_whole_step(layout: str, process: SharedWorker) -> None:
    chosen = choose_layout(values(layout, *LARGER), 1)
    plan = plan_of(*chosen)
    workload = Program(chosen.config).describe(plan)
    stages = memory_of_stages(workload, plan.steps, A100)
    for stage in {0, chosen.layout.pipeline // 2, chosen.layout.pipeline - 1}:
        rank = chosen.layout.rank(Coordinates(stage, 0, 0))
        report = process.report(values(layout, *LARGER), rank)
        expected = (stages[stage].states + stages[stage].activations) * 2**30
        assert expected == pytest.approx(report["peak"], rel=OFF), stage
        assert copied(workload, plan, stage) == pytest.approx(report["copy_bytes"], rel=0.05, abs=4e6)
        assert workload.steps[stage].communicators == report["groups"]
        told = sent(workload, plan, stage)
        for axis, kinds in report["collectives"].items():
            for kind, one in kinds.items() if axis not in ("tensor", "pipeline", "world") else ():
                if one["bytes"] < 100:  # numbers that are told
                    continue
                name = NAMES.get(axis, axis), kind
                off = 1e-9 if axis in ("context", "expert") else 0.02  # flat parameters are padded
                assert told[name] == pytest.approx(one["bytes"], rel=off, abs=100), (stage, name)
        assert workload.steps[stage].state_bytes == pytest.approx(sum(report["lasting_bytes"].values()), rel=0.02)


EXPERTS = "model.kind=gpt model.experts=4 parallel.data=2"


@pytest.mark.parametrize(
    "keys",
    [
        "parallel.overlap_chunks=1",
        "parallel.overlap_chunks=2",
        f"{EXPERTS} parallel.expert=2 parallel.overlap_chunks=2",
        f"{EXPERTS} parallel.expert=4 parallel.expert_tensor=1 model.shared_experts=1",
    ],
)
def test_what_computing_hides_is_what_a_dry_run_of_the_whole_step_hides(keys: str, process: SharedWorker) -> None:
    layout = (
        "batch.global_size=8 parallel.tensor=2 parallel.sequence=true parallel.pipeline=2 parallel.virtual=2 "
        f"parallel.schedule=interleaved {keys}"
    )
    chosen = choose_layout(values(layout, *LARGER), 1)
    layer = Program(chosen.config).describe(plan_of(*chosen)).modules["layer"]
    report = process.report(values(layout, *LARGER), chosen.layout.rank(Coordinates(1, 0, 0)))
    layers = len(chosen.stages.parts[1].layers)
    for phase, works in (("F", [layer.forward]), ("B", [layer.backward_input, layer.backward_weight])):
        for axis, counted in report["phases"]["1"][phase]["collectives"].items():
            for kind, one in counted.items() if axis in ("tensor", "expert") else ():
                same = [sent for work in works for sent in work.collectives if sent[:2] == (kind, axis)]
                assert layers * sum(sent.calls for sent in same) == one["calls"]
                assert layers * sum(sent.calls * sent.hidden for sent in same) == one.get("hidden_calls", 0), axis
    sums = report["phases"]["1"]["F"]["collectives"]["tensor"].values()
    if "experts" not in keys:
        chunks = chosen.config.parallel.overlap_chunks
        assert sum(one.get("hidden_calls", 0) for one in sums) == layers * 4 * (chunks - 1)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
def test_no_bound_is_above_the_time_on_slow_links(schedule: str) -> None:
    """ZeRO-3 sends once what other schedules send for each micro-batch."""
    config = choose_layout(values("batch.global_size=64", *LARGER), 1).config
    cluster = replace(A100, devices=8, node=1, between=replace(A100.between, gb_s=0.1))
    where = space_of(config, cluster, {"micro_size": 1, "tensor": 1, "recompute": "none", "schedule": schedule})
    bounds, plans = Bounds(where), [plan for plan in enumerate_plans(where, Counter()) if plan.zero == 3]
    assert plans
    for plan in plans:
        assert bounds.seconds(plan) <= time_of(where, plan).total, plan


@pytest.mark.parametrize("recompute", ["none", 2])
def test_no_bound_is_above_what_a_layout_takes_and_needs_with_parts_on_the_host(recompute: str | int) -> None:
    config = choose_layout(values("batch.global_size=16", *LARGER), 1).config
    where = space_of(
        config, replace(A100, devices=4, host_gb_s=2.0), {"micro_size": 1, "tensor": 1, "recompute": recompute}
    )
    bounds, plans, tried = Bounds(where), list(enumerate_plans(where, Counter()))[::4], set[Plan]()
    while plans:
        plan = plans.pop()
        tried.add(plan)
        plans += offloaded(where, plan)
        stages = memory_of_stages(where.program.describe(plan), plan.steps, where.cluster)
        assert bounds.gib(plan) <= max(stage.total for stage in stages), plan
        assert bounds.seconds(plan) <= time_of(where, plan).total, plan
        assert not problem_of(where, plan)
    assert {plan.offload for plan in tried} == {
        tuple(part for part, number in zip(OFFLOADED, bits, strict=True) if number)
        for bits in product((0, 1), repeat=3)
    }


@pytest.mark.parametrize("fixed", [{"recompute": "none"}, {"recompute": 1, "zero": 1, "schedule": "1f1b"}])
def test_no_bound_is_above_what_a_layout_of_experts_takes_and_needs(fixed: dict[str, Any]) -> None:
    """Layers of both kinds, on all numbers of ranks, over slow links."""
    keys = ("model.kind=gpt", "model.experts=2", "model.dense_layers=2", "model.expert_every=2", "model.layers=7")
    config = choose_layout(values("batch.global_size=16", *LARGER, *keys), 1).config
    cluster = replace(A100, devices=8, node=4, between=replace(A100.between, gb_s=1.0))
    where = space_of(config, cluster, {"micro_size": 1, "tensor": 2, "sequence": True, **fixed})
    bounds, plans = Bounds(where), list(enumerate_plans(where, Counter()))
    assert {(plan.expert, plan.expert_tensor) for plan in plans} == {(1, 0), (2, 0), (1, 1), (2, 1)}
    for plan in plans[::3]:
        stages = memory_of_stages(where.program.describe(plan), plan.steps, where.cluster)
        assert bounds.gib(plan) <= max(stage.total for stage in stages), plan
        assert bounds.seconds(plan) <= time_of(where, plan).total, plan
        assert not problem_of(where, plan)


class CountedAgainError(Exception):
    """Instead of dry runs."""


def test_what_was_counted_is_kept_and_a_damaged_file_is_counted_again(
    own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = choose_layout(values("", *SHAPE), 1).config
    first = ModuleCounts(config).of(Piece(1, False), 1)

    def run_jobs(jobs: object, **options: object) -> None:
        raise CountedAgainError

    monkeypatch.setattr(module_work, "run_jobs", run_jobs)
    assert ModuleCounts(config).of(Piece(1, False), 1) == first
    for file in own_cache.glob("modules-*.json"):
        (tmp_path / file.name).write_text("[{", encoding="utf-8")
    monkeypatch.setattr(module_work, "cache_folder", lambda: tmp_path)
    with pytest.raises(CountedAgainError):
        ModuleCounts(config).of(Piece(1, False), 1)


def test_a_plan_gives_modules_as_data() -> None:
    done = called("tools/plan", *SMALL, "--modules")
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout)
    assert set(modules) == {"embedding", "layer", "inner", "head"}
    assert modules["layer"]["forward"]["launches"] > 0
