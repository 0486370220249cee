"""Which formats an accelerator computes in."""

from __future__ import annotations

from typing import Any

import torch

from pangu.config.errors import UserError
from pangu.metrics.devices import device_name


def require_format(compute: str, device: torch.device) -> None:
    """Raise UserError if a device has no products in a compute format."""
    module: Any = torch.get_device_module(device)
    has_bf16 = getattr(module, "is_bf16_supported", lambda: True)()
    lacks = device.type == "npu" if compute == "fp64" else compute == "bf16" and not has_bf16
    if lacks:
        works = "fp32 and fp16 work" if not has_bf16 else "fp32, bf16 and fp16 work"
        raise UserError(f"precision = {compute}: {device_name(device)} has no products in {compute}; {works}")
