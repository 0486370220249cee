"""The state that Adam and LAMB keep of each tensor."""

from __future__ import annotations

import torch


def start_moments(optimizer: torch.optim.Optimizer, moments: torch.dtype | None) -> None:
    """Give every tensor of an optimizer a step count and two moments of 0 in format `moments` (None: the tensor's)."""
    for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        optimizer.state[tensor] = {
            "step": torch.zeros((), device=tensor.device),
            "exp_avg": torch.zeros_like(tensor, dtype=moments),
            "exp_avg_sq": torch.zeros_like(tensor, dtype=moments),
        }
