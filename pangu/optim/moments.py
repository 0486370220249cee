"""Adam and LAMB state of a tensor, and device support for fused updates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

_FUSED = ("cpu", "cuda")


def updates_at_once(device: torch.device) -> bool:
    """Return whether torch's fused AdamW honors `found_inf` and `grad_scale` on a device."""
    # torch_npu's `_fused_adamw_` (up to 2.14) accepts both and ignores them.
    return device.type in _FUSED


def start_moments(
    optimizer: torch.optim.Optimizer, tensors: Iterable[Tensor], moments: torch.dtype | None, share_steps: bool = False
) -> None:
    """Give tensors a step count and two zero moments of dtype `moments` (None: the tensor's)."""
    # With `share_steps` all tensors of a device share one step count.
    steps: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        step = steps.get(tensor.device) if share_steps else None
        step = steps[tensor.device] = torch.zeros((), device=tensor.device) if step is None else step
        optimizer.state[tensor] = {
            "step": step,
            "exp_avg": torch.zeros_like(tensor, dtype=moments, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(tensor, dtype=moments, requires_grad=False),
        }


def load_moments(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], moments: torch.dtype | None) -> None:
    """Copy the moments of a saved state in dtype `moments` (None: the tensor's)."""
    # torch's own loading has rounded them to the dtype of the tensors, which may be narrower.
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for number, tensor in zip(numbers, tensors, strict=True):
        for name in {"exp_avg", "exp_avg_sq"} & set(saved["state"].get(number, ())):
            kept = saved["state"][number][name]
            optimizer.state[tensor][name] = kept.to(tensor.device, moments or tensor.dtype)
