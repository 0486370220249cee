"""A rank that is killed amid a message: whoever waits for the message ends its wait, its groups and its process."""

from __future__ import annotations

import gc
import os
import signal
from datetime import timedelta
from functools import partial
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist

from pangu.collectives import lost_peers
from pangu.topology.backends import create_group, leave_groups
from pangu.topology.launch import MEMBER

LIMIT_SECONDS = 600.0
"""Time after which gloo ends the wait itself."""


def _exchange(rank: int, port: int, kind: str) -> None:
    """Send 256 MiB from rank 0 to rank 1 and back, in the middle of which rank 1 is killed."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    os.environ[MEMBER] = "0"
    create = partial(dist.init_process_group, "gloo", store=store, rank=rank, world_size=2)
    create_group(create, "gloo", 2, LIMIT_SECONDS)
    lost_peers.LOOK_SECONDS = 0.5
    lost_peers.notice_lost_peers()
    sent, received = torch.ones(2**26), torch.zeros(2**26)
    dist.all_reduce(torch.zeros(1))
    if kind == "collective":
        works = [dist.all_to_all_single(received, sent, async_op=True)]
    else:
        works = [dist.irecv(received, 1 - rank), dist.isend(sent, 1 - rank)]
    if rank == 1:
        while not received[0]:  # until the message has begun
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    given = [timedelta(seconds=LIMIT_SECONDS)] if kind == "message" else []
    with pytest.raises(RuntimeError, match=r"Failed to recv|Broken pipe|Connection"):  # by the moment
        [work.wait(*given) for work in works]
    works.clear()
    leave_groups()
    dist.destroy_process_group()
    gc.collect()


@pytest.mark.parametrize("kind", ["collective", "message"])
def test_a_wait_ends_when_the_store_is_closed(kind: str) -> None:
    store: dist.TCPStore | None = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert store is not None
    processes = [get_context("spawn").Process(target=_exchange, args=(rank, store.port, kind)) for rank in (0, 1)]
    for process in processes:
        process.start()
    survivor, lost = processes
    lost.join()
    store = None  # as the launcher closes it
    survivor.join(LIMIT_SECONDS / 6)
    survivor.kill()
    assert survivor.exitcode == 0
