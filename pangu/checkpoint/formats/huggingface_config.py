"""config.json of transformers: GPT-2, Llama, Mistral, Qwen2, Qwen3, and PanGu-α as its community port has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pangu.checkpoint.formats.fields import check_fields, refuse, shown
from pangu.checkpoint.formats.huggingface_names import GPT2_NAMES, HARMLESS, LLAMA_NAMES, ONLY, PANGU_NAMES
from pangu.checkpoint.formats.stored import GPT2, PANGU, PANGU_VOCAB, Naming, require_expressible
from pangu.config.errors import Problem, UserError
from pangu.config.model import ModelConfig, RopeScaling

ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu": "gelu", "fast_gelu": "quick_gelu", "swiglu": "silu"}
"""Their names of our activations."""
LARGEST, HUGE = 2**24, 1e30
"""No size in a configuration is larger than the one, and no other number as large as the other."""
CODE = Path(__file__).parent / "modeling_pangu.py"


@dataclass(frozen=True)
class Kind:
    """One `model_type` of transformers."""

    naming: Naming
    trunk: str
    """What all names but the head's begin with; some files leave it out."""
    keys: Mapping[str, str]
    """Keys of `ModelConfig`: their names in config.json."""
    means: Mapping[str, Any]
    """What the type says of a model by itself."""
    defaults: Mapping[str, Any]
    """Values of keys of `ModelConfig` that config.json may leave out; transformers' own."""
    writes: Mapping[str, Any]
    """What config.json says besides."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Fields that change what is computed: the only values that we compute."""
    harmless: tuple[str, ...] = ()
    """Fields that do not change it."""
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys of `ModelConfig`: the values that the type can express."""
    derives: tuple[Callable[[Mapping[str, Any], dict[str, Any], Path], None], ...] = ()
    """Read what several fields say together: from config.json into keys of `ModelConfig`. Raise `_WrongError`."""
    derived: tuple[str, ...] = ()
    """The fields that these read."""
    tells: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    """The way back."""


class _WrongError(Exception):
    """A field that is not computed here."""

    def __init__(self, key: str, value: object, rule: str, works: str = "") -> None:
        self.problem = Problem(key, shown(value), rule, works)


def _gpt2_fields(config: Mapping[str, Any], told: dict[str, Any], path: Path) -> None:
    """`dropout` and `sequence` have two names each."""
    for ours, theirs, other in (("dropout", "resid_pdrop", "embd_pdrop"), ("sequence", "n_positions", "n_ctx")):
        if config.get(other, told[ours]) != told[ours]:
            raise _WrongError(other, config[other], f"must be {theirs} = {shown(told[ours])}: they are one number here")


def _pangu_positions(config: Mapping[str, Any], told: dict[str, Any], path: Path) -> None:
    kind, base = config.get("position_embedding_type", "absolute"), config.get("rope_theta", 1e4)
    if kind not in ("absolute", "rotary"):
        raise _WrongError("position_embedding_type", kind, "is not computed here", "absolute or rotary is")
    if not _is_number(base) or not 0 < base < HUGE:
        raise _WrongError("rope_theta", base, "must be a number above 0")
    told["positions"], told["rope_base"] = ("rope", float(base)) if kind == "rotary" else ("learned", None)


def _tell_pangu(model: ModelConfig) -> dict[str, Any]:
    turns = {"position_embedding_type": "rotary", "rope_theta": model.rotary_base} if model.positions == "rope" else {}
    return {"embd_pdrop": model.dropout, **turns}


def _rope(config: Mapping[str, Any], told: dict[str, Any], path: Path) -> None:
    """transformers 5 has all in `rope_parameters`, earlier ones in `rope_scaling` and `rope_theta`."""
    given = {key: config.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, value in given.items():
        if not isinstance(value, dict | None):
            raise _WrongError(key, value, "must be a JSON object or null")
    # as transformers chooses between the two
    key = "rope_scaling" if given["rope_scaling"] else "rope_parameters"
    rope = given[key] or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    numbers = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    wanted = {"default": (), "llama3": numbers}.get(kind) if isinstance(kind, str) else None
    if wanted is None:
        raise _WrongError(f"{key}.rope_type", kind, "is not computed here", "default or llama3 is")
    used = {"rope_type", "type", "rope_theta", *wanted}
    check_fields(rope, f"{path}: {key}", used, (), {"partial_rotary_factor": (1.0, None)})
    values = {"rope_theta": rope.get("rope_theta", config.get("rope_theta", 1e4))}
    values |= {name: rope.get(name) for name in wanted}
    for name, value in values.items():
        if not _is_number(value) or not 0 < value < HUGE:
            raise _WrongError(name if name in config else f"{key}.{name}", value, "must be a number above 0")
        if name == numbers[-1] and value != int(value):
            raise _WrongError(f"{key}.{name}", value, "must be an integer")
    told["rope_base"] = float(values.pop("rope_theta"))
    told["rope_scaling"] = None
    if wanted:
        factor, low, high, original = values.values()
        told["rope_scaling"] = RopeScaling(float(factor), float(low), float(high), int(original))


def _head_dim(config: Mapping[str, Any], told: dict[str, Any], path: Path) -> None:
    """The usual width is not worth a key."""
    if told.get("head_dim") == told["hidden"] // told["heads"] and told["hidden"] % told["heads"] == 0:
        told["head_dim"] = None


def _llama_biases(config: Mapping[str, Any], told: dict[str, Any], path: Path) -> None:
    attention, mlp = (config.get(key, False) for key in ("attention_bias", "mlp_bias"))
    for key, value in (("attention_bias", attention), ("mlp_bias", mlp)):
        if not isinstance(value, bool):
            raise _WrongError(key, value, "must be true or false")
    if mlp and not attention:
        raise _WrongError("mlp_bias", mlp, "is not computed here without attention_bias", "False is")
    told["biases"] = "attention" if attention and not mlp else attention


def _tell_llama(model: ModelConfig) -> dict[str, Any]:
    biases = {"attention_bias": model.has_biases("output"), "mlp_bias": model.has_biases("mlp")}
    return {**biases, "head_dim": model.head_size, **_tell_rope(model)}


def _qwen_window(config: Mapping[str, Any], told: dict[str, Any], path: Path) -> None:
    """Layers from `max_window_layers` on see through the window; here all layers do, or none."""
    slides, first = config.get("use_sliding_window", False), config.get("max_window_layers", 28)
    if not isinstance(slides, bool):
        raise _WrongError("use_sliding_window", slides, "must be true or false")
    if not _is_number(first):
        raise _WrongError("max_window_layers", first, "must be an integer")
    window, layers = told["window"] if slides else None, told["layers"]
    kinds = config.get("layer_types")
    if kinds is not None:
        all_of = {kind: [kind] * layers for kind in ("full_attention", "sliding_attention")}
        if kinds not in all_of.values() or (kinds == all_of["sliding_attention"]) != (window is not None):
            raise _WrongError("layer_types", kinds, "is not computed here", "one kind of attention in all layers is")
    elif window is not None and 0 < first < layers:
        raise _WrongError("max_window_layers", first, "is not computed here", f"0 is, or at least {layers}")
    elif first >= layers:
        window = None
    told["window"] = window


def _qwen3_biases(config: Mapping[str, Any], told: dict[str, Any], path: Path) -> None:
    _llama_biases({"attention_bias": config.get("attention_bias", False)}, told, path)


def _tell_qwen(model: ModelConfig) -> dict[str, Any]:
    first = model.layers if model.window is None else 0
    return {"use_sliding_window": model.window is not None, "max_window_layers": first, **_tell_rope(model)}


def _tell_qwen3(model: ModelConfig) -> dict[str, Any]:
    return {**_tell_qwen(model), "head_dim": model.head_size, "attention_bias": model.has_biases("output")}


def _tell_rope(model: ModelConfig) -> dict[str, Any]:
    """As all versions of transformers read it."""
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_theta": model.rotary_base, "rope_scaling": None}
    factors = {key: getattr(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor")}
    slowed = {"rope_type": "llama3", **factors, "original_max_position_embeddings": scaling.original_sequence}
    return {"rope_theta": model.rotary_base, "rope_scaling": slowed}


_SHARED = {"vocab": "vocab_size", "init_std": "initializer_range", "tied_head": "tie_word_embeddings"}
_LIKE_GPT2 = {
    **_SHARED,
    "activation": "activation_function",
    "norm_eps": "layer_norm_epsilon",
    "dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
}
_DEFAULTS = {
    "ffn": None,
    "tied_head": True,
    "norm_eps": 1e-5,
    "init_std": 0.02,
    "dropout": 0.1,
    "attention_dropout": 0.1,
}
_GPT2_ONLY = {
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_SIZES = {"hidden": "hidden_size", "ffn": "intermediate_size", "sequence": "max_position_embeddings"}
_LIKE_LLAMA = {
    **_SHARED,
    **_SIZES,
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "activation": "hidden_act",
    "norm_eps": "rms_norm_eps",
    "attention_dropout": "attention_dropout",
}
_HEAD_DIM = {"head_dim": "head_dim"}
_WINDOW = {"window": "sliding_window"}
_LLAMA_DEFAULTS = {
    "kv_heads": None,
    "head_dim": None,
    "window": 4096,
    "tied_head": False,
    "norm_eps": 1e-6,
    "init_std": 0.02,
    "attention_dropout": 0.0,
    "activation": "silu",
}
_LLAMA_MEANS = {
    "kind": "gpt",
    "norm": "rmsnorm",
    "norm_placement": "pre",
    "positions": "rope",
    "residual_scores": False,
    "final_norm": "before_query",
}
_ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_parameters")
_QWEN_FIELDS = ("use_sliding_window", "max_window_layers", "layer_types", *_ROPE_FIELDS)
_LLAMA_ONLY = {"partial_rotary_factor": (1.0, None)}
KINDS = {
    "gpt2": Kind(
        GPT2_NAMES,
        "transformer.",
        _LIKE_GPT2
        | {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "sequence": "n_positions", "ffn": "n_inner"},
        {**GPT2, "kind": "gpt"},
        {**_DEFAULTS, "activation": "gelu_new"},
        {"architectures": ["GPT2LMHeadModel"]},
        only=_GPT2_ONLY,
        # the second is a way to compute the same in 16 bits
        harmless=("summary_*", "reorder_and_upcast_attn"),
        derives=(_gpt2_fields,),
        derived=("embd_pdrop", "n_ctx"),
        tells=lambda model: {"embd_pdrop": model.dropout},
    ),
    "gpt_pangu": Kind(
        PANGU_NAMES,
        "transformer.",
        _LIKE_GPT2 | _SIZES | {"layers": "num_layers", "heads": "num_heads"},
        {key: value for key, value in PANGU.items() if key != "positions"},
        {**_DEFAULTS, "activation": "gelu"},
        {
            "architectures": ["PanguForCausalLM"],
            "auto_map": {
                "AutoConfig": f"{CODE.stem}.PanguConfig",
                "AutoModelForCausalLM": f"{CODE.stem}.PanguForCausalLM",
            },
        },
        only=_GPT2_ONLY,
        choices={"positions": ("learned", "rope")},
        derives=(_gpt2_fields, _pangu_positions),
        derived=("embd_pdrop", "position_embedding_type", "rope_theta"),
        tells=_tell_pangu,
    ),
    "llama": Kind(
        LLAMA_NAMES,
        "model.",
        _LIKE_LLAMA | _HEAD_DIM,
        {**_LLAMA_MEANS, "window": None, "qk_norm": False},
        _LLAMA_DEFAULTS,
        {"architectures": ["LlamaForCausalLM"]},
        only={**_LLAMA_ONLY, "sliding_window": (None,)},
        harmless=("pretraining_tp", "max_sequence_length"),
        choices={"biases": (False, True, "attention")},
        derives=(_rope, _head_dim, _llama_biases),
        derived=("attention_bias", "mlp_bias", *_ROPE_FIELDS),
        tells=_tell_llama,
    ),
    "mistral": Kind(
        LLAMA_NAMES,
        "model.",
        _LIKE_LLAMA | _HEAD_DIM | _WINDOW,
        {**_LLAMA_MEANS, "qk_norm": False, "biases": False},
        {**_LLAMA_DEFAULTS, "kv_heads": 8},
        {"architectures": ["MistralForCausalLM"]},
        only=_LLAMA_ONLY,
        derives=(_rope, _head_dim),
        derived=_ROPE_FIELDS,
        tells=_tell_rope,
    ),
    "qwen2": Kind(
        LLAMA_NAMES,
        "model.",
        _LIKE_LLAMA | _WINDOW,
        {**_LLAMA_MEANS, "qk_norm": False, "biases": "qkv", "head_dim": None},
        {**_LLAMA_DEFAULTS, "kv_heads": 32},
        {"architectures": ["Qwen2ForCausalLM"]},
        only={**_LLAMA_ONLY, "use_mrope": (False,)},
        derives=(_rope, _qwen_window),
        derived=_QWEN_FIELDS,
        tells=_tell_qwen,
    ),
    "qwen3": Kind(
        LLAMA_NAMES,
        "model.",
        _LIKE_LLAMA | _HEAD_DIM | _WINDOW,
        {**_LLAMA_MEANS, "qk_norm": True},
        {**_LLAMA_DEFAULTS, "kv_heads": 32, "head_dim": 128},
        {"architectures": ["Qwen3ForCausalLM"]},
        only=_LLAMA_ONLY,
        choices={"biases": (False, "attention")},
        derives=(_rope, _head_dim, _qwen_window, _qwen3_biases),
        derived=("attention_bias", *_QWEN_FIELDS),
        tells=_tell_qwen3,
    ),
}
_SAME = {"pangu": "gpt_pangu"}
"""Other names of these types."""
_WHOLE = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "sequence", "ffn", "window")
_NULL = ("kv_heads", "head_dim", "window")
"""Sizes that may be null."""


def kind_of(model: ModelConfig) -> str:
    """`model_type` of a model. Raises ConfigError if no type can express it."""
    if model.kind == "pangu" or model.norm == "layernorm":
        name = "gpt_pangu" if model.kind == "pangu" else "gpt2"
    elif model.qk_norm:
        name = "qwen3"
    elif model.biases == "qkv":
        name = "qwen2"
    else:
        name = "llama" if model.window is None else "mistral"
    like_gpt2 = name in ("gpt_pangu", "gpt2")
    activations = ("gelu_tanh", "gelu", "fast_gelu") if like_gpt2 else ("swiglu",)
    kind = KINDS[name]
    require_expressible(model, f"transformers' {name}", kind.means, activation=activations, **kind.choices)
    return name


def kind_in(config: Mapping[str, Any], path: Path) -> Kind:
    """The type of a config.json. Raises UserError for one that is none of ours."""
    name = config.get("model_type", "")
    known = _SAME.get(name, name) if isinstance(name, str) else ""
    if known not in KINDS:
        raise UserError(f"{path}: model_type = {shown(name)}: cannot be converted; {', '.join(KINDS)} can")
    return KINDS[known]


def read_model(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Keys of `ModelConfig` that a config.json tells. Raises UserError for a model that is none of ours."""
    kind = kind_in(config, path)
    if missing := [key for ours, key in kind.keys.items() if key not in config and ours not in kind.defaults]:
        raise UserError(f"{path}: {', '.join(missing)} must be given")
    told = {ours: config.get(theirs, kind.defaults.get(ours)) for ours, theirs in kind.keys.items()}
    refuse(path, [problem for ours, value in told.items() if (problem := _wrong(kind, ours, value))])
    check_fields(config, path, {*kind.keys.values(), *kind.derived}, HARMLESS + kind.harmless, {**ONLY, **kind.only})
    try:
        for derive in kind.derives:
            derive(config, told, path)
    except _WrongError as error:
        refuse(path, [error.problem])
    if kind is KINDS["gpt_pangu"]:
        told["vocab"] = PANGU_VOCAB.get(told["vocab"], told["vocab"])
    activations = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
    return {"dropout": 0.0, **told, **kind.means, "activation": activations[told["activation"]]}


