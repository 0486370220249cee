"""Recompute: save only the inputs of a computation, and repeat it in the backward pass (Chen et al. 2016)."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
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


class _Thread(threading.local):
    num_left: float = math.inf
    """Number of tensors that the recompute in this thread still has to save; infinite without a recompute."""
    depth: int = 0
    """Number of checkpoints around what is computed, also in their forward pass."""

    def __init__(self) -> None:
        self.discarded: set[int] = set()
        """Addresses of tensors that are recomputed if saved."""


_thread = _Thread()


def end_recompute(x: Tensor, weight: Tensor, saved: Tensor | None = None) -> None:
    """End a recompute in which these are the last tensors to save, before their matmul computes a value.

    `saved`: saved instead of x.
    """
    # if x needs no gradient, the matmul may save nothing
    if _thread.num_left <= 2 and x.requires_grad:
        _save(x if saved is None else saved, weight)


def is_discarded(x: Tensor) -> bool:
    """Return whether saving `x` takes no memory, since `SavedTensors.discarding` recomputes it."""
    return address(x) in _thread.discarded


def is_repeating() -> bool:
    """Return whether a recompute repeats what is computed now."""
    return _thread.num_left < math.inf


def will_repeat() -> bool:
    """Return whether the backward pass repeats what is computed now, or does so already."""
    return _thread.depth > 0


def checkpointed(compute: Callable[..., Result], *arguments: Any, on: bool = True) -> Result:
    """Return `compute(*arguments)`, saving only the inputs for the backward pass if `on`."""
    # The recompute stops at the last tensor that the backward pass needs, so a final matmul is not repeated. Dropout
    # needs no generator state: its masks are functions of keys.
    if not (on and torch.is_grad_enabled()):
        return compute(*arguments)
    if not torch.compiler.is_compiling():
        recompute = _Recompute(compute, arguments)
        _thread.depth += 1
        try:
            with saved_tensors_hooks(recompute.pack, recompute.unpack):
                return compute(*arguments)
        finally:
            _thread.depth -= 1
    # compilers know this function only; it saves tensor arguments, but merely references tensors inside tuples
    leaves, spec = tree_flatten(arguments)
    return checkpoint(
        lambda *leaves: compute(*tree_unflatten(leaves, spec)), *leaves, use_reentrant=False, preserve_rng_state=False
    )


class _Recompute:
    """Recompute of one checkpoint: hooks that save nothing but arguments, and that make the tensors when needed."""

    # Like `torch.utils.checkpoint`, without checks and captured state, whose host time exceeds that of a small layer.
    # Autograd holds an empty slot for each tensor. The first slot unpacked repeats the forward pass, which fills the
    # slots that are still held, in the same order. Another backward pass finds what the last one left, or repeats.
    #
    #    forward pass     saves a, b, c     slots -, -, -
    #    unpack c         repeats           slots a, b, -     until c is saved
    #    unpack b                           slots a, -, -     a tensor lives as long as its node needs it
    def __init__(self, compute: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        """Save the arguments of `compute` through the hooks of an outer checkpoint or offload, if any."""
        self._compute, self._arguments = compute, _map_tensors(_save, arguments)
        self._slots: list[weakref.ref[_Slot]] = []

    def pack(self, tensor: Tensor) -> _Slot:
        """Return the slot of a saved tensor."""
        slot = _Slot()
        self._slots.append(weakref.ref(slot))
        return slot

    def unpack(self, slot: _Slot) -> Tensor:
        """Return the tensor of a slot, and leave it empty."""
        if slot.tensor is None:
            self._repeat()
        tensor, slot.tensor = slot.tensor, None
        assert tensor is not None
        return tensor

    def _repeat(self) -> None:
        slots, arguments = iter(self._slots), _map_tensors(_restore, self._arguments)  # an outer checkpoint may repeat

        def fill(tensor: Tensor) -> Tensor:
            tensor = tensor.detach() if tensor.requires_grad else tensor  # without the graph of the recompute
            if (slot := next(slots)()) is not None:
                slot.tensor = tensor
            _thread.num_left -= 1
            if not _thread.num_left:
                raise _Complete
            return tensor

        before, _thread.num_left = _thread.num_left, len(self._slots)
        _thread.depth += 1
        try:
            with saved_tensors_hooks(fill, lambda tensor: tensor), torch.enable_grad():
                self._compute(*arguments)
        except _Complete:
            return
        finally:
            left, _thread.num_left = _thread.num_left, before
            _thread.depth -= 1
        raise RuntimeError(f"a recompute saved {left} tensors less than the forward pass, which it must repeat")


class _Slot:
    """Place of a saved tensor in the graph."""

    tensor: Tensor | None = None


class _Complete(Exception):  # noqa: N818
    """End of a recompute, raised when the last tensor is saved."""


class _Save(Function):
    """Node that saves tensors and is never run; its output needs a gradient because `leaf` does."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, *saved: Tensor) -> Tensor:
        ctx.save_for_backward(*saved)
        return torch.empty(0)


_save = partial(_Save.apply, torch.empty(0, requires_grad=True))


def _restore(saved: Tensor) -> Tensor:
    node: Any = saved.grad_fn
    (tensor,) = node.saved_tensors
    return tensor


def _map_tensors(function: Callable[[Tensor], Tensor], parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a tuple with `function` applied to its tensors, also inside tuples."""
    mapped = list(parts)
    for place, part in enumerate(parts):
        if isinstance(part, Tensor):
            mapped[place] = function(part)
        elif isinstance(part, tuple):
            mapped[place] = _map_tensors(function, part)
    return tuple.__new__(type(parts), mapped)


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

    def discarding(
        self, compute: Callable[[Tensor], Tensor], source: Tensor, on: bool = True
    ) -> AbstractContextManager[Tensor]:
        """Yield `compute(source)`; in the block, save `source` in its place and recompute it in the backward pass."""
        # Unlike a checkpoint around both, this never repeats the consumer or its communication. It saves memory if
        # `source` is saved anyway, as for the backward pass of a norm.
        on = on and torch.is_grad_enabled()
        return self._discarding(compute, source) if on else nullcontext(compute(source))

    @contextmanager
    def _discarding(self, compute: Callable[[Tensor], Tensor], source: Tensor) -> Iterator[Tensor]:
        output, saved = compute(source), self._keep(source.detach())

        def recompute() -> Tensor:
            with torch.no_grad():
                return compute(_unpack(saved))

        self._recomputed[address(output)] = recompute
        _thread.discarded.add(address(output))
        with saved_tensors_hooks(self._pack, _unpack):
            yield output
        _thread.discarded.discard(address(output))
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
