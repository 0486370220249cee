"""Operators that are one kernel on an accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

_LIBRARY = torch.library.Library("pangu", "FRAGMENT")


def fused(
    schema: str, result: Callable[..., Tensor], on_cpu: Callable[..., Tensor] | None = None
) -> Callable[..., Any]:
    """Decorates a function of tensors, numbers and None: `torch.ops.pangu` gets the operator of this schema.

    On an accelerator Inductor makes one Triton kernel of it, another for other shapes, formats and floating numbers.
    Integers come as tensors without dimensions on the host, which are arguments of the kernel: others do not compile it
    again. Without Triton the function runs as it stands. Autograd does not look into it, and the auditor of a dry run
    counts one launch. No device has run it yet; `tests/gpu` has what one must show.

    Args:
        result: an uninitialized tensor like the result.
        on_cpu: what a CPU runs; None: the function as it stands.
    """

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def on_device(*args: Any) -> Tensor:
            compute = _compiled(function) if has_triton() else function
            return compute(*(torch.tensor(value) if isinstance(value, int) else value for value in args))

        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, on_cpu or function, "CPU")
        _LIBRARY.impl(name, on_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pangu::{name}", result, lib=_LIBRARY)
        return function

    return register


@functools.cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)
