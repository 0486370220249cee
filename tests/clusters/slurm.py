"""A Slurm cluster of two nodes on this machine, of what Debian's packages `slurm-wlm` and `munge` install, for root.

Slurm's own daemons in a folder of their own: nothing of the machine's configuration is used or changed.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.spawn import free_port, repository

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# a job that was queued again starts when its credential has expired
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,defer
ReturnToService=2
KillWait=300
SlurmdParameters=config_overrides
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def is_here() -> bool:
    return os.geteuid() == 0 and all(map(shutil.which, PROGRAMS))


@dataclass(frozen=True)
class Slurm:
    folder: Path
    environment: dict[str, str]

    def run(self, *words: str) -> str:
        """What a command of Slurm says. Raises CalledProcessError."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def submit(self, name: str, *words: str, options: tuple[str, ...] = (), **environment: str) -> str:
        """Number of a job that runs `pretrain.sbatch WORDS` on both nodes, one process each; what it says goes to
        `folder`/NAME.out."""
        submitted = subprocess.run(
            [
                *("sbatch", "--parsable", "--nodes=2", f"--chdir={repository()}", f"--output={self.folder}/{name}.out"),
                *options,
                "scripts/slurm/pretrain.sbatch",
                *words,
            ],
            env={**self.environment, "LOGS": f"{self.folder}/{name}", **environment},
            cwd=repository(),
            capture_output=True,
            text=True,
            check=True,
        )
        return submitted.stdout.strip()

    def tasks(self, array: str) -> list[str]:
        """States of the jobs of an array that are there or have ended a little while ago."""
        return self.run("squeue", "--noheader", "--states=all", "--array", f"--jobs={array}", "--format=%T").split()

    def end_jobs(self) -> None:
        """Kill what is left of them: without the daemons nobody would."""
        self.run("scancel", "--full", "--signal=KILL", "--user=root")
        self.run("scancel", "--user=root")
        wait_until(lambda: not self.run("squeue", "--noheader"), 60)

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` knows of it."""
        pairs = (word.partition("=") for word in self.run("scontrol", "show", "--oneliner", "job", job).split())
        return {key: value for key, _, value in pairs}

    def wait(self, job: str, seconds: float) -> dict[str, str]:
        """Until it has ended for good."""
        wait_until(lambda: self.state(job)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), seconds)
        return self.state(job)


def wait_until(true: Callable[[], bool], seconds: float) -> None:
    """Look again and again. Raises TimeoutError."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.2)


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """The daemons, with all that they write in `folder`; they end with the block."""
    (folder / "state").mkdir(parents=True)
    configuration, key = folder / "slurm.conf", folder / "munge.key"
    ports = [free_port() for _ in range(3)]
    configuration.write_text(CONFIGURATION.format(folder=folder, host=socket.gethostname(), ports=ports))
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST"))}
    environment |= {"SLURM_CONF": str(configuration), "OMP_NUM_THREADS": "1", "PROCESSES": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    munge = [
        f"--{name}={folder}/munge.{name.partition('-')[0]}" for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    cluster = Slurm(folder, environment)
    with ExitStack() as stack:

        def start(*words: str) -> None:
            with (folder / f"{words[0]}.start").open("ab") as log:
                daemon = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.terminate)

        start("munged", "--foreground", "--force", f"--key-file={key}", *munge)
        wait_until((folder / "munge.socket").exists, 20)
        start("slurmctld", "-D", "-i", "-f", str(configuration))
        for node in ("node0", "node1"):
            start("slurmd", "-D", "-N", node, "-f", str(configuration))

        def is_up() -> bool:
            asked = subprocess.run(["sinfo", "-h", "-o", "%t %D"], env=environment, capture_output=True, text=True)
            return asked.stdout == "idle 2\n"

        wait_until(is_up, 60)
        stack.callback(cluster.end_jobs)
        yield cluster
