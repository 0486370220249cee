"""Muon's matrices come together whole, whatever cuts them: the same momentum gives the same bits on every layout."""

from __future__ import annotations

import random
import zlib
from functools import lru_cache
from itertools import chain, product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pangu.config.optimizer import UPDATED_AT_ONCE
from pangu.config.schema import RunConfig
from pangu.pipeline.stages import plan_stages
from pangu.topology.layout import Layout
from pangu.zero.muon_schedule import Round, RoundStep, matrix_rounds, publications, steps_of
from pangu.zero.stage_parameters import StageParameters
from tests.configs import tiny
from tests.covering import Case
from tests.layouts import layouts
from tests.parallel.cases import WIDER, devices, keys_of, layout_of, name_of, ways_of
from tests.parallel.harness import OVERRIDES, small_trainer, whole
from tests.parallel.test_random_layouts import OF_THE_LAYOUT, drawn
from tests.threads import Ranks

MODEL = (
    *(*OVERRIDES, "optimizer=muon", "precision=bf16", "model.layers=4", "model.hidden=48", "model.heads=12"),
    *("model.ffn=96", "batch.global_size=12", "batch.micro_size=1", "train.frozen=[layers.1.mlp.*]"),
)
EXPERTS = ("model.experts=4", "model.expert_ffn=24", "model.router.balance=none")
STARTS = (RoundStep.SEND, RoundStep.JOIN, RoundStep.SPLIT, RoundStep.RETURN)
"""Steps that start an exchange."""
OFFLOAD = ("memory.offload=[optimizer,parameters]",)
CASES = {
    "data": (Layout(data=2, zero=0), ()),
    "zero_1": (Layout(data=3, zero=1), ()),
    "zero_2_tensor": (Layout(2, 1, 2, 2, sequence=True), ()),
    "zero_3": (Layout(data=4, zero=3), OFFLOAD),
    "zero_group": (Layout(tensor=2, data=4, zero=1, zero_group=2), ()),
    "tensor_3_pipeline": (Layout(3, 2, 1), ()),
    "interleaved_context": (Layout(1, 2, 1, 1, virtual_stages=2, context=2), ("parallel.schedule=interleaved",)),
    "experts": (Layout(2, 1, 2, 1, sequence=True, expert=2), EXPERTS),
    "experts_cut": (Layout(2, 1, 2, 2, sequence=True, expert=4, expert_tensor=1), EXPERTS),
}


def updated(rank: int, world: int, layout: Layout, *overrides: str) -> dict[str, Tensor]:
    """Weights after an update from a momentum that depends on the names of tensors only, and gradients of 0."""
    trainer, _ = small_trainer(layout, *overrides)
    for shard in trainer.parameters.trained_shards:
        placement, kept = shard.placement, trainer.optimizer.state[shard.main]["exp_avg"]
        source = torch.Generator().manual_seed(zlib.crc32(placement.name.encode()))
        momentum = torch.randn(placement.shape, generator=source)
        for part, offsets in shard.rectangles(kept):
            part.copy_(momentum[tuple(slice(o, o + n) for o, n in zip(offsets, part.shape, strict=True))])
        shard.main.grad = torch.zeros_like(shard.main)
    trainer.optimizer.step()
    return whole(trainer, of_gradients=False)


@lru_cache(maxsize=4)
def on_one_process(*overrides: str) -> dict[str, Tensor]:
    return updated(0, 1, Layout(), *overrides)


