"""Expert routing: pure functions of the scores of tokens, each within one token or one sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from pangu.collectives.conjugate import conjugate
from pangu.config.model import RouterConfig


def choose(scores: Tensor, router: RouterConfig, count: int) -> Tensor:
    """Return the experts of each token, int64 [..., count], best first, for scores [..., experts]."""
    # of equal scores, the expert with the lowest number wins
    experts, groups = scores.shape[-1], router.groups
    if router.selection == "each_group":
        within = _best(scores.unflatten(-1, (groups, -1)), count // groups)
        return (within + experts // groups * torch.arange(groups, device=scores.device)[:, None]).flatten(-2)
    if router.selection.startswith("group_limited"):
        assert router.groups_per_token is not None
        grouped = scores.unflatten(-1, (groups, -1))
        counted = 1 if router.selection == "group_limited_best" else min(2, grouped.shape[-1])
        best_groups = _best(grouped.topk(counted).values.sum(-1), router.groups_per_token)
        allowed = chosen_by(best_groups, groups)
        scores = grouped.masked_fill(~allowed[..., None], -math.inf).flatten(-2)
    return _best(scores, count)


def _best(scores: Tensor, count: int) -> Tensor:
    # among equal ones `max` takes the first, `topk` any; sorting is slower
    experts = []
    for _ in range(count):
        experts.append(scores.max(-1, keepdim=True).indices)
        scores = scores.scatter(-1, experts[-1], -math.inf)
    return torch.cat(experts, -1)


def chosen_by(experts: Tensor, number: int, admitted: Tensor | None = None) -> Tensor:
    """Return bool [..., number]: True if a token chose an expert, and the choice was `admitted` (None: all)."""
    mask = torch.zeros(*experts.shape[:-1], number, dtype=torch.bool, device=experts.device)
    return mask.scatter_(-1, experts, True) if admitted is None else mask.scatter_(-1, experts, admitted)


def expert_weights(scores: Tensor, experts: Tensor, router: RouterConfig) -> Tensor:
    """Return the factors of the outputs of a token's experts, [..., count]."""
    weights = scores.gather(-1, experts)
    if router.normalised:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    return weights * router.scale


def room_of(factor: float, length: int | Tensor, count: int, experts: int) -> int | Tensor:
    """Return the maximum tokens of a sequence per expert, if each token chooses `count` experts."""
    # `length`: tokens of the sequence, or of each sequence [batch, 1], like the result
    if isinstance(length, Tensor):
        return (factor * length.double() * count / experts).ceil()
    return math.ceil(factor * length * count / experts)


def within_room(chosen: Tensor, room: int | Tensor, before: Tensor | None = None) -> Tensor:
    """Return the choices `chosen`, bool [sequence, batch, experts], that are among an expert's first `room`."""
    # `room`: a number, or one per sequence [batch, 1], in token order. `before`: int [chunks, batch, experts], choices
    # before each chunk of a longer sequence if `chosen` consists of its chunks.
    if before is None:
        return chosen & (chosen.cumsum(0, dtype=torch.int32) <= room)
    places = chosen.unflatten(0, (len(before), -1)).cumsum(1, dtype=torch.int32) + before[:, None]
    return chosen & (places <= room).flatten(0, 1)


def balance_loss(scores: Tensor, shares: Tensor, length: int, part: Tensor | None = None) -> Tensor:
    """Return the sum over sequences of experts x sum over experts of share of choices x mean score (1 if equal).

    `scores` [tokens, batch, experts] sum to 1 per token, and cover sequences of `length`, or parts whose losses add up;
    `shares`: [batch or 1, experts]; `part` [tokens, batch]: weight of a token, instead of 1 / length, in padded
    sequences.
    """
    if part is not None:
        scores, length = scores * part[..., None], 1
    return scores.shape[-1] / length * (scores.sum(0) * shares).sum()


def z_loss(logits: Tensor, length: int, part: Tensor | None = None) -> Tensor:
    """Return the sum over sequences of the mean over tokens of logsumexp(logits)^2; arguments as in `balance_loss`."""
    losses = logits.logsumexp(-1).square()
    return losses.sum() / length if part is None else (losses * part).sum()


