"""Waits that end when a peer is lost amid a message, for runs whose processes stay (`scripts/launch.py --spares`).

gloo tells whoever waits for a message that has not begun, but not the ends of one that is under way: they wait until
`parallel.timeout_s`. The launcher closes the store of the ranks when one is lost, so long waits ask whether it is open.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial

import torch.distributed as dist

from pangu.collectives.agreement import in_thread

LOOK_SECONDS = 3.0
_wait = dist.Work.wait


def notice_lost_peers() -> None:
    """Let waits for gloo's collectives and messages raise `DistError` within seconds once a rank is lost."""
    dist.Work.wait = _wait_while_open  # type: ignore[assignment]  # torch waits inside of its functions, too


def _wait_while_open(work: dist.Work, *timeout: timedelta) -> bool:
    if timeout:  # a message of gloo, see `wait_arguments`; it can only be waited for once
        future = in_thread("message", partial(_wait, work, *timeout))
        while True:
            try:
                return future.result(LOOK_SECONDS)
            except TimeoutError:
                _require_open_store()
    if dist.get_backend() != "gloo":
        return _wait(work)
    while True:
        try:
            return _wait(work, timedelta(seconds=LOOK_SECONDS))
        except RuntimeError:
            if work.is_completed():
                raise
            _require_open_store()


def _require_open_store() -> None:
    dist.distributed_c10d._get_default_store().check(["open"])