@pytest.mark.parametrize(("heads", "at_once"), [("whole", 5000), ("apart", UPDATED_AT_ONCE)])
@pytest.mark.parametrize("case", CASES)
def test_the_same_momentum_gives_the_same_bits(
    ranks: Ranks, case: str, heads: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In many rounds, which overlap, and in one."""
    monkeypatch.setattr(matrix_rounds, "__defaults__", (at_once,))
    layout, own = CASES[case]
    words = (
        *MODEL,
        f"optimizer.split_heads={'true' if heads == 'apart' else 'false'}",
        *(own if own is EXPERTS else ()),
    )
    expected = on_one_process(*words)
    found = ranks.run(layout.world, updated, layout, *words, *own)[0]
    assert found.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not torch.equal(found[name], weight)] == []


def drawn_case(number: int) -> Case:
    """A layout with a model, which has experts every other time and fp8 matmuls every fourth."""
    chance = random.Random(number)
    given = {"optimizer": chance.choice(("muon", "muon_heads"))}
    if number % 2:
        given["experts"] = chance.choice(WIDER["experts"][1:])
        if number % 10 == 5:
            given |= {"experts": "24", "expert": chance.choice(("3", "6"))}
    elif number % 4:
        given["matmul"] = "fp8"
    if number % 3 == 0:
        given["zero"] = chance.choice(WIDER["zero"][1:])
    return drawn(chance, **given)


IN_CI, DRAWN = 4, 60


@pytest.mark.parametrize(
    "number", [*range(IN_CI), *(pytest.param(one, marks=pytest.mark.long) for one in range(IN_CI, DRAWN))]
)
def test_the_same_momentum_gives_the_same_bits_on_drawn_layouts(ranks: Ranks, number: int) -> None:
    """With any options of layout, model and memory together; 60 in the long form."""
    case = drawn_case(number)
    print(name_of(case))
    model, own = keys_of(case)
    words = (*model, "precision=bf16")
    expected = updated(0, 1, Layout(), *words)
    with ways_of(case):
        found = ranks.run(devices(case), updated, layout_of(case), *words, *own)[0]
    assert found.keys() == expected.keys()
    assert [name for name, weight in expected.items() if not torch.equal(found[name], weight)] == []


def test_drawn_layouts_have_every_option() -> None:
    """Those of a layout and of memory, frozen parameters, fp8 and experts."""
    cases = [drawn_case(number) for number in range(DRAWN)]
    for name in (*OF_THE_LAYOUT, "frozen", "matmul", "experts"):
        assert {case[name] for case in cases} == {*WIDER[name]}, name


@lru_cache(maxsize=2)
def run_of(experts: bool) -> RunConfig:
    return tiny(*MODEL, *(EXPERTS if experts else ()))


def rounds_of(layout: Layout, experts: bool, at_once: int) -> list[dict[bool, list[Round]]]:
    """The rounds of every rank."""
    config = run_of(experts)
    stages = plan_stages(config, layout)
    return [
        matrix_rounds(StageParameters.of_run(config, layout, at, stages.of(at.pipeline), False), False, at_once)
        for at in map(layout.coordinates, range(layout.world))
    ]


@settings(max_examples=25, deadline=None)
@given(layouts(), st.booleans(), st.sampled_from([1, 5000, 2**26]))
def test_every_matrix_has_one_home_to_which_all_its_pieces_go(layout: Layout, experts: bool, at_once: int) -> None:
    """Ranks that share a stage agree on owners, and expect from each other what is sent."""
    assume(not experts or 4 % layout.expert == 0)
    found = rounds_of(layout, experts, at_once)
    for kind, number in {
        (kind, number) for of_rank in found for kind, rounds in of_rank.items() for number in range(len(rounds))
    }:
        alike: dict[tuple[int, int, frozenset[str]], dict[int, Round]] = {}
        for rank, of_rank in enumerate(found):
            if number < len(of_rank.get(kind, ())):
                one, at = of_rank[kind][number], layout.coordinates(rank)
                names = frozenset(matrix.placement.name for matrix in one.matrices)
                alike.setdefault((at.pipeline, one.cut.rank, names), {})[one.shard] = one
        for (_, cut, _), shards in alike.items():
            first = shards[0]
            assert shards.keys() == {*first.ranks}
            for place, matrix in enumerate(first.matrices):
                same = [one.matrices[place] for one in shards.values()]
                assert {(m.placement.name, m.shard, m.tensor) for m in same} == {
                    (matrix.placement.name, matrix.shard, matrix.tensor)
                }
                assert all(m.pieces == matrix.pieces for m in same)
                held = [*chain(*(range(p.start, p.stop) for p in matrix.pieces))]
                assert held == [*range(matrix.placement.local_numel)]
            for (sender, ours), (receiver, theirs) in product(shards.items(), repeat=2):
                assert ours.pieces[0][receiver] == theirs.pieces[1][sender]
            owners = [m.placement.name for one in shards.values() for m in one.owned]
            assert sorted(owners) == sorted(m.placement.name for m in first.matrices if not m.is_cut or m.tensor == cut)


def test_weights_are_published_after_their_last_matrices() -> None:
    """Those of the first layers while the last ones are orthogonalized; without matrices before all others."""
    config, layout = run_of(experts=False), Layout(data=2, zero=1)
    stage = StageParameters.of_run(config, layout, layout.coordinates(0), plan_stages(config, layout).of(0), False)
    rounds = matrix_rounds(stage, False, 10_000)[False]
    first, *others = publications(stage, rounds)
    assert [flat.names[0].partition(".")[0] for flat in first] == ["embedding"]
    layers = [flat for of in others for flat in of]
    assert layers == sorted(layers, key=lambda flat: flat.index)
    assert {*first, *layers} == {flat for flat in stage.flats if flat.trained}
    for number, flats in enumerate(others):
        later = {matrix.placement.stored_in for one in rounds[number + 1 :] for matrix in one.matrices}
        assert not any(later & {*flat.names} for flat in flats)
    assert sum(map(bool, others)) > 1


def test_homes_are_balanced() -> None:
    """Ranks differ by the cost of the largest matrix at most."""
    rounds = [one[False] for one in rounds_of(Layout(tensor=2, data=4, zero=1), False, 2**26)]
    costs = [[m.placement.numel * min(m.shape) for one in of for m in one.owned] for of in rounds]
    assert max(map(sum, costs)) - min(map(sum, costs)) <= max(map(max, costs))
    assert all(len(of) == 1 for of in rounds)


def test_a_rank_is_home_of_few_elements_at_a_time() -> None:
    """Of 10,000, or of one matrix."""
    for of in rounds_of(Layout(tensor=2, data=2, zero=1), False, 10_000):
        held = [[m.placement.numel for m in one.owned] for one in of[False]]
        assert all(sum(numels) <= 10_000 or len(numels) == 1 for numels in held)
        assert len(held) > 1


@settings(max_examples=25, deadline=None)
@given(layouts(), st.booleans(), st.sampled_from([1, 5000]))
def test_exchanges_are_in_flight_while_another_round_is_orthogonalized(
    layout: Layout, experts: bool, at_once: int
) -> None:
    """Of all rounds but the first and the last ones, alike on ranks with the same matrices, and few at a time."""
    assume(not experts or 4 % layout.expert == 0)
    orders: dict[tuple[str, ...], list[tuple[int, RoundStep]]] = {}
    for of in rounds_of(layout, experts, at_once):
        rounds = [*chain(*of.values())]
        steps = steps_of(rounds)
        assert steps == orders.setdefault(tuple(str(m.placement.name) for one in rounds for m in one.matrices), steps)
        assert [number for number, step in steps if step is RoundStep.ITERATE] == [*range(len(rounds))]
        begun, taken = 0, [[*RoundStep] for _ in rounds]
        for number, step in steps:
            assert taken[number].pop(0) is step
            begun += (step is RoundStep.SEND) - (step is RoundStep.FINISH)
            assert begun <= 5
        assert not any(taken)
        for number, step in product(range(2, len(rounds) - 2), STARTS):
            one, during = (
                rounds[number],
                steps[steps.index((number, step)) : steps.index((number, RoundStep(step + 1)))],
            )
            if one.shards > 1 if step in (RoundStep.SEND, RoundStep.RETURN) else any(m.is_cut for m in one.matrices):
                assert [other for other, what in during if what is RoundStep.ITERATE and other != number]
