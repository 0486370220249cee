"""Sums gradients over micro-batches in fp32, then over replicas while backward still runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pangu.collectives.reduce import all_reduce, start_all_reduce
from pangu.zero.units import Unit


class GradientSum:
    """Adds each parameter's gradient to its unit's buffer as backward produces it.

    In the last micro-batch of a step a unit is sent to be summed over the replicas as soon as it is complete. Units
    are sent in the reverse of the forward order whatever order they complete in, so that every replica issues the same
    collectives in the same order.
    """

    def __init__(
        self, units: Sequence[Unit], group: dist.ProcessGroup | None, tensor_group: dist.ProcessGroup | None = None
    ) -> None:
        """
        Args:
            units: in the order of the forward pass.
            group: the replicas.
            tensor_group: the ranks that share each matrix; tensors of which each has a part of the gradient are summed
                over them.
        """
        self.units = list(reversed(units))
        self.group = group
        self.tensor_group = tensor_group
        self._partial = [p.master.grad for unit in self.units for p in unit.pieces if p.placement.partial]
        self._missing: list[int] = []
        self._sent: list[dist.Work | None] = []
        for index, unit in enumerate(self.units):
            for parameter, total in unit.parameters:
                parameter.register_post_accumulate_grad_hook(self._hook(index, total))

    def start_step(self) -> None:
        """Forget the gradients of the last step."""
        torch._foreach_zero_([unit.grad for unit in self.units])
        self._missing, self._sent = [], []

    def start_last_micro_batch(self) -> None:
        """Say that each unit is complete when the coming backward has reached all its parameters."""
        self._missing = [len(unit.parameters) for unit in self.units]

    def finish(self) -> None:
        """Send what is left (units with parameters that this step did not use) and wait for all sums."""
        self._send(len(self.units))
        for work in self._sent:
            if work is not None:
                work.wait()
        partial = [gradient for gradient in self._partial if gradient is not None]
        if partial:
            # many small tensors: one message
            joined = all_reduce(torch.cat([gradient.flatten() for gradient in partial]), self.tensor_group)
            parts = joined.split([gradient.numel() for gradient in partial])
            torch._foreach_copy_(partial, [part.view_as(g) for part, g in zip(parts, partial, strict=True)])

    def _hook(self, index: int, total: Tensor):  # type: ignore[no-untyped-def]
        def add(parameter: nn.Parameter) -> None:
            if parameter.grad is None:
                return  # backward put the work for it aside, see `layers.deferred`
            total.add_(parameter.grad)
            parameter.grad = None
            if self._missing:
                self._missing[index] -= 1
                complete = next((i for i, missing in enumerate(self._missing) if missing), len(self._missing))
                self._send(complete)

        return add

    def _send(self, stop: int) -> None:
        for unit in self.units[len(self._sent) : stop]:
            self._sent.append(start_all_reduce(unit.grad, self.group))
