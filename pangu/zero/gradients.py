"""Gradient accumulation in fp32 over micro-batches, and reduction over replicas that overlaps the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pangu.collectives.reduce import (
    Completion,
    Handle,
    all_reduce,
    start_all_reduce,
    start_ordered_all_reduce,
    start_reduce_scatter,
)
from pangu.topology.copy_stream import CopyStream
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import AxisGroup
from pangu.zero.flat_parameter import FlatParameter
from pangu.zero.rules import Operation, ReduceRules
from pangu.zero.stage_parameters import StageParameters
from pangu.zero.weight_sums import sum_of_bits

Norms = list[tuple[Sequence[tuple[str, slice]], Sequence[Tensor]]]
"""Ranges of the tensors and their gradient norms for each flat parameter, in the order of reduction."""


def fuses_gradient_accumulation(device: torch.device) -> bool:
    """Return whether layer matmuls add their weight gradients to the sums (`weight_gradients`) on this device."""
    # Elsewhere autograd computes them, which takes less host time, and the hook adds them. The head's and postponed
    # weight gradients are added by matmuls on every device.
    return device.type == "cuda"


@dataclass(slots=True)
class _GradientPlace:
    """Place of a parameter's gradient."""

    chunk: int
    index: int
    """Number of the flat parameter in its chunk, in backward order."""
    flat: FlatParameter
    span: slice
    shape: torch.Size
    begins: bool = False
    """True if the parameter has no gradient in this step yet, so that the buffer may hold old values."""
    view: Tensor | None = None
    """View of the buffer in the shape of the parameter, as long as the buffer is allocated."""


