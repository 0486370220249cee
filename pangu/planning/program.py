"""Ledger of a step of all pipeline stages, for any layout of a model and batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, product
from typing import Any, NamedTuple

from pangu.config.context import context_kind
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.dryrun.traces import Request, Traces
from pangu.models.parameters import ModelPart, place_tensors
from pangu.models.size import hidden_state_shapes
from pangu.pipeline.actions import Action, Kind
from pangu.pipeline.orders import splits_backward
from pangu.pipeline.schedule import Schedule, make_schedule
from pangu.pipeline.spans import Span, SpanKey, Trace, keys_of, module_kinds
from pangu.pipeline.stages import shards_sums
from pangu.planning.plan import Plan, configured
from pangu.planning.stage_ledger import StageActions, StageLedger, StageProgram, StepRun, group_sizes
from pangu.topology.layout import Coordinates
from pangu.topology.placement import TensorRank
from pangu.zero.stage_parameters import StageParameters
from pangu.zero.states import BYTES


@dataclass(frozen=True)
class StepLedger:
    """What the first rank of each stage holds, sends and does in a step."""

    stages: tuple[StageLedger, ...]
    message: tuple[int, ...]
    """Bytes of the tensors that a chunk hands to the next one for a micro-batch."""
    schedule: Schedule
    """With as few micro-batches as it takes until they repeat."""
    more: int
    """Further micro-batches."""

    @property
    def fullest(self) -> int:
        """The stage that holds most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].peak)


class Way(NamedTuple):
    """What of a layout the work of a module depends on, as in `Plan`."""

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
    """Some layers are."""
    on_host: bool
    """Activations are sent there."""

    @classmethod
    def of(cls, plan: Plan) -> Way:
        """Return that of a layout."""
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


class Part(NamedTuple):
    """What a stage holds."""

    chunks: dict[int, ModelPart]
    content: Any
    """What tells it from stages whose ledger is another one."""


@dataclass
class Program:
    """The step of a configuration's model and batch, for any layout."""

    config: RunConfig
    note_progress: Callable[[], None] = lambda: None
    """Called after each dry run."""
    _traces: Traces = field(init=False)
    _known: dict[Any, Trace] = field(default_factory=dict)
    _stages: dict[Any, StageProgram] = field(default_factory=dict)
    _last: tuple[Any, StepLedger] | None = None

    def __post_init__(self) -> None:
        self._traces = Traces(self.note_progress)

    @cached_property
    def model(self) -> ModelConfig:
        """The model."""
        return self.config.model

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Measure the modules of layouts together. Raises DryRunError if one cannot be carried out, or the dry run is
        unavailable."""
        requests: dict[Any, Request] = {}
        cuts = {(Way.of(plan), plan.schedule, plan.layers, plan.recomputed): plan for plan in plans}
        for plan in cuts.values():
            for part in self.parts(plan):
                key = self._trace_key(plan, part)
                if key not in requests and key not in self._known:
                    requests[key] = self._request(configured(self.config, plan), plan, part)
        self._traces.measure(list(requests.values()))
        self._known |= {key: self._traces.of(request) for key, request in requests.items()}

    def describe(self, plan: Plan, every: bool = True) -> StepLedger:
        """Return the ledger of a step; unless `every` stage is wanted, one that holds as many micro-batches stands for
        others that have the same modules."""
        if self._last is None or self._last[0] != (plan, every):  # who asks for its memory asks for its time as well
            self._last = (plan, every), self._described(plan, every)
        return self._last[1]

    def spans(self, plan: Plan) -> Iterator[tuple[SpanKey, Span]]:
        """Yield the spans of all modules for one micro-batch, stage by stage. Raises DryRunError as `prepare`."""
        self.prepare([plan])
        for part in self.parts(plan):
            request = self._request(configured(self.config, plan), plan, part)
            for action, chunk in product(request.actions, request.chunks):
                spans = (span for _, span in self.trace(plan, part).of_action(action, chunk))
                yield from ((key, span) for key, span in zip(keys_of(action, chunk), spans, strict=True) if span)

    def _described(self, plan: Plan, every: bool) -> StepLedger:
        config, layout, schedule = configured(self.config, plan), plan.layout, schedule_of(plan)
        message, count = message_bytes(config), schedule.micro_batches
        more = plan.micro_batches - count
        run = StepRun(count, more, message, group_sizes(layout))
        parts, actions, held = self.parts(plan), _stage_actions(schedule), held_in(schedule)
        fullest: dict[Any, int] = {}
        for stage, part in enumerate(parts):
            other = fullest.get(part.content)
            if other is None or held[stage] > held[other]:
                fullest[part.content] = stage
        made: dict[int, StageLedger] = {}
        stages = []
        for stage, part in enumerate(parts):
            stands = stage if every else fullest[part.content]
            if stands not in made:
                made[stands] = self._stage(config, plan, part, schedule).ledger(actions[stands], run)
            stages.append(made[stands])
        return StepLedger(tuple(stages), message, schedule, more)

    def _stage(self, config: RunConfig, plan: Plan, part: Part, schedule: Schedule) -> StageProgram:
        """Return a stage that can be folded."""
        key = plan._replace(pipeline=1, virtual=1, layers=(), micro_batches=1), part.content
        if key not in self._stages:
            parameters = StageParameters.of_run(
                config, plan.layout, Coordinates(0, 0, 0), part.chunks, schedule.reduce_each
            )
            kinds = kinds_of(config, part.chunks)
            self._stages[key] = StageProgram(config, parameters, kinds, self.trace(plan, part))
        return self._stages[key]

    def trace(self, plan: Plan, part: Part) -> Trace:
        """Return what was measured of a stage's modules."""
        key = self._trace_key(plan, part)
        if key not in self._known:
            self._known[key] = self._traces.of(self._request(configured(self.config, plan), plan, part))
        return self._known[key]

    def _trace_key(self, plan: Plan, part: Part) -> Any:
        return Way.of(plan), plan.recomputed, splits_backward(plan.schedule), part.content

    def _request(self, config: RunConfig, plan: Plan, part: Part) -> Request:
        """Return what has to be measured of a stage."""
        chunks = tuple(tuple(of_chunk.values()) for of_chunk in kinds_of(config, part.chunks).values())
        return Request(config, chunks, (splits_backward(plan.schedule),))

    def parts(self, plan: Plan) -> list[Part]:
        """Return what each stage holds."""
        schedule = schedule_of(plan)
        return parts_of(self.model, bool(self.config.train.frozen), schedule.stage_of, schedule.stages, plan.layers)


