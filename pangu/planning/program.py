"""Ledger of a step of all pipeline stages, for any layout of a model and batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

from pangu.config.context import context_kind
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.dryrun.traces import Chunk, TraceRequest, Traces, shortened
from pangu.models.parameters import ModelPart, place_tensors
from pangu.models.size import hidden_state_shapes
from pangu.pipeline.held import most_held
from pangu.pipeline.orders import SIMPLEST, splits_backward
from pangu.pipeline.schedule import Schedule, chunk_stages, make_schedule
from pangu.pipeline.spans import Span, SpanKey, Trace, keys_of, module_kinds
from pangu.pipeline.stages import shards_sums
from pangu.planning.groups import groups_of
from pangu.planning.plan import Plan, configured
from pangu.planning.stage_ledger import StageActions, StageLedger, StageProgram, StepRun
from pangu.topology.layout import Coordinates
from pangu.topology.placement import PlacementTable, TensorRank
from pangu.zero.grouping import IN_FLIGHT
from pangu.zero.stage_parameters import StageParameters
from pangu.zero.states import BYTES

SKETCHED = (1, 2)
"""Sequences per micro-batch in the traces that the lower bounds are made of."""


@dataclass(frozen=True)
class StepLedger:
    """Memory, communication and work of the first rank of each stage in a step."""

    stages: tuple[StageLedger, ...]
    message: tuple[int, ...]
    """Bytes of the tensors that a chunk sends to the next one for a micro-batch."""
    schedule: Schedule
    """Schedule with the fewest micro-batches after which it repeats."""
    more: int
    """Number of further micro-batches."""

    @property
    def distinct(self) -> Collection[StageLedger]:
        """Stages with different ledgers: one of each set that shares a ledger."""
        return {id(stage): stage for stage in self.stages}.values()

    @property
    def fullest(self) -> int:
        """Stage with the highest peak memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].peak)


class WorkKey(NamedTuple):
    """Fields of a `Plan` that the work of a module depends on."""

    tensor: int
    context: int
    context_kind: str
    expert: int
    expert_tensor: int
    sequence: bool
    chunks: int
    micro_size: int
    recompute: str
    recomputed: bool
    """True if some layers are recomputed."""
    on_host: bool
    """True if activations are offloaded to the host."""

    @classmethod
    def of(cls, plan: Plan) -> WorkKey:
        """Return the key of a layout."""
        return cls(
            plan.tensor,
            plan.context,
            plan.context_kind,
            plan.expert,
            plan.expert_tensor,
            plan.sequence,
            plan.chunks,
            plan.micro_size,
            plan.recompute,
            plan.recomputed > 0,
            "activations" in plan.offload,
        )


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


