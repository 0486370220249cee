"""What a layout takes and needs at least, thousands of times a second: computing alone, states, and what is held.

It is made of the same measured spans and buffers as the ledger of a step, without communication.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from pangu.config.cluster import ClusterConfig
from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart
from pangu.pipeline.held import most_held
from pangu.pipeline.orders import reduces_each, splits_backward
from pangu.pipeline.spans import END, START, Matmul, Trace, Work
from pangu.pipeline.stages import shards_sums
from pangu.planning.cost import computing_seconds, matmul_seconds
from pangu.planning.plan import Plan
from pangu.planning.program import Part, Program, Way, shortest
from pangu.planning.stage_ledger import Formats
from pangu.topology.layout import Coordinates, Layout
from pangu.zero.grouping import Sharding, buffer_table
from pangu.zero.stage_parameters import place_stage

_GIB = 2.0**30


class Least(NamedTuple):
    """Of a module or a chunk and one micro-batch, whatever stands beside it."""

    forward: float = 0.0
    back: float = 0.0
    """Seconds of backward, or of its part for the input."""
    weight: float = 0.0
    """Seconds of the part of backward for weights, where that is apart."""
    saved: float = 0.0
    """Bytes that stay from forward to backward."""


class Bounds:
    """Lower bounds of the time and the memory of layouts."""

    def __init__(self, program: Program, cluster: ClusterConfig) -> None:
        self._program, self._cluster, self._formats = program, cluster, Formats.of(program.config)
        self._products: dict[Matmul, float] = {}
        self._modules: dict[int, tuple[Trace, dict[Any, Least]]] = {}
        self._chunks: dict[Any, list[Least]] = {}
        self._lines: dict[Any, list[tuple[float, float]]] = {}
        self._of_module: dict[Any, dict[str, Counter[tuple[bool, bool]]]] = {}
        self._numels: dict[Any, Counter[tuple[bool, bool]]] = {}
        self._shares: dict[Any, tuple[float, float]] = {}

    def seconds(self, plan: Plan) -> float:
        """Seconds of a step's computing.

        A stage begins when the first micro-batch has come to it through the chunks before its first one; behind its
        last backward for an input that of the last micro-batch goes back through these, beside its own gradients of
        weights if they are computed apart.
        """
        key = Way.of(plan)._replace(on_host=False), plan.recomputed, plan.schedule, plan.layers, plan.pipeline
        if key not in self._lines:
            self._lines[key] = list(self._of_stages(plan))
        return max(fixed + plan.micro_batches * each for fixed, each in self._lines[key])

    def _of_stages(self, plan: Plan) -> Iterator[tuple[float, float]]:
        """Yield seconds that the whole takes, and for each micro-batch, going by each stage."""
        cut, apart = self._program.cut(plan), splits_backward(plan.schedule)
        times = [self._least(plan, part) for part in cut.distinct]
        sums = [[sum(column) for column in zip(*chunks, strict=True)] for chunks in times]
        seen, forwards, backs = [0] * plan.pipeline, 0.0, 0.0
        for stage in cut.stage_of:
            place = cut.alike[stage]
            if not seen[stage]:
                forward, back, weight, _ = sums[place]
                if apart:
                    yield forwards, forward + back + weight
                    yield forwards + backs, forward + back
                else:
                    yield forwards + backs, forward + back + weight
            one = times[place][seen[stage]]
            forwards, backs = forwards + one.forward, backs + one.back
            seen[stage] += 1

    def _least(self, plan: Plan, part: Part) -> list[Least]:
        """Return what each chunk of a stage takes at least."""
        key = Way.of(plan), splits_backward(plan.schedule), plan.recomputed, part.content
        if key not in self._chunks:
            plan = plan._replace(offload=())  # which takes as much computing, and may be measured
            known, chunks = self._measured(self._program.trace(plan, part)), list[Least]()
            for kinds in self._program.kinds(plan, part):
                modules = [known[START], *(known[_word(kind)] for kind in kinds.all), known[END]]
                chunks.append(Least(*map(sum, zip(*modules, strict=True))))
            self._chunks[key] = chunks
        return self._chunks[key]

    def _measured(self, trace: Trace) -> dict[Any, Least]:
        """Return what each kind of module takes at least."""
        if id(trace) in self._modules:
            return self._modules[id(trace)][1]
        most: dict[Any, dict[str, float]] = {}
        for key, span in trace.spans.items():
            of_kind = most.setdefault(_word(key.module), {})
            if key.action and span is not None:
                of_kind[key.action] = min(self._seconds(span.work), of_kind.get(key.action, math.inf))
            elif key.action:
                of_kind[key.action] = 0.0
            if key.action == "F" and span is not None:
                of_kind["saved"] = min(span.end, of_kind.get("saved", math.inf))
        found = {
            kind: Least(
                of_kind.get("F", 0.0),
                min(of_kind.get("I", math.inf), of_kind.get("B", math.inf)) if {"I", "B"} & {*of_kind} else 0.0,
                of_kind.get("W", 0.0) * ("B" not in of_kind),
                of_kind.get("saved", 0.0),
            )
            for kind, of_kind in most.items()
        }
        self._modules[id(trace)] = trace, found
        return found

    def _seconds(self, work: Work) -> float:
        """Return the time of computing."""
        for product in work.matmuls:
            if product not in self._products:
                self._products[product] = matmul_seconds(product, self._cluster)
        return computing_seconds(work, self._cluster, sum(map(self._products.__getitem__, work.matmuls)))

    def gib(self, plan: Plan) -> float:
        """GiB of the stage that needs most: states, with activations in flight or the sums of gradients."""
        cut, most, forwards = self._program.cut(plan), 0.0, Counter[int]()
        held_by = most_held(plan.schedule, plan.pipeline, plan.virtual, shortest(plan))
        sums_last = not (shards_sums(plan.layout) and reduces_each(plan.schedule))
        for place, (held, _) in zip(cut.alike, held_by, strict=True):
            forwards[place] = max(forwards[place], held)
        for place, part in enumerate(cut.distinct):
            lasting, sums = self._states(plan, part)
            saved = 0.0 if "activations" in plan.offload else min(one.saved for one in self._least(plan, part))
            passing = max(forwards[place] * saved, sums * sums_last)
            most = max(most, lasting + passing * (1 + self._cluster.memory.fragmentation))
        return most / _GIB + self._cluster.memory.overhead_gib(plan.axes)

    def _states(self, plan: Plan, part: Part) -> tuple[float, float]:
        """Return the bytes of a stage that last, and those of sums of gradients that do not."""
        lasting = sums = 0.0
        for (expert, trained), numel in self._numel(plan, part).items():
            stays, comes = self._bytes(plan, expert, trained)
            lasting, sums = lasting + stays * numel, sums + comes * numel
        return lasting, sums

    def _numel(self, plan: Plan, part: Part) -> Counter[tuple[bool, bool]]:
        """Return the elements of a stage on a rank, by whether they are of experts that the layout splits, and whether
        they are trained."""
        ranks = plan.tensor, plan.sequence, plan.expert, plan.expert_tensor
        if ranks not in self._of_module:
            self._of_module[ranks] = _numels(self._program.config, plan.layout)
        if (ranks, part.content) not in self._numels:
            of_module, total = self._of_module[ranks], Counter[tuple[bool, bool]]()
            for module in _modules(part):
                total.update(of_module[module])
            self._numels[ranks, part.content] = total
        return self._numels[ranks, part.content]

    def _bytes(self, plan: Plan, expert: bool, trained: bool) -> tuple[float, float]:
        """Return the bytes for each element that last, and those of a sum of gradients that does not."""
        key = plan.zero, plan.zero_group, plan.data, plan.context, plan.offload, plan.expert, plan.expert_tensor
        if (*key, plan.tensor, expert, trained) not in self._shares:
            formats = self._formats
            sharding = Sharding.of(plan.layout, Coordinates(0, 0, 0), plan.offload, expert)
            rows = buffer_table(sharding.size, formats.weights < formats.sums, sharding, trained)
            lasting = float(
                sum(
                    row.numel * (formats.sums if row.wide else formats.weights)
                    for row in rows
                    if row.alias is None and row.lasting and not row.on_host
                )
            )
            lasting += 2 * formats.moments * (trained and "optimizer" not in sharding.offload)
            whole = trained and all(row.name != "total" for row in rows)
            shares = lasting / sharding.size, float(formats.sums * whole)
            self._shares[*key, plan.tensor, expert, trained] = shares
        return self._shares[*key, plan.tensor, expert, trained]


def _modules(part: Part) -> Iterator[str]:
    """Yield the modules with weights of a stage."""
    chunks = part.chunks.values()
    yield from ["embedding"] * any(chunk.first for chunk in chunks)
    yield from (f"layers.{layer}" for chunk in chunks for layer in chunk.layers)
    yield from ["head"] * any(chunk.last for chunk in chunks)


def _numels(config: RunConfig, layout: Layout) -> dict[str, Counter[tuple[bool, bool]]]:
    """Return the elements of each module of a model on a rank; a matrix that two share counts for the first."""
    whole = ModelPart.whole(config.model)
    table, uses, _ = place_stage(config, layout, Coordinates(0, 0, 0), {0: whole})
    seen, numels = set[str](), dict[str, Counter[tuple[bool, bool]]]()
    for module, names in uses[0].items():
        numels[module] = Counter()
        for name in (name for name in names if name not in seen):
            seen.add(name)
            numels[module][table.is_expert(name), table.is_trained(name)] += math.prod(table.shapes[name])
    return numels


def _word(kind: str) -> str:
    """Return the kind of a module whatever is kept of it on the device."""
    return kind.replace(" resident", "")