def scores_of(logits: Tensor, router: RouterConfig) -> Tensor:
    """Return the score of each expert for each token, [..., experts]."""
    return logits.softmax(-1) if router.score == "softmax" else logits.sigmoid()


@dataclass(frozen=True)
class Dispatch:
    """Rows of tokens sorted by expert, and within an expert by token.

    Example with two experts for each of three tokens:

        token    0     1     2           row      0  1  2  3  4  5
        experts  2 0   1 2   0 2         token    0  2  1  0  1  2
        rows     3 0   2 4   1 5         expert   0  0  1  2  2  2      ends  2 3 6

    Dropped choices come last, after the last end. With `room`, the rows of each rank's experts begin at a multiple of
    it, so that the host need not know how many they are; rows in between are of no choice, and dropped choices share
    the last row. The same choices with each expert on a rank of its own, and room for 4 rows:

        row      0  1  2  3  4  5  6  7  8  9 10 11
        token    0  2        1           0  1  2
        expert   0  0        1           2  2  2           ends  2 5 11
    """

    order: Tensor
    """Choice of each row, int64 [rows]: token x count + index among its experts; any choice in rows of none."""
    rows: Tensor
    """Row of each choice, int64 [tokens, count]."""
    counts: Tensor
    """Rows of each expert, int32 [experts]."""
    ends: Tensor
    """End of each expert's rows, exclusive, int32 [experts]."""
    spare: bool = True
    """True if there may be rows of no expert."""

    @classmethod
    def of(
        cls, experts: Tensor, number: int, admitted: Tensor | None = None, ranks: int = 1, room: int | None = None
    ) -> Dispatch:
        """Return the dispatch of experts [tokens, count] of `number`; `admitted`: bool [tokens, count], None: all.

        `room` is the number of rows for the experts of each of `ranks`; None: as many as there are choices in all.
        """
        chosen = chosen_by(experts, number, admitted)
        places = chosen.cumsum(0, dtype=torch.int32)  # among the rows of an expert, from 1
        counts = chosen.sum(0, dtype=torch.int32)
        if room is None:
            ends = counts.cumsum(0, dtype=torch.int32)
        else:
            firsts = torch.arange(0, ranks * room, room, dtype=torch.int32, device=counts.device)
            ends = (counts.view(ranks, -1).cumsum(1, dtype=torch.int32) + firsts[:, None]).flatten()
        rows = (places + (ends - counts - 1)).gather(1, experts)
        if admitted is not None and room is not None:
            rows = torch.where(admitted, rows, ranks * room - 1)
        elif admitted is not None:
            last = ends[-1] + (~admitted).flatten().cumsum(0, dtype=torch.int32).view_as(rows) - 1
            rows = torch.where(admitted, rows, last)
        rows = rows.long()
        numbers = torch.arange(rows.numel(), device=rows.device)
        order = torch.empty_like(numbers) if room is None else numbers.new_zeros(ranks * room)
        return cls(order.scatter_(0, rows.flatten(), numbers), rows, counts, ends, admitted is not None)

    @property
    def tokens(self) -> Tensor:
        """Token of each row, int64 [rows]."""
        return self.order // self.rows.shape[1]

    def members(self, dtype: torch.dtype) -> Tensor:
        """Return [rows, experts], 1 where a row belongs to an expert."""
        places = torch.arange(len(self.order), dtype=self.ends.dtype, device=self.ends.device)[:, None]
        return ((places >= self.ends - self.counts) & (places < self.ends)).to(dtype)


def copy_to_rows(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Copy tokens [tokens, width] to rows [rows, width], sorted by expert."""
    return x.index_select(0, dispatch.tokens)


def sum_rows(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Sum rows [rows, width] per token to [tokens, width]: the transpose of `copy_to_rows`."""
    # a fixed order of addition on every device, unlike a scatter
    return x.index_select(0, dispatch.rows.flatten()).view(*dispatch.rows.shape, x.shape[-1]).sum(1)


def permute(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Copy tokens [tokens, width] to rows [rows, width], sorted by expert."""
    return conjugate(x, dispatch, copy_to_rows, sum_rows)


def unpermute(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Sum rows [rows, width] per token, to [tokens, width]."""
    return conjugate(x, dispatch, sum_rows, copy_to_rows)
