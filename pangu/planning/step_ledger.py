"""Ledger of a step of all pipeline stages, for any layout of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

from pangu.config.context import context_kind
from pangu.config.schema import RunConfig
from pangu.dryrun.traces import Request, Traces
from pangu.models.parameters import ModelPart, place_tensors
from pangu.models.size import hidden_state_shapes
from pangu.pipeline.actions import Action, Kind
from pangu.pipeline.schedule import Schedule, make_schedule
from pangu.pipeline.spans import Span, SpanKey, keys_of, module_kinds
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


@dataclass
class Program:
    """The step of a configuration's model and batch, for any layout."""

    config: RunConfig
    note_progress: Callable[[], None] = lambda: None
    """Called after each dry run."""
    _traces: Traces = field(init=False)
    _stages: dict[Any, StageProgram] = field(default_factory=dict)
    _last: tuple[Plan, StepLedger] | None = None

    def __post_init__(self) -> None:
        self._traces = Traces(self.note_progress)

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Measure the modules of layouts together. Raises DryRunError if one cannot be carried out, or the dry run is
        unavailable."""
        requests: dict[Any, Request] = {}
        for plan in plans:
            config = None
            for key, parts in self._parts(plan):
                if key not in requests:
                    config = config or configured(self.config, plan)
                    requests[key] = self._request(config, plan, parts)
        self._traces.measure(list(requests.values()))

    def describe(self, plan: Plan) -> StepLedger:
        """Return the ledger of a step."""
        if self._last is None or self._last[0] != plan:  # who asks for its memory asks for its time as well
            self._last = plan, self._described(plan)
        return self._last[1]

    def spans(self, plan: Plan) -> Iterator[tuple[SpanKey, Span]]:
        """Yield the spans of all modules for one micro-batch, stage by stage. Raises DryRunError as `prepare`."""
        self.prepare([plan])
        config = configured(self.config, plan)
        for _, parts in self._parts(plan):
            request = self._request(config, plan, parts)
            for action, chunk in product(request.actions, request.chunks):
                spans = (span for _, span in self._traces.of(request).of_action(action, chunk))
                yield from ((key, span) for key, span in zip(keys_of(action, chunk), spans, strict=True) if span)

    def _described(self, plan: Plan) -> StepLedger:
        config, layout, schedule = configured(self.config, plan), plan.layout, schedule_of(plan)
        message, count = message_bytes(config), schedule.micro_batches
        run = StepRun(count, plan.micro_batches - count, message, group_sizes(layout))
        stages = []
        for actions, (key, parts) in zip(_stage_actions(schedule), self._parts(plan), strict=True):
            if key not in self._stages:
                at = Coordinates(0, 0, 0)
                parameters = StageParameters.of_run(config, layout, at, parts, schedule.reduce_each)
                trace = self._traces.of(self._request(config, plan, parts))
                self._stages[key] = StageProgram(config, parameters, self._kinds(config, parts), trace)
            stages.append(self._stages[key].ledger(actions, run))
        return StepLedger(tuple(stages), message)

    def _parts(self, plan: Plan) -> list[tuple[Any, dict[int, ModelPart]]]:
        """Return what each stage holds, chunk by chunk, with a key that stages of equal ledgers share."""
        last = len(plan.layers) - 1
        alike = plan._replace(pipeline=1, virtual=1, layers=(), micro_batches=1)
        bounds = [0, *accumulate(plan.layers)]
        parts = [
            ModelPart(range(bounds[chunk], bounds[chunk + 1]), chunk == 0, chunk == last) for chunk in range(last + 1)
        ]
        held = [{place: parts[chunk] for place, chunk in enumerate(chunks)} for chunks in chunks_of(schedule_of(plan))]
        return [((alike, *(self._content(part) for part in of_stage.values())), of_stage) for of_stage in held]

    def _content(self, part: ModelPart) -> Any:
        """Return what tells a chunk from others: where weights are frozen by name, the layers themselves."""
        model = self.config.model
        layers = (
            tuple(part.layers)
            if self.config.train.frozen
            else tuple((layer == model.query_layer, model.has_experts(layer)) for layer in part.layers)
        )
        return layers, part.first, part.last

    def _request(self, config: RunConfig, plan: Plan, parts: Mapping[int, ModelPart]) -> Request:
        """Return what has to be measured of a stage."""
        kinds = self._kinds(config, parts)
        splits = schedule_of(plan).splits_backward
        return Request(config, tuple(tuple(of_chunk.values()) for of_chunk in kinds.values()), (splits,))

    def _kinds(self, config: RunConfig, parts: Mapping[int, ModelPart]) -> dict[int, dict[str, str]]:
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
        if list(map(_most_held, schedule.actions)) == list(map(_most_held, longer.actions)):
            return schedule
    return make_schedule(name, stages, virtual, micro_batches, each)


def _most_held(actions: Iterable[Action]) -> tuple[int, int]:
    """Return the most micro-batches whose backward, and whose gradients of weights, are to come."""
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
    return [
        StageActions.of(actions, chunks, schedule.micro_batches)
        for actions, chunks in zip(schedule.actions, chunks_of(schedule), strict=True)
    ]


def chunks_of(schedule: Schedule) -> list[list[int]]:
    """Return the chunks of each stage in model order."""
    chunks: list[list[int]] = [[] for _ in range(schedule.stages)]
    for chunk, stage in enumerate(schedule.stage_of):
        chunks[stage].append(chunk)
    return chunks
