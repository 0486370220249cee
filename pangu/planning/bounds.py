"""Lower bounds of the step time and peak memory of a layout, cheap enough for thousands of layouts per second.

The bounds use the same measured spans and buffers as the ledger of a step, each module at its least: they leave out
what depends on its neighbors, the bubbles inside a schedule, and messages between stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import sub
from typing import Any, NamedTuple

from pangu.config.cluster import ClusterConfig
from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart
from pangu.pipeline.stages import shards_sums
from pangu.planning.cost import collective_seconds, phase_seconds
from pangu.planning.plan import Plan
from pangu.planning.program import SKETCHED, Program, StagePart, shortest
from pangu.schedule.actions import Kind
from pangu.schedule.buffers import Formats, buffers_of, copied_bytes, lasting_bytes
from pangu.schedule.groups import Group, groups_of
from pangu.schedule.held import most_held
from pangu.schedule.orders import SCHEDULES, reduces_each, splits_backward
from pangu.schedule.spans import END, START, Axis, Collective, Matmul, Span, SpanKey, Trace, Work
from pangu.schedule.stage_ledger import HIDDEN
from pangu.topology.layout import Coordinates, Layout
from pangu.zero.grouping import Sharding
from pangu.zero.stage_parameters import FlatNumbers, place_stage

_GIB = 2.0**30
_COPIED = 0.9
"""Lower bound of the fraction of a layer's saved bytes that offloading copies: small tensors stay on the device."""
_SMALL = 2**20
"""Saved bytes of a layer up to which small tensors may be all of it."""


class Least(NamedTuple):
    """Lower bounds of one module or chunk for one micro-batch, whichever modules are next to it."""

    forward: float = 0.0
    back: float = 0.0
    """Seconds of the backward pass, or of its input gradient (dgrad) if that is computed separately."""
    weight: float = 0.0
    """Seconds of the weight gradient (wgrad), where it is computed separately."""
    saved: float = 0.0
    """Bytes kept on the device from the forward to the backward pass."""
    in_transit: float = 0.0
    """Bytes of one layer that are on the device until they are copied to the host."""


class Element(NamedTuple):
    """Lower bounds per weight element of a stage."""

    lasting: float
    """Persistent bytes."""
    sum: float
    """Bytes of the accumulated gradient, if it is allocated in the step and stays until the end of the step."""
    each: float
    """Seconds of communication with replicas per micro-batch."""
    once: float
    """Seconds of communication with replicas once per step."""
    copies: float
    """Seconds of copies between device and host per step."""


LeastByKind = dict[str, tuple[Least, Least]]
"""Mapping from the kind of a module to its bounds: with one backward pass, and with dgrad and wgrad separate."""


