"""A step of every layout without devices: no race, no mixed devices, and few micro-batches tell of all."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pangu.pipeline.layouts import choose_layout
from pangu.report.dry_run import role_ranks
from pangu.topology.layout import Coordinates
from pangu.training.determinism import REPLACED
from pangu.zero.states import plan_states
from tests.configs import composed
from tests.dryrun.conftest import SharedWorker
from tests.dryrun.layouts import LAYOUTS, SEGMENT, values
from tests.spawn import repository

BATCHES = 2


@pytest.mark.parametrize("batch", range(BATCHES))
def test_no_layout_has_a_race_or_mixes_devices(process: SharedWorker, batch: int) -> None:
    """Two steps of the last rank, and of the first where that is another stage."""
    wrong = {}
    for layout in LAYOUTS[batch::BATCHES]:
        chosen = values(layout)
        layout_of = choose_layout(chosen, 1).layout
        world = layout_of.world
        for rank in {0, world - 1} if layout_of.pipeline > 1 else {world - 1}:
            report = process.report(chosen, rank, steps=2, whole=True)
            assert report["device"] is None
            # more memory than in the first step stops the host
            assert report["peak"] <= process.report(chosen, rank, whole=True)["peak"] + SEGMENT
            assert report["peak"] == sum(report["peak_bytes"].values()) > 0
            # what adds up in any order, train.deterministic replaces; a device would refuse all else
            assert report["any_order"].keys() <= REPLACED, (layout, report["any_order"])
            # Triton kernels, which dropout needs, add in one order
            assert any("attention" in name for name in report["any_order"]) != ("attention_dropout" in layout)
            waits = report["host_syncs"] and "experts" not in layout and "offload" not in layout
            if report["races"] or report["findings"] or waits:
                wrong[layout, rank] = report["races"], report["findings"], report["host_syncs"]
    assert not wrong


def test_a_step_with_few_micro_batches_tells_of_all(process: SharedWorker) -> None:
    """What repeats is not carried out: every figure is that of the whole step."""
    for layout in (
        "precision=bf16 batch.global_size=6",
        "parallel.data=2 parallel.zero=2 batch.global_size=10",
        "parallel.pipeline=2 batch.global_size=8 data.packing.reset_mask=true data.packing.eod=3",
        "parallel.pipeline=2 parallel.schedule=zb_h1 parallel.data=2 parallel.zero=2 batch.global_size=16",
        "parallel.pipeline=2 parallel.schedule=zb_v parallel.virtual_stages=2 model.layers=4 parallel.data=2 "
        "parallel.zero=2 batch.global_size=16",
        # the head is gathered again in every other micro-batch only
        "parallel.pipeline=2 parallel.schedule=interleaved parallel.virtual_stages=2 model.layers=4 parallel.data=2 "
        "parallel.zero=3 batch.global_size=20",
        # rounds of three micro-batches, and one of two
        "parallel.pipeline=3 parallel.schedule=interleaved parallel.virtual_stages=2 model.layers=6 parallel.data=2 "
        "parallel.zero=3 batch.global_size=34",
        # one reduction in a micro-batch: those of two are in flight before the next one is at its fullest
        "parallel.pipeline=2 model.layers=4 parallel.data=2 parallel.zero=2 batch.global_size=16 "
        "train.frozen=[embedding.*,layers.0.*] parallel.bucket_mib=1",
    ):
        chosen = values(layout)
        for rank in role_ranks(choose_layout(chosen, 1).layout, every=False):
            short, whole = (process.report(chosen, rank, whole=whole) for whole in (False, True))
            assert all(report.pop("peak_place") and report.pop("update") for report in (short, whole))
            # the losses are added up at the end, in one operation over all micro-batches
            moved = short.pop("memory_bound_bytes")
            assert moved == pytest.approx(whole.pop("memory_bound_bytes"), rel=1e-3)
            assert short == whole, layout


def test_lamb_on_the_host_of_one_process_asks_the_device_nothing(process: SharedWorker) -> None:
    """Its sums of squares are whole; the host waits for the copy of the gradients that it works on, and that is all."""
    report = process.report(values("optimizer=lamb memory.offload=[optimizer] batch.global_size=2"), 0, whole=True)
    assert report["blocking_copies"] == {}
    ((place, times),) = report["host_syncs"].items()
    assert place.startswith("wait for an event before optim/lamb.py")
    assert times == 1


EXPERTS_APART = {
    "+config=pangu_pro_moe model.layers=4 batch.global_size=8": "",
    "+config=mixtral_8x7b model.layers=2 parallel.pipeline=1 batch.global_size=8": "parallel.fixed_exchange=true",
}
"""Preset -> what it has to be told so that the host need not ask the device how many rows there are."""


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("preset", EXPERTS_APART)
def test_tokens_go_to_experts_on_other_devices_without_a_wait(process: SharedWorker, preset: str, whole: bool) -> None:
    """In a step with experts over eight devices, which tensor-parallel ranks split or hold as a whole."""
    layout = ("parallel.tensor=8 parallel.data=1 parallel.expert_tensor=1", "parallel.tensor=1 parallel.data=8")[whole]
    words = (*preset.split(), "data=synthetic", *layout.split(), "parallel.expert=8", "batch.micro_size=1")
    found = []
    for told in ("parallel.fixed_exchange=false", EXPERTS_APART[preset]):
        report = process.report({**composed(*words, *told.split()), "dry_run": True}, 0, whole=True)
        assert not report["races"]
        found.append(sum(report["blocking_copies"].values()) + sum(report["host_syncs"].values()))
    assert found[1] == 0
    assert found[0] > 0 or not EXPERTS_APART[preset]


@pytest.mark.parametrize(("recompute", "share"), [("none", 1 / 4), ("full", 1 / 5)])
def test_two_batch_overlap_exposes_a_quarter_of_the_exchange(
    recompute: str, share: float, process: SharedWorker
) -> None:
    """Of four sequences on each of eight ranks, as four micro-batches or as halves of two. A recompute repeats what
    goes to the experts, all of it exposed without the overlap and hidden with it."""
    preset = "+config=mixtral_8x7b data=synthetic model.layers=2 parallel.pipeline=1 parallel.tensor=1 parallel.data=8"
    words = f"{preset} parallel.expert=8 batch.global_size=32 memory.recompute={recompute}".split()
    exposed = []
    for more in ("batch.micro_size=1", "batch.micro_size=2 parallel.two_batch_overlap=true"):
        report = process.report({**composed(*words, *more.split()), "dry_run": True}, 0, whole=True)
        sent = report["collectives"]["expert"]["all_to_all"]
        exposed.append(sent["bytes"] - sent.get("hidden_bytes", 0))
        assert not report["races"]
    assert exposed[1] == pytest.approx(share * exposed[0], rel=0.01)


def test_every_spelling_of_a_host_sync_is_seen() -> None:
    """And work that only looks like one is not counted."""
    command = [sys.executable, "-m", "tests.dryrun.spellings"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository(), check=False)
    assert done.returncode == 0, done.stderr
    blocking, queued = json.loads(done.stdout)
    assert len(blocking) >= 44
    assert len(queued) >= 24
    assert all(blocking.values()), blocking
    assert not any(queued.values()), queued


def test_each_micro_batch_costs_the_same(process: SharedWorker) -> None:
    reports = [process.report(values(f"batch.global_size={n}"), 0, whole=True) for n in (3, 4, 5)]
    for count in ("launches", "flops"):
        fewer, same, more = (report[count] for report in reports)
        assert more - same == same - fewer > 0


@pytest.mark.parametrize(("zero", "calls"), [(1, 5), (3, 10)], ids=["once", "for each micro-batch"])
def test_sums_over_copies_hide_where_what_they_sum_does(process: SharedWorker, zero: int, calls: int) -> None:
    """Neither the host nor computation waits between a reduce-scatter and the all-reduce behind it."""
    layout = f"batch.global_size=8 parallel.data=4 parallel.zero={zero} parallel.zero_group=2 model.layers=4"
    sent = process.report(values(layout), 0, whole=True)["collectives"]
    scattered, summed = sent["shard"]["reduce_scatter"], sent["copies"]["all_reduce"]
    assert scattered["calls"] == summed["calls"] == calls
    # but of the first layer and the embedding, behind which no product follows
    assert 0 < scattered["hidden_bytes"] == 2 * summed["hidden_bytes"] < scattered["bytes"]


def test_a_missing_wait_is_found() -> None:
    """Each wait is taken out in turn, in the process that `broken` is. While they are whole, neither offload nor a save
    races, and a save blocks nothing."""
    command = [sys.executable, "-m", "tests.dryrun.broken"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository(), check=False)
    assert done.returncode == 0, done.stderr
    found, whole, recording = json.loads(done.stdout)
    assert len(found) >= 17
    assert all(found.values()), found
    assert not any(whole.values()), whole
    # a recorded step waits once, when its times are read
    assert len(recording) == 4
    assert all(list(cost.values()) == [1] for cost in recording.values()), recording


def test_a_stage_of_the_largest_preset_on_2048_devices(process: SharedWorker) -> None:
    """Its states are those of the plan from formulas; its peak is more."""
    chosen = {**composed("+config=pangu_200b", "parallel.data=16"), "dry_run": True}
    config, layout, stages = choose_layout(chosen, 1)
    rank = layout.rank(Coordinates(pipeline=14, data=15, tensor=7))
    report = process.report(chosen, rank)
    planned = sum(plan_states(config, layout, rank, stages.of(layout.coordinates(rank).pipeline)).bytes.values())
    lasting = sum(report["lasting_bytes"][kind] for kind in ("parameters", "gradients", "optimizer"))
    assert layout.world == 2048
    assert lasting == pytest.approx(planned, rel=1e-5)
    assert report["peak"] > lasting
    assert not report["races"]
    assert report["collectives"]["pipeline"]["send"]["calls"] == 2 * stages.schedule.micro_batches
