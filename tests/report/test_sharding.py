"""The sharding plan speaks of the real model."""

from __future__ import annotations

import math

import pytest

from pangu.config.schema import RunConfig
from pangu.metrics.text import size
from pangu.models.parameters import ModelPart
from pangu.models.size import num_parameters
from pangu.pipeline.stages import cut
from pangu.report.sharding import ShardedPart, plan_sharding, sent_rows
from pangu.schedule.groups import Group
from pangu.schedule.spans import Collective, Span, SpanKey, Work
from pangu.topology.layout import Layout
from tests.configs import RECIPES, config

LAYER, QUERY = "layer recomputed", "layer query recomputed"


def parts_of(chosen: RunConfig, layout: Layout) -> dict[str, ShardedPart]:
    return plan_sharding(chosen, layout, [ModelPart.full(chosen.model)])


@pytest.fixture(scope="module")
def plain() -> dict[str, ShardedPart]:
    return parts_of(config("+config=pangu_13b"), Layout(tensor=8))


@pytest.fixture(scope="module")
def sliced() -> dict[str, ShardedPart]:
    return parts_of(config("+config=pangu_13b"), Layout(tensor=8, sequence=True))


def test_layers_that_are_alike_stand_together(plain: dict[str, ShardedPart]) -> None:
    assert list(plain) == ["embedding", LAYER, QUERY, "head"]
    assert plain[LAYER].modules == tuple(f"layers.{number}" for number in range(39))
    gpt = config("+config=gpt2_124m", "memory.recompute=2")
    parts = plan_sharding(gpt, Layout(tensor=2, pipeline=2), cut(gpt.model, 2))
    assert list(parts) == ["embedding", LAYER, "layer", "head"]
    assert parts[LAYER].modules == ("layers.0", "layers.1", "layers.8", "layers.9")
    assert parts[LAYER].weights == parts["layer"].weights


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_weight_of_every_recipe_is_told_once(recipe: str) -> None:
    """All ranks' shares together are the model: cut weights `tensor` times, whole ones once."""
    chosen = config(f"+config={recipe}")
    tensor = 2  # divides every vocabulary's rows into shares of which rank 0's is the larger
    parts = parts_of(chosen, Layout(tensor=tensor))
    if chosen.model.tied_head:
        parts["head"] = parts["head"]._replace(
            weights=tuple(weight for weight in parts["head"].weights if not weight.name.startswith("embedding"))
        )
    weights = [weight for part in parts.values() for weight in part.weights * len(part.modules)]
    assert sum(math.prod(weight.shape) for weight in weights) == num_parameters(chosen.model)
    for weight in weights:
        assert (weight.cut.startswith("whole")) == (weight.shape == weight.local_shape), weight
        assert weight.operator, weight
        if not weight.cut.startswith("whole"):
            whole, local = math.prod(weight.shape), math.prod(weight.local_shape)
            assert whole <= local * tensor <= whole + tensor * chosen.model.hidden


@pytest.mark.parametrize(
    ("name", "local", "cut", "plainly", "with_sequence", "activations"),
    [
        (
            "attention.query.weight",
            (640, 5120),
            "columns (outputs) over 8 ranks",
            "MatMul ((dp,1),(1,mp))",
            "AllGather from ((dp*mp,1)), MatMul ((dp,1),(1,mp))",
            "[128, 4, 5120] -> [1024, 4, 640]",
        ),
        (
            "mlp.down.weight",
            (5120, 2560),
            "rows (inputs) over 8 ranks",
            "MatMul ((dp,mp),(mp,1)) + AllReduce",
            "MatMul ((dp,mp),(mp,1)) + ReduceScatter to ((dp*mp,1))",
            "[1024, 4, 2560] -> [128, 4, 5120]",
        ),
        ("mlp.up.bias", (2560,), "columns (outputs) over 8 ranks", "Add ((dp,mp),(mp,))", "Add ((dp,mp),(mp,))", ""),
        ("mlp.down.bias", (5120,), "whole", "Add ((dp,1),(1,))", "Add ((dp*mp,1),(1,))", ""),
        (
            "mlp_norm.weight",
            (5120,),
            "whole",
            "LayerNorm ((dp,1),(1,),(1,))",
            "LayerNorm ((dp*mp,1),(1,),(1,))",
            "",
        ),
    ],
)
def test_how_a_weight_is_cut(
    plain: dict[str, ShardedPart],
    sliced: dict[str, ShardedPart],
    name: str,
    local: tuple[int, ...],
    cut: str,
    plainly: str,
    with_sequence: str,
    activations: str,
) -> None:
    for parts, operator in ((plain, plainly), (sliced, with_sequence)):
        (weight,) = (weight for weight in parts[LAYER].weights if weight.name == name)
        assert (weight.local_shape, weight.operator) == (local, operator)
        is_partial = parts is sliced and cut == "whole"
        assert weight.cut == cut + "; gradient: summed once a step" * is_partial
    assert weight.activations == activations


