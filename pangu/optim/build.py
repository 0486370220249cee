"""Makes the optimizer of a configuration over fp32 tensors, one for each logical tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pangu.config.optimizer import AdamConfig, LambConfig
from pangu.optim.moments import start_moments, updates_at_once
from pangu.optim.uncompiled import AdamW
from pangu.topology.placement import Placement


def make_optimizer(
    config: AdamConfig | LambConfig,
    tensors: Sequence[tuple[Placement, Tensor]],
    over_ranks: Callable[[Sequence[Placement]], Callable[[Tensor], Tensor]] = lambda _: lambda squares: squares,
) -> torch.optim.Optimizer:
    """AdamW or LAMB over logical tensors, each with this rank's slice of its fp32 (or fp64) values; biases and norms
    get no weight decay and no layer-wise ratio. `over_ranks`: for some placements, the function that adds up LAMB's
    sums of squares over the ranks that hold the other slices.

    AdamW is torch's fused kernel. That needs moments in the format of the weights, and a device whose kernel skips a
    step; otherwise AdamW is our LAMB without its ratios. apex is no choice: its FusedAdam does the same work as
    torch's, and its FusedLAMB knows neither sharded tensors nor several logical tensors stored as one.
    """
    moments = torch.bfloat16 if config.moments == "bf16" else None
    exclude = config.exclude_vectors if isinstance(config, LambConfig) else True
    adapting = [placement for placement, _ in tensors if not (exclude and placement.is_vector)]
    full = [tensor for placement, tensor in tensors if not (exclude and placement.is_vector)]
    bare = [tensor for placement, tensor in tensors if exclude and placement.is_vector]
    groups: list[dict[str, Any]] = [
        {"params": full, "weight_decay": config.weight_decay},
        {"params": bare, "weight_decay": 0.0},
    ]
    at_once = all(updates_at_once(tensor.device) for _, tensor in tensors)
    if isinstance(config, AdamConfig) and moments is None and at_once:
        adam = AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        start_moments(adam, (tensor for _, tensor in tensors), None)
        return adam
    from pangu.optim.lamb import Lamb

    shards: dict[str, Any] = {"moments": moments, "exclude_vectors": False, "reuse_gradients": True}  # shards are flat
    if isinstance(config, AdamConfig):
        groups = [{**group, "adapt": False} for group in groups]
        return Lamb(groups, lr=config.lr, betas=config.betas, eps=config.eps, **shards)
    groups[0]["adapt"], groups[1]["adapt"] = True, False
    return Lamb(
        groups,
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        eps_inside_root=config.eps_inside_root,
        max_ratio=config.max_ratio,
        sum_norms=over_ranks(adapting),
        **shards,
    )


def implementation(optimizer: torch.optim.Optimizer) -> str:
    return "torch's fused AdamW" if isinstance(optimizer, AdamW) else "multi-tensor operations"
