"""Accelerator support that only accelerator runs import: the Ascend plug-in, and device numbers on a node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pangu.common.errors import UserError

if TYPE_CHECKING:  # importing torch fails when one of its plug-ins fails to load
    import torch


VISIBLE = {
    "cuda": ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
"""Device type -> variables that restrict which devices of the node a process sees."""
PLUG_IN = "torch_npu"
"""Plug-in package that registers Ascend's `npu` device type with torch."""


def load_plug_in(requested: object) -> None:
    """Import the Ascend plug-in of torch; raise `UserError` if it is missing or cannot be loaded."""
    if find_spec(PLUG_IN) is None:
        release = version("torch").partition("+")[0]
        raise UserError(
            f"train.device = {requested}: needs Ascend's plug-in for torch, which is not installed; pip install "
            f"{PLUG_IN}=={release} (the release of torch) and install Huawei's CANN, or set train.device=cpu"
        )
    try:
        import_module(PLUG_IN)
    except (ImportError, OSError, RuntimeError) as error:
        raise not_imported(requested, error) from error


def not_imported(requested: object, error: Exception) -> UserError:
    """Return the `UserError` for a failed import of torch or of the Ascend plug-in."""
    cause = " ".join(f"{error} {'' if error.__cause__ is None else f'({error.__cause__})'}".split())
    return UserError(
        f"train.device = {requested}: torch cannot be imported with its plug-ins ({cause}); for an Ascend "
        f"({PLUG_IN}), run `source set_env.sh` of Huawei's CANN first; for train.device=cpu or cuda, set "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
    )


def number_on_node(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """Return the number of a device among all devices of its node, from the visible-devices variable if it is set."""
    shown = next((environment[name] for name in VISIBLE.get(device.type, ()) if name in environment), "")
    numbers, index = [number.strip() for number in shown.split(",")], device.index or 0
    return numbers[index] if index < len(numbers) and numbers[index] else str(index)
