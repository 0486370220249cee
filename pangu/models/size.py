"""Closed-form numbers of parameters and floating-point operations."""

from __future__ import annotations

from pangu.config.model import ModelConfig
from pangu.layers.sparse import computed_share
from pangu.topology.placement import TensorRank

Matrices = list[tuple[int, int]]


def _num_up(config: ModelConfig) -> int:
    return 2 if config.is_gated else 1


def layer_matrices(config: ModelConfig, ranks: int = 1, layer: int = 0) -> Matrices:
    """Return [inputs, outputs] of the matmuls per token in a layer on one of `ranks` tensor-parallel ranks."""
    # QKV, output, up, down; or with experts: router, then up and down of each expert of the token.
    d, query, values = config.hidden, config.query_size // ranks, config.values_size // ranks
    attention = [(d, query + 2 * config.kv_size // ranks), (values, d)]
    if (latent := config.latent) is not None:  # every rank computes the latent vectors
        down = (latent.q_rank or 0) + latent.kv_rank + latent.rope_head_dim
        keys = latent.nope_head_dim * config.heads // ranks
        attention = [(d, down), (latent.q_rank or d, query), (latent.kv_rank, keys + values), (values, d)]
    if layer >= config.layers:  # multi-token prediction merges two hidden states, on every rank
        attention.append((2 * d, d))
    if not config.has_experts(layer):
        return attention + _feed_forward(config, config.ffn_size // ranks)
    assert config.experts is not None
    each = _feed_forward(config, config.expert_size // ranks)
    return [*attention, (d, config.experts), *each * (config.num_chosen + config.shared_experts)]


def _feed_forward(config: ModelConfig, inner: int) -> Matrices:
    return [(config.hidden, _num_up(config) * inner), (inner, config.hidden)]


def _numel(matrices: Matrices) -> int:
    return sum(inputs * outputs for inputs, outputs in matrices)


def _feed_forward_biases(config: ModelConfig, inner: int) -> int:
    return (_num_up(config) * inner + config.hidden) * config.has_biases("mlp")


def num_parameters(config: ModelConfig, active: bool = False) -> int:
    """Return the number of weights, a tied head counted once; `active`: without experts that a token does not use."""
    # PanGu-α with ffn = 4 x hidden: V·d + 2·S·d + L·(12d² + 13d) + 2d.
    d = config.hidden
    factor = 2 if config.norm == "layernorm" else 1
    norm, inner, projected = factor * d, 2 * config.head_size * config.qk_norm, config.query_size + 2 * config.kv_size
    if (latent := config.latent) is not None:
        inner = (latent.q_rank or 0) + latent.kv_rank
        projected = inner + latent.rope_head_dim
    vectors = factor * inner + projected * config.has_biases("qkv") + d * config.has_biases("output")
    vectors += config.heads * config.attention_sinks
    words = config.vocab * (1 if config.tied_head else 2)
    positions = config.sequence * ((config.positions == "learned") + (config.kind == "pangu"))
    bias = config.num_relative_buckets * config.heads if config.positions == "relative" else 0
    norms = 4 if config.norm_placement == "sandwich" else 1 if config.parallel_block == "shared_norm" else 2
    layers = sum(_of_layer(config, layer, active) + vectors + norms * norm for layer in range(config.num_blocks))
    return (words + positions) * d + bias + layers + norm * (1 + config.embedding_norm + 3 * config.mtp_layers)


def _of_layer(config: ModelConfig, layer: int, active: bool) -> int:
    matrices = _numel(layer_matrices(config, layer=layer))
    if not config.has_experts(layer):
        return matrices + _feed_forward_biases(config, config.ffn_size)
    assert config.experts is not None
    unused = 0 if active else config.experts - config.num_chosen
    expert, biases = _numel(_feed_forward(config, config.expert_size)), _feed_forward_biases(config, config.expert_size)
    # shared experts are one layer, whose sum has one bias
    shared = biases + (config.shared_experts - 1) * (biases - config.hidden * config.has_biases("mlp"))
    # with the learned scales, of which a token uses its experts' only
    routed = (config.num_chosen + unused) * (biases + config.router.learned_scale)
    routed += config.experts * config.router.learned_bias
    return matrices + unused * expert + routed + (shared if config.shared_experts else 0)


def layer_flops(config: ModelConfig, layer: int = 0, skips: bool = False) -> float:
    """Return the forward FLOPs of one layer per token (Narayanan et al. 2021, section 5.1).

    2 per weight of its matrices, plus 4·S·d for attention (2·S per element of queries and of values): masked scores are
    counted in full (with windows as well, unless `skips`), except for the blocks that sparse attention leaves out.
    Grouped heads have smaller projections, but every query head still meets every key.
    """
    seen = 1.0
    if skips and config.window is not None and config.has_window(layer) and config.window < config.sequence:
        share = config.window / config.sequence  # of the triangle of causal scores, a band
        seen = share * (2 - share)
    if config.sparse is not None:
        seen = computed_share(config.sparse, config.sequence, config.sparse.block)
    scored = config.query_size + config.values_size
    return 2.0 * _numel(layer_matrices(config, layer=layer)) + 2.0 * seen * config.sequence * scored


def head_flops(config: ModelConfig) -> float:
    """Return the forward FLOPs of the head per token, once for each token that it predicts."""
    return 2.0 * config.vocab * config.hidden * (1 + config.mtp_layers)


def training_flops_per_token(config: ModelConfig) -> float:
    """Return the FLOPs of forward and backward (twice the forward) per token, without recompute."""
    # 72·L·d²·(1 + S/(6d) + V/(12·L·d)) for ffn = 4 x hidden
    layers = sum(layer_flops(config, layer) for layer in range(config.num_blocks))
    return 3.0 * (layers + head_flops(config))


def hidden_state_shapes(
    config: ModelConfig, rank: TensorRank, batch: int, length: int, seen: int, heads_shared: int = 1
) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors between two parts, for the last `length` of `seen` tokens per sequence."""
    # `heads_shared`: number of context-parallel ranks that split the heads in attention
    hidden = (length // rank.num_slices, batch, config.hidden)
    scores = (batch, config.heads // rank.size // heads_shared, length * heads_shared, seen)
    return [hidden, scores] if config.residual_scores else [hidden]
