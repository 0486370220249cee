"""Steps of published systems that train models with experts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner_accuracy.published import DECODER, RULES, SYSTEMS, Module, Setup, System, layer_work
from benchmarks.planner_accuracy.step import describe
from pangu.config.model import LatentConfig, ModelConfig
from pangu.models.size import num_parameters
from pangu.planning.program import LAYOUT, Plan
from pangu.schedule.spans import Collective
from pangu.topology.layout import Layout
from tests.planner_accuracy.test_command import report
from tests.planner_accuracy.test_measurements import row

MEGATRON_CORE = SYSTEMS["megatron-core"]
GATED = replace(DECODER, activation="swiglu", positions="rope", tied_head=False, sequence=4096, vocab=32000)
QWEN = replace(
    GATED, layers=8, hidden=2048, heads=32, kv_heads=4, head_dim=128, ffn=6144, experts=128, experts_per_token=8,
    expert_ffn=768,
)  # fmt: skip
DEEPSEEK = replace(
    QWEN, layers=6, hidden=7168, heads=128, kv_heads=None, head_dim=None, ffn=18432, expert_ffn=2048, shared_experts=1,
    dense_layers=3, mtp_layers=1, latent=LatentConfig(
        kv_rank=512, q_rank=1536, nope_head_dim=128, rope_head_dim=64, value_head_dim=128
    ),
)  # fmt: skip
TOKENS = 4096


def setup(layout: Layout, system: System = MEGATRON_CORE, model: ModelConfig = QWEN, node: int = 8) -> Setup:
    """One sequence per micro-batch."""
    degrees = {name: getattr(layout, name) for name in LAYOUT}
    batch = {"recompute": "none", "micro_size": 1, "micro_batches": 4, "schedule": "1f1b"}
    return Setup(model, system, Plan(**degrees, **batch, layers=(model.layers,)), node=node)


def exchanges(work: Module) -> list[list[Collective]]:
    """The exchanges with other ranks' experts in each pass."""
    return [[one for one in each.collectives if one.axis == "expert"] for each in work.passes]


