"""Sizes in closed form: parameters and floating-point operations."""

from __future__ import annotations

from pangu.config.model import ModelConfig


def _num_up(config: ModelConfig) -> int:
    """Input matrices of the feed-forward layer: a gated one has two."""
    return 2 if config.activation == "swiglu" else 1


def layer_matrices(config: ModelConfig, ranks: int = 1) -> list[tuple[int, int]]:
    """[inputs, outputs] of a layer's matmuls on one of `ranks` tensor-parallel ranks: QKV, output, up, down."""
    d, inner, query = config.hidden, config.ffn_size // ranks, config.query_size // ranks
    return [(d, query + 2 * config.kv_size // ranks), (query, d), (d, _num_up(config) * inner), (inner, d)]


def _matrices_of_layer(config: ModelConfig) -> int:
    return sum(inputs * outputs for inputs, outputs in layer_matrices(config))


def num_parameters(config: ModelConfig) -> int:
    """Number of weights, a tied head counted once. PanGu-α with ffn = 4 x hidden: V·d + 2·S·d + L·(12d² + 13d) + 2d."""
    d, f = config.hidden, config.ffn_size
    matrices = _matrices_of_layer(config)
    biases = (config.query_size + 2 * config.kv_size) * config.has_biases("qkv")
    biases += d * config.has_biases("output") + (_num_up(config) * f + d) * config.has_biases("mlp")
    of_norm = 2 if config.norm == "layernorm" else 1
    norm, head_norms = of_norm * d, 2 * of_norm * config.head_size if config.qk_norm else 0
    words = config.vocab * (1 if config.tied_head else 2)
    positions = config.sequence * ((config.positions == "learned") + (config.kind == "pangu"))
    bias = config.num_relative_buckets * config.heads if config.positions == "relative" else 0
    return (words + positions) * d + bias + config.layers * (matrices + biases + head_norms + 2 * norm) + norm


def layer_flops(config: ModelConfig) -> float:
    """FLOPs of one layer's forward for one token: 2 for each weight of its matrices, 4·S·d of attention, counted in
    full although half of it is masked, and more by a window (Narayanan et al. 2021, section 5.1). Grouped heads have
    smaller projections, but every query head still meets every key."""
    return 2.0 * _matrices_of_layer(config) + 4.0 * config.sequence * config.query_size


def head_flops(config: ModelConfig) -> float:
    return 2.0 * config.vocab * config.hidden


def training_flops_per_token(config: ModelConfig) -> float:
    """FLOPs of forward and backward (twice the forward) for one token, without recompute: 72·L·d²·(1 + S/(6d) +
    V/(12·L·d)) for ffn = 4 x hidden."""
    return 3.0 * (config.layers * layer_flops(config) + head_flops(config))
