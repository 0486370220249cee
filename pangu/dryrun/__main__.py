"""A process that carries out ranks, for `planning.roles.Worker`: reads a configuration, a rank and options a line, and
writes what the rank does, a line."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any


def serve() -> None:
    """Answer line by line."""
    from pangu.dryrun.device import load_device

    fake = load_device()
    import torch

    from pangu.dryrun.run import dry_run
    from pangu.planning.layouts import choose_layout

    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        values, rank, options = json.loads(line)
        try:
            chosen = choose_layout(values, 1)
            report = asdict(dry_run(chosen, rank, device, None if isinstance(fake, str) else fake, **options))
            answer: dict[str, Any] = {**report, "device": fake if device.type == "cpu" else None}
        except Exception as error:
            answer = {"error": str(error)}
        answers.write(f"{json.dumps(answer)}\n")
        answers.flush()


serve()