@lru_cache(maxsize=10_000)
def parts_of(
    model: ModelConfig, by_name: bool, stage_of: tuple[int, ...], stages: int, layers: tuple[int, ...]
) -> list[Part]:
    """Return what each stage holds of so many layers in each chunk; `by_name`: no layer is like another one, as some
    weights are frozen."""
    last, bounds = len(layers) - 1, [0, *accumulate(layers)]
    held: list[dict[int, ModelPart]] = [{} for _ in range(stages)]
    for chunk, stage in enumerate(stage_of):
        part = ModelPart(range(bounds[chunk], bounds[chunk + 1]), chunk == 0, chunk == last)
        held[stage][len(held[stage])] = part

    def content(part: ModelPart) -> Any:
        kinds = ((layer == model.query_layer, model.has_experts(layer)) for layer in part.layers)
        return tuple(part.layers) if by_name else tuple(kinds), part.first, part.last

    return [Part(chunks, tuple(map(content, chunks.values()))) for chunks in held]


def kinds_of(config: RunConfig, parts: Mapping[int, ModelPart]) -> dict[int, dict[str, str]]:
    """Return the modules of each chunk with their kinds."""
    table = place_tensors(config.model, list(parts.values()), TensorRank(), config.train.frozen)
    return {chunk: module_kinds(config, table, part) for chunk, part in parts.items()}


def message_bytes(config: RunConfig) -> tuple[int, ...]:
    """Return the bytes of the tensors that a chunk hands to the next one for a micro-batch."""
    parallel, model = config.parallel, config.model
    rank, length = TensorRank(0, parallel.tensor, parallel.sequence), model.sequence // parallel.context
    shared = parallel.context if parallel.context > 1 and context_kind(config) == "ulysses" else 1
    shapes = hidden_state_shapes(model, rank, config.batch.micro_size, length, model.sequence, shared)
    return tuple(BYTES[config.precision.compute] * math.prod(shape) for shape in shapes)


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a layout, with as few micro-batches as it takes until they repeat."""
    return _schedule(plan.schedule, plan.pipeline, plan.virtual, plan.micro_batches, shards_sums(plan.layout))


@lru_cache(maxsize=10_000)
def _schedule(name: str, stages: int, virtual: int, micro_batches: int, each: bool) -> Schedule:
    least = 4 * stages + micro_batches % stages
    if least < micro_batches:
        schedule, longer = (make_schedule(name, stages, virtual, least + more, each) for more in (0, stages))
        if held_in(schedule) == held_in(longer):
            return schedule
    return make_schedule(name, stages, virtual, micro_batches, each)


@lru_cache(maxsize=10_000)
def held_in(schedule: Schedule) -> list[tuple[int, int]]:
    """Return the most micro-batches of each stage whose backward, and whose gradients of weights, are to come."""
    return [_most_held(actions) for actions in schedule.actions]


def _most_held(actions: Iterable[Action]) -> tuple[int, int]:
    forwards = inputs = 0
    most = (0, 0)
    for action in actions:
        forwards += (action.kind is Kind.FORWARD) - (action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT))
        inputs += (action.kind is Kind.BACKWARD_INPUT) - (action.kind is Kind.BACKWARD_WEIGHT)
        most = max(most[0], forwards), max(most[1], inputs)
    return most


@lru_cache(maxsize=1000)
def _stage_actions(schedule: Schedule) -> list[StageActions]:
    """Return the actions of each stage."""
    chunks: list[list[int]] = [[] for _ in range(schedule.stages)]
    for chunk, stage in enumerate(schedule.stage_of):
        chunks[stage].append(chunk)
    return [
        StageActions.of(actions, of_stage, schedule.micro_batches)
        for actions, of_stage in zip(schedule.actions, chunks, strict=True)
    ]
