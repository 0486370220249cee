"""Names of Megatron's tensors: the PanGu-α port of Megatron-LM 1.1 and GPT of Megatron-Core."""

from __future__ import annotations

import math
from typing import Any

from pangu.checkpoint.formats.megatron_options import ROWS, TOP
from pangu.checkpoint.formats.stored import (
    PANGU,
    PLAIN,
    Naming,
    Stored,
    make_table,
    one_by_one,
    require_expressible,
)
from pangu.config.errors import UserError
from pangu.config.model import ModelConfig


def _port(model: ModelConfig) -> Naming:
    trunk = "language_model.transformer."
    return Naming(
        {
            "embedding.word.weight": "language_model.embedding.word_embeddings.weight",
            "embedding.position.weight": "language_model.embedding.position_embeddings.weight",
            "query_embedding.weight": TOP,
            "final_norm.weight": f"{trunk}final_layernorm.weight",
            "final_norm.bias": f"{trunk}final_layernorm.bias",
        },
        one_by_one(
            "input_layernorm",
            *("attention.query", "attention.key", "attention.value", "attention.dense"),
            *("post_attention_layernorm", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
        ),
        lambda layer: trunk + (f"layers.{layer}." if layer < model.layers - 1 else "topQueryLayer."),
        columns=("attention.query", "attention.key", "attention.value", "mlp.dense_h_to_4h"),
        rows=("attention.dense", "mlp.dense_4h_to_h"),
    )


def _core(model: ModelConfig, tensor: int) -> Naming:
    up = ("mlp.gate", "mlp.up") if model.activation == "swiglu" else ("mlp.up",)
    return Naming(
        {
            "embedding.word.weight": "embedding.word_embeddings.weight",
            "embedding.position.weight": "embedding.position_embeddings.weight",
            "final_norm.weight": "decoder.final_layernorm.weight",
            "final_norm.bias": "decoder.final_layernorm.bias",
            "head.weight": "output_layer.weight",
        },
        {
            "input_layernorm": ("attention_norm",),
            "self_attention.linear_qkv": ("attention.query", "attention.key", "attention.value"),
            "self_attention.linear_proj": ("attention.output",),
            "pre_mlp_layernorm": ("mlp_norm",),
            "mlp.linear_fc1": up,
            "mlp.linear_fc2": ("mlp.down",),
        },
        lambda layer: f"decoder.layers.{layer}.",
        columns=("self_attention.linear_qkv", "mlp.linear_fc1"),
        rows=("self_attention.linear_proj", "mlp.linear_fc2"),
        # rows of the queries, keys and values that belong together; gate and up of each rank
        groups={"self_attention.linear_qkv": model.kv_heads or model.heads, "mlp.linear_fc1": tensor},
    )


def table(model: ModelConfig, tensor: int) -> list[Stored]:
    """The tensors of a model. Raises UserError if Megatron has no such model or cannot cut it so."""
    if model.kind == "pangu":
        require_expressible(model, "Megatron's PanGu-α port", PANGU, activation=["gelu_tanh", "gelu"])
    else:
        # the approximation by tanh is a kernel fused with the bias
        gelus = ["gelu_tanh", "gelu"] if model.biases else ["gelu"]
        choices: dict[str, list[Any]] = {"positions": ["learned", "rope"], "activation": [*gelus, "swiglu"]}
        choices["biases"] = [True, False]
        require_expressible(model, "Megatron-Core", PLAIN, **choices)
    if (model.kv_heads or model.heads) % tensor or model.ffn_size % tensor:
        raise UserError(
            f"tensor-parallel size {tensor}: must divide the {model.kv_heads or model.heads} (key) heads and the "
            f"feed-forward width {model.ffn_size}"
        )
    if model.kind == "pangu":
        # the released files have 40,064 rows, which every usual number of ranks divides
        return make_table(model, _port(model), math.lcm(ROWS, tensor), tensor)
    return make_table(model, _core(model, tensor), ROWS * tensor, tensor)


def plain_name(name: str) -> str:
    """A tensor's name as Megatron-Core has it without Transformer Engine, which fuses norms with what follows them."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def fused_name(name: str) -> str:
    """The opposite of `plain_name`."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
