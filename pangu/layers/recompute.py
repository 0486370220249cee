"""Recompute: keep the inputs of a computation only and do it again in backward (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from pangu.layers.offload import Offload

Saved = Tensor | Callable[[], Tensor]
"""What stands for a saved tensor: itself, or a function that brings it back."""
Result = TypeVar("Result")


def address(tensor: Tensor) -> int:
    """Of the memory that a tensor is a view of: the same for all its views, on the meta device too."""
    return tensor.untyped_storage()._cdata


def checkpointed(compute: Callable[..., Result], *arguments: Any, on: bool = True) -> Result:
    """`compute(*arguments)`, keeping nothing but its inputs for backward if `on`.

    The second computation ends with the last tensor that backward needs, so a matmul at the end is not repeated.
    Dropout needs no saved generator state: its masks are a function of keys (see `dropout`).
    """
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
    """What becomes of the tensors that the layers of one forward save for backward: they are kept, computed again or
    moved to host memory. Hooks see whatever autograd saves, so no layer has to be written for it."""

    def __init__(self, offload: Offload | None = None) -> None:
        """`offload` moves what is not computed again; None: it is kept."""
        self._offload = offload
        self._recomputed: dict[int, Callable[[], Tensor]] = {}
        """By the address of a tensor, what computes it."""

    @contextmanager
    def layer(self) -> Iterator[None]:
        """The forward of one layer."""
        with nullcontext() if self._offload is None else saved_tensors_hooks(self._pack, _unpack):
            yield
        if self._offload is not None:
            self._offload.end_layer()

    @contextmanager
    def discarding(
        self, output: Tensor, compute: Callable[[Tensor], Tensor], source: Tensor, on: bool = True
    ) -> Iterator[None]:
        """Inside, whoever saves `output` = `compute(source)` saves `source` in its place, and `output` is computed
        again when its backward begins.

        Unlike a checkpoint around both, that never repeats the consumer or what it sends. It saves memory where
        `source` is kept anyway, as it is for the backward of a norm.
        """
        if not (on and torch.is_grad_enabled()):
            yield
            return
        saved = self._keep(source.detach())

        def recompute() -> Tensor:
            with torch.no_grad():
                return compute(_unpack(saved))

        self._recomputed[address(output)] = recompute
        with saved_tensors_hooks(self._pack, _unpack):
            yield
        del self._recomputed[address(output)]  # the caller still holds it, so no other tensor has had its address

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
