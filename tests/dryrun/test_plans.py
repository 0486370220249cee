"""Plans of layouts that a covering array of all keys draws, against dry runs of each stage."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from pangu.dryrun import traces
from pangu.pipeline.layouts import choose_layout
from pangu.planning.program import Program, plan_of
from tests.covering import Case
from tests.dryrun.conftest import SharedWorker
from tests.dryrun.layouts import values
from tests.dryrun.plan_cases import LONG, SHORT, all_cases, chosen_of
from tests.dryrun.planned import assert_planned, collectives_of
from tests.parallel.cases import name_of

pytestmark = pytest.mark.usefixtures("commands_share_it", "session_cache")


@pytest.fixture(scope="module")
def drawn_cases() -> list[Case]:
    return list(islice(all_cases(), LONG))


VARIED: list[tuple[int, Case]] = [
    *((number, {"optimizer": "muon_heads" if number % 8 == 1 else "muon"}) for number in range(1, SHORT, 4)),
    *((number, {"groups": "some"}) for number in range(2, SHORT, 8)),
    *((number, {"optimizer": "muon_clip", "qk_norm": "false"}) for number in range(3, SHORT, 7)),
    *((number, {"verified": "true"}) for number in range(0, SHORT, 5)),
]
"""Numbers of drawn cases, and options that the array leaves out, which they have as well."""
LONG_ONLY = {number for number, _ in VARIED} | set(range(SHORT, LONG))


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.long] * (number in LONG_ONLY)) for number in range(LONG)]
)
def test_a_plan_is_what_a_dry_run_finds(number: int, drawn_cases: list[Case], process: SharedWorker) -> None:
    case = drawn_cases[number]
    assert_planned(chosen_of(case)[0], process, name_of(case))


@pytest.mark.parametrize(
    ("number", "options"), VARIED, ids=lambda one: str(one) if isinstance(one, int) else name_of(one)
)
def test_plans_with_options_that_the_array_leaves_out(
    number: int, options: Case, drawn_cases: list[Case], process: SharedWorker
) -> None:
    case = {**drawn_cases[number], **options}
    assert_planned(chosen_of(case)[0], process, name_of(case))


KINDS = "all_to_all", "send"
"""Exchanges of matrices; a rank that sends all to one other one sends a message."""


@pytest.mark.parametrize("number", range(1, SHORT, 4))
def test_plans_with_muon(number: int, drawn_cases: list[Case], process: SharedWorker) -> None:
    case = {**drawn_cases[number], "optimizer": "muon_heads" if number % 8 == 1 else "muon"}
    assert_planned(chosen_of(case)[0], process, name_of(case))


@pytest.mark.parametrize(
    ("axes", "hidden_shares"),
    [
        ("parallel.data=2 parallel.zero=1", {"shard": 0.6, "gather": 1.0}),
        ("parallel.tensor=2", {"tensor": 0.6}),
        ("parallel.data=2 parallel.zero=1 parallel.tensor=2", {"shard": 0.2, "tensor": 0.6, "gather": 0.6}),
    ],
)
def test_matrices_arrive_and_return_while_others_are_orthogonalized(
    axes: str, hidden_shares: dict[str, float], process: SharedWorker
) -> None:
    """A rank orthogonalizes several rounds of such large matrices: only where the first one arrives and the last one
    returns, nothing is computed. Weights are gathered meanwhile, those first that the next step needs first. The most
    memory is in use meanwhile, and planned."""
    whole = values(f"optimizer=muon precision=bf16 model.hidden=4096 model.layers=3 model.heads=32 {axes}")
    assert_planned(whole, process)
    chosen = choose_layout(whole, 1)
    program, plan = Program(chosen.config), plan_of(chosen.config, chosen.layout)
    program.prepare([plan])
    (stage,) = program.describe(plan).stages
    report = process.report(whole, 0)
    assert report["peak_place"].startswith("optim/newton_schulz.py")
    for name, share in hidden_shares.items():
        exchanged = [(one, times) for one, times in stage.sent.items() if one.kind in KINDS and one.axis == name]
        hidden = sum(times * one.calls * one.bytes * one.hidden for one, times in exchanged)
        kinds = report["collectives"][name]
        found = [kinds[kind] for kind in (*KINDS, "all_gather") if kind in kinds]
        found_hidden = sum(one.get("hidden_bytes", 0) for one in found)
        assert name == "gather" or hidden == found_hidden
        assert found_hidden >= share * sum(one["bytes"] for one in found)


@pytest.mark.parametrize("zero", [0, 3])
def test_compared_weights_are_read_once_in_a_step(zero: int, process: SharedWorker) -> None:
    """However many micro-batches there are; the plan counts the bytes as the dry run does."""
    size = f"precision=bf16 model.layers=6 model.hidden=192 batch.global_size=16 parallel.data=2 parallel.zero={zero}"
    bytes_of, planned = {}, {}
    for verified in ("false", "true"):
        whole = values(f"{size} faults.verify_weights={verified}")
        chosen = choose_layout(whole, 1)
        program, plan = Program(chosen.config), plan_of(chosen.config, chosen.layout)
        program.prepare([plan])
        (stage,) = program.describe(plan).stages
        planned[verified] = stage.update.bytes
        bytes_of[verified] = process.report(whole, 0)["memory_bound_bytes"]
    more = planned["true"] - planned["false"]
    assert more == pytest.approx(bytes_of["true"] - bytes_of["false"], rel=0.01)


@pytest.mark.parametrize("layout", ["parallel.bucket_mib=1000", "train.frozen=[layers.*,embedding.*]"])
def test_no_more_reductions_are_in_flight_the_more_micro_batches_there_are(layout: str, process: SharedWorker) -> None:
    """One reduction in a micro-batch: from the third one on as many begin as end."""
    assert_planned(values(f"{layout} parallel.data=2 parallel.zero=2 batch.global_size=24"), process)


FROZEN = "train.frozen=[embedding.*,layers.0.*,layers.1.*]"


@pytest.mark.parametrize(
    "layout",
    [
        "memory.offload=[activations]",
        "memory.offload=[activations] memory.recompute=full",
        "memory.offload=[activations] parallel.pipeline=2 parallel.schedule=zb_h1",
        "memory.offload=[activations] parallel.pipeline=3",
        "memory.offload=[activations] parallel.pipeline=2 parallel.virtual_stages=2 parallel.schedule=interleaved",
        "memory.offload=[activations] model.experts=4 model.kind=gpt",
        f"memory.offload=[activations] {FROZEN}",
        f"memory.offload=[activations] parallel.pipeline=2 {FROZEN}",
        FROZEN,
        f"memory.recompute=full {FROZEN}",
        "model.kind=gpt train.frozen=[embedding.*]",
    ],
)
def test_each_micro_batch_frees_what_it_keeps(layout: str, process: SharedWorker) -> None:
    """Of 96 micro-batches, a few bytes each would be seen. An offloaded layer frees its predecessor; a frozen one keeps
    nothing."""
    size = "model.layers=12 model.hidden=192 model.sequence=128 precision=bf16 batch.global_size=96"
    assert_planned(values(f"{size} {layout}"), process)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_last_layer_of_a_chunk_alone_is_trained(schedule: str, process: SharedWorker) -> None:
    """Its saved tensors are freed one after the other, while its backward pass ends with the action."""
    size = "model.layers=8 model.kind=gpt model.hidden=192 model.sequence=128 batch.global_size=12"
    frozen = "train.frozen=[embedding.*,layers.0.*,layers.1.*,layers.2.*]"
    assert_planned(values(f"{size} {frozen} parallel.pipeline=2 parallel.schedule={schedule}"), process, off=0.001)


def test_the_first_product_in_fp8_begins_the_gradient_sum(process: SharedWorker) -> None:
    """Later ones need a buffer of their own, as large as the matrix, when the stage holds fewer activations."""
    size = "model.layers=6 model.hidden=192 model.sequence=128 batch.global_size=16 precision=fp8"
    layout = "parallel.data=2 parallel.pipeline=2 parallel.virtual_stages=2 parallel.schedule=breadth_first"
    assert_planned(values(f"{size} {layout} parallel.zero=3"), process, off=0.001)


@pytest.mark.parametrize(
    ("layout", "kind"), [("memory.recompute=full", "parameters"), ("parallel.data=2 parallel.zero=3", "gathered")]
)
def test_casts_to_fp8_are_planned_with_their_weights(layout: str, kind: str, process: SharedWorker) -> None:
    """Two bytes for each number of a layer's matrices, as long as the weights exist."""
    size = "model.layers=6 model.hidden=192 model.sequence=128 batch.global_size=8"
    assert_planned(values(f"{size} precision=fp8 {layout}"), process)
    fp8, bf16 = (
        process.report(values(f"{size} precision={precision} {layout}"), 0)["peak_bytes"][kind]
        for precision in ("fp8", "bf16")
    )
    layers = 6 if kind == "parameters" else 2  # one computes while the next one is gathered
    assert fp8 - bf16 == pytest.approx(2 * 12 * 192**2 * layers, rel=0.15)


