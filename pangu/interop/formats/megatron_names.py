"""Tensor names of Megatron: the PanGu-α port of Megatron-LM 1.1, and GPT of Megatron-Core."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pangu.common.errors import ConfigError, UserError
from pangu.config.model import ModelConfig
from pangu.interop.formats.card import card_name, write_card
from pangu.interop.formats.megatron_experts import inexpressible_router
from pangu.interop.formats.megatron_latent import inexpressible_latent
from pangu.interop.formats.megatron_options import ROWS, inexpressible_scaling
from pangu.interop.formats.stored import Job, Stored, inexpressible, make_table, router_bias

EXPERT = "mlp.experts.local_experts.{}."
"""Prefix of an expert's modules in model_types.yaml."""
TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the newest iteration of a folder for `--load`."""


def table(model: ModelConfig, tensor: int) -> list[Stored]:
    """Return the tensors of a model. Raises UserError if Megatron has no such model or cannot shard it like that."""
    pangu, heads = model.kind == "pangu", model.kv_heads or model.heads
    kind = "megatron_pangu" if pangu else "megatron_core" if model.latent is None else "megatron_core_latent"
    choices: dict[str, Sequence[Any]] = {}
    if not pangu and model.biases is True:
        # Megatron-Core's approximation by tanh is a kernel fused with the bias
        choices["activation"] = ["gelu_tanh", "gelu", "swiglu", "squared_relu"]
    if not pangu and model.router.score == "sigmoid":
        choices["router.balance"] = ["bias", "sequence", "global", "none"]
    problems = [*inexpressible(model, kind, **choices), *inexpressible_scaling(model)]
    if problems := [*problems, *inexpressible_latent(model), *inexpressible_router(model)]:
        raise ConfigError(problems)
    widths = {model.expert_size if model.has_experts(layer) else model.ffn_size for layer in range(model.layers)}
    # Megatron-Core splits the rows of queries, keys and values evenly, also over more ranks than key heads
    shared = 1 if pangu else model.ranks_per_key_head(tensor)
    if any(size % tensor for size in {model.heads, heads * shared, 2 * model.kv_size, *widths}):
        raise UserError(
            f"tensor-parallel size {tensor}: must divide the {heads} (key) heads"
            f"{f', or be a multiple that divides the {model.heads} heads,' * (heads < model.heads)} and the "
            f"feed-forward width {' and '.join(map(str, sorted(widths)))}"
        )
    if pangu:
        # the released files have 40,064 rows, which every usual number of ranks divides
        return make_table(model, kind, math.lcm(ROWS, tensor), ROWS * tensor - 1)
    # rows of the queries, keys and values that belong together; gate and up of each rank
    groups = {"self_attention.linear_qkv": heads, "mlp.linear_fc1": tensor, f"{EXPERT}linear_fc1": tensor}
    groups["mlp.shared_experts.linear_fc1"] = tensor
    tensors = make_table(model, kind, ROWS * tensor, ROWS * tensor - 1, groups)
    biases = {router_bias(layer) for layer in range(model.layers)} if model.router.balance != "bias" else set()
    return [stored for stored in tensors if stored.parts[0] not in biases]


def rank_table(model: ModelConfig, tensor: int) -> list[Stored]:
    """Return the tensors of new files; Megatron has latent attention with Transformer Engine alone."""
    tensors = table(model, tensor)
    return [replace(stored, name=fused_name(stored.name, model)) for stored in tensors] if model.latent else tensors


def grouped_table(model: ModelConfig, tensor: int) -> list[Stored]:
    """Return the tensors of a model with the experts of each layer in one module (`--moe-grouped-gemm`)."""
    one = r"local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)$"
    return [replace(stored, name=re.sub(one, r"\2.\3\1", stored.name)) for stored in rank_table(model, tensor)]


def begin_release(path: Path, job: Job, program: str, options: str) -> Path:
    """Create a folder for `--load` with its card, marked as a release; return the folder of its only iteration."""
    path.mkdir(parents=True)
    usage = f"{program} loads it with `--load {card_name(job)} {options} --finetune`."
    write_card(path / "README.md", job, job.config.model.kind, usage)
    (path / TRACKER).write_text("release", encoding="utf-8")
    return path / "release"


def plain_name(name: str) -> str:
    """Return a tensor's name in Megatron-Core without Transformer Engine's fused norms and grouped experts."""
    name = re.sub(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$", r"mlp.experts.local_experts.\3.\1.\2", name)
    name = re.sub(r"linear_(q|kv)_up_proj\.layer_norm_", r"\1_layernorm.", name)
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def fused_name(name: str, model: ModelConfig) -> str:
    """Return the name of a layer's tensor with Transformer Engine, which fuses no norm with experts."""
    if (layer := re.match(r"decoder\.layers\.(\d+)\.", name)) is None:
        return name
    if model.latent is None:
        name = name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
    else:
        name = re.sub(r"self_attention\.(q|kv)_layernorm\.", r"self_attention.linear_\1_up_proj.layer_norm_", name)
    experts = model.has_experts(int(layer[1]))
    return name if experts else name.replace("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")
