"""Watchdog that ends a process together with its torchrun launcher, and a list of ranks that did not arrive."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from threading import Thread
from threading import enumerate as enumerate_threads
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a single-process run needs none
    from torch.distributed import Store

INTERVAL_SECONDS = 1.0
"""Polling interval of the watchdog, in seconds."""
STATUS = 1


def end_with_launcher(environment: Mapping[str, str] = os.environ) -> None:
    """Exit without saving soon after the torchrun that started this process is gone, even if this process hangs."""
    # A torchrun killed by force cannot end its processes: they would hold devices and write where restarted ones do.
    if "TORCHELASTIC_RUN_ID" not in environment or any(thread.name == "launcher" for thread in enumerate_threads()):
        return
    launcher = os.getppid()

    def watch() -> None:
        # orphans are adopted by another parent process
        while os.getppid() == launcher:
            time.sleep(INTERVAL_SECONDS)
        try:
            name = f"rank {environment.get('RANK')} on {socket.gethostname()}"
            print(f"\n{name}: torchrun is gone (process {launcher}); exiting too", file=sys.stderr, flush=True)
        finally:
            os._exit(STATUS)  # `sys.exit` would wait for the other threads

    Thread(target=watch, name="launcher", daemon=True).start()


def missing_ranks(store: Store | None, world: int, environment: Mapping[str, str] = os.environ) -> str:
    """Return a phrase with the first ranks that have not reached the launcher's store, or ""."""
    if store is None or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    try:
        ranks = [rank for rank in range(world) if not store.check([f"here-{rank}"])]
    except RuntimeError:  # the launcher is gone too
        return ""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f", rank {', '.join(map(str, ranks[:8]))}{more} missing" if ranks else ""
