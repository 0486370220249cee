"""Dry-run process for `roles.Worker`: reads jobs as JSON lines and writes one JSON line per job."""

from __future__ import annotations

import json
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
    """Load the fake device, then answer jobs [configuration, rank, options]; without the device, on the CPU."""
    jobs: SimpleQueue[str] = SimpleQueue()
    Thread(target=read_jobs, args=(jobs,), daemon=True).start()
    fake = load_device()
    if isinstance(fake, str):
        pretend_devices(0)
    # imports torch, which looks for devices during its import: the fake one must exist by then
    from pangu.dryrun.measure import answer  # noqa: PLC0415

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep library output out of the answers
    while True:
        print(json.dumps(answer(fake, *json.loads(jobs.get())), default=vars), file=answers, flush=True)


if __name__ == "__main__":
    main()
