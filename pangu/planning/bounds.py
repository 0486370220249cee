"""Lower bounds of the step time and peak memory of a layout, cheap enough for thousands of layouts per second.

The bounds use the same measured spans and buffers as the ledger of a step, each module at its least: they leave out
what depends on its neighbors. Only those from a simulation have bubbles inside a schedule, and messages between stages.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from operator import mul
from typing import Any, NamedTuple

from pangu.config.cluster import ClusterConfig
from pangu.models.parameters import ModelPart, parameters_by_module
from pangu.pipeline.stages import cut, layer_counts, shards_sums
from pangu.planning.cost import GIB, collective_seconds, message_seconds, phase_seconds
from pangu.planning.program import Plan, Program, StagePart, configured, schedule_of, shortest
from pangu.schedule.actions import Durations, Kind
from pangu.schedule.buffers import buffers_of, copied_bytes, lasting_bytes
from pangu.schedule.groups import groups_of
from pangu.schedule.in_flight import peak_in_flight
from pangu.schedule.orders import SCHEDULES, reduces_each, splits_backward
from pangu.schedule.schedule import chunk_stages
from pangu.schedule.simulate import ChunkTimes, chunk_times, makespan
from pangu.schedule.spans import END, START, Collective, Trace
from pangu.schedule.stage_ledger import HIDDEN, message_bytes
from pangu.topology.layout import Coordinates
from pangu.zero.grouping import Sharding
from pangu.zero.stage_parameters import FlatSpec, place_stage
from pangu.zero.states import Formats


class Least(NamedTuple):
    """Lower bounds of one module or chunk for one micro-batch, whichever modules are next to it."""

    forward: float = 0.0
    back: float = 0.0
    """Seconds of the backward pass, or of its input gradient (dgrad) if that is computed separately."""
    weight: float = 0.0
    """Seconds of the weight gradient (wgrad), where it is computed separately."""
    saved: float = 0.0
    """Bytes kept on the device from the forward to the backward pass."""


class Weights(NamedTuple):
    """Lower bounds of some weights of a stage, in bytes, and in seconds of communication with replicas and the host."""

    lasting: float = 0.0
    """Persistent bytes."""
    sum: float = 0.0
    """Bytes of the accumulated gradient, if it is allocated in the step and stays until the end of the step."""
    each: float = 0.0
    """Seconds of communication with replicas per micro-batch."""
    gathered: float = 0.0
    """Seconds in which updated weights are gathered once per step."""
    reduced: float = 0.0
    """Seconds in which gradients are reduced once per step."""
    copies: float = 0.0
    """Seconds of copies between device and host per step."""


class LayoutBounds:
    """Lower bounds of the step time and peak memory of layouts."""

    def __init__(self, program: Program, cluster: ClusterConfig) -> None:
        """Create the bounds of a program's layouts on a cluster."""
        self._program, self._cluster, self._formats = program, cluster, Formats.of(program.config)
        self._kinds: dict[tuple[int, bool], tuple[Trace, dict[str, Least]]] = {}
        self._chunks: dict[Any, list[Least]] = {}
        self._lines: dict[Any, dict[Any, float]] = {}
        self._runs: dict[Any, tuple[float, float, list[list[ChunkTimes]]]] = {}
        self._stages: dict[Plan, list[tuple[Weights, list[Weights]]]] = {}
        self._parameters: dict[Any, dict[str, tuple[tuple[bool, bool], int]]] = {}
        self._numels: dict[Any, list[Counter[tuple[bool, bool]]]] = {}
        self._elements: dict[Any, Weights] = {}
        self._shown = 1 - HIDDEN * program.config.parallel.overlap

    def seconds(self, plan: Plan) -> float:
        """Return a lower bound of the step time in seconds: compute, and replica communication that it cannot hide.

        A stage starts when the first micro-batch has passed the chunks before its first one. After the last input
        gradient of the stage, the last micro-batch goes back through those chunks, while the stage computes its weight
        gradients if they are separate. The last micro-batch to pass a chunk forward has to pass all others, too.
        """
        modules = self._program.module_plan(plan), self._program.is_prepared(plan)
        key = (*modules, plan.recompute, plan.schedule, plan.layers, plan.pipeline, plan.virtual_stages)
        if key not in self._lines:  # of stages alike the last one begins latest
            self._lines[key] = {(place, *work): fixed for fixed, place, *work in self._of_stages(plan)}
        weights, longest, last = [*self._weights(plan), (Weights(), [])], 0.0, 0.0
        for (place, each, busy), fixed in self._lines[key].items():
            sent = weights[place][0]
            waiting = max(self._shown * sent.each, sent.each - busy)
            longest = max(longest, fixed + plan.micro_batches * (each + waiting))
            last = max(last, self._shown * (sent.gathered + sent.reduced) + sent.copies)
        return (longest + last) / self._cluster.alone  # bounds assume that no core is shared

    def _of_stages(self, plan: Plan) -> Iterator[tuple[float, int, float, float]]:
        """Yield fixed seconds, kind of stage, seconds per micro-batch, and the stage's own compute per micro-batch."""
        parts, apart = self._program.cut(plan), splits_backward(plan.schedule)
        times = [self._least(plan, part) for part in parts]
        places = {stage: place for place, part in enumerate(parts) for stage in part.stages}
        seen, forwards, backs, most = [0] * plan.pipeline, 0.0, 0.0, 0.0
        for stage in chunk_stages(plan.schedule, plan.pipeline, plan.virtual_stages):
            place = places[stage]
            if not seen[stage]:
                forward, back, weight, _ = map(sum, zip(*times[place], strict=True))
                busy = forward + back + weight
                if apart:
                    yield forwards, place, busy, busy
                yield forwards + backs, place, forward + back if apart else busy, busy
            one = times[place][seen[stage]]
            forwards, backs, most = forwards + one.forward, backs + one.back, max(most, one.forward)
            seen[stage] += 1
        yield forwards + backs - most, -1, most, math.inf

    def scheduled_seconds(self, plan: Plan, enough: float) -> float:
        """Return `seconds` of a layout with measured modules if above `enough`, else a tighter bound by simulation.

        The first chunk waits for its updated weights. The gradients of a chunk, and of those that end later on its
        stage, are sent after the last backward pass of the chunk begins. Further micro-batches may fill bubbles.
        """
        if (seconds := self.seconds(plan)) > enough:
            return seconds
        module = self._program.module_plan(plan)
        key = module, plan.recompute, plan.schedule, plan.pipeline, plan.virtual_stages, plan.layers, plan.micro_batches
        if key not in self._runs:
            self._runs[key] = self._simulated(plan)
        (first, more, times), weights = self._runs[key], self._weights(plan)
        gathered, reduced, copies = map(max, zip(*(total[-3:] for total, _ in weights), strict=True))
        stop = max(one.stop for stage in times for one in stage) + self._shown * reduced
        for part, (_, chunks) in zip(self._program.cut(plan), weights, strict=True):
            for stage in part.stages:
                sent = 0.0
                for time, chunk in sorted(zip(times[stage], chunks, strict=True), key=lambda one: -one[0].last):
                    sent += chunk.reduced
                    stop = max(stop, time.last + sent)
        start = max(weights[0][1][0].gathered - first, self._shown * gathered)
        return max(seconds, (start + stop + more + copies) / self._cluster.alone)

    def _simulated(self, plan: Plan) -> tuple[float, float, list[list[ChunkTimes]]]:
        """Return the least seconds of the first forward pass and of further micro-batches, and the chunks' times."""
        schedule, cuts, config = schedule_of(plan), self._program.cut(plan), configured(self._program.config, plan)
        least = {stage: self._least(plan, part) for part in cuts for stage in part.stages}
        works = [least[stage][schedule.stage_of[:chunk].count(stage)] for chunk, stage in enumerate(schedule.stage_of)]
        forward, back, weight, _ = zip(*works, strict=True)
        link, end = message_seconds(message_bytes(config), groups_of(plan.layout, self._cluster.node), self._cluster)
        timed = schedule, Durations(forward, back, weight, max(0.0, link - 2 * end))
        more = makespan(*timed, plan.micro_batches - schedule.micro_batches) - makespan(*timed)
        return forward[0], more, chunk_times(*timed)

    def balanced(self, plan: Plan) -> Plan:
        """Return a layout with the layers of each chunk that balance the measured time of modules instead of FLOPs."""
        whole = self._program.module_plan(plan)._replace(recompute=plan.recompute)
        least = self._by_kind(plan, self._program.sketched(plan)[0][-1], splits_backward(plan.schedule))
        (kinds,) = self._program.kinds(whole, *self._program.cut(whole))
        embedding, first, *costs = (sum(_find(least, kind)[:3]) for kind in kinds if kind != "position_bias")
        model, now = self._program.config.model, self._program.layers(plan)
        layers = layer_counts(model, cut(model, len(now), costs=[embedding + first, *costs]))
        return plan if layers == now else plan._replace(layers=layers)

    def _least(self, plan: Plan, part: StagePart) -> list[Least]:
        apart, offload = splits_backward(plan.schedule), "activations" in plan.offload
        known = self._program.known(plan, part)
        key = self._program.module_plan(plan), apart, plan.recompute, part.content, known is None
        if key not in self._chunks:
            # larger micro-batches are at least as efficient: one of a share of their size takes at least that share
            traces, share = ([known], 1.0) if known else self._program.sketched(plan)
            least, *offloaded = (self._by_kind(plan, trace, apart) for trace in traces)
            for other in offloaded:
                least = {f"{kind} resident": one for kind, one in least.items()} | other
            chunks = [(START, *kinds, END) for kinds in self._program.kinds(plan, part)]
            modules = ((_find(least, kind) for kind in chunk) for chunk in chunks)
            found = (Least(*(share * sum(one) for one in zip(*chunk, strict=True))) for chunk in modules)
            # most of what an offloaded layer saves is on the host, and each layer frees its predecessor
            self._chunks[key] = [one._replace(saved=0.0) for one in found] if offload else list(found)
        return self._chunks[key]

    def _by_kind(self, plan: Plan, trace: Trace, apart: bool) -> dict[str, Least]:
        """Return the lower bounds of each kind of module: the minimum over its spans with all neighboring modules."""
        if (id(trace), apart) in self._kinds:
            return self._kinds[id(trace), apart][1]
        groups = groups_of(plan.layout, self._cluster.node)  # all plans of a trace share these groups
        found: dict[str, dict[str, float]] = {}
        for name, span in trace.spans.items():
            if span is None:
                continue
            kind_times = found.setdefault(name.module, {})
            # a backward pass in two parts adds weight gradients to their sums by the matmuls
            work = replace(span.work, sums=0.0, sum_bytes=0.0) if span.work.sums else span.work
            seconds = phase_seconds(work, groups, self._cluster).total
            kind_times[name.action] = min(seconds, kind_times.get(name.action, math.inf))
            if name.action == Kind.FORWARD:
                kind_times["saved"] = min(span.end, kind_times.get("saved", math.inf))
        least = {}
        for kind, kind_times in found.items():
            forward, whole, back, weight, saved = (kind_times.get(name, 0.0) for name in ("F", "B", "I", "W", "saved"))
            if not apart:
                back, weight = whole, 0.0
            elif kind_times.keys().isdisjoint("IW"):  # measured in one part: the input gradient's share is not known
                weight = whole
            least[kind] = Least(forward, back, weight, saved)
        self._kinds[id(trace), apart] = trace, least
        return least

    def gib(self, plan: Plan) -> float:
        """Return a lower bound of peak memory in GiB: states, plus activations in flight or accumulated gradients."""
        most, held = 0.0, peak_in_flight(plan.schedule, plan.pipeline, plan.virtual_stages, shortest(plan))
        for part, (weights, _) in zip(self._program.cut(plan), self._weights(plan), strict=True):
            saved = [one.saved for one in self._least(plan, part)]
            passing = max(weights.sum, *(sum(map(mul, held[stage].chunks, saved)) for stage in part.stages))
            most = max(most, weights.lasting + passing * (1 + self._cluster.memory.fragmentation))
        return most / GIB + self._cluster.memory.overhead_gib(plan.layout.axes)

    def _weights(self, plan: Plan) -> list[tuple[Weights, list[Weights]]]:
        """Return the lower bounds of all weights of each kind of stage, and of those of its chunks."""
        alike = plan._replace(recompute="none", micro_size=1, micro_batches=1)
        if alike not in self._stages:
            self._stages[alike] = [self._of_stage(alike, part) for part in self._program.cut(plan)]
        return self._stages[alike]

    def _of_stage(self, plan: Plan, part: StagePart) -> tuple[Weights, list[Weights]]:
        config, ranks = self._program.config, (plan.tensor, plan.sequence, plan.expert, plan.expert_tensor)
        if ranks not in self._parameters:
            table, _ = place_stage(config, plan.layout, Coordinates(0, 0, 0), {0: ModelPart.full(config.model)})
            kinds = {name: (table.is_expert(name), table.is_trained(name)) for name in table.shapes}
            self._parameters[ranks] = {name: (kinds[name], math.prod(shape)) for name, shape in table.shapes.items()}
        numels = self._numels.setdefault((ranks, part.content), [])
        if not numels:  # a matrix that two modules of a stage share counts once
            names, left = tuple(self._parameters[ranks]), dict(self._parameters[ranks])
            for chunk in part.chunks.values():
                numels.append(Counter())
                own = chain.from_iterable(parameters_by_module(config.model, names, chunk).values())
                for kind, numel in filter(None, (left.pop(name, None) for name in own)):
                    numels[-1][kind] += numel
        elements = {kind: self._element(plan, *kind) for counts in numels for kind in counts}
        weighted = ([[count * one for one in elements[kind]] for kind, count in counts.items()] for counts in numels)
        chunks = [Weights(*map(sum, zip(*kinds, strict=True))) for kinds in weighted]
        return Weights(*map(sum, zip(*chunks, strict=True))), chunks

    def _element(self, plan: Plan, expert: bool, trained: bool) -> Weights:
        """Return the lower bounds per weight element."""
        which = plan.zero, plan.zero_group, plan.data, plan.context, plan.offload, plan.expert, plan.expert_tensor
        key = (*which, plan.tensor, plan.pipeline, plan.schedule, expert, trained)
        if key not in self._elements:
            formats, numel = self._formats, 2**30
            sharding = Sharding.of(plan.layout, Coordinates(0, 0, 0), plan.offload, expert)
            flat = FlatSpec(0, 0, ("",), numel, numel, sharding, trained)
            reduce_each = shards_sums(plan.layout) and reduces_each(plan.schedule)
            buffers = buffers_of(flat, 0, formats, reduce_each)
            moments = formats.matrix_moments * formats.moments * (trained and not flat.main_on_host)
            gather, reduction = (self._least_sent(plan, sent) for sent in (buffers.gathers, buffers.reductions))
            comes = buffers.weights > 0
            often = comes and not SCHEDULES[plan.schedule].two_phases
            kind_sums = (
                lasting_bytes(flat, (), formats) + moments * numel / sharding.size,
                buffers.total * (not reduce_each),
                gather * often + reduction * reduce_each,
                gather * (trained and not comes),
                reduction * (not reduce_each),
                copied_bytes(flat, formats) / (self._cluster.host_gb_s * 1e9),
            )
            self._elements[key] = Weights(*(one / numel for one in kind_sums))
        return self._elements[key]

    def _least_sent(self, plan: Plan, sent: Sequence[Collective]) -> float:
        """Return the least seconds of collectives, at the lowest time per byte of their kind and group."""
        groups, cluster, seconds = groups_of(plan.layout, self._cluster.node), self._cluster, 0.0
        timed = {size for link in (cluster.inside, cluster.between) for *_, size, _ in link.measured}
        for one in sent:
            resized = {size: one._replace(bytes=size) for size in timed or (0.0, 1e9)}
            taken = {size: collective_seconds(each, groups[one.axis], cluster) for size, each in resized.items()}
            # between two timed sizes, the time per byte is lowest at one of the two
            per_byte = min(taken[size] / size for size in timed) if timed else (taken[1e9] - taken[0.0]) / 1e9
            seconds += per_byte * one.bytes
        return seconds


def _find(least: dict[str, Least], kind: str) -> Least:
    """Return the bounds of a kind of module, or of a kind that takes no more."""
    plain = kind.replace(" follows", "").replace(" second", "")
    if kind in least or plain in least:
        return least.get(kind) or least[plain]
    plain = plain.replace(" recomputed", "").replace(" unreached", "")
    return (least.get(plain) or least.get(f"{plain} unreached") or Least())._replace(saved=0.0)
