"""What this program does in a step: counted modules, spread over the ranks of a layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from pangu.config.context import context_kind
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart
from pangu.models.size import hidden_state_shapes
from pangu.pipeline.orders import SCHEDULES, splits_backward
from pangu.planning.layout_work import (
    DENSE,
    RESIDENT,
    Plan,
    Shape,
    System,
    Update,
    Weights,
    assemble,
    cut,
    kinds_of_chunks,
    kinds_of_layers,
    sent_to_host,
)
from pangu.planning.module_parameters import dense_layers, module_parameters, table_parameters
from pangu.planning.module_work import ModuleCounts, Piece
from pangu.planning.passing import Chunk, Flat, Formats, Module, Passing, Steps, Stored, divided, most_passing, sums_of
from pangu.planning.workload import Collective, ModuleWork, StepWork, Work, Workload
from pangu.topology.experts import ExpertRank
from pangu.topology.layout import Coordinates
from pangu.topology.placement import TensorRank
from pangu.zero.grouping import Sharding, buffer_table
from pangu.zero.states import BYTES, sum_bytes

HIDDEN = 0.9
"""Share of the communication of replicas that runs beside computing, where `parallel.overlap` asks for it."""


@dataclass
class Program:
    """The step of a configuration's model and batch, for any layout."""

    config: RunConfig
    exact: bool = True
    """As in `ModuleCounts`."""
    note_progress: Callable[[], None] = lambda: None
    """Called after each dry run."""
    _counts: ModuleCounts = field(init=False)
    _modules: dict[tuple[Any, ...], dict[str, ModuleWork]] = field(default_factory=dict)
    _last: tuple[Plan, Workload] | None = None

    def __post_init__(self) -> None:
        self._counts = ModuleCounts(self.config, self.exact, self.note_progress)

    @cached_property
    def shape(self) -> Shape:
        """The query layer counts as a layer; of experts those of a token."""
        model = self.config.model
        kv_heads = model.kv_heads if model.kv_heads is not None else model.heads
        sparse = len(model.expert_layers)
        active = (model.num_chosen + model.shared_experts) * model.expert_size
        ffn = ((model.layers - sparse) * model.ffn_size + sparse * active) // model.layers
        numbers = (model.layers, model.hidden, model.heads, kv_heads, ffn, model.vocab, model.sequence)
        return Shape(*numbers, model.activation == "swiglu", model.tied_head, dense_layers(model))

    @cached_property
    def system(self) -> System:
        """How states are kept and sent; what a layer does is counted, not said here."""
        config = self.config
        message = 2 if config.precision.reduce == "bf16" else sum_bytes(config)
        hidden = HIDDEN if config.parallel.overlap else 0.0
        narrow = BYTES[config.precision.compute]
        return System(message, hidden, narrow)

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Count the modules of layouts together. Raises DryRunError if one cannot be carried out,
        or the dry run is unavailable."""
        self._counts.count({(piece, plan.micro_size) for plan in plans for piece in self._pieces(plan).values()})

    def describe(self, plan: Plan) -> Workload:
        """The workload of a step."""
        if self._last is None or self._last[0] != plan:  # who asks for its memory asks for its time as well
            self._last = plan, self._described(plan)
        return self._last[1]

    def _described(self, plan: Plan) -> Workload:
        self.prepare([plan])
        pieces = self._pieces(plan)
        modules = self._of(pieces["layer"], plan)
        modules = modules | {kind: self._of(piece, plan)["layer"] for kind, piece in pieces.items()}
        if "activations" in plan.offload:
            away = {kind: sent_to_host(modules[kind]) for kind in pieces}
            modules = modules | away | {kind + RESIDENT: modules[kind] for kind in pieces}
        counted = pieces["layer"] if self.exact else pieces["layer"].counted
        numbers = module_parameters(self.config.model, counted.without_recompute)["layer"]
        numbers_of_layer = numbers.parameters + numbers.experts
        update = Update(*self._counts.update(pieces["layer"], plan.micro_size, numbers_of_layer))
        workload = assemble(
            self.shape, self.system, plan, modules, update, table_parameters(self.config.model, plan.tensor)
        )
        message = self._message_bytes(plan)
        stored: dict[tuple[int, int], StepWork] = {}  # most stages are alike
        steps = []
        for stage, step in enumerate(workload.steps):
            key = id(step), _communicators(plan, stage, self.config.model)
            if key not in stored:
                chunks = self._chunks(plan, modules, stage)
                step = self._stored(plan, step, modules["layer"], chunks)
                held = [order for at, order in zip(plan.steps.stage_of, workload.orders, strict=True) if at == stage]
                gathers = self._more_gathered(plan, chunks, [modules[kind] for order in held for kind in order])
                stored[key] = replace(step, collectives=(*step.collectives, *gathers), communicators=key[1])
            steps.append(stored[key])
        # modules were counted in chunks that had what they received before and what they send still: one stands for the
        # other, but the first chunk receives nothing and the last one sends nothing. What is received stays on the
        # device, whereas what the first of several layers saves, and it with that, does not
        last, moves = len(workload.orders) - 1, "activations" in plan.offload
        more = (
            message * ((number == last) - (number == 0) + (moves and number > 0 and layers > 1))
            for number, layers in enumerate(plan.layers)
        )
        return replace(workload, steps=tuple(steps), message_bytes=message, more_saved=tuple(more))

    def _message_bytes(self, plan: Plan) -> int:
        """Return the bytes that a stage hands to the next one for a micro-batch."""
        model, rank = self.config.model, TensorRank(0, plan.tensor, plan.sequence)
        length, kind = model.sequence // plan.context, self._pieces(plan)["layer"].context_kind
        shared = plan.context if kind == "ulysses" else 1
        shapes = hidden_state_shapes(model, rank, plan.micro_size, length, model.sequence, shared)
        return BYTES[self.config.precision.compute] * sum(map(math.prod, shapes))

    def _chunks(self, plan: Plan, modules: Mapping[str, ModuleWork], stage: int) -> list[Chunk]:
        """Return the chunks of a stage, with the flat parameters of ZeRO-2 and 3, which come and go."""
        counts = cut(self.shape, plan)
        bounds, last = list(accumulate(counts, initial=0)), len(counts) - 1
        numbers = [number for number, at in enumerate(plan.steps.stage_of) if at == stage]
        layers = [range(bounds[number], bounds[number + 1]) for number in numbers]
        parts = [ModelPart(held, number == 0, number == last) for held, number in zip(layers, numbers, strict=True)]
        flats: Sequence[tuple[tuple[Flat, ...], ...]] = [()] * len(parts)
        if plan.zero >= 2:
            layout, rank = plan.layout, TensorRank(0, plan.tensor, plan.sequence)
            share = ExpertRank.of(layout, Coordinates(0, 0, 0)) if layout.splits_experts else None
            bucket = self.config.parallel.bucket_bytes(plan.zero, plan.replicas)
            flats = divided(self.config.model, tuple(parts), rank, share, bucket)
        chunks = []
        kinds = kinds_of_chunks(self.shape.dense, tuple(counts))
        for number, part, of_chunk in zip(numbers, parts, flats, strict=True):
            of_layers = kinds_of_layers(kinds[number], plan.recomputed, modules)
            names = [*["embedding"] * part.first, *of_layers, *["head"] * part.last]
            held = (Module(one.saved_bytes, one.deferred_bytes, one.working) for one in map(modules.get, names) if one)
            chunks.append(Chunk(tuple(held), of_chunk, part.first, part.last))
        return chunks

    def _more_gathered(
        self, plan: Plan, chunks: Sequence[Chunk], modules: Sequence[ModuleWork]
    ) -> Iterator[Collective]:
        """Yield what ZeRO-3 gathers in a step besides what the modules of a stage are said to: modules in a flat
        parameter gather it together, and where another one's use comes between them, again."""
        two_phases = SCHEDULES[plan.schedule].two_phases
        for weights in Weights.of(plan, 0.0, 0.0):
            sharding = _sharding(plan, weights.experts)
            if sharding.stage < 3:
                continue
            axis = weights.axis("shard")
            said = plan.micro_batches * sum(
                one.bytes * one.calls
                for module in modules
                for work in (module.forward, module.backward_input)
                for one in work.collectives
                if (one.kind, one.axis) == ("all_gather", axis)
            )
            kinds = Passing(not weights.experts, False, 1), Passing(weights.experts, False, 1)
            if two_phases:
                last = len(chunks) - 1  # its weights stay for its backward, which comes first
                gathered = sum(
                    chunk.gathered(kinds, True) + chunk.gathered(kinds, False) * (number < last)
                    for number, chunk in enumerate(chunks)
                )
            else:
                gathered = plan.micro_batches * sum(chunk.gathers(weights.experts) for chunk in chunks)
            more = self.system.number_bytes * gathered - said
            if abs(more) > 1e-6 * said:
                yield Collective("all_gather", axis, abs(more), math.copysign(1, more), self.system.hidden_data)

    def _stored(self, plan: Plan, step: StepWork, layer: ModuleWork, chunks: Sequence[Chunk]) -> StepWork:
        """What a stage of these chunks does once a step, with what this program stores and sends."""
        stored = self.stored_bytes(plan, step.parameters, step.experts, chunks)
        # what the ends share is summed after it was reduced
        share = self._bytes[1] / self.system.gradient_bytes / _sharding(plan).size
        sends = [one._replace(bytes=one.bytes * share) if one.axis == "ends" else one for one in step.collectives]
        for weights in Weights.of(plan, step.parameters, step.experts):
            if _sharding(plan, weights.experts).stage == 3 and not plan.reduces_each:
                sends.append(self._reduction(weights))
        return replace(
            step,
            collectives=tuple(sends),
            state_bytes=stored.lasting,
            passing=stored.passing,
            sums=stored.sums,
            sums_ahead=stored.sums_ahead,
            update_working_bytes=max(step.update_working_bytes, self._ending(plan, step, layer)),
        )

    def _pieces(self, plan: Plan) -> dict[str, Piece]:
        """How the layers of each kind are cut."""
        shared = {name: getattr(plan, name) for name in ("tensor", "context", "context_kind")}
        batch = replace(self.config.batch, micro_size=plan.micro_size)
        config = replace(self.config, parallel=replace(self.config.parallel, **shared), batch=batch)
        kind = context_kind(config) if plan.context > 1 else "auto"
        apart = plan.expert_tensor if plan.expert_tensor < plan.tensor else 0
        layer = Piece(plan.tensor, plan.sequence, plan.recompute, plan.chunks, plan.context, kind, plan.expert, apart)
        layer = layer._replace(loss_chunks=_loss_chunks(config))
        pieces = {"layer": layer}
        if self.shape.dense:
            pieces[DENSE + "layer"] = layer.without_experts
        if plan.recomputed:
            in_full = {name: piece._replace(recompute="full") for name, piece in pieces.items()}
            pieces |= {name.replace("layer", "recomputed"): piece for name, piece in in_full.items()}
        return pieces

    def _of(self, piece: Piece, plan: Plan) -> dict[str, ModuleWork]:
        """The modules of a piece, with what ZeRO-3 sends for them."""
        late, two_phases = splits_backward(plan.schedule), SCHEDULES[plan.schedule].two_phases
        often = (plan.micro_batches, plan.virtual) if two_phases else None
        ranks = tuple(of_ranks.shards for of_ranks in Weights.of(plan, 0, 0))
        sends = (plan.schedule, plan.pipeline == 1, often, ranks, plan.offload) if plan.zero == 3 else None
        key = piece, plan.micro_size, late, sends
        if key not in self._modules:
            numbers = module_parameters(self.config.model, piece.without_recompute)
            modules = self._counts.of(piece, plan.micro_size)
            if not late:
                modules = modules | {"layer": _joined_backward(modules["layer"])}
            counted = {kind: replace(module, **numbers[kind]._asdict()) for kind, module in modules.items()}
            if sends:
                counted = {kind: self._sent(kind, module, plan) for kind, module in counted.items()}
            self._modules[key] = counted
        return self._modules[key]

    def _sent(self, kind: str, module: ModuleWork, plan: Plan) -> ModuleWork:
        """With what ZeRO-3 gathers for a micro-batch, and reduces after each (Rajbhandari et al. 2020, 7.2.2)."""
        family, system = SCHEDULES[plan.schedule], self.system
        forward = back = 1.0
        if family.two_phases:  # a chunk is gathered once for all micro-batches, and the last one kept for backward
            forward, back = 1 / plan.micro_batches, (1 - 1 / plan.virtual) / plan.micro_batches
        for weights in Weights.of(plan, module.parameters, module.experts):
            sharding = _sharding(plan, weights.experts)
            if not weights.numbers or sharding.stage < 3:
                continue
            in_backward = weights.numbers - (0.0 if weights.experts else module.forward_only)
            gathered = ("forward", weights.numbers, forward), ("backward_input", in_backward, back)
            for phase, numbers, calls in gathered:
                if not numbers:
                    continue
                gather = self._sharded("all_gather", weights._replace(numbers=numbers), system.number_bytes, calls)
                # from the host comes this rank's shard
                fetched = gather.bytes / sharding.size * ("parameters" in plan.offload)
                sends: dict[str, Any] = {phase: _sending(getattr(module, phase), gather, fetched)}
                module = replace(module, **sends)
            if not plan.reduces_each:
                continue
            if kind == "head" and self.config.model.tied_head and (plan.pipeline == 1 or family.v_shape):
                # reduced with the embedding
                weights = weights._replace(numbers=weights.numbers - table_parameters(self.config.model, plan.tensor))
            module = replace(module, backward_weight=_sending(module.backward_weight, self._reduction(weights)))
        return module

    def _reduction(self, weights: Weights) -> Collective:
        """Of the gradients of weights."""
        return self._sharded("reduce_scatter", weights, self.system.gradient_bytes)

    def _sharded(
        self, kind: Literal["all_gather", "reduce_scatter"], weights: Weights, size: int, calls: float = 1.0
    ) -> Collective:
        """Of weights, `size` bytes each, over the ranks that share them. A negative number of them (`head` is counted
        without a layer, which may have more) takes calls off."""
        sent, calls = size * abs(weights.numbers), math.copysign(calls, weights.numbers)
        return Collective(kind, weights.axis("shard"), sent, calls, self.system.hidden_data)

    def _ending(self, plan: Plan, step: StepWork, layer: ModuleWork) -> float:
        """Bytes of gradients in a shorter format that are sent once a step, all at a time, and of the last backward."""
        size, sent, of_layer = self.system.gradient_bytes, 0.0, 0.0
        if size == self._bytes[1]:
            return 0.0
        of_layers = Weights.of(plan, layer.parameters, layer.experts)
        for weights, each in zip(Weights.of(plan, step.parameters, step.experts), of_layers, strict=True):
            reduced = plan.zero >= 2 and weights.shards > 1 and plan.reduces_each
            if weights.replicas > 1 and not reduced:
                both = size * (1 + (weights.shards > 1) / weights.shards)
                sent, of_layer = sent + both * weights.numbers, of_layer + both * each.numbers
        return sent + max(0.0, layer.working_bytes - of_layer) if sent else 0.0

    def stored_bytes(self, plan: Plan, numbers: float, experts: float, chunks: Sequence[Chunk]) -> Stored:
        """What a stage of so many parameters, and of `experts` that the layout splits, stores on the device."""
        narrow, wide = self._bytes
        moments = 2 * (2 if self.config.optimizer.moments == "bf16" else wide) * ("optimizer" not in plan.offload)
        formats = Formats(narrow, wide, self.system.gradient_bytes)
        kinds, lasting = [], 0.0
        two_phases, reduces = SCHEDULES[plan.schedule].two_phases, plan.reduces_each
        for weights in Weights.of(plan, numbers, experts):
            sharding = _sharding(plan, weights.experts)
            kinds.append(Passing.of(sharding))
            rows = buffer_table(math.ceil(weights.numbers), narrow < wide, sharding, True)
            stored_rows = (row for row in rows if row.alias is None and row.lasting and not row.on_host)
            lasting += sum(row.numel * (wide if row.wide else narrow) for row in stored_rows)
            lasting += moments * weights.numbers / sharding.size
        both = kinds[0], kinds[-1]
        sums = () if reduces else sums_of(chunks, *both, wide)
        in_chunks = chunks[-1].head and self._pieces(plan)["layer"].loss_chunks != 1
        passing: list[tuple[float, float]] = []
        if two_phases and any(kind.weights for kind in both):
            # a chunk at a time is gathered; a lookup's backward needs none, but the last chunk's have stayed
            alone = len(chunks) == 1
            phases = ([chunk.gathered(both, lookups) for lookups in (True, alone)] for chunk in chunks)
            passing = [(narrow * forward, narrow * back) for forward, back in phases]
        elif any(kind.weights or (reduces and kind.sums) for kind in both):
            overlap = self.config.parallel.overlap
            steps = Steps(min(2, plan.micro_batches), reduces, splits_backward(plan.schedule), in_chunks, overlap)
            # the last chunk's backward comes first, and a round later behind the first one's
            following = (*chunks[1:], chunks[0]) if len(chunks) > 1 else (None,)
            pairs = list(zip(chunks, following, strict=True))
            distinct = {(id(chunk), id(before)): (chunk, before) for chunk, before in pairs}  # most are one object
            most = {
                key: most_passing(chunk, *both, formats, steps, before) for key, (chunk, before) in distinct.items()
            }
            passing = [(most[id(chunk), id(before)],) * 2 for chunk, before in pairs]
        return Stored(lasting, tuple(passing), sums, sums[-1][-1] if sums and in_chunks else 0.0)

    @cached_property
    def _bytes(self) -> tuple[int, int]:
        """Of a number that is computed with, and of one that is summed."""
        return BYTES[self.config.precision.compute], sum_bytes(self.config)


