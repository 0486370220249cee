"""A process that torchrun has started does not outlive it."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from threading import Thread

INTERVAL_SECONDS = 1.0
STATUS = 1


def end_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """End this process soon after the torchrun that started it, even if it hangs, and save nothing. A torchrun that is
    killed by force cannot end its processes: they would keep their devices and write where their successors do."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return
    launcher = os.getppid()

    def watch() -> None:
        # its children are given to another parent
        while os.getppid() == launcher:
            time.sleep(INTERVAL_SECONDS)
        try:
            name = f"rank {environment.get('RANK')} on {socket.gethostname()}"
            print(f"\n{name}: torchrun is gone (process {launcher}), so this ends too", file=sys.stderr, flush=True)
        finally:
            os._exit(STATUS)  # no other thread is asked

    Thread(target=watch, name="launcher", daemon=True).start()
