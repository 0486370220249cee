"""Forecast of a run's step time and peak memory, logged at the start and compared with measurements."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from statistics import fmean, median
from typing import Any

from pangu.common.errors import UserError
from pangu.config.cluster import cluster_in
from pangu.config.schema import RunConfig
from pangu.config.stages import in_stage
from pangu.dryrun.roles import DryRunError, kept_workers, measured_gib
from pangu.metrics.record import StepRecord
from pangu.pipeline.stages import Stages
from pangu.planning.cost import StageMemory, StepTime, memory_of, step_time
from pangu.planning.find import overrides_of
from pangu.planning.program import plan_of
from pangu.planning.search import search, space_of
from pangu.report.intervals import Expectation, expectation
from pangu.topology.layout import Coordinates, Layout

log = logging.getLogger("pangu")

TERMS = ("compute", "tensor", "expert", "pipeline", "bubble", "data", "update", "host")
"""Terms of a step time, in the order of tables."""
COMPARED_AFTER = 20
"""Number of steps after which the measurements are compared with the forecast."""
WARM_UP = 5
"""Number of these steps, the first ones, that are excluded."""
ROWS = {
    "compute": ("compute", "host"),
    **{term: (term,) for term in ("tensor", "expert", "pipeline", "data", "bubble")},
    "update": ("update", "loading", "logging"),
}
"""Rows of a comparison, each with the categories it sums. A profile counts waits for the host as compute; the fixed
time of a step, which a forecast adds to its update, has the loading and logging in it."""


@dataclass
class Forecast:
    """Predicted step time and peak memory; a metrics writer that compares them with measurements."""

    cluster: str
    time: StepTime
    memory: StageMemory
    """Peak memory of the stage that needs the most."""
    least_gib: float
    """Peak memory in GiB if the allocator loses nothing to fragmentation."""
    stage: int
    """Stage with the highest peak memory."""
    room_gib: float
    """Memory of a device in GiB."""
    expectation: Expectation
    """Interval of the step time."""
    layout: Layout
    stages_s: tuple[float, ...] = ()
    """Step times of `batch.stages`; `time` is that of the final stage, which needs the most memory."""
    begins: int = 0
    """Steps before the final stage."""
    _seconds: list[float] = field(default_factory=list)
    _measured: dict[str, float] = field(default_factory=dict)
    _profiled: Sequence[Mapping[str, float]] = ()

    @classmethod
    def of(cls, config: RunConfig, layout: Layout, stages: Stages) -> Forecast:
        """Return the forecast of a configuration on its `cluster`.

        Raises ConfigError if the cluster is invalid, DryRunError if the model's modules cannot be measured.
        """
        assert config.cluster is not None
        space = space_of(config, cluster_in(config.cluster), {"expert": layout.expert})
        cluster, plan = space.cluster, plan_of(config, layout)
        ledger = space.program.describe(plan)
        stage, memory = max(
            enumerate(memory_of(stage, cluster) for stage in ledger.stages), key=lambda one: one[1].total
        )
        time, earlier = step_time(ledger, plan, cluster), list[float]()
        spaces = {config.model.sequence: space}
        for number in range(len(config.batch.stages)):
            one = in_stage(config, number)
            if (sequence := one.model.sequence) not in spaces:
                own = replace(one, batch=replace(one.batch, stages=()))
                spaces[sequence] = space_of(own, cluster, {"expert": layout.expert})
            shorter = plan._replace(micro_batches=one.batch.accumulation(layout.data))
            earlier.append(step_time(spaces[sequence].program.describe(shorter), shorter, cluster).total)
        return cls(
            cluster=cluster.name,
            time=time,
            memory=memory,
            least_gib=memory.total - cluster.memory.fragmentation * memory.activations,
            stage=stage,
            room_gib=cluster.memory.gib,
            expectation=expectation(space, plan),
            layout=layout,
            stages_s=tuple(earlier),
            begins=config.batch.stages[-1].until if config.batch.stages else 0,
        )

    @property
    def interval_s(self) -> tuple[float, float, float]:
        """Interval of the step time and its median in seconds."""
        low, high, median, *_ = self.expectation.interval
        return low * self.time.total, high * self.time.total, median * self.time.total

    @property
    def verdict(self) -> str:
        """Verdict on the memory of a device: `fits`, `does not fit` or `too close to call`."""
        if self.memory.total <= self.room_gib:
            return "fits"
        return "does not fit" if self.least_gib > self.room_gib else "too close to call"

    def lines(self) -> str:
        """Return the forecast as log lines."""
        terms = ", ".join(f"{term} {getattr(self.time, term):.3g}" for term in terms_of(self.time))
        low, high, median = self.interval_s
        waits = f"; host-bound: the device waits {self.time.host:.3g} s for the host, less with larger micro-batches"
        return (
            f"{'expected':<12} on {self.cluster}: step time {self.time.total:.3g} s ({terms}), memory "
            f"{self.memory.total:.3g} of {self.room_gib:g} GiB ({self.verdict}){waits * (self.time.host > 0)}\n"
            f"{'':<12} between {low:.3g} and {high:.3g} s, median {median:.3g} s: {self.expectation.words}"
        )

    def stages_line(self, config: RunConfig) -> str:
        """Return the step times of all stages and the time of their steps as a log line."""
        ends = [*(stage.until for stage in config.batch.stages), config.train.steps]
        times = [*self.stages_s, self.time.total]
        total = sum(seconds * max(0, end - begin) for seconds, begin, end in zip(times, [0, *ends], ends, strict=False))
        listed = ", ".join(f"{seconds:.3g}" for seconds in times)
        return f"{'expected':<12} step times of the stages {listed} s, all steps {total:.3g} s"

    def require_room(self, config: RunConfig, layout: Layout, stages: Stages) -> None:
        """Confirm in a dry run a layout predicted to exceed device memory; warn if the dry run does not confirm it.

        Raises UserError, naming layouts of as many devices that fit, if the stage with the highest peak does not.
        """
        needed = self.memory.total
        if needed <= self.room_gib:
            return
        assert config.cluster is not None
        cluster = cluster_in({**config.cluster, "devices": layout.world})
        parallel = {**asdict(config.parallel), "data": layout.data, "layouts": ()}
        expected = f"memory: about {needed:.3g} GiB expected, and {self.cluster} has {self.room_gib:g} GiB"
        try:
            job = {**asdict(config), "parallel": parallel}, layout.rank(Coordinates(self.stage, 0, 0))
            (needed,) = measured_gib([job], cluster.memory)
        except DryRunError as error:
            log.warning("%s; this run may run out of memory, which no dry run could check (%s)", expected, error)
            return
        if needed <= self.room_gib:
            log.warning("%s; a dry run of the stage with the highest peak needs %.3g GiB, which fits", expected, needed)
            return
        plan, best = plan_of(config, layout), search(space_of(config, cluster, {}), top=3).best
        fix = "; ".join(f"{' '.join(overrides_of(one.plan, plan))} ({one.peak_gib:.3g} GiB)" for one in best)
        raise UserError(
            f"memory: the device with the highest peak needs {needed:.3g} GiB, and {self.cluster} has "
            f"{self.room_gib:g} GiB; {f'these layouts fit: {fix}' if fix else 'no layout of this many devices fits'}"
        )

    def write(self, record: StepRecord) -> None:
        """Record a step; after `COMPARED_AFTER` steps, compare the measurements with the forecast."""
        if record.step <= self.begins:
            return
        self._seconds.append(record.step_time_s)
        if len(self._seconds) == COMPARED_AFTER:
            taken = median(self._seconds[WARM_UP:])
            low, high, _ = self.interval_s
            place = "inside" if low <= taken <= high else "outside"
            tensors, others = self.memory.states + self.memory.activations, self.memory.overhead
            self._measured = {"measured_step_time_s": taken, "measured_memory_gib": record.peak_memory_gib}
            log.info(
                f"{'measured':<12} step time {taken:.3g} s ({taken / self.time.total - 1:+.0%} against the forecast, "
                f"{place} its interval), memory {record.peak_memory_gib:.3g} GiB (forecast: {tensors:.3g} for tensors, "
                f"{others:.3g} for the device)"
            )
            if self._profiled and not self.begins:
                expected, parts = forecast_parts(self.time), measured_parts(self._profiled, self.layout, taken)
                known = [part for part in parts if parts[part] or expected[part]]
                words = (f"{part} {parts[part]:.3g} (forecast: {expected[part]:.3g})" for part in known)
                log.info(f"{'':<12} in seconds: {', '.join(words)}")

    def set_profile(self, ranks: Sequence[Mapping[str, float]]) -> None:
        """Keep the seconds by category of a profiled step, of each rank in order, for the comparison."""
        self._profiled = ranks

    def close(self) -> None:
        """Do nothing: a metrics writer needs this method, and the measurements stay available."""

    def as_dict(self) -> dict[str, Any]:
        """Return the forecast and measurements for summary.json."""
        expected = {"cluster": self.cluster, "step_time_s": self.time.total, "memory_gib": self.memory.total}
        *ends, median = self.interval_s
        interval = {"step_time_interval_s": ends, "step_time_median_s": median, "interval": self.expectation.words}
        stages = {"stages_step_time_s": list(self.stages_s)} if self.stages_s else {}
        return {**expected, **interval, "verdict": self.verdict, **stages, "terms_s": vars(self.time), **self._measured}


def forecast_parts(time: StepTime) -> dict[str, float]:
    """Return the seconds of a forecast by row of `ROWS`."""
    return {part: sum(getattr(time, term, 0.0) for term in terms) for part, terms in ROWS.items()}


def measured_parts(ranks: Sequence[Mapping[str, float]], layout: Layout, median_s: float | None) -> dict[str, float]:
    """Return the mean seconds of the stage with the most work by row of `ROWS`; they sum to `median_s`, if known.

    Raises ValueError if they are not the times of a step of all ranks.

    Args:
        ranks: categories of the profiled step, of each rank in order.
        layout: layout of the ranks, in which those of a pipeline stage are consecutive.
        median_s: median step time of the run: the profile is of one step.
    """
    stage_size = layout.world // layout.pipeline
    rows = [{part: sum(one[term] for term in terms) for part, terms in ROWS.items()} for one in ranks]
    stages = [rows[first : first + stage_size] for first in range(0, len(rows), stage_size)]
    means = [{part: fmean(row[part] for row in stage) for part in ROWS} for stage in stages]
    most = max(means, key=lambda one: sum(one.values()) - one["bubble"])
    total = sum(most.values())
    taken = total if median_s is None else median_s
    scale = taken / total
    if len(ranks) != layout.world or not 0 < scale < inf or min(most.values()) < 0:
        raise ValueError(f"a step of {taken} s, profiled as {total} s, on {len(ranks)} of {layout.world} ranks")
    return {part: seconds * scale for part, seconds in most.items()}


def terms_of(*times: StepTime) -> tuple[str, ...]:
    """Return the names of the time terms; those of experts and of the host only if one of the times has any."""
    return tuple(term for term in TERMS if term not in ("expert", "host") or any(getattr(one, term) for one in times))


def forecast_run(config: RunConfig, layout: Layout, stages: Stages, on_progress: Callable[[], None]) -> Forecast | None:
    """Return the forecast of a run, or None if no dry run is possible here; raise UserError if memory is too small.

    Calls `on_progress` after each dry run.
    """
    with kept_workers(on_progress):
        try:
            forecast = Forecast.of(config, layout, stages)
        except DryRunError as error:
            log.info("%-12s no forecast: %s", "expected", error)
            return None
        log.info(forecast.lines())
        if forecast.stages_s:
            log.info(forecast.stages_line(config))
        if not config.dry_run:
            forecast.require_room(config, layout, stages)
        return forecast
