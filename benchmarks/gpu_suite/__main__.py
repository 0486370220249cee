"""Runs the parts of the suite, each in a process of its own that is ended at its limit.

    scripts/gpu_suite.sh [--round 1|2|3] [--device cpu] [--parts NAME ...] [--output FOLDER]
    python -m benchmarks.gpu_suite --report FOLDER

Three rounds fit three calls of 9 minutes; the first one decides most. Parts that measure times run one after another,
neighbours that measure none side by side. Every part writes FOLDER/NAME.json as it goes, so that one that fails or
takes too long leaves what it has measured and does not stop the next. summary.json says how each ended, and
suite.tar.gz, written again after each part and below 5 MB, holds all of it. The exit status is 1 if any part did not
succeed. SIGTERM ends the parts that run and leaves out the others; the results are complete all the same. `--report`
makes tables of the files of a folder, and a file for configs/cluster/.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite import report
from benchmarks.gpu_suite.setting import ROOT, Setting, to_json, write_presets
from pangu.common.files import write_atomically

LIMIT_S = 530
"""Seconds of a round; parts that end early leave their time to later ones."""
LEAST_S = 10
"""A part is not begun with less."""
PAUSE_S = 0.05
"""Between two looks at the parts that run."""
ARCHIVE = "suite.tar.gz"
CORES = 3
"""Cores of the host that a part keeps busy which compiles, or whose ranks wait for one another."""


@dataclass(frozen=True)
class Part:
    name: str
    """Name of the module with its `measure(setting)`, and of its file."""
    limit_s: int
    alone: bool = True
    """It measures times, which other parts would disturb."""


ROUNDS = (
    (
        Part("forecast", 75),
        Part("axes", 60, alone=False),
        Part("ranks", 75, alone=False),
        Part("speed", 200),
        Part("host", 60),
        Part("trace", 40),
    ),
    (
        Part("matmuls", 40),
        Part("memory", 25),
        Part("attention", 60),
        Part("sweep", 150),
        Part("cluster", 50),
        Part("tests", 150, alone=False),
        Part("resume", 120, alone=False),
        Part("numerics", 100, alone=False),
    ),
    (
        Part("graph", 90),
        Part("symmetric", 60),
        Part("compiled", 240),
        Part("warm", 150),
    ),
)
"""Parts in order: those that decide most first, and compilers last, as a host may be slower after minutes of them."""
PARTS = tuple(part for parts in ROUNDS for part in parts)
ARCHIVE_BYTES = 4_800_000
"""Most bytes of the archive; traces come last, and those that do not fit are left out."""
LOG_BYTES = 100_000
"""Last bytes of a log that the archive holds."""


def command_line(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the suite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [part.name for part in PARTS]
    parser.add_argument("--device", default="auto", help="cpu: everything is small, to see that it works")
    rounds = range(1, len(ROUNDS) + 1)
    parser.add_argument("--round", type=int, choices=rounds, help="parts of one call; without it all, one by one")
    parser.add_argument("--parts", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_suite"), metavar="FOLDER")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help=f"of all parts ({LIMIT_S} for each round)")
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="tables and a cluster file of a suite's results")
    parser.add_argument("--part", choices=names, help=argparse.SUPPRESS)
    parser.add_argument("--compose", action="store_true", help="write presets/ again, which needs Hydra")
    options = parser.parse_args(arguments)
    if options.round and options.parts:
        parser.error("--round names parts, too: leave out --parts")
    chosen = ROUNDS[options.round - 1] if options.round else PARTS
    options.parts = options.parts or [part.name for part in chosen]
    options.limit = options.limit or LIMIT_S * (1 if options.round else len(ROUNDS))
    return options


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


@dataclass
class Running:
    """A part whose process runs."""

    part: Part
    process: subprocess.Popen[bytes]
    began: float
    limit_s: float

    @classmethod
    def start(cls, part: Part, limit_s: float, options: argparse.Namespace) -> Running:
        """Start a part in a session of its own: what it starts ends with it."""
        words = [sys.executable, "-m", "benchmarks.gpu_suite", "--part", part.name, "--device", options.device]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with (options.output / f"{part.name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*words, "--output", str(options.output)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(part, process, time.monotonic(), limit_s)

    def status(self) -> str | None:
        """Return how the part ended; None while it may still run."""
        if (status := self.process.poll()) is not None:
            return "succeeded" if status == 0 else f"failed with status {status}"
        if time.monotonic() - self.began < self.limit_s:
            return None
        return f"was ended after its limit of {self.limit_s:.0f} s"

    def end(self) -> None:
        """Kill the part and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def result(self, status: str, output: Path) -> dict[str, Any]:
        """Return `status`, `seconds`, and the end of the log of a part that did not succeed; add them to its file."""
        path = output / f"{self.part.name}.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # the part ended before it wrote one
            document = {"part": self.part.name, "rows": []}
        failed = [row["row"] for row in document["rows"] if "error" in row]
        if status == "succeeded" and failed:
            status = f"finished, with errors in {', '.join(failed)}"
        result: dict[str, Any] = {"status": status, "seconds": round(time.monotonic() - self.began, 1)}
        if status != "succeeded":
            log = output / f"{self.part.name}.log"
            result["log_tail"] = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        write_atomically(path, to_json({**document, **result}), sync=False)
        return result


