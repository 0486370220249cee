"""Weight gradients that are computed later than the gradients of inputs, for pipelines without bubbles.

Only the optimizer needs the gradient of a weight, so its computation can fill a gap in a schedule (Qi et al. 2024,
arXiv 2401.10241, section 2: backward is split into B, for the input, and W, for the weight).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from pangu.collectives.regions import TensorRegion, start_gather


class _Work(NamedTuple):
    parameter: Tensor
    part: Tensor
    region: TensorRegion
    gradient: Callable[[Tensor], Tensor | None]


class WeightGradientStore:
    """The weight gradients (and those of the biases beside them) that backward has postponed.

        with store.open(micro_batch):
            loss.backward()  # gradients of inputs, norms and position vectors
        store.flush(micro_batch)  # those of matrices

    A matrix gets one gradient of a micro-batch however often it was used, as from one backward. (Torch calls its hooks
    in the first backward too, with a gradient of None.) Each matmul's input and its output's gradient stay in memory;
    for the head that is the gradient of all logits, unless the loss is computed in chunks: then nothing is postponed.
    """

    def __init__(self) -> None:
        self._stored: dict[Hashable, deque[_Work]] = {}
        self._open: deque[_Work] | None = None
        self.add_product: Callable[..., None] | None = None
        """Adds the gradient of a matrix, a product of two, to the sum of its gradients (`WeightProducts.add`); None:
        autograd is given the product."""
        self.complete: Callable[[Tensor], None] | None = None
        """Told that all products of a matrix in a backward have been added, where they did not say so themselves
        (`WeightProducts.complete`)."""
        self.add_rows: Callable[..., None] | None = None
        """The same for the gradient of a table of which rows were looked up (`WeightProducts.add_rows`)."""

    @property
    def is_open(self) -> bool:
        return self._open is not None

    @contextmanager
    def open(self, key: Hashable) -> Iterator[None]:
        """Within the block, backward postpones its weight gradients under this key."""
        assert self._open is None
        assert key not in self._stored, f"{key} waits for flush()"
        self._open = self._stored[key] = deque()
        try:
            yield
        finally:
            self._open = None

    def put(
        self, parameter: Tensor, part: Tensor, region: TensorRegion, gradient: Callable[[Tensor], Tensor | None]
    ) -> None:
        """Postpone the gradient of a leaf: `gradient` makes it of `part` [sequence / size, ...], gathered over
        `region`, or adds it where it belongs and returns None. What both refer to stays in memory until `flush`."""
        assert self._open is not None
        if parameter.requires_grad:
            self._open.append(_Work(parameter, part.detach(), region, gradient))

    def parameters(self, key: Hashable) -> set[Tensor]:
        """Those whose gradients are postponed under this key."""
        return {work.parameter for work in self._stored[key]}

    @torch.no_grad()
    def flush(self, key: Hashable) -> None:
        """Compute the gradients in the order in which they came and give them to the parameters as backward would:
        added to `grad`, hooks called. The next one's input is gathered while a gradient is computed."""
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
