"""Translation of config.json, of the types in model_types.yaml."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

from pangu.common.errors import ConfigError, Problem, UserError, shown
from pangu.config.build import read_keys
from pangu.config.model import LatentConfig, ModelConfig, RouterConfig
from pangu.config.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from pangu.interop.formats.fields import check_fields, load_table, read_fields, refuse, wrong_field
from pangu.interop.formats.huggingface_layers import layer_types, no_rope_layers
from pangu.interop.formats.stored import PANGU_VOCAB, inexpressible


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
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields, which transformers reads as well."""
    choices: Mapping[str, list[Any]] = field(default_factory=dict)
    """Values that the type can express, by key of `ModelConfig`, instead of the one that it `means`; empty: any."""
    given: Sequence[str] = ()
    """Keys of `ModelConfig` that must not be null."""
    values: Mapping[str, Mapping[Any, Mapping[str, Any]]] = field(default_factory=dict)
    """Keys of `ModelConfig` that each value of a field means; the first value is the default in transformers."""


@cache
def kinds() -> dict[str, ModelType]:
    """Return the supported types by name."""
    return {name: ModelType(name, **values) for name, values in load_table("model_types").items() if "keys" in values}


_SHAPE = {f"model.{key}" for key in ("kind", "experts", "norm", "positions", "parallel_block", "norm_placement")}
"""Keys that set types apart more than others do."""


def kind_of(model: ModelConfig, kind: ModelType | None = None) -> ModelType:
    """Return the first type that can express a model, or `kind` if it is given. Raises ConfigError if there is none."""
    found = [
        (inexpressible(model, one.name, activation=list(dict.fromkeys(one.activations.values()))), one)
        for one in ([kind] if kind is not None else kinds().values())
    ]
    problems, nearest = min(found, key=lambda one: sum(10 if each.key in _SHAPE else 1 for each in one[0]))
    if problems:
        raise ConfigError(problems)
    return nearest


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
    for alias, name in kind.aliases.items():
        if config.get(alias) is not None:
            config = {name: config[alias], **config}
            if config[name] != config[alias]:
                raise wrong_field(path, alias, config[alias], f"must be {name} = {shown(config[name])}")
    if missing := [name for key, name in kind.keys.items() if name not in config and key not in kind.defaults]:
        raise UserError(f"{path}: {', '.join(missing)} must be given")
    values = {key: config.get(name, kind.defaults.get(key)) for key, name in kind.keys.items()}
    activation = values.pop("activation", next(iter(kind.activations)))
    keys, problems = read_keys(ModelConfig, values, kind.keys)
    keys["full_layers"] = kind.defaults.get("full_layers")
    if activation not in list(kind.activations):
        problems.append(Problem(kind.keys["activation"], activation, f"is none of {', '.join(kind.activations)}"))
    refuse(path, problems)
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        fix = _DEQUANTIZED.get(str(method), "use the weights before quantization")
        raise wrong_field(path, "quantization_config", quantization, "is not supported", fix)
    harmless = f"{load_table('model_types')['_harmless']} {kind.harmless}".split()
    used = {*kind.keys.values(), *kind.derived.split(), *kind.twins, *kind.values, *kind.aliases}
    check_fields(config, path, used, harmless, kind.only)
    for name, meanings in kind.values.items():
        value = config.get(name, next(iter(meanings)))
        if not isinstance(value, bool | int | str | None) or value not in meanings:
            raise wrong_field(path, name, value, "is not supported", f"use {' or '.join(map(shown, meanings))}")
        keys |= meanings[value]
    for twin, name in kind.twins.items():
        value = next(keys[key] for key, field_ in kind.keys.items() if field_ == name)
        if config.get(twin, value) != value:
            raise wrong_field(path, twin, config[twin], f"must be {name} = {shown(value)}")
    for name, derive in _DERIVE.items():
        if name in kind.derived.split():
            derive(config, keys, path)
    # the usual width is not worth a key
    if keys.get("head_dim") == keys["hidden"] / keys["heads"]:
        keys["head_dim"] = None
    if kind.name == "gpt_pangu":
        keys["vocab"] = PANGU_VOCAB.get(keys["vocab"], keys["vocab"])
    model_keys = {"dropout": 0.0, "attention_dropout": 0.0, **kind.means, **keys}
    model_keys["activation"] = kind.activations[activation]
    router = {key.removeprefix("router."): model_keys.pop(key) for key in list(model_keys) if key.startswith("router.")}
    return model_keys | ({"router": RouterConfig(**router)} if router else {})


