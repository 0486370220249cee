"""Experts that are stored apart: who holds them, who counts them, what is sent together."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from pangu.topology.experts import ExpertRank
from pangu.topology.layout import Layout
from pangu.topology.placement import Placement, PlacementTable, TensorRank
from pangu.training.survivors import writers_of
from pangu.zero.grouping import Sharding, divide
from pangu.zero.norms import counts, counts_among, holders
from tests.layouts import layouts

WIDTH = 8


def experts_of(layer: int, count: int) -> list[tuple[str, list[Placement]]]:
    """A layer's matrix, cut over tensor-parallel ranks, and a vector that is not; of each expert, and of no expert."""
    path = f"layers.{layer}"
    dense = [(f"{path}.dense", (WIDTH, WIDTH), 0), (f"{path}.norm", (WIDTH,), None)]
    tensors = [(name, [Placement(name, shape, cut_dim=dim)]) for name, shape, dim in dense]
    for kind, shape, dim in (("up", (WIDTH, WIDTH), 0), ("bias", (WIDTH,), None)):
        of_experts = [Placement(f"{path}.{e}.{kind}", shape, cut_dim=dim, expert=True) for e in range(count)]
        tensors.append((f"{path}.{kind}", of_experts))
    return tensors


def table_of(layout: Layout, rank: int, layers: int = 1) -> PlacementTable:
    """What a rank holds of layers with two experts for each share."""
    at, table = layout.coordinates(rank), PlacementTable()
    experts, dense = ExpertRank.of(layout, at), TensorRank(at.tensor, layout.tensor)
    for layer in range(layers):
        for parameter, tensors in experts_of(layer, 2 * layout.expert):
            if tensors[0].expert and layout.splits_experts:
                table.place(parameter, experts.held(tensors), experts.tensor)
            else:
                table.place(parameter, [replace(tensor, expert=False) for tensor in tensors], dense)
    return table


@given(layouts())
def test_each_shard_counts_once_and_those_that_count_make_the_whole(layout: Layout) -> None:
    """In the norm, and in a checkpoint. A stage is enough: its ranks are alike."""
    found: Counter[tuple[str, int, int]] = Counter()
    numel: dict[str, Fraction] = defaultdict(Fraction)
    for rank in range(layout.world // layout.pipeline):
        at = layout.coordinates(rank)
        for placement in table_of(layout, rank):
            if counts(placement, layout, at):
                sharding = Sharding.of(layout, at, (), placement.expert)
                found[placement.name, placement.start, sharding.rank] += 1
                numel[placement.name] += Fraction(placement.local_numel, sharding.size)
    assert set(found.values()) == {1}
    whole = {p.name: p.numel for _, tensors in experts_of(0, 2 * layout.expert) for p in tensors}
    assert numel == whole


@given(layouts(), st.data())
def test_ranks_that_are_left_write_each_shard_once_or_know_who_held_it_alone(
    layout: Layout, data: st.DataObject
) -> None:
    left = data.draw(st.sets(st.integers(0, layout.world - 1), min_size=1))
    writers, written = writers_of(layout, left), defaultdict[tuple[str, int], list[int]](list)
    held = defaultdict[tuple[str, int], set[int]](set)
    for rank in range(layout.world):
        for placement in table_of(layout, rank):
            owner = holders(layout, rank, placement.expert)[0]
            if counts(placement, layout, layout.coordinates(owner)):
                held[placement.name, owner].add(rank)
            if rank in left and counts_among(placement, layout, rank, left):
                written[placement.name, owner].append(rank)
    alone = {shard for shard, ranks in held.items() if not ranks & left}
    assert written.keys() == held.keys() - alone
    assert all(len(ranks) == 1 and ranks[0] in writers for ranks in written.values())
    assert left.issuperset(writers) == (not alone)
    assert {min(held[shard]) for shard in alone} <= writers


def test_experts_are_sent_with_each_other_in_the_order_of_forward() -> None:
    """Buckets of little more than two layers' matrices, or one layer's experts."""
    layout = Layout(data=2, expert=2)
    table = table_of(layout, 0, layers=4)
    uses = {0: {f"layers.{n}": [name for name in table.shapes if name.startswith(f"layers.{n}")] for n in range(4)}}
    flats, used = divide(table, uses, 4.0 * 150, lambda chunk, names: tuple(names))
    assert ["".join(sorted({name.split(".")[1] for name in names})) for names in flats] == ["012", "01", "23", "3"]
    assert [{table.is_expert(name) for name in names} for names in flats] == [{False}, {True}, {True}, {False}]
    assert used[0]["layers.1"] == flats[:2]
    assert sorted(name for names in flats for name in names) == sorted(table.shapes)


def test_experts_that_nothing_splits_are_sent_with_the_rest() -> None:
    table = table_of(Layout(data=2), 0)
    assert not any(map(table.is_expert, table.shapes))
    flats, _ = divide(table, {0: {"layers.0": list(table.shapes)}}, 0.0, lambda chunk, names: tuple(names))
    assert len(flats) == 1
