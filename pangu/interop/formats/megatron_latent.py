"""Megatron-Core's options and tensors of latent attention (`--multi-latent-attention`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pangu.common.errors import Problem, UserError
from pangu.config.build import read_keys
from pangu.config.model import LatentConfig, ModelConfig
from pangu.config.rope import YarnScaling
from pangu.interop.formats.fields import disagreements, refuse
from pangu.interop.formats.stored import ABSENT
from pangu.layers.rotary import yarn_attention_factor

LATENT_OPTIONS = {
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "nope_head_dim": "qk_head_dim",
    "rope_head_dim": "qk_pos_emb_head_dim",
    "value_head_dim": "v_head_dim",
}
"""Megatron's options by fields of `LatentConfig`."""
_YARN = {
    "factor": "rotary_scaling_factor",
    "original_sequence": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
}
"""Options of YaRN by fields of `YarnScaling`."""
_ATTENTION = "decoder.layers.0.self_attention."
Options = Mapping[str, Any]
"""Megatron's options, the `args` of a checkpoint."""
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of tensors on a tensor-parallel rank, by name."""


def read_latent(options: Options, shapes: Shapes, ranks: int) -> dict[str, Any]:
    """Return keys of `ModelConfig`, of which `latent` may be a function of the number of heads. Raises UserError."""
    if f"{_ATTENTION}linear_kv_up_proj.weight" not in shapes:
        return {"latent": None}
    from_vector = f"{_ATTENTION}linear_q_up_proj.weight" in shapes
    query = shapes[f"{_ATTENTION}linear_q_{'up_proj' if from_vector else 'proj'}.weight"]
    key_value, output = (shapes[f"{_ATTENTION}linear_{name}.weight"] for name in ("kv_up_proj", "proj"))

    def latent(heads: int) -> LatentConfig:
        value = output[1] * ranks // heads
        nope = key_value[0] * ranks // heads - value
        rope = query[0] * ranks // heads - nope
        if min(value, nope, rope) < 1:
            raise UserError(f"model.heads = {heads}: does not match the tensors of latent attention")
        return LatentConfig(
            kv_rank=key_value[1],
            q_rank=query[1] if from_vector else None,
            nope_head_dim=nope,
            rope_head_dim=rope,
            value_head_dim=value,
        )

    return {
        "latent": latent,
        "head_dim": None,
        "kv_heads": None,
        "qk_norm": False,
        "partial_rotary_factor": 1.0,
        "rope_scaling": read_scaling(options) if options else ABSENT,
    }


def read_scaling(options: Options, where: str = "args") -> YarnScaling | None:
    """Return YaRN, which latent attention has unless `rope_type` is given. Raises UserError."""
    yarn = options.get("rope_type") != "rope"
    start = {key: options[name] for key, name in _YARN.items() if options.get(name) is not None}
    fields, problems = read_keys(YarnScaling, start, _YARN)
    # both scales have the range of one of them
    scales = {"mscale": 1.0, "mscale_all_dim": 0.0}
    for name, usual in scales.items():
        value = usual if options.get(name) is None else options[name]
        read, more = read_keys(YarnScaling, {"mscale_all_dim": value}, {"mscale_all_dim": name})
        scales[name] = read.get("mscale_all_dim", 0.0)
        problems += more
    refuse(where, problems)
    given: dict[str, Any] = {"name": "yarn", "factor": 40.0, "original_sequence": 4096} | fields
    scales_nothing = given["factor"] == 1
    if not yarn:
        only: dict[str, Sequence[Any]] = {"rotary_percent": [1.0, None]}
        only |= {} if scales_nothing else {"mscale_all_dim": [0.0, None]}
        refuse(where, disagreements(options, only, "is not supported with rope_type = rope; use {}"))
    return _yarn_of(given, **scales) if yarn and not scales_nothing else None


def _yarn_of(fields: Mapping[str, Any], mscale: float, mscale_all_dim: float) -> YarnScaling:
    """Return YaRN with fields of `YarnScaling` and both factors of DeepSeek's released code."""
    plain = YarnScaling(**fields, mscale_all_dim=mscale_all_dim)
    first, second = (0.1 * scale * math.log(plain.factor) + 1 for scale in (mscale, mscale_all_dim))
    papers = math.isclose(first / second, yarn_attention_factor(plain), rel_tol=1e-12)
    return YarnScaling(**vars(plain) | {"attention_factor": None if papers else first / second})


def latent_agrees(keys: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Return the options that the tensors of latent attention, or of any other, imply."""
    if keys["latent"] is None:
        return {"multi_latent_attention": [False], "rope_type": [None, "rope"]}
    agree: dict[str, Sequence[Any]] = {
        "multi_latent_attention": [True],
        "qk_layernorm": [True],
        "position_embedding_type": ["rope"],
        "group_query_attention": [False],
        "softmax_scale": [None],
    }
    if isinstance(keys["latent"], LatentConfig):
        agree |= {option: [getattr(keys["latent"], key)] for key, option in LATENT_OPTIONS.items()}
    return agree


def write_latent(model: ModelConfig) -> dict[str, Any]:
    """Return Megatron's options of the attention of a model."""
    if model.latent is None:
        return {"multi_latent_attention": False}
    values: dict[str, Any] = {option: getattr(model.latent, key) for key, option in LATENT_OPTIONS.items()}
    values |= {"multi_latent_attention": True, "qk_layernorm": True, "rope_type": "rope"}
    # some versions have another default of the last one
    values |= {"rotary_scaling_factor": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
    if isinstance(scaling := model.rope_scaling, YarnScaling):
        values |= {option: getattr(scaling, key) for key, option in _YARN.items()} | {"rope_type": "yarn"}
        values |= {"mscale": _mscale(scaling), "mscale_all_dim": scaling.mscale_all_dim}
    return values


def _mscale(scaling: YarnScaling) -> float | None:
    """Return Megatron's `mscale`, or None if there is none."""
    # (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1) is the attention factor
    growth, scale = 0.1 * math.log(scaling.factor), scaling.mscale_all_dim
    factor = yarn_attention_factor(scaling)
    if factor != 1:
        if not growth:
            return None
        plain = scaling.attention_factor is None and not scale
        scale = 1.0 if plain else (factor * (growth * scale + 1) - 1) / growth
    return scale if scale >= 0 else None


def inexpressible_latent(model: ModelConfig) -> list[Problem]:
    """Return a problem for each key that Megatron-Core does not have with latent attention."""
    if model.latent is None:
        return []
    problems, scaling, eps = [], model.rope_scaling, model.latent.norm_eps
    if eps not in (None, model.norm_eps):
        rule = f"Megatron-Core has a single epsilon for all norms, model.norm_eps = {model.norm_eps}"
        problems.append(Problem("model.latent.norm_eps", eps, rule))
    if scaling is not None and not isinstance(scaling, YarnScaling):
        problems.append(Problem("model.rope_scaling", scaling, "Megatron-Core's latent attention has only YaRN"))
    elif scaling is not None and not scaling.truncate:
        rule = "Megatron-Core's latent attention always rounds YaRN's pairs"
        problems.append(Problem("model.rope_scaling.truncate", False, rule, "use true"))
    elif scaling is not None and _mscale(scaling) is None:
        rule = "Megatron-Core's latent attention has no such factor"
        problems.append(Problem("model.rope_scaling.attention_factor", scaling.attention_factor, rule))
    return problems
