"""Tables for the documentation and a file for configs/cluster/, from the files of a suite."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.gpu_suite.forecast import cluster_for
from pangu.config.cluster import ClusterConfig
from pangu.report.clusters import load_cluster

Row = Mapping[str, Any]
FILE = "calibrated.yaml"
TABLES: dict[str, dict[str, str]] = {
    "forecast": {"expected_seconds": "expected, s", "peak_bytes": "peak, GiB", "launches": "launches"},
    "speed": {
        **{"step_seconds": "step, ms", "expected_seconds": "expected, ms", "mfu": "MFU", "tokens_per_s": "tokens/s"},
        **{"peak_bytes": "peak, GiB", "dry_run_peak_bytes": "dry run, GiB"},
    },
    "sweep": {"step_seconds": "step, ms", "against preset": "against preset", "peak_bytes": "peak, GiB"},
    "compiled": {"step_seconds": "step, ms", "mfu": "MFU", "first_two_steps_seconds": "first two steps, s"},
    "host": {
        **{"milliseconds": "step, ms", "against plain": "against plain"},
        **{"operators": "operators", "python_calls": "Python calls"},
    },
    "trace": {"step_microseconds": "step, us", "idle_share": "idle", "kernels_of_a_step": "kernels"},
    "axes": {"losses": "losses"},
    "ranks": {"losses": "losses"},
    "numerics": {"loss": "loss", "gradient is off by": "gradient is off by"},
    "resume": {"seconds": "s"},
    "matmuls": {"microseconds": "us", "tflops": "TFLOP/s", "of_bf16_peak": "of the peak"},
    "memory": {"microseconds": "us", "gb_s": "GB/s"},
    "attention": {"microseconds": "us", "tflops": "TFLOP/s"},
    "graph": {
        **{"eager_us": "eager, us", "captured_us": "captured, us", "compiled_us": "compiled, us"},
        "cannot capture": "why not",
    },
    "symmetric": {"ranks": "GPUs", "microseconds": "us", "off by": "off by"},
    "warm": {"process_start_to_end": "process, s", "two_steps_seconds": "two steps, s"},
    "tests": {"outcome": "outcome"},
}
"""Part -> key of its rows -> title of a column."""
CELLS: dict[str, Callable[[Any], str]] = {
    "step_seconds": lambda value: f"{1e3 * value:.1f}",
    "peak_bytes": lambda value: f"{value / 2**30:.2f}",
    "dry_run_peak_bytes": lambda value: f"{value / 2**30:.2f}",
    "mfu": lambda value: f"{value:.1%}",
    "idle_share": lambda value: f"{value:.0%}",
    "losses": lambda values: ", ".join(f"{value:.5g}" for value in values[:3]),
}


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The file of each part that is there."""
    paths = {name: folder / f"{name}.json" for name in TABLES}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def rows_of(documents: Mapping[str, Any], part: str) -> dict[str, dict[str, Any]]:
    """Rows of a part by their names, with what other parts know of them."""
    rows = {row["row"]: dict(row) for row in documents.get(part, {"rows": []})["rows"]}
    if part == "speed":
        expected = rows_of(documents, "forecast")
        for name, row in rows.items():
            size, _, peer = name.partition(", ")
            told = expected.get(f"step of {size}", {}).get("expected_seconds")
            row["expected_seconds"] = 1e3 * told if told and peer == "pangu" else None
    if part == "host":  # the files of the first suite tell of medians
        for row in rows.values():
            row.setdefault("milliseconds", row.get("median_ms"))
    return rows


