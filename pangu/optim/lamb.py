"""LAMB: layer-wise adaptive moments (You et al. 2020).

Algorithm 2 of the published version; Algorithm 1 of the first version, which has epsilon inside the root. Each tensor
is one logical tensor or this rank's shard of one, and `sum_norms` adds the sums of squares over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pangu.optim.moments import start_moments


class Lamb(torch.optim.Optimizer):
    """w ← w − lr · r · u with u = m̂ / (√v̂ + ε) + λw and the trust ratio r = ‖w‖ / ‖u‖ of each tensor.

    r is 1 where either norm is 0, and `max_ratio` at most. A parameter group may set `weight_decay` and `adapt` (false:
    r = 1 throughout, which is AdamW).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        eps_inside_root: bool = False,
        max_ratio: float | None = None,
        moments: torch.dtype | None = None,
        sum_norms: Callable[[Tensor], Tensor] = lambda squares: squares,
    ) -> None:
        """`lr`, `betas`, `eps`, `weight_decay`: η, β, ε, λ. `eps_inside_root`: √(v̂ + ε) instead of √v̂ + ε.
        `max_ratio`: largest trust ratio. `moments`: storage format of the moments between steps; None: that of the
        tensors, in which they are always computed. `sum_norms`: sums of squares [2, tensors] of this rank's shards ->
        those of the whole tensors."""
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True}
        super().__init__(params, defaults)
        self.eps_inside_root = eps_inside_root
        self.max_ratio = max_ratio
        self.sum_norms = sum_norms
        self.ratios: dict[Tensor, Tensor] = {}
        """r of the last step of every tensor that adapts; 0 if it was skipped."""
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        """As in torch's fused optimizers: 1 if a step is to do nothing, otherwise 0; the gradients are divided by it.
        fp32, where the tensors are."""
        start_moments(self, moments)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None if closure is None else closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        groups = [(group, tensors) for group, tensors in groups if tensors]
        updates = [self._directions(group, tensors) for group, tensors in groups]
        # a rank without a part of any tensor still meets the others
        if any(group["adapt"] for group in self.param_groups):
            self._find_ratios(groups, updates)
        for (group, tensors), update in zip(groups, updates, strict=True):
            if not update:
                continue
            if group["adapt"]:
                torch._foreach_mul_(update, [self.ratios[tensor] for tensor in tensors])
            elif self.found_inf is not None:
                torch._foreach_mul_(update, 1 - self.found_inf)
            torch._foreach_add_(tensors, update, alpha=-group["lr"])
        return loss

    def _directions(self, group: dict[str, Any], tensors: list[Tensor]) -> list[Tensor]:
        """Update the moments, and return u of each tensor; none where that is AdamW's, and the weights are updated."""
        # torch's fused AdamW divides the gradient by `grad_scale`, leaves all as it is at `found_inf`, and updates the
        # moments in one pass; with a rate of 0 it does not change the weights (1: an epsilon that divides by no 0)
        is_adam = not group["adapt"] and not self.eps_inside_root
        rate, eps = (group["lr"], group["eps"]) if is_adam else (0.0, 1.0)
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        moments = [self.state[tensor][moment] for moment in ("exp_avg", "exp_avg_sq") for tensor in tensors]
        wide = [moment.to(tensor.dtype) for moment, tensor in zip(moments, tensors * 2, strict=True)]
        first, second = wide[: len(tensors)], wide[len(tensors) :]
        steps = [self.state[tensor]["step"] for tensor in tensors]
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        values: dict[str, Any] = {"lr": rate, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
        values |= {"grad_scale": self.grad_scale, "found_inf": self.found_inf, "amsgrad": False, "maximize": False}
        adamw(tensors, gradients, first, second, [], steps, fused=True, **values)
        if wide[0] is not moments[0]:
            torch._foreach_copy_(moments, wide)
        return [] if is_adam else self._update_of(group, tensors, first, second)

    def _update_of(
        self, group: dict[str, Any], tensors: list[Tensor], first: list[Tensor], second: list[Tensor]
    ) -> list[Tensor]:
        """u of each tensor, from its moments; finite before the first step too."""
        step = self.state[tensors[0]]["step"].double().clamp(min=1)
        corrections = [(1 - beta**step).to(tensors[0].dtype) for beta in group["betas"]]
        root = torch._foreach_div(second, corrections[1])
        if self.eps_inside_root:
            torch._foreach_add_(root, group["eps"])
            torch._foreach_sqrt_(root)
        else:
            torch._foreach_sqrt_(root)
            torch._foreach_add_(root, group["eps"])
        update = torch._foreach_div(first, corrections[0])
        torch._foreach_div_(update, root)
        if group["weight_decay"] != 0:
            torch._foreach_add_(update, tensors, alpha=group["weight_decay"])
        return list(update)

    def _find_ratios(self, groups: list[tuple[dict[str, Any], list[Tensor]]], updates: list[list[Tensor]]) -> None:
        """Compute r of the adapting groups, as scalars on the device."""
        adapting = [
            (tensors, update) for (group, tensors), update in zip(groups, updates, strict=True) if group["adapt"]
        ]
        weights = [tensor for tensors, _ in adapting for tensor in tensors]
        directions = [tensor for _, update in adapting for tensor in update]
        norms = torch.zeros(2, 0, device=None if self.found_inf is None else self.found_inf.device)
        if weights:
            norms = torch.stack([torch.stack(torch._foreach_norm(each)) for each in (weights, directions)])
        weight_norm, update_norm = self.sum_norms(norms.square()).sqrt()
        defined = (weight_norm > 0) & (update_norm > 0)
        ratios = (weight_norm / update_norm.where(defined, 1.0)).where(defined, 1.0)
        if self.max_ratio is not None:
            ratios = ratios.clamp(max=self.max_ratio)
        if self.found_inf is not None:
            ratios = ratios * (1 - self.found_inf)
        self.ratios = dict(zip(weights, ratios.unbind(), strict=True))
