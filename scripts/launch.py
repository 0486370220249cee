"""torchrun with short messages. It takes torchrun's options and differs in five ways:

SIGTERM, SIGHUP and Ctrl-C are passed on, and the launcher ends when its processes have ended, with their status;
torchrun kills them after 30 seconds. A user's error is the one message of the run, without torchrun's report around it;
a process that crashed gets one line. The status is that of the process that failed first, where torchrun's is always 1.
Where the network to the other launchers is cut, it ends soon after its processes; torchrun waits forever.

With --spares=N it starts N more processes on each node. When a rank is killed or crashes, one of them takes its rank,
and the processes of all other ranks stay; torchrun restarts all.

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
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from threading import Thread

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.training.interrupts import SAME_SECONDS, ending_at_once

with ending_at_once():
    from torch.distributed import DistError, TCPStore
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import config_from_args, get_args_parser
    from torch.distributed.run import main as torchrun

    from pangu.collectives.agreement import answer_of_store
    from pangu.common.commands import PROGRAMS, as_typed, is_installed_command, print_error
    from pangu.common.console import guard_console
    from pangu.common.errors import STORE_SECONDS, shown
    from pangu.common.exit_status import DEVICE_ERROR, INTERRUPTED, RETRYABLE, USER_ERROR
    from pangu.topology.supervisor import supervise

PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
INTERVAL_SECONDS = 0.2
LAST_WORDS_SECONDS = 1.0
"""For processes to say that they end at a second Ctrl-C."""
SILENCES = 2
"""Questions in a row that the launchers' store leaves without an answer when it counts as gone."""
SPEAKS_ITSELF = (USER_ERROR, DEVICE_ERROR, INTERRUPTED, RETRYABLE, -signal.SIGINT)
"""Exit statuses of a process that has said why, or that Ctrl-C ended after its last word."""
KILLED = (
    ", most likely because host memory or the container's limit is exhausted (`dmesg` shows the kernel's out-of-memory "
    "killer): try checkpoint.asynchronous=false, fewer data.workers or less memory.offload"
)
"""Probable cause of SIGKILL, and what to do."""
_LOG = "torch.distributed.elastic.multiprocessing"
_HELP = """\
usage: python scripts/launch.py [OPTION ...] PROGRAM [ARGUMENT ...]

Starts a program on several processes, as torchrun does, but with short messages and the program's own exit status.

  python scripts/launch.py --nproc-per-node=8 pretrain.py +config=pangu_2_6b
      one process for each of 8 devices of this machine
  python scripts/launch.py --nnodes=2 --node-rank=0 --master-addr=node0 --nproc-per-node=8 pretrain.py +config=pangu_13b
      two nodes; the same on the other one, with --node-rank=1
  python scripts/launch.py --spares=1 --nproc-per-node=7 pretrain.py +config=pangu_2_6b
      seven processes, and one that takes the place of a lost one

PROGRAM: {programs}, or the path of a Python file

  --spares=N   start N more processes on each node; when a rank is killed or crashes, one of them takes its rank and the
               processes of all other ranks stay, where torchrun restarts all

All other options are torchrun's: `torchrun --help` explains them."""


def children() -> list[int]:
    """Return the process numbers of what this process has started and what still runs."""
    number = str(os.getpid())
    listed = Path("/proc", number, "task", number, "children")  # torchrun starts its processes from its first thread
    if listed.exists():
        return [child for child in map(int, listed.read_text().split()) if is_running(child)]
    listing = subprocess.run(["pgrep", "-P", number], capture_output=True, text=True, check=False)  # not on Linux
    return [int(child) for child in listing.stdout.split()]


def is_running(child: int) -> bool:
    """Return whether a child has not ended; torchrun, which asks for its status, may be stuck."""
    try:
        return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def pass_on(signals: socket.socket) -> None:
    """Send every signal that arrives to all children, the last one also to children that are started in place of failed
    ones. Without children, a signal ends this process, and so does a second Ctrl-C, with what is left of them.

    Python writes a signal's number into the socket at once, whatever the main thread waits for: its handlers would run
    when that is over, as after 15 minutes without the launcher of node 0.
    """
    number, interrupts, interrupted_s, signalled = 0, 0, -SAME_SECONDS, set[int]()
    while True:
        try:
            signals.settimeout(INTERVAL_SECONDS if number else None)
            if not (arrived := signals.recv(1)):
                return
            if arrived[0] not in PASSED_ON:
                continue
            number, signalled = arrived[0], set()
            now_s = time.monotonic()
            if number == signal.SIGINT and now_s - interrupted_s >= SAME_SECONDS:
                interrupts, interrupted_s = interrupts + 1, now_s
            if not children():
                os._exit(128 + number)
        except TimeoutError:
            pass
        for child in set(children()) - signalled:
            signalled.add(child)
            send(child, number)
        if interrupts > 1:
            time.sleep(LAST_WORDS_SECONDS)
            for child in children():
                send(child, signal.SIGKILL)
            os._exit(INTERRUPTED)


