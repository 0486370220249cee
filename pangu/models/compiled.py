"""Whole layers compiled by torch.compile: one graph without breaks each, and shared code for layers of a kind."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as partitioner
from torch.utils._triton import has_triton

from pangu.common.errors import ConfigError, LocalError, Problem, is_out_of_memory
from pangu.layers.dropout import DropoutKeys
from pangu.layers.fused import allow_kinds
from pangu.layers.graph import GraphDropout, GraphTensors, TensorKeys, hold_in_graph
from pangu.layers.kernels import Reference
from pangu.layers.recompute import checkpointed
from pangu.models.block import Block, FeedForward, ForwardContext, HiddenStates
from pangu.models.language_model import LanguageModel
from pangu.topology.placement import TensorRank

log = logging.getLogger("pangu")

BACKEND = "inductor"
ALIGNMENT = 16
"""Bytes that a GPU kernel reads at once."""


def obstacle(device: torch.device) -> str | None:
    """Return why nothing can be compiled for a device here, or None if it can."""
    if device.type != "cpu":
        return None if has_triton() else f"torch has no Triton for {device.type} here"
    # torch's compiler: only runs that compile load it
    from torch._inductor.cpp_builder import get_cpp_compiler  # noqa: PLC0415
    from torch._inductor.exc import InvalidCxxCompiler  # noqa: PLC0415

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler found (install g++, or set CXX)"
    return None


def ways(asked: bool | str, device: torch.device) -> list[str]:
    """Return the candidates for a `compile` option other than false; "true" compiles layers."""
    # Raises ConfigError if compilation is required but impossible here.
    reason = obstacle(device)
    if asked == "auto":
        if reason:
            log.info("%-12s %s", "compile", reason)
        return ["false"] if reason else ["false", "true"]
    if reason:
        raise ConfigError([Problem("compile", True, reason, "set compile=false or compile=auto")])
    return ["true"]


class CompiledBlocks:
    """Blocks computed by compiled code in training; evaluation, whose lengths vary, is not compiled."""

    def __init__(self, model: LanguageModel, splits_backward: bool) -> None:
        """Prepare the blocks; `splits_backward`: the schedule postpones weight gradients."""
        self._heads = model.config.heads
        self._last: tuple[DropoutKeys, TensorKeys] | None = None
        """Keys of the last micro-batch."""
        self._bias = [] if model.position_bias is None else list(model.position_bias.parameters())
        """Learned bias of all layers, which the kernel of a micro-batch holds."""
        for block in model.layers.values():
            assert isinstance(block, Block)
            if not isinstance(block.mlp, FeedForward):
                continue
            _require_alignment(block)
            for layer in block.modules():
                hold_in_graph(layer)
            block.attention_dropout = GraphDropout(block.attention_dropout)
            block.mlp_dropout = GraphDropout(block.mlp_dropout)
            block.attention.core.dropout = GraphDropout(block.attention.core.dropout)
        allow_kinds()
        self._compute = _compiled(splits_backward)

    def __call__(
        self, block: Block, below: HiddenStates, context: ForwardContext, queries: Tensor | None, on: bool
    ) -> HiddenStates:
        """Return `checkpointed(block, below, context, queries, on=on)`; raise `LocalError` if it cannot be compiled."""
        # the number of rows of an expert varies: no graph of fixed shapes
        if not torch.is_grad_enabled() or not isinstance(block.mlp, FeedForward):
            return checkpointed(block, below, context, queries, on=on)
        keys, kernel = context.keys, context.kernels[block.attention.has_window]
        if keys is not None:
            dropouts = block.attention.core.dropout, block.attention_dropout, block.mlp_dropout
            if not isinstance(kernel, Reference):
                dropouts[0].in_kernel(keys)  # seeds the generator that the kernel draws from
            keys = self._shared(keys, dropouts[0].region).at(dropouts)
        if isinstance(bounds := vars(kernel).get("bounds"), Tensor):
            torch._dynamo.maybe_mark_dynamic(bounds, 0)  # as many as the micro-batch has documents
        inputs = (below.hidden, queries, *self._bias, *block.parameters())
        trains = any(one is not None and one.requires_grad for one in inputs)
        try:
            with torch.set_grad_enabled(trains):  # torch recomputes no dropout in a graph without a backward pass
                return self._compute(block, below, replace(context, keys=keys, saved=GraphTensors()), queries, on)
        except torch._dynamo.exc.TorchDynamoException as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).strip().splitlines()[:2])
            raise LocalError(f"compile = true: a layer cannot be compiled ({reason}); set compile=false") from error

    def _shared(self, keys: DropoutKeys, region: TensorRank) -> TensorKeys:
        if self._last is None or self._last[0] is not keys:
            self._last = keys, TensorKeys.of(keys, region, self._heads)
        return self._last[1]


def _compiled(splits_backward: bool) -> Callable[..., HiddenStates]:
    options: dict[str, Any] | None = None
    if BACKEND == "inductor":
        options = {"fallback_random": True}  # the same dropout in a kernel as without a graph
        if splits_backward:
            # postponed gradients keep tensors of the backward pass: their memory must not be reused
            options |= {"allow_buffer_reuse": False, "inplace_buffers": False}
    # torch would keep dropout masks for backward, which take many operators to compute (holds for the whole process)
    partitioner.ban_recompute_long_fusible_chains = False
    partitioner.ban_recompute_used_far_apart = False
    return torch.compile(_compute, fullgraph=True, dynamic=False, backend=BACKEND, options=options)


def _compute(
    block: Block, below: HiddenStates, context: ForwardContext, queries: Tensor | None, recompute: bool
) -> HiddenStates:
    return checkpointed(block, below, context, queries, on=recompute)


def _require_alignment(block: Block) -> None:
    # compiled code assumes the alignment of the first layer's weights for all layers that share it, without a check
    for parameter in block.parameters():
        if parameter.device.type != "cpu" and parameter.storage_offset() * parameter.itemsize % ALIGNMENT:
            rule = f"a weight of shape {list(parameter.shape)} is not aligned to {ALIGNMENT} bytes"
            fix = "set compile=false, or use sizes that are multiples of 8 on each rank"
            raise ConfigError([Problem("compile", True, rule, fix)])
