"""Each channel between stages has a group of its two ranks, and messages wait as long as collectives."""

from __future__ import annotations

import os
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from pangu.collectives.point_to_point import Channels, exchange_bytes
from pangu.schedule.schedule import make_schedule
from pangu.topology import backends
from pangu.topology.launch import MEMBER
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import AxisGroup
from tests.pace import at_some_pace
from tests.spawn import Pool
from tests.threads import Ranks

Channel = tuple[str, int, int]


def groups_of(rank: int, world: int, layout: Layout, channels: list[Channel]) -> dict[Channel, tuple[str, list[int]]]:
    """This rank's channels with their groups' names and ranks; messages have come through them."""
    mesh = Mesh.connect(layout, torch.device("cpu"))
    groups = Channels(mesh, channels)._groups
    name_of = dist.distributed_c10d._get_process_group_name
    return {channel: (name_of(group), dist.get_process_group_ranks(group)) for channel, group in groups.items()}


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("1f1b", Layout(pipeline=4)),
        ("1f1b", Layout(pipeline=3, data=2)),
        ("interleaved", Layout(pipeline=2, virtual_stages=2)),
        ("interleaved", Layout(pipeline=3, virtual_stages=2)),  # a ring that two rounds do not make
        ("zb_v", Layout(pipeline=4, virtual_stages=2)),
    ],
    ids=str,
)
def test_a_channel_is_a_group_of_two(ranks: Ranks, schedule: str, layout: Layout) -> None:
    """The same one on both sides, and no other channel's: not that of the other direction, nor of another pair."""
    channels = make_schedule(schedule, layout.pipeline, layout.virtual_stages, 2 * layout.pipeline).channels
    made = ranks.run(layout.world, groups_of, layout, channels)
    names: dict[str, tuple[Channel, int]] = {}
    for rank, groups in enumerate(made):
        at = layout.coordinates(rank)
        assert set(groups) == {channel for channel in channels if at.pipeline in channel[1:]}
        for channel, (name, members) in groups.items():
            stages = layout.peers(rank, "pipeline")
            assert members == sorted(stages[stage] for stage in channel[1:])
            assert names.setdefault(name, (channel, at.data)) == (channel, at.data)
    assert len(names) == len(channels) * layout.data


@patch.dict(os.environ, {MEMBER: "0@127.0.0.1:1"})
def _waits(rank: int, world: int, pace: float) -> float:
    backends.CONNECT_SECONDS = 0.4 * pace
    mesh = Mesh.connect(Layout(pipeline=world), torch.device("cpu"), timeout_s=77.0)
    channels = Channels(mesh, [("activation", 0, 1), ("gradient", 1, 0)])
    host, found = AxisGroup(mesh.new_group(range(world), "host"), "host"), torch.zeros(1)
    if rank == 0:
        sent = channels.send("activation", [torch.ones(1)], 1)
        found += channels.receive("gradient", [(1,)], torch.float32, 1).wait()[0]
        exchange_bytes([], [(found, 1)], host)
        sent.wait()
    else:
        time.sleep(1.5 * pace)
        found += channels.receive("activation", [(1,)], torch.float32, 0).wait()[0]
        channels.send("gradient", [2 * torch.ones(1)], 0).wait()
        time.sleep(1.5 * pace)
        exchange_bytes([(torch.full([1], 3.0), 0)], [], host)
    return found.item()


@at_some_pace
def test_messages_may_take_longer_than_connecting(pool: Pool, pace: float) -> None:
    assert pool.run(2, _waits, pace) == [3.0, 1.0]