def _loss_chunks(config: RunConfig) -> int:
    """As `Piece.loss_chunks`."""
    chunk, tokens = config.loss_chunk, config.batch.micro_size * config.model.sequence // config.parallel.context
    if chunk is None or chunk >= tokens:
        return 1
    return tokens // chunk if config.loss.chunk == "auto" else 0


def _sharding(plan: Plan, experts: bool = False) -> Sharding:
    """Of weights; of those of `experts` that the layout splits."""
    weights = Weights.of(plan, 0.0, 0.0)[experts]
    stage = plan.zero if weights.shards > 1 or "parameters" in plan.offload else 0
    return Sharding(stage, 0, weights.shards, weights.replicas, plan.offload, experts)


def _sending(work: Work, collective: Collective, fetched: float = 0.0) -> Work:
    host_bytes = work.host_bytes + fetched * collective.calls
    return replace(work, collectives=(*work.collectives, collective), host_bytes=host_bytes)


def _joined_backward(layer: ModuleWork) -> ModuleWork:
    """Of a layer that was counted with the gradients of its weights apart, what computing hides where these follow each
    product's gradient of its input: the sum of that gradient, and the gathering of the input."""
    sums, gathers = layer.backward_input, layer.backward_weight
    reductions = (one._replace(hidden=max(one.hidden, one.joined)) for one in sums.collectives)
    return replace(
        layer,
        backward_input=replace(sums, collectives=tuple(reductions)),
        backward_weight=replace(gathers, collectives=tuple(one._replace(hidden=1.0) for one in gathers.collectives)),
    )


