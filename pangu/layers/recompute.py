"""Recompute: save only the inputs of a computation, and repeat it in backward (Chen et al. 2016)."""

from __future__ import annotations

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
"""A saved tensor, or a function that brings it back."""
Result = TypeVar("Result")


def address(tensor: Tensor) -> int:
    """Address of the storage, the same for all views of it; on the meta device too."""
    return tensor.untyped_storage()._cdata


def checkpointed(compute: Callable[..., Result], *arguments: Any, on: bool = True) -> Result:
    """`compute(*arguments)`, of which, if `on`, only the inputs are saved for backward. The recompute ends with the
    last tensor that backward needs, so a final matmul is not repeated. Dropout needs no generator state: its masks are
    functions of keys."""
    if not on:
        return compute(*arguments)
    # a checkpoint saves the tensors among its arguments where hooks see it; those inside tuples it only holds
    leaves, structure = tree_flatten(arguments)
    return checkpoint(
        lambda *leaves: compute(*tree_unflatten(leaves, structure)),
        *leaves,
        use_reentrant=False,
        preserve_rng_state=False,
    )


class SavedTensors:
    """Keeps, recomputes or offloads the tensors that the layers of one forward save for backward. Hooks see whatever
    autograd saves, so layers need no code for it."""

    def __init__(self, offload: Offload | None = None) -> None:
        """`offload` moves what is not recomputed; None: it stays."""
        self._offload = offload
        self._recomputed: dict[int, Callable[[], Tensor]] = {}
        """Address of a tensor -> the function that recomputes it."""

    @contextmanager
    def layer(self, last: bool) -> Iterator[None]:
        """The block in which a layer computes; `last`: the forward ends with it."""
        if self._offload is None:
            yield
            return
        self._offload.begin_layer(last)
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        self._offload.end_layer()

    @contextmanager
    def discarding(self, compute: Callable[[Tensor], Tensor], source: Tensor, on: bool = True) -> Iterator[Tensor]:
        """`compute(source)`. Within the block, whoever saves it saves `source` instead, and it is recomputed when the
        backward of that begins. Unlike a checkpoint around both, this never repeats the consumer or its communication.
        It saves memory where `source` is saved anyway, as for the backward of a norm."""
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
        del self._recomputed[address(output)]  # this still holds it, so no other tensor has had its address

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
