"""Search for the fastest layouts of a model on a cluster that fit into device memory.

All layouts are enumerated; those ruled out by memory or by the configuration's own checks are counted by reason. The
rest are measured and costed in the order of a lower bound of their time, until no bound is below the worst of the
wanted layouts: branch and bound, so the result is optimal over all layouts. The fastest few are then carried out in a
dry run, which decides whether they fit.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from heapq import heapify, heappop, heappush, nsmallest
from itertools import count, product
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pangu.common.errors import ConfigError, Problem
from pangu.config.cluster import ClusterConfig
from pangu.config.layout_checks import layout_problems
from pangu.config.parallelism import holds_groups
from pangu.config.schema import RunConfig
from pangu.config.suggest import divisors
from pangu.dryrun.roles import kept_workers, measured_gib
from pangu.planning.bounds import LayoutBounds
from pangu.planning.cost import StageMemory, StepTime, memory_of, step_time
from pangu.planning.program import CONTEXT, Plan, Program, configured, shortest
from pangu.schedule import orders
from pangu.schedule.in_flight import peak_in_flight
from pangu.topology.experts import ExpertLayout
from pangu.topology.layout import Coordinates
from pangu.zero.choices import STAGES, can_offload, worth_trying

TOO_LARGE = "does not fit into a device's memory"
CHUNKS = (2, 4)
"""Numbers of chunks a matmul is split into, tried for the `CUT` best layouts."""
KINDS = (("gather", 1), ("ring", 1), ("ring", 2), ("ring", 4), ("ring", 8), ("ulysses", 1))
"""Values of `CONTEXT`, the exchange between ranks that share sequences, tried for them too."""
CUT = 10
OFFLOADED: tuple[Literal["optimizer", "activations", "parameters"], ...] = ("optimizer", "activations", "parameters")
"""Kinds of tensors that may be offloaded to host memory, tried where a layout does not fit."""
LONG = 16_384
"""Sequence length in tokens from which a search considers context parallelism."""
LARGEST_MICRO_SIZE = 32
"""Largest micro-batch that a search tries; it tries all that divide the batch."""
VIRTUAL = (2, 3, 4, 6, 8)
AHEAD = 8
"""Number of layouts that are measured together: more keep more cores busy, but measure more that is not needed."""
ALIKE = 1000
"""Number of next layouts of which those with modules like one of the `AHEAD` are measured in the same dry run."""
CONFIRMED = 3
"""Number of fastest layouts that are tried with other ZeRO groups, ZeRO 0 and buckets, and carried out in a dry run."""
BUCKETS = (64, 128, 256, 512, 1024)
"""Sizes of buckets in MiB, tried for these."""


class Candidate(NamedTuple):
    """Candidate layout with its predicted step time and peak memory."""

    plan: Plan
    time: StepTime
    memory: tuple[StageMemory, ...]
    """Predicted memory of each stage."""
    measured: float | None = None
    """Peak memory in GiB over all stages, measured in a dry run; None if the layout was not dry-run."""

    @property
    def peak_gib(self) -> float:
        """Peak memory in GiB of the stage that needs the most."""
        return max(stage.total for stage in self.memory) if self.measured is None else self.measured


@dataclass(frozen=True)
class SearchResult:
    """Result of a search: the best layouts, and the reasons why others were rejected."""

    best: list[Candidate]
    """Best layouts, fastest first."""
    others: list[Candidate]
    """Other layouts that were costed and fit, fastest first."""
    refused: Counter[str]
    """Number of rejected layouts for each reason."""
    layouts: int
    """Number of layouts that pass the checks, without the variants that keep less on the device."""
    costed: int
    """Number of layouts that were costed; the others do not fit, or cannot be among the best."""
    smallest: Candidate | None
    """Layout that needs the least memory by its lower bound, if none fits."""


class Space(NamedTuple):
    """Search space: program, cluster and fixed fields."""

    program: Program
    cluster: ClusterConfig
    config: RunConfig
    fixed: Mapping[str, Any]
    """Plan fields with values given by the user."""

    def options(self, field: str, options: Iterable[Any]) -> Iterable[Any]:
        """Return the values to try for a plan field: the given one, or else all `options`."""
        return (self.fixed[field],) if field in self.fixed else options


def space_of(config: RunConfig, cluster: ClusterConfig, fixed: Mapping[str, Any]) -> Space:
    """Return the search space of a configuration's model and batch on a cluster.

    Raises ConfigError if fp8 is requested but the cluster has no fp8 matmuls, or if its devices do not fill its nodes.
    """
    if config.precision.matmul != "compute" and cluster.matmul.tflops_fp8 is None:
        rule = f"{cluster.name} has no fp8 matmuls (cluster.matmul.tflops_fp8 = null)"
        raise ConfigError(
            [Problem("precision.matmul", config.precision.matmul, rule, "set precision=bf16, or use another cluster")]
        )
    if (devices := cluster.devices) > cluster.node and devices % cluster.node:
        rule = f"must be a multiple of cluster.node = {cluster.node}, the devices of each node"
        fix = f"set cluster.devices={devices // cluster.node * cluster.node}, or another cluster.node"
        raise ConfigError([Problem("cluster.devices", devices, rule, fix)])
    if config.precision.compute in ("fp32", "fp64"):
        cluster = replace(cluster, matmul=replace(cluster.matmul, tflops=cluster.matmul.tflops_fp32))
    # where shapes and sizes were timed, larger ones may be less efficient
    timed = cluster.matmul.measured or cluster.inside.measured or cluster.between.measured
    sketch_size = 0 if timed else fixed.get("micro_size", max(_micro_sizes(config)))
    return Space(Program(config, sketch_size), cluster, config, fixed)


@kept_workers()
def search(space: Space, top: int = 10) -> SearchResult:
    """Return the `top` fastest layouts that fit."""
    refused: Counter[str] = Counter()
    bounds, numbers = LayoutBounds(space.program, space.cluster), count()
    plans = list(enumerate_plans(space, refused))
    space.program.sketch(plans)
    waiting = [(bounds.seconds(plan), next(numbers), plan) for plan in plans]
    heapify(waiting)
    costed, worst, too_large = list[Candidate](), math.inf, list[tuple[float, int, int, Plan]]()
    room = space.cluster.memory.gib
    while waiting and waiting[0][0] <= worst:
        before, place, plan = heappop(waiting)
        needed = bounds.gib(plan)
        fits = needed <= room
        if fits and not space.program.is_prepared(plan):  # measure it together with the next ones, on all cores
            ahead = [other for bound, _, other in nsmallest(ALIKE, waiting) if bound <= worst]
            modules = {space.program.module_plan(other) for other in (plan, *ahead[:AHEAD])}
            alike = (other for other in ahead if space.program.module_plan(other) in modules)
            space.program.prepare([plan, *(other for other in alike if bounds.gib(other) <= room)])
        if space.program.is_prepared(plan) and (bound := bounds.scheduled_seconds(plan, before)) > before:
            heappush(waiting, (bound, place, plan))
            continue
        one = _candidate(space, plan) if fits else None
        if one is None:
            refused[TOO_LARGE] += 1
            too_large.append((needed, plan.micro_size, place, plan))
            others = list(smaller(space, plan))
            if not all(map(space.program.is_sketched, others)):  # sketch them together with the next ones, on all cores
                ahead = [other for bound, _, other in nsmallest(AHEAD, waiting) if bound <= worst]
                larger = (other for other in ahead if bounds.gib(other) > room)
                space.program.sketch([*others, *(less for other in larger for less in smaller(space, other))])
            for other in others:
                heappush(waiting, (bounds.seconds(other), next(numbers), other))
            continue
        costed.append(one)
        worst = sorted([*(one.time.total for one in costed), *[math.inf] * top])[top - 1]
    for most, changed in (
        (CUT, lambda plan: [bounds.balanced(plan)]),
        (CUT, lambda plan: [plan._replace(**dict(zip(CONTEXT, values, strict=True))) for values in KINDS]),
        (CUT, lambda plan: [plan._replace(chunks=number) for number in CHUNKS]),
        (CONFIRMED, lambda plan: [plan._replace(bucket_mib=size) for size in BUCKETS]),
        (CONFIRMED, lambda plan: [plan._replace(zero_group=size) for size in divisors(space.cluster.devices)[1:]]),
        (CONFIRMED, lambda plan: [plan._replace(zero=STAGES[0], zero_group=0)]),
    ):
        costed.sort(key=_preference)
        costed[: min(top, most)] = _refined(space, bounds, costed[: min(top, most)], changed)
    distinct = {  # two layouts may have become equal, and a group of all replicas is what 0 means
        one.plan._replace(zero_group=one.plan.zero_group % one.plan.layout.replicas): one for one in costed[::-1]
    }
    costed = sorted(distinct.values(), key=_preference)
    confirmed = _confirmed(space, costed, refused)
    smallest = None if confirmed or not too_large else _candidate(space, min(too_large)[-1], math.inf)
    return SearchResult(confirmed[:top], confirmed[top:], refused, len(plans), len(costed), smallest)


def _confirmed(space: Space, costed: Sequence[Candidate], refused: Counter[str]) -> list[Candidate]:
    """Return the layouts, fastest first; the first `CONFIRMED` of them fit in a dry run, which measured them."""
    known = list(costed)
    while tried := [one for one in known[:CONFIRMED] if one.measured is None]:
        known = [one for one in known if one not in tried]
        for one in carried_out(space, tried):
            if one.peak_gib <= space.cluster.memory.gib:
                known.append(one)
            else:
                refused[TOO_LARGE] += 1
                known += filter(None, (_candidate(space, other) for other in smaller(space, one.plan)))
        known.sort(key=_preference)
    return known


def carried_out(space: Space, tried: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield layouts with every stage's ledger, and the peak memory of the largest stage measured in a dry run."""
    ledgers, jobs = [space.program.describe(one.plan) for one in tried], []
    for one, ledger in zip(tried, ledgers, strict=True):
        values = asdict(configured(space.config, one.plan))
        values["parallel"] |= {"auto": False, "layouts": ()}
        largest = max(range(len(ledger.stages)), key=lambda stage: ledger.stages[stage].peak)
        jobs.append((values, one.plan.layout.rank(Coordinates(largest, 0, 0))))
    measured = measured_gib(jobs, space.cluster.memory)
    for one, ledger, needed in zip(tried, ledgers, measured, strict=True):
        memory = tuple(memory_of(stage, space.cluster) for stage in ledger.stages)
        yield one._replace(memory=memory, measured=needed)


