"""LAMB: layer-wise adaptive moments (You et al. 2020).

Algorithm 2 of the published version, or Algorithm 1 of the first version, which has epsilon inside the root. Each
tensor is a logical tensor or this rank's shard of one, and `sum_norms` adds the squared norms over the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pangu.common.errors import UserError
from pangu.config.optimizer import UPDATED_AT_ONCE
from pangu.layers.apex import UpdateKernels
from pangu.optim.moments import (
    MOMENTS,
    add_to_moments,
    corrections,
    load_moments,
    start_moments,
    updates_at_once,
    write_direction,
)
from pangu.optim.uncompiled import Uncompiled

_IN_CACHE = 2**18
"""Number of elements that are updated at a time on a CPU, so that they stay in its cache."""

LARGEST_RATIO = 1e4
"""Largest trusted ratio of the norms of a tensor and its direction; beyond it the trust ratio is 1.

If a gradient is 0 in exact arithmetic (a router that chooses one expert, a bias before a norm, an unused head), the
direction is 0 or consists of rounding errors, 1e-11 in fp64. A ratio of 1e9 would turn them into steps of lr * |w|,
which differ between layouts, and weight decay alone would shrink the tensor by lr per step. Gradients of 1e-4 of
epsilon or more stay below this ratio.
"""


class _Flat:
    """Flat vectors of a tensor, its gradient and its moments, in the memory order of the tensor.

    They are views if memory allows it; `write_back` copies the others back. Weights and update are at least fp32.
    """

    def __init__(self, tensor: Tensor, state: dict[str, Tensor], reuse_gradient: bool) -> None:
        assert tensor.grad is not None
        self._order = list(range(tensor.dim()))
        if not tensor.is_contiguous():
            self._order.sort(key=tensor.stride, reverse=True)
        wide = torch.promote_types(tensor.dtype, torch.float32)
        self._sources = (tensor, state["exp_avg"], state["exp_avg_sq"])
        weights, self.first, self.second = map(self._flatten, self._sources)
        self.weights = weights.to(wide)
        self.update = self._flatten(tensor.grad).to(wide, copy=not reuse_gradient)

    def _flatten(self, tensor: Tensor) -> Tensor:
        return tensor.permute(self._order).reshape(-1).contiguous()

    def write_back(self) -> None:
        for source, flat in zip(self._sources, (self.weights, self.first, self.second), strict=True):
            if not flat._is_view():
                place = source.permute(self._order)
                place.copy_(flat.view(place.shape))


@dataclass
class _Batch:
    """Tensors of a parameter group with equal step count, format, device and adaptation, which are updated together."""

    group: dict[str, Any]
    step: Tensor
    adapts: bool
    decay: float
    tensors: list[Tensor] = field(default_factory=list)
    flats: list[_Flat] = field(default_factory=list)
    norms: Tensor | None = None
    """Norms of directions, weights and updates, [3, tensors]."""

    @property
    def device(self) -> torch.device:
        return self.tensors[0].device

    @property
    def is_adam(self) -> bool:
        """True if torch's fused AdamW does the whole update."""
        return not self.adapts and not self.group["eps_inside_root"] and updates_at_once(self.device)


