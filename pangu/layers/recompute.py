"""Recompute: save only the inputs of a computation, and repeat it in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from pangu.layers.offload import Offload

Saved = Tensor | Callable[[], Tensor]
"""Saved tensor, or a function that restores it."""
Result = TypeVar("Result")


def address(tensor: Tensor) -> int:
    """Return the address of a tensor's storage, equal for all its views, also on the meta device."""
    return tensor.untyped_storage()._cdata


class _Recompute(threading.local):
    runs = False


_recompute = _Recompute()
"""State of the thread that runs the backward pass."""


def is_recomputing() -> bool:
    """Return whether a forward pass is being repeated, which ends at the last tensor that it saves."""
    return _recompute.runs


def checkpointed(compute: Callable[..., Result], *arguments: Any, on: bool = True) -> Result:
    """Return `compute(*arguments)`, saving only the inputs for the backward pass if `on`."""
    # The recompute stops at the last tensor that the backward pass needs, so a final matmul is not repeated. Dropout
    # needs no generator state: its masks are functions of keys.
    if not on:
        return compute(*arguments)
    # a checkpoint saves its tensor arguments through hooks, but merely references tensors inside tuples
    leaves, structure = tree_flatten(arguments)
    repeats = False

    def run(*leaves: Any) -> Result:
        nonlocal repeats
        if torch.compiler.is_compiling():
            return compute(*tree_unflatten(leaves, structure))
        before, _recompute.runs, repeats = _recompute.runs, _recompute.runs or repeats, True
        try:
            return compute(*tree_unflatten(leaves, structure))
        finally:
            _recompute.runs = before

    return checkpoint(
        run,
        *leaves,
        use_reentrant=False,
        preserve_rng_state=False,
    )


class SavedTensors:
    """Tensors saved by the layers of one forward pass, which hooks keep, recompute or offload."""

    # Hooks see all that autograd saves, so layers need no code for it.
    def __init__(self, offload: Offload | None = None) -> None:
        """Keep all saved tensors that are not recomputed on the device, or pass them to `offload`."""
        self._offload = offload
        self._recomputed: dict[int, Callable[[], Tensor]] = {}
        """Address of a tensor -> function that recomputes it."""

    @contextmanager
    def layer(self, last: bool) -> Iterator[None]:
        """Return the context in which a layer computes; `last`: the forward pass ends with it."""
        if self._offload is None:
            yield
            return
        self._offload.begin_layer(last)
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._offload.end_layer()

    @contextmanager
    def discarding(self, compute: Callable[[Tensor], Tensor], source: Tensor, on: bool = True) -> Iterator[Tensor]:
        """Yield `compute(source)`; in the block, save `source` in its place and recompute it in the backward pass."""
        # Unlike a checkpoint around both, this never repeats the consumer or its communication. It saves memory if
        # `source` is saved anyway, as for the backward pass of a norm.
        output = compute(source)
        if not (on and torch.is_grad_enabled()):
            yield output
            return
        saved = self._keep(source.detach())

        def recompute() -> Tensor:
            with torch.no_grad():
                return compute(_unpack(saved))

        self._recomputed[address(output)] = recompute
        with saved_tensors_hooks(self._pack, _unpack):
            yield output
        del self._recomputed[address(output)]  # still alive, so its address is unique

    def _pack(self, tensor: Tensor) -> Saved:
        recompute = self._recomputed.get(address(tensor))
        if recompute is None:
            return self._keep(tensor)
        shape, strides, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        return lambda: recompute().as_strided(shape, strides, offset)

    def _keep(self, tensor: Tensor) -> Saved:
        return tensor if self._offload is None else self._offload.pack(tensor)


def _unpack(saved: Saved) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved()
