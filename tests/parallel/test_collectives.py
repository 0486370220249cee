"""What tensor-parallel ranks really send in a micro-batch is what the papers say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.data.batch import make_batch
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys
from pangu.models.language_model import Options, build_model
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from pangu.training.step import Trainer
from tests.collective_counter import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Traffic, counted
from tests.configs import tiny
from tests.threads import Ranks
from tests.weights import materialise, whole_loss

Counts = dict[str, Traffic]
HIDDEN = 4 * 16 * 2 * 32
"""Bytes of one hidden state of `tiny` in fp32: 4·s·b·h."""
TENSOR = [2, 4]


def layout_of(config: RunConfig) -> Layout:
    return Layout(tensor=config.parallel.tensor, sequence=config.parallel.sequence)


def setting(kind: str, tensor: int, sequence: bool, *overrides: str, layers: int = 3) -> tuple[str, ...]:
    parallel = (f"parallel.tensor={tensor}", f"parallel.sequence={str(sequence).lower()}")
    return (f"model.kind={kind}", *parallel, f"model.layers={layers}", *overrides)


def micro_batch(rank: int, world: int, *overrides: str) -> tuple[Counts, Counts]:
    """Collectives of forward and of backward of one micro-batch."""
    config = tiny(*overrides)
    mesh = Mesh.connect(layout_of(config), torch.device("cpu"))
    options = Options.of(config, "reference")
    region = TensorRegion.of(mesh, config.parallel.overlap_chunks)
    model, table = build_model(config.model, options, Builder(PlacementTable(), region=region))
    materialise(model, table, 1, torch.float32)
    tokens = np.arange(2 * 17, dtype=np.int64).reshape(2, 17)
    batch = make_batch(tokens, (0, 1), config.data.packing)
    with counted() as forward:
        loss = whole_loss(model, batch, DropoutKeys(1, 0, batch.samples))
    with counted() as backward:
        loss.backward()
    return forward, backward


def measure(ranks: Ranks, *overrides: str) -> tuple[Counts, Counts]:
    """`micro_batch` on as many processes as the overrides ask for; all ranks send the same."""
    first, *others = ranks.run(tiny(*overrides).parallel.tensor, micro_batch, *overrides)
    assert all(counts == first for counts in others)
    return first


def minus(one: Counts, other: Counts) -> dict[str, tuple[int, float]]:
    """Calls, and bytes in hidden states, by which `one` is above `other`; without what is equal."""
    kinds = sorted(one.keys() | other.keys())
    pairs = {kind: (one.get(kind, Traffic()), other.get(kind, Traffic())) for kind in kinds}
    difference = {kind: (a.calls - b.calls, (a.bytes - b.bytes) / HIDDEN) for kind, (a, b) in pairs.items()}
    return {kind: value for kind, value in difference.items() if value != (0, 0)}


def between(ranks: Ranks, more: tuple[str, ...], less: tuple[str, ...]) -> list[dict[str, tuple[int, float]]]:
    """Forward and backward of one setting above those of another."""
    return [minus(a, b) for a, b in zip(measure(ranks, *more), measure(ranks, *less), strict=True)]


@pytest.mark.parametrize("tensor", TENSOR)
@pytest.mark.parametrize("kind", ["gpt", "pangu"])
def test_one_layer_all_reduces_twice_each_way(ranks: Ranks, kind: str, tensor: int) -> None:
    """Shoeybi et al. 2019, section 3: 4 all-reduces of a hidden state."""
    more, less = (setting(kind, tensor, False, layers=layers) for layers in (4, 3))
    assert between(ranks, more, less) == [{ALL_REDUCE: (2, 2)}, {ALL_REDUCE: (2, 2)}]


@pytest.mark.parametrize("tensor", TENSOR)
@pytest.mark.parametrize("kind", ["gpt", "pangu"])
def test_one_layer_with_sequence_parallelism(ranks: Ranks, kind: str, tensor: int) -> None:
    """Korthikanti et al. 2022, section 4.2.2: 2 gathers and 2 reduce-scatters each way, and 2 gathers more in backward
    because only a rank's slice of each product's input is kept."""
    more, less = (setting(kind, tensor, True, layers=layers) for layers in (4, 3))
    forward = {ALL_GATHER: (2, 2), REDUCE_SCATTER: (2, 2)}
    assert between(ranks, more, less) == [forward, {ALL_GATHER: (4, 4), REDUCE_SCATTER: (2, 2)}]


@pytest.mark.parametrize("tensor", TENSOR)
@pytest.mark.parametrize("sequence", [False, True])
def test_the_query_layer_sends_no_more_than_a_block(ranks: Ranks, sequence: bool, tensor: int) -> None:
    """Queries come from position vectors that every rank looks up for itself: one more column-parallel product than in
    the block that stands there in a GPT of equal depth, but no more messages."""
    assert between(ranks, *(setting(kind, tensor, sequence) for kind in ("pangu", "gpt"))) == [{}, {}]


@pytest.mark.parametrize("sequence", [False, True])
def test_chunks_multiply_the_calls_and_not_the_bytes(ranks: Ranks, sequence: bool) -> None:
    """5 chunks of the products of a layer; the gather for a weight's gradient stays one call."""
    whole, cut = (setting("gpt", 2, sequence, f"parallel.overlap_chunks={n}", layers=1) for n in (1, 5))
    one = {ALL_GATHER: (8, 0), REDUCE_SCATTER: (8, 0)} if sequence else {ALL_REDUCE: (8, 0)}
    assert between(ranks, cut, whole) == [one, one]