class Lamb(Uncompiled):
    """Optimizer with the update w ← w − lr · r · u, where u = d + λw, d = m̂ / (√v̂ + ε) and r = ‖w‖ / ‖u‖ per tensor.

    The trust ratio r is 1 if ‖w‖ or ‖u‖ is 0 or d is only rounding (`LARGEST_RATIO`), and at most `max_ratio`. Bias
    correction counts the steps of each tensor. A parameter group may set every option except `moments`, `sum_norms` and
    `reuse_gradients`, and also `adapt` (False: r = 1, which is AdamW).
    """

    found_inf: Tensor | None = None
    grad_scale: Tensor | None = None
    """Divisor of the gradients; with `found_inf` (1: skip the step, else 0) as in torch's fused kernels, in fp32."""
    sum_norms: Callable[[Tensor], Tensor] = staticmethod(lambda squares: squares)
    reuse_gradients = False
    own_options: Mapping[str, Any] = {}
    """Further options of the parameter groups of a subclass, with their defaults."""
    moments: torch.dtype | None = None
    kernels = UpdateKernels()

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        eps_inside_root: bool = False,
        exclude_vectors: bool = True,
        max_ratio: float | None = None,
        maximize: bool = False,
        moments: torch.dtype | None = None,
        sum_norms: Callable[[Tensor], Tensor] | None = None,
        reuse_gradients: bool = False,
    ) -> None:
        """Start with moments and step counts of 0.

        Args:
            params: Parameters, or groups of them.
            lr: Learning rate η.
            betas: Decay rates β₁ and β₂ of the moments.
            eps: Constant ε in the denominator.
            weight_decay: Decoupled weight decay λ.
            eps_inside_root: True to divide by √(v̂ + ε) instead of √v̂ + ε.
            exclude_vectors: True for neither decay nor trust ratio of tensors with fewer than two dimensions.
            max_ratio: Largest trust ratio; None: unbounded.
            maximize: True for gradient ascent.
            moments: Storage format of the moments between steps; None: that of the tensors. They are computed in at
                least fp32.
            sum_norms: Function that sums squared norms [3, tensors] of this rank's shards over all ranks.
            reuse_gradients: True to overwrite the gradients with the update, which saves memory of their size.
        """
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": True}
        defaults |= {"eps_inside_root": eps_inside_root, "exclude_vectors": exclude_vectors, "max_ratio": max_ratio}
        self.moments = moments
        super().__init__(params, {**defaults, "maximize": maximize, **self.own_options})
        if sum_norms is not None:
            self.sum_norms = sum_norms
        self.reuse_gradients = reuse_gradients
        self.ratios: dict[Tensor, Tensor] = {}
        """Trust ratio of the last step per tensor that adapts; 0 if the step was skipped."""
        self._applied: dict[torch.device, Tensor] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add and check a parameter group; raise `UserError` for an option out of range."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        betas = group["betas"]
        bounds = {"lr": group["lr"] >= 0, "eps": group["eps"] >= 0, "weight_decay": group["weight_decay"] >= 0}
        bounds["betas"] = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        bounds["max_ratio"] = group["max_ratio"] is None or group["max_ratio"] > 0
        rules = {"betas": "both must be at least 0 and below 1", "max_ratio": "must be above 0; None is no bound"}
        for name in (name for name, holds in bounds.items() if not holds):
            raise UserError(f"{name} = {group[name]}: {rules.get(name, 'must be at least 0')}")
        for tensor in group["params"]:
            if not tensor.is_floating_point():
                raise UserError(f"params: a tensor is {tensor.dtype}; LAMB updates floating-point tensors")
        start_moments(self, group["params"], self.moments, self._moments_of(group), share_steps=True)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle."""
        return {**super().__getstate__(), "moments": self.moments}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a loaded or copied state."""
        super().__setstate__(state)
        self.ratios, self._applied = {}, {}
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self.share_steps()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a saved state, with moments in this optimizer's storage format."""
        super().load_state_dict(state_dict)
        load_moments(self, state_dict, self.moments)

    def share_steps(self) -> None:
        """Let equal step counts, which were set one by one, share one tensor again (a host sync)."""
        steps: dict[tuple[torch.device, float], Tensor] = {}
        for tensor, kept in self.state.items():
            if kept:
                step = torch.as_tensor(kept["step"], dtype=torch.float32)
                copied = torch.empty((), device=tensor.device).copy_(step)
                kept["step"] = steps.setdefault((tensor.device, float(step)), copied)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every tensor that has a gradient; return the loss of `closure` if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._applied.clear()
        for batch in (batches := self._batches()):
            self._update_moments(batch)
        # a rank without a slice of any adapting tensor still takes part in `sum_norms`
        if any(group["adapt"] for group in self.param_groups):
            self._find_ratios([batch for batch in batches if batch.adapts])
        for batch in batches:
            if not batch.is_adam:
                self._apply(batch)
            for flat in batch.flats:
                flat.write_back()
        for step in {id(batch.step): batch.step for batch in batches}.values():
            step.add_(self._applied_on(step.device))
        self._update_others()
        return loss

    def _update_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups that the moments and the direction of this class are for."""
        return self.param_groups

    def _update_others(self) -> None:
        """Update the tensors of all other groups; here there are none."""

    def _moments_of(self, group: dict[str, Any]) -> Collection[str]:
        return MOMENTS

    def _applied_on(self, device: torch.device) -> Tensor:
        """Return 0 if the step is to be skipped, otherwise 1, as a device scalar."""
        if device not in self._applied:
            found_inf = self.found_inf
            self._applied[device] = torch.ones((), device=device) if found_inf is None else 1 - found_inf.to(device)
        return self._applied[device]

    def _batches(self) -> list[_Batch]:
        self._split_steps()
        batches: dict[tuple[Any, ...], _Batch] = {}
        for group in self._update_groups():
            for tensor in group["params"]:
                if tensor.grad is None:
                    continue
                require_dense(tensor.grad)
                state = self.state[tensor]
                excluded = group["exclude_vectors"] and tensor.dim() < 2
                key = (id(group), id(state["step"]), tensor.dtype, tensor.device, excluded)
                if key not in batches:
                    adapts, decay = group["adapt"] and not excluded, 0.0 if excluded else group["weight_decay"]
                    batches[key] = _Batch(group, state["step"], adapts, decay)
                batches[key].tensors.append(tensor)
                batches[key].flats.append(_Flat(tensor, state, self.reuse_gradients))
        return list(batches.values())

    def _split_steps(self) -> None:
        """Give the tensors with a gradient their own step count if others that share it have no gradient.

        Tensors with equal history share one step tensor, so that one kernel launch counts and corrects for all of them.
        """
        sharing: defaultdict[int, list[Tensor]] = defaultdict(list)
        for group in self.param_groups:
            if missing := [tensor for tensor in group["params"] if not self.state[tensor]]:
                start_moments(self, missing, self.moments, self._moments_of(group), share_steps=True)
            for tensor in group["params"]:
                sharing[id(self.state[tensor]["step"])].append(tensor)
        for tensors in sharing.values():
            stepping = [tensor for tensor in tensors if tensor.grad is not None]
            if 0 < len(stepping) < len(tensors):
                step = self.state[stepping[0]]["step"].clone()
                for tensor in stepping:
                    self.state[tensor]["step"] = step

    def _update_moments(self, batch: _Batch) -> None:
        """Update the moments and compute u and the norms of w, d and u, or update the weights if that is AdamW."""
        # torch's fused AdamW divides the gradient by `grad_scale`, changes nothing at `found_inf`, and updates the
        # moments in one pass; with a learning rate of 0 it keeps the weights (epsilon 1 avoids a division by 0)
        group, device, is_adam = batch.group, batch.device, batch.is_adam
        found_inf, scale = (None if each is None else each.to(device) for each in (self.found_inf, self.grad_scale))
        rate, eps = (group["lr"], group["eps"]) if is_adam else (0.0, 1.0)
        beta1, beta2 = group["betas"]
        values: dict[str, Any] = {"lr": rate, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": batch.decay}
        values |= {"grad_scale": scale, "found_inf": found_inf, "amsgrad": False, "maximize": False}
        if group["maximize"]:
            torch._foreach_neg_([flat.update for flat in batch.flats])
        dtype = batch.flats[0].weights.dtype
        factors = None if is_adam else corrections(group, batch.step + self._applied_on(device), dtype)
        norms: list[Tensor] = []
        for weights, updates, *moments in _pieces(batch.flats, device):
            first, second = ([moment.to(dtype) for moment in those] for those in moments)
            if updates_at_once(device):
                steps = list(batch.step.repeat(len(weights)).unbind())  # the kernel increments each
                self.kernels.adamw(weights, updates, first, second, [], steps, **values)
            else:
                add_to_moments(group["betas"], updates, first, second, found_inf, scale)
            if first[0] is not moments[0][0]:
                torch._foreach_copy_(moments[0] + moments[1], first + second)
            if factors is None:
                continue
            write_direction(group["eps_inside_root"], factors, updates, first, second)
            if batch.adapts:
                norms.extend(self.kernels.norms(updates))
            if batch.decay != 0:
                torch._foreach_add_(updates, weights, alpha=batch.decay)
        if batch.adapts:
            vectors = [flat.weights for flat in batch.flats] + [flat.update for flat in batch.flats]
            pieces = [max(1, -(-flat.weights.numel() // _most(flat.weights.device))) for flat in batch.flats]
            directions = _joined(norms, pieces)
            batch.norms = torch.stack(directions + list(self.kernels.norms(vectors))).view(3, -1)

    def _find_ratios(self, batches: list[_Batch]) -> None:
        """Compute the trust ratio of each tensor that adapts, as device scalars; 0 if the step is to be skipped."""
        device = next((batch.device for batch in batches), next(iter(self.state), torch.empty(0)).device)
        tensors = [tensor for batch in batches for tensor in batch.tensors]
        parts = [batch.norms.to(device) for batch in batches if batch.norms is not None]
        norms = parts[0] if parts else torch.zeros(3, 0, device=device)
        if len(parts) > 1:  # `sum_norms` expects the order of the groups
            columns = dict(zip(tensors, torch.cat(parts, 1).unbind(1), strict=True))
            tensors = [tensor for group in self.param_groups for tensor in group["params"] if tensor in columns]
            norms = torch.stack([columns[tensor] for tensor in tensors], 1)
        direction, weight, update = self.sum_norms(norms.square()).sqrt()
        defined = (weight > 0) & (update > 0) & (direction * LARGEST_RATIO > weight)
        ratios = (weight / update.where(defined, 1.0)).where(defined, 1.0)
        self.ratios = dict(zip(tensors, (ratios * self._applied_on(device)).unbind(), strict=True))
        for batch in batches:
            if (largest := batch.group["max_ratio"]) is not None:
                bounded = torch._foreach_clamp_max([self.ratios[tensor] for tensor in batch.tensors], largest)
                self.ratios |= zip(batch.tensors, bounded, strict=True)

    def _apply(self, batch: _Batch) -> None:
        lr = batch.group["lr"]
        if batch.adapts:
            factors = [self.ratios[tensor].to(batch.device) for tensor in batch.tensors]
        else:
            factors = [self._applied_on(batch.device)] * len(batch.tensors)
        if isinstance(lr, Tensor):
            factors, lr = list(torch._foreach_mul(factors, lr.reshape(()))), 1.0
        weights, updates = ([getattr(flat, name) for flat in batch.flats] for name in ("weights", "update"))
        torch._foreach_addcmul_(weights, updates, factors, value=-lr)


def require_dense(gradient: Tensor) -> None:
    """Raise `UserError` for a sparse gradient."""
    if gradient.is_sparse:
        raise UserError(
            "a gradient is sparse, but this optimizer needs dense ones; use nn.Embedding(..., sparse=False)"
        )


def _most(device: torch.device) -> int:
    return _IN_CACHE if device.type == "cpu" else UPDATED_AT_ONCE


def _pieces(flats: list[_Flat], device: torch.device) -> Iterator[list[list[Tensor]]]:
    """Yield weights, gradients and both moments in pieces, so that temporaries stay small."""
    most, size = _most(device), 0
    taken: list[tuple[Tensor, ...]] = []
    for flat in flats:
        vectors = (flat.weights, flat.update, flat.first, flat.second)
        for piece in zip(*(vector.split(most) for vector in vectors), strict=True):
            if taken and size + piece[0].numel() > most:
                yield list(map(list, zip(*taken, strict=True)))
                taken, size = [], 0
            taken.append(piece)
            size += piece[0].numel()
    yield list(map(list, zip(*taken, strict=True)))


def _joined(norms: list[Tensor], pieces: list[int]) -> list[Tensor]:
    """Return the norms of tensors from the norms of their pieces; `pieces` counts those of each tensor."""
    return norms if len(norms) == len(pieces) else list(torch._foreach_norm(list(torch.stack(norms).split(pieces))))
