"""Properties of torch operators: kernel launches, host syncs, matmuls, collectives, and bytes moved."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, register_flop_formula

from pangu.layers.grouped_matmul import FLOP_FORMULAS

for _operator, _formula in FLOP_FORMULAS.items():
    register_flop_formula(_operator)(_formula)
register_flop_formula(torch.ops.aten._scaled_mm_v2)(lambda left, right, *_, **__: 2 * left[0] * left[1] * right[1])

COLLECTIVES = {
    "allreduce_": ("all_reduce", (0,), (0,)),
    "allreduce_coalesced_": ("all_reduce", (0,), (0,)),
    "_allgather_base_": ("all_gather", (1,), (0,)),
    "allgather_": ("all_gather", (1,), (0,)),
    "_reduce_scatter_base_": ("reduce_scatter", (1,), (0,)),
    "alltoall_base_": ("all_to_all", (1,), (0,)),
    "broadcast_": ("broadcast", (0,), (0,)),
    "send": ("send", (0,), ()),
    "recv_": ("receive", (), (0,)),
}
"""Mapping from an operator of torch.distributed to its name, and the arguments it reads and writes."""
_NO_KERNEL = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "resize_", "set_"),
    *("_unsafe_view", "_local_scalar_dense"),
}
"""Operators that launch no kernel, though their schema does not mark them as views."""
_CHECKS = {"multinomial", "_linalg_check_errors"}
"""Operators whose kernels let the host read whether their input is valid."""
_OVERWRITES = {**dict.fromkeys(("copy_", "zero_", "fill_", "normal_", "uniform_"), (0,)), "fp8_cast": (3, 4, 5)}
"""Operators with the places of tensors that they overwrite without reading them."""
_LOOKS_UP = {"embedding", "gather", "index_select", "index"}
"""Operators that read only as much of their first argument as they write."""
_ADDS_ROWS = {"index_put_", "index_add_"}
"""Operators that read and write only as many rows of their first argument as are added."""


class Operator(NamedTuple):
    """Properties of an operator, from its schema."""

    name: str
    view: bool
    """True if its results are views of its first argument."""
    launches: bool
    """True if it launches a kernel."""
    product: bool
    """True if its time is determined by its floating-point operations (matmuls)."""
    answers: bool
    """True if it is a host sync: its result is on the host, or its shape depends on values."""
    writes: tuple[int, ...]
    """Indices of the arguments that it modifies."""


@functools.cache
def operator_of(function: OpOverload) -> Operator:
    """Return the properties of an operator."""
    schema, name = function._schema, function._schema.name.partition("::")[2]
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    answers = name in _CHECKS or any(tag in function.tags for tag in tags)
    view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    writes = (i for i, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write)
    launches = not view and function.namespace in ("aten", "pangu") and name not in _NO_KERNEL
    product = function.overloadpacket in flop_registry
    return Operator(name, view and not answers, launches, product, answers, tuple(writes))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def causal_share(
    function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], shapes: Sequence[tuple[int, ...]]
) -> float | None:
    """Return the share of scores that an attention kernel computes if causal, where queries and keys end together."""
    names = [argument.name for argument in function._schema.arguments]
    if not {**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False):
        return None
    (*_, queries, _), (*_, keys, _) = shapes[1:3] if "backward" in function._schema.name else shapes[:2]
    return 1 - queries / (2 * keys)


def count_flops(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the floating-point operations of a matmul, by torch's formula."""
    shaped = [value for value in args if not isinstance(value, torch.dtype)]  # formulas expect a shape there
    if "dot_product" in function._schema.name:
        # before torch 2.13 the formula rejects grouped queries, which use each key and value several times
        query = int("backward" in function._schema.name)  # the gradient of the output comes first
        heads = args[query].shape[1]
        for place in (query + 1, query + 2):
            batch, _, *rest = args[place].shape
            shaped[place] = (batch, heads, *rest)
    return flop_registry[function.overloadpacket](*shaped, **kwargs, out_val=result)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def moved_bytes(operator: Operator, inputs: list[Tensor], made: list[Tensor]) -> int:
    """Return the bytes an operation reads and writes, each tensor once; broadcast dimensions count once."""
    if operator.name in _ADDS_ROWS:  # adds to as many rows as the last input has
        return size_of(inputs[1:]) + 2 * size_of(inputs[-1:])
    overwritten = _OVERWRITES.get(operator.name, ())
    read = [tensor for place, tensor in enumerate(inputs) if place not in overwritten]
    sizes = [min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in read]
    if operator.name in _LOOKS_UP:
        sizes[0] = min(sizes[0], size_of(made))
    return sum(sizes) + size_of(made)
