"""Gradients of matrices that the product itself adds to the buffer of gradients: 12 bytes less to read and write for
each weight and micro-batch, and no hook. Those of tables are added to the rows that were looked up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pangu.models.language_model import LanguageModel
from pangu.zero.gradients import GradientSum

if TYPE_CHECKING:
    from pangu.layers.fp8 import Fp8Products


def add_product(total: Tensor, left: Tensor, right: Tensor, begins: bool) -> None:
    """Add [m, k] x [k, n] to a sum, or begin the sum, whatever it holds.

    To a sum in a wider format only cuBLAS adds; `tests/gpu` has what a device must show, none has run it. apex's
    `wgrad_gemm_accum_fp32` is the same product, which cannot begin a sum: it would have to be filled with zeros first.
    """
    if left.dtype == total.dtype:
        torch.addmm(total, left, right, beta=0 if begins else 1, out=total)
    elif total.device.type == "cuda":
        torch.addmm(total, left, right, out_dtype=total.dtype, beta=0 if begins else 1, out=total)
    else:
        # what is added is converted to the sum's format first: some rows at a time, which stay in a cache
        for rows, factors in zip(total.split(1024), left.split(1024), strict=True):
            (rows.copy_ if begins else rows.add_)(factors @ right)


class WeightProducts:
    """Adds products to the sums of a rank's gradients."""

    def __init__(self, gradients: GradientSum, model: LanguageModel) -> None:
        self._gradients = gradients
        # the gradient of their lookup is the last one where the head is tied
        self._looked_up = set() if model.embedding is None else set(model.embedding.parameters())

    def add(
        self, weight: Tensor, left: Tensor, right: Tensor, fp8: Fp8Products | None = None, completes: bool = True
    ) -> None:
        """Add left x right, multiplied by `fp8` if given, to the gradient of a matrix. `completes`: that is all of it
        for a micro-batch; otherwise `complete` says when it is."""
        total, begins = self._gradients.sum_of(weight)
        (add_product if fp8 is None else fp8.add_product)(total, left, right, begins)
        if completes:
            self.complete(weight)

    def complete(self, weight: Tensor) -> None:
        if weight not in self._looked_up:
            self._gradients.complete(weight)

    def add_rows(self, table: Tensor, rows: Tensor, grad: Tensor) -> None:
        """Add gradients [..., width] of rows [...] that were looked up, the last ones of a table in each backward: the
        dense gradient would be written, read and added for all words."""
        total, _ = self._gradients.sum_of(table, cleared=True)
        grad = grad.to(total.dtype)
        if total.device.type == "cpu":  # a CPU adds in one order by this one, a GPU by the other
            total.index_add_(0, rows.flatten(), grad.flatten(0, -2))
        else:
            total.index_put_((rows,), grad, accumulate=True)
        self._gradients.complete(table)
