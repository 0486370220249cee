"""Every gradient of a step at real size: each format, micro-batches of other sizes, recompute and other attention,
against fp64 on the same device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.setting import Setting, batches_of, make_trainer, quick_weights

SIZE = {"batch.micro_size": 2, "batch.global_size": 4, "optimizer.clip": None, "model.attention": "sdpa"}
EXACT = "fp64"
CASES: dict[str, tuple[dict[str, Any], float]] = {
    EXACT: ({"precision.compute": "fp64"}, 0.0),
    "fp32": ({"precision.compute": "fp32"}, 1e-4),
    "fp32, micro-batches of 1": ({"precision.compute": "fp32", "batch.micro_size": 1}, 1e-4),
    "fp32, recompute": ({"precision.compute": "fp32", "memory.recompute": "full"}, 1e-4),
    "bf16": ({"precision.compute": "bf16"}, 0.1),
    "bf16, reference attention": ({"precision.compute": "bf16", "model.attention": "reference"}, 0.1),
}
"""Changes -> how far the whole gradient may be from fp64's, relative to its norm: sums of some 1e4 terms are off by a
hundred roundings of 6e-8 in fp32; a bf16 rounding is 4e-3, and the layers' add up like the root of their number."""


def gradients(setting: Setting, values: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Loss and every gradient of the first step, in fp64 on the host."""
    with quick_weights(setting.device):
        trainer = make_trainer(values, setting.device)
    loss = trainer.train_step(batches_of(trainer.config)).loss
    found = {
        shard.placement.name: shard.grad.detach().double().cpu()
        for shard in trainer.parameters.shards
        if shard.grad is not None
    }
    del trainer
    setting.release()
    return loss, found


def error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> tuple[float, str, float]:
    """Distance of the whole gradient, relative; of the tensor that is furthest off, its name first. Tensors that hardly
    count, such as biases of keys, whose gradient is zero but for rounding, are left out."""
    whole = torch.stack([one.norm() for one in exact.values()]).norm()
    off = {name: (found[name] - one).norm() for name, one in exact.items()}
    counted = {name: float(off[name] / one.norm()) for name, one in exact.items() if one.norm() > 1e-4 * whole}
    worst = max(counted, key=lambda name: counted[name])
    return float(torch.stack(list(off.values())).norm() / whole), worst, counted[worst]


def measure(setting: Setting) -> None:
    """A row for each case."""
    exact: dict[str, Tensor] = {}
    for name, (changes, tolerance) in CASES.items():
        with setting.row(name) as figures:
            loss, found = gradients(setting, setting.values("pangu_350m", {**SIZE, **changes}))
            figures["loss"] = loss
            exact = exact or found
            figures["gradient is off by"], figures["worst tensor"], figures["it is off by"] = error(found, exact)
            if not figures["gradient is off by"] <= tolerance:
                raise ValueError(f"the gradient may be off by {tolerance:g}")
