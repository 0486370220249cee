"""Published training systems and what they do in a step, from the formulas of their papers.

Korthikanti et al. 2022 (activations, table 2; sequence and tensor parallelism), Narayanan et al. 2021 (FLOPs,
messages), Rajbhandari et al. 2020 (model states).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pangu.schedule.spans import Collective, Matmul, Work
from pangu.topology.layout import Layout

Recompute = Literal["none", "selective", "full"]


class Shape(NamedTuple):
    """Shape of a decoder."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    gated: bool = False
    tied: bool = True

    @property
    def layer_matrices(self) -> int:
        """Elements of one layer's weight matrices."""
        kv = self.hidden // self.heads * self.kv_heads
        return self.hidden * (2 * self.hidden + 2 * kv + (3 if self.gated else 2) * self.ffn)

    @property
    def parameters(self) -> float:
        """Parameters of the model."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2) + self.sequence * self.hidden
        return self.layers * (self.layer_matrices + 13 * self.hidden) + embeddings

    def flops(self, sequences: float) -> float:
        """Return the model FLOPs of a step: full attention, no recompute."""
        layer = 2.0 * self.layer_matrices + 4.0 * self.sequence * self.hidden
        return 3.0 * sequences * self.sequence * (self.layers * layer + 2.0 * self.vocab * self.hidden)


@dataclass(frozen=True)
class System:
    """Properties of a training system that its step depends on."""

    name: str
    flash: bool
    """Whether attention is one kernel that keeps no scores and skips masked ones."""
    dropout: bool
    fused: bool
    """Whether element-wise operations are fused into few kernels."""
    launches: float
    """Kernel launches of a layer's forward pass; the backward pass has twice as many."""
    gradient_bytes: int
    """Bytes of a gradient that is accumulated and reduced."""
    accumulation_bytes: float
    """Bytes moved per weight and micro-batch to add its gradient to the accumulated one."""
    hidden_tensor: float = 0.0
    """Share of tensor-parallel communication that overlaps with matmuls."""
    hidden_backward: float = 0.0
    """Share of it that overlaps with the wgrad matmuls of the backward pass."""
    hidden_data: float = 0.0
    """Share of data-parallel communication that overlaps with the backward pass."""
    hidden_messages: float = 0.0
    """Share of messages between stages that overlaps with computation."""
    spare_bytes: int = 0
    """Bytes per gradient that are kept besides the accumulated one."""
    contended_us: float = 0.0
    """Host microseconds per step of a tensor-parallel ring while messages between stages cross nodes."""
    deferred_head: bool = False
    """Whether weight gradients of the head are computed while a pipeline drains, as many as there is time for."""
    fused_loss: bool = False
    """Whether the loss is one kernel that keeps logits in 16 bits."""