class GradientSum(ReduceRules[FlatParameter]):
    """Gradient accumulation: adds each gradient to its flat buffer in the backward pass, and reduces complete ones."""

    def __init__(
        self, stage: StageParameters, flats: Sequence[FlatParameter], mesh: Mesh, message: torch.dtype | None
    ) -> None:
        """Register the hooks; `message`: dtype of the reduction (None: that of the buffers). See `ReduceRules`."""
        super().__init__(stage, flats)
        self.mesh, self._message = mesh, message
        self._all = [flat for flats in self.flat_parameters.values() for flat in flats]
        self._partial = [
            s.grad for flat in self._all for s in flat.shards if s.placement.partial and s.grad is not None
        ]
        axes = ((flat, {shard.placement.shared for shard in flat.shards}) for flat in self._all)
        self._shared = [(flat, mesh.group(name)) for flat, names in axes for name in names if name]
        for _, group in self._shared:
            # few models need these groups; NCCL connects one at its first message: do that outside of steps
            all_reduce(torch.zeros(1, device=mesh.device), group)
        # by the parameter's identity: torch computes a tensor's hash in Python
        self._sums = {
            id(parameter): _GradientPlace(chunk, index, flat, span, parameter.shape)
            for chunk, flats in self.flat_parameters.items()
            for index, flat in enumerate(flats)
            for parameter, span in flat.parameters
        }
        self._handles: list[Handle] = []
        self._stream = CopyStream(mesh.device)
        self.norms: Norms = []
        """Norms of this rank's unreduced gradients in this step: a reduction spreads non-finite values to all ranks."""
        self.digests: list[Tensor] | None = None
        """Sums over the bits of this rank's gradients, which are then not reduced; None: reduce them."""
        for parameter in (one for flat in self._all for one, _ in flat.parameters):
            parameter.register_post_accumulate_grad_hook(self._hook())

    def start_step(self) -> None:
        """Reset the gradients for a new step, whatever a failed one left."""
        self._wait(0)
        for flat in self._all:
            if "total" in flat.table:
                self._begin(flat)
            else:
                self._free(flat)
                flat.grad.zero_()
        self.restart()
        self.norms = []

    def _begin(self, flat: FlatParameter) -> None:
        for parameter, _ in flat.parameters:
            self._sums[id(parameter)].begins = True

    def _free(self, flat: FlatParameter) -> None:
        flat.total = None  # the next micro-batch allocates a new one
        for parameter, _ in flat.parameters:
            self._sums[id(parameter)].view = None

    def expect(self, chunk: int, parameters: Collection[Tensor] | None = None) -> None:
        """Arm gradient reduction: the next backward pass is the last one to add to these parameters (None: all)."""
        flats = self.flat_parameters.get(chunk, ())
        counts = [
            len(flat.parameters) if parameters is None else sum(one in parameters for one, _ in flat.parameters)
            for flat in flats
        ]
        self.expect_counts(chunk, counts)

    def do(self, operation: Operation, flat: FlatParameter) -> None:
        """Start or finish a reduction."""
        super().do(operation, flat)
        if operation is Operation.REDUCE:
            self._handles.append(self._start(flat))
        else:
            self._handles.pop(0).wait()

    def finish(self) -> None:
        """Finish all reductions, then all-reduce copies over stages and partial gradients over tensor ranks."""
        self.finish_all()
        if self.digests is not None:
            return
        for flat, group in self._shared:
            all_reduce(flat.grad, group)
        if self._partial:
            # many small tensors: one message
            joined = all_reduce(torch.cat(self._partial), self.mesh.group("tensor"))
            parts = joined.split([gradient.numel() for gradient in self._partial])
            torch._foreach_copy_(self._partial, parts)

    def _hook(self) -> Callable[[nn.Parameter], None]:
        # Python's garbage collector does not see hooks: a hook that holds this object, and so its parameter, would keep
        # all weights and process groups alive for the life of the process
        this = weakref.ref(self)

        def hook(parameter: nn.Parameter) -> None:
            if parameter.grad is not None and (gradients := this()) is not None:  # the accumulator adds the others
                gradients._add(parameter)

        return hook

    def _add(self, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        total, begins = self.sum_of(parameter)
        grad = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad  # nn.Embedding(sparse=True)
        (total.copy_ if begins else total.add_)(grad)
        parameter.grad = None
        del total  # reductions that this completes free the sum
        self.complete(parameter)

    def sum_of(self, parameter: Tensor, cleared: bool = False) -> tuple[Tensor, bool]:
        """Return a parameter's gradient buffer, in its shape (zeroed if new and `cleared`), and whether it is new."""
        one = self._sums[id(parameter)]
        if one.view is None:
            one.view = self._total(one.flat)[one.span].view(one.shape)
        begins, one.begins = one.begins, False
        if begins and cleared:
            one.view.zero_()
        return one.view, begins

    def _total(self, flat: FlatParameter) -> Tensor:
        if flat.total is None:
            flat.total = torch.empty(flat.padded, dtype=flat.grad.dtype, device=flat.grad.device)
            flat.total[flat.numel :].zero_()
            self._begin(flat)
        return flat.total

    def complete(self, parameter: Tensor) -> None:
        """Count a gradient of this backward pass as added, and start the reductions that it completes."""
        one = self._sums[id(parameter)]
        self.count(one.chunk, one.index)

    def _start(self, flat: FlatParameter) -> Handle:
        mesh, sharding, total = self.mesh, flat.sharding, self._total(flat)
        message = self._message if sharding.replicas > 1 and self._message else flat.grad.dtype
        for parameter, _ in flat.parameters:
            one = self._sums[id(parameter)]
            if one.begins:  # the backward pass did not reach it
                total[one.span].zero_()
                one.begins = False
        if self.digests is not None:
            self.digests.append(sum_of_bits(total))
            if sharding.stage >= 2:
                self._free(flat)
            return Completion()
        self.norms.append((flat.tensors, torch._foreach_norm([total[span] for _, span in flat.tensors])))
        if sharding.size == 1:
            part = flat.grad.to(message)
            handle = start_ordered_all_reduce(part, mesh.group(sharding.axis("replicas")))
        else:
            total = total.to(message)
            in_place = not self.reduce_each and message == flat.grad.dtype
            part = flat.grad if in_place else torch.empty_like(flat.grad, dtype=message)
            handle = start_reduce_scatter(part, total, mesh.group(sharding.axis("shard")))
            if (copies := mesh.group(sharding.axis("copies"))) is not None:
                handle = start_sum(part, handle, copies, self._stream)
            if sharding.stage >= 2:
                self._free(flat)

        def finish(source: Tensor = total) -> None:
            """Wait for the reduction; the default argument keeps `source` alive until then."""
            handle.wait()
            if self.reduce_each and sharding.size > 1:
                flat.grad.add_(part)
            elif part is not flat.grad:
                flat.grad.copy_(part)

        return Completion(finish)


def start_sum(part: Tensor, scattered: Handle, copies: AxisGroup, stream: CopyStream) -> Handle:
    """Start to all-reduce `part` over the replicas of the same shard, after the reduce-scatter `scattered`."""
    # Hybrid sharding: groups of replicas hold copies of the same shard, whose gradients are summed over the groups.
    # computation       B  B  B  B ...
    # side stream       waits for the reduce-scatter, so that neither computation nor the host does
    # shard, copies     reduce-scatter -> all-reduce
    with stream.after_computation():
        scattered.wait()
        return start_all_reduce(part, copies)
