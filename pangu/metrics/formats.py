"""Compute formats that an accelerator supports."""

from __future__ import annotations

from typing import Any

import torch

from pangu.common.errors import UserError
from pangu.metrics.devices import device_name


def require_format(compute: str, device: torch.device) -> None:
    """Raise `UserError` if a device has no matmul in a compute format."""
    module: Any = torch.get_device_module(device)
    has_bf16 = getattr(module, "is_bf16_supported", lambda: True)()
    formats = ["fp32", *(["bf16"] if has_bf16 else []), *([] if device.type == "npu" else ["fp64"])]
    if compute not in (*formats, "fp16"):
        fix = f"use {', '.join(formats)} or fp16"
        raise UserError(f"precision = {compute}: {device_name(device)} does not support matmuls in {compute}; {fix}")
