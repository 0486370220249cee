"""Expert parallelism: each rank sends tokens to the ranks of their experts, which send back the outputs.

permute -> exchange -> (expert by expert) -> matmuls -> exchange -> unpermute

Where the router cannot choose more than an even share of rows for a rank, each pair of ranks has room for that, and
the host knows all sizes. Otherwise it waits for the device's counts, unless `parallel.fixed_exchange` makes room.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.collectives.exchange import Exchange, exchange_rows, host_numbers
from pangu.layers.routing import Dispatch, permute, room_of, unpermute

if TYPE_CHECKING:
    from pangu.layers.experts import MixtureOfExperts, TokenChoices


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a micro-batch, whose communication overlaps the matmuls of other parts."""

    tokens: Tensor
    """Tokens that this rank sends, [tokens, hidden]."""
    weights: Tensor
    """Weight of each row, [rows]."""
    dispatch: Dispatch


class _PartExchange:
    def __init__(
        self, part: Part, to_each: Sequence[int], from_each: Sequence[int], from_ranks: Tensor, layer: MixtureOfExperts
    ):
        """Start the exchange; `from_ranks`: rows per source rank and local expert, int [ranks, experts]."""
        assert layer.expert_region is not None
        self.part, self.experts, self.sent, group = part, layer.experts, sum(to_each), layer.expert_region.group
        self.from_each, self.from_ranks = from_each, from_ranks
        self.there = rows, weights = [Exchange(to_each, from_each, group) for _ in range(2)]
        self.back = Exchange(from_each, to_each, group)
        # without rooms, dropped choices come last, and are not sent
        self.begun = (
            rows.begin(_first(permute(part.tokens, part.dispatch), self.sent)),
            weights.begin(_first(part.weights, self.sent)),
        )

    def compute(self, full: bool) -> Tensor:
        """Wait for the rows of this rank's experts, compute, and return the outputs, which start to travel back.

        Unless `full`, the rows of each rank end with some of no expert, whose outputs are 0.
        """
        rows, weights = (one.end(begun) for one, begun in zip(self.there, self.begun, strict=True))
        # rows are sorted by source rank, and within it by expert
        count, counts = self.from_ranks.shape[1], self.from_ranks
        if not full:
            counts = torch.cat([counts, self.from_each[0] - counts.sum(1, keepdim=True)], 1)
        places = torch.arange(len(rows), device=rows.device)
        experts = torch.searchsorted(counts.flatten().cumsum(0), places, right=True)[:, None] % counts.shape[1]
        admitted = None if full else experts < count
        local_dispatch = Dispatch.of(experts if full else experts.clamp(max=count - 1), count, admitted)
        outputs = self.experts(rows, weights.index_select(0, local_dispatch.order), local_dispatch)
        self._begun_back = self.back.begin(unpermute(outputs, local_dispatch))
        return self._begun_back

    def finish(self) -> Tensor:
        """Return [tokens, hidden], the sum over the experts of each token."""
        outputs = self.back.end(self._begun_back)
        missing = len(self.part.weights) - self.sent
        return unpermute(F.pad(outputs, (0, 0, 0, missing)) if missing else outputs, self.part.dispatch)


def _first(x: Tensor, count: int) -> Tensor:
    return x if count == len(x) else x[:count]


def exchange_and_compute(
    layer: MixtureOfExperts, x: Tensor, choices: TokenChoices, shared: Iterator[Tensor | None]
) -> Generator[Tensor, None, tuple[Tensor, Tensor | None]]:
    """Return the experts' outputs for x [sequence, batch, hidden], and the output of the shared experts.

    `shared` computes the latter in two steps. Yield the last tensor that is sent when all tokens and when all outputs
    have started to travel.
    """
    # The output is a tensor-parallel rank's term of a sum. Two parts; > starts an exchange, < ends it:
    #
    #    tokens to experts    1> 2>          1<          2<
    #    computing                  shared      1            2       shared
    #    back                                     1>           2>            1<  2<
    region, tokens = layer.expert_region, x.flatten(0, 1)
    assert region is not None
    # if only one rank holds an expert, each sends a share of the tokens, and has terms of 0 for the others
    shares = layer.region.size if layer.region.size > region.tensor.size else 1
    sizes = _sizes(len(tokens), layer.region.chunks, shares)
    own = slice(layer.region.rank if shares > 1 else 0, None, shares)
    rooms, full = _rooms(layer, x, [sizes[at : at + shares] for at in range(0, len(sizes), shares)], choices)
    parts = [
        Part(tokens, *choice.rows(layer.router.experts, region.size, None if rooms is None else rooms[at]))
        for at, (tokens, choice) in enumerate(zip(split(tokens, sizes)[own], choices.split(sizes)[own], strict=True))
    ]
    to_each = torch.stack([part.dispatch.counts.view(region.size, -1) for part in parts], 1)
    from_ranks = exchange_rows(to_each, region.group)
    if rooms is None:
        numbers = host_numbers(torch.stack([to_each, from_ranks]).sum(-1), [len(part.weights) for part in parts])
        sent, received = ([list(part_counts) for part_counts in zip(*ranks, strict=True)] for ranks in numbers)
    else:
        sent = received = [[room] * region.size for room in rooms]
    exchanges = [_PartExchange(part, sent[at], received[at], from_ranks[:, at], layer) for at, part in enumerate(parts)]
    next(shared)
    yield exchanges[-1].begun[-1]
    yield [exchange.compute(full) for exchange in exchanges][-1]
    shared_output = next(shared)
    pieces = [exchange.finish() for exchange in exchanges]
    if shares > 1:
        zero, outputs = tokens.new_zeros(1, 1), pieces
        pieces = [zero.expand(size, tokens.shape[1]) for size in sizes]
        pieces[own] = outputs
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces), shared_output


def _sizes(length: int, chunks: int, shares: int) -> list[int]:
    """Return the tokens of each rank's share of each part, in order: shares of a part differ by one at most."""
    size = -(-length // chunks)
    parts = (min(size, length - start) for start in range(0, length, size))
    return [part // shares + (rank < part % shares) for part in parts for rank in range(shares)]


def split(x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Split `x` along its first dimension; as a whole it stays what it is."""
    return x.split(list(sizes)) if len(sizes) > 1 else [x]


def _rooms(
    layer: MixtureOfExperts, x: Tensor, parts: Sequence[Sequence[int]], choices: TokenChoices
) -> tuple[list[int] | None, bool]:
    """Return the rows between two ranks in each part (None: as many as counted), and whether choices fill them all."""
    # `parts`: tokens of each tensor-parallel rank's share of each part
    if not torch.is_grad_enabled():
        return None, True  # replicas may evaluate different numbers of tokens
    region, router, drops = layer.expert_region, layer.router, choices.admitted is not None
    assert region is not None
    sizes = [max(shares) * layer.most for shares in parts]
    if (capacity := router.config.expert_capacity) is not None:
        expert_room = room_of(capacity, len(x) * router.ranks, router.count, router.experts)
        assert isinstance(expert_room, int)
        sizes = [min(size, x.shape[1] * router.experts // region.size * expert_room) for size in sizes]
    rows = [min(shares) * router.count for shares in parts]
    even = all(size * region.size <= max(shares) * router.count for size, shares in zip(sizes, parts, strict=True))
    if not (even or region.fixed) or not all(rows):
        return None, True
    # one row more, for choices that are dropped
    return [size + drops for size in sizes], not drops and [size * region.size for size in sizes] == rows
