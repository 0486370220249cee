"""Runs the parts of the suite, each in a process of its own that is ended at its limit.

    scripts/gpu_suite.sh [--device cpu] [--parts NAME ...] [--output FOLDER]

Parts that measure times run one after another, then the others side by side. Every part writes FOLDER/NAME.json as
it goes, so that one that fails or takes too long leaves what it has measured and does not stop the next. summary.json
says how each ended, and suite.tar.gz holds all of it. The exit status is 1 if any part did not succeed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.setting import ROOT, Setting, to_json, write_presets
from pangu.common.files import write_atomically

LIMIT_S = 530
"""Of the whole suite; what parts leave of their own limits is there for later ones."""
LEAST_S = 10
"""A part is not begun with less."""
CORES = 3
"""Of the host, that a part keeps busy which compiles, or whose ranks wait for one another."""


@dataclass(frozen=True)
class Part:
    name: str
    """Of the module with its `measure(setting)`, and of its file."""
    limit_s: int
    alone: bool = True
    """It measures times, which other parts would disturb."""


PARTS = (
    Part("forecast", 60),
    Part("speed", 140),
    Part("host", 60),
    Part("trace", 40),
    Part("products", 40),
    Part("memory", 25),
    Part("attention", 50),
    Part("cluster", 50),
    Part("tests", 120, alone=False),
    Part("ranks", 75, alone=False),
    Part("resume", 120, alone=False),
    Part("numerics", 100, alone=False),
    Part("axes", 75, alone=False),
)
"""What is wanted most first. Those that time nothing come last: after minutes of compilers, a host may be slower."""


def command_line(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--device", default="auto", help="cpu: everything is small, to see that it works")
    parser.add_argument("--parts", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_suite"), metavar="FOLDER")
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="SECONDS", help="of the whole suite")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--compose", action="store_true", help="write presets/ anew, which needs Hydra")
    return parser.parse_args(arguments)


def device_named(name: str) -> torch.device:
    """The first accelerator, or the CPU where there is none. Raises SystemExit for a device that is not here."""
    found = torch.accelerator.current_accelerator(check_available=True)
    kind = name if name != "auto" else (found.type if found else "cpu")
    if kind == "cpu":
        return torch.device("cpu")
    if found is None or found.type != kind:
        raise SystemExit(f"--device {name}: this machine has no {kind} device; --device cpu works")
    return torch.device(kind, 0)


def measure(options: argparse.Namespace) -> None:
    """One part, in this process."""
    setting = Setting(device_named(options.device), options.output, options.part)
    if setting.on_host:
        torch.set_num_threads(1)
    else:
        torch.accelerator.set_device_index(0)
    setting.begin(f"python -m benchmarks.gpu_suite --part {options.part} --device {options.device}")
    importlib.import_module(f"benchmarks.gpu_suite.{options.part}").measure(setting)


def run_part(
    part: Part, limit_s: float, options: argparse.Namespace, running: set[subprocess.Popen[bytes]]
) -> dict[str, Any]:
    """How a part ended: `status`, `seconds`, and the last of what it said if it did not succeed. Its process is in
    `running` as long as it lives."""
    words = [sys.executable, "-m", "benchmarks.gpu_suite", "--part", part.name, "--device", options.device]
    log, began = options.output / f"{part.name}.log", time.monotonic()
    with log.open("wb") as file:
        # a session of its own: what the part has started ends with it
        process = subprocess.Popen(
            [*words, "--output", str(options.output)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running.add(process)
        try:
            status = process.wait(limit_s)
            ended = "succeeded" if status == 0 else f"failed with status {status}"
        except subprocess.TimeoutExpired:
            ended = f"was ended after its limit of {limit_s:.0f} s"
        finally:
            end(process)
            process.wait()
            running.discard(process)
    result: dict[str, Any] = {"status": ended, "seconds": round(time.monotonic() - began, 1)}
    failed = close_document(options.output / f"{part.name}.json", part.name, result)
    if ended == "succeeded" and failed:
        result["status"] = f"finished, with errors in {', '.join(failed)}"
    if result["status"] != "succeeded":
        result["said"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    return result


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def close_document(path: Path, part: str, result: dict[str, Any]) -> list[str]:
    """Enter in a part's file how it ended; the names of its rows with errors."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # the part did not come as far
        document = {"part": part, "rows": []}
    write_atomically(path, to_json({**document, **result}), sync=False)
    return [row["row"] for row in document["rows"] if "error" in row]


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = command_line(arguments)
    if options.compose:
        write_presets()
        return 0
    options.output = options.output.resolve()
    if options.part:
        measure(options)
        return 0
    device_named(options.device)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the part is ended too
    options.output.mkdir(parents=True, exist_ok=True)
    began, summary = time.monotonic(), {}
    parts = [part for part in PARTS if part.name in options.parts]
    for part in parts:
        (options.output / f"{part.name}.json").unlink(missing_ok=True)

    running: set[subprocess.Popen[bytes]] = set()

    def run(part: Part) -> tuple[str, dict[str, Any]]:
        left = options.limit - (time.monotonic() - began)
        if left < LEAST_S:
            return part.name, {"status": f"was left out: {options.limit:.0f} s are over", "seconds": 0.0}
        return part.name, run_part(part, min(part.limit_s, left), options, running)

    for alone, jobs in ((True, 1), (False, max(1, (os.cpu_count() or 1) // CORES))):
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for ended in as_completed([pool.submit(run, part) for part in parts if part.alone is alone]):
                    name, result = ended.result()
                    summary[name] = result
                    write_atomically(options.output / "summary.json", to_json(summary), sync=False)
                    print(f"{name:<10} {result['seconds']:6.1f} s  {result['status']}", flush=True)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(running):
                    end(process)
                raise
    with tarfile.open(options.output / "suite.tar.gz", "w:gz") as archive:
        for path in sorted(options.output.iterdir()):
            if path.is_file() and path.name.endswith((".json", ".log", ".json.gz", ".yaml")):
                archive.add(path, path.name)
    print(f"{time.monotonic() - began:.0f} s; {options.output}")
    return int(any(one["status"] != "succeeded" for one in summary.values()))


if __name__ == "__main__":
    sys.exit(main())
