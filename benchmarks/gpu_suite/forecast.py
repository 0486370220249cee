"""Forecast of each size that `speed` measures: memory by a dry run, how many layers of the largest one fit, and the
step time that the planner expects on such a device."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.setting import ROOT, Setting
from pangu.dryrun.roles import run_jobs
from pangu.pipeline.layouts import choose_layout
from pangu.report.clusters import load_cluster
from pangu.report.forecast import Forecast

SIZES = ("gpt2_124m", "pangu_350m", "gpt3_1_3b", "pangu_2_6b")
SLICE = "pangu_13b"
"""Model of which as many layers are taken as fit."""
FITTING = f"layers of {SLICE} that fit"
ROOM = 0.92
"""Share of a device's memory that tensors may take: the rest is its context, workspaces, and holes between tensors."""
TRIED = (2, 3)
"""Layers of the slice from which those that fit are counted."""


def figures_of(report: dict[str, Any]) -> dict[str, Any]:
    """Peak, launches, host syncs and copies of a step, and why no device stands in, if so."""
    return {
        "peak_bytes": report["peak"],
        "launches": report["launches"],
        "host_syncs": report["host_syncs"],
        "blocking_copies": report["blocking_copies"],
        "memory_bound_bytes": report["memory_bound_bytes"],
        "no device": report["device"],
    }


def cluster_for(name: str) -> Path:
    """The file of configs/cluster/ for a device: the one that its name holds, otherwise the H100's."""
    files = {path.stem: path for path in (ROOT / "configs" / "cluster").glob("*.yaml")}
    known = [stem for stem in files if stem in name.lower()]
    return files[max(known, key=len, default="h100")]


def expected(values: dict[str, Any], device: str) -> dict[str, Any]:
    """The planner's forecast of a step."""
    path = cluster_for(device)
    config, layout, stages = choose_layout({**values, "cluster": asdict(load_cluster(path))}, 1)
    forecast = Forecast.of(config, layout, stages)
    return {"cluster": path.stem, "expected_seconds": forecast.time.total, "terms": vars(forecast.time)}


def measure(setting: Setting) -> None:
    """A row for each size, one for the layers that fit, and one for each size's step."""
    dry_runs(setting)
    for name in SIZES[: 1 if setting.on_host else None]:
        with setting.row(f"step of {name}") as figures:
            figures |= expected(setting.values(name), setting.document["device"]["name"])


def dry_runs(setting: Setting) -> None:
    """Rows of what dry runs count."""
    jobs = {name: setting.values(name) for name in SIZES[: 2 if setting.on_host else None]}
    jobs |= {f"{SLICE}, {layers} layers": setting.values(SLICE, {"model.layers": layers}) for layers in TRIED}
    peaks, reports = [], run_jobs([(values, 0, {"whole": True}) for values in jobs.values()])
    for name in jobs:
        with setting.row(name) as figures:
            figures |= figures_of(next(reports))
            if name.startswith(SLICE):
                peaks.append(figures["peak_bytes"])
    with setting.row(FITTING) as figures:
        layer = peaks[1] - peaks[0]
        if setting.on_host:
            figures |= {"layers": TRIED[-1], "peak_bytes": peaks[-1]}
            return
        room = ROOM * torch.get_device_module(setting.device).get_device_properties(setting.device).total_memory
        more = int((room - peaks[0]) / layer)
        figures |= {"layers": TRIED[0] + more, "bytes of a layer": layer, "peak_bytes": peaks[0] + more * layer}


def forecasts(setting: Setting) -> dict[str, dict[str, Any]]:
    """Rows of this part by the sizes that they are of; none if it was not run."""
    path = setting.output / "forecast.json"
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return {SLICE if row["row"] == FITTING else row["row"]: row for row in rows}