class LayoutBounds:
    """Lower bounds of the step time and peak memory of layouts."""

    def __init__(self, program: Program, cluster: ClusterConfig) -> None:
        """Create the bounds of a program's layouts on a cluster."""
        self._program, self._cluster, self._formats = program, cluster, Formats.of(program.config)
        self._modules: dict[int, tuple[Trace, LeastByKind]] = {}
        self._sizes: dict[Any, LeastByKind] = {}
        self._chunks: dict[Any, list[Least]] = {}
        self._lines: dict[Any, list[tuple[int, float, float, float]]] = {}
        self._of_module: dict[Any, dict[str, Counter[tuple[bool, bool]]]] = {}
        self._numels: dict[Any, Counter[tuple[bool, bool]]] = {}
        self._elements: dict[Any, Element] = {}
        self._slopes: dict[Any, float] = {}
        self._hidden = HIDDEN * program.config.parallel.overlap

    def seconds(self, plan: Plan) -> float:
        """Return a lower bound of the step time in seconds: compute, and replica communication that it cannot hide.

        A stage starts when the first micro-batch has passed the chunks before its first one. After the last input
        gradient of the stage, the last micro-batch goes back through those chunks, while the stage computes its weight
        gradients if they are separate. The last micro-batch to pass a chunk forward has to pass all others, too.
        """
        key = (
            self._program.module_plan(plan),
            plan.recomputed,
            plan.schedule,
            plan.layers,
            plan.pipeline,
            self._program.is_prepared(plan),
        )
        if key not in self._lines:
            self._lines[key] = list(self._of_stages(plan))
        sent = [*(self._sent(plan, part) for part in self._program.cut(plan).distinct), (0.0, 0.0, 0.0)]
        m, longest, last = plan.micro_batches, 0.0, 0.0
        for place, fixed, each, busy in self._lines[key]:
            of_micro_batch, once, copies = sent[place]
            longest = max(longest, fixed + m * (each + self._waiting(of_micro_batch, busy)))
            last = max(last, self._waiting(once, busy) + copies)
        return longest + last

    def _waiting(self, sending: float, busy: float) -> float:
        """Return the least exposed seconds of communication that runs while stages compute for `busy` seconds."""
        return (1 - self._hidden) * sending + max(0.0, self._hidden * sending - busy)

    def _of_stages(self, plan: Plan) -> Iterator[tuple[int, float, float, float]]:
        """Yield kind of stage, fixed seconds, seconds per micro-batch, and the stage's own compute per micro-batch."""
        cut, apart = self._program.cut(plan), splits_backward(plan.schedule)
        times = [self._least(plan, part) for part in cut.distinct]
        sums = [[sum(column) for column in zip(*chunks, strict=True)] for chunks in times]
        seen, forwards, backs, most = [0] * plan.pipeline, 0.0, 0.0, 0.0
        for stage in cut.stage_of:
            place = cut.alike[stage]
            if not seen[stage]:
                forward, back, weight, *_ = sums[place]
                busy = forward + back + weight
                if apart:
                    yield place, forwards, busy, busy
                    yield place, forwards + backs, forward + back, busy
                else:
                    yield place, forwards + backs, busy, busy
            one = times[place][seen[stage]]
            forwards, backs, most = forwards + one.forward, backs + one.back, max(most, one.forward)
            seen[stage] += 1
        yield -1, forwards + backs - most, most, math.inf

    def _least(self, plan: Plan, part: StagePart) -> list[Least]:
        apart, offload = splits_backward(plan.schedule), "activations" in plan.offload
        trace = None if offload else self._program.known(plan, part)  # offloaded layers free their predecessors
        key = self._program.module_plan(plan), apart, plan.recomputed, part.content, trace is None
        if key not in self._chunks:
            least = self._sketched(plan) if trace is None else self._measured(plan, trace)
            chunks = [(START, *kinds.all, END) for kinds in self._program.kinds(plan, part)]
            modules = [[_find(least, kind)[apart] for kind in chunk] for chunk in chunks]
            found = [Least(*map(sum, zip(*chunk, strict=True))) for chunk in modules]
            if offload:
                found = [self._offloaded(*of_chunk) for of_chunk in zip(found, modules, chunks, strict=True)]
            self._chunks[key] = found
        return self._chunks[key]

    def _offloaded(self, chunk: Least, modules: Sequence[Least], kinds: Sequence[str]) -> Least:
        """Return the bounds of a chunk all of whose layers but the last one are copied to the host and back."""
        *moved, last = (module.saved for module, kind in zip(modules, kinds, strict=True) if kind.startswith("layer"))
        seconds = _COPIED * sum(size for size in moved if size > _SMALL) / (self._cluster.host_gb_s * 1e9)
        forward, weight = max(chunk.forward, seconds), max(chunk.weight, seconds - chunk.back)
        kept = chunk.saved - sum(moved)
        # a layer's copies end while the next one computes; by then, modules behind the layers have saved nothing
        in_transit = max(0.0, min(moved, default=0.0) - (kept - last))
        return Least(forward, chunk.back, weight, kept, in_transit)

    def _measured(self, plan: Plan, trace: Trace) -> LeastByKind:
        """Return the lower bounds of each kind of module: the minimum over its spans with all neighboring modules."""
        if id(trace) not in self._modules:
            groups = groups_of(plan.layout, self._cluster.node)  # all plans of a trace share these groups
            spans = ((key, span.work, span.end) for key, span in trace.spans.items() if span is not None)
            self._modules[id(trace)] = trace, self._by_kind(spans, groups)
        return self._modules[id(trace)][1]

    def _sketched(self, plan: Plan) -> LeastByKind:
        """Return the lower bounds of each kind of module if only micro-batches of other sizes have been measured."""
        module_plan = self._program.module_plan(plan)
        if module_plan not in self._sizes:
            one, two = self._program.sketched(plan)
            both = [(key, one.spans.get(key), span) for key, span in two.spans.items()]
            at = ((key, _at(plan.micro_size, a, b)) for key, a, b in both if a is not None and b is not None)
            spans = ((key, *of_key) for key, of_key in at)
            self._sizes[module_plan] = self._by_kind(spans, groups_of(plan.layout, self._cluster.node))
        return self._sizes[module_plan]

    def _by_kind(self, spans: Iterable[tuple[SpanKey, Work, float]], groups: Mapping[Axis, Group]) -> LeastByKind:
        """Return the lower bounds per kind of module from spans, each given with its work and the bytes it keeps."""
        found: dict[str, dict[str, float]] = {}
        for key, work, kept in spans:
            of_kind = found.setdefault(key.module, {})
            seconds = phase_seconds(work, groups, self._cluster).total
            of_kind[key.action] = min(seconds, of_kind.get(key.action, math.inf))
            if key.action == Kind.FORWARD:
                of_kind["saved"] = min(kept, of_kind.get("saved", math.inf))
        least = {}
        for kind, of_kind in found.items():
            forward, whole, back, weight, saved = (of_kind.get(key, 0.0) for key in ("F", "B", "I", "W", "saved"))
            # if backward was measured in one part, its total is known, but not the input gradient's share
            apart = (back, weight) if "I" in of_kind or "W" in of_kind else (0.0, whole)
            least[kind] = Least(forward, whole, 0.0, saved), Least(forward, *apart, saved)
        return least

    def gib(self, plan: Plan) -> float:
        """Return a lower bound of peak memory in GiB: states, plus activations in flight or accumulated gradients."""
        cut, most, forwards = self._program.cut(plan), 0.0, Counter[int]()
        held_by = most_held(plan.schedule, plan.pipeline, plan.virtual, shortest(plan))
        for place, (held, _) in zip(cut.alike, held_by, strict=True):
            forwards[place] = max(forwards[place], held)
        for place, part in enumerate(cut.distinct):
            lasting, sums = self._states(plan, part)
            chunks = self._least(plan, part)
            saved, in_transit = min(one.saved for one in chunks), min(one.in_transit for one in chunks)
            passing = max(forwards[place] * saved + in_transit, sums)
            most = max(most, lasting + passing * (1 + self._cluster.memory.fragmentation))
        return most / _GIB + self._cluster.memory.overhead_gib(plan.axes)

    def _states(self, plan: Plan, part: StagePart) -> tuple[float, float]:
        """Return the persistent bytes of a stage, and the bytes of gradient sums that are allocated each step."""
        lasting = sums = 0.0
        for kind, numel in self._numel(plan, part).items():
            one = self._element(plan, *kind)
            lasting, sums = lasting + one.lasting * numel, sums + one.sum * numel
        return lasting, sums

    def _sent(self, plan: Plan, part: StagePart) -> tuple[float, float, float]:
        """Return seconds of replica communication per micro-batch and per step, and of device-host copies per step."""
        each = once = copies = 0.0
        for kind, numel in self._numel(plan, part).items():
            one = self._element(plan, *kind)
            each, once, copies = each + one.each * numel, once + one.once * numel, copies + one.copies * numel
        return each, once, copies

    def _numel(self, plan: Plan, part: StagePart) -> Counter[tuple[bool, bool]]:
        """Return the elements of a stage on a rank by (belongs to experts that the layout splits, is trained)."""
        ranks = plan.tensor, plan.sequence, plan.expert, plan.expert_tensor
        if ranks not in self._of_module:
            self._of_module[ranks] = _numels(self._program.config, plan.layout)
        if (ranks, part.content) not in self._numels:
            of_module, total = self._of_module[ranks], Counter[tuple[bool, bool]]()
            for module in _modules(part):
                total.update(of_module[module])
            self._numels[ranks, part.content] = total
        return self._numels[ranks, part.content]

    def _element(self, plan: Plan, expert: bool, trained: bool) -> Element:
        which = plan.zero, plan.zero_group, plan.data, plan.context, plan.offload, plan.expert, plan.expert_tensor
        key = (*which, plan.tensor, plan.pipeline, plan.schedule, expert, trained)
        if key not in self._elements:
            formats, numel = self._formats, 2**30
            sharding = Sharding.of(plan.layout, Coordinates(0, 0, 0), plan.offload, expert)
            flat = FlatNumbers(0, 0, ("",), numel, numel, sharding, trained)
            reduce_each = shards_sums(plan.layout) and reduces_each(plan.schedule)
            buffers = buffers_of(flat, 0, formats, reduce_each)
            lasting = lasting_bytes(flat, (), formats)
            moments = 2 * formats.moments * numel / sharding.size * (trained and not flat.main_on_host)
            gather, reduction = (self._least_sent(plan, sent) for sent in (buffers.gathers, buffers.reductions))
            comes = buffers.weights > 0
            often = comes and not SCHEDULES[plan.schedule].two_phases
            each = gather * often + reduction * reduce_each
            once = gather * (trained or comes) * (not often) + reduction * (not reduce_each)
            host_bytes = copied_bytes(flat, formats)
            self._elements[key] = Element(
                (lasting + moments) / numel,
                buffers.total / numel * (not reduce_each),
                each / numel,
                once / numel,
                host_bytes / numel / (self._cluster.host_gb_s * 1e9),
            )
        return self._elements[key]

    def _least_sent(self, plan: Plan, sent: Sequence[Collective]) -> float:
        """Return the least seconds of collectives, at the lowest time per byte of their kind and group."""
        groups, cluster, seconds = groups_of(plan.layout, self._cluster.node), self._cluster, 0.0
        for one in sent:
            group = groups[one.axis]
            key = one.kind, group
            if key not in self._slopes:
                timed = {size for link in (cluster.inside, cluster.between) for *_, size, _ in link.measured}
                # between two timed sizes, the time per byte is lowest at one of the two
                times = [collective_seconds(one._replace(bytes=size), group, cluster) / size for size in timed]
                ends = (collective_seconds(one._replace(bytes=size), group, cluster) for size in (1e9, 0.0))
                self._slopes[key] = min(times) if times else sub(*ends) / 1e9
            seconds += self._slopes[key] * one.bytes
        return seconds