def run_parts(
    parts: Sequence[Part], jobs: int, ends: float, options: argparse.Namespace, stopped: threading.Event
) -> Generator[tuple[str, dict[str, Any]]]:
    """Yield the name and result of each part as soon as it has ended; `jobs` run at a time, none after `ends`."""
    waiting, running = list(parts), list[Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                part, left = waiting.pop(0), ends - time.monotonic()
                if stopped.is_set():
                    yield part.name, {"status": "was left out: the suite was stopped", "seconds": 0.0}
                elif left < LEAST_S:
                    yield part.name, {"status": f"was left out: {options.limit:.0f} s are over", "seconds": 0.0}
                else:
                    running.append(Running.start(part, min(part.limit_s, left), options))
            for one in list(running):
                status = one.status() or ("was ended with the suite" if stopped.is_set() else None)
                if status is not None:
                    one.end()
                    running.remove(one)
                    yield one.part.name, one.result(status, options.output)
            time.sleep(PAUSE_S)
    finally:
        for one in running:
            one.end()


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = command_line(arguments)
    if options.compose:
        write_presets()
        return 0
    if options.report:
        report.write(options.report)
        return 0
    options.output = options.output.resolve()
    if options.part:
        measure(options)
        return 0
    device_named(options.device)
    stopped = threading.Event()  # an exception could interrupt the writing of the archive
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    options.output.mkdir(parents=True, exist_ok=True)
    began, summary = time.monotonic(), dict[str, Any]()
    parts = [part for part in PARTS if part.name in options.parts]
    for name in ("summary.json", ARCHIVE, *(f"{part.name}.{kind}" for part in parts for kind in ("json", "log"))):
        (options.output / name).unlink(missing_ok=True)
    ends, jobs = began + options.limit, max(1, (os.cpu_count() or 1) // CORES)
    for alone, group in groupby(parts, key=lambda part: part.alone):
        with closing(run_parts(list(group), 1 if alone else jobs, ends, options, stopped)) as results:
            for name, result in results:
                summary[name] = result
                write_atomically(options.output / "summary.json", to_json(summary), sync=False)
                pack(options.output)
                print(f"{name:<10} {result['seconds']:6.1f} s  {result['status']}", flush=True)
    print(f"{time.monotonic() - began:.0f} s; {options.output}")
    if stopped.is_set():
        sys.exit(128 + signal.SIGTERM)
    return int(any(one["status"] != "succeeded" for one in summary.values()))


def pack(folder: Path) -> None:
    """Put the results so far into the archive: figures, logs, then as many traces as have room, the smallest first."""
    kinds = (".json", ".yaml", ".log", ".json.gz")
    found = {path: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name.endswith(kinds)}
    content, left = io.BytesIO(), ARCHIVE_BYTES
    with tarfile.open(fileobj=content, mode="w:gz") as archive:
        for path in sorted(found, key=lambda path: (len(found[path]) * (path.suffix == ".gz"), path.name)):
            data = found[path][-LOG_BYTES:] if path.suffix == ".log" else found[path]
            left -= len(gzip.compress(data)) + tarfile.BLOCKSIZE
            if left < 0:
                print(f"{path.name} has no room in {ARCHIVE}", flush=True)
                break
            info = tarfile.TarInfo(path.name)
            info.size, info.mtime = len(data), time.time()
            archive.addfile(info, io.BytesIO(data))
    write_atomically(folder / ARCHIVE, content.getvalue(), sync=False)


if __name__ == "__main__":
    sys.exit(main())
