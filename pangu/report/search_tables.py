"""Reports of a search, for people and programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

from pangu.config.cluster import FailureConfig
from pangu.config.parallelism import context_kind
from pangu.metrics.text import duration
from pangu.models.size import training_flops_per_token
from pangu.planning import search
from pangu.planning.cost import StageMemory, durations_of, memory_of, phases_of
from pangu.planning.find import Outcome, overrides_of
from pangu.planning.program import CONTEXT, Plan, configured
from pangu.planning.search import Candidate, Space
from pangu.report.forecast import TERMS, terms_of
from pangu.report.intervals import expectation
from pangu.report.page import fill_template
from pangu.schedule import orders
from pangu.schedule.groups import groups_of
from pangu.schedule.simulate import simulate
from pangu.zero.choices import STAGES

KEPT = "parallel.two_batch_overlap", "loss.chunk", "precision.reduce", "optimizer.moments", "compile"
"""Keys that change time or memory of a step, of which a search tries no values."""
WIDTH = 900
"""Width of a chart in pixels."""
COLOURS = ("#4878d0", "#ee854a", "#8c613c", "#6acc64", "#d0d0d0", "#d65f5f", "#956cb4", "#17a3b8")


def as_data(outcome: Outcome, one: Candidate) -> dict[str, Any]:
    """Return the numbers of a layout as plain data."""
    config, cluster, seconds = outcome.space.config, outcome.space.cluster, one.time.total
    tokens = config.batch.global_size * config.model.sequence
    flops = tokens * training_flops_per_token(config.model)
    low, high, median, *_ = expectation(outcome.space, one.plan).interval
    data: dict[str, Any] = {
        "overrides": overrides_of(one.plan),
        "step_time_s": seconds,
        "step_time_interval_s": [seconds * low, seconds * high],
        "step_time_median_s": seconds * median,
        "terms_s": vars(one.time).copy(),
        "memory_gib": [stage.total for stage in one.memory],
        "measured_memory_gib": one.measured,
        "tokens_per_s": tokens / seconds,
        "mfu": flops / (seconds * cluster.devices * cluster.matmul.tflops * 1e12),
    }
    if outcome.tokens is not None:
        hours = outcome.tokens / tokens * seconds / 3600
        save_s = max(stage.states for stage in one.memory) * 2**30 / (cluster.host_gb_s * 1e9)
        lost = expected_goodput(cluster.devices, cluster.failures, save_s)
        data["days"] = hours / 24
        data["days_with_failures"] = data["days"] / lost.goodput if lost.goodput else None
        data["failures_per_day"], data["goodput"] = lost.failures_per_day, lost.goodput
        data["checkpoint_every"] = max(1, round(lost.interval_s / seconds))
        data["energy_mwh"] = hours * cluster.devices * cluster.price.watts / 1e6
        data["cost"] = hours * cluster.devices * cluster.price.per_hour or None
    return data


class ExpectedGoodput(NamedTuple):
    """Expected goodput, the fraction of a run's time that trains, with failures, restarts and checkpoints.

    Failures are a Poisson process. Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart
    dumps", gives the expected time and the interval between checkpoints that minimizes it.
    """

    failures_per_day: float
    """Interruptions of the run."""
    interval_s: float
    """Seconds of training between two checkpoints."""
    goodput: float
    """Fraction of the time that trains: no restart, no checkpoint, no step that is repeated."""


def expected_goodput(devices: int, failures: FailureConfig, save_s: float) -> ExpectedGoodput:
    """Return the goodput of a run on `devices` devices, each checkpoint of which takes `save_s` seconds."""
    between_s = failures.device_hours / devices * 3600
    interval_s = best_interval(between_s, save_s)
    return ExpectedGoodput(86400 / between_s, interval_s, goodput(between_s, failures.restart_s, save_s, interval_s))


def best_interval(between_s: float, save_s: float) -> float:
    """Return the seconds of training between checkpoints that waste the least, with `between_s` between failures."""
    ratio = save_s / (2 * between_s)
    if ratio >= 1:
        return between_s
    return math.sqrt(2 * save_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def goodput(between_s: float, restart_s: float, save_s: float, interval_s: float) -> float:
    """Return the fraction of the time that trains, if training saves after each `interval_s` seconds of it."""
    exponent = (interval_s + save_s + restart_s) / between_s
    if exponent > 700:  # no interval ever ends
        return 0.0
    return interval_s / (between_s * (math.exp(exponent) - math.exp(restart_s / between_s)))


def search_data(outcome: Outcome) -> dict[str, Any]:
    """Return the whole search as plain data."""
    result, cluster = outcome.result, outcome.space.cluster
    return {
        "cluster": cluster.name,
        "devices": cluster.devices,
        "device_memory_gib": cluster.memory.gib,
        "layouts": result.layouts,
        "costed": result.costed,
        "refused": dict(result.refused),
        "ties": ties(outcome) if result.best else 0,
        "interval": interval_words(outcome) if result.best else "",
        "not_tried": list(untried(outcome.space)),
        "best": [as_data(outcome, one) for one in result.best],
        "front": [as_data(outcome, one) for one in front_of([*result.best, *result.others])],
    }


def front_of(costed: Iterable[Candidate]) -> list[Candidate]:
    """Return the Pareto front of layouts ordered by time: those that need less memory than all faster ones."""
    front: list[Candidate] = []
    for one in costed:
        if not front or one.peak_gib < front[-1].peak_gib:
            front.append(one)
    return front


def interval_words(outcome: Outcome) -> str:
    """Return a sentence about the interval of the fastest layout: where it is from, and which layouts are ties."""
    fastest = expectation(outcome.space, outcome.result.best[0].plan)
    return f"interval: {fastest.words}; =: ties, within {fastest.interval.tie:.2f} times the first"


def untried(space: Space) -> Iterator[str]:
    """Yield the values and keys that a search does not try. It keeps keys that are given, so they are left out."""
    others = {
        "schedule": f"schedules {', '.join(sorted(orders.SCHEDULES.keys() - {*orders.worth_trying()}))}",
        "micro_size": f"batch.micro_size above {search.LARGEST_MICRO_SIZE}",
        "zero": f"ZeRO 0 with replicas, but for the fastest {search.CONFIRMED}",
        "zero_group": f"ZeRO groups other than a node's and all, but for the fastest {search.CONFIRMED}",
        "bucket_mib": f"values of parallel.bucket_mib, but for the fastest {search.CONFIRMED}",
        "tensor": "tensor parallelism across nodes",
        "virtual_stages": f"parallel.virtual_stages other than {', '.join(map(str, (1, *search.VIRTUAL)))}",
        "chunks": f"parallel.overlap_chunks other than {', '.join(map(str, (1, *search.CHUNKS)))}",
    }
    if space.config.model.sequence < search.LONG:
        others["context"] = f"context parallelism of less than {search.LONG:,} tokens"
    yield from (words for field, words in others.items() if field not in space.fixed)
    yield f"values of {', '.join(KEPT)}"


def sentences(outcome: Outcome) -> list[str]:
    """Return the sentences below the table of a search."""
    stages = ", ".join(f"{stage.total:.1f}" for stage in outcome.result.best[0].memory)
    return [
        interval_words(outcome),
        f"memory of the first, by stage: {stages} GiB predicted, of {outcome.space.cluster.memory.gib:.1f}",
        f"not tried unless given: {'; '.join(untried(outcome.space))}",
    ]


def ties(outcome: Outcome) -> int:
    """Return the number of leading layouts that published measurements could not distinguish from the fastest."""
    best = outcome.result.best
    most = best[0].time.total * expectation(outcome.space, best[0].plan).interval.tie
    return sum(one.time.total <= most for one in best)


def rows(outcome: Outcome) -> Iterator[dict[str, str]]:
    """Yield the rows of a table of the fastest layouts: column title -> cell."""
    best = outcome.result.best
    tied, terms = ties(outcome), terms_of(*(one.time for one in best))
    for number, one in enumerate(best):
        data, plan = as_data(outcome, one), one.plan
        bucket = "" if plan.bucket_mib is None else f", {plan.bucket_mib:g} MiB"
        saved = f"{plan.recompute} layers" if isinstance(plan.recompute, int) else plan.recompute
        yield {
            "": f"{number + 1}{' =' if 0 < number < tied else ''}",
            "tensor / chunks": f"{plan.tensor}{' seq' * plan.sequence}{f' / {plan.chunks}' * (plan.chunks > 1)}",
            "pipeline": f"{plan.pipeline}",
            "schedule": f"{plan.schedule}{f' x {plan.virtual_stages}' if plan.virtual_stages > 1 else ''}",
            "data x context": f"{plan.data}{_sharing(plan)}",
            "ZeRO": f"{plan.zero}{f' of {plan.zero_group}' if plan.zero_group else ''}{bucket}",
            "micro": f"{plan.micro_size}",
            "recompute": saved + "".join(f", {part} offloaded" for part in plan.offload),
            "step": f"{one.time.total:.3f} s{', host-bound' * (one.time.host > 0)}",
            "interval": "{:.3g} to {:.3g} s".format(*data["step_time_interval_s"]),
            " + ".join(terms): " ".join(f"{getattr(one.time, term):.2f}" for term in terms),
            "memory": f"{one.peak_gib:.1f} GiB{'?' * (one.measured is None)}",
            "tokens/s": f"{data['tokens_per_s']:,.0f}",
            "MFU": f"{data['mfu']:.1%}",
        }


def _sharing(plan: Plan) -> str:
    context = f" x {plan.context}{_kind(plan)}" if plan.context > 1 else ""
    full = "whole " * (plan.expert_tensor not in (0, plan.tensor))
    return context + (f", {full}experts / {plan.expert}" if full or plan.expert > 1 else "")


def _kind(plan: Plan) -> str:
    kind = "" if plan.context_kind == "auto" else f" {plan.context_kind}"
    return kind + f" with ulysses {plan.context_ulysses}" * (plan.context_ulysses > 1)


def run_words(outcome: Outcome) -> str:
    """Return a sentence with the time and energy that the fastest layout needs for the tokens of the run."""
    data = as_data(outcome, outcome.result.best[0])
    if outcome.tokens is None:
        return ""
    mwh = data["energy_mwh"]
    energy = (f" and {mwh:,.3g} MWh" if mwh >= 1 else f" and {1000 * mwh:.3g} kWh") if mwh else ""
    cost = "" if data["cost"] is None else f", cost {data['cost']:,.0f}"
    days = data["days_with_failures"]
    failing = "it never finishes" if days is None else f"{_days(days)} (goodput {data['goodput']:.1%})"
    return (
        f"{outcome.tokens:.3g} tokens take {_days(data['days'])}{energy}{cost}; with {data['failures_per_day']:.2g} "
        f"failures a day, {failing} with checkpoint.every={data['checkpoint_every']}"
    )


def _days(days: float) -> str:
    return f"{days:,.3g} days" if days >= 1 else duration(days * 86400)


def explain(outcome: Outcome) -> Iterator[str]:
    """Yield explanations why the neighbors of the fastest layout are slower or do not fit."""
    space, best, room = outcome.space, outcome.result.best[0], outcome.space.cluster.memory.gib
    batch, plans = space.config.batch.global_size, dict[str, Plan]()
    for name, values in _changes(space, best.plan):
        other = best.plan._replace(**values, layers=())
        plans[name] = other._replace(micro_batches=max(1, batch // (other.micro_size * other.data)))
    reasons = {
        name: search.schedule_problem(space, plan) or search.problem_of(space, plan) for name, plan in plans.items()
    }
    valid = {name: plan for name, plan in plans.items() if not reasons[name]}
    space.program.prepare(valid.values())
    for name, reason in reasons.items():
        if name not in valid:
            yield f"{name}: not valid: {reason}"
            continue
        stages = space.program.describe(valid[name]).stages
        stage, needed = max(enumerate(memory_of(one, space.cluster).total for one in stages), key=itemgetter(1))
        if needed > room:
            yield f"{name}: {search.TOO_LARGE}: stage {stage} needs {needed:.1f} GiB of {room:.1f}"
            continue
        time = search.time_of(space, valid[name])
        changes = {term: getattr(time, term) - getattr(best.time, term) for term in TERMS}
        term = max(changes, key=lambda name: abs(changes[name]))
        yield f"{name}: {time.total / best.time.total - 1:+.1%}, mostly {term} ({changes[term]:+.3f} s)"


def _changes(space: Space, plan: Plan) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield changes of a layout in one respect, with the same devices."""
    for name in ("tensor", "pipeline", *["context"] * (plan.context > 1)):
        value = getattr(plan, name)
        if plan.data > 1:
            yield f"{name} {2 * value}", {name: 2 * value, "data": plan.data // 2}
        if value > 1:
            yield f"{name} {value // 2}", {name: value // 2, "data": plan.data * 2}
    for size in filter(None, (plan.micro_size * 2, plan.micro_size // 2)):
        yield f"micro-batches of {size}", {"micro_size": size}
    for zero in sorted({*STAGES} - {plan.zero}):
        yield f"ZeRO {zero}", {"zero": zero, "zero_group": 0}
    yield f"{'no ' * plan.sequence}sequence parallelism", {"sequence": not plan.sequence}
    if plan.context > 1:
        now = context_kind(configured(space.config, plan)), plan.context_ulysses
        others = [dict[str, Any](zip(CONTEXT, kind, strict=True)) for kind in search.KINDS if kind != now]
        yield from ((f"context{_kind(plan._replace(**kind))}", kind) for kind in others)
    if space.config.model.experts is not None:
        for number in filter(None, (plan.expert * 2, plan.expert // 2)):
            yield f"experts on {number} ranks", {"expert": number}
        if plan.tensor > 1:
            expert_tensor = 1 if plan.expert_tensor in (0, plan.tensor) else 0
            yield f"experts{' not' * bool(expert_tensor)} split by tensor ranks", {"expert_tensor": expert_tensor}
    for count in sorted({1, *search.CHUNKS} - {plan.chunks}) if plan.tensor > 1 or plan.expert > 1 else ():
        yield f"matmuls in {count} chunks", {"chunks": count}
    recompute = "none" if plan.recompute == "full" else "full"
    yield f"recompute {recompute}", {"recompute": recompute}
    for schedule in orders.worth_trying() if plan.pipeline > 1 else ():
        if schedule != plan.schedule:
            yield schedule, {"schedule": schedule, "virtual_stages": orders.SCHEDULES[schedule].virtual_stages[0]}


def page(outcome: Outcome) -> str:
    """Return a self-contained HTML page: memory per stage, time terms, stage timelines, memory against time."""
    best, cluster = outcome.result.best, outcome.space.cluster
    times = [(f"{number}", vars(one.time)) for number, one in enumerate(best, 1)]
    memory = [(f"stage {stage}", one._asdict()) for stage, one in enumerate(best[0].memory)]
    front, most = front_of([*best, *outcome.result.others]), max(one.total for one in best[0].memory)
    return fill_template(
        "layouts.html",
        width=WIDTH,
        colours=COLOURS,
        cluster=cluster,
        words=[*sentences(outcome), *filter(None, [run_words(outcome)])],
        rows=list(rows(outcome)),
        times=_bars(times, TERMS, max(one.time.total for one in best), "s"),
        memory=_bars(memory, StageMemory._fields, max(cluster.memory.gib, most), "GiB"),
        timeline=_timeline(outcome),
        front=[(one.time.total, one.peak_gib, overrides_of(one.plan)) for one in front],
    )


Box = tuple[float, float, int, str, str]
"""Box of a chart: left end and width in pixels, row, name in the legend, tooltip."""


def _bars(
    bars: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str], most: float, unit: str
) -> tuple[list[Box], float]:
    """Return the parts of one bar per title, and the value `most`, which spans the width of the chart."""
    boxes = []
    for row, (title, parts) in enumerate(bars):
        x = 0.0
        for name in names:
            width = parts[name] / most * WIDTH
            boxes.append((x, width, row, name, f"{title}: {name} {parts[name]:.3f} {unit}"))
            x += width
    return boxes, most


def _timeline(outcome: Outcome) -> tuple[int, list[Box], float]:
    """Return the height of a row, the boxes of the actions, and the seconds that the width of the chart stands for."""
    plan, cluster = outcome.result.best[0].plan, outcome.space.cluster
    groups, ledger = groups_of(plan.layout, cluster.node), outcome.space.program.describe(plan)
    durations = durations_of(ledger.schedule, phases_of(ledger, groups, cluster), 0.0)
    timeline = simulate(ledger.schedule, durations, checked=True)
    scale = WIDTH / timeline.makespan
    boxes = [
        (start * scale, (stop - start) * scale, stage, action.kind.name.lower(), f"stage {stage}: {action}")
        for stage, action, start, stop in chain.from_iterable(timeline.computing)
    ]
    return max(4, min(20, 400 // plan.pipeline)), boxes, timeline.makespan
