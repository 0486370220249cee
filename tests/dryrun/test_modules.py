"""Measured work and memory of modules against formulas."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import pytest

from pangu.config.model import ModelConfig
from pangu.dryrun.traces import TraceRequest, Traces
from pangu.models.parameters import ModelPart, place_tensors
from pangu.models.size import layer_flops
from pangu.pipeline.layouts import choose_layout
from pangu.schedule.spans import Matmul, Span, Trace, Work, module_kinds
from pangu.topology.placement import TensorRank
from tests.dryrun.layouts import values

pytestmark = pytest.mark.usefixtures("commands_share_it", "session_cache")
SHAPE = (
    *("model.hidden=512", "model.heads=8", "model.sequence=256", "model.vocab=4096", "model.layers=4"),
    *("precision=bf16", "batch.global_size=48"),
)
EXPERTS = ("model.experts=8", "model.experts_per_token=2", "model.expert_ffn=256")
TENSOR = ("", "parallel.tensor=2 parallel.sequence=true")


class Modules:
    """Spans of the modules of a model that is on one stage."""

    def __init__(self, layout: str, *keys: str, splits: tuple[bool, ...] = (False, True)) -> None:
        """Measure them."""
        config = choose_layout(values(layout, *SHAPE, *keys), 1).config
        part = ModelPart.full(config.model)
        table = place_tensors(config.model, [part], TensorRank(), config.train.frozen)
        chunk = tuple(module_kinds(config, table, part).values())
        self.model: ModelConfig = config.model
        self.tokens: int = config.batch.micro_size * config.model.sequence
        self.trace: Trace = Traces().measure([TraceRequest(config, (chunk,), splits)])[0]

    def span(self, action: str, module: str = "layer") -> Span:
        """Return the span of a module in the middle of a chunk, if it has neighbours of its kind."""
        spans = {key: span for key, span in self.trace.spans.items() if key.action == action and key.module == module}
        middle = [span for key, span in spans.items() if key.before == key.after == module]
        (span, *_) = middle or spans.values()
        assert span is not None
        return span

    def work(self, action: str, module: str = "layer") -> Work:
        """Return the work of an action on a module."""
        return self.span(action, module).work


def flops(matmuls: tuple[Matmul, ...]) -> float:
    """Return the FLOPs of matmuls as formulas count them: half of a fused attention kernel's are masked."""
    return sum(matmul.flops * (2 if matmul.fused else 1) for matmul in matmuls)


@pytest.mark.parametrize("keys", [(), ("model.kv_heads=2",)])
def test_a_host_adds_each_weight_gradient_of_a_layer_once_unless_they_are_computed_apart(keys: tuple[str, ...]) -> None:
    modules = Modules("batch.micro_size=2", *keys)
    model, work = modules.model, modules.work("B")
    qkv = model.hidden * (model.heads + 2 * (model.kv_heads or model.heads)) * model.hidden // model.heads
    assert work.sums == 4  # queries, keys and values; outputs; up; down
    assert work.sum_bytes == (2 + 4 + 4) * (qkv + model.hidden**2 + 8 * model.hidden**2)  # in bf16, to sums in fp32
    assert [modules.work(action).sums for action in ("F", "I", "W")] == [0, 0, 0]
    assert modules.work("B", "head").sums == modules.work("B", "embedding").sums == 0


def test_an_update_is_measured_in_plain_numbers() -> None:
    """A step time of numpy's is no number to the tables of a search."""
    assert {type(number) for number in Modules("batch.micro_size=2").trace.update} == {float}


def test_no_layer_is_measured_while_it_casts_its_weights_to_fp8() -> None:
    """The first micro-batch does, which is not measured."""
    spans = Modules("batch.micro_size=2", "precision.matmul=fp8", splits=(False,)).trace.spans
    forward = [span for key, span in spans.items() if key.action == "F" and key.module == "layer"]
    assert len(forward) == 3
    assert len({(span.work.launches, span.work.bytes) for span in forward if span}) == 1


