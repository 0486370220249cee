"""Adam and LAMB state of a tensor, and device support for fused updates."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
"""First and second moment, by their names in the state of torch's optimizers and in checkpoints."""
_FUSED = ("cpu", "cuda")


def updates_at_once(device: torch.device) -> bool:
    """Return whether torch's fused AdamW honors `found_inf` and `grad_scale` on a device."""
    # torch_npu's `_fused_adamw_` (up to 2.14) accepts both and ignores them.
    return device.type in _FUSED


def start_moments(
    optimizer: torch.optim.Optimizer,
    tensors: Iterable[Tensor],
    moments: torch.dtype | None,
    names: Collection[str] = MOMENTS,
    share_steps: bool = False,
) -> None:
    """Give tensors a step count and zero moments of dtype `moments` (None: the tensor's)."""
    # With `share_steps` all tensors of a device share one step count.
    steps: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        step = steps.get(tensor.device) if share_steps else None
        step = steps[tensor.device] = torch.zeros((), device=tensor.device) if step is None else step
        zeros = {name: torch.zeros_like(tensor, dtype=moments, requires_grad=False) for name in names}
        optimizer.state[tensor] = {"step": step, **zeros}


def load_moments(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], moments: torch.dtype | None) -> None:
    """Copy the moments of a saved state in dtype `moments` (None: the tensor's)."""
    # torch's own loading has rounded them to the dtype of the tensors, which may be narrower.
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    for number, tensor in zip(numbers, tensors, strict=True):
        for name in set(MOMENTS) & set(saved["state"].get(number, ())):
            kept = saved["state"][number][name]
            optimizer.state[tensor][name] = kept.to(tensor.device, moments or tensor.dtype)


def add_to_moments(
    betas: tuple[float, float],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
    found_inf: Tensor | None,
    scale: Tensor | None,
) -> None:
    """Update gradients and moments like the fused AdamW."""
    skipped = torch.zeros((), dtype=torch.bool, device=first[0].device) if found_inf is None else found_inf > 0
    if scale is not None:
        torch._foreach_div_(gradients, scale)
    for gradient in gradients:
        gradient.masked_fill_(skipped, 0.0)  # not `* 0`, which keeps non-finite values
    for beta, moments in zip(betas, (first, second), strict=True):
        decay = torch.full_like(skipped, beta, dtype=moments[0].dtype)
        torch._foreach_mul_(moments, decay.masked_fill_(skipped, 1.0))
    torch._foreach_add_(first, gradients, alpha=1 - betas[0])
    torch._foreach_addcmul_(second, gradients, gradients, value=1 - betas[1])


def corrections(group: dict[str, Any], step: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the bias-corrected factor of the root and the bias-corrected ε; finite even before the first step."""
    # m/c₁ / (√(v/c₂) + ε) = m / (√v · c₁/√c₂ + c₁ε), and with ε inside the root m / (√(v + c₂ε) · c₁/√c₂)
    exponent = step.double().clamp(min=1)
    c1, c2 = (1 - beta**exponent for beta in group["betas"])
    eps = (c2 if group["eps_inside_root"] else c1) * group["eps"]
    return (c1 / c2.sqrt()).to(dtype), eps.to(dtype)


def write_direction(
    eps_inside_root: bool,
    corrections: tuple[Tensor, Tensor],
    gradients: list[Tensor],
    first: list[Tensor],
    second: list[Tensor],
) -> None:
    """Overwrite the gradients with the direction d."""
    scale, eps = corrections
    if eps_inside_root:
        root = torch._foreach_add(second, eps, alpha=1)
        torch._foreach_sqrt_(root)
        torch._foreach_mul_(root, scale)
    else:
        root = torch._foreach_sqrt(second)
        torch._foreach_mul_(root, scale)
        torch._foreach_add_(root, eps, alpha=1)  # without alpha this is a host sync
    torch._foreach_copy_(gradients, first)
    torch._foreach_div_(gradients, root)
