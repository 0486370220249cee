"""Fake tensors (shapes without memory): a mode that caches outputs, and kernels for them with the same work.

torch caches the outputs of operations by input shapes as well, but its lookup took most of a dry run's time. An output
with its own memory is recreated in the cached shape; a view is recreated by torch's kernel for meta tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.autograd import Function

from pangu.config.parallelism import peak_expert_load
from pangu.config.schema import RunConfig
from pangu.dryrun.operators import operator_of, tensors_in
from pangu.layers import attention_blocks, gpu_kernels
from pangu.layers.kernels import QKV
from pangu.zero import flat_parameter

_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Argument types that their value describes completely."""
_MORE_THAN_SHAPES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operators whose outputs depend on values, or that change an input's shape."""
_INTO_SUM = (torch.ops.aten.addmm.dtype_out, torch.ops.aten._scaled_mm.out)
"""Operators without kernels for fake tensors (the former in torch 2.11) that return their `out`."""
_empty = partial(torch.empty_strided, device="meta")


class FakeTensors(FakeTensorMode):
    """Fake tensor mode with a faster cache than torch's."""

    avoid_device_init = True
    """True to avoid device initialization, for which torch needs a driver."""
    _learned: ClassVar[dict[tuple[Any, ...], Any]] = {}
    """Mapping from operation and arguments to its outputs, and whether there may be several: the index of the input
    that it returns, or each one's shape, strides, dtype and device, or value. Process-wide."""

    def __init__(self) -> None:
        """Create the mode with torch's cache turned off."""
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's cache
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        """Attributes of the fake tensors of each device."""

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the outputs of an operation."""
        kwargs = kwargs or {}
        if func in _INTO_SUM:
            return kwargs["out"]
        # composite operators such as `to` may copy
        is_view = operator_of(func).view and not func._can_decompose() and getattr(args[0], "constant", self) is None
        if is_view or func.namespace == "c10d":
            with in_kernel_invocation_manager(self):
                result = func(*args, **kwargs)
            if not is_view:
                return result
            device = args[0].fake_device
            return [self._fake(one, device) for one in result] if type(result) is list else self._fake(result, device)
        description: list[Any] = [func, *kwargs]
        if not (self._describe(args, description) and self._describe(kwargs.values(), description)):
            return super().dispatch(func, types, args, kwargs)
        key = tuple(description)
        if (known := self._learned.get(key)) is None:
            result = super().dispatch(func, types, args, kwargs)
            if known := _learn(func, list(tensors_in((*args, *kwargs.values()))), result):
                self._learned[key] = known
            return result
        outputs, several = known
        if type(outputs) is int:
            return [*tensors_in((*args, *kwargs.values()))][outputs]
        made = [self._fake(_empty(*one[:2], dtype=one[2]), one[3]) if type(one) is tuple else one for one in outputs]
        return made if several else made[0]

    def _fake(self, tensor: Tensor, device: torch.device) -> Tensor:
        """Return a fake tensor with the memory of one on the meta device; its constructor takes far longer."""
        if device not in self._attributes:
            self._attributes[device] = vars(FakeTensor(self, tensor, device))
        fake = Tensor._make_subclass(FakeTensor, tensor, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_warn_deprecated_on_mutable_data_ptr(fake)  # as its constructor does
        vars(fake).update(self._attributes[device])
        return fake

    def _describe(self, values: Iterable[Any], into: list[Any]) -> bool:
        """Append everything that outputs can depend on; return False if that is not possible."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self:
                    return False
                into += _description(value)
            elif kind in _PLAIN:
                into += (kind, value)  # 1 equals 1.0, but gives other dtypes
            elif kind is list or kind is tuple:
                into += (kind, len(value))
                if not self._describe(value, into):
                    return False
            else:
                return False
        return True


