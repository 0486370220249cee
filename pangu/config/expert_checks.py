"""Contradictions between the keys of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from pangu.common.errors import Problem
from pangu.config.build import findings
from pangu.config.model import ModelConfig
from pangu.config.nearest import any_of, divisors_near, multiples_near
from pangu.config.schema import CheckpointConfig


def expert_problems(model: ModelConfig) -> list[Problem]:
    """Return all contradictions between the keys of a mixture of experts."""
    if model.experts is None:
        return findings(_without, model)
    rules = (_layers, _chosen, _groups, _limited, _bias)
    return [problem for rule in rules for problem in findings(rule, model, model.experts)]


def _without(model: ModelConfig) -> Iterator[Problem]:
    dense = model.without_experts
    pairs = [(f"model.{name}", value, getattr(dense, name)) for name, value in vars(model).items() if name != "router"]
    router = vars(dense.router)
    pairs += [(f"model.router.{name}", value, router[name]) for name, value in vars(model.router).items()]
    for key, value in ((key, value) for key, value, default in pairs if value != default):
        yield Problem(key, value, "model.experts = null: all layers are dense", "give model.experts, or leave it out")


def _layers(model: ModelConfig, experts: int) -> Iterator[Problem]:
    if not model.expert_layers:
        keys, values = "model.dense_layers, model.expert_every", f"{model.dense_layers}, {model.expert_every}"
        yield Problem(keys, values, f"leave no layer of model.layers = {model.layers} for experts", "0, 1 work")


def _chosen(model: ModelConfig, experts: int) -> Iterator[Problem]:
    if model.num_chosen > experts:
        null = "stands for 2, and " if model.experts_per_token is None else ""
        rule, works = f"{null}must not be above model.experts = {experts}", f"1 to {experts} work"
        yield Problem("model.experts_per_token", model.experts_per_token, rule, "1 works" if experts == 1 else works)


def _groups(model: ModelConfig, experts: int) -> Iterator[Problem]:
    router = model.router
    if router.selection == "top" and router.groups > 1:
        rule = "model.router.selection = top knows no groups"
        yield Problem("model.router.groups", router.groups, rule, "1 works, or selection=group_limited or each_group")
    elif experts % router.groups:
        rule = f"must divide model.experts = {experts}"
        yield Problem("model.router.groups", router.groups, rule, any_of(divisors_near(experts, router.groups)))
    elif router.selection == "each_group" and model.num_chosen % router.groups:
        rule = f"must be a multiple of model.router.groups = {router.groups}, each of which gives as many"
        near = [number for number in multiples_near(router.groups, model.num_chosen) if number <= experts]
        yield Problem("model.experts_per_token", model.experts_per_token, rule, any_of(near))


def _limited(model: ModelConfig, experts: int) -> Iterator[Problem]:
    router, limit = model.router, model.router.groups_per_token
    if (router.selection == "group_limited") != (limit is not None):
        rule = f"model.router.selection = {router.selection} " + ("needs one" if limit is None else "knows no limit")
        yield Problem("model.router.groups_per_token", limit, rule, "null works with top, a number with group_limited")
    elif limit is not None and not (model.num_chosen <= limit * (experts // router.groups) and limit <= router.groups):
        rule = (
            f"must be at most model.router.groups = {router.groups}, and so many groups of {experts // router.groups} "
            f"must hold model.experts_per_token = {model.num_chosen}"
        )
        yield Problem("model.router.groups_per_token", limit, rule, f"{router.groups} works")


def _bias(model: ModelConfig, experts: int) -> Iterator[Problem]:
    router = model.router
    if router.balance == "bias" and not router.bias_rate:
        yield Problem("model.router.bias_rate", 0, "model.router.balance = bias would change nothing", "0.001 is usual")


def upcycling_problems(checkpoint: CheckpointConfig, model: ModelConfig) -> Iterator[Problem]:
    """Yield the reasons why experts copied from dense layers would not compute the same as those layers."""
    given = "with checkpoint.upcycle = true"
    if checkpoint.init_from is None:
        rule = "makes experts of a dense model's layers, and checkpoint.init_from names none"
        yield Problem("checkpoint.upcycle", True, rule, "checkpoint.init_from=CHECKPOINT works, or false")
    if model.experts is None:
        yield Problem("checkpoint.upcycle", True, "model.experts = null: all layers are dense", "false works")
        return
    if not model.router.normalised:
        rule = f"{given} the weights of a token's experts must add up to 1"
        yield Problem("model.router.normalised", False, rule, "true works")
    if model.router.scale != 1:
        rule = f"{given} the weights of a token's experts must add up to 1"
        yield Problem("model.router.scale", model.router.scale, rule, "1 works")
    if model.shared_experts:
        rule = f"{given} they would add to what the copies compute"
        yield Problem("model.shared_experts", model.shared_experts, rule, "0 works")
    if model.expert_size != model.ffn_size:
        rule = f"{given} an expert is a copy of a dense layer of {model.ffn_size} columns"
        yield Problem("model.expert_ffn", model.expert_ffn, rule, "null works")