@pytest.mark.parametrize("first", [False, True])
def test_a_later_measurement_changes_nothing_of_an_earlier_one(
    first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedules with and without weight gradients computed apart are measured in any order."""
    monkeypatch.setattr("pangu.dryrun.traces.cache_folder", lambda: tmp_path)
    config = choose_layout(values("batch.micro_size=2 parallel.tensor=2", *SHAPE), 1).config
    part = ModelPart(range(3), first=True, last=False)
    table = place_tensors(config.model, [part], TensorRank(), ())
    chunk, traces = tuple(module_kinds(config, table, part).values()), Traces()
    before, after = (traces.measure([TraceRequest(config, (chunk,), (split,))])[0] for split in (first, not first))
    for action in ("F", *("IW" if first else "B")):
        both = (
            [(span.segments, span.work) for _, span in one.of_action(action, chunk) if span] for one in (before, after)
        )
        assert next(both) == next(both)
    backward = {key: span for key, span in before.spans.items() if key.action != "F"}
    assert {key.module for key in backward} >= {"SEND_ACTIVATION", "RECV_GRADIENT"}
    assert backward.items() <= after.spans.items()


def test_a_chunk_frees_its_messages_whatever_was_measured_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a model receives activations; a whole model, which has the same modules, does not."""
    config = choose_layout(values("batch.micro_size=2", *SHAPE, "model.kind=gpt", "model.tied_head=false"), 1).config
    chunks = []
    for part in (ModelPart.full(config.model), ModelPart(range(1, 4), first=False, last=True)):
        table = place_tensors(config.model, [part], TensorRank(), ())
        chunks.append(tuple(module_kinds(config, table, part).values()))
    found = []
    for number, measured in enumerate((chunks[1:], chunks)):
        folder, traces = tmp_path / f"{number}", Traces()
        folder.mkdir()
        monkeypatch.setattr("pangu.dryrun.traces.cache_folder", lambda folder=folder: folder)
        for chunk in measured:
            (trace,) = traces.measure([TraceRequest(config, (chunk,), (True,))])
        found.append([[span and span.segments for _, span in trace.of_action(kind, chunks[1])] for kind in "FIW"])
    assert found[0] == found[1]


def fused(work: Work) -> float:
    """Return the FLOPs of fused attention kernels."""
    return sum(matmul.flops for matmul in work.matmuls if matmul.fused)


@pytest.mark.parametrize("layout", TENSOR)
def test_a_layer_is_what_formulas_say(layout: str) -> None:
    """Activations to 0.1 % (the kernel keeps its random state as well), matmuls and collectives exactly."""
    tensor, three = 2 if layout else 1, Modules(f"batch.micro_size=3 {layout}")
    model, tokens, forward = three.model, three.tokens, three.work("F")
    # Korthikanti et al. 2022, table 2: 34, without the two masks of dropout; a fused kernel keeps no scores but their
    # sums, and norms keep two statistics
    saved = tokens * (32 * model.hidden + 4 * model.heads + 16) / tensor
    assert three.span("F").end == pytest.approx(saved, rel=1e-3)
    assert flops(forward.matmuls) * tensor == tokens * layer_flops(model)
    weights = sum(matmul.flops for matmul in forward.matmuls if not matmul.fused)
    assert sum(matmul.flops for matmul in three.work("W").matmuls) == weights
    assert flops(three.work("B").matmuls) == flops(three.work("I").matmuls) + weights
    sent = {one.kind: one.calls for one in forward.collectives}
    assert sent == ({"all_gather": 2, "reduce_scatter": 2} if tensor > 1 else {})
    assert all(one.bytes == 2 * tokens * model.hidden for one in forward.collectives)
    assert three.span("F", "head").end > 2 * tokens * model.vocab / tensor
    again = Modules(f"batch.micro_size=3 memory.recompute=full {layout}")
    assert again.span("F", "layer recomputed").end == 2 * tokens * model.hidden / tensor
    # the last matmul of a layer is not computed again
    recompute = again.work("B", "layer recomputed").launches - three.work("B").launches
    assert 0 < recompute < forward.launches


def test_more_sequences_start_as_many_kernels() -> None:
    """Tensors of one sequence need no copies to be turned; from two on each kernel is started once."""
    two, three, sixteen = (Modules(f"batch.micro_size={size}").work("F") for size in (2, 3, 16))
    assert two.launches == three.launches == sixteen.launches
    assert 2 * sixteen.bytes == pytest.approx(16 * two.bytes, rel=0.05)


@pytest.mark.parametrize("layout", TENSOR)
def test_a_layer_of_experts_is_what_formulas_say(layout: str) -> None:
    """The matmuls of a token's experts, in one kernel for all experts; the router's, which each tensor-parallel rank
    computes for all tokens."""
    tensor, keys = 2 if layout else 1, ("model.shared_experts=1", "model.activation=swiglu", "model.biases=false")
    modules = Modules(f"batch.micro_size=4 {layout}", *EXPERTS, *keys)
    tokens, forward = modules.tokens, modules.work("F")
    assert {(one.rows, one.columns, one.depth) for one in forward.matmuls if one.batch == 8} == {
        (tokens * 2 // 8, 512 // tensor, 512),
        (tokens * 2 // 8, 512, 256 // tensor),
    }
    router = 2 * tokens * 512 * 8
    assert (flops(forward.matmuls) - router) * tensor + router == tokens * layer_flops(modules.model)
    weights = sum(one.flops for one in forward.matmuls if not one.fused) - router
    assert sum(one.flops for one in modules.work("W").matmuls) == weights
    assert forward.waits == 0


def test_an_rms_norm_and_a_gate_are_the_kernels_of_a_gpu_in_every_build_of_torch() -> None:
    """A CPU build has none of CUDA's: it would compute both in many operators."""
    plain, rms, gated = (
        Modules("batch.micro_size=2", *keys) for keys in ((), ("model.norm=rmsnorm",), ("model.activation=swiglu",))
    )
    for action, more in (
        ("F", 1),
        ("B", 3),
    ):  # silu and product; both products' gradients, silu's, both halves together
        launches = plain.work(action).launches
        assert rms.work(action).launches == launches
        assert gated.work(action).launches == launches + more


def test_dense_layers_are_told_from_those_of_experts() -> None:
    modules = Modules("batch.micro_size=4 model.dense_layers=1 model.expert_every=2", *EXPERTS)
    assert not any(matmul.grouped for matmul in modules.work("F", "layer dense").matmuls)
    assert any(matmul.grouped for matmul in modules.work("F").matmuls)


GROUPS = ("model.experts_per_token=4", "model.router.selection=each_group", "model.router.groups=4")
"""A token has an expert on each of four ranks."""


@pytest.mark.parametrize(("tensor", "of_each"), [(1, "null"), (2, "null"), (2, "1")])
@pytest.mark.parametrize(
    ("words", "rows", "waits"),
    [((), 2, 1), (("parallel.fixed_exchange=true",), 8, 0), (GROUPS, 4, 0), (("parallel.expert_imbalance=1.5",), 3, 1)],
)
def test_a_layer_sends_tokens_to_experts_as_formulas_say(
    words: tuple[str, ...], rows: int, waits: int, tensor: int, of_each: str
) -> None:
    """As in tests/parallel/test_experts.py: of each choice hidden states and a weight go there, outputs come
    back, gradients go the other way; numbers of rows are int32. A tensor-parallel rank sends all tokens, or with whole
    experts its share. The host waits for the number of rows that come, unless it is fixed: both of a token's experts
    may be on any of the four ranks. The fullest rank gets `expert_imbalance` times its share."""
    layout = f"batch.micro_size=4 parallel.data=4 parallel.expert=4 parallel.tensor={tensor}"
    modules = Modules(f"{layout} parallel.expert_tensor={of_each}", *EXPERTS, *words)
    rows *= modules.tokens // (tensor if of_each == "1" else 1)
    for action, counts in (("F", 8 * 4), ("I", 0)):
        work = modules.work(action)
        sent = sum(one.bytes * one.calls for one in work.collectives if one.axis == "expert")
        assert sent == rows * (2 * modules.model.hidden + 1) * 2 + counts
    forward = modules.work("F")
    assert forward.waits == waits
    assert {(one.batch, one.rows) for one in forward.matmuls if one.grouped} == {(2, rows // 2)}


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_shared_experts_hide_tokens_on_their_way_there_and_back(recompute: str) -> None:
    """One matmul each; a layer that is recomputed does not send outputs back again, and so has no matmul left for them
    in its forward pass."""
    words = (*EXPERTS, *GROUPS, "model.shared_experts=1", f"memory.recompute={recompute}")
    modules = Modules("batch.micro_size=4 parallel.data=4 parallel.expert=4", *words)
    kind = "layer" if recompute == "none" else "layer recomputed"
    sent = [one for one in modules.work("F", kind).collectives if one.axis == "expert"]
    assert sum(one.calls for one in sent) == 4  # numbers, rows, weights, outputs
    assert sum(one.calls * one.hidden for one in sent) == (3 if recompute == "none" else 2)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize(("action", "numbers"), [("F", 2), ("I", 0)])
def test_one_half_of_a_micro_batch_hides_the_tokens_of_the_other(action: str, numbers: int, shared: int) -> None:
    """Of four messages of each token's row, forward and backward, one is exposed: the last one, behind which nothing is
    left to compute but the first matmul of shared experts. Numbers of rows are small, and nothing hides them."""
    layout = "batch.micro_size=4 parallel.data=4 parallel.expert=4 parallel.two_batch_overlap=true"
    work = Modules(layout, *EXPERTS, f"model.shared_experts={shared}").work(action)
    sent = [one for one in work.collectives if one.axis == "expert"]
    assert sum(one.calls for one in sent) == 2 * 3 + numbers  # rows, weights and outputs of each half
    exposed = sum(one.bytes * one.calls * (1 - one.hidden) for one in sent if one.bytes > 2**10)
    total = sum(one.bytes * one.calls for one in sent if one.bytes > 2**10)
    assert exposed == pytest.approx(0 if shared else total / 4, rel=0.01)


@pytest.mark.parametrize("kind", ["gather", "ring", "ulysses"])
@pytest.mark.parametrize(("ranks", "key_heads"), [(2, 4), (4, 2)])
def test_a_layer_sends_what_formulas_say_to_ranks_that_share_sequences(kind: str, ranks: int, key_heads: int) -> None:
    """Bytes of docs/context.md, exactly, and as many matmuls as one rank's share of the scores takes."""
    keys = (f"parallel.context_kind={kind}", f"model.kv_heads={key_heads}", "model.attention=flash")
    modules = Modules(f"batch.micro_size=3 parallel.context={ranks}", *keys)
    model, forward, backward = modules.model, modules.work("F"), modules.work("I")
    sent = Counter[str]()
    for one in forward.collectives + backward.collectives:
        assert one.axis == "context"
        sent[one.kind] += int(one.bytes * one.calls)
    gathered = 2 * modules.tokens * key_heads * model.head_size * 2
    if kind == "gather":
        assert sent == {"all_gather": 2 * gathered, "reduce_scatter": gathered}
    elif kind == "ring":
        assert sent == {"send": 3 * (ranks - 1) * gathered // ranks}
    else:
        heads = 2 * model.heads + 2 * math.lcm(key_heads, ranks)
        assert sent == {"all_to_all": 2 * modules.tokens * heads * model.head_size * 2 // ranks}
    hidden = sum(one.calls * one.hidden for one in forward.collectives)
    assert hidden == (ranks - 1 if kind == "ring" else 0)
    back = sum(one.calls * one.hidden for one in backward.collectives)
    # keys and values come, their gradients go: after the last of these nothing is left to compute
    assert back == (2 * (ranks - 1) - 1 if kind == "ring" else 0)
    half = 2 * modules.tokens * model.sequence * model.heads * model.head_size
    assert fused(forward) == pytest.approx(half / ranks)


def test_of_blocks_that_nobody_sees_nothing_is_computed() -> None:
    """FlexAttention in tiles of 128: 4 x 4, of which 10 are causal; blocks see themselves and every other one. Where
    probabilities are dropped it attends twice, the second time to few columns of values."""
    sparse = "model.sparse={kind:strided,block:128,local_blocks:1,stride:2}"
    dense, skipping, dropping = (
        Modules("batch.micro_size=3", "model.sequence=512", *more)
        for more in ((), (sparse,), (sparse, "model.attention_dropout=0.1"))
    )
    for action in "FI":
        whole, left, twice = (fused(modules.work(action)) for modules in (dense, skipping, dropping))
        assert left == 0.6 * whole > 0
        assert left < twice < 1.8 * left
    assert skipping.span("F").end == dense.span("F").end


def test_flexattention_that_drops_attends_twice() -> None:
    """The second time to 16 columns of values: two matmuls of scores, and one of them, in forward, eight and two in
    backward. It keeps the output before it is scaled, and the second one with its sums."""
    whole, twice = (
        Modules("batch.micro_size=3", "model.attention=flex", *more) for more in ((), ("model.attention_dropout=0.1",))
    )
    size, width = whole.model.head_size, 16
    for action, before, after in (("F", 2 * size, 3 * size + width), ("I", 5 * size, 8 * size + 2 * width)):
        assert fused(twice.work(action)) * before == fused(whole.work(action)) * after > 0
    kept = whole.tokens * (2 * whole.model.hidden + whole.model.heads * (2 * width + 6))
    assert twice.span("F").end - whole.span("F").end == pytest.approx(kept, rel=1e-3)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_of_matmuls_hide_all_but_one_of_their_collectives(chunks: int) -> None:
    layout = f"batch.micro_size=4 parallel.tensor=2 parallel.sequence=true parallel.overlap_chunks={chunks}"
    forward = Modules(layout).work("F")
    assert sum(one.calls for one in forward.collectives) == 4 * chunks
    assert sum(one.calls * one.hidden for one in forward.collectives) == 4 * (chunks - 1)
