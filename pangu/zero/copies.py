"""Hybrid sharding: groups of replicas hold copies of the same shard, whose gradients are summed over the groups."""

from __future__ import annotations

from torch import Tensor

from pangu.collectives.reduce import Completion, Handle, all_reduce, start_all_reduce
from pangu.topology.copy_stream import CopyStream
from pangu.topology.recorder import AxisGroup


def start_sum(part: Tensor, scattered: Handle, copies: AxisGroup, beside: CopyStream) -> Handle:
    """Start to all-reduce `part` over the replicas of the same shard, after the reduce-scatter `scattered`."""
    # computation       B  B  B  B ...
    # side stream       waits for the reduce-scatter, so that neither computation nor the host does
    # shard, copies     reduce-scatter -> all-reduce
    # A CPU has no side stream: the host sums in the wait of the returned handle.
    if beside.device.type == "cpu":
        return Completion(lambda: (scattered.wait(), all_reduce(part, copies)))
    with beside.after_computation():
        scattered.wait()
        return start_all_reduce(part, copies)
