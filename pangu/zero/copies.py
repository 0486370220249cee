"""Hybrid sharding: groups of replicas hold the same shares, which are summed over the groups."""

from __future__ import annotations

from torch import Tensor

from pangu.collectives.reduce import Completion, Handle, all_reduce, start_all_reduce
from pangu.topology.copy_stream import CopyStream
from pangu.topology.recorder import AxisGroup


def start_sum(part: Tensor, scattered: Handle, copies: AxisGroup, beside: CopyStream) -> Handle:
    """Sum `part` over the replicas that hold the same share, as soon as the reduce-scatter `scattered` has made it. On
    a CPU only the host could wait for that: it does when the sum is waited for."""
    # computing         B  B  B  B ...
    # beside            waits for the scatter, in the place of what computes and of the host
    # shard, copies     scatter -> sum
    if beside.device.type == "cpu":
        return Completion(lambda: (scattered.wait(), all_reduce(part, copies)))
    with beside.after_computation():
        scattered.wait()
        return start_all_reduce(part, copies)
