"""What the published systems do in a step: Megatron-LM and what came after it, from their papers' formulas.

Korthikanti et al. 2022 (activations, table 2; sequence and tensor parallelism), Narayanan et al. 2021 (FLOPs,
messages), Rajbhandari et al. 2020 (states). b: sequences of a micro-batch, s: tokens of one, h: hidden, a: heads,
t: tensor.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from pangu.planning.layout_work import Plan, Shape, System, assemble
from pangu.planning.workload import Collective, Matmul, ModuleWork, Work, Workload

MEGATRON_2021 = System("megatron", False, True, True, 22, 2, 8, spare_bytes=4)
"""Megatron-LM of 2021: fused softmax, gradients in fp16 with a copy in fp32 for the update, nothing overlaps."""
MEGATRON_2022 = replace(MEGATRON_2021, gradient_bytes=4, accumulation_bytes=0, spare_bytes=0, hidden_backward=1.0)
"""Megatron-LM since sequence parallelism and selective recompute (Korthikanti et al. 2022, section 4.2.2): products of
weight gradients add to the sum in fp32 as they end, beside them gradients of inputs are reduced."""
ZERO_BUBBLE = replace(MEGATRON_2022, accumulation_bytes=8)
"""Megatron-LM with schedules that compute gradients of weights late, and add them by an operation (Qi et al. 2024)."""
MEGATRON_UNFUSED = replace(MEGATRON_2021, fused=False)
"""Megatron's code with layers that its fused kernels do not know (gated, rotary): GLM-130B, Zeng et al. 2022."""
DEEPSPEED = replace(MEGATRON_2021, spare_bytes=0)
"""Megatron-DeepSpeed in fp16, whose copies in fp32 are sharded."""
DEEPSPEED_BF16 = replace(MEGATRON_2021, gradient_bytes=4, accumulation_bytes=22, spare_bytes=2)
"""Megatron-DeepSpeed in bf16: its optimizer adds each micro-batch's gradients to sums in fp32 by operations of their
own: clears, writes and reads 2 bytes, writes and reads 4, reads and writes the sum (BLOOM, MT-NLG)."""
MEGATRON_CORE = System("megatron-core", True, False, True, 18, 4, 0, 0.5, 0.5, 0.95, 1.0)
"""Megatron-Core since 2023: flash attention, communication beside computing."""
NANOTRON = System("nanotron", True, False, False, 30, 4, 12, hidden_tensor=1.0, contended_us=250.0)
"""nanotron of 2024: communication of tensor ranks beside products (`tp_linear_async_communication`). Fitted: wherever a
pipeline spans nodes, a layer takes the host 2.3 ms more for each further tensor rank, whatever its size."""
FSDP = System("fsdp", True, False, False, 24, 4, 8, 0.0, 0.0, 1.0)
"""FSDP of PyTorch with flash attention."""


def _attention(shape: Shape, system: System, b: int, length: int, heads: int, passes: float) -> tuple[Matmul, ...]:
    """Products of scores and values; `passes` are 1 forward and 2 backward."""
    size = shape.hidden // shape.heads
    if system.flash:
        # both products, causal: half; backward computes the scores again: 2.5 times forward
        count = 0.5 * (2 if passes == 1 else 5)
        return (Matmul(length, shape.sequence, size, b * heads, count, True),)
    return (
        Matmul(length, shape.sequence, size, b * heads, passes),
        Matmul(length, size, shape.sequence, b * heads, passes),
    )


UNFUSED_SCORES = 18.0
"""Numbers of 16 bits that each score moves with scale, mask, softmax in fp32, its casts and dropout one by one."""


