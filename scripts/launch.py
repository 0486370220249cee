"""torchrun in few words. It takes torchrun's options, and differs in three things:

SIGTERM is passed on, and the launcher ends when its processes have ended, with their status; torchrun kills them after
30 seconds. A user's error is the one message of the run, without torchrun's report around it; of a process that crashed
there is one line. The status is that of the process that failed first, where torchrun's is always 1.

  python scripts/launch.py --nproc-per-node=8 pretrain.py +config=pangu_2_6b
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import config_from_args, parse_args
from torch.distributed.run import main as torchrun

from pangu.config.exit_status import INTERRUPTED, RETRYABLE, USER_ERROR

INTERVAL_SECONDS = 0.2
SPEAKS_ITSELF = (USER_ERROR, INTERRUPTED, RETRYABLE)
"""Exit statuses of a process that has said why."""
_LOG = "torch.distributed.elastic.multiprocessing"


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


def is_news(record: logging.LogRecord) -> bool:
    """Whether torchrun's line about its processes says what they have not said: not that one ended which told why, and
    not that the others are ended then."""
    text = str(record.msg)
    first = record.args[0] if isinstance(record.args, tuple) and record.args else None
    is_known = text.startswith("failed (exitcode") and first in SPEAKS_ITSELF
    return not is_known and not text.startswith("Sending process")


def report(failed: ChildFailedError) -> int:
    """One line of the process that failed first, unless it has spoken itself; returns the status to end with."""
    rank, failure = failed.get_first_failure()
    if failure.exitcode in SPEAKS_ITSELF:
        return failure.exitcode
    how = f"ended with status {failure.exitcode}; what it said stands above"
    if failure.exitcode < 0:
        how = f"was ended by {failure.signal_name()}"
    if failure.exitcode == -signal.SIGKILL:
        how += ", as the system does when its memory is full"
    print(f"\nrank {rank} on {socket.gethostname()} (process {failure.pid}) {how}", file=sys.stderr, flush=True)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def refusal(arguments: Sequence[str]) -> str:
    """Why torchrun cannot start such processes, of which its own word is a traceback; empty if it can."""
    options = parse_args(arguments)
    try:
        config, *_ = config_from_args(options)
        if config.nproc_per_node > 0:
            return ""
        reason = "there is nothing to start"
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).rstrip(".")
    numbers = f"--nproc-per-node={options.nproc_per_node} --nnodes={options.nnodes}"
    rule = "--nproc-per-node takes a number from 1 on, cpu, gpu or auto; --nnodes a number from 1 on, or MIN:MAX"
    return f"torchrun cannot start {numbers} ({reason}): {rule}"


def main(arguments: Sequence[str]) -> int:
    """Run torchrun; returns the status to end with."""
    terminated = Event()
    Thread(target=pass_on, args=(terminated,), daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: terminated.set())
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does that with a warning; a run sets its threads itself
    logging.getLogger(f"{_LOG}.api").addFilter(is_news)
    logging.getLogger(f"{_LOG}.errors.error_handler").disabled = True
    try:
        if refused := refusal(arguments):
            print(f"error: {refused}", file=sys.stderr, flush=True)
            return USER_ERROR
        torchrun(["--signals-to-handle=SIGINT,SIGHUP,SIGQUIT", *arguments])
    except ChildFailedError as failed:
        return report(failed)
    except SignalException as ended:
        return 128 + ended.sigval
    except (RendezvousError, DistError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        print(f"\nthe launchers of this run did not meet: {reason}", file=sys.stderr, flush=True)
        return RETRYABLE
    except (OSError, ValueError) as error:  # an address, a folder or a program that cannot be
        print(f"error: torchrun cannot start: {error}", file=sys.stderr, flush=True)
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
