"""From what a rank does to what its device holds at the fullest moment of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import mul
from typing import NamedTuple

from pangu.config.cluster import ClusterConfig, DeviceMemoryConfig
from pangu.pipeline.actions import Kind
from pangu.pipeline.orders import SCHEDULES, Order
from pangu.planning.cost import Pipeline
from pangu.planning.workload import ModuleWork, Workload

_GIB = 2.0**30
MEMORY_ERROR = 0.05
"""Of what is made of counted modules, beside dry runs of the whole step (tests/dryrun/test_module_work.py)."""
MESSAGES = 4
"""Between stages that are there at a time: one that is awaited and one that is sent, in each direction."""


@dataclass(frozen=True)
class Memory:
    """GiB of a device."""

    states: float
    """Parameters, gradients, optimizer state."""
    activations: float
    """From forward to backward, and what a module works with."""
    overhead: float
    """Of the device and its libraries."""

    @property
    def total(self) -> float:
        """Of all."""
        return self.states + self.activations + self.overhead


def memory_of_stages(workload: Workload, pipeline: Pipeline, cluster: ClusterConfig) -> list[Memory]:
    """What each stage needs at its peak."""
    modules = workload.modules
    # most chunks are one object (see `layout_work.assemble`)
    sums = {id(chunk): _Chunk.of(chunk, modules) for chunk in workload.chunks}
    chunks: list[list[_Chunk]] = [[] for _ in workload.steps]
    for number, chunk in enumerate(workload.chunks):
        chunks[pipeline.of(number)].append(sums[id(chunk)])
    messages = MESSAGES * workload.message_bytes * (pipeline.stages > 1)
    stages = []
    for step, own, held in zip(workload.steps, chunks, most_held(pipeline), strict=True):
        saved, deferred, working = zip(*own, strict=True)
        most = max(sum(map(mul, one.forwards, saved)) + sum(map(mul, one.inputs, deferred)) for one in held)
        most += max(working) + messages
        states = (step.state_bytes + step.buffer_bytes) / _GIB
        overhead = device_overhead(cluster.memory, step.communicators) + cluster.memory.fragmentation * most / _GIB
        stages.append(Memory(states, most / _GIB, overhead))
    return stages


class _Chunk(NamedTuple):
    """Bytes of a chunk and micro-batch, as in `ModuleWork`."""

    saved: float
    deferred: float
    working: float

    @classmethod
    def of(cls, chunk: Mapping[str, int], modules: Mapping[str, ModuleWork]) -> _Chunk:
        return cls(
            sum(modules[kind].saved_bytes * count for kind, count in chunk.items()),
            sum(modules[kind].deferred_bytes * count for kind, count in chunk.items()),
            max((modules[kind].working_bytes for kind in chunk), default=0.0),
        )


def device_overhead(memory: DeviceMemoryConfig, communicators: int) -> float:
    """GiB of a device that hold no tensors: its context, workspaces of libraries, buffers of the groups that send."""
    return memory.context_gib + memory.workspace_gib + communicators * memory.communicator_gib


@dataclass(frozen=True)
class Held:
    """Micro-batches that a stage holds at a time, of each of its chunks."""

    forwards: tuple[int, ...]
    """Whose gradient of the input is to come."""
    inputs: tuple[int, ...]
    """Whose gradients of weights alone are to come."""

    def covers(self, other: Held) -> bool:
        """Whether it is at least as much of everything."""
        return all(map(int.__ge__, self.forwards + self.inputs, other.forwards + other.inputs))


@lru_cache(maxsize=1000)
def most_held(pipeline: Pipeline) -> list[list[Held]]:
    """Stage -> what it holds at moments that no other moment covers, from the very order of its work."""
    p, v, m = pipeline.stages, pipeline.virtual, pipeline.micro_batches
    if pipeline.schedule not in SCHEDULES:  # the papers' zb-1p and zb-2p, for one and two times the memory of 1F1B
        often = 2 if pipeline.schedule == "zb-2p" else 1
        return [[Held((min(m, often * (p - stage)),), (0,))] for stage in range(p)]
    family = SCHEDULES[pipeline.schedule]
    # from some number on more micro-batches change nothing; in groups they do, and in two phases all are held
    most = m if family.two_phases or pipeline.schedule == "interleaved" else min(m, 4 * p)
    return [_most(set(_held(order))) for order in family.order(p, v, most)]


def _held(order: Order) -> Iterator[Held]:
    """What is held while each step computes."""
    place = {chunk: number for number, chunk in enumerate(sorted({chunk for _, chunk, _ in order}))}
    forwards, inputs = [0] * len(place), [0] * len(place)
    for kind, chunk, _ in order:
        here = place[chunk]
        forwards[here] += kind is Kind.FORWARD
        yield Held(tuple(forwards), tuple(inputs))
        forwards[here] -= kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
        inputs[here] += (kind is Kind.BACKWARD_INPUT) - (kind is Kind.BACKWARD_WEIGHT)


def _most(moments: set[Held]) -> list[Held]:
    fullest: list[Held] = []
    for one in sorted(moments, key=lambda held: sum(held.forwards + held.inputs), reverse=True):
        if not any(other.covers(one) for other in fullest):
            fullest.append(one)
    return fullest
