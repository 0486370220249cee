"""Layouts as the planner knows them, and the ledger of a step of all pipeline stages for any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.dryrun.traces import Chunk, TraceRequest, Traces, shortened
from pangu.models.parameters import ModelPart, place_model
from pangu.pipeline.stages import default_layers, shards_sums, with_end
from pangu.schedule.groups import groups_of
from pangu.schedule.in_flight import peak_in_flight
from pangu.schedule.orders import SIMPLEST, NumbersError, reduces_each, splits_backward
from pangu.schedule.schedule import Schedule, chunk_stages, make_schedule
from pangu.schedule.spans import Trace, module_kinds
from pangu.schedule.stage_ledger import StageLedger, StageProgram, message_bytes, stage_actions
from pangu.topology.layout import Coordinates, Layout
from pangu.zero.grouping import IN_FLIGHT
from pangu.zero.stage_parameters import StageParameters

_SINGLE = Layout()
_ONE_CHUNK: dict[str, Any] = {"pipeline": 1, "virtual_stages": 1, "layers": (), "micro_batches": 1}
_ONE_REPLICA: dict[str, Any] = {"data": _SINGLE.data, "zero_group": _SINGLE.zero_group, "bucket_mib": None}
LAYOUT = tuple(field.name for field in fields(Layout))
"""Fields of a plan that are those of its layout."""
CONTEXT = "context_kind", "context_ulysses"
_degrees = attrgetter(*LAYOUT)
_layout = lru_cache(maxsize=100_000)(Layout)


class Plan(NamedTuple):
    """Layout and schedule of a model."""

    tensor: int
    pipeline: int
    virtual_stages: int
    data: int
    context: int
    zero: int
    sequence: bool
    recompute: Literal["none", "selective", "full"] | int
    """Recompute policy, or the number of layers of each chunk that are recomputed in full."""
    micro_size: int
    micro_batches: int
    schedule: str
    layers: tuple[int, ...] = ()
    """Layers of each chunk, if `parallel.layers` sets them."""
    zero_group: int = 0
    """Replicas that share model states; 0: all."""
    offload: tuple[Literal["activations", "optimizer", "parameters"], ...] = ()
    """Kinds of tensors kept in host memory; see `memory.offload`."""
    chunks: int = 1
    """Number of chunks a matmul is split into, so that communication overlaps computation."""
    expert: int = 1
    """Expert-parallel size: ranks that share the experts of each layer."""
    expert_tensor: int = 0
    """Tensor-parallel ranks that share each expert; 0: all."""
    bucket_mib: float | None = None
    """Size of the messages of gradients; see `parallel.bucket_mib`."""
    context_kind: str = "auto"
    context_ulysses: int = 1
    """Exchange of context parallelism; see `parallel.context_kind` and `context_ulysses`."""

    @property
    def layout(self) -> Layout:
        """Parallel degrees of the plan."""
        return _layout(*_degrees(self))


_PARALLEL = ("tensor", "pipeline", "virtual_stages", "schedule", "data", "context", *CONTEXT, "expert")
_OTHERS = "layers", "expert_tensor", "sequence", "zero", "zero_group", "bucket_mib"
KEYS = {
    **{field: f"parallel.{field}" for field in (*_PARALLEL, *_OTHERS)},
    "micro_size": "batch.micro_size",
    "recompute": "memory.recompute",
    "offload": "memory.offload",
    "chunks": "parallel.overlap_chunks",
}
"""Mapping from a plan field to its configuration key: a search tries all values of each field that is not given."""


def key_values(plan: Plan) -> dict[str, Any]:
    """Return the configuration keys that a layout sets, with their values."""
    defaults = {name: getattr(plan, name) or None for name in ("zero_group", "expert_tensor")}
    values = plan._asdict() | defaults | {"offload": list(plan.offload), "layers": list(plan.layers) or None}
    return {key: values[field] for field, key in KEYS.items()}


def grouped(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the values that a layout sets in each configuration group."""
    groups: dict[str, dict[str, Any]] = {"parallel": {}, "batch": {}, "memory": {}}
    for key, value in key_values(plan).items():
        group, _, name = key.partition(".")
        groups[group][name] = value
    return groups


def configured(config: RunConfig, plan: Plan) -> RunConfig:
    """Return a configuration with the layout of a plan."""
    groups = grouped(plan)
    groups["parallel"]["layers"], groups["memory"]["offload"] = plan.layers or None, plan.offload
    changes = {name: replace(getattr(config, name), **group) for name, group in groups.items()}
    return replace(config, **changes, dry_run=False)


def plan_of(config: RunConfig, layout: Layout) -> Plan:
    """Return the layout of a configuration as the cost model's plan."""
    fields = {field: attrgetter(key)(config) for field, key in KEYS.items()}
    fields |= {name: getattr(layout, name) for name in LAYOUT} | {"recompute": config.memory.recompute or "none"}
    fields["layers"] = config.parallel.layers or ()
    return Plan(**fields, micro_batches=config.batch.accumulation(layout.data))


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


