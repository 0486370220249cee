"""Steps under torch's profiler: a trace for ui.perfetto.dev, the kernels that take longest, and the longest gaps in
which the device has nothing to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_suite import forecast
from benchmarks.gpu_suite.setting import Setting, looped, make_trainer, quick_weights

STEPS = 2
MOST = 20
"""Kernels and gaps that are told of."""
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::item")
"""Calls in which the host waits."""


class Interval(NamedTuple):
    start: float
    stop: float
    """Microseconds."""
    name: str


def gaps(intervals: Iterable[Interval]) -> list[dict[str, Any]]:
    """The times between intervals in which there is none, the longest first, with the last one before and the first
    one after."""
    found, busy = [], None
    for one in sorted(intervals):
        if busy is not None and one.start > busy.stop:
            found.append({"microseconds": one.start - busy.stop, "after": busy.name, "before": one.name})
        if busy is None or one.stop > busy.stop:
            busy = one
    return sorted(found, key=lambda gap: -gap["microseconds"])


def busiest(intervals: Iterable[Interval]) -> list[dict[str, Any]]:
    """Kernels by all the time that they take."""
    taken, calls = Counter[str](), Counter[str]()
    for one in intervals:
        taken[one.name] += one.stop - one.start
        calls[one.name] += 1
    return [{"name": name, "microseconds": time, "calls": calls[name]} for name, time in taken.most_common(MOST)]


def measure(setting: Setting) -> None:
    """A row for each of two presets."""
    for name in ("pangu_350m", "gpt3_1_3b"):
        with setting.row(name) as figures:
            with quick_weights(setting.device):
                trainer = make_trainer(setting.values(name), setting.device)
            step = looped(trainer)
            for _ in range(3):
                step()
            setting.synchronize()
            activities = [ProfilerActivity.CPU] + ([] if setting.on_host else [ProfilerActivity.CUDA])
            with profile(activities=activities) as profiler:
                for _ in range(STEPS):
                    step()
                setting.synchronize()
            path = setting.output / f"trace-{name}.json.gz"
            profiler.export_chrome_trace(str(path))
            figures |= {"trace": path.name, **summary(profiler, setting.on_host)}
            figures["dry_run_launches"] = forecast.forecasts(setting).get(name, {}).get("launches")
            del trainer, step, profiler
        setting.release()


def summary(profiler: profile, on_host: bool) -> dict[str, Any]:
    """Figures of a step. On a CPU its operators are what keeps the device busy."""
    events = profiler.events() or []
    of_device = [
        event
        for event in events
        if (event.cpu_parent is None if on_host else event.device_type == DeviceType.CUDA)
        # names of stretches of a program lie on the device as well, and over its gaps
        and not getattr(event, "is_user_annotation", False)
    ]
    intervals = [Interval(event.time_range.start, event.time_range.end, event.name) for event in of_device]
    idle, first = gaps(intervals), min(one.start for one in intervals)
    whole = max(one.stop for one in intervals) - first
    waits = Counter(event.name for event in events if event.name in WAITS)
    return {
        "step_microseconds": whole / STEPS,
        "idle_share": sum(gap["microseconds"] for gap in idle) / whole,
        "kernels_of_a_step": len(intervals) / STEPS,
        "waits_of_a_step": {name: count / STEPS for name, count in waits.items()},
        "longest_gaps": idle[:MOST],
        "busiest": busiest(intervals),
    }
