"""The state that Adam and LAMB keep of each tensor, and what updates it at once."""

from __future__ import annotations

import torch

_FUSED = ("cpu", "cuda")


def updates_at_once(device: torch.device) -> bool:
    """Whether torch's fused AdamW does on a device all that a step needs: nothing at `found_inf`, otherwise divide by
    `grad_scale`. torch_npu's (`_fused_adamw_`, up to 2.14) takes both, and looks at neither."""
    return device.type in _FUSED


def start_moments(optimizer: torch.optim.Optimizer, moments: torch.dtype | None) -> None:
    """Give every tensor of an optimizer a step count and two moments of 0 in format `moments` (None: the tensor's)."""
    for tensor in (tensor for group in optimizer.param_groups for tensor in group["params"]):
        optimizer.state[tensor] = {
            "step": torch.zeros((), device=tensor.device),
            "exp_avg": torch.zeros_like(tensor, dtype=moments),
            "exp_avg_sq": torch.zeros_like(tensor, dtype=moments),
        }
