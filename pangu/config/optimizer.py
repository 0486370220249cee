"""The configuration of number formats, optimizer and learning rate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pangu.config.bounds import Count, Natural, NotNegative, Positive, Share

UPDATED_AT_ONCE = 2**26
"""Elements of which LAMB makes tensors beside its state at a time on a device: few launches, and 256 MiB."""


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scale, used by fp16 alone (Micikevicius et al. 2018, section 3.2)."""

    initial: Positive
    """First scale."""
    growth_interval: Count
    """Steps without overflow after which the scale is doubled."""
    minimum: Positive
    """The scale is never halved below this; an overflow there stops the run."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Master weights, gradient accumulation, norms, softmax and loss are fp32 (fp64 in fp64) always."""

    compute: Literal["fp32", "bf16", "fp16", "fp64"]
    """Format of weights and activations in forward and backward. fp64 is for exact comparisons."""
    fp32_products: Literal["auto", "highest", "high", "medium"]
    """What products of fp32 matrices may compute in, in the words of `torch.set_float32_matmul_precision`: `highest`:
    fp32; `high`: also TF32, `medium`: also bf16, where the device has them. `auto`: true fp32 by the faster way to it,
    timed at the start and named in the log."""
    reduce: Literal["fp32", "bf16"]
    """Format in which gradients are added up over replicas. fp32: that of their sums (fp64 in fp64). bf16: half the
    bytes on the wire, and each gradient loses all but 8 bits before it is added to those of other replicas."""
    loss_scale: LossScaleConfig | None
    """Needed by fp16, null for every other format."""
    matmul: Literal["compute", "fp8"] = "compute"
    """Format that the layers' matrices are multiplied in by training: queries, keys and values, the output of
    attention, the feed-forward layer. `compute`: that of `compute`. `fp8`: inputs and weights in e4m3, gradients in
    e5m2, with a scale for each tensor from its magnitudes in the last 16 steps; embedding, scores and head stay in the
    compute format, weights and optimizer as they are. A CPU computes the same numbers by emulation."""


@dataclass(frozen=True)
class AdamConfig:
    """AdamW (Loshchilov & Hutter 2019, Algorithm 2), by torch's own implementation."""

    name: Literal["adam"]
    """Selects the optimizer."""
    lr: Positive
    """Peak learning rate."""
    betas: tuple[Share, Share]
    """Decay of the first and second moment."""
    eps: Positive
    """Added to the root of the second moment."""
    weight_decay: NotNegative
    """Decoupled weight decay; biases and norms are excluded."""
    moments: Literal["fp32", "bf16"]
    """Format in which both moments are kept between steps. fp32: that of the master weights (fp64 in fp64). bf16: 4
    bytes a parameter less; a moment then follows its gradients to within 0.4 % / (1 - beta), e.g. 8 % with 0.95."""
    clip: Positive | None
    """Largest global gradient norm; null does not clip."""


@dataclass(frozen=True)
class LambConfig:
    """LAMB (You et al. 2020, Algorithm 2; Algorithm 1 in the PanGu-α training notes)."""

    name: Literal["lamb"]
    """Selects the optimizer."""
    lr: Positive
    """Peak learning rate."""
    betas: tuple[Share, Share]
    """Decay of the first and second moment."""
    eps: Positive
    """Keeps the update finite; see `eps_inside_root`."""
    eps_inside_root: bool
    """true: m / sqrt(v + eps), as the paper's first version; false: m / (sqrt(v) + eps), as most code."""
    weight_decay: NotNegative
    """Decay inside the layer-wise update; biases and norms are excluded unless `exclude_vectors` is false."""
    exclude_vectors: bool
    """true: biases and norms get neither decay nor a layer-wise ratio."""
    max_ratio: Positive | None
    """Largest layer-wise trust ratio (MindSpore clips at 10); null does not clip, as the algorithm says. The ratio is 1
    where the norm of the weights is 10,000 times that of the direction before decay, which is then only rounding."""
    moments: Literal["fp32", "bf16"]
    """Format in which both moments are kept between steps. fp32: that of the master weights (fp64 in fp64). bf16: 4
    bytes a parameter less; a moment then follows its gradients to within 0.4 % / (1 - beta), e.g. 8 % with 0.95."""
    clip: Positive | None
    """Largest global gradient norm; null does not clip."""


@dataclass(frozen=True)
class LrScheduleConfig:
    """Learning rate as a pure function of the number of optimizer updates made so far."""

    shape: Literal["cosine", "linear", "constant", "wsd"]
    """Form after the warm-up. `wsd`: warm-up, stable, then a linear decay over the last `decay_steps`."""
    warmup_steps: Natural
    """Updates of linear warm-up: update i (from 0) uses peak x (i + 1) / warmup_steps, so the first is not wasted."""
    decay_steps: Count | None
    """cosine and linear: update at which `min_lr` is reached, counted from update 0 (null: train.steps). wsd: length of
    the final decay (null: a tenth of train.steps). Not for `constant`."""
    decay_from: Literal["warmup", "start"]
    """Where the cosine or line begins: at the end of the warm-up, or at update 0 as in MindSpore's PanGu-α code."""
    min_lr: NotNegative
    """Floor that the decay ends on."""
