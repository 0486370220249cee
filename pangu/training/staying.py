"""Restart of a run within its processes when one of them is lost (`scripts/launch.py --spares`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pangu.common.errors import LostError, UserError
from pangu.pipeline.layouts import choose_layout
from pangu.topology.member import VARIABLE, Member
from pangu.topology.mesh import is_silence
from pangu.training import copies, saving


def stay(values: Mapping[str, Any], attempt: Callable[[set[int]], int]) -> int:
    """Return the status of `attempt`, which carries out a run; make another one whenever a rank is lost.

    What an attempt has built is gone then, and the next one continues from the newest state of the run, in memory or on
    the disk. Only the process, its imports, what the system has cached and the signals that an attempt has noted stay.
    """
    received = set[int]()
    if VARIABLE not in os.environ:
        return attempt(received)

    def fits(world: int) -> bool:
        try:
            choose_layout(values, world)
        except UserError:
            return False
        return True

    member = Member()
    while True:
        member.join(fits)
        try:
            return attempt(received)
        except LostError:
            pass
        except RuntimeError as error:
            if not is_silence(error):
                raise
        member.leave((copies.WRITER, saving.WRITER))
