"""What the operators of torch do to tensors: which run a kernel, answer the host, multiply matrices or send, and the
bytes that each moves."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import flop_registry, register_flop_formula

from pangu.layers.grouped_matmul import FLOP_FORMULAS

for _operator, _formula in FLOP_FORMULAS.items():
    register_flop_formula(_operator)(_formula)

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
"""Operator of torch.distributed -> what it is called, and its arguments that are read and written."""
_NO_KERNEL = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "lift_fresh", "resize_", "set_"),
    *("_unsafe_view", "_local_scalar_dense"),
}
"""Operators that start none, though their schema does not say that they are views."""
_OVERWRITES = {"copy_", "zero_", "fill_", "normal_", "uniform_"}
_LOOKS_UP = {"embedding", "gather", "index_select", "index"}
"""Of their first argument they read no more than they write."""
_ADDS_ROWS = {"index_put_", "index_add_"}
"""Of their first argument they read and write as many rows as are added."""


@dataclass(frozen=True)
class Operator:
    """What its schema says of an operator."""

    name: str
    view: bool
    """Its results lie in the memory of its first argument."""
    launches: bool
    """It runs a kernel."""
    product: bool
    """Its time is that of its floating-point operations."""
    answers: bool
    """Its result lies on the host, or its shape depends on values: the host waits for the device."""
    writes: tuple[int, ...]
    """Places of the arguments that are changed."""


@functools.cache
def operator_of(function: OpOverload) -> Operator:
    """What `function` is."""
    name, schema = function._schema.name.partition("::")[2], function._schema
    view = any(value.alias_info is not None and not value.alias_info.is_write for value in schema.returns)
    tags = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape
    answers = any(tag in function.tags for tag in tags)
    writes = [i for i, argument in enumerate(schema.arguments) if argument.alias_info and argument.alias_info.is_write]
    launches = not view and function.namespace in ("aten", "pangu") and name not in _NO_KERNEL
    product = function.overloadpacket in flop_registry
    return Operator(name, view and not answers, launches, product, answers, tuple(writes))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def is_causal(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an attention kernel skips what is masked."""
    names = [argument.name for argument in function._schema.arguments]
    return bool({**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False))


def causal_share(operator: str, shapes: Sequence[tuple[int, ...]]) -> float:
    """Share of scores that a causal attention kernel does not skip, where queries and keys end together."""
    (*_, queries, _), (*_, keys, _) = shapes[1:3] if "backward" in operator else shapes[:2]
    return 1 - queries / (2 * keys)


def count_flops(function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """Return the floating-point operations of a product, by torch's formula."""
    shaped = [value for value in args if not isinstance(value, torch.dtype)]  # where formulas expect a shape
    name = function._schema.name
    if "dot_product" in name:
        # before torch 2.13 the formula refuses grouped queries, which compute with each key and value several times
        query = int("backward" in name)  # the output's gradient comes first
        heads = args[query].shape[1]
        for place in (query + 1, query + 2):
            batch, _, *rest = args[place].shape
            shaped[place] = (batch, heads, *rest)
    return flop_registry[function.overloadpacket](*shaped, **kwargs, out_val=result)


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes of all of them."""
    return sum(tensor.nbytes for tensor in tensors)


def moved_bytes(operator: Operator, inputs: list[Tensor], made: list[Tensor]) -> int:
    """Bytes that an operation reads and writes, each tensor once; of a broadcast one what there is of it."""
    if operator.name in _ADDS_ROWS:  # to as much as there is of what is added, the last one
        return size_of(inputs[1:]) + 2 * size_of(inputs[-1:])
    read = [tensor for tensor in inputs if not (operator.name in _OVERWRITES and tensor is inputs[0])]
    sizes = [min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in read]
    if operator.name in _LOOKS_UP:
        sizes[0] = min(sizes[0], size_of(made))
    return sum(sizes) + size_of(made)
