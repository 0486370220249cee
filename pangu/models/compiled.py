"""Layers compiled by torch.compile: graphs without breaks, whose code layers of a kind share.

A layer is one graph, unless it has what cannot be traced: keys that ranks exchange, kernels of other packages, logits
that are recorded, or experts, whose numbers of rows vary. These are computed between graphs, at the bars:

    context parallelism    norm, projections | attention | output, residual, norm, feed-forward, residual
    experts                norm, projections, attention, output, residual | norm, experts, residual

Shared experts are a graph from their activation on, which is computed while routed experts exchange tokens.
"""

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
from pangu.config.layout_checks import shares_keys
from pangu.config.optimizer import qk_clip_of
from pangu.config.schema import RunConfig
from pangu.layers.dropout import DropoutKeys
from pangu.layers.experts import MixtureOfExperts
from pangu.layers.fused import allow_kinds
from pangu.layers.graph import GraphDropout, GraphTensors, TensorKeys, hold_in_graph
from pangu.layers.kernels import QKV, Reference
from pangu.layers.recompute import Result, checkpointed
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

    def __init__(self, model: LanguageModel, config: RunConfig, kernel: str, splits_backward: bool) -> None:
        """Prepare the blocks; `kernel`: that of attention; `splits_backward`: weight gradients are postponed."""
        self._heads = model.config.heads
        self._last: tuple[DropoutKeys, TensorKeys] | None = None
        """Keys of the last micro-batch."""
        self._bias = [] if model.position_bias is None else list(model.position_bias.parameters())
        """Learned bias of all layers, which the kernel of a micro-batch holds."""
        self._projects = not shares_keys(config)
        """True if a graph makes queries, keys and values."""
        untraced = config.parallel.context > 1 or qk_clip_of(config.optimizer) is not None or kernel == "flash_attn"
        untraced = untraced or (config.model.attention_sinks and kernel not in ("reference", "flex"))
        self._attends = self._projects and not untraced
        """True if the same graph contains attention."""
        for block in model.layers.values():
            assert isinstance(block, Block)
            _require_alignment(block)
            for layer in block.modules():
                hold_in_graph(layer)
            block.attention_dropout = GraphDropout(block.attention_dropout)
            block.mlp_dropout = GraphDropout(block.mlp_dropout)
            block.attention.core.dropout = GraphDropout(block.attention.core.dropout)
            if isinstance(block.mlp, MixtureOfExperts) and isinstance(block.mlp.shared, FeedForward):
                block.mlp.shared.compute = self._run
        allow_kinds()
        self._compute = _compiled(splits_backward)

    def __call__(
        self, block: Block, below: HiddenStates, context: ForwardContext, queries: Tensor | None, on: bool
    ) -> HiddenStates:
        """Return `checkpointed(block, below, context, queries, on=on)`; raise `LocalError` if it cannot be compiled."""
        if not torch.is_grad_enabled():
            return checkpointed(block, below, context, queries, on=on)
        if self._attends and isinstance(block.mlp, FeedForward):
            trains = self._needs_gradient(below.hidden, queries, *block.parameters())
            return self._run(block, below, self._traced(block, context), queries, on=on, trains=trains)
        return checkpointed(self._in_parts, block, below, context, queries, on=on)

    def _in_parts(
        self, block: Block, below: HiddenStates, context: ForwardContext, queries: Tensor | None
    ) -> HiddenStates:
        (x, scores), traced = below, self._traced(block, context)
        if self._attends:
            weights = (weight for name, weight in block.named_parameters() if name.startswith("attention"))
            trains = self._needs_gradient(x, queries, *weights)
            joined, scores = self._run(_attend, block, below, traced, queries, trains=trains)
        else:
            run, within = (self._run, traced) if self._projects else (checkpointed, context)
            attended, scores = block.attend(run(_project, block, x, within, queries, on=False), context, scores)
            joined = self._run(_join, block, x, attended, traced)
        if not isinstance(block.mlp, FeedForward):
            joined = block.feed(joined, x, context)
        return HiddenStates(joined, scores)

    def _traced(self, block: Block, context: ForwardContext) -> ForwardContext:
        """Return the context for graphs."""
        keys, kernel = context.keys, context.kernels[block.attention.has_window]
        if keys is not None:
            dropouts = block.attention.core.dropout, block.attention_dropout, block.mlp_dropout
            if self._attends and not isinstance(kernel, Reference):
                dropouts[0].in_kernel(keys)  # seeds the generator that the kernel draws from
            keys = self._shared(keys, dropouts[0].region).at(dropouts)
        if isinstance(bounds := vars(kernel).get("bounds"), Tensor):
            torch._dynamo.maybe_mark_dynamic(bounds, 0)  # as many as the micro-batch has documents
        return replace(context, keys=keys, saved=GraphTensors())

    def _needs_gradient(self, *inputs: Tensor | None) -> bool:
        return any(one is not None and one.requires_grad for one in (*inputs, *self._bias))

    def _run(self, compute: Callable[..., Result], *arguments: Any, on: bool = False, trains: bool = True) -> Result:
        """Return `checkpointed(compute, *arguments, on=on)`; unless it `trains`, no graph has a backward pass."""
        if not torch.is_grad_enabled():
            return checkpointed(compute, *arguments, on=on)
        try:
            with torch.set_grad_enabled(trains):  # torch recomputes no dropout in a graph without a backward pass
                return self._compute(compute, *arguments, on=on)
        except torch._dynamo.exc.TorchDynamoException as error:
            if is_out_of_memory(error):
                raise
            reason = " ".join(str(error).strip().splitlines()[:2])
            raise LocalError(f"compile = true: a layer cannot be compiled ({reason}); set compile=false") from error

    def _shared(self, keys: DropoutKeys, region: TensorRank) -> TensorKeys:
        if self._last is None or self._last[0] is not keys:
            self._last = keys, TensorKeys.of(keys, region, self._heads)
        return self._last[1]


# One function each, and not a method of every layer, so that layers share what is compiled of it.
def _project(block: Block, x: Tensor, context: ForwardContext, queries: Tensor | None) -> QKV:
    return block.project(x, context, queries)


def _attend(block: Block, below: HiddenStates, context: ForwardContext, queries: Tensor | None) -> HiddenStates:
    x, scores = below
    attended, scores = block.attend(block.project(x, context, queries), context, scores)
    return HiddenStates(_join(block, x, attended, context), scores)


def _join(block: Block, x: Tensor, attended: Tensor, context: ForwardContext) -> Tensor:
    joined = block.join(x, attended, context)
    return block.feed(joined, x, context) if isinstance(block.mlp, FeedForward) else joined


def _compiled(splits_backward: bool) -> Callable[..., Any]:
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


def _compute(compute: Callable[..., Result], *arguments: Any, on: bool) -> Result:
    return checkpointed(compute, *arguments, on=on)


def _require_alignment(block: Block) -> None:
    # compiled code assumes the alignment of the first layer's weights for all layers that share it, without a check
    for name, parameter in block.named_parameters():
        if name.startswith(("mlp.router", "mlp.experts")):
            continue
        if parameter.device.type != "cpu" and parameter.storage_offset() * parameter.itemsize % ALIGNMENT:
            rule = f"a weight of shape {list(parameter.shape)} is not aligned to {ALIGNMENT} bytes"
            fix = "set compile=false, or use sizes that are multiples of 8 on each rank"
            raise ConfigError([Problem("compile", True, rule, fix)])
