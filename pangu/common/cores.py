"""CPU cores that a process may use."""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path


def available_cores() -> int:
    """Return how many cores this process may use: those it is bound to, and no more than its container's quota."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min(bound, cpu_quota())))


def cpu_quota(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float:
    """Return the CPU quota of this process's control groups, in cores; infinite without a limit.

    A container sees its own group as the root, though `membership` may name a path of the host.
    """
    quotas = [math.inf]
    with suppress(OSError, ValueError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                base = cgroups / "cpu" if controllers else cgroups  # version 1, version 2
                folder = base / path.lstrip("/")
                quotas += [_quota(one) for one in (folder, *folder.parents) if one.is_relative_to(base)]
    return min(quotas)


def _quota(group: Path) -> float:
    """Return the quota of one control group (cgroup version 2 or 1) in cores; infinite without a limit."""
    with suppress(OSError, ValueError, ZeroDivisionError):  # `max`: no limit
        quota, period = map(float, (group / "cpu.max").read_text().split())
        return quota / period
    with suppress(OSError, ValueError, ZeroDivisionError):  # -1: no limit
        quota, period = (float((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
        return quota / period if quota > 0 else math.inf
    return math.inf
