"""Counts what goes over the wire: calls and bytes of the collectives that pangu/collectives starts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.threads import replaced_here

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"


class Traffic(NamedTuple):
    """Calls and bytes of one collective."""

    calls: int = 0
    bytes: int = 0


# function of torch.distributed -> (its kind, the bytes of the whole tensor among its positional arguments)
COUNTED: dict[str, tuple[str, Callable[..., int]]] = {
    "all_reduce": (ALL_REDUCE, lambda tensor: tensor.nbytes),
    "all_gather_into_tensor": (ALL_GATHER, lambda whole, part: whole.nbytes),
    "all_gather_single": (ALL_GATHER, lambda whole, part: whole.nbytes),
    "all_gather": (ALL_GATHER, lambda parts, part: sum(each.nbytes for each in parts)),
    # of the kind that `EXCHANGES` says; each rank sends as much as the whole holds
    "all_to_all_single": ("", lambda received, sent, *sizes: sent.nbytes),
    "reduce_scatter_tensor": (REDUCE_SCATTER, lambda part, whole: whole.nbytes),
    "reduce_scatter_single": (REDUCE_SCATTER, lambda part, whole: whole.nbytes),
}
EXCHANGES = {"start_all_gather": ALL_GATHER, "start_reduce_scatter": REDUCE_SCATTER, "start_exchange": ALL_TO_ALL}
"""Functions of pangu/collectives that exchange parts, and what that stands for on gloo."""
REFUSED = (
    "all_gather_object",
    "all_to_all",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "isend",
    "irecv",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
"""What no micro-batch of a tensor-parallel model may use; a test that met one would otherwise not count it."""


@contextmanager
def counted() -> Iterator[dict[str, Traffic]]:
    """Within the block, calls and bytes of the whole (not cut) tensors by kind of collective, of the calling thread."""
    totals: dict[str, Traffic] = {}

    def counting(name: str) -> Callable[..., Any]:
        size = COUNTED[name][1]
        original = getattr(dist, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            kind = COUNTED[name][0] or EXCHANGES[sys._getframe(2).f_code.co_name]
            sofar = totals.get(kind, Traffic())
            totals[kind] = Traffic(sofar.calls + 1, sofar.bytes + size(*arguments))
            return original(*arguments, **keywords)

        return call

    def refusing(name: str) -> Callable[..., Any]:
        def call(*_: Any, **__: Any) -> Any:
            raise AssertionError(f"torch.distributed.{name} is not counted")

        return call

    # torch 2.13 renamed two of them
    replaced = {name: counting(name) for name in COUNTED if hasattr(dist, name)} | {
        name: refusing(name) for name in REFUSED
    }
    with replaced_here(dist, **replaced):
        yield totals