def _layer_bytes(shape: Shape, system: System, plan: Plan, tokens: float) -> tuple[float, float]:
    """Bytes that operations of a layer which are no products move, forward and backward.

    Counted per element of [tokens, hidden] in 16 bits: norms, bias-dropout-add, activation, transposes, and without
    flash attention scale-mask-softmax and dropout of the scores.
    """
    h, t = shape.hidden, plan.tensor
    shared = t if plan.sequence else 1
    up = shape.ffn / h * (2 if shape.gated else 1)
    residual = 11.0 if system.fused else 15.0
    forward = residual / shared + (2 * shape.ffn / h + up + 4 + 2 * shape.kv_heads / shape.heads * 2) / t
    backward = 1.9 * residual / shared + (2 * up + 2 * shape.ffn / h + 12) / t
    each = (6.5 if system.dropout else 4) if system.fused else UNFUSED_SCORES
    scores = 0.0 if system.flash else shape.heads / t * shape.sequence / h * each
    unit = system.moved * system.number_bytes * tokens * h
    return unit * (forward + scores), unit * (backward + scores * 1.6)


def _saved(shape: Shape, system: System, plan: Plan, tokens: float) -> float:
    """Activations of a layer for one micro-batch: Korthikanti et al. 2022, table 2, for any non-linearity."""
    h, t, s = shape.hidden, plan.tensor, shape.sequence
    shared = t if plan.sequence else 1
    if plan.recompute == "full":
        return system.number_bytes * tokens * h / shared
    kv = shape.kv_heads / shape.heads
    mlp = (6 if shape.gated else 4) * shape.ffn / h
    replicated = 8 + (2 if system.dropout else 0)
    # counted with two bytes a number
    saved = tokens * h * (replicated / shared + (4 + 4 * kv + mlp) / t) * system.number_bytes / 2
    if system.flash and plan.recompute == "selective":
        return saved / 2  # torchtitan's selective-op: every other product's output is kept
    if not system.flash and plan.recompute == "none":
        saved += tokens * s * shape.heads / t * (5 if system.dropout else 4)
    return saved


def _communication(shape: Shape, system: System, plan: Plan, tokens: float) -> tuple[Collective, ...]:
    """Of a layer's forward; backward sends the same."""
    collectives: list[Collective] = []
    whole = 1.0 * system.number_bytes * tokens * shape.hidden
    if plan.tensor > 1 and plan.sequence:
        hidden, contended = system.hidden_tensor, system.contended_us
        collectives.append(Collective("all_gather", "tensor", whole, 2, hidden, contended))
        collectives.append(Collective("reduce_scatter", "tensor", whole, 2, hidden, contended))
    elif plan.tensor > 1:
        collectives.append(Collective("all_reduce", "tensor", whole, 2, system.hidden_tensor))
    if plan.context > 1:
        keys = 2.0 * system.number_bytes * tokens * plan.context * shape.hidden
        keys *= shape.kv_heads / shape.heads / plan.tensor
        collectives.append(Collective("all_gather", "context", keys, 1, 0.9))
    return tuple(collectives)


