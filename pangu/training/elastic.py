"""Restart of a run within its processes when one of them is lost (`scripts/launch.py --spares`)."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from pangu.collectives.lost_peers import notice_lost_peers
from pangu.collectives.reduce import gather_objects
from pangu.common.errors import LostError, UserError
from pangu.pipeline.layouts import choose_layout
from pangu.topology.launch import MEMBER
from pangu.topology.member import Member, ask_for_spares
from pangu.topology.mesh import Mesh, is_silence
from pangu.training import memory_checkpoints, saving
from pangu.training.process import StopSignals

log = logging.getLogger("pangu")


def replace_ranks(mesh: Mesh, ranks: Sequence[int], now: bool = True) -> bool:
    """Let spares take ranks whose devices are slow or wrong, if there is one for each: raise LostError on all ranks.

    All ranks call this together, once the state that they continue from is saved. Without `scripts/launch.py --spares`
    it does nothing. Unless `now`, it returns whether there are spares.
    """
    if MEMBER not in os.environ or not ranks:
        return False
    numbers = gather_objects(os.environ[MEMBER].partition("@")[0], mesh.group("world"))
    places = sys.maxsize if mesh.device.type == "cpu" else torch.accelerator.device_count()
    answer = ask_for_spares([int(numbers[rank]) for rank in ranks], places, now) if mesh.is_first else None
    name = mesh.named(ranks)
    # said before the other ranks know: the launcher kills those that are exchanged at once
    if now or not answer:
        log.warning(
            "replacing %s with spares" if answer else "%s: not replaced, because not every one has a free spare", name
        )
    has_spares: bool = gather_objects(answer, mesh.group("world"))[0]
    if has_spares and now:
        raise LostError(f"{name}: replaced with spares")
    return has_spares


def run_elastic(values: Mapping[str, Any], attempt: Callable[[Callable[..., StopSignals]], int]) -> int:
    """Return the status of `attempt`, which carries out a run; make another one whenever a rank is lost.

    What an attempt has built is gone then, and the next one continues from the newest state of the run: what surviving
    ranks keep (`training.survivors`), a copy in memory or a checkpoint. Only the process, its imports, what the system
    has cached and the received signals stay. It makes its handler of signals with the function that it is given.
    """
    if MEMBER not in os.environ:
        return attempt(StopSignals)

    def fits(world: int) -> bool:
        try:
            choose_layout(values, world, uneven=True)
        except UserError:
            return False
        return True

    notice_lost_peers()
    member = Member()
    with ExitStack() as stack:  # of handlers of signals, which a process without a rank does not have
        signals = partial(StopSignals, received=set[int](), keep=stack)

        def record_signals() -> None:
            stack.enter_context(signals(0.0, None))

        while True:
            member.join(fits, record_signals, stack.close)
            keep_state = None
            try:
                return attempt(signals)
            except LostError as error:
                keep_state = error.keep_state
            except RuntimeError as error:
                if not is_silence(error):
                    raise
            record_signals()
            member.leave((memory_checkpoints.WRITER, saving.WRITER))
            (keep_state or (lambda meet: meet(None)))(member.meet)
            keep_state = None
            gc.collect()  # the next attempt needs the memory