class StagePart(NamedTuple):
    """Modules that some stages hold."""

    stages: tuple[int, ...]
    chunks: dict[int, ModelPart]
    """Chunks of the first of these stages, by their number on the stage."""
    content: int
    """Number that differs between stages with different ledgers."""


class Program:
    """Step of a configuration's model and batch, for any layout."""

    def __init__(self, config: RunConfig, sketch_size: int = 0) -> None:
        """Begin with nothing measured.

        `sketch_size`: sequences of the micro-batches that `sketch` measures; 0: those of each layout.
        """
        self.config, self._traces, self._sketch_size = config, Traces(), sketch_size
        self._known: dict[Any, Trace] = {}
        self._module_plans: dict[Plan, Plan] = {}
        self._cuts: dict[Any, tuple[StagePart, ...]] = {}
        self._contents: dict[Any, int] = {}
        self._kinds: dict[Any, tuple[Chunk, ...]] = {}
        self._stages: dict[Any, StageProgram] = {}

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Measure the modules of several layouts together; raise DryRunError if a dry run fails or is unavailable."""
        keys = dict.fromkeys(self._key(plan, part) for plan in plans for part in self.cut(plan))
        missing = (key for key in keys if key not in self._known)
        requests = {key: TraceRequest(configured(self.config, key[0]), key[2], (key[1],)) for key in missing}
        if requests:
            self._known |= zip(requests, self._traces.measure(requests.values()), strict=True)

    def is_prepared(self, plan: Plan) -> bool:
        """Return whether all modules of a layout have been measured."""
        return all(self._key(plan, part) in self._known for part in self.cut(plan))

    def sketch(self, plans: Iterable[Plan]) -> None:
        """Measure each kind of module in one chunk; raise DryRunError like `prepare`.

        The results are lower bounds for modules of other chunks.
        """
        self.prepare({sketch for plan in plans for sketch in self._sketches(plan)})

    def is_sketched(self, plan: Plan) -> bool:
        """Return whether `sketch` has measured a layout."""
        return all(map(self.is_prepared, self._sketches(plan)))

    def sketched(self, plan: Plan) -> tuple[list[Trace], float]:
        """Return the traces that `sketch` measures, and the plan's share of the sequences of their micro-batches.

        With offloaded activations, a second trace has them.
        """
        sketches = self._sketches(plan)
        self.prepare(sketches)
        traces = [self._known[self._key(sketch, self.cut(sketch)[0])] for sketch in sketches]
        return traces, plan.micro_size / sketches[0].micro_size

    def _sketches(self, plan: Plan) -> list[Plan]:
        """Return layouts of one chunk; one of its layers is recomputed, unless in the selective way."""
        model = self.config.model
        plan = self.module_plan(plan)._replace(micro_size=self._sketch_size or plan.micro_size)
        plan = plan if plan.recompute == "selective" else plan._replace(recompute=1)
        # spans depend on the place of a layer if it is frozen or offloaded (all but the last one), and on its kind else
        fewest = model.layers if self.config.train.frozen else _fewest_layers(model)
        offloads = dict.fromkeys(((), plan.offload))
        return [plan._replace(offload=one, layers=(min(fewest + bool(one), model.layers),)) for one in offloads]

    def layers(self, plan: Plan) -> tuple[int, ...]:
        """Return the number of layers of each chunk."""
        return plan.layers or default_layers(self.config.model, plan.pipeline * plan.virtual_stages)

    def cut(self, plan: Plan) -> tuple[StagePart, ...]:
        """Return the different parts of the model that the stages of a layout hold."""
        key = plan.schedule, plan.pipeline, plan.virtual_stages, plan.layers
        if key not in self._cuts:
            model, bounds = self.config.model, [0, *accumulate(self.layers(plan))]
            held: list[dict[int, ModelPart]] = [{} for _ in range(plan.pipeline)]
            for chunk, stage in enumerate(chunk_stages(plan.schedule, plan.pipeline, plan.virtual_stages)):
                layers = range(bounds[chunk], bounds[chunk + 1])
                part = (
                    with_end(model, layers, chunk == 0) if layers.stop == bounds[-1] else ModelPart(layers, chunk == 0)
                )
                held[stage][len(held[stage])] = part

            def content(part: ModelPart) -> Any:
                # all layers differ if some weights are frozen
                kinds = part.layers if self.config.train.frozen else map(model.kind_of_layer, part.layers)
                return tuple(kinds), part.first, part.last

            stages: dict[int, list[int]] = {}
            for stage, chunks in enumerate(held):
                contents = tuple(map(content, chunks.values()))
                stages.setdefault(self._contents.setdefault(contents, len(self._contents)), []).append(stage)
            self._cuts[key] = tuple(StagePart(tuple(of), held[of[0]], number) for number, of in stages.items())
        return self._cuts[key]

    def known(self, plan: Plan, part: StagePart) -> Trace | None:
        """Return the measured trace of a stage's modules, or None if some have not been measured."""
        return self._known.get(self._key(plan, part))

    def kinds(self, plan: Plan, part: StagePart) -> tuple[Chunk, ...]:
        """Return the kinds of the modules of each chunk, in the order of the forward pass."""
        key = part.content, plan.recompute, "activations" in plan.offload
        if key not in self._kinds:
            config = configured(self.config, plan)
            table = place_model(config.model, config.train.frozen)
            self._kinds[key] = tuple(tuple(module_kinds(config, table, one).values()) for one in part.chunks.values())
        return self._kinds[key]

    def module_plan(self, plan: Plan) -> Plan:
        """Return a plan reduced to the fields that affect the work of a module."""
        if plan in self._module_plans:
            return self._module_plans[plan]
        work = _ONE_CHUNK | {"schedule": SIMPLEST}
        if isinstance(plan.recompute, int):
            work["recompute"] = 1
        if not self.config.train.frozen:  # if some weights are frozen, modules depend on the sharding too (`Traces`)
            begins = self.config.precision.matmul == "fp8" and shards_sums(plan.layout) and reduces_each(plan.schedule)
            work |= _ONE_REPLICA | {"offload": ("activations",) if "activations" in plan.offload else ()}
            work["zero"] = plan.zero if begins else _SINGLE.zero
        return self._module_plans.setdefault(plan, plan._replace(**work))

    def _key(self, plan: Plan, part: StagePart) -> tuple[Plan, bool, tuple[Chunk, ...]]:
        return self.module_plan(plan), splits_backward(plan.schedule), tuple(map(shortened, self.kinds(plan, part)))

    def describe(
        self, plan: Plan, every: bool = True, fits: Callable[[StageLedger], bool] = lambda _: True
    ) -> StepLedger:
        """Return the ledger of a step, without further stages after one that does not fit.

        Unless `every` stage is wanted, one that holds as many micro-batches represents others with the same modules.
        """
        self.prepare([plan])
        config, schedule = configured(self.config, plan), schedule_of(plan)
        held = peak_in_flight(plan.schedule, plan.pipeline, plan.virtual_stages, schedule.micro_batches)
        extra, groups = plan.micro_batches - schedule.micro_batches, groups_of(plan.layout, 1)
        ledgers = dict[int, StageLedger]()
        for part in self.cut(plan):
            program = self._stage(config, plan, part, schedule)
            described = part.stages if every else (max(part.stages, key=held.__getitem__),)
            found = {stage: program.ledger(stage_actions(schedule, stage), extra, groups) for stage in described}
            ledgers |= {stage: found.get(stage, found[described[0]]) for stage in part.stages}
            if not all(map(fits, found.values())):
                break
        return StepLedger(tuple(ledgers[stage] for stage in sorted(ledgers)), message_bytes(config), schedule, extra)

    def _stage(self, config: RunConfig, plan: Plan, part: StagePart, schedule: Schedule) -> StageProgram:
        alike = plan._replace(**_ONE_CHUNK, schedule="")
        key = alike, schedule.splits_backward, schedule.reduce_each, part.content
        if key not in self._stages:
            at = Coordinates(0, 0, 0)
            parameters = StageParameters.of_run(config, plan.layout, at, part.chunks, schedule.reduce_each)
            kinds = {
                chunk: dict(zip(parameters.uses[chunk], chunk_kinds, strict=True))
                for chunk, chunk_kinds in zip(part.chunks, self.kinds(plan, part), strict=True)
            }
            trace = self._known[self._key(plan, part)]
            self._stages[key] = StageProgram(config, parameters, kinds, trace, schedule.splits_backward)
        return self._stages[key]


