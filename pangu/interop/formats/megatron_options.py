"""Megatron's options, the `args` of its checkpoints (listed in megatron_options.yaml), as read and written."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pangu.common.errors import Problem, UserError
from pangu.config.model import ModelConfig
from pangu.config.rope import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling
from pangu.interop.formats.fields import check_fields, disagreements, load_table, read_fields, refuse, wrong_field
from pangu.interop.formats.megatron_experts import expert_of, experts_agree, read_experts, write_experts
from pangu.interop.formats.megatron_latent import Options, Shapes, latent_agrees, read_latent, write_latent
from pangu.interop.formats.stored import ABSENT, PANGU_VOCAB

ROWS = 128
"""Unit of Megatron-Core's vocabulary padding: to a multiple of this times the tensor-parallel size."""
ROPE_SCALING = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_sequence=8192)
"""RoPE scaling of Megatron-Core (`--use-rope-scaling`), in which only the factor is an option."""
INTERPOLATION = "rotary_seq_len_interpolation_factor"
"""Option of linear scaling."""
YARN = {
    "factor": "rotary_scaling_factor",
    "original_sequence": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "truncate": "yarn_correction_range_round_to_int",
}
"""Options of YaRN by fields of `YarnScaling`."""
TOP = "language_model.topQueryEmbedding.top_query_embeddings.weight"
"""Name of PanGu-α's query embedding, which no GPT has."""

_LAYER = re.compile(r"layers\.(\d+)\.")


def read_model(
    options: Options, shapes: Shapes, ranks: int, layout: Mapping[str, Sequence[Any]], where: object
) -> dict[str, Any]:
    """Return keys of `ModelConfig` of a checkpoint.

    `options`: Megatron's, as far as the files have them. `shapes`: of all layers' tensors on one of the `ranks`
    tensor-parallel ranks. `layout`: options of the layout, with the values that fit the number of files. `where`: start
    of messages. Raises UserError, naming every option that is unsupported or contradicts the tensors, or a tensor that
    every such model has and this one lacks.
    """
    table = load_table("megatron_options")
    check_fields(options, where, table["used"].split(), table["harmless"].split(), table["only"])
    names = {key: option for option, key in table["keys"].items() if options.get(option) is not None}
    keys = read_fields(ModelConfig, options, names, where)
    if any(".router.weight" in name for name in shapes):
        experts = {key: value for key, value in options.items() if str(key).startswith("moe_")}
        check_fields(experts, where, table["used"].split(), table["experts_harmless"].split(), table["experts_only"])
    layers, pangu = len({number[1] for name in shapes if (number := _LAYER.search(name))}), TOP in shapes
    try:
        keys = (_port if pangu else _core)(options, shapes, ranks, keys)
        agree = dict(layout) | {
            "num_layers": [layers],
            "encoder_num_layers": [layers, None],
            "hidden_size": [keys["hidden"]],
            "ffn_hidden_size": [keys["ffn"], None],
        }
        if (heads := keys.get("heads")) and not keys.get("latent"):
            head = keys["hidden"] / heads if pangu else keys["head_dim"]
            agree |= {"kv_channels": [head, None], "softmax_scale": [None, 1 / math.sqrt(head)]}
        if not pangu:
            agree |= _core_agrees(options, keys, shapes)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    except KeyError as error:
        raise UserError(
            f"{where}: neither a PanGu-α of Megatron 1.1 nor a GPT of Megatron-Core: {error} is missing"
        ) from error
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"{where}: the tensors do not have the shapes of a GPT or PanGu-α of Megatron") from error
    refuse(where, disagreements(options, agree, "does not match the tensors; use {}"))
    return keys | {"layers": layers + pangu}


def _port(options: Options, shapes: Shapes, ranks: int, numbers: dict[str, Any]) -> dict[str, Any]:
    rows, hidden = shapes["language_model.embedding.word_embeddings.weight"]
    keys = {
        "kind": "pangu",
        "hidden": hidden,
        "vocab": numbers.get("vocab", PANGU_VOCAB.get(rows * ranks, rows * ranks)),
        "sequence": shapes[TOP][0],
        "ffn": shapes["language_model.transformer.topQueryLayer.mlp.dense_h_to_4h.weight"][0] * ranks,
    }
    if gelus := [options[name] is True for name in ("bias_gelu_fusion", "openai_gelu") if name in options]:
        keys["activation"] = "gelu_tanh" if any(gelus) else "gelu"
    others = ("rope_base", "partial_rotary_factor", "experts_per_token")
    return {key: value for key, value in numbers.items() if key not in others} | keys