def _modules(part: StagePart) -> Iterator[str]:
    chunks = part.chunks.values()
    yield from ["embedding"] * any(chunk.first for chunk in chunks)
    yield from (f"layers.{layer}" for chunk in chunks for layer in chunk.layers)
    yield from ["head"] * any(chunk.last for chunk in chunks)


def _numels(config: RunConfig, layout: Layout) -> dict[str, Counter[tuple[bool, bool]]]:
    """Return the elements of each module on a rank; a matrix that two modules share counts for the first."""
    whole = ModelPart.whole(config.model)
    table, uses, _ = place_stage(config, layout, Coordinates(0, 0, 0), {0: whole})
    seen, numels = set[str](), dict[str, Counter[tuple[bool, bool]]]()
    for module, names in uses[0].items():
        numels[module] = Counter()
        for name in (name for name in names if name not in seen):
            seen.add(name)
            numels[module][table.is_expert(name), table.is_trained(name)] += math.prod(table.shapes[name])
    return numels


def _find(least: LeastByKind, kind: str) -> tuple[Least, Least]:
    """Return the bounds of a kind of module, or of a kind that takes no more."""
    kind = " ".join(word for word in kind.split() if word not in ("follows", "second", "resident"))
    if kind in least:
        return least[kind]
    plain = kind.replace(" recomputed", "").replace(" unreached", "")
    whole, apart = least.get(plain) or least.get(f"{plain} unreached") or (Least(), Least())
    return whole._replace(saved=0.0), apart._replace(saved=0.0)


