"""Gathers the weights of units: after a step what others updated (stages 1 and 2), around each use at stage 3."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from pangu.collectives.reduce import Handle, start_all_gather
from pangu.layers.gate import Gate
from pangu.layers.offload import CopyStream
from pangu.topology.mesh import Algorithms
from pangu.zero.flat_parameter import FlatParameter
from pangu.zero.grouping import TABLES, backward_order


class _Before(Function):
    """Opens a region in forward and closes it in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: str, unsharder: Unsharder) -> Tensor:
        ctx.close = lambda: unsharder.close(region, unsharder.backward)
        unsharder.open(region, unsharder.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.close()
        return grads[0], None, None


class _After(Function):
    """Closes a region in forward and opens it in backward. The head stays open: its backward comes next."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, region: str, unsharder: Unsharder) -> Tensor:
        stays = region == "head" and ctx.needs_input_grad[0]
        ctx.open = lambda: unsharder.open(region, unsharder.backward, already=stays)
        if region in TABLES:
            ctx.open = lambda: None
        if not stays:
            unsharder.close(region, unsharder.forward)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.open()
        return grads[0], None, None


@dataclass(frozen=True)
class _Copied:
    """A copy from the host that is on its way."""

    mark: torch.Event | None

    def wait(self) -> None:
        CopyStream.wait(self.mark)


class Unsharder(Gate):
    """Sees to it that weights are there when a model uses them.

    At stage 3 a unit is gathered while the region before it computes and released behind its use, so that at most two
    units (and a tied word embedding) are whole at a time; backward gathers them again. A chunk that a schedule holds
    stays gathered from its first use until it is let go.
    """

    def __init__(
        self,
        regions: Mapping[str, Sequence[FlatParameter]],
        order: Mapping[int, Sequence[str]],
        group: dist.ProcessGroup | None,
        trained: Collection[str],
        lane: CopyStream,
        overlap: bool = True,
        algorithms: Algorithms | None = None,
    ) -> None:
        """
        Args:
            regions: name -> units that it uses.
            order: chunk -> its regions in the order in which they begin.
            group: the replicas that share the units.
            trained: regions from which gradients come, whatever their input is.
            lane: for copies from the host.
            overlap: false: gather a unit when it is needed, not before.
            algorithms: how it is gathered.
        """
        self.regions = regions
        self.group = group
        self.trained = trained
        self.lane = lane
        self.overlap = overlap
        self.algorithms = algorithms or Algorithms()
        self.units = list(dict.fromkeys(unit for units in regions.values() for unit in units))
        self._of_chunk = {chunk: {unit for name in names for unit in regions[name]} for chunk, names in order.items()}
        alone = len(order) == 1
        self.forward = {a: b for names in order.values() for a, b in pairwise(names) if alone or a != "position_bias"}
        """Region -> the one that opens after it in forward; behind the bias that all chunks have there are several."""
        self.backward = {a: b for names in order.values() for a, b in pairwise(backward_order(names, trained))}
        """The same for backward."""
        self._works: dict[FlatParameter, Handle | None] = {}
        """Gathers on their way."""
        self._whole: set[FlatParameter] = set()
        """Units at stage 3 whose weights are all here."""
        self._users = dict.fromkeys(self.units, 0)
        """How many open regions use a unit."""
        self._held: set[FlatParameter] = set()

    def publish(self, units: Iterable[FlatParameter]) -> None:
        """Begin to send every rank what the others have updated of some units; what was gathered is out of date."""
        for unit in units:
            self._finish(unit)
            with self.lane.after_computation():
                unit.publish()
                if unit.sharding.stage == 3:
                    self._release(unit)
                elif unit.sharding.size > 1:
                    self._works[unit] = start_all_gather(unit.weights, unit.share, self.group, self.algorithms)
                elif unit.main_on_host:
                    self._works[unit] = _Copied(self.lane.mark())
            if not self.overlap:
                self._finish(unit)

    def wait(self) -> None:
        """Wait for all that is on its way."""
        for unit in list(self._works):
            self._finish(unit)

    def hold(self, chunk: int) -> None:
        """Keep the units of a chunk, once gathered, until `let_go`."""
        self._held |= self._of_chunk[chunk]

    def let_go(self, chunk: int) -> None:
        """End of `hold`."""
        self._held -= self._of_chunk[chunk]
        for unit in self._of_chunk[chunk]:
            self._finish(unit)
            self._release(unit)

    def before(self, region: str, x: Tensor) -> Tensor:
        """See `Gate`."""
        if torch.is_grad_enabled() and region in self.trained and region not in TABLES and not x.requires_grad:
            # all below is frozen: backward ends here, but has to come as far as this to close the region
            x = x.detach().requires_grad_()
        return _Before.apply(x, region, self)

    def after(self, region: str, x: Tensor) -> Tensor:
        """See `Gate`."""
        return _After.apply(x, region, self)

    def open(self, region: str, following: Mapping[str, str], already: bool = False) -> None:
        """Wait for the weights of a region that is about to be used, and begin to gather those of the next one."""
        for unit in [] if already else self.regions.get(region, ()):
            self._users[unit] += 1
            self._start(unit)
            self._finish(unit)
        for unit in self.regions[following[region]] if self.overlap and region in following else []:
            self._start(unit)

    def close(self, region: str, following: Mapping[str, str]) -> None:
        """Release what a region used, unless the next one needs it."""
        soon = self.regions[following[region]] if region in following else []
        for unit in self.regions.get(region, ()):
            self._users[unit] -= 1
            if unit not in soon:
                self._release(unit)

    def _start(self, unit: FlatParameter) -> None:
        if unit.sharding.stage == 3 and unit not in self._whole and unit not in self._works:
            with self.lane.after_computation():
                # not through the tensor that autograd knows: what it saved of the unit is still the same weights
                whole, part = unit.hold().data, unit.share
                if unit.share_away:
                    part = whole[unit.own].copy_(part, non_blocking=True)
                work = start_all_gather(whole, part, self.group, self.algorithms)
                self._works[unit] = _Copied(self.lane.mark()) if work is None else work

    def _finish(self, unit: FlatParameter) -> None:
        if unit in self._works:
            work = self._works.pop(unit)
            if work is not None:
                work.wait()
            self._whole.add(unit)

    def _release(self, unit: FlatParameter) -> None:
        if unit.sharding.stage == 3 and unit in self._whole and not self._users[unit] and unit not in self._held:
            self._whole.discard(unit)
            unit.release()
