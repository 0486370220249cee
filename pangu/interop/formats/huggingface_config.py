"""Translation of config.json: GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3-MoE, PanGu-α's community port."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pangu.common.errors import Problem, UserError
from pangu.config.build import read_keys
from pangu.config.model import ModelConfig, RopeScaling, RouterConfig
from pangu.interop.formats.fields import check_fields, load_table, refuse, wrong_field
from pangu.interop.formats.stored import PANGU_VOCAB, require_expressible


@dataclass(frozen=True)
class ModelType:
    """One `model_type` of transformers, as model_types.yaml describes it."""

    name: str
    tensors: Mapping[str, Any]
    keys: Mapping[str, str]
    """Names in config.json, by key of `ModelConfig`."""
    means: Mapping[str, Any]
    """Keys of `ModelConfig` that the type implies, those of the router with dotted names."""
    defaults: Mapping[str, Any]
    """Defaults in transformers for keys of `ModelConfig` that config.json may omit."""
    only: Mapping[str, list[Any]]
    """Supported values of fields that change the function but are not read."""
    harmless: str
    """Fields that do not change the function, separated by spaces."""
    activations: Mapping[str, str]
    writes: Mapping[str, Any]
    """Further fields of config.json."""
    derived: str = ""
    """Fields that are read several together, see `_DERIVE`."""
    twins: Mapping[str, str] = field(default_factory=dict)
    """Fields that must equal another one."""
    choices: Mapping[str, list[Any]] = field(default_factory=dict)
    """Values that the type can express, by key of `ModelConfig`."""


@cache
def kinds() -> dict[str, ModelType]:
    """Return the supported types by name."""
    return {name: ModelType(name, **values) for name, values in load_table("model_types").items() if "keys" in values}


def kind_of(model: ModelConfig, kind: ModelType | None = None) -> ModelType:
    """Return the type of a model, or `kind` if it is given. Raises ConfigError if it cannot express the model."""
    if kind is not None:
        name = kind.name
    elif model.kind == "pangu" or model.norm == "layernorm":
        name = "gpt_pangu" if model.kind == "pangu" else "gpt2"
    elif model.experts is not None:
        name = "qwen3_moe" if model.qk_norm else "mixtral"
    elif model.qk_norm:
        name = "qwen3"
    elif model.biases == "qkv":
        name = "qwen2"
    else:
        name = "llama" if model.window is None else "mistral"
    kind = kinds()[name]
    require_expressible(model, name, activation=list(dict.fromkeys(kind.activations.values())))
    return kind


def kind_in(config: Mapping[str, Any], path: Path) -> ModelType:
    """Return the type of a config.json. Raises UserError for an unknown one."""
    name = config.get("model_type", "")
    known = "gpt_pangu" if name == "pangu" else name
    if not isinstance(name, str) or known not in kinds():
        problem = Problem("model_type", name, "is not supported", f"use one of {', '.join(kinds())}")
        raise UserError(f"{path}: {problem}")
    return kinds()[known]


def read_model(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return keys of `ModelConfig` from a config.json. Raises UserError for an unsupported model."""
    kind = kind_in(config, path)
    if missing := [name for key, name in kind.keys.items() if name not in config and key not in kind.defaults]:
        raise UserError(f"{path}: {', '.join(missing)} must be given")
    values = {key: config.get(name, kind.defaults.get(key)) for key, name in kind.keys.items()}
    activation = values.pop("activation")
    keys, problems = read_keys(ModelConfig, values, kind.keys)
    if activation not in list(kind.activations):
        problems.append(Problem(kind.keys["activation"], activation, f"is none of {', '.join(kind.activations)}"))
    refuse(path, problems)
    harmless = f"{load_table('model_types')['_harmless']} {kind.harmless}".split()
    check_fields(config, path, {*kind.keys.values(), *kind.derived.split(), *kind.twins}, harmless, kind.only)
    for twin, name in kind.twins.items():
        value = next(keys[key] for key, field_ in kind.keys.items() if field_ == name)
        if config.get(twin, value) != value:
            raise wrong_field(path, twin, config[twin], f"must be {name} = {value}")
    for name, derive in _DERIVE.items():
        if name in kind.derived.split():
            derive(config, keys, path)
    # the usual width is not worth a key
    if keys.get("head_dim") == keys["hidden"] / keys["heads"]:
        keys["head_dim"] = None
    if kind.name == "gpt_pangu":
        keys["vocab"] = PANGU_VOCAB.get(keys["vocab"], keys["vocab"])
    model_keys = {"dropout": 0.0, **keys, **kind.means, "activation": kind.activations[activation]}
    router = {key.removeprefix("router."): model_keys.pop(key) for key in list(model_keys) if key.startswith("router.")}
    return model_keys | ({"router": RouterConfig(**router)} if router else {})


def _flag(config: Mapping[str, Any], key: str, path: Path) -> bool:
    value = config.get(key, False)
    if not isinstance(value, bool):
        raise wrong_field(path, key, value, "must be true or false")
    return value


