"""Host time of a step: as many layers as `pangu_350m` has, so small that a device waits for the host, beside peers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_suite.setting import Setting, seconds_of
from benchmarks.gpu_suite.speed import make, one_rank
from pangu.dryrun.audit import is_in_runs

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


class HostCounts(TorchDispatchMode):
    """Operators that are dispatched, and Python functions that are called around them, on any thread."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.calls = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: True would make torch notify its compiler at every operation."""
        return False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sys.setprofile(None)
        self.operators += 1
        try:
            return function(*args, **(kwargs or {}))
        finally:
            sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        self.calls += event == "call" and file != __file__ and is_in_runs(file)


def host_counts(step: Callable[[], object]) -> dict[str, int]:
    """Return counts of what the host does in a step. Not for compiled code, in which a profiler hangs."""
    with HostCounts() as counts:
        step()  # torch imports what a mode needs
        counts.operators = counts.calls = 0
        sys.setprofile(counts._called)
        try:
            step()
        finally:
            sys.setprofile(None)
    return {"operators": counts.operators, "python_calls": counts.calls}


def measure(setting: Setting) -> None:
    """A row for each peer: milliseconds of a step, against those of the plain loop, and what the host did."""
    kernel = {"model.attention": "sdpa" if setting.on_host else "cudnn"}  # a trial of all takes longer than the rest
    sizes = {**TINY, **({"model.layers": 2} if setting.on_host else {}), **kernel}
    plain = None
    with one_rank(setting.device):
        for name, (peer, changes) in PEERS.items():
            with setting.row(name) as figures:
                values = setting.values("pangu_350m", {**sizes, **changes})
                try:
                    step = make(peer, values, setting.device)
                except ImportError as error:
                    figures["cannot"] = str(error)
                    continue
                for _ in range(4):
                    step()
                taken = seconds_of(setting, step, BUDGET_S)
                plain = plain or median(taken)
                figures |= {"milliseconds": 1e3 * median(taken), "all": taken, "against plain": median(taken) / plain}
                if "compiled" not in name:
                    figures |= host_counts(step)
                del step
            torch.compiler.reset()