@pytest.mark.parametrize("dropout", [0.1, 0.0])
@pytest.mark.parametrize("sequence", [False, True])
def test_full_recompute_repeats_forward(ranks: Ranks, dropout: float, sequence: bool) -> None:
    """Each layer's forward collectives again; torch stops before the last product's sum, which no gradient needs."""
    usual = f"model.dropout={dropout}"
    settings = [
        setting("gpt", 2, sequence, usual, f"memory.recompute={recompute}", layers=1) for recompute in ("full", "none")
    ]
    repeats = {ALL_GATHER: (2, 2), REDUCE_SCATTER: (1, 1)} if sequence else {ALL_REDUCE: (1, 1)}
    assert between(ranks, *settings) == [{}, repeats]


@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("sequence", [False, True])
def test_embedding_head_and_loss(ranks: Ranks, sequence: bool, chunk: int | None) -> None:
    """What is left of a GPT without its layers: two hidden states each way at most, and three numbers per token, of
    each chunk in messages of its own; never the logits."""
    tokens, chunks = 2 * 16, 1 if chunk is None else 7
    overrides = [
        setting("gpt", 2, sequence, f"loss.chunk={'null' if chunk is None else chunk}", layers=n) for n in (1, 2)
    ]
    one, two = (measure(ranks, *each) for each in overrides)
    layer = [minus(b, a) for a, b in zip(one, two, strict=True)]
    rest = []
    for counts, of_layer in zip(one, layer, strict=True):
        taken = {kind: Traffic(calls, int(units * HIDDEN)) for kind, (calls, units) in of_layer.items()}
        rest.append(minus(counts, taken))
    loss = (2 * chunks, 3 * 4 * tokens / HIDDEN)
    if sequence:
        states = {ALL_GATHER: (1, 1), REDUCE_SCATTER: (1, 1)}
        assert rest == [states | {ALL_REDUCE: loss}, states]
    else:
        assert rest == [{ALL_REDUCE: (1 + loss[0], 1 + loss[1])}, {ALL_REDUCE: (1, 1)}]
    assert loss[1] * HIDDEN < 4 * tokens * 101 / 2  # one rank's logits


def step(rank: int, world: int, *overrides: str) -> Counts:
    """Collectives of a step of two micro-batches."""
    config = tiny(*overrides, "batch.global_size=4")
    mesh = Mesh.connect(layout_of(config), torch.device("cpu"))
    trainer = Trainer(config, mesh)
    tokens = np.arange(4 * 17, dtype=np.int64).reshape(4, 17)
    batches = [make_batch(tokens[i : i + 2], (i, i + 1), config.data.packing) for i in (0, 2)]
    with counted() as counts:
        assert not trainer.train_step(batches).skipped
    return counts


@pytest.mark.parametrize(("optimizer", "sums"), [("adam", 2), ("lamb", 3)])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_step_adds_a_few_small_sums(ranks: Ranks, sequence: bool, optimizer: str, sums: int) -> None:
    """Besides two micro-batches: the gradients of what every rank holds whole, the clip norm with the loss; with LAMB
    the squares of weights and of their updates, from which trust ratios come (You et al. 2020)."""
    chosen = setting("pangu", 2, sequence, f"optimizer={optimizer}")
    first, second = ranks.run(2, step, *chosen)
    assert first == second
    twice: Counts = {}
    for counts in 2 * measure(ranks, *chosen):
        for kind, (calls, size) in counts.items():
            sofar = twice.get(kind, Traffic())
            twice[kind] = Traffic(sofar.calls + calls, sofar.bytes + size)
    more = minus(first, twice)
    assert set(more) == {ALL_REDUCE}
    assert more[ALL_REDUCE][0] == sums