def _core(options: Options, shapes: Shapes, ranks: int, numbers: dict[str, Any]) -> dict[str, Any]:
    rows, hidden = shapes["embedding.word_embeddings.weight"]
    layer = "decoder.layers.0.self_attention."
    experts = read_experts(options, shapes, ranks, numbers)
    dense = [name for name in shapes if re.search(r"layers\.\d+\.mlp\.linear_fc2\.weight$", name)]
    ffn = shapes[dense[0]][1] * ranks if dense else numbers.get("ffn")
    down = dense[0] if dense else expert_of(shapes)
    gated = shapes[down.replace("linear_fc2", "linear_fc1")][0] == 2 * shapes[down][1]
    biases = True if f"{layer}linear_proj.bias" in shapes else "qkv" if f"{layer}linear_qkv.bias" in shapes else False
    # the fused kernel is the approximation by tanh; it needs biases
    tanh = biases is True and options.get("bias_gelu_fusion") is True
    squared = options.get("squared_relu") is True
    plain: object = ("squared_relu" if squared else "gelu_tanh" if tanh else "gelu") if options else ABSENT
    table = shapes.get("embedding.position_embeddings.weight")
    keys: dict[str, Any] = {
        "kind": "gpt",
        "hidden": hidden,
        # the rows may include padding
        "vocab": numbers.get("vocab", rows * ranks if options or rows * ranks % ROWS else ABSENT),
        "ffn": ffn,
        "activation": "swiglu" if gated else plain,
        "norm": "layernorm" if "decoder.final_layernorm.bias" in shapes else "rmsnorm",
        "norm_eps": numbers.get("norm_eps", 1e-5 if options else ABSENT),
        "biases": biases,
        "tied_head": "output_layer.weight" not in shapes,
        "positions": "learned" if table else "rope",
        "rope_base": None if table else numbers.get("rope_base", 10000.0 if options else ABSENT),
        "rope_scaling": None if table else _rope_scaling(options) if options else ABSENT,
        "partial_rotary_factor": 1.0 if table else numbers.get("partial_rotary_factor", 1.0 if options else ABSENT),
        "qk_norm": f"{layer}q_layernorm.weight" in shapes,
    }
    if table:
        keys["sequence"] = table[0]
    elif not options:
        keys["sequence"] = ABSENT
    latent = read_latent(options, shapes, ranks)
    if latent["latent"] is not None:
        if heads := numbers.get("heads"):
            latent["latent"] = latent["latent"](heads)
        return numbers | keys | latent | experts
    query = shapes[f"{layer}linear_proj.weight"][1] * ranks
    qkv = shapes[f"{layer}linear_qkv.weight"][0] * ranks
    if keys["qk_norm"]:
        keys["heads"] = query // shapes[f"{layer}q_layernorm.weight"][0]
    keys["head_dim"] = lambda heads: query // heads
    keys["kv_heads"] = lambda heads: (qkv - query) * heads // query // 2
    if heads := keys.get("heads", numbers.get("heads")):
        keys |= {key: keys[key](heads) for key in ("head_dim", "kv_heads")}
    return numbers | keys | latent | experts


def _rope_scaling(options: Options) -> RopeScaling | None:
    """Return the scaling that the options name, or None. Raises UserError for one that we do not compute."""
    yarn, llama = options.get("position_embedding_type") == "yarn", options.get("use_rope_scaling") is True
    linear = not yarn and options.get(INTERPOLATION) not in (None, 1)
    if llama and linear:
        raise wrong_field("args", INTERPOLATION, options[INTERPOLATION], "is not supported with use_rope_scaling")
    if yarn:
        # there all of a head rotates, whatever its share
        only: dict[str, Sequence[Any]] = {"rotary_percent": [None, 1.0]}
        only |= {f"{start}mscale": [None, 1.0] for start in ("", "yarn_")}
        only |= {f"{start}mscale_all_dim": [None, 0.0] for start in ("", "yarn_")}
        only["yarn_rotary_scaling_factor"] = [None, options.get("rotary_scaling_factor")]
        refuse("args", disagreements(options, only, "is not supported with yarn; use {}"))
    start: RopeScaling = YarnScaling(name="yarn", factor=1.0, original_sequence=4096) if yarn else ROPE_SCALING
    names = YARN if yarn else {"factor": "rope_scaling_factor"}
    if linear:
        start, names = LinearScaling(name="linear", factor=1.0), {"factor": INTERPOLATION}
    return replace(start, **read_fields(type(start), options, names, "args")) if yarn or llama or linear else None


