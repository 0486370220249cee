"""Sizes in closed form: parameters and floating-point operations."""

from __future__ import annotations

from pangu.config.schema import ModelConfig


def num_parameters(config: ModelConfig) -> int:
    """Number of weights, the tied head counted once.

    PanGu-α with ffn = 4 x hidden: V·d + 2·S·d + L·(12d² + 13d) + 2d.
    """
    d, f = config.hidden, config.ffn_size
    attention = 4 * (d * d + d)
    feed_forward = 2 * d * f + f + d
    norms = 4 * d
    tables = config.vocab + config.sequence * (2 if config.kind == "pangu" else 1)
    return tables * d + config.layers * (attention + feed_forward + norms) + 2 * d


def training_flops_per_token(config: ModelConfig) -> float:
    """Model FLOPs of forward and backward for one token, without recompute.

    72·L·d²·(1 + S/(6d) + V/(12·L·d)) for ffn = 4 x hidden (Narayanan et al. 2021, section 5.1): attention is counted
    in full although half of it is masked, as everybody counts it.
    """
    d, f = config.hidden, config.ffn_size
    matrices = 2 * (4 * d * d + 2 * d * f)
    attention = 4 * config.sequence * d
    head = 2 * config.vocab * d
    return 3.0 * (config.layers * (matrices + attention) + head)
