"""Configuration of number formats, optimizer and learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pangu.config.bounds import Count, Natural, NotNegative, Positive, Share

UPDATED_AT_ONCE = 2**26
"""Elements that LAMB updates at a time on a device: few kernel launches, and 256 MiB of transient memory."""


def matrices_at_once(shape: Sequence[int]) -> int:
    """Return how many matrices of a shape Muon orthogonalizes at once."""
    return max(1, UPDATED_AT_ONCE // math.prod(shape))


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scale, used by fp16 only (Micikevicius et al. 2018, section 3.2)."""

    initial: Positive
    """Initial scale."""
    growth_interval: Count
    """Steps without overflow after which the scale is doubled."""
    minimum: Positive
    """Smallest scale; an overflow that would halve it further stops the run."""
    # younger than the first run folders
    hysteresis: Count = 1
    """Number of overflows, counted since the scale last grew, that halves the scale; each further one halves it again.
    1: every overflow does. Megatron-LM's and DeepSpeed's default is 2."""
    consecutive: bool = False
    """Reset the count of overflows at every step without one, instead of when the scale grows."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Master weights, gradient accumulation, norms, softmax and loss are always fp32 (fp64 in fp64)."""

    compute: Literal["fp32", "bf16", "fp16", "fp64"]
    """Format of weights and activations in forward and backward. fp64 is for exact comparisons."""
    fp32_matmul: Literal["auto", "highest", "high", "medium"]
    """Precision of fp32 matmuls, as in `torch.set_float32_matmul_precision`: `highest`: fp32; `high`: also TF32,
    `medium`: also bf16, where the device has them. `auto`: true fp32 by the faster library, timed on AMD processors."""
    reduce: Literal["fp32", "bf16"]
    """Format of gradient reduction over replicas. fp32: the format of their sums (fp64 with fp64). bf16: half the bytes
    on the wire, and each gradient is rounded to 8 bits before it is added to those of other replicas."""
    loss_scale: LossScaleConfig | None
    """Dynamic loss scale; required for fp16, must be null for every other format."""
    matmul: Literal["compute", "fp8", "fp8_blockwise", "mxfp8"] = "compute"
    """Format of the layers' matmuls in training: queries, keys and values, attention output, feed-forward layer.
    `compute`: the format of `compute`. `fp8`: inputs and weights in e4m3, gradients in e5m2, with one scale per tensor
    from its absolute maxima in the last 16 steps; embedding, scores, head and routed experts stay in the compute
    format, weights and optimizer unchanged. `fp8_blockwise`, `mxfp8`: all in e4m3, with a scale per 1 x 128 elements
    (weights: 128 x 128) or per 32 of the current tensor. A CPU computes the same numbers by emulation."""


@dataclass(frozen=True)
class AdamConfig:
    """AdamW (Loshchilov & Hutter 2019, Algorithm 2), by torch's fused kernel or apex's."""

    name: Literal["adam"]
    """Selects the optimizer."""
    lr: Positive
    """Peak learning rate."""
    betas: tuple[Share, Share]
    """Decay rates of the first and second moment."""
    eps: Positive
    """Term added to the root of the second moment."""
    weight_decay: NotNegative
    """Decoupled weight decay; biases and norms are excluded."""
    moments: Literal["fp32", "bf16"]
    """Storage format of both moments. fp32: that of the master weights (fp64 in fp64). bf16: saves 4 bytes per
    parameter; a moment then follows its gradients to within 0.4 % / (1 - beta), e.g. 8 % with 0.95."""
    clip: Positive | None
    """Largest global gradient norm (clipping); null: no clipping."""


@dataclass(frozen=True)
class LambConfig:
    """LAMB (You et al. 2020, Algorithm 2; Algorithm 1 in the PanGu-α training notes)."""

    name: Literal["lamb"]
    """Selects the optimizer."""
    lr: Positive
    """Peak learning rate."""
    betas: tuple[Share, Share]
    """Decay rates of the first and second moment."""
    eps: Positive
    """Term that keeps the update finite; see `eps_inside_root`."""
    eps_inside_root: bool
    """true: m / sqrt(v + eps), as in the paper's first version; false: m / (sqrt(v) + eps), as in most code."""
    weight_decay: NotNegative
    """Decay inside the layer-wise update; biases and norms are excluded unless `exclude_vectors` is false."""
    exclude_vectors: bool
    """Give biases and norms neither decay nor a trust ratio."""
    max_ratio: Positive | None
    """Largest layer-wise trust ratio (MindSpore clips at 10); null: no clipping, as in the paper. The ratio is 1 if the
    norm of the weights is 10,000 times that of the direction before decay, which is then only rounding error."""
    moments: Literal["fp32", "bf16"]
    """Storage format of both moments. fp32: that of the master weights (fp64 in fp64). bf16: saves 4 bytes per
    parameter; a moment then follows its gradients to within 0.4 % / (1 - beta), e.g. 8 % with 0.95."""
    clip: Positive | None
    """Largest global gradient norm (clipping); null: no clipping."""


