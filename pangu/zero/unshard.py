"""Execution of unsharding: around each use at stage 3, and after a step to publish updates (stages 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.reduce import Completion, Handle, start_all_gather
from pangu.models.language_model import ModuleHooks
from pangu.topology.copy_stream import CopyStream
from pangu.topology.mesh import Mesh
from pangu.zero.flat_parameter import FlatParameter
from pangu.zero.rules import Operation, UnshardRules
from pangu.zero.stage_parameters import StageParameters

if TYPE_CHECKING:
    from pangu.zero.weight_sums import WeightSums


class _Passing(Function):
    """Identity that calls one function in the forward pass and another in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: Callable[[], None], in_backward: Callable[[], None]) -> Tensor:
        ctx.in_backward = in_backward
        in_forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.in_backward()
        return grads[0], None, None


def _nothing() -> None:
    pass


def passing(x: Tensor, in_forward: Callable[[], None], in_backward: Callable[[], None]) -> Tensor:
    """Return `x` after calling one function; the other is called when the gradient of the result is complete."""
    return _Passing.apply(x, in_forward, in_backward)


class Unsharder(UnshardRules[FlatParameter], ModuleHooks):
    """Module hooks that unshard the weights before a module uses them."""

    def __init__(self, stage: StageParameters, flats: Sequence[FlatParameter], mesh: Mesh, stream: CopyStream) -> None:
        """Prepare as in `UnshardRules`; `stream` is the one of copies from the host."""
        super().__init__(stage, flats)
        self._mesh, self._stream = mesh, stream
        self._handles: dict[FlatParameter, Handle] = {}
        self.sums: WeightSums | None = None
        """Sums over the bits of weights, to which gathered ones are added before they are freed; None: none."""

    def do(self, operation: Operation, flat: FlatParameter) -> None:
        """Execute an operation."""
        if self.on_operation is not None:
            self.on_operation(operation, flat)
        match operation:
            case Operation.UNSHARD:
                self._unshard(flat)
            case Operation.PUBLISH:
                self._publish(flat)
            case Operation.WAIT_UNSHARD:
                self._handles.pop(flat).wait()
            case Operation.RESHARD:
                if self.sums is not None:
                    self.sums.add(flat)
                flat.free()

    @contextmanager
    def gathered(self, flat: FlatParameter) -> Iterator[Tensor]:
        """Yield the full weights of a flat parameter outside a step; all ranks that share it call this together."""
        self.start(flat)
        self.finish(flat)
        yield flat.weights
        self.release(flat)

    def before(self, module: str, x: Tensor) -> Tensor:
        """Unshard around the module's passes: on its input, start its forward use and end its backward use."""
        trained = module in self.trained and module not in self.regions.lookups
        if torch.is_grad_enabled() and trained and not x.requires_grad:
            # everything below is frozen: the backward pass must still reach this point to end the use of the module
            x = x.detach().requires_grad_()
        return _Passing.apply(x, partial(self.begin, module, self.forward), partial(self.end, module, self.backward))

    def after(self, module: str, x: Tensor) -> Tensor:
        """Unshard around the module's passes: on its output, end its forward use and start its backward use."""
        has_begun = module == self.regions.last and x.requires_grad  # its backward comes next
        end = partial(self.end, module, self.forward)
        begin = partial(self.begin, module, self.backward, has_begun)
        return _Passing.apply(x, _nothing if has_begun else end, _nothing if module in self.regions.lookups else begin)

    def _publish(self, flat: FlatParameter) -> None:
        with self._stream.after_computation():
            flat.publish()
            if flat.sharding.stage < 3 and flat.sharding.size > 1:
                self._handles[flat] = self._gather(flat, flat.weights, flat.local)
            elif flat.sharding.stage < 3 and flat.main_on_host:
                self._handles[flat] = self._copies()

    def _unshard(self, flat: FlatParameter) -> None:
        with self._stream.after_computation():
            # bypass autograd's version counter: the tensors that it saved have the same values again
            whole, local = flat.allocate().data, flat.local
            if flat.local_on_host:
                local = whole[flat.span].copy_(local, non_blocking=True)
            gather = self._gather(flat, whole, local)
            self._handles[flat] = self._copies() if flat.sharding.size == 1 else gather

    def _gather(self, flat: FlatParameter, whole: Tensor, local: Tensor) -> Handle:
        return start_all_gather(whole, local, self._mesh.group(flat.sharding.axis("gather")))

    def _copies(self) -> Handle:
        return Completion(partial(CopyStream.wait, self._stream.record()))
