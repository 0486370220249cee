"""Contradictions between the keys of an architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from pangu.config.build import findings, read
from pangu.config.errors import Problem
from pangu.config.model import ModelConfig
from pangu.config.nearest import any_of, divisors_near


def find_problems(model: ModelConfig) -> list[Problem]:
    """All that is wrong with an architecture that was not read by `build`: single values and contradictions."""
    checked, problems = read(ModelConfig, asdict(model), "model")
    return problems + contradictions(checked)


def contradictions(model: ModelConfig) -> list[Problem]:
    """What is wrong between the keys of an architecture, whatever computes it."""
    rules = (_heads, _rotation, _scaling, _distances, _query_layer)
    return [problem for rule in rules for problem in findings(rule, model)]


def _heads(model: ModelConfig) -> Iterator[Problem]:
    if model.kv_heads is not None and model.heads % model.kv_heads:
        near = divisors_near(model.heads, model.kv_heads)
        yield Problem("model.kv_heads", model.kv_heads, f"must divide model.heads = {model.heads}", any_of(near))
    if model.head_dim is None and model.hidden % model.heads:
        near = divisors_near(model.hidden, model.heads)
        yield Problem("model.heads", model.heads, f"must divide model.hidden = {model.hidden}", any_of(near))


def _rotation(model: ModelConfig) -> Iterator[Problem]:
    if model.rope_base is not None and model.positions != "rope":
        rule = f"{model.positions} positions do not turn"
        yield Problem("model.rope_base", model.rope_base, rule, "null works, or model.positions=rope")
    if model.positions == "rope" and model.head_size % 2:
        rule = f"turns pairs of elements, and the head size {model.head_size_key} = {model.head_size} is odd"
        yield Problem("model.positions", "rope", rule, "learned works, or an even head size")


def _scaling(model: ModelConfig) -> Iterator[Problem]:
    scaling = model.rope_scaling
    if scaling is None:
        return
    if model.positions != "rope":
        rule = f"{model.positions} positions do not turn"
        yield Problem("model.rope_scaling", asdict(scaling), rule, "null works, or model.positions=rope")
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        rule = f"must be above model.rope_scaling.low_freq_factor = {scaling.low_freq_factor:g}"
        yield Problem("model.rope_scaling.high_freq_factor", scaling.high_freq_factor, rule, "4 works with 1")


def _distances(model: ModelConfig) -> Iterator[Problem]:
    for key in ("relative_buckets", "relative_distance"):
        value = getattr(model, key)
        if value is not None and model.positions != "relative":
            rule = f"{model.positions} positions have no buckets"
            yield Problem(f"model.{key}", value, rule, "null works, or model.positions=relative")
    if model.positions == "relative":
        buckets, furthest = model.num_relative_buckets, model.furthest_relative
        if furthest <= buckets // 2:
            rule = f"must be above {buckets // 2}: half of model.relative_buckets = {buckets} hold one distance each"
            yield Problem("model.relative_distance", furthest, rule, f"{4 * buckets} works")


def _query_layer(model: ModelConfig) -> Iterator[Problem]:
    if model.kind == "gpt" and model.final_norm == "after_query":
        yield Problem("model.final_norm", "after_query", "GPT has no query layer", "before_query works")
    if model.kind == "pangu" and model.layers == 1:
        yield Problem("model.layers", 1, "PanGu-α needs a block below its query layer", "2 or more work")
