"""Mixture-of-experts layer: each token goes to a few of many feed-forward layers (Shazeer et al. 2017).

    router -> permute -> matmuls of experts -> unpermute

In the matmuls tokens are rows, sorted by expert. A tensor-parallel rank has every token of the sequence and a slice of
every expert's width, so that all ranks choose alike and each adds its part of every output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.collectives.conjugate import conjugate
from pangu.collectives.regions import enter, leave
from pangu.config.model import ModelConfig
from pangu.config.parallelism import most_of_rank
from pangu.layers.builder import Builder
from pangu.layers.expert_balance import Attach
from pangu.layers.expert_exchange import exchange_and_compute, split
from pangu.layers.grouped_matmul import grouped_matmul
from pangu.layers.recompute import checkpointed
from pangu.layers.routing import (
    Dispatch,
    balance_loss,
    choose,
    chosen_by,
    expert_weights,
    room_of,
    scores_of,
    unpermute,
    within_room,
    z_loss,
)


class Route(NamedTuple):
    """Decision of a router for this rank's tokens [sequence, batch] of a micro-batch."""

    experts: Tensor
    """Chosen experts, int64 [sequence, batch, count]."""
    loads: Tensor | None = None
    """Number of choices of each expert, [experts]; like the following fields None outside of training."""
    shares: Tensor | None = None
    """Fraction of choices of each expert for the balance loss, [batch or 1, experts]."""
    admitted: Tensor | None = None
    """True for choices that are not dropped, shaped as `experts`; None: all."""
    part: Tensor | None = None
    """1 / tokens of the token's sequence, 0 at padding, [sequence, batch]; None: no padding."""


@dataclass(frozen=True)
class Routes:
    """Decisions of the routers of all layers for a micro-batch."""

    padding: Tensor | None = None
    """True at padding, which no expert computes in training, bool [sequence, batch]; None: no padding."""
    decided: dict[nn.Module, Route] = field(default_factory=dict)
    """Decisions by router."""


def _by_row(x: Tensor, dispatch: Dispatch) -> Tensor:
    return x.flatten().index_select(0, dispatch.order)


def _by_choice(x: Tensor, dispatch: Dispatch) -> Tensor:
    return x.index_select(0, dispatch.rows.flatten()).view_as(dispatch.rows)


class TokenChoices(NamedTuple):
    """Choices of tokens, each [tokens, count]."""

    weights: Tensor
    experts: Tensor
    admitted: Tensor | None
    """True for choices that are not dropped; None: all."""

    def split(self, sizes: Sequence[int]) -> list[TokenChoices]:
        """Return the choices split into parts of consecutive tokens, of the given sizes."""
        admitted = [None] * len(sizes) if self.admitted is None else split(self.admitted, sizes)
        return list(map(TokenChoices, split(self.weights, sizes), split(self.experts, sizes), admitted))

    def rows(self, number: int, ranks: int = 1, room: int | None = None) -> tuple[Tensor, Dispatch]:
        """Return the weight of each row, and the dispatch of the rows to `number` experts; see `Dispatch.of`."""
        dispatch = Dispatch.of(self.experts, number, self.admitted, ranks, room)
        return conjugate(self.weights, dispatch, _by_row, _by_choice), dispatch


