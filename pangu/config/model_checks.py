"""Contradictions between the keys of an architecture, whatever its layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from types import SimpleNamespace

from pangu.common.errors import Problem
from pangu.config import dependencies
from pangu.config.build import findings, read
from pangu.config.dependencies import unmet
from pangu.config.model import ModelConfig
from pangu.config.rope import Llama3Scaling, YarnScaling
from pangu.config.sparse import FixedSparsity
from pangu.config.suggest import any_of, divisors_near, multiples_near


def find_model_problems(model: ModelConfig) -> list[Problem]:
    """Return all problems of an architecture that `build` did not read: invalid values and contradictions."""
    checked, problems = read(ModelConfig, asdict(model), "model")
    return problems + contradictions(checked)


def contradictions(model: ModelConfig) -> list[Problem]:
    """Return the contradictions between the keys of an architecture, independent of kernel and layout."""
    rules = (_heads, _latent, _rotation, _patterns, _scaling, _distances, _sparse, _query_layer, _experts)
    problems = [problem for rule in rules for problem in findings(rule, model)]
    return problems + unmet(SimpleNamespace(model=model), dependencies.MODEL)


def _heads(model: ModelConfig) -> Iterator[Problem]:
    if model.kv_heads is not None and model.heads % model.kv_heads:
        near = divisors_near(model.heads, model.kv_heads)
        yield Problem("model.kv_heads", model.kv_heads, f"must divide model.heads = {model.heads}", any_of(near))
    if model.head_dim is None and model.latent is None and model.hidden % model.heads:
        near = divisors_near(model.hidden, model.heads)
        yield Problem("model.heads", model.heads, f"must divide model.hidden = {model.hidden}", any_of(near))


def _sparse(model: ModelConfig) -> Iterator[Problem]:
    sparse = model.sparse
    if isinstance(sparse, FixedSparsity) and sparse.global_blocks > sparse.local_blocks:
        rule = f"must not exceed model.sparse.local_blocks = {sparse.local_blocks}"
        yield Problem("model.sparse.global_blocks", sparse.global_blocks, rule, "use 1")


def _query_layer(model: ModelConfig) -> Iterator[Problem]:
    if model.kind == "pangu" and model.layers == 1:
        yield Problem("model.layers", 1, "PanGu-α needs at least one layer below its query layer", "use 2 or more")


def _latent(model: ModelConfig) -> Iterator[Problem]:
    if (latent := model.latent) is None:
        return
    if latent.rope_head_dim % 2:
        near = f"use {latent.rope_head_dim + 1}"
        yield Problem("model.latent.rope_head_dim", latent.rope_head_dim, "must be even: they rotate in pairs", near)
    if latent.value_head_dim > model.head_size:
        rule = f"must be at most {model.head_size_key} = {model.head_size}"
        yield Problem("model.latent.value_head_dim", latent.value_head_dim, rule, f"use {latent.nope_head_dim}")


def _rotation(model: ModelConfig) -> Iterator[Problem]:
    share = model.partial_rotary_factor
    if model.positions != "rope" or model.latent is not None or not model.head_size:
        return  # more heads than elements are another rule's matter
    if share == 1 and model.head_size % 2:
        rule = f"needs an even head size, got {model.head_size_key} = {model.head_size}"
        yield Problem("model.positions", "rope", rule, "use learned, or an even head size")
    elif model.rotary_size % 2 or not model.rotary_size:
        rule = f"must rotate an even number of the {model.head_size} elements of a head, not {model.rotary_size}"
        fix = f"use e.g. {2 * max(1, model.rotary_size // 2) / model.head_size:g}"
        yield Problem("model.partial_rotary_factor", share, rule, fix)


def _patterns(model: ModelConfig) -> Iterator[Problem]:
    """Yield the contradictions of the keys that choose layers."""
    for key in ("full_layers", "nope_layers"):
        chosen, last = getattr(model, key), model.num_blocks - 1
        if isinstance(chosen, tuple) and (list(chosen) != sorted(set(chosen)) or max(chosen, default=0) > last):
            yield Problem(f"model.{key}", list(chosen), f"must be layer numbers in increasing order, from 0 to {last}")


def _scaling(model: ModelConfig) -> Iterator[Problem]:
    scaling = model.rope_scaling
    if isinstance(scaling, Llama3Scaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
        rule = f"must be above model.rope_scaling.low_freq_factor = {scaling.low_freq_factor:g}"
        yield Problem("model.rope_scaling.high_freq_factor", scaling.high_freq_factor, rule, "use e.g. 4 with 1")
    if isinstance(scaling, YarnScaling) and scaling.beta_fast < scaling.beta_slow:
        rule = f"must be at least model.rope_scaling.beta_slow = {scaling.beta_slow:g}"
        yield Problem("model.rope_scaling.beta_fast", scaling.beta_fast, rule, "use e.g. 32 with 1")
    if isinstance(scaling, YarnScaling) and model.rotary_base <= 1:
        yield Problem("model.rope_base", model.rope_base, "must be above 1 with YaRN, whose slow pairs are the last")


def _distances(model: ModelConfig) -> Iterator[Problem]:
    buckets, furthest = model.num_relative_buckets, model.furthest_relative
    if model.positions == "relative" and furthest <= buckets // 2:
        rule = f"must be above {buckets // 2}: half of the {buckets} buckets hold one distance each"
        yield Problem("model.relative_distance", furthest, rule, f"use {4 * buckets}")


MOST_EXPERTS = 2**17
"""Largest number of experts in all layers, each of which has tensors of its own; Kimi K2 has 23,040."""


def _experts(model: ModelConfig) -> Iterator[Problem]:
    """Return all contradictions between the keys of a mixture of experts."""
    if model.experts is None:
        return _without(model)
    rules = (_expert_layers, _chosen, _groups, _limited, _balance)
    counted = findings(_count, model, model.experts)
    return iter(counted or [problem for rule in rules for problem in findings(rule, model, model.experts)])


def _without(model: ModelConfig) -> Iterator[Problem]:
    dense = model.without_experts
    pairs = [(f"model.{name}", value, getattr(dense, name)) for name, value in vars(model).items() if name != "router"]
    router = vars(dense.router)
    pairs += [(f"model.router.{name}", value, router[name]) for name, value in vars(model.router).items()]
    for key, value in ((key, value) for key, value, default in pairs if value != default):
        yield Problem(key, value, "needs a model with experts, but model.experts = null", "set model.experts")


def _count(model: ModelConfig, experts: int) -> Iterator[Problem]:
    if experts * model.layers > MOST_EXPERTS:
        rule = f"with model.layers = {model.layers} exceeds {MOST_EXPERTS:,} experts in all"
        yield Problem("model.experts", experts, rule, f"use at most {MOST_EXPERTS // model.layers}")


def _expert_layers(model: ModelConfig, experts: int) -> Iterator[Problem]:
    if not model.expert_layers:
        keys, values = "model.dense_layers, model.expert_every", f"{model.dense_layers}, {model.expert_every}"
        yield Problem(keys, values, f"leave none of the model.layers = {model.layers} layers for experts", "use 0, 1")


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
        rule = f"must be a multiple of model.router.groups = {router.groups}: each group contributes equally"
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
