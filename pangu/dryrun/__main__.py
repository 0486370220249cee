"""A process that carries out ranks, for `roles.Worker`: reads a configuration, a rank and options a line, and
writes what the rank does, a line."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from queue import SimpleQueue
from threading import Thread
from typing import Any

from pangu.config.errors import UserError


def read_jobs(jobs: SimpleQueue[str]) -> None:
    """Read lines, and end this process once nobody is there who could ask for more, whatever it is doing."""
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


def serve() -> None:
    """Answer line by line."""
    jobs: SimpleQueue[str] = SimpleQueue()
    Thread(target=read_jobs, args=(jobs,), daemon=True).start()
    from pangu.dryrun.device import load_device, pretend_devices

    fake = load_device()
    if isinstance(fake, str):
        pretend_devices(0)
    import torch

    from pangu.dryrun.measure import measure
    from pangu.dryrun.run import dry_run
    from pangu.pipeline.layouts import choose_layout

    torch.set_num_threads(1)
    device = torch.device("cpu") if isinstance(fake, str) else torch.device("cuda", 0)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    while True:
        values, rank, options = json.loads(jobs.get())
        try:
            chosen = choose_layout(values, 1)
            place = device, None if isinstance(fake, str) else fake
            if "chunks" in options:
                report = {"traces": measure(chosen, *place, **options)}
            else:
                report = asdict(dry_run(chosen, rank, *place, **options))
            answer: dict[str, Any] = {**report, "device": fake if isinstance(fake, str) else None}
        except UserError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


serve()