def _wrong(kind: Kind, ours: str, value: object) -> Problem | None:
    """What is wrong with the value of a key, of whatever type it is."""
    rule = ""
    if ours in _WHOLE:
        null = ours in _NULL or (ours in kind.defaults and kind.defaults[ours] is None)
        right = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= LARGEST
        if not (right or (null and value is None)):
            rule = f"must be an integer from 1 to {LARGEST}{' or null' if null else ''}"
    elif ours == "tied_head":
        rule = "" if isinstance(value, bool) else "must be true or false"
    elif ours == "activation":
        names = ["silu"] if kind.naming is LLAMA_NAMES else [*list(ACTIVATIONS.values())[:3], "gelu_pytorch_tanh"]
        rule = "" if value in names else f"is none of {', '.join(names)}"
    elif not _is_number(value) or not 0 <= value < HUGE:  # type: ignore[operator]
        rule = "must be a number of at least 0"
    return Problem(kind.keys[ours], shown(value), rule) if rule else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def write_model(model: ModelConfig) -> dict[str, Any]:
    """What config.json says of a model. Raises ConfigError if transformers has no such model."""
    name = kind_of(model)
    kind = KINDS[name]
    full = {
        "ffn": model.ffn_size,
        "activation": ACTIVATIONS[model.activation],
        "kv_heads": model.kv_heads or model.heads,
        "head_dim": model.head_size,
    }
    told = {theirs: full.get(ours, getattr(model, ours)) for ours, theirs in kind.keys.items()}
    return {"model_type": name, **told, **kind.tells(model), **kind.writes}