@pytest.mark.parametrize(
    "words",
    [
        "parallel.overlap_chunks=2",
        "model.expert_capacity=1.25 memory.recompute=full",
        "parallel.fixed_exchange=false parallel.expert_imbalance=1.5",
        "parallel.two_batch_overlap=true",
    ],
)
def test_exchanges_of_given_sizes_are_planned(words: str, process: SharedWorker) -> None:
    size = "model.hidden=192 model.sequence=128 precision=bf16 batch.global_size=12 batch.micro_size=3 model.experts=4"
    layout = "parallel.data=2 parallel.expert=2 parallel.fixed_exchange=true"
    assert_planned(values(f"{size} {layout} {words}"), process)


@pytest.mark.parametrize("more", ["parallel.data=2 parallel.zero=3", "model.experts=4 model.expert_every=2"])
def test_the_norm_of_the_embedding_is_in_layer_0_only(more: str, process: SharedWorker) -> None:
    """The first layers of later stages are measured without it."""
    size = "model.layers=6 model.kind=gpt batch.global_size=8 parallel.pipeline=3"
    assert_planned(values(f"{size} model.embedding_norm=true {more}"), process)


@pytest.mark.parametrize(
    "words",
    [
        "model.mtp_layers=2 model.experts=4 parallel.data=2 parallel.zero=3 precision=bf16 loss.chunk=64",
        "model.mtp_layers=1 model.tied_head=false parallel.pipeline=2 parallel.schedule=zb_h1 memory.recompute=full",
        "model.mtp_layers=2 parallel.pipeline=2 parallel.virtual_stages=2 parallel.schedule=zb_v parallel.zero=1",
        "model.mtp_layers=1 parallel.pipeline=3 parallel.tensor=2 parallel.sequence=true memory.offload=[activations]",
    ],
)
def test_multi_token_prediction_is_planned_on_the_last_stage(words: str, process: SharedWorker) -> None:
    size = "model.layers=6 model.kind=gpt model.hidden=192 model.sequence=128 batch.global_size=12"
    assert_planned(values(f"{size} {words}"), process)


