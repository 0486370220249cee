"""Weight gradients that are computed later than the gradients of inputs, for pipelines without bubbles.

Nobody waits for the gradient of a weight before the optimizer does, so its computation can fill a gap in a schedule (Qi
et al. 2024, arXiv 2401.10241, section 2: backward is split into B, for the input, and W, for the weight).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from pangu.collectives.regions import Pending, TensorRegion, start_gather


@dataclass(frozen=True)
class _Work:
    parameter: Tensor
    part: Tensor
    region: TensorRegion
    gradient: Callable[[Tensor], Tensor]

    def start(self) -> Pending:
        return start_gather(self.part, self.region)


class WeightGradientStore:
    """The work that matrices (and the biases of their products) put aside.

        weight_gradients = WeightGradientStore()
        with weight_gradients.open(micro_batch):
            loss.backward()  # gradients of inputs, norms and position vectors
        weight_gradients.flush(micro_batch)  # those of matrices

    A matrix gets its gradient of a micro-batch in one piece however often it was used, as it does from one backward.
    (Torch calls its hooks in the held backward too, with a gradient of None.) What waits is each product's input and
    its output's gradient; for the head that is the gradient of all logits, even where the loss is computed in chunks.
    """

    def __init__(self) -> None:
        self._held: dict[Hashable, deque[_Work]] = {}
        self._open: deque[_Work] | None = None

    @property
    def is_open(self) -> bool:
        """True if weight gradients are to be put aside at the moment."""
        return self._open is not None

    @contextmanager
    def open(self, key: Hashable) -> Iterator[None]:
        """Within the block, backward puts its weight gradients aside under this key."""
        assert self._open is None
        assert key not in self._held, f"{key} waits for compute()"
        self._open = self._held[key] = deque()
        try:
            yield
        finally:
            self._open = None

    def put(self, parameter: Tensor, part: Tensor, region: TensorRegion, gradient: Callable[[Tensor], Tensor]) -> None:
        """Put work aside; what it refers to stays in memory until it is done.

        Args:
            parameter: leaf whose gradient it gives.
            part: this rank's [sequence / size, ...] of a tensor; only this much is kept.
            region: the ranks that `part` is gathered from.
            gradient: from the gathered tensor [sequence, ...] to the gradient.
        """
        assert self._open is not None
        if parameter.requires_grad:
            self._open.append(_Work(parameter, part.detach(), region, gradient))

    @torch.no_grad()
    def flush(self, key: Hashable) -> None:
        """Do the work in the order in which it was put aside, and hand each parameter its gradient as backward would:
        added to `grad`, hooks called. What is gathered comes while the gradient before it is computed."""
        work = self._held.pop(key)
        missing = Counter(item.parameter for item in work)
        sums: dict[Tensor, Tensor] = {}
        ahead = work[0].start() if work else None
        while ahead is not None:
            item, whole = work.popleft(), ahead
            ahead = work[0].start() if work else None
            gradient = item.gradient(whole.wait())
            parameter = item.parameter
            sums[parameter] = sums[parameter] + gradient if parameter in sums else gradient
            missing[parameter] -= 1
            if not missing[parameter]:
                parameter.backward(sums.pop(parameter))
