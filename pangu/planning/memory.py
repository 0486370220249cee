"""From what a rank does to what its device holds at the fullest moment of a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, ge, mul
from typing import NamedTuple

from pangu.config.cluster import ClusterConfig, DeviceMemoryConfig
from pangu.pipeline.actions import Kind
from pangu.pipeline.orders import SCHEDULES, Order, reduces_each, splits_backward
from pangu.planning.pipeline_time import Pipeline, orders
from pangu.planning.workload import ModuleWork, Workload, working_beside

_GIB = 2.0**30
MEMORY_ERROR = 0.05
"""Of what is made of counted modules, beside dry runs of the whole step (tests/dryrun/test_module_work.py)."""
MESSAGES = 4
"""Between stages that are there at a time: one that is awaited and one that is sent, in each direction."""


_PARTS = {Kind.FORWARD: 0, Kind.BACKWARD: 1, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 2}
"""As `Held.part`."""


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
    splits = pipeline.schedule not in SCHEDULES or splits_backward(pipeline.schedule)
    distinct = {id(order): order for order in workload.orders}
    sums = {number: _Chunk.of([modules[kind] for kind in order], splits) for number, order in distinct.items()}
    chunks: list[list[_Chunk]] = [[] for _ in workload.steps]
    more_saved = workload.more_saved or (0.0,) * len(workload.orders)
    for stage, order, more in zip(pipeline.stage_of, workload.orders, more_saved, strict=True):
        chunk = sums[id(order)]
        chunks[stage].append(chunk._replace(saved=chunk.saved + more) if more else chunk)
    messages = MESSAGES * workload.message_bytes * (pipeline.stages > 1)
    stages = []
    for step, of_stage, held in zip(workload.steps, chunks, most_held(pipeline), strict=True):
        saved, deferred, working, backward = zip(*of_stage, strict=True)
        passing = step.passing or ((0.0, 0.0),) * len(of_stage)
        whole = [of_chunk[0] for of_chunk in step.sums]
        # `inner`, which comes last in a chunk, has no weights
        first = [max(map(add, *both), default=0.0) for both in zip(backward, step.sums, strict=False)]
        most = max(
            sum(map(mul, one.forwards, saved))
            + sum(map(mul, one.inputs, deferred))
            + sum(map(mul, one.summed, whole))
            + max(working[one.chunk][one.part], first[one.chunk] if step.sums and one.begins else 0.0)
            + step.sums_ahead * one.has_sums_ahead
            + passing[one.chunk][one.part > 0]
            for one in held
        )
        most = max(most + messages, step.update_working_bytes)
        overhead = device_overhead(cluster.memory, step.communicators) + cluster.memory.fragmentation * most / _GIB
        stages.append(Memory(step.state_bytes / _GIB, most / _GIB, overhead))
    return stages


class _Chunk(NamedTuple):
    """Bytes of a chunk and micro-batch, as in `ModuleWork`."""

    saved: float
    deferred: float
    working: tuple[float, ...]
    """In each part of `working_beside`."""
    backward: tuple[float, ...]
    """The same of each module in backward, or in its part for the input."""

    @classmethod
    def of(cls, modules: Sequence[ModuleWork], splits_backward: bool) -> _Chunk:
        saved = sum(module.saved_bytes for module in modules)
        deferred = sum(module.deferred_bytes for module in modules)
        # a chunk of a published layout may have no module
        beside = working_beside(modules, splits_backward) or [(0.0,) * 3]
        parts = zip((0.0,) * 3, *beside, strict=False)
        return cls(saved, deferred, tuple(map(max, parts)), tuple(parts[1] for parts in beside))


def device_overhead(memory: DeviceMemoryConfig, communicators: int) -> float:
    """GiB of a device that hold no tensors: its context, workspaces of libraries, buffers of the groups that send."""
    return memory.context_gib + memory.workspace_gib + communicators * memory.communicator_gib


class Held(NamedTuple):
    """Micro-batches that a stage holds at a time, of each of its chunks."""

    forwards: tuple[int, ...]
    """Whose gradient of the input is to come."""
    inputs: tuple[int, ...]
    """Whose gradients of weights alone are to come."""
    summed: tuple[int, ...]
    """1 of chunks of which there are gradients of some before; () where they are reduced after each."""
    chunk: int
    """Which of them computes."""
    part: int
    """0 while a forward computes, 1 a backward or its part for the input, 2 that for the weights."""

    @property
    def begins(self) -> bool:
        """Whether this is the first backward of a chunk."""
        return self.part == 1 and bool(self.summed) and not self.summed[self.chunk]

    @property
    def has_sums_ahead(self) -> bool:
        """Whether a head may have made gradients in forward, in the last chunk, to which backward has not come."""
        came = self.part == 1 and self.chunk == len(self.forwards) - 1
        return self.forwards[-1] > 0 and bool(self.summed) and not (self.summed[-1] or came)


@lru_cache(maxsize=1000)
def most_held(pipeline: Pipeline) -> list[list[Held]]:
    """Stage -> what it holds, as `held_in`."""
    p, m = pipeline.stages, pipeline.micro_batches
    if pipeline.schedule not in SCHEDULES:  # the papers' zb-1p and zb-2p, for one and two times the memory of 1F1B
        often = 2 if pipeline.schedule == "zb-2p" else 1
        return [[Held((min(m, often * (p - stage)),), (0,), (), 0, 1)] for stage in range(p)]
    # from some number on more micro-batches change nothing; in uneven groups they do, and in two phases all are held
    grows = SCHEDULES[pipeline.schedule].two_phases or (pipeline.schedule == "interleaved" and m % p)
    most = m if grows else min(m, 4 * p)
    return [held_in(order, pipeline.schedule) for order in orders(pipeline._replace(micro_batches=most))]


def held_in(order: Order, schedule: str) -> list[Held]:
    """What a stage holds at moments that no other moment covers, from the very order of its work in a schedule."""
    chunks = sorted({chunk for _, chunk, _ in order})
    sums = len(chunks) * (not reduces_each(schedule))
    return _fullest(set(_moments(order, chunks, sums)), len(chunks))


def _moments(order: Order, chunks: Sequence[int], sums: int) -> Iterator[tuple[int, ...]]:
    """What is held while each step computes, forwards of each chunk, then inputs, then, of so many chunks, whether
    gradients are; and the chunk and the part that the step is."""
    place, count = {chunk: number for number, chunk in enumerate(chunks)}, len(chunks)
    held, summed = [0] * (2 * count), [0] * sums
    for kind, chunk, _ in order:
        slot = place[chunk]
        held[slot] += kind is Kind.FORWARD
        yield *held, *summed, slot, _PARTS[kind]
        if kind is Kind.BACKWARD_WEIGHT:
            held[slot + count] -= 1
        elif kind is not Kind.FORWARD:
            held[slot] -= 1
            held[slot + count] += kind is Kind.BACKWARD_INPUT
        if sums:
            summed[slot] |= kind is not Kind.FORWARD


def _fullest(moments: set[tuple[int, ...]], chunks: int) -> list[Held]:
    """Those that no other of the same chunk and part is at least as much as in everything."""
    fullest: list[tuple[int, ...]] = []
    for one in sorted(moments, key=sum, reverse=True):
        if not any(other[-2:] == one[-2:] and all(map(ge, other, one)) for other in fullest):
            fullest.append(one)
    both = 2 * chunks
    return [Held(one[:chunks], one[chunks:both], one[both:-2], *one[-2:]) for one in fullest]
