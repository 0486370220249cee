"""Contradictions between the keys of a model's position encoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pangu.common.errors import Problem
from pangu.config.model import ModelConfig
from pangu.config.rope import Llama3Scaling, YarnScaling

LATENT_NEEDS = {
    "kind": "gpt",
    "positions": "rope",
    "head_dim": None,
    "kv_heads": None,
    "qk_norm": False,
    "partial_rotary_factor": 1.0,
    "nope_layers": None,
}
"""Values of other keys that latent attention needs."""
ONE_KIND: Mapping[str, Mapping[str, int | None]] = {
    "rope": {"rope_base": None, "partial_rotary_factor": 1, "nope_layers": None, "rope_scaling": None},
    "relative": {"relative_buckets": None, "relative_distance": None},
}
"""Keys that apply to one kind of positions only, each with the value that it needs with all others."""


def position_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield the contradictions between `positions` and the keys that only some kinds of positions have."""
    yield from _kinds(model)
    yield from _rotation(model)
    yield from _layers(model)
    yield from _scaling(model)
    yield from _distances(model)


def latent_problems(model: ModelConfig) -> Iterator[Problem]:
    """Yield the contradictions between `latent` and other keys of attention."""
    if (latent := model.latent) is None:
        return
    for key, needed in LATENT_NEEDS.items():
        if (value := getattr(model, key)) != needed:
            shown = "null" if needed is None else str(needed).lower()
            yield Problem(f"model.{key}", value, f"must be {shown} with model.latent", f"use {shown}")
    if latent.rope_head_dim % 2:
        near = f"use {latent.rope_head_dim + 1}"
        yield Problem("model.latent.rope_head_dim", latent.rope_head_dim, "must be even: pairs rotate", near)
    if latent.value_head_dim > model.head_size:
        rule = f"must be at most {model.head_size_key} = {model.head_size}"
        yield Problem("model.latent.value_head_dim", latent.value_head_dim, rule, f"use {latent.nope_head_dim}")


def _kinds(model: ModelConfig) -> Iterator[Problem]:
    for kind, keys in ONE_KIND.items():
        for key, unused in keys.items():
            if model.positions != kind and (value := getattr(model, key)) != unused:
                rule = f"only applies with model.positions = {kind}, got {model.positions}"
                fix = f"use {'null' if unused is None else unused}, or set model.positions={kind}"
                yield Problem(f"model.{key}", getattr(value, "name", value), rule, fix)


def _rotation(model: ModelConfig) -> Iterator[Problem]:
    share = model.partial_rotary_factor
    if model.positions != "rope" or model.latent is not None:
        return
    if share == 1 and model.head_size % 2:
        rule = f"needs an even head size, got {model.head_size_key} = {model.head_size}"
        yield Problem("model.positions", "rope", rule, "use learned, or an even head size")
    elif model.rotary_size % 2 or not model.rotary_size:
        rule = f"must make an even number of the {model.head_size} elements of a head rotate, not {model.rotary_size}"
        fix = f"use e.g. {2 * max(1, model.rotary_size // 2) / model.head_size:g}"
        yield Problem("model.partial_rotary_factor", share, rule, fix)


def _layers(model: ModelConfig) -> Iterator[Problem]:
    """Yield the contradictions of the keys that choose layers."""
    if model.full_layers is not None and model.window is None:
        yield Problem("model.full_layers", model.full_layers, "needs a window", "use null, or set model.window")
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
    if isinstance(scaling, YarnScaling) and scaling.mscale_all_dim and model.latent is None:
        rule = "only applies with model.latent, which is null"
        yield Problem("model.rope_scaling.mscale_all_dim", scaling.mscale_all_dim, rule, "use 0")


def _distances(model: ModelConfig) -> Iterator[Problem]:
    buckets, furthest = model.num_relative_buckets, model.furthest_relative
    if model.positions == "relative" and furthest <= buckets // 2:
        rule = f"must be above {buckets // 2}: half of the {buckets} buckets hold one distance each"
        yield Problem("model.relative_distance", furthest, rule, f"use {4 * buckets}")
