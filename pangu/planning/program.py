"""Ledger of a step of all pipeline stages, for any layout of a model and batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

from pangu.config.schema import RunConfig
from pangu.dryrun.traces import Chunk, TraceRequest, Traces, shortened
from pangu.models.parameters import ModelPart, place_tensors
from pangu.pipeline.stages import shards_sums
from pangu.planning.plan import Plan, configured
from pangu.schedule.groups import groups_of
from pangu.schedule.held import most_held
from pangu.schedule.orders import SIMPLEST, splits_backward
from pangu.schedule.schedule import Schedule, chunk_stages, make_schedule
from pangu.schedule.spans import Span, SpanKey, Trace, keys_of, module_kinds
from pangu.schedule.stage_ledger import StageLedger, StageProgram, message_bytes, stage_actions
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.placement import PlacementTable, TensorRank
from pangu.zero.grouping import IN_FLIGHT
from pangu.zero.stage_parameters import StageParameters

SKETCHED = (1, 2)
"""Sequences per micro-batch in the traces that the lower bounds are made of."""

_ALONE = Layout()
"""Layout of a single device."""


@dataclass(frozen=True)
class StepLedger:
    """Memory, communication and work of the first rank of each stage in a step."""

    stages: tuple[StageLedger, ...]
    message: tuple[int, ...]
    """Bytes of the tensors that a chunk sends to the next one for a micro-batch."""
    schedule: Schedule
    """Schedule with the fewest micro-batches after which it repeats."""
    extra_micro_batches: int
    """Number of further micro-batches."""

    @property
    def fullest(self) -> int:
        """Stage with the highest peak memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].peak)


class StagePart(NamedTuple):
    """Modules that a stage holds."""

    chunks: dict[int, ModelPart]
    content: Any
    """Key that differs between stages with different ledgers."""


class Cut(NamedTuple):
    """Division of a model into the chunks of its stages."""

    stage_of: tuple[int, ...]
    """Stage of each chunk."""
    distinct: tuple[StagePart, ...]
    """Stages with different modules: one of each set that holds the same."""
    alike: tuple[int, ...]
    """Mapping from a stage to its index in `distinct`."""


