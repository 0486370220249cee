"""Flat parameters: consecutive layers whose weights, gradients and main parameters each lie in one flat buffer.

A flat parameter is communicated at once. Its buffer is padded and divided into equal local shards, one for each rank
that the optimizer's state is sharded over. Its table of shards (logical tensor, first and last element) is what
optimizer, clipping, LAMB, checkpoints and offload read. The ZeRO stages (Rajbhandari et al. 2020, section 5) are
switches of it: without sharding the local shard is the whole buffer. Three parameters a, b, c on two ranks, in which b
is cut:

    buffer   | a a a a b b b b b b c c c c - - |     - padding
    rank 0   | a a a a b b b b |                     shards: a whole, b from element 0
    rank 1                     | b b c c c c - - |   shards: b from element 4, c whole
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pangu.layers.initial import fill, replace_parameter
from pangu.topology.copy_stream import host_memory
from pangu.topology.placement import Placement, PlacementTable
from pangu.zero.grouping import Sharding, buffer_table


@dataclass(frozen=True)
class Shard:
    """The part of one logical tensor that this rank stores and, unless it is frozen, updates."""

    placement: Placement
    start: int
    """First element, in this rank's slice of the tensor, flattened."""
    main: Tensor
    """Main parameters in fp32 (fp64 in fp64), flat; of a frozen tensor the weights in the compute format."""
    grad: Tensor | None
    """The sum of the gradients, on the device; None: frozen."""
    host_grad: Tensor | None = None
    """The gradient's copy for the update, if `main` lies on the host."""

    def rectangles(self, values: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """`values`, flat and as long as `main`, as rectangles of the logical tensor: of a matrix at most three, the end
        of a row, whole rows, the beginning of a row. Yields a view of each with the global index of its first
        element."""
        # checkpoints know rectangles only, and a shard may begin and end within a row; elements 2 to 9 of rows of 4:
        #
        #     . . a a
        #     b b b b
        #     c c . .
        begin = 0
        for place, shape in _rectangles(self.placement.local_shape, self.start, self.start + values.numel()):
            end = begin + math.prod(shape)
            first = tuple(map(sum, zip(self.placement.offsets, place, strict=True)))
            yield values[begin:end].view(shape), first
            begin = end


def _rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Place and shape of the rectangles that the elements from `start` to `stop` of a flattened tensor form."""
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    width = math.prod(shape[1:])
    (row, begin), (last, end) = divmod(start, width), divmod(stop, width)
    if begin:  # of one row, or the end of it
        for place, rest in _rectangles(shape[1:], begin, end if row == last else width):
            yield (row, *place), (1, *rest)
        row += 1
    if row < last:
        yield (row, *(0 for _ in shape[1:])), (last - row, *shape[1:])
    if end and row <= last:
        for place, rest in _rectangles(shape[1:], 0, end):
            yield (last, *place), (1, *rest)


class FlatParameter:
    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        table: PlacementTable,
        seed: int | None,
        dtype: torch.dtype,
        device: torch.device,
        sharding: Sharding,
    ) -> None:
        """Allocate the buffers, fill in the initial values and make the parameters `names` of `model` views of them,
        up to date once they are published. They are all trained or all frozen; frozen ones have no gradients and only
        weights, in `dtype`. `seed` of the values; None: those that the model has."""
        self.sharding, self.trained = sharding, table.is_trained(names[0])
        shapes = {name: model.get_parameter(name).shape for name in names}
        self.numel = sum(shape.numel() for shape in shapes.values())
        self.padded = sharding.padded(self.numel)
        self.span = sharding.span(self.padded)
        """The local shard's place in the buffer."""
        wide = torch.promote_types(dtype, torch.float32)
        self.table = buffer_table(self.padded, wide != dtype, sharding, self.trained)
        on_host = {row.name: row.on_host for row in self.table}
        self.local_on_host, self.main_on_host = on_host["local"], on_host["main"]
        self._allocate(dtype, wide, device)
        self.shards: list[Shard] = []
        self.parameters: list[tuple[nn.Parameter, slice]] = []
        """Each parameter of the model with its place in the buffer."""
        self.tensors: list[tuple[str, slice]] = []
        """Name of each logical tensor with the place of this rank's slice in the buffer."""

        offset = 0
        for name, shape in shapes.items():
            span = slice(offset, offset + shape.numel())
            offset = span.stop
            values = model.get_parameter(name).detach()
            for placement in table.stored_in(name):
                begin = span.start + placement.offset
                self.tensors.append((placement.name, slice(begin, begin + placement.local_numel)))
                self._add_shard(placement, begin, values)
            parameter = replace_parameter(model, name, self.weights[span].view(shape))
            parameter.requires_grad_(self.trained)
            self.parameters.append((parameter, span))
        if seed is not None:
            self.fill(seed)
        if sharding.stage == 3:
            self.free()

    def fill(self, seed: int) -> None:
        """Write the initial values of a seed into the main parameters; the weights follow when they are published."""
        for shard in self.shards:
            for rectangle, offsets in shard.rectangles(shard.main):
                fill(rectangle, shard.placement, seed, offsets)

    def _allocate(self, dtype: torch.dtype, wide: torch.dtype, device: torch.device) -> None:
        buffers: dict[str, Tensor] = {}
        for row in self.table:
            row_dtype = wide if row.wide else dtype
            if row.alias is not None:
                base = buffers[row.alias]
                buffers[row.name] = base if base.numel() == row.numel else base[self.span]
            elif row.on_host:
                buffers[row.name] = host_memory(row.numel, row_dtype, device).zero_()
            else:
                buffers[row.name] = torch.zeros(row.numel, dtype=row_dtype, device=device)
        self.weights = buffers["weights"]
        """What the model computes with; at stage 3 without storage while it is sharded."""
        self.local = buffers["local"]
        """Local shard of the weights, in the compute format."""
        self.rounded = buffers["rounded"]
        """The buffer that main parameters on the host are rounded into."""
        self.main = buffers["main"]
        """Local shard of the main parameters, which the optimizer updates."""
        self.total = buffers.get("total")
        """Sum of this rank's gradients of the whole buffer; None if there is none."""
        self.grad = buffers.get("grad", torch.empty(0, device=device))
        """Local shard of the gradients, summed over micro-batches and, once reduced, over replicas; empty if frozen."""
        self.host_grad = buffers.get("host_grad")
        """Its copy for the update, if the main parameters lie on the host."""

    def _add_shard(self, placement: Placement, begin: int, values: Tensor) -> None:
        low, high = max(begin, self.span.start), min(begin + placement.local_numel, self.span.stop)
        if low >= high:
            return
        place = slice(low - self.span.start, high - self.span.start)
        grad = self.grad[place] if self.trained else None
        host_grad = None if self.host_grad is None else self.host_grad[place]
        shard = Shard(placement, low - begin, self.main[place], grad, host_grad)
        if not values.is_meta:
            first = placement.offset + shard.start
            shard.main.copy_(values.reshape(-1)[first : first + shard.main.numel()])
        if not self.main_on_host:
            shard.main.grad = grad
        self.shards.append(shard)

    def publish(self) -> None:
        """Round the main parameters into the weights."""
        if self.rounded is not self.main:
            self.rounded.copy_(self.main, non_blocking=True)
        if self.local is not self.rounded:
            self.local.copy_(self.rounded, non_blocking=True)

    def lend_gradients(self, lend: bool) -> None:
        """Let the optimizer see the gradients on the host, or none: it skips tensors without a gradient."""
        for shard in self.shards:
            shard.main.grad = shard.host_grad if lend else None

    def allocate(self) -> Tensor:
        """Allocate all weights at stage 3, not filled, and return them."""
        self.weights.untyped_storage().resize_(self.weights.nbytes)
        return self.weights

    def free(self) -> None:
        """Free all weights at stage 3. The parameters stay views of the storage."""
        self.weights.untyped_storage().resize_(0)
