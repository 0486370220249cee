"""Cost model: the step time of a rank's ledger on a cluster, and the terms it is made of.

The model is additive and physical: matmuls cost time by shape and other operations by bytes, both at least as long as
the kernel launches take on the host; collectives cost latency and bandwidth of the links that their group spans.
All constants are keys of `cluster`. Formulas: Narayanan et al. 2021, sections 2 and 3.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add
from typing import NamedTuple, get_args

from pangu.config.cluster import ClusterConfig, MatmulConfig
from pangu.planning.program import Plan, StepLedger
from pangu.schedule.actions import Durations, Kind
from pangu.schedule.groups import Group, groups_of
from pangu.schedule.ledger import Pass
from pangu.schedule.schedule import Schedule
from pangu.schedule.simulate import chunk_times, makespan
from pangu.schedule.spans import Axis, Collective, Matmul, Replicas, Work
from pangu.schedule.stage_ledger import StageLedger, Window, stage_actions

GIB = 2.0**30
REPLICAS = get_args(Replicas)
"""Axes of the communication with replicas."""
TILE = 128
"""Rows and columns of the tiles that matmuls are cut into."""


class Phase(NamedTuple):
    """Seconds of a piece of work by term, as in `StepTime`; `replicas` has the copies to and from the host, too."""

    compute: float
    tensor: float
    replicas: float
    expert: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Sum of all terms."""
        return sum(self)


