"""Main loop of a dry-run process: it carries out ranks and answers with their reports."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

import torch

from pangu.config.errors import UserError
from pangu.dryrun.device import FakeDevice
from pangu.dryrun.measure import measure
from pangu.dryrun.run import dry_run
from pangu.pipeline.layouts import choose_layout


def serve(jobs: SimpleQueue[str], fake: FakeDevice | str) -> None:
    """Answer jobs, JSON lines [configuration, rank, options], forever; without a fake device, on the CPU."""
    torch.set_num_threads(1)
    place = (torch.device("cpu"), None) if isinstance(fake, str) else (torch.device("cuda", 0), fake)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep library output out of the answers
    while True:
        values, rank, options = json.loads(jobs.get())
        try:
            chosen = choose_layout(values, 1)
            if "chunks" in options:
                report = {"traces": measure(chosen, *place, **options)}
            else:
                report = asdict(dry_run(chosen, rank, *place, **options))
            answer: dict[str, Any] = {**report, "device": fake if isinstance(fake, str) else None}
        except UserError as error:
            answer = {"error": str(error)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)
