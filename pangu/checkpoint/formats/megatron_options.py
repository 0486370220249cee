"""Megatron's options, the `args` of its checkpoints, as read and written. megatron_options.yaml lists all of them; what
changes the function is read here or must have the value that we compute."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pangu.checkpoint.formats.fields import check_fields, disagreements, load_table, refuse
from pangu.checkpoint.formats.stored import PANGU_VOCAB
from pangu.config.build import read_keys
from pangu.config.errors import UserError
from pangu.config.model import ModelConfig

ROWS = 128
"""Megatron-Core pads the vocabulary to a multiple of this times the tensor-parallel size."""
TOP = "language_model.topQueryEmbedding.top_query_embeddings.weight"
"""The query embedding of PanGu-α, which no GPT has."""

_NUMBERS = {
    "num_attention_heads": "heads",
    "hidden_dropout": "dropout",
    "attention_dropout": "attention_dropout",
    "norm_epsilon": "norm_eps",
    "layernorm_epsilon": "norm_eps",
    "init_method_std": "init_std",
    "rotary_base": "rope_base",
    "max_position_embeddings": "sequence",
    "vocab_size": "vocab",
}
"""Options that tell a key of `ModelConfig` by themselves. Versions differ in the name of epsilon."""

_Options = Mapping[str, Any]
_Shapes = Mapping[str, tuple[int, ...]]


def read_model(
    options: _Options, shapes: _Shapes, ranks: int, layout: Mapping[str, Sequence[Any]], where: object
) -> dict[str, Any]:
    """Keys of `ModelConfig` of a checkpoint.

    `options`: Megatron's, as far as the files have them. `shapes`: one of the `ranks` tensor-parallel ranks' tensors of
    all layers. `layout`: options of the layout, with the values that fit the number of files. `where` stands at the
    head of messages. Raises UserError, naming every option that we do not compute or that does not agree with the
    tensors, or a tensor that every such model has and this one lacks.
    """
    table = load_table("megatron_options")
    check_fields(options, where, table["used"].split(), table["harmless"].split(), table["only"])
    names = {key: option for option, key in _NUMBERS.items() if options.get(option) is not None}
    keys, problems = read_keys(ModelConfig, {key: options[option] for key, option in names.items()}, names)
    refuse(where, problems)
    try:
        keys = (_port if TOP in shapes else _core)(options, shapes, ranks, keys)
    except KeyError as error:
        raise UserError(
            f"{where}: neither a PanGu-α of Megatron 1.1 nor a GPT of Megatron-Core: no {error} in it"
        ) from error
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"{where}: the tensors have other shapes than those of a GPT or PanGu-α of Megatron") from error
    layers = len({number[1] for name in shapes if (number := re.search(r"layers\.(\d+)\.", name))})
    agree = dict(layout) | {
        "num_layers": [layers],
        "encoder_num_layers": [layers, None],
        "hidden_size": [keys["hidden"]],
        "ffn_hidden_size": [keys["ffn"], None],
    }
    if heads := keys.get("heads"):
        head = keys["hidden"] / heads
        agree |= {"kv_channels": [head, None], "softmax_scale": [None, 1 / math.sqrt(head)]}
    if TOP not in shapes:
        agree |= _core_agrees(options, keys)
    refuse(where, disagreements(options, agree, "does not agree with the tensors; {} does"))
    return keys | {"layers": layers + (TOP in shapes)}


def _port(options: _Options, shapes: _Shapes, ranks: int, numbers: dict[str, Any]) -> dict[str, Any]:
    """Keys from PanGu-α's tensors and options."""
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
    return {key: value for key, value in numbers.items() if key != "rope_base"} | keys


def _core(options: _Options, shapes: _Shapes, ranks: int, numbers: dict[str, Any]) -> dict[str, Any]:
    """Keys from a GPT's tensors and options."""
    rows, hidden = shapes["embedding.word_embeddings.weight"]
    layer = "decoder.layers.0."
    ffn = shapes[f"{layer}mlp.linear_fc2.weight"][1] * ranks
    gated = shapes[f"{layer}mlp.linear_fc1.weight"][0] * ranks == 2 * ffn
    biases = f"{layer}self_attention.linear_proj.bias" in shapes
    # the fused kernel is the approximation by tanh; it needs biases
    tanh = biases and options.get("bias_gelu_fusion") is True
    table = shapes.get("embedding.position_embeddings.weight")
    keys: dict[str, Any] = {
        "kind": "gpt",
        "hidden": hidden,
        "vocab": numbers.get("vocab", rows * ranks),
        "ffn": ffn,
        "activation": "swiglu" if gated else "gelu_tanh" if tanh else "gelu",
        "norm": "layernorm" if "decoder.final_layernorm.bias" in shapes else "rmsnorm",
        "biases": biases,
        "tied_head": "output_layer.weight" not in shapes,
        "positions": "learned" if table else "rope",
        "rope_base": None if table else numbers.get("rope_base", 10000.0),
    }
    if table:
        keys["sequence"] = table[0]
    if heads := numbers.get("heads"):
        qkv = shapes[f"{layer}self_attention.linear_qkv.weight"][0] * ranks
        keys["kv_heads"] = (qkv - hidden) * heads // hidden // 2
    return numbers | keys


def _core_agrees(options: _Options, keys: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Options that a GPT's tensors tell as well: what they say."""
    gated = keys["activation"] == "swiglu"
    agree: dict[str, Sequence[Any]] = {
        "normalization": ["LayerNorm" if keys["norm"] == "layernorm" else "RMSNorm"],
        "add_bias_linear": [keys["biases"]],
        "swiglu": [gated],
        "gated_linear_unit": [gated],
        "position_embedding_type": ["learned_absolute" if keys["positions"] == "learned" else "rope"],
        "untie_embeddings_and_output_weights": [not keys["tied_head"]],
    }
    if keys["positions"] == "learned":
        agree["max_position_embeddings"] = [keys["sequence"]]
    if "kv_heads" in keys:
        grouped = keys["kv_heads"] != keys["heads"]
        agree["group_query_attention"] = [grouped, True]
        if options.get("group_query_attention") is True:
            agree["num_query_groups"] = [keys["kv_heads"]]
    return agree


def write_options(model: ModelConfig, rows: int, ranks: int) -> argparse.Namespace:
    """Megatron's options of the architecture; `rows` of the word embedding include padding."""
    pangu, tanh = model.kind == "pangu", model.activation == "gelu_tanh"
    rope = model.positions == "rope"
    values = {option: getattr(model, key) for option, key in _NUMBERS.items()} | {
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
        "add_bias_linear": model.biases,
        # Megatron-Core knows the approximation by its fused kernel alone, the port by either
        "bias_gelu_fusion": tanh and not pangu,
        "openai_gelu": tanh and pangu,
        "swiglu": model.activation == "swiglu",
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "add_position_embedding": not rope,
        "use_rotary_position_embeddings": rope,
        "rotary_base": model.rotary_base,
        "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": not model.tied_head,
    }
    return argparse.Namespace(**values)