@pytest.mark.parametrize(
    "words",
    [
        "model.window=16 model.full_layers=2 parallel.pipeline=2 parallel.virtual_stages=2 parallel.schedule=zb_v",
        "model.positions=rope model.nope_layers=[1,4] model.kv_heads=1 parallel.pipeline=3 memory.recompute=1",
        "model.experts=4 model.activation=clamped_swiglu model.attention_sinks=true model.router.learned_bias=true",
        "model.attention_sinks=true model.window=16 model.full_layers=[0] parallel.tensor=2 memory.recompute=selective",
    ],
)
def test_layers_with_a_window_and_without_rope_are_kinds_of_their_own(words: str, process: SharedWorker) -> None:
    size = "model.layers=6 model.kind=gpt model.hidden=192 model.sequence=128 batch.global_size=12"
    assert_planned(values(f"{size} {words}"), process)


@pytest.mark.parametrize(
    "words",
    [
        "model.kv_heads=2 parallel.sequence=true memory.recompute=full parallel.pipeline=2 precision=bf16",
        "model.kv_heads=1 model.qk_norm=true memory.recompute=selective parallel.data=2 parallel.zero=3",
    ],
)
def test_exchanges_of_pieces_of_a_key_head_are_planned(words: str, process: SharedWorker) -> None:
    size = "model.layers=6 model.hidden=192 model.heads=12 model.sequence=128 batch.global_size=12 parallel.tensor=4"
    whole = values(f"{size} {words}")
    assert_planned(whole, process)
    assert "all_to_all" in process.report(whole, 0)["collectives"]["tensor"]
    chosen = choose_layout(whole, 1)
    ledger = Program(chosen.config).describe(plan_of(chosen.config, chosen.layout))
    exchanging = {one.ranks for one in ledger.stages[0].sent if one.kind == "all_to_all"}
    assert exchanging == {4 // (chosen.config.model.kv_heads or 1)}  # of the four tensor-parallel ranks


@pytest.mark.parametrize(
    "words",
    [
        "model.residual_scores=true parallel.pipeline=2 precision=bf16 memory.recompute=full",
        "model.kv_heads=2 parallel.tensor=2 parallel.sequence=true parallel.zero=3",
    ],
)
def test_rings_of_blocks_that_exchange_heads_are_planned(words: str, process: SharedWorker) -> None:
    size = "model.layers=6 model.hidden=192 model.heads=12 model.sequence=128 batch.global_size=12"
    layout = "parallel.context=4 parallel.context_kind=ring parallel.context_ulysses=2"
    assert_planned(values(f"{size} {layout} {words}"), process)
    assert {"all_to_all", "send"} <= process.report(values(f"{size} {layout} {words}"), 0)["collectives"][
        "context"
    ].keys()


def test_a_tied_head_may_be_measured_after_the_embedding(
    process: SharedWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A stage of zb_v has both ends of the model; of the second cut only the chunk with the head is new."""
    keys = "parallel.pipeline=2 parallel.virtual_stages=2 parallel.schedule=zb_v model.layers=6 model.tied_head=true"
    chosen = choose_layout(values(keys), 1)
    cuts = [plan_of(chosen.config, chosen.layout)._replace(layers=layers) for layers in ((1, 2, 2, 1), (1, 1, 1, 3))]
    planned = []
    for number, plans in enumerate((cuts, cuts[1:])):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.setattr(traces, "cache_folder", lambda folder=folder: folder)
        program = Program(chosen.config)
        for plan in plans:
            program.prepare([plan])
        planned.append(program.describe(cuts[1]).stages)
    for later, alone in zip(*planned, strict=True):
        assert collectives_of(later) == collectives_of(alone)
        assert later.peak == pytest.approx(alone.peak, abs=1024)