class Router(nn.Module):
    """Router that chooses the experts of each token, and weights for their outputs."""

    # In training it records the loads of experts and adds its losses to the objective.
    def __init__(self, config: ModelConfig, build: Builder, layer: int) -> None:
        """Build the router of a layer."""
        super().__init__()
        assert config.experts is not None
        self.config, self.options = config, config.router
        self.experts, self.count = config.experts, config.num_chosen
        self.weight, self.logit_bias = build.parameter("weight"), build.optional("logit_bias")
        self.scale = build.optional("scale")
        assert build.balance is not None
        self.balance, self.row = build.balance, build.balance.row(layer)
        adds_loss = self.options.balance in ("sequence", "global")
        self.weight_of_balance = self.options.balance_weight if adds_loss else 0.0
        self.context, self.ranks = build.context, 1 if build.context is None else build.context.size
        """Context-parallel region, and its number of ranks."""
        self.sharing = build.experts
        """Expert-parallel group."""
        self.counts = build.region.rank == 0
        """True on the tensor-parallel rank that counts tokens, since all see the same ones."""

    def forward(self, x: Tensor, routes: Routes) -> TokenChoices:
        """Return the choices for x [sequence, batch, hidden]; a recompute reuses the decisions in `routes`."""
        # A score that is rounded differently must not choose other experts, and nothing is sent again.
        wide = torch.promote_types(x.dtype, torch.float32)
        # checkpointed so that x is not saved in the wide dtype as well
        logits = checkpointed(lambda x: F.linear(x.to(wide), self.weight.to(wide)), x, on=x.dtype != wide)
        if self.logit_bias is not None:
            logits = logits + self.logit_bias.to(wide)
        scores = scores_of(logits, self.options)
        recomputes = self in routes.decided
        if not recomputes:
            routes.decided[self] = self._route(scores.detach(), routes.padding)
        route = routes.decided[self]
        weights = expert_weights(scores, route.experts, self.options)
        if self.scale is not None:
            weights = weights * F.embedding(route.experts, self.scale[:, None].to(wide)).squeeze(-1)
        if self.counts and route.loads is not None and route.shares is not None:
            losses = self._losses(logits, scores, route.shares, route.part)
            balance, z = losses.unbind()
            loss = self.weight_of_balance * balance + self.options.z_loss * z
            weights = Attach.apply(weights, loss, self.balance.scale)
            if not recomputes:
                dropped = losses.new_zeros(()) if route.admitted is None else route.loads.sum() - route.admitted.sum()
                self.balance.record(self.row, route.loads, dropped, losses.detach())
        admitted = None if route.admitted is None else route.admitted.flatten(0, 1)
        return TokenChoices(weights.to(x.dtype).flatten(0, 1), route.experts.flatten(0, 1), admitted)

    def _route(self, scores: Tensor, padding: Tensor | None) -> Route:
        options, capacity = self.options, self.config.expert_capacity
        experts = choose(
            scores + self.balance.bias[self.row] if options.balance == "bias" else scores, options, self.count
        )
        if not torch.is_grad_enabled():
            return Route(experts)
        chosen = chosen_by(experts, self.experts)
        shares, admitted, part = self.balance.shares[self.row, None].to(scores.dtype), None, None
        if padding is not None:
            real = padding.logical_not()[..., None]
            chosen, admitted = chosen & real, real.expand_as(experts)
        if capacity is not None or options.balance != "global" or padding is not None:
            length: int | Tensor = len(chosen) * self.ranks
            # choices per expert in sequences [batch, experts] and before own chunks [chunks, batch, experts]
            totals, before = chosen.sum(0), None
            if self.context is not None:
                totals, before = self.context.totals(chosen.unflatten(0, (2, -1)).sum(1, dtype=torch.int32))
            if padding is not None:
                length = (totals.sum(-1, keepdim=True) // self.count).clamp(min=1)
                part = (real.to(scores.dtype) / length).squeeze(-1)
            if options.balance != "global":
                shares = self._shares(totals, length * self.count, scores.dtype)
            if capacity is not None:
                room = room_of(capacity, length, self.count, self.experts)
                admitted = within_room(chosen, room, before).gather(-1, experts)
        return Route(experts, chosen.sum((0, 1)), shares, admitted, part)

    def _shares(self, totals: Tensor, choices: int | Tensor, dtype: torch.dtype) -> Tensor:
        """Return the share of each expert in the choices of the sequences that are counted together, [batch, experts].

        `totals`: choices per expert in each sequence [batch, experts]; `choices`: their sum over the experts.
        """
        batch, first = len(totals), 0
        # less than the option says only where a layer is timed on one rank
        together = math.gcd(self.options.balance_sequences, batch * (1 if self.sharing is None else self.sharing.size))
        if together == 1:
            return totals.to(dtype) / choices
        if self.sharing is not None and batch % together:
            totals, first = self.sharing.gather_counts(totals)
        sums = totals.unflatten(0, (-1, together)).sum(1)
        shares = sums.to(dtype) / sums.sum(1, keepdim=True).clamp(min=1)
        return shares.repeat_interleave(together, 0)[first : first + batch]

    def _losses(self, logits: Tensor, scores: Tensor, shares: Tensor, part: Tensor | None) -> Tensor:
        length = len(scores) * self.ranks
        if self.options.score == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        return torch.stack([balance_loss(scores, shares, length, part), z_loss(logits, length, part)])


class GroupedLinear(nn.Module):
    """Linear layer y = x Wᵀ + b of each expert, for the rows of its tokens."""

    def __init__(self, build: Builder, name: str) -> None:
        """Build the layer."""
        super().__init__()
        self.store = build.layers_store
        self.weight, self.bias = build.parameter(f"{name}.weight"), build.optional(f"{name}.bias")

    def forward(self, x: Tensor, dispatch: Dispatch, members: Tensor | None, takes_tokens: bool = False) -> Tensor:
        """Map [rows, inputs] (or, if `takes_tokens`, [tokens, inputs]) to [rows, outputs]."""
        # `members` [rows, experts] has the factor of each expert's bias, if there are biases
        added = None
        if self.bias is not None and members is not None:
            # a matmul adds in a fixed order in the backward pass
            added = members @ self.bias.view(len(dispatch.ends), -1)
        # last: a recompute ends when the last tensor is saved, and so before this matmul
        out = grouped_matmul(x, self.weight, dispatch, self.store, takes_tokens)
        return out if added is None else out + added


class Experts(nn.Module):
    """Experts of a layer, applied to the rows of their tokens."""

    def __init__(self, build: Builder, activation: Callable[[Tensor], Tensor], recompute: bool) -> None:
        """Build the experts; `recompute`: recompute the output of the activation."""
        super().__init__()
        self.up, self.down = GroupedLinear(build, "up"), GroupedLinear(build, "down")
        self.activation, self.recompute = activation, recompute
        self.adds_bias = (build.region if build.experts is None else build.experts.tensor).rank == 0
        """True on one of the tensor-parallel ranks, which adds the bias of their sum."""

    def forward(self, tokens: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        """Map tokens [tokens, hidden] to [rows, hidden], times weights [rows]."""
        members = None if self.up.bias is None else dispatch.members(tokens.dtype)
        inner = self.up(tokens, dispatch, members, takes_tokens=True)
        return checkpointed(self._down, inner, weights, dispatch, members, on=self.recompute)

    def _down(self, inner: Tensor, weights: Tensor, dispatch: Dispatch, members: Tensor | None) -> Tensor:
        # weight the narrower side of the linear layer, whose output then need not be saved
        activated = self.activation(inner) * weights[:, None]
        if members is not None:
            members = members * (weights if self.adds_bias else torch.zeros_like(weights))[:, None]
        return self.down(activated, dispatch, members)


class SharedExperts(Protocol):
    """Feed-forward layer that can be computed in two steps."""

    def halves(self, x: Tensor) -> Iterator[Tensor | None]:
        """Yield None after the first step, and then the output."""


class MixtureOfExperts(nn.Module):
    """Mixture-of-experts layer of routed experts, and shared ones for every token."""

    def __init__(
        self,
        config: ModelConfig,
        build: Builder,
        layer: int,
        activation: Callable[[Tensor], Tensor],
        recompute: bool,
        shared: SharedExperts | None,
    ) -> None:
        """Build the router, the routed experts and, if given, the shared ones."""
        super().__init__()
        self.router = Router(config, build.at("router"), layer)
        self.experts = Experts(build.at("experts"), activation, recompute)
        self.region, self.shared, self.expert_region = build.region, shared, build.experts
        ranks = 1 if build.experts is None else build.experts.size
        self.most = most_of_rank(config.router, self.router.experts, self.router.count, ranks)
        """Number of a token's experts that one rank has at most."""

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        """Map x [sequence (/ ranks with sequence parallelism), batch, hidden] to an output of the same shape."""
        *_, output = self.steps(x, routes)
        return output

    def steps(self, x: Tensor, routes: Routes) -> Iterator[Tensor]:
        """Compute in steps: yield a tensor of each exchange that has started, and then the output."""
        whole = enter(x, self.region)
        choices = self.router(whole, routes)
        shared = iter((None, None)) if self.shared is None else self.shared.halves(x)
        if self.expert_region is None:
            weights, dispatch = choices.rows(self.router.experts)
            out = unpermute(self.experts(whole.flatten(0, 1), weights, dispatch), dispatch)
            _, shared_output = shared
        else:
            out, shared_output = yield from exchange_and_compute(self, whole, choices, shared)
        out = leave(out.view_as(whole), self.region)
        yield out if shared_output is None else out + shared_output
