"""Weight gradients added to their buffer by the matmul itself, without a hook: 12 bytes less traffic per weight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pangu.layers.apex import add_weight_gradient
from pangu.models.language_model import LanguageModel
from pangu.zero.gradients import GradientSum

if TYPE_CHECKING:
    from pangu.layers.fp8 import Fp8Matmuls


def add_matmul(total: Tensor, left: Tensor, right: Tensor, begins: bool, with_apex: bool = False) -> None:
    """Add the matmul [m, k] x [k, n] to a gradient sum, or overwrite the sum if this `begins` it.

    Only cuBLAS adds to a sum in a wider format. apex's kernel cannot begin a sum, which would have to be zeroed first.
    """
    if with_apex and not begins and add_weight_gradient(total, left, right):
        return
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=0 if begins else 1, out=total)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=0 if begins else 1, out=total)
    else:
        (total.copy_ if begins else total.add_)(left @ right)


class GradientAccumulator:
    """Accumulator that adds gradients of weights, biases and lookups to the gradient sums of a rank."""

    def __init__(self, gradients: GradientSum, model: LanguageModel, with_apex: bool = False) -> None:
        """Add to `gradients` of the parameters of `model`, optionally with apex's kernel."""
        self._gradients, self._with_apex = gradients, with_apex
        # with a tied head, the gradient of the lookup comes last
        tables = [model.input_matrix] if model.embedding is None else model.embedding.parameters()
        self._looked_up = {id(one) for one in tables}
        self._twice = {id(one) for one in model.layers.parameters()} if model.turns else set[int]()
        """Weights to which both halves of a micro-batch add a gradient."""
        self._of_one_half = set[int]()
        """Weights to which one half has added, and the other half not yet."""

    def clear(self) -> None:
        """Forget what a failed step has added."""
        self._of_one_half.clear()

    def add(
        self, weight: Tensor, left: Tensor, right: Tensor, fp8: Fp8Matmuls | None = None, completes: bool = True
    ) -> None:
        """Add left x right, multiplied by `fp8` if given, to the gradient of a weight."""
        # Unless this `completes` the gradient of a micro-batch, the caller calls `complete` later.
        total, begins = self._gradients.sum_of(weight)
        if fp8 is None:
            add_matmul(total, left, right, begins, self._with_apex)
        else:
            fp8.add_weight_gradient(total, left, right, begins)
        del total  # reductions that this completes free the sum
        if completes and id(weight) not in self._looked_up and not (self._twice and self._awaits_other_half(weight)):
            self._gradients.complete(weight)

    def complete(self, weight: Tensor) -> None:
        """Count the gradient of a weight as added, unless a lookup still follows."""
        if id(weight) not in self._looked_up:
            self._gradients.complete(weight)

    def _awaits_other_half(self, parameter: Tensor) -> bool:
        """Record that one half of a micro-batch has added its gradient; return whether that of the other is missing."""
        self._of_one_half ^= {id(parameter)} & self._twice
        return id(parameter) in self._of_one_half

    def add_rows(self, bias: Tensor, grad: Tensor) -> None:
        """Add the sum over the rows of `grad` [rows, width] to the gradient of a bias."""
        total, begins = self._gradients.sum_of(bias)
        if begins:
            torch.sum(grad, 0, dtype=total.dtype, out=total)
        else:
            total.add_(grad.sum(0, dtype=total.dtype))
        del total
        if not (self._twice and self._awaits_other_half(bias)):
            self._gradients.complete(bias)

    def add_lookup(self, table: Tensor, rows: Tensor, grad: Tensor, completes: bool = True) -> None:
        """Add gradients [..., width] to looked-up rows [...] of a table; `completes`: the last of a backward pass."""
        # A dense gradient would be written, read and added for the whole vocabulary.
        total, _ = self._gradients.sum_of(table, cleared=True)
        grad = grad.to(total.dtype)
        if total.device.type == "cpu":  # this adds in a fixed order on a CPU, index_put_ on a GPU
            total.index_add_(0, rows.flatten(), grad.flatten(0, -2))
        else:
            total.index_put_((rows,), grad, accumulate=True)
        del total
        if completes:
            self._gradients.complete(table)
