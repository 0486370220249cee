"""Units: consecutive layers whose parameters, gradients and main parameters each lie in one flat buffer.

A unit is what is communicated at once. Its buffer is padded to equal shares, one for each rank that the optimizer's
state is sharded over, and its table of shards (logical tensor, first and last element) says what of a share is whose:
optimizer, clipping, LAMB, checkpoints and offload all read that table. The ZeRO stages (Rajbhandari et al. 2020,
section 5) are switches of it: what is not sharded has one share, the whole buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pangu.layers.initial import fill, replace_parameter
from pangu.layers.offload import host_memory
from pangu.topology.placement import Placement, PlacementTable
from pangu.zero.grouping import Sharding, buffer_table


@dataclass(frozen=True)
class Shard:
    """The part of one logical tensor that this rank keeps and, unless it is frozen, updates."""

    placement: Placement
    start: int
    """First element, in this rank's slice of the tensor laid out flat."""
    main: Tensor
    """Weights in fp32 (fp64 in fp64), flat; of a frozen tensor in the compute format."""
    grad: Tensor | None
    """The gradient's sum, on the device; None: frozen."""
    host_grad: Tensor | None = None
    """Where the gradient goes for the update, if the main lies on the host."""

    @property
    def is_whole(self) -> bool:
        """True if it is the whole slice."""
        return self.main.numel() == self.placement.local_numel

    def rectangles(self, values: Tensor) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
        """`values`, flat and as long as `main`, cut into at most three rectangles of the logical tensor.

        Yields:
            Each rectangle, a view, with the global index of its first element.
        """
        shape, offsets = self.placement.local_shape, self.placement.offsets
        if len(shape) == 1 or self.is_whole:
            first = (offsets[0] + self.start,) if len(shape) == 1 else offsets
            yield values.view(-1, *shape[1:]), first
            return
        rows, width = shape[0], math.prod(shape[1:])
        assert len(shape) == 2, shape
        position, stop = self.start, self.start + values.numel()
        while position < stop:
            row, column = divmod(position, width)
            whole_rows = (stop - position) // width if column == 0 else 0
            length = whole_rows * width if whole_rows else min(width - column, stop - position)
            assert row < rows
            part = values[position - self.start : position - self.start + length]
            yield part.view(max(1, whole_rows), -1), (offsets[0] + row, offsets[1] + column)
            position += length


class FlatParameter:
    """The flat buffers of some parameters."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        table: PlacementTable,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        sharding: Sharding,
        trained: bool = True,
    ) -> None:
        """Allocate the buffers, fill them with the first values and make the parameters of `model` views of them.

        Args:
            model: built on the meta device.
            names: its parameters that belong to this unit.
            table: their logical tensors.
            seed: of the first values.
            dtype: format that forward and backward compute in.
            device: where the model computes.
            sharding: what of it this rank keeps.
            trained: false: frozen. There are no gradients, and no weights beside those that the model computes with.
        """
        self.sharding = sharding
        self.trained = trained
        stored = [(name, model.get_parameter(name).shape) for name in names]
        self.numel = sum(shape.numel() for _, shape in stored)
        """Elements of the parameters, without the padding behind them."""
        self.padded = sharding.padded(self.numel)
        self.own = sharding.own(self.padded)
        """This rank's share of the buffer."""
        wide = torch.promote_types(dtype, torch.float32)
        self.table = buffer_table(self.padded, wide != dtype, sharding, trained)
        away = {row.name: row.away for row in self.table}
        self.share_away, self.main_on_host = away["share"], away["main"]
        """Whether the own share of the weights, and whether the main parameters lie on the host."""
        self._allocate(dtype, wide, device)
        self.shards: list[Shard] = []
        self.parameters: list[tuple[nn.Parameter, slice]] = []
        """Each parameter of the model with its place in the buffer."""
        self.tensors: list[tuple[str, slice]] = []
        """Name of each logical tensor with the place of this rank's slice in the buffer."""

        offset = 0
        for name, shape in stored:
            span = slice(offset, offset + shape.numel())
            offset = span.stop
            for placement in table.stored_in(name):
                begin = span.start + placement.offset
                self.tensors.append((placement.name, slice(begin, begin + placement.local_numel)))
                self._add_piece(placement, begin, seed)
            parameter = replace_parameter(model, name, self.weights[span].view(shape))
            parameter.requires_grad_(trained)
            self.parameters.append((parameter, span))
        self.publish()
        if sharding.stage == 3:
            self.release()

    def _allocate(self, dtype: torch.dtype, wide: torch.dtype, device: torch.device) -> None:
        """The buffers that the table says."""
        made: dict[str, Tensor] = {}
        for row in self.table:
            if row.alias is not None:
                base = made[row.alias]
                made[row.name] = base if base.numel() == row.numel else base[self.own]
            elif row.away:
                made[row.name] = host_memory(row.numel, wide if row.wide else dtype, device).zero_()
            else:
                made[row.name] = torch.zeros(row.numel, dtype=wide if row.wide else dtype, device=device)
        self.weights = made["weights"]
        """What the model computes with; at stage 3 its storage is empty but for gathered units."""
        self.share = made["share"]
        """Weights of the own share, in the compute format."""
        self.rounded = made["rounded"]
        """The same where main parameters on the host are rounded to."""
        self.main = made["main"]
        """Weights of the own share that the optimizer updates."""
        self.total = made.get("total")
        """Sum of this rank's own gradients of the whole buffer; None while there is none."""
        self.grad = made.get("grad", torch.empty(0, device=device))
        """Gradients of the own share, summed over micro-batches and, once reduced, over replicas; empty if frozen."""
        self.host_grad = made.get("host_grad")
        """Where they go for the update, if the main parameters lie on the host."""

    def _add_piece(self, placement: Placement, begin: int, seed: int) -> None:
        """Enter what this rank updates of a logical tensor whose slice begins at element `begin` of the buffer."""
        low, high = max(begin, self.own.start), min(begin + placement.local_numel, self.own.stop)
        if low < high:
            here = slice(low - self.own.start, high - self.own.start)
            grad = self.grad[here] if self.trained else None
            host_grad = None if self.host_grad is None else self.host_grad[here]
            shard = Shard(placement, low - begin, self.main[here], grad, host_grad)
            for part, offsets in shard.rectangles(shard.main):
                fill(part, placement, seed, offsets)
            if not self.main_on_host:
                shard.main.grad = grad
            self.shards.append(shard)

    def publish(self) -> None:
        """Round the main parameters of the own share into the weights that the model computes with."""
        if self.rounded is not self.main:
            self.rounded.copy_(self.main, non_blocking=True)
        if self.share is not self.rounded:
            self.share.copy_(self.rounded, non_blocking=True)

    def lend_gradients(self, lend: bool) -> None:
        """Let the optimizer see the gradients on the host, or no gradients: it passes over what has none."""
        for shard in self.shards:
            shard.main.grad = shard.host_grad if lend else None

    def hold(self) -> Tensor:
        """Make room for all weights at stage 3, and return the room, to be filled."""
        self.weights.untyped_storage().resize_(self.weights.nbytes)
        return self.weights

    def release(self) -> None:
        """Give back the room of all weights at stage 3. The parameters stay views of it."""
        self.weights.untyped_storage().resize_(0)