class Program:
    """Step of a configuration's model and batch, for any layout."""

    def __init__(self, config: RunConfig, note_progress: Callable[[], None] = lambda: None) -> None:
        """Begin with nothing measured; `note_progress` is called after each dry run."""
        self.config, self.note_progress, self._traces = config, note_progress, Traces(note_progress)
        self._known: dict[Any, Trace] = {}
        self._cuts: dict[Any, Cut] = {}
        self._kinds: dict[Any, tuple[Kinds, ...]] = {}
        self._stages: dict[Any, StageProgram] = {}
        self._last: tuple[Any, StepLedger] | None = None
        self._last_reduced: tuple[Any, Any] = (None, None)

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Measure the modules of several layouts together; raise DryRunError if a dry run fails or is unavailable."""
        stages = ((plan, part) for plan in plans for part in self.cut(plan).distinct)
        missing = {self._key(*stage): stage for stage in stages if self.known(*stage) is None}
        requests = {key: self._request(*stage) for key, stage in missing.items()}
        self._known |= zip(requests, self._traces.measure(requests.values()), strict=True)

    def is_prepared(self, plan: Plan) -> bool:
        """Return whether all modules of a layout have been measured."""
        return all(self.known(plan, part) for part in self.cut(plan).distinct)

    def sketch(self, plans: Iterable[Plan]) -> None:
        """Measure each kind of module in one chunk, for the micro-batch sizes in `SKETCHED`.

        The results are lower bounds for modules of other sizes and chunks. Raises DryRunError like `prepare`.
        """
        self.prepare({sketch for plan in plans for sketch in self._sketches(plan)})

    def is_sketched(self, plan: Plan) -> bool:
        """Return whether `sketch` has measured a layout."""
        return all(self.is_prepared(sketch) for sketch in self._sketches(plan))

    def sketched(self, plan: Plan) -> tuple[Trace, Trace]:
        """Return the traces that `sketch` measures, one for each micro-batch size."""
        one, two = (self.trace(sketch, self.cut(sketch).distinct[0]) for sketch in self._sketches(plan))
        return one, two

    def _sketches(self, plan: Plan) -> Iterator[Plan]:
        """Yield one-chunk layouts, one per micro-batch size; one layer is recomputed, unless in the selective way."""
        plan = self.module_plan(plan)._replace(offload=(), layers=(self.config.model.layers,))
        if plan.recompute != "selective":
            plan = plan._replace(recompute="none", recomputed=1)
        return (plan._replace(micro_size=size) for size in SKETCHED)

    def cut(self, plan: Plan) -> Cut:
        """Return the division of the model into the stages of a layout."""
        key = plan.schedule, plan.pipeline, plan.layers
        if key not in self._cuts:
            self._cuts[key] = self._cut(chunk_stages(plan.schedule, plan.pipeline, plan.virtual), plan.layers)
        return self._cuts[key]

    def _cut(self, stage_of: tuple[int, ...], layers: tuple[int, ...]) -> Cut:
        model, last, bounds = self.config.model, len(layers) - 1, [0, *accumulate(layers)]
        held: list[dict[int, ModelPart]] = [{} for _ in range(max(stage_of) + 1)]
        for chunk, stage in enumerate(stage_of):
            part = ModelPart(range(bounds[chunk], bounds[chunk + 1]), chunk == 0, chunk == last)
            held[stage][len(held[stage])] = part

        def content(part: ModelPart) -> Any:
            kinds = ((layer == model.query_layer, model.has_experts(layer)) for layer in part.layers)
            # all layers differ if some weights are frozen
            return tuple(part.layers if self.config.train.frozen else kinds), part.first, part.last

        contents = [tuple(map(content, chunks.values())) for chunks in held]
        distinct = {key: StagePart(chunks, key) for key, chunks in reversed(list(zip(contents, held, strict=True)))}
        places = {key: place for place, key in enumerate(dict.fromkeys(contents))}
        return Cut(stage_of, tuple(distinct[key] for key in places), tuple(places[key] for key in contents))

    def known(self, plan: Plan, part: StagePart) -> Trace | None:
        """Return the measured trace of a stage's modules, or None if some have not been measured."""
        return self._known.get(self._key(plan, part))

    def trace(self, plan: Plan, part: StagePart) -> Trace:
        """Return the trace of a stage's modules, measuring it if needed; raise DryRunError like `prepare`."""
        if self.known(plan, part) is None:
            self.prepare([plan])
        return self._known[self._key(plan, part)]

    def kinds(self, plan: Plan, part: StagePart) -> tuple[Kinds, ...]:
        """Return the kinds of the modules of each chunk."""
        key = part.content, plan.recompute, plan.recomputed, "activations" in plan.offload
        if key not in self._kinds:
            memory = replace(self.config.memory, recompute=plan.recomputed or plan.recompute, offload=plan.offload)
            config = replace(self.config, memory=memory)
            kinds = [tuple(module_kinds(config, self._table, chunk).values()) for chunk in part.chunks.values()]
            self._kinds[key] = tuple(Kinds(of_chunk, shortened(of_chunk)) for of_chunk in kinds)
        return self._kinds[key]

    @cached_property
    def _table(self) -> PlacementTable:
        model = self.config.model
        return place_tensors(model, [ModelPart.whole(model)], TensorRank(), self.config.train.frozen)

    def module_plan(self, plan: Plan) -> Plan:
        """Return a plan reduced to the fields that affect the work of a module."""
        if self._last_reduced[0] is not plan:  # callers ask several times about a layout
            work = plan._replace(pipeline=1, virtual=1, schedule=SIMPLEST, layers=(), micro_batches=1)
            work = work._replace(recomputed=min(plan.recomputed, 1))
            if not self.config.train.frozen:  # else modules depend on the sharding too (`Traces`)
                offload = tuple(part for part in plan.offload if part == "activations")
                work = work._replace(zero=_ALONE.zero, zero_group=_ALONE.zero_group, data=_ALONE.data, offload=offload)
            self._last_reduced = plan, work
        return self._last_reduced[1]

    def _key(self, plan: Plan, part: StagePart) -> Any:
        shortest = tuple(of_chunk.shortest for of_chunk in self.kinds(plan, part))
        return self.module_plan(plan), splits_backward(plan.schedule), shortest

    def _request(self, plan: Plan, part: StagePart) -> TraceRequest:
        reduced, splits, chunks = self._key(plan, part)
        return TraceRequest(configured(self.config, reduced), chunks, (splits,))

    def describe(self, plan: Plan, every: bool = True) -> StepLedger:
        """Return the ledger of a step.

        Unless `every` stage is wanted, one that holds as many micro-batches represents others with the same modules.
        """
        if self._last is None or self._last[0] != (plan, every):  # callers that ask for memory ask for time as well
            self._last = (plan, every), self._described(plan, every)
        return self._last[1]

    def spans(self, plan: Plan) -> Iterator[tuple[SpanKey, Span]]:
        """Yield the spans of all modules for one micro-batch, stage by stage; raise DryRunError like `prepare`."""
        self.prepare([plan])
        cut = self.cut(plan)
        for part in map(cut.distinct.__getitem__, cut.alike):
            actions = self._request(plan, part).actions
            for action, kinds in product(actions, self.kinds(plan, part)):
                spans = (span for _, span in self.trace(plan, part).of_action(action, kinds.all))
                yield from ((key, span) for key, span in zip(keys_of(action, kinds.all), spans, strict=True) if span)

    def _described(self, plan: Plan, every: bool) -> StepLedger:
        config, schedule, cut = configured(self.config, plan), schedule_of(plan), self.cut(plan)
        actions, extra = stage_actions(schedule), plan.micro_batches - schedule.micro_batches
        stages: Sequence[int] = range(plan.pipeline)
        if not every:
            held = most_held(plan.schedule, plan.pipeline, plan.virtual, schedule.micro_batches)
            fullest = {cut.alike[stage]: stage for stage in sorted(stages, key=lambda one: (held[one], -one))}
            stages = [fullest[place] for place in cut.alike]
        groups, ledgers = groups_of(plan.layout, 1), dict[int, StageLedger]()
        for stage in set(stages):
            program = self._stage(config, plan, cut.distinct[cut.alike[stage]], schedule)
            ledgers[stage] = program.ledger(actions[stage], extra, groups)
        return StepLedger(tuple(ledgers[stage] for stage in stages), message_bytes(config), schedule, extra)

    def _stage(self, config: RunConfig, plan: Plan, part: StagePart, schedule: Schedule) -> StageProgram:
        alike = plan._replace(pipeline=1, virtual=1, layers=(), micro_batches=1, schedule="")
        key = alike, schedule.splits_backward, schedule.reduce_each, part.content
        if key not in self._stages:
            at = Coordinates(0, 0, 0)
            parameters = StageParameters.of_run(config, plan.layout, at, part.chunks, schedule.reduce_each)
            kinds = {
                chunk: dict(zip(parameters.uses[chunk], of_chunk.all, strict=True))
                for chunk, of_chunk in zip(part.chunks, self.kinds(plan, part), strict=True)
            }
            self._stages[key] = StageProgram(config, parameters, kinds, self.trace(plan, part))
        return self._stages[key]


class Kinds(NamedTuple):
    """Kinds of the modules of a chunk, in the order of the forward pass."""

    all: Chunk
    shortest: Chunk
    """Modules of a shorter chunk that has the same spans."""


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a layout, with the fewest micro-batches after which it repeats."""
    return _schedule(plan.schedule, plan.pipeline, plan.virtual, shortest(plan), shards_sums(plan.layout))


_schedule = lru_cache(maxsize=100)(make_schedule)


def shortest(plan: Plan) -> int:
    """Return the fewest micro-batches that represent a step.

    More of them raise neither the micro-batches a stage holds nor the reductions in flight in the repeated round.
    """
    numbers = plan.schedule, plan.pipeline, plan.virtual
    least = max(4 * plan.pipeline, 2 * IN_FLIGHT + 1) + plan.micro_batches % plan.pipeline
    if least < plan.micro_batches and most_held(*numbers, least) == most_held(*numbers, least + plan.pipeline):
        return least
    return plan.micro_batches
