"""Operators that are one kernel on an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._triton import has_triton

_LIBRARY = torch.library.Library("pangu", "FRAGMENT")
MOST_KINDS = 64
"""Codes of one function in a process: for shapes and formats of an operator; for layers with and without a query,
recompute, frozen weights. torch's own limit is 8, and what comes behind it runs uncompiled: the layers of one model
have more shapes than that for a cast to fp8."""


def fused(
    schema: str,
    function: Callable[..., Tensor | None],
    result: Callable[..., Tensor | None],
    on_cpu: Callable[..., Tensor | None] | None = None,
) -> Callable[..., Any]:
    """The operator of torch.ops.pangu with this schema, of tensors and numbers.

    Args:
        function: what it computes. On an accelerator Inductor makes one Triton kernel of it, another for other shapes,
            formats and floating numbers. Integers come as tensors without dimensions on the host, which are arguments
            of the kernel: others do not compile it again. Without Triton it runs as it stands. No device has run it
            yet; `tests/gpu` has what one must show.
        result: an uninitialized tensor like the result; None where an argument is overwritten. Autograd does not look
            into the operator, and the auditor of a dry run counts one launch.
        on_cpu: what a CPU runs; None: the function as it stands.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, on_cpu or function, "CPU")
    _LIBRARY.impl(name, _compiled(function) if has_triton() else function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pangu::{name}", result, lib=_LIBRARY)
    operator: Callable[..., Any] = getattr(torch.ops.pangu, name).default
    return operator


def allow_kinds() -> None:
    """Let torch compile a function `MOST_KINDS` times."""
    torch._dynamo.config.recompile_limit = max(MOST_KINDS, torch._dynamo.config.recompile_limit)


def of_any_length(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The same, for operators: one kernel serves all numbers of rows, where each would have its own."""
    if has_triton():
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return tensors


def _compiled(function: Callable[..., Tensor | None]) -> Callable[..., Tensor | None]:
    allow_kinds()
    compute = torch.compile(function, dynamic=False)
    return lambda *args: compute(*map(_argument, args))


def _argument(value: Any) -> Any:
    """Of a compiled function. A parameter comes as a plain tensor: the code would be another one for tensors that want
    a gradient, and would take all parameters of a shape to lie at multiples of 16 bytes because the first one does."""
    if isinstance(value, int):
        return torch.tensor(value)
    return value.detach() if isinstance(value, nn.Parameter) or getattr(value, "requires_grad", False) else value
