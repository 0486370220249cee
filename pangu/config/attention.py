"""Limits of each attention kernel, as data, and the reasons why a kernel cannot train a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pangu.common.errors import Problem
from pangu.config.model import ModelConfig


@dataclass(frozen=True)
class Abilities:
    """Limits of one attention kernel; every kernel supports causal, document and sliding-window masks and GQA."""

    devices: tuple[str, ...] | None = None
    """Device types with a forward and a backward pass; None: all."""
    precisions: tuple[str, ...] | None = None
    """Supported values of `precision.compute`; None: all."""
    head_sizes: tuple[int, int] | None = None
    """Smallest and largest supported head size; None: any."""
    head_multiple: int = 1
    """Number that must divide the head size."""
    positions: tuple[str, ...] = ("learned", "rope", "alibi", "relative")
    """Supported values of `model.positions`."""
    scores: bool = False
    """True if the kernel can return its attention scores."""
    sparse: bool = True
    """True if the kernel applies the mask of `model.sparse`."""
    sinks: bool = True
    """True if the kernel gives what `model.attention_sinks` needs, the sum of exponentials of a query."""
    blocks: bool = False
    """True if the kernel can attend to a block of the keys, which gather and ring context parallelism need."""
    hashed: bool = False
    """True if the dropout mask depends only on seed, step, layer, sample, head and positions, never on the layout."""
    ordered: bool = True
    """True if sums are accumulated in a fixed order, so that results are deterministic."""


ABILITIES = {
    "reference": Abilities(scores=True, blocks=True, hashed=True),
    "sdpa": Abilities(blocks=True),
    "cudnn": Abilities(
        ("cuda",), ("bf16", "fp16"), (8, 128), 8, positions=("learned", "rope"), ordered=False, sinks=False
    ),
    "flash": Abilities(
        ("cuda",), ("bf16", "fp16"), (8, 256), 8, positions=("learned", "rope"), sparse=False, blocks=True
    ),
    # torch 2.13: no backward on a CPU; the compiled kernel begins at 16 columns
    "flex": Abilities(("cuda",), ("fp32", "bf16", "fp16"), (16, 256), hashed=True, ordered=False),
    "flash_attn": Abilities(
        ("cuda",), ("bf16", "fp16"), (8, 256), positions=("learned", "rope", "alibi"), sparse=False, sinks=False
    ),
    "triton": Abilities(
        ("cuda",), ("bf16", "fp16"), (1, 256), positions=("learned", "rope"), sparse=False, blocks=True, hashed=True
    ),
}
"""Limits of the kernels, by value of `model.attention`."""


def obstacles(kernel: str, model: ModelConfig, precision: str, device: str | None = None) -> Iterator[Problem]:
    """Yield the reasons why a kernel (a key of `ABILITIES`) cannot train a model; `device` None: type not known yet."""
    can = ABILITIES[kernel]

    def problem(rule: str, fix: str = "") -> Problem:
        other = "set model.attention=auto"
        return Problem("model.attention", kernel, rule, f"{fix}, or {other}" if fix else other)

    if can.devices is not None and device is not None and device not in can.devices:
        yield problem(f"needs a device of type {_either(can.devices)}, got {device}")
    if can.precisions is not None and precision not in can.precisions:
        rule = f"does not support precision.compute = {precision}"
        yield problem(rule, f"set precision={_either(can.precisions)}")
    if can.head_sizes is not None and not can.head_sizes[0] <= model.head_size <= can.head_sizes[1]:
        low, high = can.head_sizes
        yield problem(f"needs a head size from {low} to {high}, got {model.head_size_key} = {model.head_size}")
    if model.head_size % can.head_multiple:
        rule = f"needs a head size that is a multiple of {can.head_multiple}"
        yield problem(f"{rule}, got {model.head_size_key} = {model.head_size}")
    if model.positions not in can.positions:
        yield problem(f"does not support the attention bias of model.positions = {model.positions}")
    if model.sparse is not None and not can.sparse:
        yield problem(f"cannot skip the blocks of model.sparse.kind = {model.sparse.kind}", "use flex or sdpa")
    if model.attention_sinks and not can.sinks:
        yield problem("does not support model.attention_sinks", "use flash, triton or flex")
    if model.residual_scores and not can.scores:
        yield problem("does not return the scores that model.residual_scores=true passes on", "use reference")


def _either(values: tuple[str, ...]) -> str:
    return " or ".join(values)
