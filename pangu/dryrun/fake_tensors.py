"""Fake tensors (shapes without memory) whose mode caches the outputs of each operation by input shapes.

torch caches them as well, but its lookup took most of a dry run's time. An output with its own memory is recreated in
the cached shape; a view is recreated by torch's kernel for meta tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from pangu.dryrun.operators import tensors_in

_Outputs = Callable[["FakeTensors", OpOverload, Sequence[Any], Mapping[str, Any]], Any]
"""Function that returns the outputs of an operation."""
_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Argument types that their value describes completely."""
_MORE_THAN_SHAPES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operators whose outputs depend on values, or that change an input's shape."""


class FakeTensors(FakeTensorMode):
    """Fake tensor mode with a faster cache than torch's."""

    avoid_device_init = True
    """True to avoid device initialization, for which torch needs a driver."""
    _learned: ClassVar[dict[tuple[Any, ...], _Outputs]] = {}
    """Mapping from operation and arguments to the function for its outputs; process-wide, like torch's own cache."""

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
        outputs = self._learned.get(key)
        if outputs is not None:
            return outputs(self, func, args, kwargs)
        result = super().dispatch(func, types, args, kwargs)
        outputs = _learn(func, list(tensors_in((*args, *kwargs.values()))), result)
        if outputs is not None:
            self._learned[key] = outputs
        return result

    def _describe(self, values: Iterable[Any], into: list[Any]) -> bool:
        """Append everything that outputs can depend on; return False if that is not possible."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self:
                    return False
                into += (value.shape, value.stride(), value.dtype, value.fake_device)
            elif kind in _PLAIN:
                into += (kind, value)  # 1 equals 1.0, but gives other dtypes
            elif kind is list or kind is tuple:
                into += (kind, len(value))
                if not self._describe(value, into):
                    return False
            else:
                return False
        return True


def _learn(function: OpOverload, inputs: list[Tensor], result: Any) -> _Outputs | None:
    """Return a function that recreates the outputs for such inputs, or None if the inputs do not determine them."""
    if function.namespace != "aten" or not _MORE_THAN_SHAPES.isdisjoint(function.tags):
        return None
    several = isinstance(result, (list, tuple))
    outputs = list(result) if several else [result]
    memory = {tensor.untyped_storage()._cdata for tensor in inputs}
    if all(type(output) is FakeTensor and output.untyped_storage()._cdata in memory for output in outputs):
        places = [i for output in outputs for i, tensor in enumerate(inputs) if tensor is output]
        if not places:
            return _shared([output.fake_device for output in outputs], several)
        return _given(places[0]) if not several else None
    if not all(_is_new(output, memory) for output in outputs):
        return None
    parts = [_maker(output) for output in outputs]
    if several:
        return lambda mode, *_: [make(mode) for make in parts]
    return lambda mode, *_: parts[0](mode)


def _given(place: int) -> _Outputs:
    return lambda mode, function, args, kwargs: [*tensors_in((*args, *kwargs.values()))][place]


def _shared(devices: list[torch.device], several: bool) -> _Outputs:

    def view(mode: FakeTensors, function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with in_kernel_invocation_manager(mode):
            result = function(*args, **kwargs)
        if not several:
            return FakeTensor(mode, result, devices[0])
        return [FakeTensor(mode, one, device) for one, device in zip(result, devices, strict=True)]

    return view


def _is_new(output: Any, memory: set[int]) -> bool:
    if type(output) is not FakeTensor:
        return type(output) in _PLAIN
    storage = output.untyped_storage()
    fresh = storage._cdata not in memory and output.storage_offset() == 0 and output.constant is None
    return fresh and not output.requires_grad and storage.nbytes() == _empty(output).untyped_storage().nbytes()


def _empty(like: Tensor) -> Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")


def _maker(output: Any) -> Callable[[FakeTensors], Any]:
    if type(output) is not FakeTensor:
        return lambda mode: output
    shape, stride, dtype, device = output.shape, output.stride(), output.dtype, output.fake_device
    empty = torch.empty_strided
    return lambda mode: FakeTensor(mode, empty(shape, stride, dtype=dtype, device="meta"), device)
