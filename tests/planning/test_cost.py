"""The cost model against what can be computed by hand, the simulator and published layer times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks.planner_accuracy.measurements import CLUSTERS
from benchmarks.planner_accuracy.published import DECODER, SYSTEMS, Setup, layer_work
from pangu.config.cluster import ClusterConfig
from pangu.models.size import training_flops_per_token
from pangu.planning.cost import (
    collective_seconds,
    matmul_seconds,
    phase_seconds,
    phases_of,
    step_time,
)
from pangu.planning.program import Plan, Program, StepLedger
from pangu.report.clusters import load_cluster
from pangu.schedule.actions import COMPUTE, Kind
from pangu.schedule.groups import Group, groups_of
from pangu.schedule.spans import Collective, Matmul, Work
from pangu.schedule.stage_ledger import stage_actions
from pangu.topology.experts import GROUPS, ExpertLayout
from pangu.topology.layout import Layout
from tests.configs import config
from tests.spawn import repository

A100 = load_cluster(repository() / "configs" / "cluster" / "a100.yaml")
GPT_22B = replace(DECODER, layers=48, hidden=6144, heads=64, vocab=51200, sequence=2048)


def perfect() -> ClusterConfig:
    """A device that loses nothing."""
    matmul = replace(A100.matmul, efficiency=1.0, depth=0.0, waves=0.0, alignment=0.0)
    inside = replace(A100.inside, latency_us=0.0, gb_s=100.0)
    return replace(A100, matmul=matmul, inside=inside, memory=replace(A100.memory, efficiency=1.0))


def test_a_large_product_runs_at_the_peak_and_a_thin_one_at_the_bandwidth() -> None:
    assert matmul_seconds(Matmul(8192, 8192, 8192), perfect()) == pytest.approx(2 * 8192**3 / 312e12)
    assert matmul_seconds(Matmul(8192, 128, 128), perfect()) == pytest.approx(2 * (8192 * 128 * 2 + 128 * 128) / 2039e9)


def test_products_in_fp8_have_a_rate_of_their_own_and_operands_of_a_byte() -> None:
    fast = replace(perfect(), matmul=replace(perfect().matmul, tflops_fp8=624.0))
    assert matmul_seconds(Matmul(8192, 8192, 8192, fp8=True), fast) == pytest.approx(2 * 8192**3 / 624e12)
    thin = 8192 * 128 + 128 * 128 + 2 * 8192 * 128
    assert matmul_seconds(Matmul(8192, 128, 128, fp8=True), fast) == pytest.approx(thin / 2039e9)


def test_fp8_starts_and_finishes_a_tile_no_faster() -> None:
    rates = replace(perfect().matmul, tflops_fp8=624.0, depth=140.0)

    def ends_and_each(fp8: bool) -> tuple[float, float]:
        short, long = (
            matmul_seconds(Matmul(8192, 8192, depth, fp8=fp8), replace(perfect(), matmul=rates))
            for depth in (4096, 8192)
        )
        return 2 * short - long, long - short

    (ends, each), (ends_fp8, each_fp8) = ends_and_each(False), ends_and_each(True)
    assert ends_fp8 == pytest.approx(ends)
    assert each_fp8 == pytest.approx(each / 2)


def test_crooked_shapes_are_slower() -> None:
    straight, odd = Matmul(4096, 1792, 4096), Matmul(4096, 1800, 4096)
    assert matmul_seconds(odd, A100) > matmul_seconds(straight, A100)
    unaligned = matmul_seconds(Matmul(2048, 2048, 108, 96), A100)
    assert unaligned > 5 * matmul_seconds(Matmul(2048, 2048, 112, 96), A100)


@pytest.mark.parametrize(("kind", "times"), [("all_reduce", 2), ("all_gather", 1), ("reduce_scatter", 1)])
def test_a_ring_sends_its_share(kind: str, times: int) -> None:
    collective = Collective(kind, "tensor", 8e9)
    assert collective_seconds(collective, Group(4, 4), perfect()) == pytest.approx(times * 0.75 * 8e9 / 100e9)
    assert collective_seconds(collective, Group(1, 1), perfect()) == 0


def test_groups_share_the_interfaces_of_a_node() -> None:
    groups = groups_of(Layout(tensor=4, data=8, pipeline=2, zero=1), node=8)
    assert groups["tensor"] == (4, 4)
    assert groups["replicas"] == (8, 2)
    assert groups["pipeline"] == (2, 1)
    wide, narrow = (
        collective_seconds(Collective("all_reduce", "replicas", 8e9), Group(8, inside), A100) for inside in (2, 1)
    )
    assert narrow == pytest.approx(2 * wide, rel=0.01)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, data=8, zero=1, expert=4, zero_group=4),
        Layout(tensor=4, data=4, pipeline=2, expert=8, expert_tensor=1, zero=2),
        Layout(data=4, context=2, expert=2, zero=3, zero_group=4),
        Layout(tensor=2, data=2, context=2, pipeline=2),
    ],
)
def test_groups_are_those_of_the_layout(layout: Layout) -> None:
    """Sizes, and how many of a group's ranks are on the first one's node of 8."""
    groups, experts = groups_of(layout, node=8), ExpertLayout(layout)
    for axis in ("tensor", "context", "pipeline", "replicas", "shard", "gather", "copies", *GROUPS):
        ranks = (experts if axis in GROUPS else layout).peers(0, axis)
        assert groups[axis] == (len(ranks), sum(rank < 8 for rank in ranks)), axis
    assert groups["world"] == (layout.world, min(layout.world, 8))


def test_an_all_to_all_leaves_the_node_from_each_device() -> None:
    """Of 16 ranks on two nodes half of what each has; beside it seven sixteenths stay on the node."""
    exchange, group = Collective("all_to_all", "expert", 8e9), Group(16, 8)
    cluster = perfect()
    between = replace(cluster.between, latency_us=0.0, gb_s=20.0)
    wide = replace(cluster, between=between, nics=8, node=8)
    assert collective_seconds(exchange, group, wide) == pytest.approx(0.5 * 8e9 / 20e9)
    assert collective_seconds(exchange, group, replace(wide, nics=4)) == pytest.approx(0.5 * 8e9 / 10e9)
    assert collective_seconds(exchange, Group(8, 8), wide) == pytest.approx(7 / 8 * 8e9 / 100e9)
    pairs = exchange._replace(ranks=2)
    assert collective_seconds(pairs, group, wide) == collective_seconds(exchange, Group(2, 2), wide)


def test_rings_take_a_step_for_each_further_rank_and_leave_each_node_once() -> None:
    def microseconds(kind: str, group: Group) -> float:
        return 1e6 * collective_seconds(Collective(kind, "tensor", 0.0), group, A100)

    inside, between = A100.inside.latency_us, A100.between.latency_us
    assert microseconds("all_gather", Group(8, 8)) == pytest.approx(7 * inside)
    assert microseconds("all_gather", Group(16, 8)) == pytest.approx(14 * inside + between)
    assert microseconds("all_reduce", Group(8, 8)) == pytest.approx(2 * 3 * inside)
    assert microseconds("all_reduce", Group(16, 8)) == pytest.approx(2 * 4 * between)
    assert microseconds("send", Group(2, 1)) == pytest.approx(between)


def described(plan: Plan, *words: str) -> StepLedger:
    """The step of a model of 13B."""
    return Program(config("+config=pangu_13b", *words)).describe(plan)


@pytest.mark.usefixtures("formulas")
def test_terms_add_up_and_more_links_help() -> None:
    plan = Plan(8, 2, 1, 4, 1, 1, False, "full", 1, 16, "1f1b", (20, 20))
    ledger = described(plan)
    time = step_time(ledger, plan, A100)
    assert time.total == pytest.approx(sum(vars(time).values()))
    assert min(vars(time).values()) >= 0
    faster = replace(A100, inside=replace(A100.inside, gb_s=460.0))
    assert step_time(ledger, plan, faster).tensor < time.tensor


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize("micro_batches", [1, 3, 40])
def test_a_step_computes_the_matmuls_of_all_its_micro_batches(micro_batches: int) -> None:
    """Where nothing else takes time; the vocabulary has full tiles."""
    where = replace(perfect(), launch_us=0.0, step_us=0.0)
    where = replace(where, memory=replace(where.memory, gb_s=1e12))
    plan = Plan(1, 1, 1, 1, 1, 0, False, "none", 2, micro_batches, "1f1b", (40,))
    padded = replace(config("+config=pangu_13b").model, vocab=40064)
    flops = training_flops_per_token(padded) * 1024 * 2 * micro_batches
    time = step_time(described(plan), plan, where)
    assert time.compute == pytest.approx(flops / 312e12, rel=1e-3)
    assert time.total == pytest.approx(time.compute, rel=1e-3)


@pytest.mark.usefixtures("formulas")
def test_an_update_takes_the_iterations_of_muon() -> None:
    """Five of 40 layers, each of four matrices [h, h] and two [4h, h]: 4 rows²·columns and 2 rows³ in each."""
    where = replace(perfect(), launch_us=0.0, step_us=0.0)
    where = replace(where, memory=replace(where.memory, gb_s=1e12))
    plan = Plan(1, 1, 1, 1, 1, 0, False, "none", 2, 1, "1f1b", (40,))
    time = step_time(described(plan, "optimizer=muon"), plan, where)
    assert time.update == pytest.approx(5 * 40 * (4 * 6 + 2 * (4 * 4 + 2)) * 5120**3 / 312e12, rel=1e-3)


def test_a_host_computes_after_it_has_started_a_kernel() -> None:
    plan = Plan(8, 1, 1, 1, 1, 0, False, "none", 4, 1, "1f1b", (48,))
    work = layer_work(Setup(GPT_22B, SYSTEMS["megatron of 2021"], plan)).passes[0]
    groups, slow = groups_of(plan.layout, 8), replace(A100, launch_us=100.0)
    starting = work.launches * 100e-6
    computing = phase_seconds(work, groups, replace(slow, launch_us=0.0)).compute
    assert phase_seconds(work, groups, slow).compute == max(starting, computing)
    assert phase_seconds(work, groups, replace(slow, queued=False)).compute == pytest.approx(starting + computing)


def test_a_host_adds_weight_gradients_after_their_matmuls_have_computed_them() -> None:
    groups, work = groups_of(Layout(), 1), Work(launches=2.0, bytes=1e9, sums=3.0, sum_bytes=4e9)
    device = replace(A100, launch_us=1e6, host_memory_gb_s=2.0, memory=replace(A100.memory, gb_s=1.0, efficiency=1.0))
    assert phase_seconds(work, groups, device).compute == pytest.approx(2.0)
    assert phase_seconds(work, groups, replace(device, queued=False)).compute == pytest.approx(1 + 4 / 2 + 2 + 3)


@pytest.mark.usefixtures("formulas")
@pytest.mark.parametrize(("schedule", "chunks", "messages"), [("1f1b", 1, 2), ("interleaved", 2, 6), ("zb_v", 2, 4)])
def test_a_host_works_on_messages_and_only_the_rest_of_their_way_is_hidden(
    schedule: str, chunks: int, messages: int
) -> None:
    """The longest stage of two sends and receives so many per micro-batch."""
    plan = Plan(1, 2, chunks, 1, 1, 0, False, "none", 1, 32, schedule, (40 // (2 * chunks),) * (2 * chunks))
    (ledger, (nbytes,)) = (described(plan), described(plan).message)
    sends = (("send", 2, nbytes, 3000.0),)
    host = replace(A100, message_us=0.0, inside=replace(A100.inside, measured=sends))
    busy = replace(host, inside=replace(A100.inside, measured=(*sends, ("message", 2, nbytes, 1000.0))))
    without, added = (step_time(ledger, plan, cluster) for cluster in (host, busy))
    assert added.pipeline - without.pipeline >= 32 * messages * 1e-3 - 2 * 3e-3 * 32 * chunks
    assert added.total - without.total == pytest.approx(32 * messages * 1e-3, rel=0.15)


ENDS = Plan(1, 2, 2, 8, 1, 1, False, "none", 1, 8, "zb_v", (10,) * 4)
"""Two stages whose ends of a step communicate with eight replicas."""
Sums = tuple[Collective, ...]


@pytest.mark.usefixtures("formulas")
def test_weights_and_gradients_hide_behind_what_comes_before_their_use_and_after_their_sum() -> None:
    """And behind the time in which their stage waits for the other one."""
    ledger, cluster, groups = described(ENDS), replace(A100, overlap=1.0), groups_of(ENDS.layout, A100.node)
    phases = phases_of(ledger, groups, cluster)
    forward, backward = phases[0][Kind.FORWARD, 0].total, phases[1][Kind.BACKWARD_WEIGHT, 0].total
    done = [action.chunk for action in ledger.schedule.actions[1] if action.kind in COMPUTE]
    behind = done[::-1].index(2)
    assert behind > 1  # weight gradients of the second stage's lower chunk after those of its upper one

    def exposed(stage: int, gathers: Mapping[int, Sums], reductions: Mapping[int, Sums]) -> float:
        silent = [replace(each, gathers={}, reductions={}, other_collectives={}) for each in ledger.stages]
        silent[stage] = replace(silent[stage], gathers=gathers, reductions=reductions)
        return step_time(replace(ledger, stages=tuple(silent)), ENDS, cluster).data

    sent = (Collective("reduce_scatter", "shard", 2e11 * backward / 0.05, hidden=1.0),)
    alone = collective_seconds(sent[0], groups["shard"], cluster)
    assert alone > max(3 * forward, behind * backward)
    assert exposed(0, {0: sent}, {}) == pytest.approx(alone)
    assert exposed(0, {1: sent}, {}) == pytest.approx(alone - 3 * forward)
    assert exposed(1, {0: sent}, {}) <= alone - forward  # the second stage waits for the first one
    assert exposed(1, {}, {-1: sent}) == pytest.approx(alone)
    assert exposed(1, {}, {0: sent}) == pytest.approx(alone)
    assert exposed(1, {}, {1: sent}) == pytest.approx(alone - behind * backward)
    assert exposed(1, {}, {1: 2 * sent}) == pytest.approx(2 * alone - (behind + 0.5) * backward)
    assert exposed(0, {}, {0: sent}) < alone  # the second stage ends last


@pytest.mark.usefixtures("formulas")
def test_what_hides_the_reductions_of_a_step_is_read_from_its_actions() -> None:
    ledger = described(ENDS)
    for stage, chunks in ((0, (0, 3)), (1, (1, 2))):
        actions = [action for action in ledger.schedule.actions[stage] if action.kind in COMPUTE]
        last = actions[next(place for place, action in enumerate(actions) if action.reduce) :]
        window = ledger.stages[stage].windows(stage_actions(ledger.schedule, stage))[1][::-1]
        keys = [(action.kind, chunks.index(action.chunk)) for action in last]
        assert [key for key, _ in window if key] == keys
        assert [bool(sums) for key, sums in window if key] == [action.reduce for action in last]
        assert len(keys) > 2


@pytest.mark.usefixtures("formulas")
def test_reductions_keep_their_order() -> None:
    """Each shard is summed over the groups of replicas before the next one is reduced inside a group."""
    (_, reductions), *_ = (
        stage.windows(stage_actions(ledger.schedule, number))
        for ledger in [described(ENDS._replace(zero_group=2))]
        for number, stage in enumerate(ledger.stages)
    )
    kinds = [each.kind for _, sums in reductions[::-1] for each in reversed(sums)]
    assert kinds == ["reduce_scatter", "all_reduce"] * (len(kinds) // 2)
    assert len(kinds) >= 4


@pytest.mark.usefixtures("formulas")
def test_processes_that_share_cores_leave_none_idle() -> None:
    host = replace(A100, alone=2.0)
    for micro_batches, share in ((1, 2.0), (64, 1.0)):  # one stage at a time; nearly always all
        plan = Plan(1, 4, 1, 1, 1, 0, False, "none", 1, micro_batches, "1f1b", (10,) * 4)
        alone, shared = (step_time(described(plan), plan, cluster) for cluster in (A100, host))
        assert alone.total - alone.update == pytest.approx((shared.total - shared.update) * share, rel=0.1)
        assert min(vars(shared).values()) >= 0


def test_what_was_timed_is_believed_and_other_sizes_lie_between() -> None:
    table = (("all_reduce", 2, 1e6, 100.0), ("all_reduce", 2, 3e6, 200.0), ("send", 2, 1e6, 7.0))
    timed = replace(A100, inside=replace(A100.inside, measured=table))

    def seconds(kind: str, ranks: int, nbytes: float) -> float:
        return collective_seconds(Collective(kind, "tensor", nbytes), Group(ranks, ranks), timed)

    sizes = (1.0, 1e6, 2e6, 3e6, 6e6)
    assert [seconds("all_reduce", 2, size) for size in sizes] == pytest.approx([1e-4, 1e-4, 1.5e-4, 2e-4, 4e-4])
    assert seconds("send", 4, 1e6) == pytest.approx(7e-6)
    assert seconds("all_reduce", 4, 1e6) == collective_seconds(
        Collective("all_reduce", "tensor", 1e6), Group(4, 4), A100
    )
    matmul = replace(A100.matmul, measured=((1024, 1024, 1024, 0.4), (4096, 4096, 4096, 0.3)))
    slow = replace(A100, matmul=matmul)
    for size, share in ((1024, 0.4), (4096, 0.3)):
        assert matmul_seconds(Matmul(size, size, size), slow) == pytest.approx(2 * size**3 / (312e12 * share))
    between = 2 * 2048**3 / (312e12 * matmul_seconds(Matmul(2048, 2048, 2048), slow))
    assert 0.3 < between < 0.4


def test_every_shipped_cluster_loads() -> None:
    assert {"a100", "h100", "h200", "ascend910"} <= set(CLUSTERS)
    assert all(cluster.name == name for name, cluster in CLUSTERS.items())