def _learn(function: OpOverload, inputs: list[Tensor], result: Any) -> tuple[Any, bool] | None:
    """Return the entry of `FakeTensors._learned` for such inputs, or None if they do not determine the outputs."""
    if function.namespace not in ("aten", "pangu") or not _MORE_THAN_SHAPES.isdisjoint(function.tags):
        return None
    several = isinstance(result, (list, tuple))
    outputs = list(result) if several else [result]
    memory = {tensor.untyped_storage()._cdata for tensor in inputs}
    if given := [place for place, one in enumerate(inputs) if one is result]:
        return given[0], False
    if not all(type(one) in _PLAIN or _is_new(one, memory) for one in outputs):
        return None
    return [_description(one) if type(one) is FakeTensor else one for one in outputs], several


def _description(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device


def _is_new(output: Any, memory: set[int]) -> bool:
    if type(output) is not FakeTensor or output.storage_offset() or output.constant is not None or output.requires_grad:
        return False
    storage = output.untyped_storage()
    full = _empty(output.shape, output.stride(), dtype=output.dtype).untyped_storage()
    return storage._cdata not in memory and storage.nbytes() == full.nbytes()


_flash = torch.ops.aten._scaled_dot_product_flash_attention
"""Kernel of queries, keys, values [batch, heads, sequence, size], dropout and causality; output, log-sum-exp first."""


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return attention by the kernel that torch uses on a device; for fake tensors it would store all scores."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    if attn_mask is None and query.dtype.itemsize == 2 and query.shape[-1] <= 256:
        return _flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:  # torch converts it in every layer, too
            bias = torch.zeros_like(attn_mask, dtype=query.dtype)
            attn_mask = bias.masked_fill_(attn_mask.logical_not(), -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


class _Sums(Function):
    """Log-sum-exp of the softmax for FlexAttention: attends to few value columns and keeps the result."""

    @staticmethod
    def forward(ctx: Any, *qkv: Tensor) -> Tensor:
        sums = _flash(*qkv, 0.0, True)[1]
        ctx.save_for_backward(*qkv, qkv[0].new_empty(*qkv[0].shape[:-1], qkv[2].shape[-1]), sums)
        return sums.to(qkv[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *qkv, output, sums = ctx.saved_tensors
        state = output.new_empty(2, dtype=torch.int64)
        backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
        lengths = qkv[0].shape[2], qkv[1].shape[2]
        return (*backward(output, *qkv, output, sums, state, state, *lengths, 0.0, True, state, state)[:2], None)


def flex(
    qkv: QKV, score_mod: object, blocks: object, rows: Tensor | None, dropout: float, sinks: Tensor | None
) -> Tensor:
    """Return FlexAttention's output with the same memory and matmuls; the audit knows how many blocks are computed."""
    output, log_sum, *_ = _flash(*qkv, 0.0, True)
    shares = []
    if rows is not None:
        shares.append(_Sums.apply(qkv.query, qkv.key, qkv.value[..., : gpu_kernels.FEWEST_COLUMNS].detach()))
    if sinks is not None:
        key_log_sum = log_sum.detach()
        shares.append((key_log_sum - attention_blocks.with_sinks(key_log_sum, sinks)).exp().to(output.dtype))
    return output * math.prod(shares)[..., None] if shares else output


def row_counts(config: RunConfig, counts: Tensor, most: Sequence[int]) -> list[list[list[int]]]:
    """Return the rows that the fullest rank of experts sends to each rank and gets from it, still with a host sync."""
    counts.cpu()
    ranks = counts.shape[1]
    fullest = peak_expert_load(config.model, config.parallel.expert_imbalance, ranks)
    sent = [[rows // ranks + (rank < rows % ranks) for rows in most] for rank in range(ranks)]
    return [sent, [[math.ceil(fullest * rows) for rows in row] for row in sent]]


REPLACED: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.nn.functional, {"scaled_dot_product_attention": attention}),
    (gpu_kernels, {"_flex": lambda compiled: flex, "can_run": lambda kernel, device: True}),
    (flat_parameter.FlatParameter, {"fill": lambda *_: None}),
)
"""Functions that fake tensors need others for: module, and its functions by name."""
