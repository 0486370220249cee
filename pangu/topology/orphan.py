"""A process that torchrun has started does not outlive it, and learns from its store who did not come."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a run of one process needs none
    from torch.distributed import Store

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


def missing_ranks(store: Store | None, world: int, environment: Mapping[str, str] = os.environ) -> str:
    """In words, the first processes that have not come to the launcher's store, which answers whoever is gone."""
    if store is None or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return ""
    try:
        ranks = [rank for rank in range(world) if not store.check([f"here-{rank}"])]
    except RuntimeError:  # the launcher is gone too
        return ""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f", rank {', '.join(map(str, ranks[:8]))}{more} did not" if ranks else ""