def _refined(
    space: Space, bounds: LayoutBounds, best: Sequence[Candidate], changed: Callable[[Plan], Sequence[Plan]]
) -> Iterator[Candidate]:
    """Yield each layout, or the fastest of the layouts that it is changed to.

    Only the best layouts are refined: this changes little else, and each change needs measurements of its own.
    """
    kept = attrgetter("micro_size", *space.fixed)
    others = [[plan for plan in changed(one) if plan != one and kept(plan) == kept(one)] for one, *_ in best]
    legal = [[plan for plan in plans if not problem_of(space, plan)] for plans in others]
    space.program.prepare(plan for plans in legal for plan in plans)
    for one, plans in zip(best, legal, strict=True):
        for plan in plans:
            if bounds.scheduled_seconds(plan, one.time.total) <= one.time.total:
                one = min(filter(None, (one, _candidate(space, plan))), key=_preference)
        yield one


def smaller(space: Space, plan: Plan) -> Iterator[Plan]:
    """Yield variants of a layout that does not fit with less on the device, never faster, each reached only once."""
    if "recompute" not in space.fixed and plan.recompute == "none" and plan.offload == space.fixed.get("offload", ()):
        most = max(space.program.layers(plan))
        yield from (plan._replace(recompute=recompute) for recompute in ("selective", "full"))
        yield from (plan._replace(recompute=number) for number in {most // 4, most // 2, most * 3 // 4} - {0, most})
    if "offload" not in space.fixed:
        for part in OFFLOADED[OFFLOADED.index(plan.offload[-1]) + 1 if plan.offload else 0 :]:
            # activations that are recomputed need not wait on the host
            if _can_wait(space, part, plan) and (part != "activations" or plan.recompute == "none"):
                yield plan._replace(offload=(*plan.offload, part))


def _can_wait(space: Space, part: str, plan: Plan) -> bool:
    # the activations of a chunk's last layer stay on the device
    return max(space.program.layers(plan)) > 1 if part == "activations" else can_offload(part, plan.zero)


def _candidate(space: Space, plan: Plan, room: float | None = None) -> Candidate | None:
    """Return a layout with its step time and memory, or None if it needs more than `room` GiB (None: the device's)."""
    most = space.cluster.memory.gib if room is None else room
    ledger = space.program.describe(plan, False, lambda stage: memory_of(stage, space.cluster).total <= most)
    memory = tuple(memory_of(stage, space.cluster) for stage in ledger.stages)
    if max(stage.total for stage in memory) > most:
        return None
    return Candidate(plan, step_time(ledger, plan, space.cluster), memory)


def _preference(one: Candidate) -> tuple[float, ...]:
    plan = one.plan
    recomputed = plan.recompute if isinstance(plan.recompute, int) else 0
    simplicity = (plan.recompute == "full", recomputed, plan.tensor, plan.pipeline, plan.virtual_stages, plan.zero)
    return (one.time.total, *map(float, simplicity))


def time_of(space: Space, plan: Plan) -> StepTime:
    """Return the predicted step time of a layout."""
    return step_time(space.program.describe(plan), plan, space.cluster)


def enumerate_plans(space: Space, refused: Counter[str]) -> Iterator[Plan]:
    """Yield all layouts that pass the configuration's checks; count the reasons against others in `refused`."""
    micro_sizes = space.options("micro_size", _micro_sizes(space.config))
    sizes = list(product(space.options("sequence", (False, True)), micro_sizes))
    for degrees, (sequence, micro_size) in product(_degrees(space), sizes):
        plan = degrees._replace(sequence=sequence, micro_size=micro_size)
        if reason := problem_of(space, plan):
            refused[reason] += 1
            continue
        plan = plan._replace(micro_batches=space.config.batch.global_size // (micro_size * plan.data))
        schedules = orders.worth_trying() if plan.pipeline > 1 else (orders.SIMPLEST,)
        for schedule in space.options("schedule", schedules):
            chunks = [virtual_stages for virtual_stages in (1, *VIRTUAL) if orders.allows(schedule, virtual_stages)]
            for virtual_stages in space.options("virtual_stages", chunks):
                scheduled = plan._replace(schedule=schedule, virtual_stages=virtual_stages)
                if reason := schedule_problem(space, scheduled):
                    refused[reason] += 1
                else:
                    yield from _sharded(space, scheduled)


def _degrees(space: Space) -> Iterator[Plan]:
    """Yield all ways to spread the model over the devices; long sequences only are split, as each way is measured."""
    world, fixed, experts = space.cluster.devices, space.fixed, space.config.model.experts or 1
    given = {name: fixed[name] for name in ("chunks", *CONTEXT) if name in fixed}
    given["bucket_mib"] = space.config.parallel.bucket_mib
    is_long = space.config.model.sequence >= LONG
    for tensor in space.options("tensor", divisors(min(world, space.cluster.node))):
        for pipeline in space.options("pipeline", divisors(world // tensor)):
            for context in space.options("context", divisors(world // (tensor * pipeline)) if is_long else (1,)):
                data = world // (tensor * pipeline * context)
                if fixed.get("data") not in (None, data):
                    continue
                plan = Plan(tensor, pipeline, 1, data, context, 0, False, "none", 1, 1, orders.SIMPLEST, **given)
                for value in space.options("expert_tensor", (0, 1) if experts > 1 and tensor > 1 else (0,)):
                    expert_tensor = value or 0
                    ranks = data * context * (tensor // (expert_tensor or tensor))
                    for expert in space.options("expert", divisors(math.gcd(experts, ranks))):
                        yield plan._replace(expert=expert, expert_tensor=expert_tensor)


def problem_of(space: Space, plan: Plan) -> str:
    """Return the reason why the configuration's own checks reject a layout, or an empty string."""
    problems = layout_problems(configured(space.config, plan), space.cluster.devices)
    return f"{problems[0].key}: {problems[0].rule}" if problems else ""


def schedule_problem(space: Space, plan: Plan) -> str:
    """Return the reason why a layout's schedule does not work with its numbers, or an empty string."""
    if not orders.allows(plan.schedule, plan.virtual_stages):
        return f"parallel.virtual_stages: {plan.schedule} does not support this number of chunks"
    if plan.pipeline * plan.virtual_stages > space.config.model.layers:
        return "parallel.pipeline x parallel.virtual_stages: each chunk needs at least one layer"
    try:
        peak_in_flight(plan.schedule, plan.pipeline, plan.virtual_stages, shortest(plan))
    except orders.NumbersError as error:
        return f"parallel.schedule: {plan.schedule} refuses {error}"
    return ""


def _sharded(space: Space, plan: Plan) -> Iterator[Plan]:
    """Yield a layout with each way to shard model states."""
    layout, replicas = plan.layout, plan.layout.replicas
    shared = max(replicas, ExpertLayout(layout).replicas if layout.splits_experts else 1) > 1
    node, offload = max(1, space.cluster.node // plan.tensor), space.fixed.get("offload", ())
    on_node = node if 1 < node < replicas and replicas % node == 0 else 0
    group = space.fixed.get("zero_group", on_node) or 0  # null means all replicas
    recompute: Any = space.fixed.get("recompute") or "none"
    for zero, group_size in worth_trying(shared, [group] if group else [], space.fixed.get("zero"), offload):
        if "zero_group" in space.fixed and (group_size != group or replicas % (group or 1)):
            continue
        saving = plan._replace(zero=zero, zero_group=group_size, offload=offload, recompute=recompute)
        whole = group_size * (plan.tensor // (plan.expert_tensor or plan.tensor))
        if (not group_size or holds_groups(whole, plan.expert)) and all(
            _can_wait(space, one, saving) for one in offload
        ):
            yield saving


def _micro_sizes(config: RunConfig) -> list[int]:
    return [size for size in range(1, LARGEST_MICRO_SIZE + 1) if config.batch.global_size % size == 0]