@dataclass
class Program:
    """Step of a configuration's model and batch, for any layout."""

    config: RunConfig
    note_progress: Callable[[], None] = lambda: None
    """Callback after each dry run."""
    _traces: Traces = field(init=False)
    _known: dict[Any, Trace] = field(default_factory=dict)
    _sketches: dict[Any, tuple[Trace, Trace]] = field(default_factory=dict)
    _cuts: dict[Any, Cut] = field(default_factory=dict)
    _kinds: dict[Any, tuple[Kinds, ...]] = field(default_factory=dict)
    _configs: dict[Any, RunConfig] = field(default_factory=dict)
    _stages: dict[Any, StageProgram] = field(default_factory=dict)
    _last: tuple[Any, StepLedger] | None = None

    def __post_init__(self) -> None:
        """Create the store of traces."""
        self._traces = Traces(self.note_progress)

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Measure the modules of several layouts together; raise DryRunError if a dry run fails or is unavailable."""
        stages = ((plan, part) for plan in plans for part in self.cut(plan).distinct)
        missing = {self._key(*stage): stage for stage in stages if self.known(*stage) is None}
        requests = {key: self._request(*stage) for key, stage in missing.items()}
        self._traces.measure(list(requests.values()))
        self._known |= {key: self._traces.of(request) for key, request in requests.items()}

    def is_prepared(self, plan: Plan) -> bool:
        """Return whether all modules of a layout have been measured."""
        return all(self.known(plan, part) for part in self.cut(plan).distinct)

    def sketch(self, plans: Iterable[Plan]) -> None:
        """Measure each kind of module in one chunk, for the micro-batch sizes in `SKETCHED`.

        The results are lower bounds for modules of other sizes and chunks. Raises DryRunError like `prepare`.
        """
        missing = {key: plan for plan in plans if (key := self._sketched(plan)) not in self._sketches}
        requests = {key: self._sketch_requests(plan) for key, plan in missing.items()}
        self._traces.measure([request for of_plan in requests.values() for request in of_plan])
        for key, (one, two) in requests.items():
            self._sketches[key] = self._traces.of(one), self._traces.of(two)

    def sketched(self, plan: Plan) -> tuple[Trace, Trace]:
        """Return the traces that `sketch` measures, one for each micro-batch size."""
        self.sketch([plan])
        return self._sketches[self._sketched(plan)]

    def _sketched(self, plan: Plan) -> Any:
        work, others = self._way(plan)
        return work._replace(micro_size=0, recompute="", recomputed=False, on_host=False), others

    def _sketch_requests(self, plan: Plan) -> tuple[TraceRequest, ...]:
        model = self.config.model
        plan = plan._replace(pipeline=1, virtual=1, schedule=SIMPLEST, layers=(model.layers,))
        plan = plan._replace(recompute="none", recomputed=1, offload=())
        (part,) = self.cut(plan).distinct
        return tuple(self._request(plan._replace(micro_size=size), part) for size in SKETCHED)

    def cut(self, plan: Plan) -> Cut:
        """Return the division of the model into the stages of a layout."""
        key = plan.schedule, plan.pipeline, plan.layers
        if key not in self._cuts:
            stage_of = chunk_stages(plan.schedule, plan.pipeline, plan.virtual)
            self._cuts[key] = _cut(self.config.model, bool(self.config.train.frozen), stage_of, plan.layers)
        return self._cuts[key]

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

    def _way(self, plan: Plan) -> Any:
        # with frozen weights, modules depend on the sharding too (`Traces`)
        others = (plan.zero, plan.zero_group, plan.data, plan.offload) if self.config.train.frozen else None
        return WorkKey.of(plan), others

    def _key(self, plan: Plan, part: StagePart) -> Any:
        shortest = tuple(of_chunk.shortest for of_chunk in self.kinds(plan, part))
        return self._way(plan), splits_backward(plan.schedule), shortest

    def _request(self, plan: Plan, part: StagePart) -> TraceRequest:
        way = self._way(plan)
        if way not in self._configs:
            self._configs[way] = configured(self.config, plan)
        chunks = tuple(of_chunk.shortest for of_chunk in self.kinds(plan, part))
        return TraceRequest(self._configs[way], chunks, (splits_backward(plan.schedule),))

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
        config, layout, schedule = configured(self.config, plan), plan.layout, schedule_of(plan)
        message, count = message_bytes(config), schedule.micro_batches
        more, cut = plan.micro_batches - count, self.cut(plan)
        run = StepRun(count, more, message, groups_of(layout, 1))
        actions = _stage_actions(schedule)
        held = most_held(plan.schedule, plan.pipeline, plan.virtual, count)
        fullest: dict[int, int] = {}
        for stage, place in enumerate(cut.alike):
            if place not in fullest or held[stage] > held[fullest[place]]:
                fullest[place] = stage
        made: dict[int, StageLedger] = {}
        stages = []
        for stage, place in enumerate(cut.alike):
            stands = stage if every else fullest[place]
            if stands not in made:
                part = cut.distinct[place]
                made[stands] = self._stage(config, plan, part, schedule).ledger(actions[stands], run)
            stages.append(made[stands])
        return StepLedger(tuple(stages), message, schedule, more)

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


def _cut(model: ModelConfig, by_name: bool, stage_of: tuple[int, ...], layers: tuple[int, ...]) -> Cut:
    """Return a model's stages with `layers` per chunk; `by_name`: all layers differ, as some weights are frozen."""
    last, bounds = len(layers) - 1, [0, *accumulate(layers)]
    held: list[dict[int, ModelPart]] = [{} for _ in range(max(stage_of) + 1)]
    for chunk, stage in enumerate(stage_of):
        part = ModelPart(range(bounds[chunk], bounds[chunk + 1]), chunk == 0, chunk == last)
        held[stage][len(held[stage])] = part

    def content(part: ModelPart) -> Any:
        kinds = ((layer == model.query_layer, model.has_experts(layer)) for layer in part.layers)
        return tuple(part.layers) if by_name else tuple(kinds), part.first, part.last

    distinct: dict[Any, StagePart] = {}
    contents = [tuple(map(content, chunks.values())) for chunks in held]
    for chunks, key in zip(held, contents, strict=True):
        distinct.setdefault(key, StagePart(chunks, key))
    places = {key: place for place, key in enumerate(distinct)}
    return Cut(stage_of, tuple(distinct.values()), tuple(places[key] for key in contents))


def message_bytes(config: RunConfig) -> tuple[int, ...]:
    """Return the bytes of the tensors that a chunk sends to the next one for a micro-batch."""
    parallel, model = config.parallel, config.model
    rank, length = TensorRank(0, parallel.tensor, parallel.sequence), model.sequence // parallel.context
    shared = parallel.context if parallel.context > 1 and context_kind(config) == "ulysses" else 1
    shapes = hidden_state_shapes(model, rank, config.batch.micro_size, length, model.sequence, shared)
    return tuple(BYTES[config.precision.compute] * math.prod(shape) for shape in shapes)


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


@lru_cache(maxsize=100)
def _stage_actions(schedule: Schedule) -> list[StageActions]:
    chunks: list[list[int]] = [[] for _ in range(schedule.stages)]
    for chunk, stage in enumerate(schedule.stage_of):
        chunks[stage].append(chunk)
    return [
        StageActions.of(actions, of_stage, schedule.micro_batches, schedule.stages)
        for actions, of_stage in zip(schedule.actions, chunks, strict=True)
    ]