_ENDLESS = 2**20
"""Rows, columns and depth of a matmul whose tiles lose nothing at the edges."""


def _at(size: int, one: Span, two: Span) -> tuple[Work, float]:
    """Return the least work of a span and the bytes it keeps, for micro-batches of `size` sequences.

    Extrapolates from one and two sequences: memory traffic is linear; matmuls and messages scale with the number of
    tokens, matmuls without the loss at the edges of their tiles.
    """
    if size <= len(SKETCHED):
        return (one, two)[size - 1].work, (one, two)[size - 1].end
    work, times, more = two.work, size / 2, size - 2
    matmuls = tuple(
        matmul._replace(calls=times * matmul.calls)
        if matmul.fused
        else Matmul(*(_ENDLESS,) * 3, calls=times * matmul.flops / (2.0 * _ENDLESS**3), fp8=matmul.fp8)
        for matmul in work.matmuls
    )
    sent = tuple(sent._replace(bytes=times * sent.bytes) for sent in work.collectives)
    nbytes = work.bytes + more * max(0.0, work.bytes - one.work.bytes)
    host_bytes = work.host_bytes + more * max(0.0, work.host_bytes - one.work.host_bytes)
    launches, waits = min(work.launches, one.work.launches), min(work.waits, one.work.waits)
    return Work(matmuls, nbytes, launches, sent, host_bytes, waits), two.end + more * (two.end - one.end)
