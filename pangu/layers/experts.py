"""A mixture-of-experts layer: each token goes to a few of many feed-forward layers (Shazeer et al. 2017).

    router -> permute -> experts' products -> unpermute

Tokens lie in rows, expert by expert, in the products. A tensor-parallel rank has every token of the sequence and a part
of every expert's width, so that all ranks choose alike and each adds its part of every output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pangu.collectives.conjugate import conjugate
from pangu.collectives.regions import enter, leave
from pangu.config.model import ModelConfig
from pangu.layers.builder import Builder
from pangu.layers.expert_balance import Attach
from pangu.layers.grouped_matmul import grouped_matmul
from pangu.layers.recompute import checkpointed
from pangu.layers.routing import (
    Dispatch,
    balance_loss,
    choose,
    chosen_by,
    copy_to_rows,
    expert_weights,
    room_of,
    scores_of,
    sum_rows,
    within_room,
    z_loss,
)


class Route(NamedTuple):
    """What a router decided for the tokens [sequence, batch] of a micro-batch that this rank has."""

    experts: Tensor
    """int64 [sequence, batch, count]."""
    loads: Tensor | None = None
    """[experts], choices of these tokens. None, as what follows, where nothing is trained."""
    shares: Tensor | None = None
    """[batch or 1, experts], of the choices that the balance loss is made of."""
    admitted: Tensor | None = None
    """bool, as `experts`; None: all are."""
    part: Tensor | None = None
    """[sequence, batch], 1 / tokens of its sequence, and 0 at padding; None: there is no padding."""


@dataclass(frozen=True)
class Routes:
    """What the routers of all layers decide for a micro-batch."""

    padding: Tensor | None = None
    """bool [sequence, batch], of the tokens of this rank: in training no expert computes these. None: there is none."""
    decided: dict[nn.Module, Route] = field(default_factory=dict)
    """By router."""


def permute(x: Tensor, dispatch: Dispatch) -> Tensor:
    """[tokens, width] -> [rows, width], expert by expert."""
    return conjugate(x, dispatch, copy_to_rows, sum_rows)


def unpermute(x: Tensor, dispatch: Dispatch) -> Tensor:
    """[rows, width] -> [tokens, width], the sum over the rows of a token."""
    return conjugate(x, dispatch, sum_rows, copy_to_rows)


def _by_row(x: Tensor, dispatch: Dispatch) -> Tensor:
    """[tokens, count], a number of each choice -> [rows]."""
    return x.flatten().index_select(0, dispatch.order)


def _by_choice(x: Tensor, dispatch: Dispatch) -> Tensor:
    return x.index_select(0, dispatch.rows.flatten()).view_as(dispatch.rows)


class Choices(NamedTuple):
    """Of tokens, each [tokens, count]."""

    weights: Tensor
    experts: Tensor
    admitted: Tensor | None
    """bool; None: all are."""

    def of(self, tokens: slice) -> Choices:
        """Of some of the tokens."""
        return Choices(
            self.weights[tokens], self.experts[tokens], None if self.admitted is None else self.admitted[tokens]
        )

    def rows(self, number: int) -> tuple[Tensor, Dispatch]:
        """The weight of each row, and where the rows of so many experts lie."""
        dispatch = Dispatch.of(self.experts, number, self.admitted)
        return conjugate(self.weights, dispatch, _by_row, _by_choice), dispatch


class Router(nn.Module):
    """Chooses the experts of every token, with weights for what they make of it. In training it notes their loads and
    adds its losses to the objective."""

    def __init__(self, config: ModelConfig, build: Builder, layer: int) -> None:
        super().__init__()
        assert config.experts is not None
        self.config, self.options = config, config.router
        self.experts, self.count = config.experts, config.num_chosen
        self.weight = build.parameter("weight")
        assert build.balance is not None
        self.balance, self.row = build.balance, build.balance.row(layer)
        adds_loss = self.options.balance in ("sequence", "global")
        self.weight_of_balance = self.options.balance_weight if adds_loss else 0.0
        self.context, self.ranks = build.context, 1 if build.context is None else build.context.size
        """Those that share a sequence."""
        self.counts = build.region.rank == 0
        """The other tensor-parallel ranks see the same tokens."""

    def forward(self, x: Tensor, routes: Routes) -> Choices:
        """Of the tokens of x [sequence, batch, hidden]. `routes` has what was decided when backward computes this
        again: a score that is rounded to another number must not choose others, and nothing is sent again."""
        wide = torch.promote_types(x.dtype, torch.float32)
        # without saving x in the wide format too
        logits = checkpointed(lambda x: F.linear(x.to(wide), self.weight.to(wide)), x, on=x.dtype != wide)
        scores = scores_of(logits, self.options)
        recomputes = self in routes.decided
        if not recomputes:
            routes.decided[self] = self._route(scores.detach(), routes.padding)
        route = routes.decided[self]
        weights = expert_weights(scores, route.experts, self.options)
        if self.counts and route.loads is not None and route.shares is not None:
            losses = self._losses(logits, scores, route.shares, route.part)
            balance, z = losses.unbind()
            loss = self.weight_of_balance * balance + self.options.z_loss * z
            weights = Attach.apply(weights, loss, self.balance.scale)
            if not recomputes:
                dropped = losses.new_zeros(()) if route.admitted is None else route.loads.sum() - route.admitted.sum()
                self.balance.note(self.row, route.loads, dropped, losses.detach())
        admitted = None if route.admitted is None else route.admitted.flatten(0, 1)
        return Choices(weights.to(x.dtype).flatten(0, 1), route.experts.flatten(0, 1), admitted)

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
            totals, before = self._of_sequences(chosen)
            if padding is not None:
                length = (totals.sum(-1, keepdim=True) // self.count).clamp(min=1)
                part = (real.to(scores.dtype) / length).squeeze(-1)
            if options.balance != "global":
                shares = totals.to(scores.dtype) / (length * self.count)
            if capacity is not None:
                room = room_of(capacity, length, self.count, self.experts)
                admitted = within_room(chosen, room, before).gather(-1, experts)
        return Route(experts, chosen.sum((0, 1)), shares, admitted, part)

    def _of_sequences(self, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        """Choices of each expert in whole sequences [batch, experts], and before each chunk of them that this rank has
        [chunks, batch, experts]; None: it has all."""
        if self.context is None:
            return chosen.sum(0), None
        return self.context.totals(chosen.unflatten(0, (2, -1)).sum(1, dtype=torch.int32))

    def _losses(self, logits: Tensor, scores: Tensor, shares: Tensor, part: Tensor | None) -> Tensor:
        length = len(scores) * self.ranks
        if self.options.score == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        return torch.stack([balance_loss(scores, shares, length, part), z_loss(logits, length, part)])


class GroupedLinear(nn.Module):
    """y = x Wᵀ + b of each expert, for the rows of its tokens."""

    def __init__(self, build: Builder, name: str) -> None:
        super().__init__()
        self.store = build.layers_store
        self.weight, self.bias = build.parameter(f"{name}.weight"), build.optional(f"{name}.bias")

    def forward(self, x: Tensor, dispatch: Dispatch, members: Tensor | None, of_tokens: bool = False) -> Tensor:
        """[rows, inputs], or if `of_tokens` [tokens, inputs] -> [rows, outputs]; `members` [rows, experts]: what the
        bias of each expert is multiplied by, if there are biases."""
        added = None
        if self.bias is not None and members is not None:
            # a product has one order of addition in backward
            added = members @ self.bias.view(len(dispatch.ends), -1)
        # last: a recompute ends where the last tensor is saved, and so before this product
        out = grouped_matmul(x, self.weight, dispatch, self.store, of_tokens)
        return out if added is None else out + added


class Experts(nn.Module):
    """The experts of a layer, on the rows of their tokens."""

    def __init__(self, build: Builder, activation: Callable[[Tensor], Tensor], recompute: bool) -> None:
        """`recompute`: the output of the non-linearity."""
        super().__init__()
        self.up, self.down = GroupedLinear(build, "up"), GroupedLinear(build, "down")
        self.activation, self.recompute = activation, recompute
        self.adds_bias = (build.region if build.experts is None else build.experts.tensor).rank == 0
        """The bias of a sum over tensor-parallel ranks is added once."""

    def forward(self, tokens: Tensor, weights: Tensor, dispatch: Dispatch) -> Tensor:
        """[tokens, hidden] -> [rows, hidden], times weights [rows]."""
        members = None if self.up.bias is None else dispatch.members(tokens.dtype)
        inner = self.up(tokens, dispatch, members, of_tokens=True)
        return checkpointed(self._down, inner, weights, dispatch, members, on=self.recompute)

    def _down(self, inner: Tensor, weights: Tensor, dispatch: Dispatch, members: Tensor | None) -> Tensor:
        # a product is linear: what is narrower is multiplied, and the output needs not be kept for the weights
        activated = self.activation(inner) * weights[:, None]
        if members is not None:
            members = members * (weights if self.adds_bias else torch.zeros_like(weights))[:, None]
        return self.down(activated, dispatch, members)


class MixtureOfExperts(nn.Module):
    """Routed experts, and those that compute every token."""

    def __init__(
        self,
        config: ModelConfig,
        build: Builder,
        layer: int,
        activation: Callable[[Tensor], Tensor],
        recompute: bool,
        shared: nn.Module | None,
    ) -> None:
        super().__init__()
        self.router = Router(config, build.at("router"), layer)
        self.experts = Experts(build.at("experts"), activation, recompute)
        self.region, self.shared, self.spread = build.region, shared, build.experts

    def forward(self, x: Tensor, routes: Routes) -> Tensor:
        """[sequence (/ ranks with sequence parallelism), batch, hidden], as its output."""
        whole = enter(x, self.region)
        tokens, choices = whole.flatten(0, 1), self.router(whole, routes)
        if self.spread is None:
            weights, dispatch = choices.rows(self.router.experts)
            out = unpermute(self.experts(tokens, weights, dispatch), dispatch)
            beside = self._shared(x, routes)
        else:
            from pangu.layers.expert_exchange import exchanged

            out, beside = exchanged(self, tokens, choices, lambda: self._shared(x, routes))
        out = leave(out.view_as(whole), self.region)
        return out if beside is None else out + beside

    def _shared(self, x: Tensor, routes: Routes) -> Tensor | None:
        return None if self.shared is None else self.shared(x, routes)