def _pangu_positions(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    kind = config.get("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary"):
        raise wrong_field(path, "position_embedding_type", kind, "is not supported", "use absolute or rotary")
    keys["positions"] = "rope" if kind == "rotary" else "learned"
    base, problems = read_keys(ModelConfig, {"rope_base": config.get("rope_theta", 1e4)}, {"rope_base": "rope_theta"})
    refuse(path, problems)
    keys["rope_base"] = base["rope_base"] if kind == "rotary" else None


_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_sequence": "original_max_position_embeddings",
}
"""Names in config.json, by key of `RopeScaling`."""


def _rope(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read RoPE from `rope_parameters` (transformers 5), or from `rope_scaling` and `rope_theta` (earlier versions)."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), dict | None):
            raise wrong_field(path, key, config[key], "must be a JSON object or null")
    # as transformers chooses between the two
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.get(key) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise wrong_field(path, f"{key}.rope_type", kind, "is not supported", "use default or llama3")
    scaling = _SCALING if kind == "llama3" else {}
    used = {"rope_type", "type", "rope_theta", *scaling.values()}
    check_fields(rope, f"{path}: {key}", used, (), {"partial_rotary_factor": (1.0, None)})
    theta = {"rope_base": f"{key}.rope_theta" if "rope_theta" in rope else "rope_theta"}
    usual = kind_in(config, path).defaults.get("rope_base", 1e4)
    given = rope.get("rope_theta", config.get("rope_theta", usual))
    base, problems = read_keys(ModelConfig, {"rope_base": given}, theta)
    names = {factor: f"{key}.{name}" for factor, name in scaling.items()}
    factors, more = read_keys(RopeScaling, {factor: rope.get(name) for factor, name in scaling.items()}, names)
    refuse(path, problems + more)
    keys |= base | {"rope_scaling": RopeScaling(**factors) if scaling else None}


def _biases(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    attention, mlp = _flag(config, "attention_bias", path), _flag(config, "mlp_bias", path)
    if mlp and not attention:
        raise wrong_field(path, "mlp_bias", mlp, "is not supported without attention_bias", "use false")
    keys["biases"] = "attention" if attention and not mlp else attention


def _qwen_window(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read the sliding window, which here applies to all layers or none; Qwen's starts at layer `max_window_layers`."""
    slides, first = _flag(config, "use_sliding_window", path), config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise wrong_field(path, "max_window_layers", first, "must be an integer")
    window, layers, kinds_ = keys["window"] if slides else None, keys["layers"], config.get("layer_types")
    if kinds_ is not None:
        if kinds_ != ["full_attention" if window is None else "sliding_attention"] * layers:
            raise wrong_field(path, "layer_types", kinds_, "is not supported", "use one kind in all layers")
    elif window is not None and 0 < first < layers:
        fix = f"use 0, or at least {layers}"
        raise wrong_field(path, "max_window_layers", first, "is not supported", fix)
    elif first >= layers:
        window = None
    keys["window"] = window


def _normalised(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    keys["router.normalised"] = _flag(config, "norm_topk_prob", path)


def _experts_twin(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read another name of `experts`, which transformers 5 writes."""
    twin, problems = read_keys(
        ModelConfig, {"experts": config.get("num_local_experts")}, {"experts": "num_local_experts"}
    )
    refuse(path, problems)
    if twin["experts"] is not None:
        if config.get("num_experts", twin["experts"]) != twin["experts"]:
            rule = f"must be num_experts = {config['num_experts']}"
            raise wrong_field(path, "num_local_experts", twin["experts"], rule)
        keys |= twin


_DERIVE: dict[str, Callable[[Mapping[str, Any], dict[str, Any], Path], None]] = {
    "position_embedding_type": _pangu_positions,
    "rope_parameters": _rope,
    "use_sliding_window": _qwen_window,
    "attention_bias": _biases,
    "norm_topk_prob": _normalised,
    "num_local_experts": _experts_twin,
}
"""Readers of several fields together, keyed by a field that only types with all of them have: from config.json into
keys of `ModelConfig`. Each raises UserError."""


def write_model(model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a model's config.json. Raises ConfigError if transformers has no such model."""
    kind = kind_of(model)
    keys = {
        **vars(model),
        "ffn": model.expert_size if model.experts and "expert_ffn" not in kind.keys else model.ffn_size,
        "expert_ffn": model.expert_size,
        "experts_per_token": model.num_chosen,
        "activation": next(name for name, activation in kind.activations.items() if activation == model.activation),
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_size,
    }
    fields = {name: keys[key] for key, name in kind.keys.items()}
    written = {*kind.derived.split(), *kind.twins}
    derived = {key: value for key, value in _derived_fields(model).items() if key in written}
    return {"model_type": kind.name, **fields, **derived, **kind.writes}


def _derived_fields(model: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "embd_pdrop": model.dropout,
        "attention_bias": model.has_biases("output"),
        "mlp_bias": model.has_biases("mlp"),
        "use_sliding_window": model.window is not None,
        "max_window_layers": model.layers if model.window is None else 0,
        "norm_topk_prob": model.router.normalised,
    }
    if model.positions == "rope":
        fields |= {"position_embedding_type": "rotary", "rope_theta": model.rotary_base, "rope_scaling": None}
    if scaling := model.rope_scaling:
        factors = {name: getattr(scaling, factor) for factor, name in _SCALING.items()}
        fields["rope_scaling"] = {"rope_type": "llama3", **factors}
    return fields
