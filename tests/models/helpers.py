"""Small models with real weights, for tests."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from pangu.config.model import ModelConfig
from pangu.models.language_model import LanguageModel, Options, build_model
from pangu.topology.placement import PlacementTable
from tests.weights import logical_view, materialise

TINY = ModelConfig(
    kind="pangu",
    layers=3,
    hidden=32,
    heads=4,
    vocab=67,
    sequence=24,
    ffn=None,
    activation="gelu_tanh",
    norm="layernorm",
    norm_placement="pre",
    biases=True,
    tied_head=True,
    kv_heads=None,
    positions="learned",
    rope_base=None,
    relative_buckets=None,
    relative_distance=None,
    window=None,
    residual_scores=False,
    dropout=0.0,
    attention_dropout=0.0,
    norm_eps=1e-5,
    init_std=0.2,  # large, so that attention and activations are far from linear
    final_norm="before_query",
    attention="auto",
)

GROUPED_FLOPS = {
    torch.ops.pangu.grouped_matmul: lambda x, matrices, *_, **__: 2 * x[0] * matrices[1] * matrices[2],
    torch.ops.pangu.grouped_weight_gradient: lambda grad, x, *_, **__: 2 * x[0] * x[1] * grad[1],
}
"""FLOPs of our operators from the shapes of their arguments, for `FlopCounterMode`."""


def make(
    config: ModelConfig = TINY, kernel: str = "reference", dtype: torch.dtype = torch.float64, seed: int = 3
) -> tuple[LanguageModel, PlacementTable]:
    """A model with its first values, biases and norms included, moved away from their constants."""
    model, table = build_model(config, Options(kernel))
    materialise(model, table, seed, dtype)
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=noise, dtype=torch.float64).to(dtype)
    return model, table


def logical_weights(model: LanguageModel, table: PlacementTable) -> dict[str, Tensor]:
    """Detached copies of all logical tensors by their global names."""
    parameters = dict(model.named_parameters())
    return {p.name: logical_view(parameters[p.stored_in].detach(), p).clone() for p in table}


def logical_gradients(model: LanguageModel, table: PlacementTable) -> dict[str, Tensor]:
    """Gradients of all logical tensors by their global names."""
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {p.name: logical_view(gradients[p.stored_in], p).clone() for p in table}


def variant(**changes: object) -> ModelConfig:
    """`TINY` with some fields changed."""
    return replace(TINY, **changes)
