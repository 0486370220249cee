"""Host time of a step: as many layers as `pangu_350m` has, so small that a device waits for the host, beside peers."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_suite.setting import Setting, seconds_of
from benchmarks.gpu_suite.speed import make

TINY: dict[str, Any] = {
    **{"model.layers": 24, "model.hidden": 64, "model.heads": 1, "model.sequence": 64, "model.vocab": 512},
    **{"batch.micro_size": 1, "batch.global_size": 2},
}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "pangu": ("pangu", {}),
    "pangu, recompute": ("pangu", {"memory.recompute": "full"}),
    "transformers": ("transformers", {}),
    "fsdp2": ("fsdp2", {}),
    "pangu compiled": ("pangu compiled", {"compile": True}),
    "plain compiled": ("plain compiled", {}),
}
"""Row -> peer of `speed`, and changes."""
BUDGET_S = 1.5


def measure(setting: Setting) -> None:
    """A row for each peer: milliseconds of a step, and against those of the plain loop."""
    kernel = {"model.attention": "sdpa" if setting.on_host else "cudnn"}  # a trial of all takes longer than the rest
    sizes = {**TINY, **({"model.layers": 2} if setting.on_host else {}), **kernel}
    dist.init_process_group(
        dist.get_default_backend_for_device(setting.device), store=dist.HashStore(), rank=0, world_size=1
    )
    plain = None
    try:
        for name, (peer, changes) in PEERS.items():
            with setting.row(name) as figures:
                step = make(peer, setting.values("pangu_350m", {**sizes, **changes}), setting.device)
                for _ in range(4):
                    step()
                taken = seconds_of(setting, step, BUDGET_S)
                plain = plain or median(taken)
                figures |= {"milliseconds": 1e3 * median(taken), "all": taken, "against plain": median(taken) / plain}
                del step
            torch.compiler.reset()
    finally:
        dist.destroy_process_group()