_NOTHING = Phase(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class StepTime:
    """Step time in seconds by term, on the stage that has the most work."""

    compute: float
    """Compute of the micro-batches."""
    tensor: float
    """Exposed collectives inside layers, of tensor and context parallelism."""
    pipeline: float
    """Exposed messages between stages."""
    bubble: float
    """Idle time of the schedule (pipeline bubble)."""
    data: float
    """Exposed communication with replicas and the host: gradients, parameters, offloaded tensors."""
    update: float
    """Optimizer update, and the host time of a step."""
    expert: float = 0.0
    """Exposed communication of tokens sent to experts and back."""
    host: float = 0.0
    """Idle time of the device while the host takes longer to launch kernels than the device to run them."""

    @property
    def total(self) -> float:
        """Step time in seconds."""
        return sum(vars(self).values())


def matmul_seconds(product: Matmul, cluster: ClusterConfig) -> float:
    """Return the seconds of a matmul without its kernel launch.

    Compute is charged for whole tiles, the last wave of tiles and the ends of the inner dimension; the time to read and
    write the operands is a lower bound.
    """
    rate, memory = cluster.matmul, cluster.memory
    if product.fused:
        return product.flops / (rate.tflops * 1e12 * rate.attention)
    share = timed_share(rate, product.rows, product.columns, product.depth) if rate.measured else 1.0
    peak = (rate.tflops_fp8 if product.fp8 else None) or rate.tflops
    computing = product.flops * _lost(rate, product) / (peak * 1e12 * rate.efficiency * share)
    operands = product.rows * product.depth + product.depth * product.columns
    moved = operands * (1 if product.fp8 else 2) + 2.0 * product.rows * product.columns
    least = moved * product.batch * product.calls / (memory.gb_s * 1e9 * memory.efficiency)
    return computing if rate.measured else max(computing, least)


def _lost(rate: MatmulConfig, product: Matmul) -> float:
    """Return the slowdown of a matmul compared with a large, well-shaped one of as many operations."""
    tiles = math.ceil(product.rows / TILE) * math.ceil(product.columns / TILE) * product.batch
    lost = tiles * TILE * TILE / (product.rows * product.columns * product.batch)
    # a tile of fp8 starts and finishes no faster
    depth = rate.depth * ((product.fp8 and rate.tflops_fp8) or rate.tflops) / rate.tflops
    lost *= (1 + depth / product.depth) * (1 + rate.waves * rate.units / tiles)
    if product.columns % 8 or product.depth % 8:
        lost *= rate.unaligned
    elif product.columns % 64 or product.depth % 64:
        lost *= 1 + rate.alignment * (1 - math.gcd(product.columns, product.depth, 64) / 64)
    return lost


NEIGHBOURS = 4
"""Number of nearest timed matmuls from which the correction of the model is interpolated."""


@lru_cache(maxsize=100_000)
def timed_share(rate: MatmulConfig, rows: int, columns: int, depth: int) -> float:
    """Return the speedup of a matmul over the model: that of its nearest timed ones by inverse square distance."""

    def distance(entry: tuple[float, float, float, float]) -> float:
        return math.hypot(*(math.log(a / b) for a, b in zip(entry, (rows, columns, depth), strict=False)))

    total = weights = 0.0
    for entry in heapq.nsmallest(NEIGHBOURS, rate.measured, key=distance):
        weight = 1 / (distance(entry) ** 2 + 1e-9)
        modelled = rate.efficiency / _lost(rate, Matmul(int(entry[0]), int(entry[1]), int(entry[2])))
        total, weights = total + weight * math.log(entry[3] / modelled), weights + weight
    return math.exp(total / weights)


def collective_seconds(collective: Collective, group: Group, cluster: ClusterConfig) -> float:
    """Return the seconds of a collective of a group, in rings that use all network interfaces of a node.

    The other groups of the same axis on a node send at the same time, so a group gets a share of the interfaces equal
    to its share of the node's devices.
    """
    if collective.ranks:
        group = Group(collective.ranks, min(collective.ranks, group.inside))
    if group.size <= 1:
        return 0.0
    rounds = 2 if collective.kind == "all_reduce" else 1
    share = 1.0 if collective.kind == "send" else (group.size - 1) / group.size
    nodes = math.ceil(group.size / group.inside)
    link = cluster.inside if nodes == 1 else cluster.between
    timed = timed_seconds(link.measured, collective.kind, group.size, collective.bytes)
    if timed is not None:
        return timed * collective.calls
    # sequential messages: NCCL uses rings, but trees for short all-reduces
    messages = {"send": 1, "all_reduce": 2 * math.ceil(math.log2(group.size))}.get(collective.kind, group.size - 1)
    # one step of a ring leaves each node; a tree waits for its farthest rank
    outside = nodes - 1 if nodes == 1 or collective.kind not in ("send", "all_reduce") else messages
    waits = outside * cluster.between.latency_us + (messages - outside) * cluster.inside.latency_us
    per_gb = share / cluster.inside.gb_s
    if nodes > 1:
        interface = cluster.between.gb_s * cluster.nics / cluster.node  # per device
        if collective.kind == "all_to_all":  # inter-node and intra-node parts overlap
            per_gb = max((group.inside - 1) / cluster.inside.gb_s, (group.size - group.inside) / interface) / group.size
        else:
            per_gb = max(per_gb, share / (interface * group.inside))
    return (waits * 1e-6 + rounds * per_gb * collective.bytes * 1e-9) * collective.calls


@lru_cache(maxsize=100_000)
def timed_seconds(
    table: tuple[tuple[str, int, float, float], ...], kind: str, ranks: int, nbytes: float
) -> float | None:
    """Return the seconds of a collective, interpolated between timed sizes; None if none was timed on `ranks` ranks."""
    count = 2 if kind == "send" else ranks
    points = sorted((size, taken * 1e-6) for *which, size, taken in table if which == [kind, count])
    if not points or nbytes > points[-1][0]:
        return points[-1][1] * nbytes / points[-1][0] if points else None
    place = bisect(points, (nbytes,))
    (low, least), (high, most) = points[max(0, place - 1)], points[place]
    return most if low == high else least + (most - least) * (nbytes - low) / (high - low)


def phase_seconds(work: Work, groups: Mapping[Axis, Group], cluster: ClusterConfig, computing: float = 0.0) -> Phase:
    """Return the time of a piece of work that overlaps `computing` seconds of other compute."""
    hidden, waited = ({"tensor": 0.0, "replicas": 0.0, "expert": 0.0} for _ in range(2))
    for collective in work.collectives:
        group, axis = groups[collective.axis], collective.axis
        term = "replicas" if axis in REPLICAS else "expert" if axis == "expert" else "tensor"
        seconds = collective_seconds(collective, group, cluster)
        hidden[term] += seconds * collective.hidden
        waited[term] += seconds * (1 - collective.hidden)
    hidden["replicas"] += work.host_bytes / (cluster.host_gb_s * 1e9)
    device = sum(matmul_seconds(product, cluster) for product in work.matmuls)
    device += work.bytes / (cluster.memory.gb_s * 1e9 * cluster.memory.efficiency)
    launches = work.launches
    if not cluster.queued:
        device, launches = device + work.sum_bytes / (cluster.host_memory_gb_s * 1e9), launches + work.sums
    # the device is idle until the kernel after a host sync is launched
    compute = started(device, launches * cluster.launch_us * 1e-6, cluster) + work.waits * cluster.launch_us * 1e-6
    everything, busy = sum(hidden.values()), computing + compute
    exposed = max(0.0, everything - busy) + (cluster.overlap - 1) * min(busy, everything)  # overlap slows down both
    added = exposed / everything if everything else 0.0
    return Phase(compute, **{term: waited[term] + added * hidden[term] for term in hidden})


def started(device: float, host: float, cluster: ClusterConfig) -> float:
    """Return the seconds of kernels that compute for `device` seconds and take the host `host` seconds to launch."""
    return max(device, host) if cluster.queued else device + host


def phases_of(
    ledger: StepLedger, groups: Mapping[Axis, Group], cluster: ClusterConfig
) -> list[dict[tuple[Kind, int], Phase]]:
    """Return the time of each action on each chunk, for each stage."""
    spans: dict[int, Phase] = {}
    stages: dict[int, dict[tuple[Kind, int], Phase]] = {}

    def seconds(one: Pass) -> Phase:
        for span in one.spans:
            if id(span) not in spans:
                spans[id(span)] = phase_seconds(span.work, groups, cluster)
        inside = _sum_of(spans[id(span)] for span in one.spans)
        around = Work(collectives=one.collectives, host_bytes=one.fetched)
        sent = phase_seconds(around, groups, cluster, inside.compute).replicas
        return inside._replace(replicas=inside.replicas + sent)

    for stage in ledger.stages:
        if id(stage) not in stages:
            phases = {key: seconds(one) for key, one in stage.passes.items()}
            device = math.fsum(one.total for one in phases.values())
            works = (span.work for one in stage.passes.values() for span in one.spans)
            host = sum((one.operators * cluster.operator_us + one.calls * cluster.call_us) * 1e-6 for one in works)
            # a host is ahead of the device by many kernels, so only the sum over all actions can delay it
            waiting = max(0.0, host / device - 1) if device and cluster.queued else 0.0
            stages[id(stage)] = {key: one._replace(host=waiting * one.total) for key, one in phases.items()}
    return [stages[id(stage)] for stage in ledger.stages]


def _sum_of(phases: Iterable[Phase]) -> Phase:
    return Phase(*map(math.fsum, zip(_NOTHING, *phases, strict=True)))


class StageMemory(NamedTuple):
    """Peak memory of a device in GiB, by purpose."""

    states: float
    """Parameters, gradients and optimizer state."""
    activations: float
    """Activations kept from forward to backward, and the working memory of modules."""
    overhead: float
    """Memory of the device context and libraries."""

    @property
    def total(self) -> float:
        """Peak memory in GiB."""
        return sum(self)


def memory_of(stage: StageLedger, cluster: ClusterConfig) -> StageMemory:
    """Return the peak memory of a stage."""
    states, passing = stage.lasting, stage.peak - stage.lasting
    overhead = cluster.memory.overhead_gib(stage.groups) + cluster.memory.fragmentation * passing / GIB
    return StageMemory(states / GIB, passing / GIB, overhead)


def step_time(ledger: StepLedger, plan: Plan, cluster: ClusterConfig) -> StepTime:
    """Return the time of a step; the layout of the plan defines the communication groups."""
    groups, schedule, m = groups_of(plan.layout, cluster.node), ledger.schedule, plan.micro_batches
    link, end = message_seconds(ledger.message, groups, cluster)
    phases = phases_of(ledger, groups, cluster)
    durations = durations_of(schedule, phases, max(0.0, link - 2 * end), end)
    times = chunk_times(schedule, durations)
    starts, stops = [min(chunks).start for chunks in times], [max(one.stop for one in chunks) for chunks in times]
    whole = makespan(schedule, durations, ledger.extra_micro_batches) if ledger.extra_micro_batches else max(stops)
    sums = [_sum_of(stage_phases.values()) for stage_phases in phases]
    longest = max(range(len(sums)), key=lambda stage: sums[stage].total)
    compute, tensor, replicas, expert, host = (m * term for term in sums[longest])
    busy = m * sums[longest].total
    idle = max(0.0, whole - busy) if schedule.stages > 1 else 0.0  # one stage never waits
    waiting = min(2 * link * schedule.virtual_stages * m, idle)
    last = sum(phase.total for (kind, _), phase in phases[longest].items() if kind is not Kind.FORWARD)
    distinct = {id(stage): stage for stage in ledger.stages}
    data, update = max((_after(stage, groups, cluster, last) for stage in distinct.values()), key=sum)
    ends = [stage.windows(stage_actions(schedule, number)) for number, stage in enumerate(ledger.stages)]
    for windows, idles in zip(zip(*ends, strict=True), (starts, [max(stops) - stop for stop in stops]), strict=True):
        data += max(_exposed(*one, groups, cluster) for one in zip(windows, phases, idles, strict=True))
    # on a CPU host, other stages run while one waits: no core is idle as long as some stage has work
    chunk_seconds = durations.per_chunk(len(schedule.stage_of))
    even = m * (sum(chunk_seconds[Kind.FORWARD]) + sum(chunk_seconds[Kind.BACKWARD])) / schedule.stages
    faster = max(1 / cluster.alone, even / whole)
    parts = (compute, tensor, waiting, idle - waiting, replicas, expert, host)
    compute, tensor, waiting, bubble, replicas, expert, host = (part * faster for part in parts)
    return StepTime(compute, tensor, waiting, bubble, data + replicas, update + cluster.step_us * 1e-6, expert, host)


def message_seconds(sizes: Sequence[int], groups: Mapping[Axis, Group], cluster: ClusterConfig) -> tuple[float, float]:
    """Return the seconds of a message between chunks, and those that a host works on each of its ends."""
    sends = [Collective("send", "pipeline", nbytes) for nbytes in sizes]
    link = sum(collective_seconds(one, groups["pipeline"], cluster) for one in sends) + cluster.message_us * 1e-6
    return link, sum(timed_seconds(cluster.inside.measured, "message", 2, nbytes) or 0.0 for nbytes in sizes)


def durations_of(
    schedule: Schedule, phases: Sequence[Mapping[tuple[Kind, int], Phase]], link: float, end: float = 0.0
) -> Durations:
    """Return the seconds of each chunk's actions; `end`: of sending or receiving a message in one of them."""
    stage_of = schedule.stage_of
    places = [(stage, stage_of[:chunk].count(stage)) for chunk, stage in enumerate(stage_of)]
    ends = [end * sum(other != stage for other in stage_of[max(0, i - 1) : i + 2]) for i, stage in enumerate(stage_of)]
    forward, backward, to_input, to_weight = (
        [phases[stage].get((kind, place), _NOTHING).total for stage, place in places]
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    # a chunk has either a backward pass or both of its parts
    return Durations(list(map(add, forward, ends)), [*map(add, map(add, backward, to_input), ends)], to_weight, link)


def _exposed(
    window: Window,
    phases: Mapping[tuple[Kind, int], Phase],
    idle: float,
    groups: Mapping[Axis, Group],
    cluster: ClusterConfig,
) -> float:
    """Return the seconds that a stage waits for a window's collectives, which also hide behind `idle` seconds."""
    # collectives run one after the other; the i-th of n is needed after i / n of its computation
    needed, sending, waited, sent = 0.0, 0.0, idle, list[Collective]()
    for key, collectives in window:
        computing = 0.0 if key is None else phases[key].total
        for place, each in enumerate(collectives):
            sending += collective_seconds(each, groups[each.axis], cluster)
            waited = max(waited, sending - needed - computing * place / len(collectives))
        needed += computing
        sent += collectives
    return phase_seconds(Work(collectives=tuple(sent)), groups, cluster, sending - waited + idle).total


def _after(
    stage: StageLedger, groups: Mapping[Axis, Group], cluster: ClusterConfig, backward: float
) -> tuple[float, float]:
    """Return a stage's exposed seconds of replica communication next to `backward` seconds, and its update seconds."""
    sent = tuple(one._replace(calls=one.calls * often) for one, often in stage.other_collectives.items())
    iterations = sum(matmul_seconds(product, cluster) for product in stage.update.matmuls)
    waited = phase_seconds(Work(collectives=sent), groups, cluster, backward + iterations).total
    waited += stage.update.host_bytes / (cluster.host_gb_s * 1e9)
    # a host's kernels of activations compute more than they move, those of gradients and states do not
    rate = cluster.memory.gb_s * cluster.memory.efficiency if cluster.queued else cluster.host_memory_gb_s
    device = iterations + stage.update.bytes / (rate * 1e9) + stage.host_update_bytes / (cluster.host_memory_gb_s * 1e9)
    return waited, started(device, stage.update.launches * cluster.launch_us * 1e-6, cluster)
