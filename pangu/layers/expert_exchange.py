"""Expert parallelism: each rank sends tokens to the ranks of their experts, which send back the outputs.

permute -> exchange -> (expert by expert) -> matmuls -> exchange -> unpermute
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from pangu.collectives.exchange import Exchange, ExpertRegion, exchange_rows, host_numbers
from pangu.layers.routing import Dispatch, permute, unpermute

if TYPE_CHECKING:
    from pangu.layers.experts import Experts, MixtureOfExperts, TokenChoices


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a micro-batch, whose communication overlaps the matmuls of other parts."""

    tokens: Tensor
    """Tokens [tokens, hidden]."""
    weights: Tensor
    """Weight of each row, [rows]."""
    dispatch: Dispatch


class _Trip:
    def __init__(
        self, part: Part, to_each: Sequence[int], from_each: Sequence[int], from_ranks: Tensor, region: ExpertRegion
    ):
        """Start the exchange; `from_ranks`: rows per source rank and local expert, int64 [ranks, experts]."""
        self.part, self.sent, self.from_ranks = part, sum(to_each), from_ranks
        self.there = rows, weights = [Exchange(to_each, from_each, region.group) for _ in range(2)]
        self.back = Exchange(from_each, to_each, region.group)
        # dropped choices come last, and are not sent
        self._begun = (
            rows.begin(_first(permute(part.tokens, part.dispatch), self.sent)),
            weights.begin(_first(part.weights, self.sent)),
        )

    def compute(self, experts: Experts) -> None:
        """Wait for the rows of this rank's experts, compute, and start to send back the outputs."""
        rows, weights = (exchange.end(begun) for exchange, begun in zip(self.there, self._begun, strict=True))
        # rows are sorted by source rank, and within it by expert
        places = torch.arange(len(rows), device=rows.device)
        count = self.from_ranks.shape[1]
        expert_of_row = torch.searchsorted(self.from_ranks.flatten().cumsum(0), places, right=True) % count
        of_rank = Dispatch.of(expert_of_row[:, None], count)
        outputs = experts(rows, weights.index_select(0, of_rank.order), of_rank)
        self._begun_back = self.back.begin(unpermute(outputs, of_rank))

    def finish(self) -> Tensor:
        """Return [tokens, hidden], the sum over the experts of each token."""
        outputs = self.back.end(self._begun_back)
        missing = len(self.part.weights) - self.sent
        return unpermute(F.pad(outputs, (0, 0, 0, missing)) if missing else outputs, self.part.dispatch)


def _first(x: Tensor, count: int) -> Tensor:
    return x if count == len(x) else x[:count]


def exchanged(
    layer: MixtureOfExperts, tokens: Tensor, choices: TokenChoices, beside: Callable[[], Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    """Return the experts' outputs for tokens [tokens, hidden], and the result of `beside`, computed meanwhile."""
    # The output is a tensor-parallel rank's term of a sum. Two parts; > starts an exchange, < ends it:
    #
    #    tokens to experts    1> 2>          1<          2<
    #    computing                  beside      1            2
    #    back                                     1>           2>  1<  2<
    region = layer.spread
    assert region is not None
    parts = list(_parts(layer, region, tokens, choices))
    ends = torch.stack([F.pad(part.dispatch.ends, (1, 0)) for part in parts]).long()
    to_each = ends.diff(dim=1).unflatten(1, (region.size, -1)).transpose(0, 1).contiguous()
    from_ranks = exchange_rows(to_each, region.group)
    most = [len(part.weights) * region.tensor.size // layer.region.size for part in parts]
    numbers = host_numbers(torch.stack([to_each, from_ranks]).sum(-1), most)
    sent, received = ([list(of_part) for of_part in zip(*ranks, strict=True)] for ranks in numbers)
    trips = [_Trip(part, sent[at], received[at], from_ranks[:, at], region) for at, part in enumerate(parts)]
    result = beside()
    for trip in trips:
        trip.compute(layer.experts)
    return torch.cat([trip.finish() for trip in trips]), result


def _parts(layer: MixtureOfExperts, region: ExpertRegion, tokens: Tensor, choices: TokenChoices) -> Iterator[Part]:
    if layer.region.size > region.tensor.size:
        # only one rank holds an expert: each sends a share of the tokens, and has terms of 0 for the others
        first, stop = layer.region.bounds(len(tokens))
        place = torch.arange(len(tokens), device=tokens.device)[:, None]
        share = ((place >= first) & (place < stop)).expand_as(choices.experts)
        choices = choices._replace(admitted=share if choices.admitted is None else choices.admitted & share)
    size = -(-len(tokens) // layer.region.chunks)
    for start in range(0, len(tokens), size):
        yield Part(tokens[start : start + size], *choices.of(slice(start, start + size)).rows(layer.router.experts))
