"""Choice of the attention kernel: those that can train a model, and their trials on the shapes of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pangu.common.errors import ConfigError
from pangu.config.attention import ABILITIES, obstacles
from pangu.config.model import ModelConfig
from pangu.config.parallelism import context_kind
from pangu.config.schema import RunConfig
from pangu.config.sparse import SparseConfig
from pangu.layers.attention import AttentionCore, split_heads
from pangu.layers.biases import Bias
from pangu.layers.block_pattern import BlockPattern
from pangu.layers.builder import Builder
from pangu.layers.context_attention import sequence_kernel
from pangu.layers.dropout import DropoutKeys
from pangu.layers.gpu_kernels import candidates, missing
from pangu.layers.kernels import QKV, MaskAndBias
from pangu.layers.masks import AttentionMask
from pangu.topology.placement import PlacementTable


def attention_kernels(
    model: ModelConfig,
    precision: str,
    device: torch.device,
    documents: bool = False,
    context: str | None = None,
    ordered: bool = False,
) -> list[str]:
    """Return the kernels that `model.attention=auto` chooses from, preferred one first, or the requested one.

    All give equal results up to rounding: with dropout, these are kernels whose masks no layout changes, or the
    preferred one if an accelerator has no fused one of these. Raise `UserError` if the requested kernel cannot train
    this model here. `documents`: tokens attend within their document; `context`: value of `context_kind` (block-wise
    kinds leave only the preferred kernel); `ordered`: sums in a fixed order are required.
    """
    if model.attention != "auto":
        problems = obstacles(model.attention, model, precision, device.type)
        if found := list(problems) or list(missing(model.attention, device)):
            raise ConfigError(found)
        return [model.attention]
    order = ["sdpa", "reference"]
    if device.type != "cpu":
        masked = documents or model.window is not None or model.sparse is not None
        biased, drops = model.positions in ("alibi", "relative"), model.attention_dropout > 0
        order = candidates(device, masked or biased or drops or context in ("gather", "ring"))
    kernels = [kernel for kernel in order if not any(obstacles(kernel, model, precision, device.type))]
    kernels = [kernel for kernel in kernels if ABILITIES[kernel].ordered or not ordered]
    if model.attention_dropout > 0:
        hashed = [kernel for kernel in kernels if ABILITIES[kernel].hashed]
        # without a fused one, as on Ascend devices, an accelerator would have to store all scores
        keeps = device.type != "cpu" and all(ABILITIES[kernel].scores for kernel in hashed)
        kernels = kernels[:1] if keeps else hashed
    if context in (None, "ulysses"):
        return kernels
    in_window = context == "ring" and model.window is not None
    return [kernel for kernel in kernels if ABILITIES[kernel].blocks and not (in_window and kernel == "flash")][:1]


def kernels_of(config: RunConfig, device: torch.device) -> list[str]:
    """Return the kernels that a run chooses from."""
    context = context_kind(config) if config.parallel.context > 1 else None
    documents, ordered = config.data.packing.reset_mask, config.train.deterministic
    kernels = attention_kernels(config.model, config.precision.compute, device, documents, context, ordered)
    return kernels[:1] if device.type == "cpu" else kernels


@dataclass(frozen=True)
class AttentionShape:
    """Input shape of one layer's attention on a rank."""

    rows: int
    """Number of sequences."""
    heads: int
    kv_heads: int
    sequence: int
    head_size: int
    documents: bool
    window: int | None
    biased: bool
    sparse: SparseConfig | None = None
    dropout: float = 0.0
    sinks: bool = False

    @property
    def work(self) -> int:
        """Multiplications of q kᵀ."""
        return self.rows * self.heads * self.sequence**2 * self.head_size

    def cut(self, limit: int) -> tuple[AttentionShape, float]:
        """Return a smaller shape of at most `limit` multiplications, and how many of it make up this one."""
        # Fewer sequences, then fewer heads, and shorter sequences only if one head is too much.
        smaller = self
        while smaller.work > limit and smaller.sequence > 1:
            if smaller.rows > 1:
                smaller = replace(smaller, rows=smaller.rows // 2)
            elif smaller.kv_heads % 2 == 0:
                smaller = replace(smaller, heads=smaller.heads // 2, kv_heads=smaller.kv_heads // 2)
            else:
                smaller = replace(smaller, sequence=smaller.sequence // 2)
        return smaller, self.work / smaller.work


def random(device: torch.device, dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Return normal random tensors from a separate generator, so that the run's generator is not changed."""
    source = torch.Generator(device).manual_seed(0)
    return [torch.randn(shape, generator=source, device=device).to(dtype) for shape in shapes]


def attention_trial(
    kernel: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    """Return a function that runs forward and backward of one layer's attention on random numbers."""
    length, size = shape.sequence, shape.head_size
    widths = [count * size for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
    (joined,) = random(device, dtype, (length, shape.rows, sum(widths)))
    heads = QKV(*(split_heads(part, size) for part in joined.requires_grad_().split(widths, -1)))
    documents = bounds = None
    if shape.documents:
        documents = torch.zeros(shape.rows, length, dtype=torch.int64, device=device)
        documents[:, length // 2 :] = 1
        bounds = torch.arange(0, 2 * shape.rows + 1, device=device, dtype=torch.int32) * length // 2
    bias = None
    if shape.biased:
        (distances,) = random(device, torch.promote_types(dtype, torch.float32), (length, shape.heads))
        bias = Bias(distances)
    sparse = None
    if shape.sparse is not None:
        sparse = BlockPattern.of(shape.sparse, length, device)
    core = AttentionCore(Builder(PlacementTable()), shape.dropout)
    keys = None
    if shape.dropout > 0:
        keys = DropoutKeys(0, 0, tuple(range(shape.rows))).on(torch.zeros(shape.rows, length, device=device))
    mask = AttentionMask(documents, shape.window, bounds, sparse)
    sinks = random(device, dtype, (shape.heads,))[0].requires_grad_() if shape.sinks else None
    compute = sequence_kernel(kernel, shape.sinks, shape.dropout > 0)(MaskAndBias(mask, bias, length, dtype, device))

    def once() -> object:
        output, _ = core(heads, compute, keys, sinks=sinks)
        return torch.autograd.grad(output, joined, output.detach(), retain_graph=True)

    return once
