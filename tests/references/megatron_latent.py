"""Logits of a checkpoint of Megatron-Core with latent attention, in fp64, from its options and tensors alone.

Written down from what its modules compute: `MLASelfAttention`, `YarnRotaryEmbedding`, `TopKRouter`, `MoELayer`. Shares
no code with the package.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn import functional as F

Tensors = dict[str, Tensor]


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm with the epsilon of the tests."""
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def mscale(factor: float, scale: float) -> float:
    """YaRN's growth of attention with the logarithm of the factor."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1


def turned(x: Tensor, args: argparse.Namespace) -> Tensor:
    """Rotate [sequence, heads, elements], whose neighbors are pairs; the result has all first ones, then all second."""
    size, base = x.shape[-1], args.rotary_base
    speed = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    concentration = 1.0
    if args.rope_type == "yarn":
        factor, length = args.rotary_scaling_factor, args.original_max_position_embeddings
        low, high = (
            size * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (args.beta_fast, args.beta_slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), size - 1)
        slow = ((torch.arange(size // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
        speed = speed / factor * slow + speed * (1 - slow)
        concentration = mscale(factor, args.mscale) / mscale(factor, args.mscale_all_dim)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), speed)[:, None]
    first, second = x[..., 0::2], x[..., 1::2]
    cos, sin = angles.cos() * concentration, angles.sin() * concentration
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(x: Tensor, own: Tensors, args: argparse.Namespace) -> Tensor:
    """Latent attention of one sequence [sequence, hidden]."""
    nope, rope, heads = args.qk_head_dim, args.qk_pos_emb_head_dim, args.num_attention_heads
    if args.q_lora_rank is None:
        query = x @ own["linear_q_proj.weight"].T
    else:
        short = rms_norm(x @ own["linear_q_down_proj.weight"].T, own["linear_q_up_proj.layer_norm_weight"])
        query = short @ own["linear_q_up_proj.weight"].T
    down = x @ own["linear_kv_down_proj.weight"].T
    latent, shared = down.split([args.kv_lora_rank, rope], dim=-1)
    latent = rms_norm(latent, own["linear_kv_up_proj.layer_norm_weight"])
    up = (latent @ own["linear_kv_up_proj.weight"].T).unflatten(-1, (heads, nope + args.v_head_dim))
    key, value = up.split([nope, args.v_head_dim], dim=-1)
    query, query_turns = query.unflatten(-1, (heads, nope + rope)).split([nope, rope], dim=-1)
    query = torch.cat([query, turned(query_turns, args)], dim=-1)
    key = torch.cat([key, turned(shared[:, None], args).expand(-1, heads, -1)], dim=-1)
    scale = mscale(args.rotary_scaling_factor, args.mscale_all_dim) ** 2 / math.sqrt(nope + rope)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -math.inf)
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1), value).flatten(1) @ own["linear_proj.weight"].T


def feed_forward(x: Tensor, own: Tensors, name: str) -> Tensor:
    """SwiGLU."""
    gate, up = (x @ own[f"{name}linear_fc1.weight"].T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ own[f"{name}linear_fc2.weight"].T


def mixture(x: Tensor, own: Tensors, args: argparse.Namespace) -> Tensor:
    """Experts and shared experts."""
    scores, count = x @ own["router.weight"].T, args.moe_router_topk
    sigmoid = args.moe_router_score_function == "sigmoid"
    scores = scores.sigmoid() if sigmoid else scores.softmax(-1)
    biased = scores + own["router.expert_bias"] if args.moe_router_enable_expert_bias else scores
    if args.moe_router_group_topk:
        groups, chosen = args.moe_router_num_groups, args.moe_router_group_topk
        sums = biased.unflatten(-1, (groups, -1)).topk(count // chosen).values.sum(-1)
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, sums.topk(chosen).indices, True)
        biased = biased.masked_fill(~allowed.repeat_interleave(biased.shape[-1] // groups, -1), -math.inf)
    mask = torch.zeros_like(scores).scatter(-1, biased.topk(count).indices, 1.0)
    weights = scores * mask
    if sigmoid or not args.moe_router_pre_softmax:
        weights = weights / weights.sum(-1, keepdim=True)
    weights = weights * (args.moe_router_topk_scaling_factor or 1.0)
    out = feed_forward(x, own, "shared_experts.")
    for expert in range(args.num_experts):
        out = out + weights[:, [expert]] * feed_forward(x, own, f"experts.local_experts.{expert}.")
    return out


def logits(tensors: Tensors, args: argparse.Namespace, ids: Tensor) -> Tensor:
    """Logits [sequence, words with padding] of one text."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    x = tensors["embedding.word_embeddings.weight"][ids]
    for layer in range(args.num_layers):
        start = f"decoder.layers.{layer}."
        own = {name.removeprefix(start): tensor for name, tensor in tensors.items() if name.startswith(start)}
        attended = {name.removeprefix("self_attention."): tensor for name, tensor in own.items()}
        x = x + attention(rms_norm(x, own["input_layernorm.weight"]), attended, args)
        mlp = {name.removeprefix("mlp."): tensor for name, tensor in own.items() if name.startswith("mlp.")}
        if "router.weight" in mlp:
            x = x + mixture(rms_norm(x, own["pre_mlp_layernorm.weight"]), mlp, args)
        else:
            x = x + feed_forward(rms_norm(x, mlp["linear_fc1.layer_norm_weight"]), mlp, "")
    return rms_norm(x, tensors["decoder.final_layernorm.weight"]) @ tensors["output_layer.weight"].T
