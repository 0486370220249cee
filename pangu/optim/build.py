"""Construction of the configured optimizer over fp32 tensors, one per logical tensor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pangu.config.optimizer import AdamConfig, LambConfig, MuonConfig, OptimizerConfig
from pangu.layers.apex import UPDATES
from pangu.optim.lamb import Lamb
from pangu.optim.moments import start_moments, updates_at_once
from pangu.optim.muon import Muon
from pangu.optim.uncompiled import AdamW
from pangu.topology.placement import Placement

Orthogonalizer = Callable[[Sequence[Placement]], Callable[[list[Tensor]], Iterable[Sequence[int]]]]
"""Function that returns, for the placements of some matrices, the `orthogonalize` of `Muon`."""


def make_optimizer(
    config: OptimizerConfig,
    tensors: Sequence[tuple[Placement, Tensor]],
    over_ranks: Callable[[Sequence[Placement]], Callable[[Tensor], Tensor]] = lambda _: lambda squares: squares,
    options: Sequence[tuple[Mapping[str, Any], Collection[str]]] = (),
    kernels: str = "torch",
    orthogonalizer: Orthogonalizer | None = None,
) -> torch.optim.Optimizer:
    """Return AdamW, LAMB or Muon over logical tensors; biases and norms get no weight decay and no trust ratio.

    Args:
        config: Configuration of the optimizer.
        tensors: Slices of logical tensors that this rank holds, fp32 (or fp64).
        over_ranks: Function that returns, for some placements, how to sum LAMB's squared norms over their other slices.
        options: Overrides of `config` for tensors by name; empty: none. A weight decay given here also holds for
            biases and norms. `lr_multiplier` and `decay_multiplier` (0 for biases and norms) are kept in the groups
            for whoever sets their rates.
        kernels: Key of `UPDATES`.
        orthogonalizer: How Muon orthogonalizes matrices that are cut over ranks; None: no tensor is cut.

    AdamW is torch's fused kernel. That needs moments in the format of the weights, and a device whose kernel can skip a
    step; otherwise AdamW is LAMB without trust ratios, also with apex's kernels.
    """
    moments = torch.bfloat16 if config.moments == "bf16" else None
    exclude = config.exclude_vectors if isinstance(config, LambConfig) else True  # only LAMB has the choice
    adapting: list[Placement] = []
    groups: list[dict[str, Any]] = []
    for own, names in options or [({}, [placement.name for placement, _ in tensors])]:
        own, chosen_names = {"lr_multiplier": 1.0, "decay_multiplier": 1.0, **own}, set(names)
        members = [(placement, tensor) for placement, tensor in tensors if placement.name in chosen_names]
        for bare in (False, True):
            chosen = [(p, tensor) for p, tensor in members if (exclude and p.is_vector) == bare]
            decay = 0.0 if bare else config.weight_decay
            groups.append({"weight_decay": decay, **own, "params": [tensor for _, tensor in chosen]})
            groups[-1]["decay_multiplier"] *= not bare  # schedules of the weight decay respect it
            if isinstance(config, LambConfig):
                groups[-1]["adapt"] = not bare
            adapting += [] if bare else [placement for placement, _ in chosen]
    at_once = all(updates_at_once(tensor.device) for _, tensor in tensors)
    if isinstance(config, AdamConfig) and moments is None and at_once and kernels == "torch":
        adam = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        start_moments(adam, (tensor for _, tensor in tensors), None)
        return adam
    shards: dict[str, Any] = {"moments": moments, "exclude_vectors": False, "reuse_gradients": True}  # shards are flat
    if isinstance(config, MuonConfig):
        muon = _muon(config, tensors, groups, moments, orthogonalizer)
        muon.kernels = UPDATES[kernels]
        return muon
    if isinstance(config, AdamConfig):
        groups = [{**group, "adapt": False} for group in groups]  # LAMB without trust ratios is AdamW
    else:
        shards |= {"eps_inside_root": config.eps_inside_root, "max_ratio": config.max_ratio}
        shards["sum_norms"] = over_ranks(adapting)
    lamb = Lamb(groups, lr=config.lr, betas=config.betas, eps=config.eps, **shards)
    lamb.kernels = UPDATES[kernels]
    return lamb


def _muon(
    config: MuonConfig,
    tensors: Sequence[tuple[Placement, Tensor]],
    groups: Sequence[Mapping[str, Any]],
    moments: torch.dtype | None,
    orthogonalizer: Orthogonalizer | None,
) -> Muon:
    of = {tensor: placement for placement, tensor in tensors}
    split = [
        {**group, "matrices": matrices, "params": [one for one in group["params"] if of[one].is_matrix == matrices]}
        for group in groups
        for matrices in (True, False)
    ]
    placements = [of[one] for group in split if group["matrices"] for one in group["params"]]
    shapes = {one: of[one].matrix_shape(config.split_heads) for one in of if of[one].is_matrix}
    options: dict[str, Any] = {"moments": moments, "shapes": shapes, "reuse_gradients": True}
    options |= {"momentum": config.momentum, "nesterov": config.nesterov, "adjust_lr": config.adjust_lr}
    options |= {"ns_steps": config.ns_steps, "orthogonalize": orthogonalizer and orthogonalizer(placements)}
    return Muon(split, config.lr, config.betas, config.eps, config.weight_decay, **options)


def implementation(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's implementation, for messages."""
    if getattr(optimizer, "kernels", None) is UPDATES["apex"]:
        return "apex's multi-tensor kernels"
    return "torch's fused AdamW" if isinstance(optimizer, AdamW) else "multi-tensor operations"