@dataclass(frozen=True)
class MuonConfig:
    """Muon (Jordan et al. 2024; Liu et al. 2025, arXiv 2502.16982) for the matrices of layers, AdamW for all others.

    Matrices are orthogonalized as a paper names them: queries, keys, values, gate and each expert apart.
    """

    name: Literal["muon"]
    """Selects the optimizer."""
    lr: Positive
    """Peak learning rate of both."""
    momentum: Share
    """Decay rate of the momentum of matrices."""
    nesterov: bool
    """Use Nesterov momentum."""
    ns_steps: Count
    """Newton-Schulz iterations of each update, in bf16 (in fp32 and fp64 where that is the compute format)."""
    adjust_lr: Literal["match_rms_adamw", "original"]
    """Factor on the update of a matrix. `match_rms_adamw`: 0.2 x sqrt(max(rows, columns)), so that the learning rate
    and weight decay of AdamW fit; `original`: sqrt(max(1, rows / columns))."""
    split_heads: bool
    """Orthogonalize each attention head's rows of queries, keys and values separately ("Muon Split", GLM-5, 2026)."""
    betas: tuple[Share, Share]
    """Decay rates of the first and second moment of AdamW."""
    eps: Positive
    """Term that AdamW adds to the root of the second moment."""
    weight_decay: NotNegative
    """Decoupled weight decay; biases and norms are excluded."""
    moments: Literal["fp32", "bf16"]
    """Storage format of momentum and moments. fp32: that of the master weights (fp64 in fp64). bf16: half the bytes."""
    clip: Positive | None
    """Largest global gradient norm (clipping); null: no clipping."""
    # younger than the first run folders
    qk_clip: Positive | None = None
    """Threshold of QK-clip (Kimi K2, 2025: 100): after an update, the queries and keys of a head whose attention logits
    exceeded it in the step are scaled down so that the largest would equal it. null: no clipping."""


OptimizerConfig = AdamConfig | LambConfig | MuonConfig


def qk_clip_of(config: OptimizerConfig) -> float | None:
    """Return the threshold of QK-clip, or None without it."""
    return config.qk_clip if isinstance(config, MuonConfig) else None


@dataclass(frozen=True)
class ParameterGroup:
    """Learning rate and weight decay of some tensors, as factors on those of all others."""

    names: tuple[str, ...]
    """Patterns of tensor names (`embedding.*`, `*.experts.*`, `*.gate.weight`). The first group that matches a tensor
    applies."""
    lr_multiplier: Positive = 1.0
    """Factor on the learning rate of every update, `lr_schedule.min_lr` and the step of decoupled decay included."""
    weight_decay_multiplier: NotNegative = 1.0
    """Factor on the weight decay. Biases and norms never have any."""


@dataclass(frozen=True)
class LrScheduleConfig:
    """Learning rate as a pure function of the number of optimizer updates made so far."""

    shape: Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
    """Shape after the warm-up. `wsd`: warm-up, stable, then a decay over the last `decay_steps`. `inverse_sqrt`: peak x
    sqrt(warmup_steps / i) at update i, but at least `min_lr`; `warmup_steps` counts as at least 1."""
    warmup_steps: Natural
    """Updates of linear warm-up: update i (from 0) uses peak x (i + 1) / warmup_steps, so the first is not wasted."""
    decay_steps: Count | None
    """End of the decay. cosine and linear: update at which `min_lr` is reached, counted from update 0 (null:
    train.steps). wsd: length of the final decay (null: a tenth of train.steps). Not for `constant`, `inverse_sqrt`."""
    decay_from: Literal["warmup", "start"]
    """Start of the cosine or line: the end of the warm-up, or update 0 as in MindSpore's PanGu-α code."""
    min_lr: NotNegative
    """Learning rate at the end of the decay."""
    # younger than the first run folders
    decay_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """Shape of the final decay of `wsd`, at a fraction x of it, between the peak (1) and `min_lr` (0). `linear`: 1 - x;
    `cosine`: half a cosine; `exponential`: 2 x 0.5^x - 1; `minus_sqrt`: 1 - sqrt(x)."""


@dataclass(frozen=True)
class WeightDecayScheduleConfig:
    """Weight decay as a function of the number of updates: from `start` to `optimizer.weight_decay` over the run."""

    start: NotNegative
    """Weight decay at update 0. After `train.steps` updates, it would reach `optimizer.weight_decay`."""
    shape: Literal["linear", "cosine"]
    """Shape between the two values: a line, or half a cosine, which is flat at both ends."""
