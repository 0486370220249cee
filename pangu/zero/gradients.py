"""Sums gradients over micro-batches in fp32, then over replicas while backward still runs."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pangu.collectives.reduce import Handle, all_reduce, start_ordered_all_reduce, start_reduce_scatter
from pangu.topology.mesh import Algorithms, Mesh
from pangu.zero.flat_parameter import FlatParameter
from pangu.zero.grouping import IN_FLIGHT


@dataclass(frozen=True)
class Groups:
    """Who holds what else; None: nobody."""

    data: dist.ProcessGroup | None = None
    """All replicas."""
    shard: dist.ProcessGroup | None = None
    """Replicas that share a unit's buffer."""
    copies: dist.ProcessGroup | None = None
    """Replicas that hold the same share."""
    tensor: dist.ProcessGroup | None = None
    """Ranks that share every matrix."""
    ends: dist.ProcessGroup | None = None
    """First and last stage of the pipeline, which both hold a tied word embedding."""
    stages: dist.ProcessGroup | None = None
    """All stages, which all hold a table of position biases."""
    algorithms: Algorithms = field(default_factory=Algorithms)
    """How they reduce."""

    @classmethod
    def of(cls, mesh: Mesh) -> Groups:
        """Those of a live mesh."""
        data, shard, copies, tensor, ends, stages = (
            mesh.group(axis) for axis in ("data", "shard", "copies", "tensor", "ends", "pipeline")
        )
        return cls(data, shard, copies, tensor, ends, stages, mesh.algorithms)


@dataclass
class _Sent:
    unit: FlatParameter
    part: Tensor
    """What the collective fills: the gradient of the own share, or of this micro-batch's."""
    total: Tensor | None
    """What it reads, if it is not kept: the next micro-batch begins another one."""
    work: Handle | None


