"""Flat parameters: consecutive layers whose weights, gradients and main parameters each lie in one flat buffer.

A flat parameter is communicated at once. Its buffer is padded and divided into equal local shards, one for each rank
that the optimizer state is sharded over. Optimizer, clipping, LAMB, checkpoints and offload read its table of shards
(logical tensor, first and last element). The ZeRO stages (Rajbhandari et al. 2020, section 5) are settings of its
buffers: without sharding the local shard is the full buffer. For example, parameters a, b and c on two ranks, where b
is split:

    buffer   | a a a a b b b b b b c c c c - - |     - padding
    rank 0   | a a a a b b b b |                     shards: all of a, b from element 0
    rank 1                     | b b c c c c - - |   shards: b from element 4, all of c
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pangu.layers.initial import fill, replace_parameter
from pangu.topology.copy_stream import host_memory
from pangu.topology.placement import Placement, PlacementTable
from pangu.zero.stage_parameters import FlatSpec


@dataclass(frozen=True)
class Shard:
    """Part of a logical tensor that this rank stores and, unless it is frozen, updates."""

    placement: Placement
    start: int
    """First element within this rank's slice of the tensor, flattened."""
    main: Tensor
    """Main parameters in fp32 (fp64 in fp64), flat; for a frozen tensor the weights in the compute dtype."""
    grad: Tensor | None
    """Sum of the gradients, on the device; None: frozen."""
    host_grad: Tensor | None = None
    """Host copy of the gradient for the update, if `main` is offloaded."""

    def rectangles(self, values: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """Yield flat `values` of this shard as views of rectangles, each with the global index of its first element."""
        # Checkpoints store rectangles only, and a shard may begin and end within a row, which makes at most three of a
        # matrix; elements 2 to 9 of rows of 4:
        #
        #    . . a a
        #    b b b b
        #    c c . .
        begin = 0
        for place, shape in _rectangles(self.placement.local_shape, self.start, self.start + values.numel()):
            end = begin + math.prod(shape)
            first = tuple(map(sum, zip(self.placement.offsets, place, strict=True)))
            yield values[begin:end].view(shape), first
            begin = end


def _rectangles(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offset and shape of the rectangles that cover the elements [start, stop) of a flattened tensor."""
    if len(shape) == 1:
        yield (start,), (stop - start,)
        return
    width = math.prod(shape[1:])
    (row, begin), (last, end) = divmod(start, width), divmod(stop, width)
    if begin:  # a part of one row, or the end of a row
        for place, rest in _rectangles(shape[1:], begin, end if row == last else width):
            yield (row, *place), (1, *rest)
        row += 1
    if row < last:
        yield (row, *(0 for _ in shape[1:])), (last - row, *shape[1:])
    if end and row <= last:
        for place, rest in _rectangles(shape[1:], 0, end):
            yield (last, *place), (1, *rest)


class FlatParameter(FlatSpec):
    """Parameters of consecutive layers with their weights, gradients and main parameters in flat buffers."""

    def __init__(
        self,
        model: nn.Module,
        numbers: FlatSpec,
        table: PlacementTable,
        seed: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate and initialize the buffers, and turn the parameters of `model` into views of them."""
        # The weights are up to date after `publish`. All parameters are trained or all are frozen; frozen ones have
        # only weights, in `dtype`. A `seed` of None keeps the values of the model.
        vars(self).update(vars(numbers))
        self.numbers, self.span = numbers, self.sharding.span(self.padded)
        wide = torch.promote_types(dtype, torch.float32)
        self.table = self.buffers(wide != dtype)
        self.local_on_host = self.table["local"].on_host
        self._allocate(dtype, wide, device)
        self.shards = [
            self._shard(placement, place, first, model.get_parameter(placement.stored_in).detach())
            for placement, place, first in self.shard_ranges(table)
        ]
        self.parameters: list[tuple[nn.Parameter, slice]] = []
        """Parameters of the model with their ranges in the buffer."""
        self.tensors = [(placement.name, span) for placement, span in self.tensor_ranges(table)]
        """Names of logical tensors with the ranges of this rank's slices in the buffer."""

        self.stale: Callable[[], None] = lambda: None
        """Function to call when the weights change: casts of them are out of date."""
        self.casts_by_name = self._casts_by_name(table)
        """Views of `casts` for a matrix and its transpose, by name of the first logical tensor."""

        offset = 0
        for name in self.names:
            shape = model.get_parameter(name).shape
            span = slice(offset, offset + shape.numel())
            offset = span.stop
            parameter = replace_parameter(model, name, self.weights[span].view(shape))
            parameter.requires_grad_(self.trained)
            self.parameters.append((parameter, span))
        if seed is not None:
            self.fill(seed)
        if self.sharding.stage == 3:
            self.free()

    def _casts_by_name(self, table: PlacementTable) -> dict[str, tuple[Tensor, Tensor]]:
        views, at = {}, 0
        for name, numel in self.fp8.items():
            assert self.casts is not None
            (rows, columns), shape = self.casts[at : at + 2 * numel].view(2, numel), table.shapes[name]
            views[table.stored_in(name)[0].name] = rows.view(shape), columns.view(shape[::-1])
            at += 2 * numel
        return views

    def fill(self, seed: int) -> None:
        """Initialize the main parameters from a seed; `publish` then updates the weights."""
        for shard in self.shards:
            for rectangle, offsets in shard.rectangles(shard.main):
                fill(rectangle, shard.placement, seed, offsets)

    def _allocate(self, dtype: torch.dtype, wide: torch.dtype, device: torch.device) -> None:
        buffers: dict[str, Tensor] = {}
        for row in self.table.values():
            row_dtype = torch.float8_e4m3fn if row.fp8 else wide if row.wide else dtype
            if row.alias is not None:
                base = buffers[row.alias]
                buffers[row.name] = base if base.numel() == row.numel else base[self.span]
            elif row.on_host:
                buffers[row.name] = host_memory(row.numel, row_dtype, device).zero_()
            else:
                buffers[row.name] = torch.zeros(row.numel, dtype=row_dtype, device=device)
        self.weights = buffers["weights"]
        """Full weights that the model computes with; at stage 3 without storage while they are sharded."""
        self.casts = buffers.get("casts")
        """Matrices of layers in fp8, each followed by its transpose, as long as `weights` exist; None: no fp8."""
        self.local = buffers["local"]
        """Local shard of the weights, in the compute dtype."""
        self.rounded = buffers["rounded"]
        """Main parameters rounded to the compute dtype, on the host if the main parameters are."""
        self.main = buffers["main"]
        """Local shard of the main parameters, which the optimizer updates."""
        self.total = buffers.get("total")
        """Sum of this rank's gradients over micro-batches, for the full buffer; None if not allocated."""
        self.grad = buffers.get("grad", torch.empty(0, device=device))
        """Local shard of the gradients, summed over micro-batches and, once reduced, over replicas; empty if frozen."""
        self.host_grad = buffers.get("host_grad")
        """Host copy of `grad` for the update, if the main parameters are offloaded."""

    def _shard(self, placement: Placement, place: slice, start: int, values: Tensor) -> Shard:
        grad = self.grad[place] if self.trained else None
        host_grad = None if self.host_grad is None else self.host_grad[place]
        shard = Shard(placement, start, self.main[place], grad, host_grad)
        if not values.is_meta:
            first = placement.offset + start
            shard.main.copy_(values.reshape(-1)[first : first + shard.main.numel()])
        if not self.main_on_host:
            shard.main.grad = grad
        return shard

    def publish(self) -> None:
        """Round the main parameters to the weights."""
        self.stale()
        if self.rounded is not self.main:
            self.rounded.copy_(self.main, non_blocking=True)
        if self.local is not self.rounded:
            self.local.copy_(self.rounded, non_blocking=True)

    def lend_gradients(self, lend: bool) -> None:
        """Give the host gradients to the optimizer, or take them back: it skips tensors without a gradient."""
        for shard in self.shards:
            shard.main.grad = shard.host_grad if lend else None

    def allocate(self) -> Tensor:
        """Allocate the full weights at stage 3, uninitialized, and return them."""
        self.stale()
        for buffer in self._gathered():
            buffer.untyped_storage().resize_(buffer.nbytes)
        return self.weights

    def free(self) -> None:
        """Free the full weights at stage 3; the parameters remain views of the storage."""
        for buffer in self._gathered():
            buffer.untyped_storage().resize_(0)

    def _gathered(self) -> list[Tensor]:
        return [self.weights] if self.casts is None else [self.weights, self.casts]
