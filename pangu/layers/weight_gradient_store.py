"""Postponed weight gradients, for pipeline schedules with a split backward pass.

Only the optimizer needs the gradient of a weight, so its computation can fill a gap in a schedule (Qi et al. 2024,
arXiv 2401.10241, section 2: backward is split into B, for the input, and W, for the weight).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pangu.collectives.regions import TensorRegion, start_gather


class _Work(NamedTuple):
    parameter: Tensor
    part: Tensor
    region: TensorRegion
    gradient: Callable[[Tensor], Tensor | None]


class WeightGradientStore:
    """Weight and bias gradients that a backward pass has postponed.

        with store.open(micro_batch):
            loss.backward()  # gradients of inputs, norms and position vectors
        store.flush(micro_batch)  # gradients of matrices

    A matrix gets one gradient per micro-batch however often it was used, as from one backward pass. (Torch calls its
    hooks in the first one too, with a gradient of None.) Each matmul's input and output gradient stay in memory; for
    the head that is the gradient of all logits, unless the loss is computed in chunks: then nothing is postponed.
    """

    def __init__(self) -> None:
        """Create an empty, closed store."""
        self._stored: dict[Hashable, deque[_Work]] = {}
        self._open: deque[_Work] | None = None
        self.sums: Any = None
        """`GradientAccumulator`, by which layers add their gradients to the sums; None: autograd gets them."""

    @property
    def is_open(self) -> bool:
        """True while backward passes postpone their weight gradients."""
        return self._open is not None

    @contextmanager
    def open(self, key: Hashable) -> Iterator[None]:
        """Postpone the weight gradients of backward passes in the block, under this key."""
        assert self._open is None
        assert key not in self._stored, f"{key} waits for flush()"
        self._open = self._stored[key] = deque()
        try:
            yield
        finally:
            self._open = None

    def clear(self) -> None:
        """Forget what a failed step has postponed."""
        self._stored.clear()
        if self.sums is not None:
            self.sums.clear()

    def put(
        self, parameter: Tensor, part: Tensor, region: TensorRegion, gradient: Callable[[Tensor], Tensor | None]
    ) -> None:
        """Postpone the gradient of a leaf, which `gradient` computes from `part` [sequence / size, ...]."""
        # `part` is gathered over `region` for it. `gradient` returns it, or adds it to its sum and returns None;
        # tensors that it refers to stay in memory until `flush`.
        assert self._open is not None
        if parameter.requires_grad:
            self._open.append(_Work(parameter, part.detach(), region, gradient))

    def parameters(self, key: Hashable) -> set[Tensor]:
        """Return the parameters whose gradients are postponed under this key."""
        return {work.parameter for work in self._stored[key]}

    @torch.no_grad()
    def flush(self, key: Hashable) -> None:
        """Compute postponed gradients in order and give them to the parameters like a backward pass (`grad`, hooks)."""
        # The input of the next one is gathered while a gradient is computed.
        queue = self._stored.pop(key)
        uses_left = Counter(work.parameter for work in queue)
        sums: dict[Tensor, Tensor] = {}
        gathered = start_gather(queue[0].part, queue[0].region) if queue else None
        while gathered is not None:
            work, wait = queue.popleft(), gathered
            gathered = start_gather(queue[0].part, queue[0].region) if queue else None
            parameter, gradient = work.parameter, work.gradient(wait())
            if gradient is not None:
                sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
            uses_left[parameter] -= 1
            if not uses_left[parameter] and parameter in sums:
                parameter.backward(sums.pop(parameter))
