"""Contradictions between the keys of an architecture."""

from __future__ import annotations

from collections.abc import Iterator

from pangu.config.errors import Problem
from pangu.config.model import ModelConfig
from pangu.config.rules import any_of, at_least, divisors_near, positive, within


def contradictions(model: ModelConfig) -> Iterator[Problem]:
    """What is wrong with an architecture by itself, whatever computes it."""
    for key in ("layers", "hidden", "heads", "vocab", "sequence"):
        yield from at_least(f"model.{key}", getattr(model, key), 1)
    if model.ffn is not None:
        yield from at_least("model.ffn", model.ffn, 1)
    if model.head_dim is not None:
        yield from at_least("model.head_dim", model.head_dim, 1)
    elif model.heads > 0 and model.hidden > 0 and model.hidden % model.heads:
        near = divisors_near(model.hidden, model.heads)
        yield Problem("model.heads", model.heads, f"must divide model.hidden = {model.hidden}", any_of(near))
    if model.kv_heads is not None:
        yield from at_least("model.kv_heads", model.kv_heads, 1)
        if model.kv_heads > 0 and model.heads > 0 and model.heads % model.kv_heads:
            near = divisors_near(model.heads, model.kv_heads)
            yield Problem("model.kv_heads", model.kv_heads, f"must divide model.heads = {model.heads}", any_of(near))
    if model.positions == "rope" and model.hidden > 0 and model.heads > 0 and model.head_size % 2:
        rule = f"turns pairs of elements, and the head size {model.head_size_key} = {model.head_size} is odd"
        yield Problem("model.positions", "rope", rule, "learned works, or an even head size")
    if model.rope_base is not None:
        yield from positive("model.rope_base", model.rope_base)
        if model.positions != "rope":
            rule = f"{model.positions} positions do not turn"
            yield Problem("model.rope_base", model.rope_base, rule, "null works, or model.positions=rope")
    yield from _rope_scaling(model)
    for key in ("relative_buckets", "relative_distance"):
        value = getattr(model, key)
        if value is not None and model.positions != "relative":
            rule = f"{model.positions} positions have no buckets"
            yield Problem(f"model.{key}", value, rule, "null works, or model.positions=relative")
    if model.positions == "relative":
        buckets, furthest = model.num_relative_buckets, model.furthest_relative
        yield from at_least("model.relative_buckets", buckets, 2)
        if furthest <= buckets // 2:
            rule = f"must be above {buckets // 2}: half of model.relative_buckets = {buckets} hold one distance each"
            yield Problem("model.relative_distance", furthest, rule, f"{4 * buckets} works")
    if model.window is not None:
        yield from at_least("model.window", model.window, 1)
    if model.kind == "pangu" and model.layers == 1:
        yield Problem("model.layers", 1, "PanGu-α needs a block below its query layer", "2 or more work")
    if model.kind == "gpt" and model.final_norm == "after_query":
        yield Problem("model.final_norm", "after_query", "GPT has no query layer", "before_query works")
    for key in ("dropout", "attention_dropout"):
        yield from within(f"model.{key}", getattr(model, key), 0.0, 1.0)
    yield from positive("model.norm_eps", model.norm_eps)
    yield from positive("model.init_std", model.init_std)


def _rope_scaling(model: ModelConfig) -> Iterator[Problem]:
    scaling = model.rope_scaling
    if scaling is None:
        return
    if model.positions != "rope":
        rule = f"{model.positions} positions do not turn"
        yield Problem("model.rope_scaling", scaling, rule, "null works, or model.positions=rope")
    yield from at_least("model.rope_scaling.factor", scaling.factor, 1)
    yield from positive("model.rope_scaling.low_freq_factor", scaling.low_freq_factor)
    yield from at_least("model.rope_scaling.original_sequence", scaling.original_sequence, 1)
    if not scaling.high_freq_factor > scaling.low_freq_factor:
        rule = f"must be above model.rope_scaling.low_freq_factor = {scaling.low_freq_factor:g}"
        yield Problem("model.rope_scaling.high_freq_factor", scaling.high_freq_factor, rule, "4 works with 1")


def shared_matrices(model: ModelConfig, tensor: int) -> Iterator[Problem]:
    """What keeps `tensor` devices from sharing every matrix of a model."""
    # a number that divides the key heads divides the query heads too
    key = "heads" if model.kv_heads is None else "kv_heads"
    heads = getattr(model, key)
    if heads > 0 and heads % tensor:
        near = divisors_near(heads, tensor)
        yield Problem("parallel.tensor", tensor, f"must divide model.{key} = {heads}", any_of(near))
    if model.ffn_size % tensor:
        near = divisors_near(model.ffn_size, tensor)
        rule = f"must divide the feed-forward width {model.ffn_size}"
        yield Problem("parallel.tensor", tensor, rule, any_of(near))
