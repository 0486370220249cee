"""Process of the pool in `roles`: torch finds the fake device, which must exist before torch is imported."""

from __future__ import annotations

import gc
import os
from collections.abc import Mapping
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from pangu.dryrun.device import FakeDevice, load_device, pretend_devices

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "CUDA_VISIBLE_DEVICES": ""}
"""Environment variables of a dry run: no process opens a real device."""
_fake: FakeDevice | str = "this process is no worker"


def start(parent: Connection, output: str) -> None:
    """Load the fake device; without it, jobs run on the CPU.

    Args:
        parent: connection that the pool's owner closes, also by its death; this process ends as soon as it does.
        output: file for what libraries write to standard output and error.
    """
    global _fake
    gc.set_threshold(100_000)  # a dry run allocates much and leaves few cycles
    Thread(target=lambda: parent.poll(None) and os._exit(0), daemon=True).start()
    os.environ.update(ENVIRONMENT)
    os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), 2)
    os.dup2(2, 1)
    _fake = load_device()
    if isinstance(_fake, str):
        pretend_devices(0)


def answer(values: Mapping[str, Any], rank: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `measure.answer` of a job on this process's device."""
    # imports torch, which looks for devices during its import
    from pangu.dryrun import measure  # noqa: PLC0415

    return measure.answer(_fake, values, rank, options)