_DEQUANTIZED = {
    "fp8": "convert the weights to bf16, e.g. with DeepSeek's fp8_cast_bf16.py, and remove this field",
    "mxfp4": "use bf16 weights, e.g. those that transformers loads with Mxfp4Config(dequantize=True) and saves",
}
"""Remedy for quantized weights, by `quant_method`."""


def _flag(config: Mapping[str, Any], key: str, path: Path, usual: bool = False) -> bool:
    value = config.get(key, usual)
    if not isinstance(value, bool):
        raise wrong_field(path, key, value, "must be true or false")
    return value


def _pangu_positions(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    kind = config.get("position_embedding_type", "absolute")
    if kind not in ("absolute", "rotary"):
        raise wrong_field(path, "position_embedding_type", kind, "is not supported", "use absolute or rotary")
    keys["positions"] = "rope" if kind == "rotary" else "learned"
    base = read_fields(ModelConfig, {"rope_theta": 1e4, **config}, {"rope_base": "rope_theta"}, path).get("rope_base")
    keys["rope_base"] = base if kind == "rotary" else None


_SCALINGS: dict[str, tuple[type[RopeScaling], str, str]] = {
    "llama3": (Llama3Scaling, "factor low_freq_factor high_freq_factor original_sequence", ""),
    "linear": (LinearScaling, "factor", ""),
    "yarn": (YarnScaling, "factor original_sequence", "beta_fast beta_slow truncate attention_factor mscale_all_dim"),
}
"""`rope_type` -> its class, with the keys that a file must and may have."""
_ORIGINAL = {"original_sequence": "original_max_position_embeddings"}
"""Names in config.json that differ from the keys of `RopeScaling`."""


def _rope(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read RoPE from `rope_parameters` (transformers 5), or from `rope_scaling` and `rope_theta` (earlier versions)."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(config.get(key), dict | None):
            raise wrong_field(path, key, config[key], "must be a JSON object or null")
    # as transformers chooses between the two
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    type_ = kind_in(config, path)
    rope = config.get(key) or type_.defaults.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", *_SCALINGS):
        fix = f"use one of {', '.join(('default', *_SCALINGS))}"
        if kind == "dynamic":
            fix = "use default without a factor, which computes the same up to max_position_embeddings tokens"
        raise wrong_field(path, f"{key}.rope_type", kind, "is not supported", fix)
    needed, optional = (names.split() for names in _SCALINGS[kind][1:]) if kind in _SCALINGS else ([], [])
    names = {factor: f"{key}.{_ORIGINAL.get(factor, factor)}" for factor in (*needed, *optional)}
    used = {
        "rope_type",
        "type",
        "rope_theta",
        "partial_rotary_factor",
        *(name.partition(".")[2] for name in names.values()),
    }
    # DeepSeek's factors of YaRN
    used |= {"mscale", "mscale_all_dim"} if kind == "yarn" else set()
    check_fields(rope, f"{path}: {key}", used, (), {"max_position_embeddings": [keys["sequence"]]})
    given = {factor: rope.get(name.partition(".")[2]) for factor, name in names.items()}
    if kind == "yarn":
        given["original_sequence"] = given["original_sequence"] or keys["sequence"]
        if "latent" not in type_.given:  # no factor of scores, but part of the other one
            given["mscale_all_dim"] = None
        if given["attention_factor"] is None and rope.get("mscale") and rope.get("mscale_all_dim"):
            given["attention_factor"] = _attention_factor(rope, f"{path}: {key}")
    given = {factor: value for factor, value in given.items() if value is not None or factor in needed}
    theta = f"{key}.rope_theta" if "rope_theta" in rope else "rope_theta"
    both_names = {"rope_base": theta, "partial_rotary_factor": "partial_rotary_factor"}
    usual = config.get("rotary_emb_base", type_.defaults.get("rope_base", 1e4))
    base = rope.get("rope_theta", config.get("rope_theta", usual))
    usual = config.get("rotary_pct", type_.defaults.get("partial_rotary_factor", 1.0))
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or usual
    both, problems = read_keys(ModelConfig, {"rope_base": base, "partial_rotary_factor": share}, both_names)
    factors, more = read_keys(_SCALINGS[kind][0], given, names) if kind in _SCALINGS else ({}, [])
    refuse(path, problems + more)
    if type_.means["partial_rotary_factor"] != share and "partial_rotary_factor" not in type_.choices:
        raise wrong_field(path, "partial_rotary_factor", share, "is not supported", "use 1")
    keys |= both | {"rope_scaling": _SCALINGS[kind][0](name=kind, **factors) if kind in _SCALINGS else None}


def _attention_factor(rope: Mapping[str, Any], where: str) -> float:
    """Return YaRN's attention factor from DeepSeek's fields (its released code, `yarn_get_mscale`)."""
    # the three fields have the range of a factor
    names = ("factor", "mscale", "mscale_all_dim")
    numbers = {
        name: read_keys(YarnScaling, {"attention_factor": rope.get(name)}, {"attention_factor": name}) for name in names
    }
    refuse(where, [problem for _, problems in numbers.values() for problem in problems])
    factor, *scales = (keys["attention_factor"] for keys, _ in numbers.values())
    if factor is None or factor < 1:
        raise wrong_field(where, "factor", factor, "must be at least 1")
    first, second = (0.1 * scale * math.log(factor) + 1 for scale in scales)
    return float(first / second)


def _biases(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    usual = kind_in(config, path).defaults
    queries, mlp = (_flag(config, key, path, usual.get(key, False)) for key in ("attention_bias", "mlp_bias"))
    output = _flag(config, "attention_out_bias", path, usual.get("attention_out_bias", queries))
    known = {(False, False, False): False, (True, True, True): True, (True, True, False): "attention"}
    known |= {(True, False, False): "qkv"}
    if (queries, output, mlp) not in known:
        if output != queries:
            name, needed = "attention_out_bias", "mlp_bias" if queries else "attention_bias"
            rule = f"is not supported with {needed} = {shown(mlp if queries else queries)}"
            raise wrong_field(path, name, output, rule, f"use {shown(queries)}")
        raise wrong_field(path, "mlp_bias", mlp, "is not supported without attention_bias", "use false")
    keys["biases"] = known[queries, output, mlp]


def _qwen_window(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read the sliding window, which here applies to all layers or none; Qwen's starts at layer `max_window_layers`."""
    slides, first = _flag(config, "use_sliding_window", path), config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise wrong_field(path, "max_window_layers", first, "must be an integer")
    keys["window"] = keys["window"] if slides else None
    keys["full_layers"] = tuple(range(min(first, keys["layers"])))


def _normalised(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    usual = kind_in(config, path).defaults.get("router.normalised", False)
    keys["router.normalised"] = _flag(config, "norm_topk_prob", path, usual)


def _latent(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read latent attention; without `q_lora_rank`, queries are made of the input."""
    numbers = read_fields(LatentConfig, config, LATENT_FIELDS, path)
    if missing := [LATENT_FIELDS[key] for key in LATENT_FIELDS if key not in numbers and key != "q_rank"]:
        raise UserError(f"{path}: {', '.join(missing)} must be given")
    eps = kind_in(config, path).defaults["latent.norm_eps"]
    keys["latent"] = latent = LatentConfig(**numbers, norm_eps=None if eps == keys["norm_eps"] else eps)
    twins = {"head_dim": latent.rope_head_dim, "qk_head_dim": latent.nope_head_dim + latent.rope_head_dim}
    for name, value in twins.items():
        if config.get(name, value) != value:
            raise wrong_field(path, name, config[name], f"must be {value} to match the other widths of a head")


def _deepseek_router(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read the groups of experts, of which one limits nothing, and the factor of their weights."""
    usual = kind_in(config, path).defaults
    given = {key: config.get(name, usual.get(f"router.{key}")) for key, name in _GROUPS.items()}
    given = {key: value for key, value in given.items() if value is not None or key == "scale"}
    router, problems = read_keys(RouterConfig, given, _GROUPS)
    refuse(path, problems)
    limited = keys.get("router.selection") != "top" and router.get("groups", 1) > 1
    router = router if limited else {"scale": router["scale"]}
    keys |= {"router.selection": keys.get("router.selection", "group_limited") if limited else "top"}
    keys |= {f"router.{key}": value for key, value in router.items()}


def _pangu_experts(config: Mapping[str, Any], keys: dict[str, Any], path: Path) -> None:
    """Read shared experts, and groups of experts: as many as experts of a token."""
    name, each = "shared_expert_intermediate_size", keys["expert_ffn"]
    width = config.get(name, 0)
    if not isinstance(width, int) or width < 0 or not each or width % each:
        raise wrong_field(path, name, width, f"must be a multiple of moe_intermediate_size = {each}")
    keys |= {"shared_experts": width // each, "router.groups": keys["experts_per_token"]}


LATENT_FIELDS = {
    "kv_rank": "kv_lora_rank",
    "q_rank": "q_lora_rank",
    "nope_head_dim": "qk_nope_head_dim",
    "rope_head_dim": "qk_rope_head_dim",
    "value_head_dim": "v_head_dim",
}
"""Names in config.json of the keys of `LatentConfig`."""
_GROUPS = {"groups": "n_group", "groups_per_token": "topk_group", "scale": "routed_scaling_factor"}
"""Names in DeepSeek's config.json of keys of `RouterConfig`."""
_DERIVE: dict[str, Callable[[Mapping[str, Any], dict[str, Any], Path], None]] = {
    "position_embedding_type": _pangu_positions,
    "rope_parameters": _rope,
    "use_sliding_window": _qwen_window,
    "no_rope_layers": no_rope_layers,
    "layer_types": layer_types,
    "attention_bias": _biases,
    "norm_topk_prob": _normalised,
    "kv_lora_rank": _latent,
    "routed_scaling_factor": _deepseek_router,
    "shared_expert_intermediate_size": _pangu_experts,
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
    for name, meanings in kind.values.items():
        fits = (value for value, meant in meanings.items() if all(attrgetter(k)(model) == meant[k] for k in meant))
        derived[name] = next(fits)
    return {"model_type": kind.name, **fields, **derived, **kind.writes}


def _derived_fields(model: ModelConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "embd_pdrop": model.dropout,
        "n_ctx": model.sequence,  # llama.cpp's converter reads this name
        "attention_bias": model.has_biases("qkv"),
        "attention_out_bias": model.has_biases("output"),
        "mlp_bias": model.has_biases("mlp"),
        "use_sliding_window": model.window is not None,
        # the first of all, where those are the full ones; `layer_types` says more
        "max_window_layers": next((n for n in range(model.layers) if model.has_window(n)), model.layers),
        "layer_types": [
            "sliding_attention" if model.has_window(layer) else "full_attention" for layer in range(model.layers)
        ],
        "no_rope_layers": [int(model.has_rope(layer)) for layer in range(model.layers)],
        "norm_topk_prob": model.router.normalised,
        "num_key_value_heads": model.heads,
        "n_group": model.router.groups,
        "topk_group": model.router.groups_per_token or model.router.groups,
        "routed_scaling_factor": model.router.scale,
        "shared_expert_intermediate_size": model.shared_experts * model.expert_size,
    }
    if model.positions == "rope":
        fields |= {"position_embedding_type": "rotary", "rope_theta": model.rotary_base, "rope_scaling": None}
        fields["partial_rotary_factor"] = model.partial_rotary_factor
        # GPT-NeoX's own names
        fields |= {"rotary_pct": model.partial_rotary_factor, "rotary_emb_base": model.rotary_base}
    if model.latent is not None:
        fields |= {name: getattr(model.latent, key) for key, name in LATENT_FIELDS.items()}
    if scaling := model.rope_scaling:
        factors = {
            _ORIGINAL.get(factor, factor): value for factor, value in asdict(scaling).items() if value is not None
        }
        # other readers make the factors of `mscale`, of which transformers needs none
        if (all_dim := factors.pop("mscale_all_dim", 0)) and factors.get("attention_factor") == 1:
            factors |= {"mscale": all_dim}
        factors |= {"mscale_all_dim": all_dim} if all_dim else {}
        fields["rope_scaling"] = {"rope_type": factors.pop("name"), **factors}
    return fields