def inexpressible_scaling(model: ModelConfig) -> list[Problem]:
    """Return a problem if Megatron-Core has no options for the RoPE scaling of a model."""
    scaling, rule, fix = model.rope_scaling, "", ""
    if model.latent is not None:
        return []
    if isinstance(scaling, Llama3Scaling) and scaling != replace(ROPE_SCALING, factor=scaling.factor):
        rule = f"Megatron-Core has only {replace(ROPE_SCALING, factor=scaling.factor)}"
    elif isinstance(scaling, LinearScaling) and scaling.factor % 1:
        rule, fix = "Megatron-Core interpolates positions only by whole factors", f"use factor = {scaling.factor:.0f}"
    elif isinstance(scaling, YarnScaling) and scaling.attention_factor is not None:
        rule, fix = "Megatron-Core's YaRN has only the paper's attention_factor", "use attention_factor = null"
    elif isinstance(scaling, YarnScaling) and model.partial_rotary_factor != 1:
        rule, fix = "Megatron-Core's YaRN always rotates a full head", "use model.partial_rotary_factor = 1"
    return [Problem("model.rope_scaling", scaling, rule, fix)] if rule else []


def _core_agrees(options: Options, keys: Mapping[str, Any], shapes: Shapes) -> dict[str, Sequence[Any]]:
    agree: dict[str, Sequence[Any]] = {option: [value] for option, value in _implied(keys).items()}
    agree |= {
        "add_qkv_bias": [keys["biases"] is not False, keys["biases"] == "qkv"],
        "gated_linear_unit": agree["swiglu"],
        "use_rope_scaling": [*agree["use_rope_scaling"], False],
        "num_moe_experts": agree["num_experts"],
    }
    if keys["experts"] is not None:
        agree |= experts_agree(options, keys, shapes)
    if keys["positions"] == "learned":
        agree["max_position_embeddings"] = [keys["sequence"]]
    agree |= latent_agrees(keys)
    if "heads" in keys and keys["latent"] is None:
        grouped = keys["kv_heads"] != keys["heads"]
        agree |= {"group_query_attention": [grouped, True], "num_attention_heads": [keys["heads"]]}
        if options.get("group_query_attention") is True:
            agree["num_query_groups"] = [keys["kv_heads"]]
    return agree


def _implied(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the tensors imply, by keys of `ModelConfig`."""
    scaling = keys["rope_scaling"]
    rope = "yarn" if isinstance(scaling, YarnScaling) and keys["latent"] is None else "rope"
    return {
        "normalization": "RMSNorm" if keys["norm"] == "rmsnorm" else "LayerNorm",
        "add_bias_linear": keys["biases"] is True,
        "add_qkv_bias": keys["biases"] == "qkv",
        "swiglu": keys["activation"] == "swiglu",
        "squared_relu": keys["activation"] == "squared_relu",
        "position_embedding_type": rope if keys["positions"] == "rope" else "learned_absolute",
        "untie_embeddings_and_output_weights": not keys["tied_head"],
        "qk_layernorm": keys["qk_norm"],
        "use_rope_scaling": isinstance(scaling, Llama3Scaling),
        "num_experts": keys["experts"],
    }


def write_options(model: ModelConfig, rows: int, ranks: int, grouped: bool = False) -> argparse.Namespace:
    """Return Megatron's options of a model; `rows` include padding, `grouped` puts a layer's experts in one module."""
    pangu, tanh = model.kind == "pangu", model.activation == "gelu_tanh"
    rope = model.positions == "rope"
    values: dict[str, Any] = {
        option: getattr(model, key) for option, key in load_table("megatron_options")["keys"].items()
    }
    values |= _implied(vars(model)) | {
        "num_layers": model.layers - pangu,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "seq_length": model.sequence,
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": ROWS,
        "model_parallel_size": ranks,
        "tensor_model_parallel_size": ranks,
        "pipeline_model_parallel_size": 1,
        "group_query_attention": model.kv_heads not in (None, model.heads),
        "num_query_groups": model.kv_heads or model.heads,
        "rope_scaling_factor": (model.rope_scaling or ROPE_SCALING).factor,
        INTERPOLATION: int(model.rope_scaling.factor) if isinstance(model.rope_scaling, LinearScaling) else None,
        "moe_router_topk": model.num_chosen,
        # Megatron-Core knows the approximation by its fused kernel alone, the port by either
        "bias_gelu_fusion": tanh and not pangu,
        "openai_gelu": tanh and pangu,
        "add_position_embedding": not rope,
        "use_rotary_position_embeddings": rope,
        "rotary_base": model.rotary_base,
    }
    if isinstance(model.rope_scaling, YarnScaling) and model.latent is None:
        values |= {option: getattr(model.rope_scaling, key) for key, option in YARN.items()}
        values |= {"mscale": 1.0, "mscale_all_dim": 0.0}
    values |= write_latent(model) | write_experts(model, ranks, grouped)
    return argparse.Namespace(**values)