def test_the_outer_parts(plain: dict[str, ShardedPart], sliced: dict[str, ShardedPart]) -> None:
    word, position = plain["embedding"].weights
    assert (word.local_shape, word.operator) == ((5000, 5120), "Gather ((mp,1),(dp,1)) + AllReduce")
    assert (position.cut, sliced["embedding"].weights[1].operator) == ("whole", "Gather ((1,1),(dp,mp))")
    assert sliced["head"].weights[-1].activations == "[128, 4, 5120] -> [4096, 5000]"
    assert (plain[QUERY].takes, sliced[QUERY].takes) == ("[s, b, h]", "[s/t, b, h]")
    for parts in (plain, sliced):  # every rank looks all position vectors up, for its own heads
        (vectors,) = (weight for weight in parts[QUERY].weights if weight.name == "query_embedding.weight")
        assert (vectors.operator, vectors.cut) == ("Gather ((1,1),(dp,1))", "whole; gradient: summed once a step")
        assert vectors.activations == "[1024, 4] -> [1024, 4, 5120]"
        (query,) = (weight for weight in parts[QUERY].weights if weight.name == "attention.query.weight")
        assert (query.cut, query.operator) == ("columns (outputs) over 8 ranks", "MatMul ((dp,1),(1,mp))")
        assert query.activations == "[1024, 4, 5120] -> [1024, 4, 640]"


def test_the_relative_bias_is_cut_by_heads() -> None:
    chosen = config("+config=pangu_13b", "model.positions=relative")
    part = parts_of(chosen, Layout(tensor=8, sequence=True))["position_bias"]
    (weight,) = part.weights
    assert (weight.shape, weight.local_shape, weight.cut) == ((32, 40), (32, 5), "columns (heads) over 8 ranks")
    assert weight.activations == "[1024] -> [5, 1024, 1024]"


@pytest.mark.parametrize("norm", ["RMSNorm", "LayerNorm"])
def test_norms_of_heads_are_whole_and_their_gradients_are_not(norm: str) -> None:
    """Each rank norms its own heads of all tokens, with sequence parallelism or without."""
    chosen = config("+config=pangu_13b", "model.qk_norm=true", f"model.norm={norm.lower()}")
    for sequence in (False, True):
        part = parts_of(chosen, Layout(tensor=8, sequence=sequence))[LAYER]
        found = [weight for weight in part.weights if "query_norm" in weight.name or "key_norm" in weight.name]
        assert len(found) == (2 if norm == "RMSNorm" else 4)
        for weight in found:
            assert (weight.shape, weight.cut) == ((128,), "whole; gradient: summed once a step")
            assert weight.operator.startswith(f"{norm} ((dp,mp,1),(1,)")


def test_bytes_on_a_ring() -> None:
    """An all-reduce is a reduce-scatter and an all-gather, so sequence parallelism alone costs nothing in forward."""
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    span = Span(work=Work(collectives=tuple(Collective(kind, "tensor", 800 * 2**20, 2) for kind in kinds)))
    layer, head = SpanKey("F", "start", "layer", "head"), SpanKey("F", "layer", "head", "end")
    rows = list(sent_rows([(layer, span), (layer, span), (head, Span())], {"tensor": Group(4, 4)}))
    assert rows[:3] == [
        ("layer (each of 2)", "forward", "tensor", "all-reduce", "2", "1.56 GiB", "2.34 GiB"),
        ("layer (each of 2)", "forward", "tensor", "all-gather", "2", "1.56 GiB", "1.17 GiB"),
        ("layer (each of 2)", "forward", "tensor", "reduce-scatter", "2", "1.56 GiB", "1.17 GiB"),
    ]
    assert rows[3] == ("whole model", "forward", "tensor", "all-reduce", "4", "3.12 GiB", "4.69 GiB")
    assert len(rows) == 6


def test_experts_are_shared() -> None:
    """With experts on two ranks each holds half of them; the router is whole, and sees all tokens of the ranks."""
    chosen = config("+config=gpt2_124m", "model.experts=4", "model.experts_per_token=2")
    part = parts_of(chosen, Layout(tensor=2, data=2, expert=2))["layer"]
    weights = {weight.name: weight for weight in part.weights}
    assert {name.split(".")[2] for name in weights if ".experts." in name} == {"0", "1"}
    assert weights["mlp.experts.0.down.weight"].operator == "GroupedMatMul ((dp,mp),(mp,1)) + sum by token + AllReduce"
    assert weights["mlp.router.weight"].activations == "[1024, 16, 768] -> [1024, 16, 4]"


def test_one_tensor_rank_sends_nothing() -> None:
    weights = [
        weight for part in parts_of(config("+config=pangu_350m"), Layout(data=4)).values() for weight in part.weights
    ]
    assert {weight.cut for weight in weights} == {"whole"}
    assert not any("All" in weight.operator or "Scatter" in weight.operator for weight in weights)


def test_small_sizes_are_told_in_kib() -> None:
    assert [size(count) for count in (2**30, 2**20, 16384, 0)] == ["1.00 GiB", "1.0 MiB", "16.0 KiB", "0.0 KiB"]
