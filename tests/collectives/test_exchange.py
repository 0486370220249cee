"""Rows between ranks, as many as each has for each."""

from __future__ import annotations

import functools
import weakref
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from pangu.collectives import exchange
from pangu.collectives.exchange import Exchange, exchange_rows
from pangu.collectives.reduce import gather_objects, start_all_gather, start_ordered_all_reduce, start_reduce_scatter
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.collective_counter import ALL_GATHER, counted
from tests.spawn import Pool
from tests.threads import Ranks

COUNTS = torch.tensor([[2, 0, 3], [1, 4, 0], [0, 0, 0]])
"""Rows from each rank to each; the last has none."""


def rows_between(source: int, target: int) -> Tensor:
    """Those that one rank has for another."""
    first = 100.0 * source + 10.0 * target
    return torch.arange(first, first + int(COUNTS[source, target]), dtype=torch.float64).repeat(2, 1).t()


def send_all(rank: int, world: int) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank is told, what it receives, and the gradient of what it sent, for one of each row's square."""
    mesh = Mesh.connect(Layout(data=world), torch.device("cpu"))
    group = mesh.group("replicas")
    told = exchange_rows(COUNTS[rank], group)
    rows = torch.cat([rows_between(rank, target) for target in range(world)]).requires_grad_()
    between = Exchange(COUNTS[rank].tolist(), told.tolist(), group)
    received = between.end(between.begin(rows))
    received.square().sum().backward()
    assert rows.grad is not None
    return told, received.detach(), rows.grad


def check(answers: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Of `send_all`."""
    for rank, (told, received, gradient) in enumerate(answers):
        assert told.tolist() == COUNTS[:, rank].tolist()
        assert torch.equal(received, torch.cat([rows_between(source, rank) for source in range(3)]))
        assert torch.equal(gradient, 2 * torch.cat([rows_between(rank, target) for target in range(3)]))


def test_rows_go_where_they_are_for_and_gradients_come_back(pool: Pool) -> None:
    check(pool.run(3, send_all))


def transposed(rank: int, world: int) -> Tensor:
    """What a rank receives of rows that are a view with other strides, [ranks, 3, 2] in memory as [3, ranks, 2]."""
    rows = (100 * rank + torch.arange(3 * world * 2)).view(3, world, 2).movedim(1, 0)
    return exchange_rows(rows, Mesh.connect(Layout(data=world), torch.device("cpu")).group("replicas"))


def test_rows_may_be_views(pool: Pool) -> None:
    """gloo fills memory in order, and NCCL takes contiguous tensors only."""
    sent = torch.arange(12).view(3, 2, 2).movedim(1, 0)
    for rank, received in enumerate(pool.run(2, transposed)):
        assert received.is_contiguous()
        assert torch.equal(received, torch.stack([sent[rank], 100 + sent[rank]]))


def summed(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """What an ordered all-reduce of numbers of all magnitudes gives, and a reduce-scatter whose parts are gathered."""
    group = Mesh.connect(Layout(data=world), torch.device("cpu")).group("replicas")
    numbers = torch.randn(6 * world, generator=torch.Generator().manual_seed(rank)).exp() ** 5
    part, gathered = torch.empty(6), torch.empty(6 * world)
    start_reduce_scatter(part, numbers, group).wait()
    start_all_gather(gathered, part, group).wait()
    start_ordered_all_reduce(numbers, group).wait()
    return numbers, gathered


@pytest.mark.parametrize("world", [2, 3])
def test_an_ordered_all_reduce_has_the_sums_of_a_reduce_scatter(pool: Pool, world: int) -> None:
    """Bit for bit, and in rank order."""
    parts = [torch.randn(6 * world, generator=torch.Generator().manual_seed(rank)).exp() ** 5 for rank in range(world)]
    for numbers, gathered in pool.run(world, summed):
        assert torch.equal(numbers, gathered)
        assert torch.equal(numbers, functools.reduce(torch.add, parts))


def test_ranks_that_are_threads_exchange_alike(ranks: Ranks) -> None:
    check(ranks.run(3, send_all))


def test_one_rank_keeps_its_rows() -> None:
    rows = torch.randn(4, 2, requires_grad=True)
    between = Exchange([4], [4], None)
    received = between.end(between.begin(rows))
    received.sum().backward()
    assert torch.equal(received, rows)
    assert rows.grad is not None
    assert torch.equal(rows.grad, torch.ones(4, 2))
    assert exchange_rows(torch.tensor([4]), None).tolist() == [4]


class _Noted(torch.autograd.Function):
    """Computes beside an exchange."""

    @staticmethod
    def forward(ctx: object, x: Tensor, notes: list[str]) -> Tensor:
        ctx.notes = notes  # type: ignore[attr-defined]
        notes.append("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.notes.append("backward")  # type: ignore[attr-defined]
        return grads[0], None


def test_what_is_computed_between_runs_while_rows_are_under_way() -> None:
    """In forward, and in backward, where the gradients are under way."""
    notes: list[str] = []

    class Handle:
        def wait(self) -> None:
            notes.append("there")

    def start(received: Tensor, rows: Tensor, *_: object) -> Handle:
        notes.append("sent")
        received.copy_(rows)
        return Handle()

    x = torch.randn(4, 2, requires_grad=True)
    with patch.object(exchange, "start_exchange", start):
        between = Exchange([4], [4], None)
        begun = between.begin(2 * x)
        beside = _Noted.apply(x, notes)
        (between.end(begun) + beside).sum().backward()
    assert notes == ["sent", "forward", "there", "sent", "backward", "there"]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((4, 2), 3.0))


def test_rows_that_nobody_waits_for_are_freed() -> None:
    """A recompute ends with the last tensor that backward needs, and may leave an exchange behind."""
    between = Exchange([4], [4], None)
    begun = between.begin(torch.randn(4, 2, requires_grad=True))
    storage = weakref.ref(begun.untyped_storage())
    del between, begun
    assert storage() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_rows_travel_as_they_are(pool: Pool, dtype: torch.dtype) -> None:
    for received in pool.run(2, narrow, dtype):
        assert received.dtype == dtype
        assert received.float().tolist() == [[0.5], [1.5]]


def narrow(rank: int, world: int, dtype: torch.dtype) -> Tensor:
    mesh = Mesh.connect(Layout(data=world), torch.device("cpu"))
    between = Exchange([1, 1], [1, 1], mesh.group("replicas"))
    return between.end(between.begin(torch.full((2, 1), rank + 0.5, dtype=dtype)))


def gathered(rank: int, world: int, lengths: list[int]) -> tuple[list[str], int]:
    """Texts of the ranks, of these lengths, and the number of all-gathers."""
    group = Mesh.connect(Layout(data=world), torch.device("cpu")).group("replicas")
    with counted() as sent:
        texts = gather_objects(str(rank) * lengths[rank], group)
    return texts, sent[ALL_GATHER].calls


@pytest.mark.parametrize(("lengths", "calls"), [([0, 1, 900], 1), ([1, 5000, 1200], 2)])
def test_objects_are_one_message_unless_one_is_long(ranks: Ranks, lengths: list[int], calls: int) -> None:
    texts = [str(rank) * length for rank, length in enumerate(lengths)]
    assert ranks.run(3, gathered, lengths) == [(texts, calls)] * 3
