"""Fake tensors (shapes without memory) whose mode caches the outputs of each operation by input shapes.

torch caches them as well, but its lookup took most of a dry run's time. An output with its own memory is recreated in
the cached shape; a view is recreated by torch's kernel for meta tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from pangu.dryrun.operators import tensors_in

_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Argument types that their value describes completely."""
_MORE_THAN_SHAPES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operators whose outputs depend on values, or that change an input's shape."""


class FakeTensors(FakeTensorMode):
    """Fake tensor mode with a faster cache than torch's."""

    avoid_device_init = True
    """True to avoid device initialization, for which torch needs a driver."""
    _learned: ClassVar[dict[tuple[Any, ...], Any]] = {}
    """Mapping from operation and arguments to its outputs, and whether there may be several: the index of the input
    that it returns, the device of views, or each one's shape, strides, dtype and device, or value. Process-wide."""

    def __init__(self) -> None:
        """Create the mode with torch's cache turned off."""
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's cache

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Return the outputs of an operation."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.addmm.dtype_out:  # its decomposition in torch 2.11 has no `out_dtype`
            return kwargs["out"]
        description: list[Any] = [func, *kwargs]
        if not (self._describe(args, description) and self._describe(kwargs.values(), description)):
            return super().dispatch(func, types, args, kwargs)
        key = tuple(description)
        known = self._learned.get(key)
        if known is None:
            result = super().dispatch(func, types, args, kwargs)
            known = _learn(func, list(tensors_in((*args, *kwargs.values()))), result)
            if known is not None:
                self._learned[key] = known
            return result
        outputs, several = known
        if type(outputs) is int:
            return [*tensors_in((*args, *kwargs.values()))][outputs]
        if type(outputs) is torch.device:
            with in_kernel_invocation_manager(self):
                result = func(*args, **kwargs)
            return [FakeTensor(self, one, outputs) for one in result] if several else FakeTensor(self, result, outputs)
        made = [self._made(one) for one in outputs]
        return made if several else made[0]

    def _made(self, known: Any) -> Any:
        if type(known) is not tuple:
            return known
        shape, stride, dtype, device = known
        return FakeTensor(self, torch.empty_strided(shape, stride, dtype=dtype, device="meta"), device)

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
    if function.namespace != "aten" or not _MORE_THAN_SHAPES.isdisjoint(function.tags):
        return None
    several = isinstance(result, (list, tuple))
    outputs = list(result) if several else [result]
    memory = {tensor.untyped_storage()._cdata for tensor in inputs}
    if outputs and all(type(one) is FakeTensor and one.untyped_storage()._cdata in memory for one in outputs):
        given = [place for place, one in enumerate(inputs) if any(one is output for output in outputs)]
        if given:
            return None if several else (given[0], False)
        return outputs[0].fake_device, several
    if not all(type(one) in _PLAIN or _is_new(one, memory) for one in outputs):
        return None
    return [_description(one) if type(one) is FakeTensor else one for one in outputs], several


def _description(tensor: Any) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.fake_device


def _is_new(output: Any, memory: set[int]) -> bool:
    if type(output) is not FakeTensor or output.storage_offset() or output.constant is not None or output.requires_grad:
        return False
    storage = output.untyped_storage()
    full = torch.empty_strided(output.shape, output.stride(), dtype=output.dtype, device="meta").untyped_storage()
    return storage._cdata not in memory and storage.nbytes() == full.nbytes()
