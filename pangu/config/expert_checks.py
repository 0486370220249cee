"""Contradictions between the keys of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from pangu.common.errors import Problem
from pangu.config.build import findings
from pangu.config.checkpoint import CheckpointConfig
from pangu.config.model import ModelConfig
from pangu.config.nearest import any_of, divisors_near, multiples_near

MOST_EXPERTS = 2**17
"""Largest number of experts in all layers, each of which has tensors of its own; Kimi K2 has 23,040."""


def expert_problems(model: ModelConfig) -> list[Problem]:
    """Return all contradictions between the keys of a mixture of experts."""
    if model.experts is None:
        return findings(_without, model)
    rules = (_layers, _chosen, _groups, _limited, _balance)
    return findings(_count, model, model.experts) or [
        problem for rule in rules for problem in findings(rule, model, model.experts)
    ]


def _without(model: ModelConfig) -> Iterator[Problem]:
    dense = model.without_experts
    pairs = [(f"model.{name}", value, getattr(dense, name)) for name, value in vars(model).items() if name != "router"]
    router = vars(dense.router)
    pairs += [(f"model.router.{name}", value, router[name]) for name, value in vars(model.router).items()]
    for key, value in ((key, value) for key, value, default in pairs if value != default):
        yield Problem(key, value, "needs a model with experts, and model.experts = null", "set model.experts")


def _count(model: ModelConfig, experts: int) -> Iterator[Problem]:
    if experts * model.layers > MOST_EXPERTS:
        rule = f"with model.layers = {model.layers} exceeds {MOST_EXPERTS:,} experts in all"
        yield Problem("model.experts", experts, rule, f"use at most {MOST_EXPERTS // model.layers}")


def _layers(model: ModelConfig, experts: int) -> Iterator[Problem]:
    if not model.expert_layers:
        keys, values = "model.dense_layers, model.expert_every", f"{model.dense_layers}, {model.expert_every}"
        yield Problem(keys, values, f"leave none of model.layers = {model.layers} layers for experts", "use 0, 1")


def _chosen(model: ModelConfig, experts: int) -> Iterator[Problem]:
    if model.num_chosen > experts:
        null = "means 2, and " if model.experts_per_token is None else ""
        rule, fix = f"{null}must not exceed model.experts = {experts}", f"use 1 to {experts}"
        yield Problem("model.experts_per_token", model.experts_per_token, rule, "use 1" if experts == 1 else fix)


def _groups(model: ModelConfig, experts: int) -> Iterator[Problem]:
    router = model.router
    if experts % router.groups:
        rule = f"must divide model.experts = {experts}"
        yield Problem("model.router.groups", router.groups, rule, any_of(divisors_near(experts, router.groups)))
    elif router.selection == "each_group" and model.num_chosen % router.groups:
        rule = f"must be a multiple of model.router.groups = {router.groups}: each group contributes as many"
        near = [number for number in multiples_near(router.groups, model.num_chosen) if number <= experts]
        yield Problem("model.experts_per_token", model.experts_per_token, rule, any_of(near))


def _limited(model: ModelConfig, experts: int) -> Iterator[Problem]:
    router, limit = model.router, model.router.groups_per_token
    if router.selection.startswith("group_limited") != (limit is not None):
        rule = f"model.router.selection = {router.selection} needs {'a number' if limit is None else 'null'}"
        least = -(-model.num_chosen * router.groups // experts)
        fix = "use null, or set model.router.selection=group_limited" if limit else f"use {least} to {router.groups}"
        yield Problem("model.router.groups_per_token", limit, rule, fix)
    elif limit is not None and not (model.num_chosen <= limit * (experts // router.groups) and limit <= router.groups):
        rule = (
            f"must be at most model.router.groups = {router.groups}, and that many groups of "
            f"{experts // router.groups} experts must hold model.experts_per_token = {model.num_chosen}"
        )
        yield Problem("model.router.groups_per_token", limit, rule, f"use {router.groups}")


def _balance(model: ModelConfig, experts: int) -> Iterator[Problem]:
    router = model.router
    if router.balance == "bias" and not router.bias_rate:
        yield Problem("model.router.bias_rate", 0, "has no effect with model.router.balance = bias", "use e.g. 0.001")


def upcycling_problems(checkpoint: CheckpointConfig, model: ModelConfig) -> Iterator[Problem]:
    """Yield the reasons why experts copied from dense layers would not compute the same as those layers."""
    given = "with checkpoint.upcycle = true"
    if not checkpoint.upcycle or model.experts is None:
        return
    rule = f"{given} the weights of a token's experts must add up to 1"
    if not model.router.normalised:
        yield Problem("model.router.normalised", False, rule, "use true")
    if model.router.scale != 1:
        yield Problem("model.router.scale", model.router.scale, rule, "use 1")
    if model.shared_experts:
        rule = f"{given} shared experts would add to the output of the copies"
        yield Problem("model.shared_experts", model.shared_experts, rule, "use 0")
    if model.expert_size != model.ffn_size:
        rule = f"{given} each expert is a copy of a dense layer of {model.ffn_size} columns"
        yield Problem("model.expert_ffn", model.expert_ffn, rule, "use null")
