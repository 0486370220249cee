"""Contradictions between the keys of a model's position encoding."""

from __future__ import annotations

from collections.abc import Iterator

from pangu.common.errors import Problem
from pangu.config.model import ModelConfig
from pangu.config.rope import Llama3Scaling, YarnScaling


def position_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield the contradictions between the keys of position encoding."""
    yield from _rotation(model)
    yield from _layers(model)
    yield from _scaling(model)
    yield from _distances(model)


def latent_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield the contradictions between the sizes of latent attention."""
    if (latent := model.latent) is None:
        return
    if latent.rope_head_dim % 2:
        near = f"use {latent.rope_head_dim + 1}"
        yield Problem("model.latent.rope_head_dim", latent.rope_head_dim, "must be even: pairs rotate", near)
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
        rule = f"must make an even number of the {model.head_size} elements of a head rotate, not {model.rotary_size}"
        fix = f"use e.g. {2 * max(1, model.rotary_size // 2) / model.head_size:g}"
        yield Problem("model.partial_rotary_factor", share, rule, fix)


def _layers(model: ModelConfig) -> Iterator[Problem]:
    """Yield the contradictions of the keys that choose layers."""
    for key in ("full_layers", "nope_layers"):
        chosen, last = getattr(model, key), model.num_blocks - 1
        if isinstance(chosen, tuple) and (list(chosen) != sorted(set(chosen)) or max(chosen, default=0) > last):
            yield Problem(f"model.{key}", list(chosen), f"must be increasing numbers of layers, from 0 to {last}")


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