def _communicators(plan: Plan, stage: int, model: ModelConfig) -> int:
    """Groups in which a stage sends: of tensor ranks, of those that share sequences or experts, of replicas (all; those
    that share states, to reduce and to gather; those that hold the same share; the same of experts that the layout
    splits, all if they share nothing), of two stages for each kind of message from one to the other, of the first and
    the last stage, of all stages, which share relative positions, and of all ranks."""
    replicas = (plan.context > 1) + (plan.expert > 1)
    for _, ranks, shards, experts in Weights.of(plan, 0.0, 0.0):
        replicas += (ranks > 1 and not (experts and shards > 1)) + 2 * (shards > 1) + (1 < shards < ranks)
    v_shape, end = SCHEDULES[plan.schedule].v_shape, stage in (0, plan.pipeline - 1)
    # activations to the next stage and gradients back, both ways in a V; with further chunks stages form a ring
    neighbours = 0 if plan.pipeline == 1 else 1 if end and (v_shape or plan.virtual == 1) else 2
    messages = 2 * neighbours * (1 + v_shape)
    ends = model.tied_head and plan.pipeline > 1 and not v_shape and end
    stages = model.positions == "relative" and plan.pipeline > 1
    world = plan.tensor * plan.replicas * plan.pipeline > 1
    return (plan.tensor > 1) + replicas + messages + ends + stages + world