def send(child: int, number: int) -> None:
    """Send a signal to a child and to what it has started in its process group."""
    with suppress(ProcessLookupError):
        group = os.getpgid(child)
        os.kill(child, number) if group == os.getpgid(0) else os.killpg(group, number)


def end_after_workers(host: str, port: int) -> None:
    """End this process soon after its last child if the launchers' store does not answer: torchrun's calls to it have
    no time limit."""
    has_started, silences = False, 0
    while silences < SILENCES:
        time.sleep(INTERVAL_SECONDS)
        is_idle = has_started and not children()
        has_started = has_started or bool(children())
        silences = 0 if not is_idle or answers(host, port) else silences + 1
    text = (
        f"{socket.gethostname()}: all processes have ended, and the launchers' store at {host}:{port} does not answer"
    )
    print(f"\n{text}; the launcher exits too", file=sys.stderr, flush=True)
    os._exit(RETRYABLE)


def answers(host: str, port: int) -> bool:
    """Return whether the launchers' store answers; waits `STORE_SECONDS` at least."""
    limit = timedelta(seconds=STORE_SECONDS)
    try:
        answer_of_store(STORE_SECONDS, lambda: TCPStore(host, port, timeout=limit).check(["any"]))
    except RuntimeError:
        return False
    time.sleep(STORE_SECONDS)
    return True


def watch_store(options: Namespace) -> None:
    """Start `end_after_workers` where launchers of several nodes meet at a store of torch's."""
    config, *_ = config_from_args(options)
    if config.max_nodes > 1 and config.rdzv_backend in ("static", "c10d"):
        place = parse_rendezvous_endpoint(config.rdzv_endpoint, DEFAULT_PORT)
        Thread(target=end_after_workers, args=place, daemon=True).start()


def is_news(record: logging.LogRecord) -> bool:
    """Return whether torchrun's log line about its processes is news: not that a process ended which printed its own
    error, and not that the others are then terminated."""
    text = str(record.msg)
    first = record.args[0] if isinstance(record.args, tuple) and record.args else None
    is_known = text.startswith("failed (exitcode") and first in SPEAKS_ITSELF
    return not is_known and not text.startswith("Sending process")


def report(failed: ChildFailedError) -> int:
    """Print one line about the process that failed first, unless it did so itself; return the status to end with."""
    rank, failure = failed.get_first_failure()
    if failure.exitcode in SPEAKS_ITSELF:
        return INTERRUPTED if failure.exitcode == -signal.SIGINT else failure.exitcode
    how = f"exited with status {failure.exitcode}; see its output above"
    if failure.exitcode < 0:
        how = f"was ended by {failure.signal_name()}"
    if failure.exitcode == -signal.SIGKILL:
        how += KILLED
    print(f"\nrank {rank} on {socket.gethostname()} (process {failure.pid}) {how}", file=sys.stderr, flush=True)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def programs() -> list[str]:
    """Return the names of the programs: commands of `pangu`, or files of a checkout."""
    names = list(PROGRAMS) if is_installed_command() else [f"{file}.py" for file, _ in PROGRAMS.values()]
    return [name for name in names if "launch" not in name]


class LauncherParser(ArgumentParser):
    """Options of torchrun and `--spares`; help is the launcher's own, not the 150 lines of torchrun."""

    def __init__(self) -> None:
        """Add `--spares` to torchrun's options."""
        super().__init__(parents=[get_args_parser()], add_help=False)
        self.add_argument("--spares", type=number_of_spares)

    def format_usage(self) -> str:
        """Return the first line of the help, which precedes an error."""
        return f"{self.format_help().splitlines()[0]}\n"

    def format_help(self) -> str:
        """Return what `--help` prints."""
        return as_typed(_HELP.format(programs=", ".join(programs()))) + "\n"