def table(documents: Mapping[str, Any], part: str) -> list[str]:
    """Lines of Markdown: a row for each of a part, without the columns that none fills."""
    rows = rows_of(documents, part)
    columns = {
        key: title for key, title in TABLES[part].items() if any(row.get(key) is not None for row in rows.values())
    }
    lines = [f"| {part} | {' | '.join([*columns.values(), 'remark'])} |", f"|---|{'---:|' * len(columns)}---|"]
    for name, row in rows.items():
        cells = [_cell(key, row.get(key)) for key in columns]
        remark = str(row.get("error") or row.get("cannot") or "").partition("\n")[0].replace("|", "/")[:160]
        lines.append(f"| {name} | {' | '.join([*cells, remark])} |")
    return lines


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if key in CELLS:
        return CELLS[key](value)
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def host_rates(rows: Sequence[Row]) -> tuple[float, float] | None:
    """Microseconds of an operator and of a Python call: least squares of the relative errors over steps that wait for
    the host; None if too few rows have their counts."""
    counted = [row for row in rows if row.get("operators")]
    if len(counted) < 3:
        return None
    table = np.array([[row["operators"], row["python_calls"]] for row in counted], dtype=float)
    taken = np.array([1e3 * row.get("milliseconds", row.get("median_ms", 0.0)) for row in counted])
    rates = np.linalg.lstsq(table / taken[:, None], np.ones(len(taken)), rcond=None)[0]
    return (float(rates[0]), float(rates[1])) if min(rates) > 0 else None


def calibrated(documents: Mapping[str, Any], base: ClusterConfig) -> tuple[ClusterConfig, list[str]]:
    """The cluster with what the suite measured, and the keys that it did."""
    changes: dict[str, Any] = {}
    matmul, memory, keys = base.matmul, base.memory, list[str]()
    rows = rows_of(documents, "matmuls")
    shapes = [(*row["shape"], row["of_bf16_peak"]) for name, row in rows.items() if "fp8" not in name]
    timed = tuple(tuple(map(float, shape)) for shape in shapes if shape[-1])
    if timed:
        matmul = replace(matmul, measured=timed)
        keys.append("matmul.measured")
    causal = [
        row["tflops"] for name, row in rows_of(documents, "attention").items() if "causal" in name and "tflops" in row
    ]
    if causal:
        matmul = replace(matmul, attention=min(1.0, max(causal) / matmul.tflops))
        keys.append("matmul.attention")
    of_memory = rows_of(documents, "memory")
    if "addition, no cache" in of_memory:
        reached = of_memory["addition, no cache"]["gb_s"]
        memory = replace(memory, gb_s=max(memory.gb_s, reached), efficiency=min(1.0, reached / memory.gb_s))
        changes["launch_us"] = of_memory["starting a kernel"]["microseconds"]
        copies = [row["gb_s"] for name, row in of_memory.items() if "pinned" in name]
        changes |= {"host_gb_s": max(copies)} if copies else {}
        keys.append("memory.efficiency")
    rates = host_rates(documents["host"]["rows"]) if "host" in documents else None
    if rates is not None:
        changes |= dict(zip(("operator_us", "call_us"), rates, strict=True))
    gib = next(iter(documents.values()))["device"].get("gib")
    if gib:
        memory = replace(memory, gib=gib)
        keys.append("memory.gib")
    return replace(base, matmul=matmul, memory=memory, **changes), [*keys, *changes]


def write(folder: Path) -> None:
    """Print a table of each part, and write the cluster file. Raises SystemExit where no file of a suite is."""
    documents = read(folder)
    if not documents:
        raise SystemExit(f"--report {folder}: no file of a suite is there, such as speed.json")
    for part in documents:
        print("\n".join([*table(documents, part), ""]))
    device = next(iter(documents.values()))["device"]["name"]
    own = folder / "measured.yaml"  # of the part `cluster`
    path = own if own.exists() else cluster_for(device)
    cluster, keys = calibrated(documents, load_cluster(path))
    head = f"# {device}. Measured by the GPU suite: {', '.join(keys)}. All else is of {path.name}.\n"
    text = yaml.safe_dump(json.loads(json.dumps(asdict(cluster))), sort_keys=False)
    (folder / FILE).write_text(head + text, encoding="utf-8")
    load_cluster(folder / FILE)
    print(f"{folder / FILE}: {', '.join(f'{key} {_value(cluster, key)}' for key in keys)}")


def _value(cluster: ClusterConfig, key: str) -> str:
    value: Any = cluster
    for name in key.split("."):
        value = getattr(value, name)
    return f"{len(value)} shapes" if isinstance(value, tuple) else f"{value:.4g}"
