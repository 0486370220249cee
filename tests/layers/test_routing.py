"""Experts are chosen as a few plain lines choose them: ties, groups, room, and where the rows of tokens lie."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from pangu.config.model import RouterConfig
from pangu.config.parallelism import most_of_rank
from pangu.layers.expert_balance import ExpertBalance
from pangu.layers.experts import Router, Routes
from pangu.layers.grouped_matmul import grouped_matmul
from pangu.layers.routing import Dispatch, balance_loss, choose, chosen_by, room_of, within_room
from tests.models.helpers import make, variant
from tests.models.test_variants import choice

ROUTERS = [
    (RouterConfig(), 8, 3),
    (RouterConfig(selection="each_group", groups=4), 8, 4),
    (RouterConfig(selection="each_group", groups=2), 8, 6),
    (RouterConfig(selection="group_limited", groups=4, groups_per_token=2), 8, 3),
    (RouterConfig(selection="group_limited", groups=3, groups_per_token=1), 9, 2),
    (RouterConfig(selection="group_limited", groups=8, groups_per_token=3), 8, 3),
    (RouterConfig(selection="group_limited_best", groups=4, groups_per_token=2), 8, 3),
]


def scores_with_ties() -> Iterator[Tensor]:
    """[tokens, 72 numbers], few of them different, whose sums are exact."""
    for seed, kinds in enumerate((2, 3, 5, 1000)):
        source = torch.Generator().manual_seed(seed)
        yield torch.randint(kinds, (50, 72), generator=source) / 1024


@pytest.mark.parametrize(("router", "experts", "count"), ROUTERS, ids=str)
def test_the_best_experts_are_chosen_and_of_equal_ones_the_first(
    router: RouterConfig, experts: int, count: int
) -> None:
    for scores in scores_with_ties():
        found = choose(scores[:, :experts].view(5, 10, experts), router, count).flatten(0, 1)
        assert found.tolist() == [choice(row[:experts].tolist(), router, count) for row in scores]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 9])
@pytest.mark.parametrize(("router", "experts", "count"), ROUTERS, ids=str)
def test_a_rank_gets_no_more_choices_of_a_token_than_said_and_sometimes_as_many(
    router: RouterConfig, experts: int, count: int, ranks: int
) -> None:
    if experts % ranks == 0:
        scores = torch.rand(2000, experts, generator=torch.Generator().manual_seed(4))
        chosen = chosen_by(choose(scores, router, count), experts)
        of_ranks = chosen.unflatten(1, (ranks, -1)).sum(-1)
        assert int(of_ranks.max()) == most_of_rank(router, experts, count, ranks)


def test_a_sequence_fills_an_expert_in_the_order_of_tokens() -> None:
    """Whatever else is in the micro-batch, and however it is cut."""
    experts = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:2] for i in range(60)])
    chosen = chosen_by(experts.view(20, 3, 2), 5)
    room = room_of(0.7, 20, 2, 5)
    assert room == math.ceil(0.7 * 20 * 2 / 5) == 6
    kept = within_room(chosen, room)
    for row in range(3):
        assert torch.equal(within_room(chosen[:, row : row + 1], room), kept[:, row : row + 1])
        for expert in range(5):
            places = chosen[:, row, expert].nonzero().flatten().tolist()
            assert kept[:, row, expert].nonzero().flatten().tolist() == places[:room]
    assert bool((chosen & ~kept).any())


@pytest.mark.parametrize("drops", [False, True])
def test_rows_lie_expert_by_expert_in_the_order_of_tokens(drops: bool) -> None:
    source = torch.Generator().manual_seed(1)
    experts = torch.stack([torch.randperm(6, generator=source)[:3] for _ in range(40)])
    kept = torch.rand(40, 3, generator=source) < 0.6 if drops else None
    dispatch = Dispatch.of(experts, 6, kept)
    starts = [0, *dispatch.ends.tolist()]
    for expert in range(6):
        mine = (experts == expert) & (kept if kept is not None else True)
        rows = dispatch.tokens[starts[expert] : starts[expert + 1]]
        assert rows.tolist() == mine.any(1).nonzero().flatten().tolist()
        assert torch.equal(
            dispatch.members(torch.float32)[:, expert].nonzero().flatten(), torch.arange(*starts[expert : expert + 2])
        )
    assert torch.equal(dispatch.order[dispatch.rows.flatten()], torch.arange(120))
    assert starts[-1] == (120 if kept is None else int(kept.sum()))


@pytest.mark.parametrize("drops", [False, True])
def test_rows_of_each_rank_begin_where_its_room_does(drops: bool) -> None:
    """The choices that are not dropped lie there as without rooms; those that are share the last row."""
    source = torch.Generator().manual_seed(1)
    experts = torch.stack([torch.randperm(6, generator=source)[:3] for _ in range(40)])
    kept = torch.rand(40, 3, generator=source) < 0.6 if drops else None
    ranks, room = 3, 81
    plain, dispatch = Dispatch.of(experts, 6, kept), Dispatch.of(experts, 6, kept, ranks, room)
    assert torch.equal(dispatch.counts, plain.counts)
    assert len(dispatch.order) == ranks * room
    starts = [0, *plain.ends.tolist()]
    for expert in range(6):
        first = int(dispatch.ends[expert] - dispatch.counts[expert])
        found = dispatch.order[first : int(dispatch.ends[expert])]
        assert torch.equal(found, plain.order[starts[expert] : starts[expert + 1]])
        assert torch.equal(dispatch.order[dispatch.rows.flatten()[found]], found)
        if expert % 2 == 0:
            assert first == expert // 2 * room
    if kept is not None:
        assert set(dispatch.rows[~kept].tolist()) == {ranks * room - 1}
        assert int(dispatch.ends[-1]) < ranks * room


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 18])
def test_products_of_groups(dtype: torch.dtype, width: int) -> None:
    """By torch's kernel and without it, with groups of no rows and rows of no group. Integers: nothing is rounded."""
    source = torch.Generator().manual_seed(2)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=source).to(dtype).requires_grad_()

    x, weight, ends = numbers(23, width), numbers(4 * 8, width), torch.tensor([5, 5, 17, 20], dtype=torch.int32)
    grad = numbers(23, 8).detach()
    grad[20:] = 0
    spans = [(0, 5), (5, 5), (5, 17), (17, 20)]
    expected = torch.cat(
        [*(x[a:b] @ w.t() for (a, b), w in zip(spans, weight.view(4, 8, width), strict=True)), x.new_zeros(3, 8)]
    )
    order = torch.arange(23)
    found = grouped_matmul(x, weight, Dispatch(order, order[:, None], ends.diff(prepend=ends.new_zeros(1)), ends), None)
    assert torch.equal(found, expected)
    for mine, reference in zip(
        torch.autograd.grad(found, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        assert torch.equal(mine, reference)


def test_a_loss_of_even_loads_is_one() -> None:
    scores = torch.rand(7, 3, 5, generator=torch.Generator().manual_seed(3)).softmax(-1)
    assert float(balance_loss(scores, torch.full((1, 5), 0.2), 7)) == pytest.approx(3.0)
    shares = torch.tensor([[1.0, 0, 0, 0, 0]])
    assert float(balance_loss(scores, shares, 7)) == pytest.approx(float(5 * scores[..., 0].mean(0).sum()))


@pytest.mark.parametrize(
    ("together", "groups"), [(1, [[0], [1], [2], [3]]), (2, [[0, 1], [2, 3]]), (4, [[0, 1, 2, 3]])]
)
def test_sequences_that_are_counted_together(together: int, groups: list[list[int]]) -> None:
    """The gradient of a group's loss: number of experts x sum of (share of the group's choices x its mean score)."""
    options = RouterConfig(balance_sequences=together, balance_weight=0.5)
    model, _ = make(variant(kind="gpt", layers=1, experts=5, router=options))
    (router,) = (module for module in model.modules() if isinstance(module, Router))
    x = torch.randn(7, 4, 32, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    router.balance.start_step(torch.tensor(1.0), 4)
    (0 * router(x, Routes()).weights.sum()).backward()
    weight = router.weight.detach().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for group in groups:
        scores = (x[:, group] @ weight.T).softmax(-1).flatten(0, 1)
        shares = scores.topk(2).indices.flatten().bincount(minlength=5).double() / (2 * len(scores))
        loss = loss + 0.5 * len(group) / 4 * 5 * (shares * scores.mean(0)).sum()
    (expected,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(router.weight.grad, expected, rtol=1e-12, atol=1e-14)


def test_a_bias_falls_while_its_expert_has_more_than_the_mean() -> None:
    config = variant(experts=4, router=RouterConfig(balance="bias", bias_rate=0.25))
    balance = ExpertBalance(config)
    none = torch.zeros(())
    for skipped in (False, True):
        balance.start_step(none, 0.5)
        balance.record(0, torch.tensor([9, 3, 6, 6]), none, torch.ones(2))
        balance.record(1, torch.tensor([0, 0, 24, 0]), none + 12, torch.ones(2))
        figures = balance.finish_step(None, torch.tensor(skipped))
    assert balance.bias.tolist() == [[-0.25, 0.25, 0, 0], [0.25, 0.25, -0.25, 0.25]]
    assert balance.shares.tolist() == [[0.375, 0.125, 0.25, 0.25], [0, 0, 1, 0]]
    assert figures.tolist() == [4, 0, 0.25, 2, 2]  # of half a sequence
    other = ExpertBalance(config)
    other.restore("here", balance.state())
    assert torch.equal(other.bias, balance.bias)
    assert torch.equal(other.shares, balance.shares)
