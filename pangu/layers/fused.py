"""Operators that are one kernel on an accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

_LIBRARY = torch.library.Library("pangu", "FRAGMENT")
# Versions differ in shapes and formats, or for layers in query, recompute and frozen weights. Beyond the limit (torch's
# default is 8, less than the shapes of one model need) calls run uncompiled.
MOST_KINDS = 64
"""Maximum number of compiled versions of a function per process."""


def fused(
    schema: str,
    function: Callable[..., Any],
    result: Callable[..., Any],
    on_cpu: Callable[..., Tensor | None] | None = None,
    without_triton: Callable[..., Tensor | None] | None = None,
) -> Callable[..., Any]:
    """Register and return the operator torch.ops.pangu with this schema.

    Args:
        schema: Schema over tensors and numbers.
        function: Computation. On an accelerator Inductor compiles one Triton kernel per shapes, formats and floats;
            integers become 0-dimensional host tensors, so that their values do not recompile it. Without Triton it
            runs as it is.
        result: Function that returns an uninitialized result; None if an argument is overwritten. Autograd does not
            look into the operator, and the auditor of a dry run counts one launch.
        on_cpu: Computation on a CPU; None: as `without_triton`.
        without_triton: Computation where nothing is compiled; None: `function`.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    plain = without_triton or function
    _LIBRARY.impl(name, on_cpu or plain, "CPU")
    _LIBRARY.impl(name, _on_accelerator(function, plain), "CompositeExplicitAutograd")
    torch.library.register_fake(f"pangu::{name}", result, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.pangu, name).default
    return operator


def allow_kinds() -> None:
    """Let torch compile a function `MOST_KINDS` times."""
    torch._dynamo.config.recompile_limit = max(MOST_KINDS, torch._dynamo.config.recompile_limit)


def of_any_length(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Mark dimension 0 of tensors as dynamic, so that one kernel serves all numbers of rows, and return them."""
    if has_triton():
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


def _on_accelerator(
    function: Callable[..., Tensor | None], plain: Callable[..., Tensor | None]
) -> Callable[..., Tensor | None]:
    """Return the kernel of an accelerator: `function`, compiled, where torch has Triton, otherwise `plain`."""

    # at the first call: `has_triton` imports torch's compiler, which a run on a CPU does without
    @functools.cache
    def chosen() -> Callable[..., Tensor | None]:
        return _compiled(function) if has_triton() else plain

    return lambda *args: chosen()(*args)


def _compiled(function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    allow_kinds()
    compute = torch.compile(function, dynamic=False)
    return lambda *args: compute(*map(_argument, args))


def _argument(value: Any) -> Any:
    """Return the argument of a compiled function: numbers as tensors, tensors without gradient."""
    # A plain tensor rather than a parameter: code is specialized on requires_grad, and would assume that all parameters
    # of a shape are 16-byte aligned if the first one is.
    if isinstance(value, int):
        return torch.tensor(value)
    return value.detach() if isinstance(value, nn.Parameter) or getattr(value, "requires_grad", False) else value