_schedule = lru_cache(maxsize=100)(make_schedule)


def schedule_of(plan: Plan) -> Schedule:
    """Return the schedule of a plan with the fewest micro-batches that represent its step."""
    reduce_each = shards_sums(plan.layout) and reduces_each(plan.schedule)
    return _schedule(plan.schedule, plan.pipeline, plan.virtual_stages, shortest(plan), reduce_each)


@lru_cache(maxsize=100)
def _fewest_layers(model: ModelConfig) -> int:
    """Return the number of first layers that have every kind of layer of the model, and the first kind twice."""
    kinds = [model.kind_of_layer(layer) for layer in range(model.layers)]
    return 1 + max(kinds.index(kind, 1) if kind in kinds[1:] else 0 for kind in set(kinds))


@lru_cache(maxsize=100_000)
def shortest(plan: Plan) -> int:
    """Return the fewest micro-batches that represent a step.

    More of them raise neither the micro-batches a stage holds nor the reductions in flight in the repeated round.
    """
    numbers = plan.schedule, plan.pipeline, plan.virtual_stages
    even = plan.virtual_stages == 1 or plan.micro_batches % plan.pipeline == 0  # other rounds do not repeat
    least = max(4 * plan.pipeline, 2 * IN_FLIGHT + 1) + plan.micro_batches % plan.pipeline
    with suppress(NumbersError):
        more = least + plan.pipeline
        if even and least < plan.micro_batches and peak_in_flight(*numbers, least) == peak_in_flight(*numbers, more):
            return least
    return plan.micro_batches
