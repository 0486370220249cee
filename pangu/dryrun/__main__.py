"""Dry-run process for `roles.Worker`: reads jobs as JSON lines and writes one JSON line per job."""

from __future__ import annotations

import os
import sys
from queue import SimpleQueue
from threading import Thread

from pangu.dryrun.device import load_device, pretend_devices


def read_jobs(jobs: SimpleQueue[str]) -> None:
    """Read lines into the queue, and end this process as soon as the writing end closes."""
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


def main() -> None:
    """Load the fake device, then answer jobs."""
    jobs: SimpleQueue[str] = SimpleQueue()
    Thread(target=read_jobs, args=(jobs,), daemon=True).start()
    fake = load_device()
    if isinstance(fake, str):
        pretend_devices(0)
    # imports torch, which looks for devices during its import: the fake one must exist by then
    from pangu.dryrun.server import serve  # noqa: PLC0415

    serve(jobs, fake)


if __name__ == "__main__":
    main()
