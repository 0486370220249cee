"""From what a rank does to what its device holds at the fullest moment of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add, mul
from typing import NamedTuple

from pangu.config.cluster import ClusterConfig
from pangu.pipeline.held import Held, held_in
from pangu.pipeline.orders import SCHEDULES, splits_backward
from pangu.planning.pipeline_time import Pipeline, orders
from pangu.planning.workload import ModuleWork, Workload, working_beside

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
    splits = splits_backward(pipeline.schedule)
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
        overhead = cluster.memory.overhead_gib(step.communicators) + cluster.memory.fragmentation * most / _GIB
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
        beside = working_beside(modules, splits_backward)
        parts = zip((0.0,) * 3, *beside, strict=False)
        return cls(saved, deferred, tuple(map(max, parts)), tuple(parts[1] for parts in beside))


@lru_cache(maxsize=1000)
def most_held(pipeline: Pipeline) -> list[list[Held]]:
    """Stage -> what it holds, as `held_in`."""
    p, m = pipeline.stages, pipeline.micro_batches
    # from some number on more micro-batches change nothing; in uneven groups they do, and in two phases all are held
    grows = SCHEDULES[pipeline.schedule].two_phases or (pipeline.schedule == "interleaved" and m % p)
    most = m if grows else min(m, 4 * p)
    return [held_in(order, pipeline.schedule) for order in orders(pipeline._replace(micro_batches=most))]