class Setup(NamedTuple):
    """Model, system, layout, schedule and batch of a published run."""

    shape: Shape
    system: System
    layout: Layout
    recompute: Recompute
    micro_size: int
    micro_batches: int
    schedule: str
    layers: tuple[int, ...]
    """Layers of each model chunk."""
    fp8: bool = False
    """Whether the matmuls of layers take operands of fewer than 16 bits; those of attention and of the head do not."""

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_size * max(1, self.shape.sequence // self.layout.context)

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes weight gradients apart from input gradients: zb-1p and zb-2p."""
        return self.schedule.startswith("zb")

    @property
    def reduces_each(self) -> bool:
        """Whether gradients are reduced after each micro-batch: by ZeRO-3, and ZeRO-2 without a pipeline, unless their
        weights' come late. A pipeline sums the gradients of a step first (Llama 3, section 3.3.2)."""
        return self.layout.zero > (2 if self.layout.pipeline > 1 else 1) and not self.splits_backward


MEGATRON_2021 = System("megatron", False, True, True, 22, 2, 8, spare_bytes=4)
"""Megatron-LM of 2021: fused softmax, gradients in fp16 with a copy in fp32 for the update, no overlap."""
MEGATRON_2022 = replace(MEGATRON_2021, gradient_bytes=4, accumulation_bytes=0, spare_bytes=0, hidden_backward=1.0)
"""Megatron-LM since sequence parallelism and selective recompute (Korthikanti et al. 2022, section 4.2.2): wgrad
matmuls accumulate in fp32, and overlap with the reduction of input gradients."""
ZERO_BUBBLE = replace(MEGATRON_2022, accumulation_bytes=8)
"""Megatron-LM with schedules that defer weight gradients and accumulate them in a separate kernel (Qi et al. 2024)."""
MEGATRON_UNFUSED = replace(MEGATRON_2021, fused=False)
"""Megatron-LM code with layers that its fused kernels do not support (gated, rotary): GLM-130B, Zeng et al. 2022."""
DEEPSPEED = replace(MEGATRON_2021, spare_bytes=0)
"""Megatron-DeepSpeed in fp16, whose fp32 copies are sharded."""
DEEPSPEED_BF16 = replace(MEGATRON_2021, gradient_bytes=4, accumulation_bytes=22, spare_bytes=2)
"""Megatron-DeepSpeed in bf16: the optimizer accumulates each micro-batch's gradients in fp32 in separate kernels: they
clear, write and read 2 bytes, write and read 4, read and write the sum (BLOOM, MT-NLG)."""
MEGATRON_CORE = System("megatron-core", True, False, True, 18, 4, 4, 0.5, 0.5, 0.95, 1.0)
"""Megatron-Core since 2023: flash attention, communication overlapped with computation. A wgrad matmul has to read the
sum that it adds to."""
NEMO = replace(MEGATRON_CORE, gradient_bytes=2, accumulation_bytes=2, deferred_head=True)
"""Megatron-Core as NeMo's recipes set it up: `grad_reduce_in_fp32=False`, `defer_embedding_wgrad_compute=True`."""
BRIDGE = replace(NEMO, fused_loss=True)
"""The same as Megatron-Bridge's recipes: with `cross_entropy_fusion_impl="te"`."""
NANOTRON = System("nanotron", True, False, False, 30, 4, 12, hidden_tensor=1.0, contended_us=250.0)
"""nanotron of 2024 with `tp_linear_async_communication`. Fitted: wherever a pipeline spans nodes, a layer takes the
host 2.3 ms more for each further tensor rank, whatever its size."""
FSDP = System("fsdp", True, False, False, 24, 4, 8, 0.0, 0.0, 1.0)
"""PyTorch FSDP with flash attention."""


UNFUSED_SCORES = 18.0
"""16-bit elements that each score moves when scale, mask, fp32 softmax, its casts and dropout are separate kernels."""
TILES = 128
"""Rows on each tensor-parallel rank that the vocabulary is padded to a multiple of."""


class Module(NamedTuple):
    """Work of a module for one micro-batch on one rank."""

    passes: tuple[Work, Work, Work, Work]
    """Forward, recompute, backward for the input gradient, backward for the weight gradients."""
    saved_bytes: float
    """Bytes of activations that are kept from the forward to the backward pass."""
    parameters: float
    """Parameters of this rank before sharding over replicas."""


def embedding_work(setup: Setup) -> Module:
    """Return the work of the token and position embedding."""
    shape, tensor = setup.shape, setup.layout.tensor
    elements = float(setup.tokens * shape.hidden)
    forward = Work((), 10 * elements, 6, (Collective("all_reduce", "tensor", 2 * elements),))
    passes = forward, Work(), Work((), 12 * elements, 5), Work()
    return Module(passes, elements, (_vocabulary(shape, tensor) + shape.sequence) * shape.hidden)


def head_work(setup: Setup) -> Module:
    """Return the work of the final norm, the output matrix and the loss: logits in 16 bits and, unless fused, fp32."""
    shape, accumulation = setup.shape, setup.system.accumulation_bytes
    tokens, columns, h = setup.tokens, _vocabulary(shape, setup.layout.tensor), shape.hidden
    logits = 1.0 * tokens * columns
    bytes_forward, bytes_backward, saved = (4, 4, 2) if setup.system.fused_loss else (22, 14, 10)
    passes = (
        Work((Matmul(tokens, columns, h),), logits * bytes_forward + 8.0 * tokens * h, 14),
        Work(),
        Work((Matmul(tokens, h, columns),), logits * bytes_backward + 12.0 * tokens * h, 8),
        Work((Matmul(h, columns, tokens),), accumulation * columns * h, 1),
    )
    return Module(passes, tokens * h * 4 + saved * logits, columns * h)


def layer_work(setup: Setup) -> Module:
    """Return the work of a transformer layer."""
    shape, system, layout = setup[:3]
    tokens, h, t = setup.tokens, shape.hidden, layout.tensor
    columns = (h + 2 * (h // shape.heads * shape.kv_heads)) // t
    matrices = ((h, columns), (h // t, h), (h, shape.ffn * (2 if shape.gated else 1) // t), (shape.ffn // t, h))
    parameters = shape.layer_matrices / t + 13 * h / t
    sends = _communication(setup)
    calls = sum(send.calls for send in sends)
    back = tuple(one._replace(hidden=max(one.hidden, system.hidden_backward)) for one in sends)
    # Sequence parallelism gathers the inputs of matmuls once more for the weight gradients.
    again = (sends[0]._replace(hidden=1.0),) if layout.sequence and t > 1 else ()
    is_sharded, sent = layout.zero == 3, system.gradient_bytes * parameters
    gather = (Collective("all_gather", "shard", 2 * parameters, 1, system.hidden_data),) * is_sharded
    reduce = (Collective("reduce_scatter", "shard", sent, 1, system.hidden_data),) * is_sharded
    bytes_forward, bytes_backward = _layer_bytes(setup)
    heads = setup.micro_size * max(1, shape.heads // t)
    # Megatron's fused softmax takes the scores of four heads at a time.
    launches = system.launches + (9 if not system.flash and heads % 4 else 0)
    moved = system.accumulation_bytes * parameters
    if setup.fp8:  # casts and transposes of matmul inputs, of output gradients, and of weights for the input gradients
        bytes_forward += tokens * (4 * (h + shape.ffn) / t + 4 * h)
        bytes_backward += tokens * (4 * (columns + matrices[2][1]) + 4 * h)
        moved += 2 * parameters
    products = tuple(Matmul(tokens, columns, depth, fp8=setup.fp8) for depth, columns in matrices)
    forward = Work(products + _attention(setup, 1), bytes_forward, launches + 2 * calls, sends + gather)
    recompute = Work()
    if setup.recompute == "full":
        recompute, gather = forward, ()
    elif setup.recompute == "selective" and system.flash:  # torchtitan: all but every other matmul and attention
        recompute = Work(tuple(one._replace(calls=0.5) for one in products), bytes_forward, launches - 3)
    elif setup.recompute == "selective":
        scores = 1.0 * tokens * shape.sequence * max(1, shape.heads // t)
        recompute = Work(_attention(setup, 1), 13 * scores, 4)
    inputs = tuple(Matmul(tokens, depth, columns, fp8=setup.fp8) for depth, columns in matrices)
    weights = tuple(Matmul(depth, columns, tokens, fp8=setup.fp8) for depth, columns in matrices)
    launched = 2 * launches - 4 + 2 * calls
    backward = Work(inputs + _attention(setup, 2), bytes_backward, launched, back + again + gather)
    wgrad = Work(weights, moved, 4, reduce)
    return Module((forward, recompute, backward, wgrad), _saved(setup), parameters)


def _vocabulary(shape: Shape, tensor: int) -> int:
    return math.ceil(shape.vocab / (TILES * tensor)) * TILES


def _attention(setup: Setup, passes: float) -> tuple[Matmul, ...]:
    """Return the matmuls of scores and values; `passes` is 1 for the forward pass and 2 for the backward pass."""
    shape = setup.shape
    length, size = max(1, shape.sequence // setup.layout.context), shape.hidden // shape.heads
    heads = setup.micro_size * max(1, shape.heads // setup.layout.tensor)
    if setup.system.flash:
        # Both matmuls, half of them causally masked; backward computes the scores again: 2.5 times forward.
        return (Matmul(length, shape.sequence, size, heads, 0.5 * (2 if passes == 1 else 5), True),)
    scores = Matmul(length, shape.sequence, size, heads, passes)
    return scores, scores._replace(columns=size, depth=shape.sequence)


def _layer_bytes(setup: Setup) -> tuple[float, float]:
    """Return the bytes that the memory-bound kernels of a layer move, forward and backward.

    Counted per element of [tokens, hidden] in 16 bits: norms, bias-dropout-add, activation, transposes, and without
    flash attention scale-mask-softmax and dropout of the scores.
    """
    shape, system, layout = setup[:3]
    h, t, shared = shape.hidden, layout.tensor, layout.tensor if layout.sequence else 1
    down, up = shape.ffn / h, shape.ffn / h * (2 if shape.gated else 1)
    residual = 11.0 if system.fused else 15.0
    forward = residual / shared + (2 * down + up + 4 + 4 * shape.kv_heads / shape.heads) / t
    backward = 1.9 * residual / shared + (2 * up + 2 * down + 12) / t
    each = (6.5 if system.dropout else 4) if system.fused else UNFUSED_SCORES
    scores = 0.0 if system.flash else shape.heads / t * shape.sequence / h * each
    unit = 2.0 * setup.tokens * h
    return unit * (forward + scores), unit * (backward + scores * 1.6)


def _saved(setup: Setup) -> float:
    """Return the bytes of a layer's activations: Korthikanti et al. 2022, table 2, for any activation function."""
    shape, system, layout = setup[:3]
    tokens, h, t, shared = setup.tokens, shape.hidden, layout.tensor, layout.tensor if layout.sequence else 1
    if setup.recompute == "full":
        return 2.0 * tokens * h / shared
    mlp = (6 if shape.gated else 4) * shape.ffn / h
    replicated = 8 + (2 if system.dropout else 0)
    saved = tokens * h * (replicated / shared + (4 + 4 * shape.kv_heads / shape.heads + mlp) / t)
    if system.flash and setup.recompute == "selective":
        return saved / 2  # torchtitan's selective-op keeps the output of every other matmul
    if not system.flash and setup.recompute == "none":
        saved += tokens * shape.sequence * shape.heads / t * (5 if system.dropout else 4)
    return saved


def _communication(setup: Setup) -> tuple[Collective, ...]:
    """Return the collectives of a layer's forward pass; the backward pass sends the same."""
    shape, system, layout = setup[:3]
    collectives, full = [], 2.0 * setup.tokens * shape.hidden
    if layout.tensor > 1 and layout.sequence:
        collectives.append(Collective("all_gather", "tensor", full / (2 if setup.fp8 else 1), 2, system.hidden_tensor))
        collectives.append(Collective("reduce_scatter", "tensor", full, 2, system.hidden_tensor))
    elif layout.tensor > 1:
        collectives.append(Collective("all_reduce", "tensor", full, 2, system.hidden_tensor))
    if layout.context > 1:
        keys = 2 * full * layout.context * shape.kv_heads / shape.heads / layout.tensor
        collectives.append(Collective("all_gather", "context", keys, 1, 0.9))
    return tuple(collectives)
