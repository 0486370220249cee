"""Kernels of apex beside torch's at a preset's sizes; a row says why where apex cannot run. `tests/gpu/test_apex.py`
compares their results."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu_suite.setting import Setting
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.layers.apex import USES, missing
from pangu.metrics.timing import Trial, time_candidates
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.autotune import time_uses


def measure_apex(setting: Setting) -> None:
    """A row for each key of `kernels`."""
    config = build(RunConfig, setting.values("pangu_2_6b"))
    mesh = Mesh(Layout(), 0, setting.device)

    def timer(trials: dict[Any, Trial], device: torch.device, budget_s: float) -> dict[Any, float]:
        return time_candidates(trials, device, 2.0)

    for use in USES:
        with setting.row(f"kernels.{use}, torch and apex") as figures:
            reasons = [str(problem) for problem in missing(use, config, setting.device)]
            names = ["torch"] if reasons else ["torch", "apex"]
            if reasons:
                figures["apex cannot run"] = reasons
            else:
                times = time_uses(use, names, config, mesh, timer)
                figures |= {name: f"{1000 * seconds:.4g} ms" for name, seconds in times.items()}
