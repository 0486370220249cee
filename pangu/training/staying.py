"""Restart of a run within its processes when one of them is lost (`scripts/launch.py --spares`)."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pangu.collectives.reduce import gather_objects
from pangu.common.errors import LostError, UserError
from pangu.pipeline.layouts import choose_layout
from pangu.topology.member import VARIABLE, Member, ask_for_spares
from pangu.topology.mesh import Mesh, is_silence
from pangu.training import copies, saving

log = logging.getLogger("pangu")


def exchange(mesh: Mesh, ranks: Sequence[int]) -> None:
    """Let spares take ranks whose devices are slow or wrong, if there is one for each: raise LostError on all ranks.

    All ranks call this together, once the state that they continue from is saved. Without `scripts/launch.py --spares`
    it does nothing.
    """
    if VARIABLE not in os.environ or not ranks:
        return
    numbers = gather_objects(os.environ[VARIABLE].partition("@")[0], mesh.group("world"))
    places = sys.maxsize if mesh.device.type == "cpu" else torch.accelerator.device_count()
    answer = ask_for_spares([int(numbers[rank]) for rank in ranks], places) if mesh.is_first else None
    name = mesh.named(ranks)
    # said before the other ranks know: the launcher kills those that are exchanged at once
    log.warning("exchanging %s for spares" if answer else "%s: not exchanged, because there are too few spares", name)
    if gather_objects(answer, mesh.group("world"))[0]:
        raise LostError(f"{name}: exchanged for spares")


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