def number_of_spares(text: str) -> int:
    """Return the value of `--spares`. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal()):
        raise ArgumentTypeError(f"{shown(text)}: must be a number of processes on each node, 0 or more")
    return int(text)


def refusal(options: Namespace) -> str:
    """Return why torchrun cannot start such processes, for which it would print tracebacks, or an empty text."""
    program = Path(options.training_script)
    if not (options.module or options.no_python or program.is_file() or (program / "__main__.py").is_file()):
        near = ", ".join(get_close_matches(options.training_script, programs()) or programs())
        return f"{shown(options.training_script)}: no such program: use {near}, or the path of a Python file"
    try:
        config, *_ = config_from_args(options)
        leads = options.spares is not None and options.node_rank == 0 and config.max_nodes > 1
        if config.nproc_per_node > 0 or (leads and config.nproc_per_node == 0):
            return ""
        reason = "there is nothing to start"
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).rstrip(".")
    numbers = f"--nproc-per-node={options.nproc_per_node} --nnodes={options.nnodes}"
    rule = (
        "--nproc-per-node takes a number from 1 on, cpu, gpu or auto (or 0 on node 0 of several nodes with --spares, "
        "which then only leads); --nnodes a number from 1 on, or MIN:MAX"
    )
    return f"torchrun cannot start {numbers} ({reason}): {rule}"


def keep_processes(options: Namespace) -> int:
    """Run without torchrun, and replace lost ranks by spares; return the status to end with. Raises ValueError."""
    config, command, words = config_from_args(options)
    wrong = ["--max-restarts"] * (config.max_restarts > 0) + ["--rdzv-backend"] * (config.rdzv_backend != "static")
    wrong += ["--nnodes=MIN:MAX"] * (config.min_nodes != config.max_nodes) + ["--rdzv-endpoint"] * bool(
        options.rdzv_endpoint
    )
    wrong += [f"--node-rank={options.node_rank} of one node"] * (options.node_rank >= config.max_nodes == 1)
    wrong += [word for word in options.training_script_args if word in ("--multirun", "-m")]
    if wrong:
        rule = "set --nnodes=NUMBER, --node-rank, --master-addr and --master-port instead, if there are several nodes"
        raise ValueError(f"--spares: cannot be combined with {', '.join(wrong)}; {rule}")
    alone = config.max_nodes == 1
    place = ("127.0.0.1", 0) if alone else (options.master_addr, options.master_port or DEFAULT_PORT)
    numbers = (options.node_rank, config.max_nodes, config.nproc_per_node, options.spares)
    return supervise([str(command), *words], place, *numbers)


@contextmanager
def passing_on() -> Iterator[None]:
    """Pass signals on until the end of the block."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    Thread(target=pass_on, args=(reader,), daemon=True).start()
    with writer:
        signal.set_wakeup_fd(writer.fileno())
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as `nohup` and a shell's background ignore them
                signal.signal(number, lambda *_: None)
        try:
            yield
        finally:
            signal.set_wakeup_fd(-1)


@passing_on()
def main(arguments: Sequence[str]) -> int:
    """Run torchrun; returns the status to end with."""
    guard_console()
    options = LauncherParser().parse_args(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun does that with a warning; a run sets its threads itself
    logging.getLogger(f"{_LOG}.api").addFilter(is_news)
    logging.getLogger(f"{_LOG}.errors.error_handler").disabled = True
    try:
        if refused := refusal(options):
            print_error(refused)
            return USER_ERROR
        if options.spares is not None:
            return keep_processes(options)
        watch_store(options)
        torchrun(["--signals-to-handle=SIGQUIT", *arguments])
    except ChildFailedError as failed:
        return report(failed)
    except SignalException as ended:
        return 128 + ended.sigval
    except (RendezvousError, DistError) as error:
        reason = str(error.__cause__ or error).splitlines()[0]
        if "EADDRINUSE" in reason:
            port = reason.partition("port: ")[2].partition(",")[0]
            rule = "set another one with --master-port or --rdzv-endpoint, the same on all nodes"
            print_error(f"port {port} of {socket.gethostname()} is in use: {rule}")
            return USER_ERROR
        place = config_from_args(options)[0].rdzv_endpoint
        print(f"\nthe launchers of this run could not connect at {place}: {reason}", file=sys.stderr, flush=True)
        return RETRYABLE
    except (OSError, ValueError) as error:  # an address, a folder or a program that cannot be
        print_error(f"torchrun cannot start: {error}")
        return USER_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