@pytest.mark.parametrize(
    ("source", "rows", "mean", "worst"),
    [
        ("dgxc", 8, 0.08, 0.11),  # Grok-1
        ("user guide", 2, 0.08, 0.11),  # Mixtral 8x7B
        ("ModelZoo", 8, 0.07, 0.16),  # Qwen3-235B-A22B
        ("Megatron-Bridge", 37, 0.12, 0.46),  # Qwen3 of both sizes, DeepSeek-V3
    ],
)
def test_published_runs_with_experts(
    source: str, rows: int, mean: float, worst: float, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = report(capsys, "--table", Path(__file__).parent / "moe.csv")["sources"]
    found = next(numbers for name, numbers in sources.items() if source in name)
    assert found["rows"] == rows
    assert found["time_mean_error"] <= mean
    assert found["time_worst_error"] <= worst


@pytest.mark.parametrize("model", [QWEN, DEEPSEEK], ids=["qwen", "deepseek"])
def test_a_rank_alone_holds_all_weights(model: ModelConfig) -> None:
    each = 2 + MEGATRON_CORE.gradient_bytes + 12  # weight, gradient, fp32 copy and moments
    assert describe(setup(Layout(), model=model)).states[0] == pytest.approx(each * num_parameters(model), rel=0.01)


def test_ranks_hold_all_weights_together() -> None:
    for layout in (Layout(data=8, expert=8), Layout(2, data=4, sequence=True, expert=8, expert_tensor=1)):
        step = describe(setup(layout))
        parts = ("parameters", "experts")
        dense, experts = (step.counts[0] @ [getattr(one, part) for one in step.modules] for part in parts)
        whole = dense * layout.tensor + experts * layout.expert
        assert whole == pytest.approx(num_parameters(QWEN), rel=0.01)


def test_every_rank_holds_the_router_the_latent_projections_and_the_merge() -> None:
    layers = [
        [layer_work(setup(Layout(ranks, sequence=ranks > 1), model=DEEPSEEK), layer) for layer in (5, 6)]
        for ranks in (1, 2)
    ]
    whole, half = ([one.parameters for one in each] for each in layers)
    held = 7168 * (1536 + 512 + 64 + 128)
    assert [2 * part - full for part, full in zip(half, whole, strict=True)] == [held, held + 2 * 7168 * 7168]


def test_experts_compute_what_their_tokens_need() -> None:
    def flops(layout: Layout) -> float:
        return sum(
            one.flops for one in layer_work(setup(layout)).passes[0].matmuls if one.batch == 128 // layout.expert
        )

    once = 2 * 3 * 2048 * 768 * 8 * TOKENS
    assert flops(Layout()) == flops(Layout(data=8, expert=8)) == once
    assert flops(Layout(2, data=4, sequence=True, expert=4, expert_tensor=1)) == once / 2
    assert flops(Layout(2, data=4, sequence=True, expert=4, expert_tensor=2)) == once / 2


def test_tokens_go_to_each_expert_or_once_to_each_place() -> None:
    def sent(node: int, **how: bool) -> float:
        system = MEGATRON_CORE._replace(**how)
        ((forward,), _, (backward,), _) = exchanges(layer_work(setup(Layout(data=16, expert=16), system, node=node)))
        assert forward == backward
        assert (forward.kind, forward.calls, forward.hidden) == ("all_to_all", 2, 0)
        return forward.bytes / (2 * 2048 * TOKENS)

    assert sent(8) == 8
    assert sent(8, sends_once=True) == pytest.approx(2 * (1 - 0.5**8))  # of two nodes
    assert sent(16, sends_once=True) == pytest.approx(16 * (1 - (15 / 16) ** 8))  # of 16 ranks
    assert exchanges(layer_work(setup(Layout()))) == [[], [], [], []]


def test_an_exchange_that_overlaps_is_hidden_by_all_passes() -> None:
    system = MEGATRON_CORE._replace(hidden_experts=1.0)
    hidden = exchanges(layer_work(setup(Layout(data=8, expert=8), system)))
    assert [sum(one.calls * one.hidden for one in each) for each in hidden] == pytest.approx([4 / 3, 0, 4 / 3, 4 / 3])


def test_tensor_parallel_ranks_share_tokens_or_experts() -> None:
    def gathered(expert_tensor: int, shared: int = 0) -> list[float]:
        layout = Layout(2, data=4, sequence=True, expert=4, expert_tensor=expert_tensor)
        work = layer_work(setup(layout, model=replace(QWEN, shared_experts=shared)))
        gathers = (one for one in work.passes[0].collectives if one.kind == "all_gather")
        return [one.calls * one.bytes / (2 * 2048 * TOKENS) for one in gathers]

    assert gathered(1) == [1]  # before attention
    assert gathered(1, shared=1) == [2]
    assert gathered(2) == [1, 8]


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_experts_have_fewer_replicas(zero: int) -> None:
    case = setup(Layout(data=8, zero=zero, expert=4))
    (reductions, _, _), *_ = describe(case).ends
    inside = [one for each in layer_work(case).passes for one in each.collectives]
    sent: dict[str, float] = {
        one.axis: one.bytes * one.calls / 4 for one in (*reductions.collectives, *inside) if "reduce" in one.kind
    }
    axis, layers = ("replicas", 8) if zero == 0 else ("shard", 8 if zero == 1 else 1)
    assert sent[f"expert_{axis}"] == pytest.approx(layers * 32 * 3 * 2048 * 768)
    assert sent[axis] < sent[f"expert_{axis}"]
    held = [describe(setup(Layout(data=8, zero=1, expert=expert))).states[0] for expert in (1, 4, 8)]
    assert held == sorted(held, reverse=True)


def test_dense_layers_come_first() -> None:
    case = setup(Layout(pipeline=4), model=replace(QWEN, dense_layers=3))
    case = case._replace(plan=case.plan._replace(layers=(2, 2, 2, 2)))
    assert describe(case).counts.tolist() == [[1, 2, 0, 0], [0, 1, 1, 0], [0, 0, 2, 0], [0, 0, 2, 1]]


def test_multi_token_prediction_is_a_last_layer_with_the_head_once_more() -> None:
    case = setup(Layout(pipeline=2), model=DEEPSEEK)
    case = case._replace(plan=case.plan._replace(layers=(4, 2)))
    step, alone = describe(case), describe(case._replace(model=replace(DEEPSEEK, mtp_layers=0)))
    assert step.counts.tolist() == [[1, 3, 1, 0, 0], [0, 0, 2, 1, 2]]
    assert alone.counts.tolist() == [[1, 3, 1, 0], [0, 0, 2, 1]]
    merged = {one.depth for one in step.modules[3].passes[0].matmuls} - {
        one.depth for one in step.modules[2].passes[0].matmuls
    }
    assert merged == {2 * DEEPSEEK.hidden}


def test_megatron_recomputes_queries_keys_and_values_of_latent_attention() -> None:
    plain = setup(Layout(), model=DEEPSEEK)
    again = plain._replace(plan=plain.plan._replace(recompute="selective"))
    _, recompute, _, _ = layer_work(again).passes
    assert [one.columns for one in recompute.matmuls] == [128 * 192, 128 * 256]
    assert layer_work(again).saved_bytes == layer_work(plain).saved_bytes - 2 * TOKENS * 128 * (192 + 192 + 128)


def test_latent_attention_and_shorter_last_chunks_are_read(tmp_path: Path) -> None:
    sizes = {"layers": "13", "latent": "1536 512 128 64 128", "note": "3 layers fewer in the last chunk"}
    one = row(tmp_path, **sizes, gpus="8", tp="1", pp="4", vpp="1").setups[0]
    assert one.model.latent == DEEPSEEK.latent
    assert one.plan.layers == (4, 4, 4, 1)
    for wrong in (
        {"latent": "1536 512"},
        {"latent": "1536 512 0 64 128"},
        {"latent": f"1 2 3 4 {9**400}"},
        {"layers": "4"},
    ):
        with pytest.raises(AssertionError):
            row(tmp_path, **{**sizes, **wrong}, gpus="8", tp="1", pp="4", vpp="1")


def test_the_notes_of_a_row_tell_of_the_exchange_and_of_graphs(tmp_path: Path) -> None:
    sizes = {"experts": "8", "top_k": "2", "gpu": "H100-80G", "tp": "1", "pp": "1", "ep": "8", "gpus": "64"}
    plain = row(tmp_path, **sizes, note="all-to-all").setups[0]
    assert plain.system == MEGATRON_CORE
    assert (plain.plan.expert, plain.plan.expert_tensor, plain.model.experts_per_token) == (8, 1, 2)
    told = row(tmp_path, **sizes, note="HybridEP; exchange overlaps; CUDA graphs").setups[0].system
    assert told == MEGATRON_CORE._replace(hidden_experts=1.0, sends_once=True, graphs=True)
    launches = [layer_work(plain._replace(system=one)).passes[0].launches for one in (MEGATRON_CORE, told)]
    assert launches[1] < launches[0] / 10


def test_graphs_launch_all_but_experts_and_an_exchange_whose_sizes_the_host_waits_for() -> None:
    captured = MEGATRON_CORE._replace(graphs=True, sends_once=True)
    for layer, launches in ((0, 0), (3, 2 * 128)):  # a dense layer; 128 experts, two matmuls each
        forward, _, inputs, weights = layer_work(setup(Layout(), captured, DEEPSEEK), layer).passes
        assert forward.launches == launches
        assert inputs.launches + weights.launches == 2 * launches
    routed = layer_work(setup(Layout(), captured._replace(sends_once=False), DEEPSEEK), 3).passes[0]
    assert routed.launches == 2 * 128 + RULES.routing_launches


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"ep": "3"}, "ep and etp do not divide"),
        ({"ep": "16"}, "ep and etp do not divide"),
        ({"etp": "2"}, "ep and etp do not divide"),
        ({"top_k": "9"}, "too few or narrow experts"),
        ({"expert_ffn": "0"}, "expert_ffn is not above 0"),
        ({"mtp_layers": "100000000"}, "too many experts or layers"),
        ({"experts": "8000000000", "top_k": "8000000000"}, "too many experts or layers"),
    ],
)
def test_experts_that_make_no_sense_are_refused(wrong: dict[str, str], reason: str, tmp_path: Path) -> None:
    sizes = {"experts": "8", "top_k": "2", "tp": "1", "pp": "1", "ep": "8", "gpus": "64", **wrong}
    with pytest.raises(AssertionError, match=reason):
        row(tmp_path, **sizes)
