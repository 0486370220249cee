"""LAMB: layer-wise adaptive moments (You et al. 2020).

Algorithm 2 of the published version; Algorithm 1 of the first version, which has epsilon inside the root. Each tensor
is one logical tensor or this rank's shard of one, and `sum_norms` adds the sums of squares over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from pangu.config.optimizer import UPDATED_AT_ONCE
from pangu.optim.moments import start_moments, updates_at_once
from pangu.optim.uncompiled import Uncompiled

_IN_CACHE = 2**18
"""Elements that are updated at a time on a CPU."""


class Lamb(Uncompiled):
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
        device = next((tensor.device for group in self.param_groups for tensor in group["params"]), None)
        self.found_inf = torch.zeros((), device=device)
        self.grad_scale = torch.ones((), device=device)
        """As in torch's fused optimizers: 1 if a step is to do nothing, otherwise 0; the gradients are divided by it.
        fp32, where the tensors are."""
        start_moments(self, moments)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The update takes the place of the gradients."""
        loss = None if closure is None else closure()
        groups = [(group, [p for p in group["params"] if p.grad is not None]) for group in self.param_groups]
        groups = [(group, tensors) for group, tensors in groups if tensors]
        applied = 1 - self.found_inf
        for group, tensors in groups:
            self._update_moments(group, tensors, applied)
        adapting = [tensor for group, tensors in groups if group["adapt"] for tensor in tensors]
        # a rank without a part of any tensor still meets the others
        if any(group["adapt"] for group in self.param_groups):
            self._find_ratios(adapting, applied)
        for group, tensors in groups:
            if not self._is_adam(group):
                update = [tensor.grad for tensor in tensors if tensor.grad is not None]
                ratios = [self.ratios.get(tensor, applied) for tensor in tensors]
                torch._foreach_addcmul_(tensors, update, ratios, value=-group["lr"])
        return loss

    def _is_adam(self, group: dict[str, Any]) -> bool:
        """Whether torch's fused AdamW does all of a group."""
        return not group["adapt"] and not self.eps_inside_root and updates_at_once(self.found_inf.device)

    def _update_moments(self, group: dict[str, Any], tensors: list[Tensor], applied: Tensor) -> None:
        """Update the moments, and write u in the place of the gradients; where that is AdamW's, update the weights."""
        # torch's fused AdamW divides the gradient by `grad_scale`, leaves all as it is at `found_inf`, and updates the
        # moments in one pass; with a rate of 0 it does not change the weights (1: an epsilon that divides by no 0)
        is_adam = self._is_adam(group)
        rate, eps = (group["lr"], group["eps"]) if is_adam else (0.0, 1.0)
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        values: dict[str, Any] = {"lr": rate, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": decay}
        values |= {"grad_scale": self.grad_scale, "found_inf": self.found_inf, "amsgrad": False, "maximize": False}
        steps = [self.state[tensor]["step"] for tensor in tensors]
        corrections = None if is_adam else self._corrections(group, steps[0] + applied, tensors[0].dtype)
        for weights, gradients, *moments in self._pieces(tensors):
            first, second = ([moment.to(weights[0].dtype) for moment in those] for those in moments)
            if updates_at_once(weights[0].device):
                made = list(steps[0].repeat(len(weights)).unbind())  # all tensors made as many; it adds one to each
                adamw(weights, gradients, first, second, [], made, fused=True, **values)
            else:
                self._add_to_moments(group["betas"], gradients, first, second)
            if first[0] is not moments[0][0]:
                torch._foreach_copy_(moments[0] + moments[1], first + second)
            if corrections is not None:
                self._write_update(group["weight_decay"], corrections, weights, gradients, first, second)
        torch._foreach_add_(steps, [applied] * len(steps))

    def _add_to_moments(
        self, betas: tuple[float, float], gradients: list[Tensor], first: list[Tensor], second: list[Tensor]
    ) -> None:
        """What the fused AdamW does to gradients and moments."""
        skipped = self.found_inf > 0
        torch._foreach_div_(gradients, self.grad_scale)
        for gradient in gradients:
            gradient.masked_fill_(skipped, 0.0)  # what is not finite stays so when it is multiplied by 0
        for beta, moments in zip(betas, (first, second), strict=True):
            decay = torch.full_like(skipped, beta, dtype=moments[0].dtype)
            torch._foreach_mul_(moments, decay.masked_fill_(skipped, 1.0))
        torch._foreach_add_(first, gradients, alpha=1 - betas[0])
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - betas[1])

    def _pieces(self, tensors: list[Tensor]) -> Iterator[list[list[Tensor]]]:
        """Weights, gradients and both moments, so many elements at a time that what is made of them stays small."""
        most = _IN_CACHE if tensors[0].device.type == "cpu" else UPDATED_AT_ONCE
        taken: list[tuple[Tensor, ...]] = []
        for tensor in tensors:
            state = self.state[tensor]
            together = (tensor, tensor.grad, state["exp_avg"], state["exp_avg_sq"])
            for piece in zip(*(each.view(-1).split(most) for each in together if each is not None), strict=True):
                if taken and sum(each[0].numel() for each in taken) + piece[0].numel() > most:
                    yield list(map(list, zip(*taken, strict=True)))
                    taken = []
                taken.append(piece)
        yield list(map(list, zip(*taken, strict=True)))

    def _corrections(self, group: dict[str, Any], step: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What bias correction makes of the root's factor and of ε; finite before the first step too."""
        # m/c₁ / (√(v/c₂) + ε) = m / (√v · c₁/√c₂ + c₁ε), and with ε inside the root m / (√(v + c₂ε) · c₁/√c₂)
        exponent = step.double().clamp(min=1)
        c1, c2 = (1 - beta**exponent for beta in group["betas"])
        eps = (c2 if self.eps_inside_root else c1) * group["eps"]
        return (c1 / c2.sqrt()).to(dtype), eps.to(dtype)

    def _write_update(
        self,
        decay: float,
        corrections: tuple[Tensor, Tensor],
        weights: list[Tensor],
        gradients: list[Tensor],
        first: list[Tensor],
        second: list[Tensor],
    ) -> None:
        """Write u in the place of the gradients."""
        scale, eps = corrections
        if self.eps_inside_root:
            root = torch._foreach_add(second, eps, alpha=1)
            torch._foreach_sqrt_(root)
            torch._foreach_mul_(root, scale)
        else:
            root = torch._foreach_sqrt(second)
            torch._foreach_mul_(root, scale)
            torch._foreach_add_(root, eps, alpha=1)  # without alpha the host waits for the value
        torch._foreach_copy_(gradients, first)
        torch._foreach_div_(gradients, root)
        if decay != 0:
            torch._foreach_add_(gradients, weights, alpha=decay)

    def _find_ratios(self, weights: list[Tensor], applied: Tensor) -> None:
        """Compute r of the tensors that adapt, as scalars on the device; times `applied`, which is 0 or 1."""
        norms = torch.zeros(2, 0, device=applied.device)
        updates = [tensor.grad for tensor in weights if tensor.grad is not None]
        if weights:
            norms = torch.stack([torch.stack(torch._foreach_norm(each)) for each in (weights, updates)])
        weight_norm, update_norm = self.sum_norms(norms.square()).sqrt()
        defined = (weight_norm > 0) & (update_norm > 0)
        ratios = (weight_norm / update_norm.where(defined, 1.0)).where(defined, 1.0)
        if self.max_ratio is not None:
            ratios = ratios.clamp(max=self.max_ratio)
        self.ratios = dict(zip(weights, (ratios * applied).unbind(), strict=True))
