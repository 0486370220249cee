"""openPangu-Ultra-MoE and the multi-token prediction of DeepSeek-V3's files, written from their released code and the
papers; in plain lines over tensors of published names, and sharing nothing with the package."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * gain


class OpenPangu:
    """openPangu-Ultra-MoE: x + norm(sublayer(norm(x))), latent attention, sigmoid-routed experts."""

    def __init__(self, weights: Weights, config: Mapping[str, Any]) -> None:
        self.w, self.c = weights, config

    def hidden(self, ids: Tensor) -> Tensor:
        """[batch, sequence, hidden], normed, as the head reads it."""
        x = self.w["model.embed_tokens.weight"][ids]
        for number in range(self.c["num_hidden_layers"]):
            x = self.layer(number, x)
        return rms_norm(x, self.w["model.norm.weight"], self.c["rms_norm_eps"])

    def logits(self, ids: Tensor) -> Tensor:
        return self.hidden(ids) @ self.w["lm_head.weight"].T

    def layer(self, number: int, x: Tensor) -> Tensor:
        name = f"model.layers.{number}"
        x = x + self._norm(f"{name}.post_attention_layernorm", self._attention(name, x))
        inner = self._norm(f"{name}.pre_mlp_layernorm", x)
        routed = number >= self.c["first_k_dense_replace"]
        change = self._mixture(f"{name}.mlp", inner) if routed else self._mlp(f"{name}.mlp", inner)
        return x + self._norm(f"{name}.post_mlp_layernorm", change)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, self.w[f"{name}.weight"], self.c["rms_norm_eps"])

    def _attention(self, layer: str, x: Tensor) -> Tensor:
        x = self._norm(f"{layer}.input_layernorm", x)
        still, turning, rank = (self.c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))

        def by(name: str, y: Tensor) -> Tensor:
            return y @ self.w[f"{layer}.self_attn.{name}.weight"].T

        def squeezed(name: str, y: Tensor) -> Tensor:
            return rms_norm(y, self.w[f"{layer}.self_attn.{name}.weight"], 1e-6)

        heads, length = self.c["num_attention_heads"], x.shape[1]
        query = by("q_b_proj", squeezed("q_a_layernorm", by("q_a_proj", x))).unflatten(-1, (heads, still + turning))
        latent, shared = by("kv_a_proj_with_mqa", x).split([rank, turning], -1)
        pair = by("kv_b_proj", squeezed("kv_a_layernorm", latent)).unflatten(-1, (heads, -1))
        key, value = pair[..., :still], pair[..., still:]
        shared = self._turned(shared[:, :, None]).expand(-1, -1, heads, -1)
        query = torch.cat([query[..., :still], self._turned(query[..., still:])], -1)
        scores = torch.einsum("bqhd,bkhd->bhqk", query, torch.cat([key, shared], -1)) / math.sqrt(still + turning)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        shares = scores.masked_fill(future, -math.inf).softmax(-1)
        return by("o_proj", torch.einsum("bhqk,bkhd->bqhd", shares, value).flatten(2))

    def _turned(self, x: Tensor) -> Tensor:
        """Elements 2i and 2i + 1 as a complex number times e^(i m θ)."""
        size = x.shape[-1]
        theta = self.c["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * theta
        turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
            torch.ones_like(angles), angles
        )
        return torch.view_as_real(turned).flatten(-2).to(x.dtype)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up, down = (self.w[f"{name}.{one}_proj.weight"].T for one in ("gate", "up", "down"))
        return (silu(x @ gate) * (x @ up)) @ down

    def _mixture(self, name: str, x: Tensor) -> Tensor:
        scores = (x @ self.w[f"{name}.gate.weight"].T).sigmoid()
        best, chosen = scores.topk(self.c["num_experts_per_tok"])
        if self.c["norm_topk_prob"]:
            best = best / best.sum(-1, keepdim=True)
        shares = torch.zeros_like(scores).scatter(-1, chosen, best) * self.c["routed_scaling_factor"]
        experts = range(self.c["n_routed_experts"])
        routed = sum(shares[..., [one]] * self._mlp(f"{name}.experts.{one}", x) for one in experts)
        return routed + self._mlp(f"{name}.shared_experts", x)


def prediction_losses(
    weights: Weights, hidden: Tensor, ids: Tensor, first: int, layer: Callable[[int, Tensor], Tensor], eps: float
) -> Tensor:
    """The sum of the losses of each module of multi-token prediction (DeepSeek-V3, equations 21 to 25).

    `hidden`: what the head reads of ids [batch, sequence], whose last token is not read. Module k, from 1 on, is in the
    layer `first` + k - 1 of the files; at position i it knows token i + k and predicts token i + k + 1.
    """
    losses = []
    while f"model.layers.{first + len(losses)}.eh_proj.weight" in weights:
        number, k = first + len(losses), len(losses) + 1
        here = {name: weights[f"model.layers.{number}.{name}.weight"] for name in ("enorm", "hnorm", "eh_proj")}
        known = weights["model.embed_tokens.weight"][ids[:, k:-1]]
        both = [rms_norm(known, here["enorm"], eps), rms_norm(hidden[:, : known.shape[1]], here["hnorm"], eps)]
        output = layer(number, torch.cat(both, -1) @ here["eh_proj"].T)
        hidden = rms_norm(output, weights[f"model.layers.{number}.shared_head.norm.weight"], eps)
        chances = (hidden @ weights["lm_head.weight"].T).log_softmax(-1)
        losses.append(-chances.gather(-1, ids[:, k + 1 :, None]).sum())
    return torch.stack(losses)
