"""Properties of torch operators: kernel launches, host syncs, matmuls, collectives, and bytes moved."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from pangu.schedule.spans import Matmul, matmuls_of

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
_MATMULS = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_scaled_mm_v2"}
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
    launches: int
    """Number of kernels that it launches."""
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
    product = launches and (name in _MATMULS or name.startswith("grouped_") or "atten" in name)
    kernels = launches * (2 if name == "attend_backward" else 1)  # one for queries, one for keys
    return Operator(name, view and not answers, kernels, product, answers, tuple(writes))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield all tensors in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def multiplied(
    function: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], outputs: Sequence[Tensor], share: float
) -> tuple[list[Matmul], int]:
    """Return the matmuls of a kernel and its FLOPs.

    Documents and windows count as full causal rows: an upper bound, as the lengths of documents are unknown. A kernel
    that skips scores above the diagonal computes `share` of the others; its FLOPs count as if there was no diagonal.
    """
    name = function._schema.name.partition("::")[2]
    if "atten" not in name:
        operands = (one for one in tensors_in((*args, *kwargs.values())) if all(one is not other for other in outputs))
        matmuls = matmuls_of(name, [tensor.shape for tensor in operands])  # an output may be an operand to add to
        return matmuls, round(sum(one.flops for one in matmuls))
    named = {**dict(zip((one.name for one in function._schema.arguments), args, strict=False)), **kwargs}
    shapes = [named[operand].shape for operand in ("query", "key", "value")]
    if name.startswith("_flash"):  # [batch, sequence, heads, size], or [tokens, heads, size] of documents
        lengths = (named["max_q"], named["max_k"], named["max_k"])
        shapes = [
            (math.prod(shape[:-2]) // length, shape[-2], length, shape[-1])
            for shape, length in zip(shapes, lengths, strict=True)
        ]
    queries, keys = shapes[0][2], shapes[1][2]
    is_causal = named.get("is_causal", False) or named.get("window_size_left") is not None
    if "query_at" in named:
        is_causal = named["key_at"] + keys > named["query_at"]
    full = share if is_causal else 1.0
    computed = full * (1 - queries / (2 * keys)) if is_causal else 1.0  # queries and keys end together
    matmuls = matmuls_of(name, shapes, computed)
    return matmuls, round(sum(one._replace(calls=full).flops for one in matmuls))


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