class GradientSum:
    """Adds each parameter's gradient to its unit's buffer as backward produces it, and reduces complete units.

    Units of a chunk are sent in the reverse of the forward order whatever order they complete in, so that every replica
    issues the same collectives in the same order.
    """

    def __init__(
        self,
        chunks: Mapping[int, Sequence[FlatParameter]],
        groups: Groups,
        reduce_each: bool,
        overlap: bool = True,
        message: torch.dtype | None = None,
    ) -> None:
        """
        Args:
            chunks: units of each chunk of this stage, in the order of the forward pass. Those under -1 belong to
                several chunks and are sent at the end of the step.
            groups: who takes part.
            reduce_each: `reduce` is called after each micro-batch, so that no whole gradients are kept (ZeRO-2 and
                3), rather than once per step.
            overlap: false: wait for each reduction at once.
            message: format in which gradients are sent and added up over replicas; None: that of the sums.
        """
        self.units = {chunk: list(reversed(units)) for chunk, units in chunks.items()}
        self.groups = groups
        self.reduce_each = reduce_each
        self.overlap = overlap
        self._message = message if groups.data is not None else None
        everything = [unit for units in self.units.values() for unit in units]
        shards = [shard for unit in everything for shard in unit.shards]
        self._all = everything
        self._partial = [p.grad for p in shards if p.placement.partial and p.grad is not None]
        shared = {unit: {p.placement.shared for p in unit.shards} - {None} for unit in everything}
        self._shared = [(unit, getattr(groups, name)) for unit, names in shared.items() for name in names if name]
        self._missing: dict[int, list[int]] = {}
        """Chunk whose gradients are being reduced -> parameters that each unit still waits for."""
        self._unsent: dict[int, int] = {}
        """Chunk -> how many of its units have been sent since then."""
        self._sent: list[_Sent] = []
        self._norms: list[tuple[FlatParameter, Sequence[Tensor]]] = []
        """Norms of this rank's own gradients of a unit's tensors, as they were sent: a reduction spreads what is not
        finite over all ranks. Nobody waits for them."""
        for chunk, units in self.units.items():
            for index, unit in enumerate(units):
                for parameter, span in unit.parameters:
                    parameter.register_post_accumulate_grad_hook(self._hook(chunk, index, span))

    def start_step(self) -> None:
        """Forget the gradients of the last step."""
        for unit in self._all:
            (unit.grad if unit.total is None else unit.total).zero_()
        self._missing.clear()
        self._unsent.clear()
        self._norms.clear()

    def expect(self, chunk: int) -> None:
        """Say that a whole backward of a chunk is about to run, and `reduce` will follow: send units as they become
        complete."""
        self._missing[chunk] = [len(unit.parameters) for unit in self.units.get(chunk, ())]

    def reduce(self, chunk: int) -> None:
        """Send what is left of a chunk; after `expect`, units with parameters that backward did not reach. Others wait
        for them before they go on."""
        self._send(chunk, len(self.units.get(chunk, ())))
        self._missing.pop(chunk, None)
        self._unsent.pop(chunk, None)

    def finish(self) -> None:
        """Send what several chunks use, wait for all sums, and add up what several stages or parts of the sequence
        have."""
        self.reduce(-1)
        self._reap(0)
        for unit, group in self._shared:
            all_reduce(unit.grad, group)
        if self._partial:
            # many small tensors: one message
            joined = all_reduce(torch.cat(self._partial), self.groups.tensor)
            parts = joined.split([gradient.numel() for gradient in self._partial])
            torch._foreach_copy_(self._partial, parts)

    def not_finite(self) -> list[str]:
        """Tensors of which this rank itself, before anything was added up, had a gradient with a norm that is not
        finite; in about the order of backward."""
        found = {
            name: None
            for unit, norms in self._norms
            for (name, _), norm in zip(reversed(unit.tensors), reversed(norms), strict=True)
            if not math.isfinite(norm)
        }
        return list(found)

    def _hook(self, chunk: int, index: int, span: slice) -> Callable[[nn.Parameter], None]:
        # Python's collector does not see hooks: one that held this object, and so its parameter, would keep all weights
        # and process groups for the life of the process
        add = weakref.WeakMethod(self._add)

        def hook(parameter: nn.Parameter) -> None:
            if (method := add()) is not None:
                method(parameter, chunk, index, span)

        return hook

    def _add(self, parameter: nn.Parameter, chunk: int, index: int, span: slice) -> None:
        """Move a gradient that backward has just produced into the `index`-th unit of a chunk."""
        if parameter.grad is None:
            return  # backward put the work for it aside, see `layers.deferred`
        unit = self.units[chunk][index]
        if unit.total is None:
            unit.total = torch.zeros(unit.padded, dtype=unit.grad.dtype, device=unit.grad.device)
        unit.total[span].view_as(parameter).add_(parameter.grad)
        parameter.grad = None
        if chunk in self._missing:
            missing = self._missing[chunk]
            missing[index] -= 1
            self._send(chunk, next((place for place, count in enumerate(missing) if count > 0), len(missing)))

    def _send(self, chunk: int, stop: int) -> None:
        start = self._unsent.get(chunk, 0)
        for unit in self.units.get(chunk, [])[start:stop]:
            if self.reduce_each:
                self._reap(IN_FLIGHT - 1)
            self._sent.append(self._start(unit))
            if not self.overlap:
                self._reap(0)
        self._unsent[chunk] = max(start, stop)

    def _start(self, unit: FlatParameter) -> _Sent:
        groups, message = self.groups, self._message or unit.grad.dtype
        if unit.total is None:  # no parameter of it was used
            unit.total = torch.zeros(unit.padded, dtype=unit.grad.dtype, device=unit.grad.device)
        self._norms.append((unit, torch._foreach_norm([unit.total[span] for _, span in unit.tensors])))
        if unit.sharding.size == 1:
            part = unit.grad.to(message)
            return _Sent(unit, part, None, start_ordered_all_reduce(part, groups.data, groups.algorithms))
        total = unit.total.to(message)
        in_place = not self.reduce_each and message == unit.grad.dtype
        part = unit.grad if in_place else torch.empty_like(unit.grad, dtype=message)
        if unit.sharding.stage >= 2:
            unit.total = None
        return _Sent(unit, part, total, start_reduce_scatter(part, total, groups.shard, groups.algorithms))

    def _reap(self, leave: int) -> None:
        """Wait for all but the newest `leave` reductions and put their results where they belong."""
        while len(self._sent) > leave:
            sent = self._sent.pop(0)
            unit, part = sent.unit, sent.part
            if sent.work is not None:
                sent.work.wait()
            if unit.sharding.size > 1:
                all_reduce(part, self.groups.copies)
            if self.reduce_each:
                unit.grad.add_(part)
            elif part is not unit.grad:
                unit.grad.copy_(part)