@lru_cache(maxsize=100_000)
def layer_work(shape: Shape, system: System, plan: Plan) -> ModuleWork:
    """A layer on one rank; only what matters of the plan may be set in it (see `_reduced`)."""
    b, t, h = plan.micro_size, plan.tensor, shape.hidden
    length = max(1, shape.sequence // plan.context)
    tokens, heads = b * length, max(1, shape.heads // t)
    kv = h // shape.heads * shape.kv_heads
    up = shape.ffn * (2 if shape.gated else 1)
    matrices = ((h, (h + 2 * kv) // t), (h // t, h), (h, up // t), (shape.ffn // t, h))
    sends = _communication(shape, system, plan, tokens)
    back = tuple(one._replace(hidden=max(one.hidden, system.hidden_backward)) for one in sends)
    parameters = shape.layer_matrices / t + 13 * h / t
    sharded = plan.zero == 3 and plan.replicas > 1
    whole = Collective("all_gather", "shard", system.number_bytes * parameters, 1, system.hidden_data)
    gather = (whole,) if sharded else ()
    reduce = (
        (Collective("reduce_scatter", "shard", 1.0 * system.gradient_bytes * parameters, 1, system.hidden_data),)
        if sharded
        else ()
    )
    bytes_forward, bytes_backward = _layer_bytes(shape, system, plan, tokens)
    # Megatron's fused softmax takes scores of four heads at a time
    launches = system.launches + (9 if not system.flash and b * heads % 4 else 0)
    forward = Work(
        tuple(Matmul(tokens, columns, depth) for depth, columns in matrices)
        + _attention(shape, system, b, length, heads, 1),
        bytes_forward,
        launches + 2 * sum(send.calls for send in sends),
        sends + gather,
    )
    # sequence parallelism gathers the inputs of products once more for the gradients of weights
    more = (sends[0]._replace(hidden=1.0),) if plan.sequence and t > 1 else ()
    recompute = forward if plan.recompute == "full" else Work()
    if plan.recompute == "selective" and system.flash:  # torchtitan's: all but every other product and attention
        products = tuple(Matmul(tokens, columns, depth, calls=0.5) for depth, columns in matrices)
        recompute = Work(products, bytes_forward, launches - 3)
    elif plan.recompute == "selective":
        scores = _attention(shape, system, b, length, heads, 1)
        recompute = Work(scores, 13.0 * b * length * shape.sequence * heads, 4)
    return ModuleWork(
        forward,
        Work(
            tuple(Matmul(tokens, depth, columns) for depth, columns in matrices)
            + _attention(shape, system, b, length, heads, 2),
            bytes_backward,
            2 * launches - 4 + 2 * sum(send.calls for send in sends),
            back + more + (gather if plan.recompute != "full" else ()),
        ),
        Work(
            tuple(Matmul(depth, columns, tokens) for depth, columns in matrices),
            system.accumulation_bytes * parameters,
            4,
            reduce,
        ),
        recompute,
        _saved(shape, system, plan, tokens),
        _saved(shape, system, plan._replace(recompute="none"), tokens) if plan.recompute != "none" else 0.0,
        parameters=parameters,
    )


@lru_cache(maxsize=100_000)
def head_work(shape: Shape, system: System, plan: Plan) -> ModuleWork:
    """Final norm, output matrix and loss on one rank: logits in 16 bits and in fp32."""
    tokens = plan.micro_size * max(1, shape.sequence // plan.context)
    columns = math.ceil(shape.vocab / (TILES * plan.tensor)) * TILES
    h, logits = shape.hidden, 1.0 * tokens * columns
    return ModuleWork(
        Work((Matmul(tokens, columns, h),), logits * 22 + 8.0 * tokens * h, 14),
        Work((Matmul(tokens, h, columns),), logits * 14 + 12.0 * tokens * h, 8),
        Work((Matmul(h, columns, tokens),), system.accumulation_bytes * columns * h, 1),
        Work(),
        tokens * h * 4 + 10 * logits,
        parameters=columns * h,
    )


TILES = 128
"""Vocabularies are padded to a multiple of so many rows on each tensor-parallel rank."""


def embedding_work(shape: Shape, system: System, plan: Plan) -> ModuleWork:
    """The lookup of words and positions."""
    tokens = plan.micro_size * max(1, shape.sequence // plan.context)
    whole = 1.0 * system.number_bytes * tokens * shape.hidden
    sends = (Collective("all_reduce", "tensor", whole),) if plan.tensor > 1 else ()
    rows = math.ceil(shape.vocab / (TILES * plan.tensor)) * TILES + shape.sequence
    return ModuleWork(
        Work((), whole * 5, 6, sends),
        Work((), whole * 6, 5),
        Work(),
        saved_bytes=1.0 * tokens * shape.hidden,
        parameters=rows * shape.hidden,
    )


def _reduced(plan: Plan) -> Plan:
    """The plan as far as a module's work depends on it."""
    return plan._replace(
        pipeline=1,
        virtual=1,
        micro_batches=1,
        schedule="1f1b",
        light_ends=False,
        data=2 if plan.data > 1 else 1,
        zero=3 if plan.zero == 3 else 0,
        layers=(),
        recomputed=0,
        zero_group=0,
        offload=(),
    )


@lru_cache(maxsize=10_000)
def describe(shape: Shape, system: System, plan: Plan) -> Workload:
    """The workload of a step."""
    reduced = _reduced(plan)
    modules = {
        "embedding": embedding_work(shape, system, reduced),
        "layer": layer_work(shape, system, reduced),
        "head": head_work(shape, system, reduced),
    }
    if plan.recomputed:
        modules["recomputed"] = layer_work(shape, system, reduced._replace(recompute="full"))
    return assemble(shape, system, plan, modules)
