"""What a layout takes and needs at least, thousands of times a second: computing alone, states, and what is held.

It is made of the same measured spans and buffers as the ledger of a step, without communication.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from pangu.config.cluster import ClusterConfig
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart
from pangu.pipeline.orders import splits_backward
from pangu.pipeline.spans import END, START, SpanKey, Trace
from pangu.planning.cost import computing_seconds
from pangu.planning.plan import Plan
from pangu.planning.program import Part, Program, Way, held_in, schedule_of
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

    @classmethod
    def of(cls, parts: Iterable[Least]) -> Least:
        """Return those of a chunk, from its modules."""
        return cls(*map(sum, zip(*parts, strict=True)))


class Bounds:
    """Lower bounds of the time and the memory of layouts."""

    def __init__(self, program: Program, cluster: ClusterConfig) -> None:
        self._program, self._cluster, self._formats = program, cluster, Formats.of(program.config)
        self._modules: dict[Any, dict[Any, Least]] = {}
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
        key = Way.of(plan)._replace(on_host=False), plan.recomputed, plan.schedule, plan.pipeline, plan.layers
        if key not in self._lines:
            self._lines[key] = list(self._of_stages(plan))
        return max(fixed + plan.micro_batches * each for fixed, each in self._lines[key])

    def _of_stages(self, plan: Plan) -> Iterator[tuple[float, float]]:
        """Yield seconds that the whole takes, and for each micro-batch, going by each stage."""
        apart, before, seen = splits_backward(plan.schedule), Least(), set[int]()
        stage_of = schedule_of(plan).stage_of
        parts = self._program.parts(plan)
        times = {id(part): self._chunks(plan, part) for part in parts}
        places = Counter[int]()
        for stage in stage_of:
            chunks = times[id(parts[stage])]
            if stage not in seen:
                seen.add(stage)
                busy = Least.of(chunks)
                whole = busy.forward + busy.back + busy.weight
                if apart:
                    yield before.forward, whole
                    yield before.forward + before.back, busy.forward + busy.back
                else:
                    yield before.forward + before.back, whole
            before = Least.of((before, chunks[places[stage]]))
            places[stage] += 1

    def _chunks(self, plan: Plan, part: Part) -> list[Least]:
        """Return what each chunk of a stage takes at least."""
        recomputed = self._program.model.layers if plan.recompute == "full" else plan.recomputed
        chunks = [_kinds(self._program.model, chunk, recomputed) for chunk in part.chunks.values()]
        plan = plan._replace(offload=())
        key = Way.of(plan), splits_backward(plan.schedule)
        known = self._modules.get(key, {})
        if any(kind not in known for kinds in chunks for kind in kinds):
            self._modules[key] = known = self._measured(self._program.trace(plan, part))
        return [Least.of(known[kind] for kind in kinds) for kinds in chunks]

    def _measured(self, trace: Trace) -> dict[Any, Least]:
        least: dict[Any, dict[str, float]] = {}
        for key, span in trace.spans.items():
            if not key.action:
                continue
            of_module = least.setdefault(_kind(key), {})
            seconds = 0.0 if span is None else computing_seconds(span.work, self._cluster)
            of_module[key.action] = min(seconds, of_module.get(key.action, math.inf))
            if key.action == "F" and span is not None:
                of_module["saved"] = min(span.end, of_module.get("saved", math.inf))
        # of a backward as a whole and its two parts, those that are there
        return {
            kind: Least(
                of_module.get("F", 0.0),
                min(of_module.get("I", math.inf), of_module.get("B", math.inf)),
                of_module.get("W", 0.0),
                of_module.get("saved", 0.0),
            )
            for kind, of_module in least.items()
        }

    def gib(self, plan: Plan) -> float:
        """GiB of the stage that needs most: states, with activations in flight or the sums of gradients."""
        schedule = schedule_of(plan)
        most, seen = 0.0, set[Any]()
        for part, (forwards, _) in zip(self._program.parts(plan), held_in(schedule), strict=True):
            if (part.content, forwards) not in seen:
                seen.add((part.content, forwards))
                lasting, sums = self._states(plan, part)
                saved = 0.0 if "activations" in plan.offload else min(one.saved for one in self._chunks(plan, part))
                held = max(forwards * saved, sums * (not schedule.reduce_each))
                most = max(most, lasting + held * (1 + self._cluster.memory.fragmentation))
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


def _kind(key: SpanKey) -> Any:
    """Return what tells a module from others whatever stands beside it."""
    words = key.module.split()
    return words[0] if words[0] != "layer" else tuple(word in words for word in ("query", "dense", "recomputed"))


@lru_cache(maxsize=10_000)
def _kinds(model: ModelConfig, part: ModelPart, recomputed: int) -> list[Any]:
    """Return the kinds of the modules of a chunk, of whose layers so many are recomputed in full."""
    layers = [
        (layer == model.query_layer, model.experts is not None and not model.has_experts(layer), place < recomputed)
        for place, layer in enumerate(part.layers)
    ]
    return [START, *["embedding"] * part.first, *layers, *["head"] * part.last, END]
