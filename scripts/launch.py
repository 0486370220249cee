"""torchrun, with another answer to SIGTERM: it is passed on, and the launcher ends when its processes have ended, with
their status. torchrun itself kills them after 30 seconds and ends with status 1, whatever theirs was.

Takes torchrun's words:

  python scripts/launch.py --nproc-per-node=8 pretrain.py +config=pangu_2_6b
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

from torch.distributed.run import main as torchrun

INTERVAL_SECONDS = 0.2


def children() -> list[int]:
    """Process numbers of what this process has started."""
    number = str(os.getpid())
    listed = Path("/proc", number, "task", number, "children")  # torchrun starts its processes from its first thread
    if listed.exists():
        return [int(child) for child in listed.read_text().split()]
    listing = subprocess.run(["pgrep", "-P", number], capture_output=True, text=True, check=False)  # not on Linux
    return [int(child) for child in listing.stdout.split()]


def pass_on(terminated: Event) -> None:
    """Once SIGTERM has come, send it to every child and to what a child has started in its process group, also to
    children that are started in place of failed ones."""
    terminated.wait()
    signalled: set[int] = set()
    while True:
        for child in set(children()) - signalled:
            signalled.add(child)
            try:
                group = os.getpgid(child)
                os.kill(child, signal.SIGTERM) if group == os.getpgid(0) else os.killpg(group, signal.SIGTERM)
            except ProcessLookupError:
                pass
        time.sleep(INTERVAL_SECONDS)


def main(arguments: Sequence[str]) -> None:
    """Run torchrun, which raises or exits with a status if its processes fail."""
    terminated = Event()
    Thread(target=pass_on, args=(terminated,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    torchrun(["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
