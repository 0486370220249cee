"""Tensors without memory: torch's fake ones, which learn once what an operation makes of tensors of given shapes.

torch remembers that as well, but looking it up there took most of a dry run's time. What has a memory of its own is
made anew in the shape that it had before; what shares an input's memory is made by torch's kernel for mere shapes.
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
"""Gives what an operation gives."""
_PLAIN = {type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
"""Types of arguments of which the value tells all."""
_MORE_THAN_SHAPES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Outputs depend on values, or an input takes another shape."""


class FakeTensors(FakeTensorMode):
    """As torch's, quicker."""

    avoid_device_init = True
    """torch asks for a driver unless it is told that there is none."""
    _learned: ClassVar[dict[tuple[Any, ...], _Outputs]] = {}
    """Operation and arguments -> what gives the outputs. Of the process, as torch's own: it depends on nothing else."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.cache_enabled = False  # torch's own

    def dispatch(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """An operation's outputs."""
        kwargs = kwargs or {}
        if func is torch.ops.aten.addmm.dtype_out:  # torch 2.11 has a decomposition for it that takes no `out_dtype`
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
        """Append what outputs can depend on; false where there is more than that."""
        for value in values:
            kind = type(value)
            if kind is FakeTensor:
                if value.constant is not None or value.fake_mode is not self:
                    return False
                into += (value.shape, value.stride(), value.dtype, value.fake_device)
            elif kind in _PLAIN:
                into += (kind, value)  # 1 is 1.0, but makes other formats
            elif kind is list or kind is tuple:
                into += (kind, len(value))
                if not self._describe(value, into):
                    return False
            else:
                return False
        return True


def _learn(function: OpOverload, inputs: list[Tensor], result: Any) -> _Outputs | None:
    """What gives such outputs for such inputs, if their description is enough."""
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
