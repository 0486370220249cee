"""LAMB and AdamW written down one tensor at a time in float64, to compare the real optimizers with.

LAMB: You et al. 2020 (arXiv 1904.00962), Algorithm 2. AdamW: Loshchilov & Hutter 2019 (arXiv 1711.05101), Algorithm 2.
Plain and slow; shares no code with the package under test.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


class _Moments:
    """Weights, both moments and the number of updates, all in float64."""

    def __init__(self, weights: Tensors, betas: tuple[float, float]) -> None:
        self.weights = {name: value.detach().to(torch.float64).clone() for name, value in weights.items()}
        self.m = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.v = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        self.t = 0
        self.beta1, self.beta2 = betas

    def corrected(self, name: str, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Update the moments of one tensor and return them without their bias towards 0."""
        g = grad.to(torch.float64)
        self.m[name] = self.beta1 * self.m[name] + (1 - self.beta1) * g
        self.v[name] = self.beta2 * self.v[name] + (1 - self.beta2) * g * g
        m_hat = self.m[name] / (1 - self.beta1**self.t)
        v_hat = self.v[name] / (1 - self.beta2**self.t)
        return m_hat, v_hat


class LambReference(_Moments):
    """LAMB over named tensors; read the result from `weights`. `ratios` holds the last step's layer-wise ratios."""

    def __init__(
        self,
        weights: Tensors,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        eps_inside_root: bool = True,
        weight_decay: float = 0.01,
        max_ratio: float | None = None,
        excluded: Collection[str] = (),
    ) -> None:
        """Tensors named in `excluded` get neither decay nor a ratio. `max_ratio` None: no upper limit."""
        super().__init__(weights, betas)
        self.lr = lr
        self.eps = eps
        self.eps_inside_root = eps_inside_root
        self.weight_decay = weight_decay
        self.max_ratio = max_ratio
        self.excluded = excluded
        self.ratios: dict[str, float] = {}

    def step(self, grads: Tensors, lr: float | None = None) -> None:
        """One update of every tensor, with another rate than the constructor's if `lr` is given."""
        rate = self.lr if lr is None else lr
        self.t += 1
        for name, w in self.weights.items():
            m_hat, v_hat = self.corrected(name, grads[name])
            root = torch.sqrt(v_hat + self.eps) if self.eps_inside_root else torch.sqrt(v_hat) + self.eps
            update = m_hat / root
            if name in self.excluded:
                ratio = 1.0
            else:
                update = update + self.weight_decay * w
                ratio = self._ratio(_norm(w), _norm(update))
            self.ratios[name] = ratio
            self.weights[name] = w - rate * ratio * update

    def _ratio(self, weight_norm: float, update_norm: float) -> float:
        ratio = 1.0 if weight_norm == 0 or update_norm == 0 else weight_norm / update_norm
        return ratio if self.max_ratio is None else min(ratio, self.max_ratio)


class AdamWReference(_Moments):
    """AdamW over named tensors; read the result from `weights`. The decay is multiplied by the rate, as in torch."""

    def __init__(
        self,
        weights: Tensors,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        excluded: Collection[str] = (),
    ) -> None:
        """Tensors named in `excluded` get no decay."""
        super().__init__(weights, betas)
        self.lr = lr
        self.eps = eps
        self.weight_decay = weight_decay
        self.excluded = excluded

    def step(self, grads: Tensors, lr: float | None = None) -> None:
        """One update of every tensor, with another rate than the constructor's if `lr` is given."""
        rate = self.lr if lr is None else lr
        self.t += 1
        for name, w in self.weights.items():
            m_hat, v_hat = self.corrected(name, grads[name])
            decay = 0.0 if name in self.excluded else self.weight_decay
            self.weights[name] = w - rate * (m_hat / (torch.sqrt(v_hat) + self.eps) + decay * w)


def _norm(x: Tensor) -> float:
    """Euclidean norm over all elements."""
    return math.sqrt(sum(float(element) ** 2 for element in x.flatten()))
