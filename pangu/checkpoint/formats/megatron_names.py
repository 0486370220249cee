"""Names of Megatron's tensors: the PanGu-α port of Megatron-LM 1.1 and GPT of Megatron-Core."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from pangu.checkpoint.formats.fields import load_table
from pangu.checkpoint.formats.megatron_options import ROWS
from pangu.checkpoint.formats.stored import Stored, make_table, require_expressible
from pangu.config.errors import UserError
from pangu.config.model import ModelConfig

TRACKER = "latest_checkpointed_iteration.txt"
"""Names the newest iteration of a folder for `--load`."""


def table(model: ModelConfig, tensor: int) -> list[Stored]:
    """The tensors of a model. Raises UserError if Megatron has no such model or cannot shard it so."""
    pangu, heads = model.kind == "pangu", model.kv_heads or model.heads
    name = "megatron_pangu" if pangu else "megatron_core"
    # Megatron-Core's approximation by tanh is a kernel fused with the bias
    choices: dict[str, list[Any]] = {"activation": ["gelu_tanh", "gelu"] if pangu or model.biases else ["gelu"]}
    if not pangu:
        choices = {"positions": ["learned", "rope"], "activation": [*choices["activation"], "swiglu"]}
        choices["biases"] = [True, False]
    label = "Megatron's PanGu-α port" if pangu else "Megatron-Core"
    require_expressible(model, label, load_table("tensor_names")[name]["means"], **choices)
    if heads % tensor or model.ffn_size % tensor:
        raise UserError(
            f"tensor-parallel size {tensor}: must divide the {heads} (key) heads and the "
            f"feed-forward width {model.ffn_size}"
        )
    if pangu:
        # the released files have 40,064 rows, which every usual number of ranks divides
        return make_table(model, name, math.lcm(ROWS, tensor), tensor)
    # rows of the queries, keys and values that belong together; gate and up of each rank
    groups = {"self_attention.linear_qkv": heads, "mlp.linear_fc1": tensor}
    return make_table(model, name, ROWS * tensor, tensor, groups)


def begin_release(path: Path) -> Path:
    """Begin a folder for `--load`, marked as a release; returns the folder of its only iteration."""
    path.mkdir(parents=True)
    (path / TRACKER).write_text("release", encoding="utf-8")
    return path / "release"


def plain_name(name: str) -> str:
    """A tensor's name as Megatron-Core has it without Transformer Engine, which fuses norms with what follows them."""
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def fused_name(name: str) -> str:
    """The inverse of `plain_name`."""
    name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    return name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
