"""Makes the optimizer of a configuration over fp32 tensors, one for each logical tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pangu.config.optimizer import AdamConfig, LambConfig
from pangu.optim.lamb import Lamb
from pangu.topology.placement import Placement


def make_optimizer(
    config: AdamConfig | LambConfig,
    tensors: Sequence[tuple[Placement, Tensor]],
    over_ranks: Callable[[Sequence[Placement]], Callable[[Tensor], Tensor]] = lambda _: lambda squares: squares,
) -> torch.optim.Optimizer:
    """AdamW or LAMB over the given tensors; biases and norms get no decay and no layer-wise ratio.

    Args:
        config: which optimizer and its constants.
        tensors: each logical tensor with this rank's slice of its fp32 (or fp64) values; gradients are their `grad`.
        over_ranks: for some placements, the function that adds up LAMB's sums of squares over the ranks that hold the
            other slices.
    """
    exclude = config.exclude_vectors if isinstance(config, LambConfig) else True
    adapting = [placement for placement, _ in tensors if not (exclude and placement.is_vector)]
    full = [tensor for placement, tensor in tensors if not (exclude and placement.is_vector)]
    bare = [tensor for placement, tensor in tensors if exclude and placement.is_vector]
    groups: list[dict[str, Any]] = [
        {"params": full, "weight_decay": config.weight_decay},
        {"params": bare, "weight_decay": 0.0},
    ]
    if isinstance(config, AdamConfig):
        groups = [group for group in groups if group["params"]]
        fused = all(tensor.device.type in ("cpu", "cuda") for tensor in full)
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
    groups[0]["adapt"], groups[1]["adapt"] = True, False
    return Lamb(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        eps_inside_root=config.eps_inside_root,
        max_ratio=config.max_ratio,
        sum_norms=over_ranks(adapting),
    )
