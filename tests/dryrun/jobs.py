"""Jobs of processes in tests of these processes, in place of dry runs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pangu.dryrun.worker import ENVIRONMENT

LONG = 300.0
"""Seconds that nobody waits for."""


def say_much(*job: Any) -> dict[str, Any]:
    os.write(2, bytes(300_000))
    return {"peak": 7}


def fail_at_once(*job: Any) -> dict[str, Any]:
    os.write(2, b"warning\n\377 no memory\n\n")
    os._exit(3)


def be_killed(*job: Any) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def tell_environment(*job: Any) -> dict[str, Any]:
    return {name: os.environ[name] for name in ENVIRONMENT}


def fail_or_sleep(values: Mapping[str, Any], *job: Any) -> dict[str, Any]:
    if "fails" not in values:
        time.sleep(LONG)
    return {"error": "no"}


def answer_or_sleep(values: Mapping[str, Any], *job: Any) -> dict[str, Any]:
    if "long" in values:
        time.sleep(LONG)
    return {"peak": 7}


def tell_and_sleep(values: Mapping[str, Any], *job: Any) -> dict[str, Any]:
    Path(values["file"]).write_text(str(os.getpid()), encoding="utf-8")
    time.sleep(LONG)
    return {}
