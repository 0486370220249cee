"""What a layout takes and needs at least, thousands of times a second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pangu.config.cluster import ClusterConfig
from pangu.pipeline.orders import SCHEDULES
from pangu.planning.cost import Group, collective_seconds, groups_of, module_time
from pangu.planning.layout_work import DENSE, Plan, Recompute, Weights, kinds_of_chunks, sent_to_host
from pangu.planning.memory import most_held
from pangu.planning.module_work import Piece
from pangu.planning.passing import Chunk, Flat, Module
from pangu.planning.pipeline_time import Pipeline
from pangu.planning.workload import Axis, Collective, ModuleWork, Working

if TYPE_CHECKING:
    from pangu.planning.search import Space


class Pieces(NamedTuple):
    """Of a layer and one micro-batch."""

    whole: float
    """Seconds, of which the next three are parts."""
    forward: float
    back: float
    weight: float
    head: float
    """Seconds of the head."""
    copies: float
    """Seconds that the layer takes longer whose activations are sent to the host."""
    saved: float
    """Bytes, this and the following ones as in `ModuleWork`."""
    deferred: float
    working: Working
    """At least: of a backward and its part for the input the smaller one, whichever a schedule computes."""
    parameters: float
    experts: float


class Counts(NamedTuple):
    """How many layers of both kinds there are: with experts, or all if none has any, and dense ones."""

    layers: int
    dense: int

    def of(self, value: tuple[float, float]) -> float:
        """The sum of a value that each of both kinds has."""
        return self.layers * value[0] + self.dense * value[1]


@lru_cache(maxsize=1000)
def _chunks(dense: tuple[int, ...], layers: tuple[int, ...]) -> tuple[Counts, tuple[Counts, ...], Counts]:
    """Of the whole model, of its chunks, each kind once, and of the last chunk."""
    chunks = [Counts(kinds.count(False), kinds.count(True)) for kinds in kinds_of_chunks(dense, layers)]
    whole = Counts(*map(sum, zip(*chunks, strict=True)))
    return whole, tuple(dict.fromkeys(chunks)), chunks[-1]


class Bounds:
    """What a layout takes and needs at least, from a few numbers of each way to cut a layer and size of micro-batch."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._pieces: dict[tuple[Any, ...], tuple[Pieces, Pieces]] = {}
        self._held: dict[Pipeline, list[tuple[int, int, int, int]]] = {}
        self._links: dict[tuple[Any, ...], tuple[float, float]] = {}

    def seconds(self, plan: Plan) -> float:
        """Seconds of a step without messages and the update."""
        p, m = plan.pipeline, plan.micro_batches
        model, chunks, last = _chunks(self._space.program.shape.dense, plan.layers)
        layer, dense = self._of(plan, plan.recompute)
        each = layer.whole, dense.whole
        whole = model.of(each) + layer.head
        if "activations" in plan.offload:  # of a chunk's last layer they stay, of one to be recomputed there are few
            away = sum(max(0, layers - 1 - plan.recomputed) for layers in plan.layers)
            whole += min(layer.copies, dense.copies) * away
        longest = max(chunk.of(each) for chunk in chunks) if plan.virtual == 1 else model.of(each) / p
        stage = max(whole / p, longest, last.of(each) + layer.head)
        if plan.recomputed:
            least = min(piece.whole - seconds for piece, seconds in zip(self._of(plan, "full"), each, strict=True))
            more = least * min(plan.recomputed, *plan.layers)
            whole, stage = whole + more * p * plan.virtual, stage + more * plan.virtual
        forward, back, weight = (
            model.of((getattr(layer, name), getattr(dense, name))) / p for name in ("forward", "back", "weight")
        )
        busy = m * stage + self._replicas(plan, m * stage, back + weight)
        if plan.schedule == "1f1b":
            return busy + whole - stage
        if plan.schedule == "interleaved":
            return busy + (whole - stage) / plan.virtual
        return busy + (p - 1) * max(0.0, forward + back - weight if plan.schedule == "zb_h1" else back / 2) * 0.85

    def _replicas(self, plan: Plan, busy: float, backward: float) -> float:
        """Seconds that a stage waits for replicas and the host at least."""
        system, cluster = self._space.program.system, self._space.cluster
        sizes, host, sent = (system.gradient_bytes, system.number_bytes), 0.0, 0.0
        on_host = "optimizer" in plan.offload
        copied = sizes[0] * on_host + sizes[1] * (on_host != ("parameters" in plan.offload))
        two_phases = SCHEDULES[plan.schedule].two_phases
        often = plan.micro_batches if plan.zero >= 2 and plan.reduces_each else 1
        gathers = 1 if plan.zero < 3 or two_phases else plan.micro_batches * (1 if plan.recompute == "full" else 2)
        for weights in Weights.of(plan, *self._least(plan)):
            host += weights.numbers / weights.shards * copied / (cluster.host_gb_s * 1e9)
            if weights.replicas == 1:
                continue
            latency, per_byte = self._link(plan, weights)
            gradients, whole = (weights.numbers * size * per_byte for size in sizes)
            if weights.shards == 1:
                sent += 2 * gradients
            else:  # in two phases chunks are gathered once
                sent += often * gradients + gathers * whole
                sent += latency * (often + gathers - 3 * (plan.zero == 3))
        hidden = system.hidden_data
        beside = busy if plan.zero == 3 else 1.1 * backward
        return host + (1 - hidden) * sent + max(0.0, hidden * sent - beside)

    def _least(self, plan: Plan) -> tuple[float, float]:
        """Parameters of the layers of a stage at least, and of their experts if the layout splits them."""
        _, chunks, _ = _chunks(self._space.program.shape.dense, plan.layers)
        layer, dense = self._of(plan, plan.recompute)
        values = ((layer.parameters, dense.parameters), (layer.experts, dense.experts))
        numbers, experts = (plan.virtual * min(chunk.of(value) for chunk in chunks) for value in values)
        return numbers, experts

    def _link(self, plan: Plan, weights: Weights) -> tuple[float, float]:
        """Latency and seconds of a byte of a collective of the replicas that share states, or that share none."""
        axis = weights.axis("data" if weights.shards == 1 else "shard")
        key = (plan.tensor, plan.data, plan.context, plan.zero_group, plan.expert, plan.expert_tensor, axis)
        if key not in self._links:
            cluster = self._space.cluster
            group = groups_of(plan.layout, cluster.node)[axis]

            def seconds(kind: Literal["all_gather", "reduce_scatter", "all_reduce"], size: float) -> float:
                return collective_seconds(Collective(kind, axis, size), group, cluster)

            timed = {size for link in (cluster.inside, cluster.between) for *_, size, _ in link.measured}
            if timed:  # from one timed size to the next a byte takes least at one of the two
                slopes = [
                    seconds(kind, size) / size / (2 if kind == "all_reduce" else 1)
                    for kind in ("all_gather", "reduce_scatter", "all_reduce")
                    for size in timed
                ]
                self._links[key] = 0.0, min(slopes)
            else:
                latency, one = (seconds("all_gather", size) for size in (0.0, 1e9))
                self._links[key] = latency, (one - latency) / 1e9
        return self._links[key]

    def gib(self, plan: Plan) -> float:
        """GiB of the first stage: states of its layers and the embedding, activations in flight, a layer at work, the
        device."""
        program, (layer, dense) = self._space.program, self._of(plan, plan.recompute)
        numbers, experts = self._least(plan)
        words = program.shape.embedding / plan.tensor
        # what passes while all activations are saved
        working = Working(*map(min, layer.working, dense.working))
        least = min(layer.parameters, dense.parameters), min(layer.experts, dense.experts)
        layers = range(1, min(plan.layers) + 1)
        flats = tuple(
            tuple(Flat(place, int(count), bool(experts), False) for experts, count in enumerate(least) if count)
            for place in layers
        )
        modules = tuple(Module(math.inf, working=working) for _ in layers)
        other = Chunk(modules, flats, False, False)
        first = Chunk((Module(), *modules), ((Flat(0, int(words), False, False),), *flats), True, False)
        chunks = [first, *(plan.virtual - 1) * [other]]
        stored = program.stored_bytes(plan, numbers + words, experts, chunks)
        saved, deferred = self._kept(plan, layer, dense)
        # backward begins with the last chunk and ends with the embedding's
        sums = list(accumulate((of_chunk[0] for of_chunk in reversed(stored.sums)), initial=0.0))
        held = max(
            forwards * saved + inputs * deferred + sums[summed * bool(stored.sums)] + working[part] * (saved > 0)
            for forwards, inputs, summed, part in self._most(plan.steps)
        )
        held += min(map(min, stored.passing), default=0.0)
        if saved and "activations" in plan.offload and min(plan.layers) > 1:  # those of the layer before are passing
            held += min(layer.saved, dense.saved)
        memory = self._space.cluster.memory
        return (stored.lasting + held * (1 + memory.fragmentation)) / 2**30 + memory.overhead_gib(plan.axes)

    def _kept(self, plan: Plan, layer: Pieces, dense: Pieces) -> tuple[float, float]:
        """Bytes that a chunk keeps for each forward at least, and for each gradient of weights that is to come."""
        saved, deferred = (layer.saved, dense.saved), (layer.deferred, dense.deferred)
        if "activations" in plan.offload:  # of the last layer of a chunk they stay
            number = int(plan.recomputed == 0)
        elif plan.recomputed:
            number = max(0, min(plan.layers) - plan.recomputed)
        else:
            _, chunks, _ = _chunks(self._space.program.shape.dense, plan.layers)
            return min(chunk.of(saved) for chunk in chunks), min(chunk.of(deferred) for chunk in chunks)
        return number * min(saved), number * min(deferred)

    def _most(self, pipeline: Pipeline) -> list[tuple[int, int, int, int]]:
        """Most forwards whose backward is to come on the first stage, with these gradients of weights that are, the
        number of chunks of which there are sums of gradients, and `Held.part`."""
        if pipeline not in self._held:
            most: dict[tuple[int, int, int], int] = {}
            for one in most_held(pipeline)[0]:
                key = sum(one.forwards), sum(one.summed), one.part
                most[key] = max(sum(one.inputs), most.get(key, 0))
            self._held[pipeline] = [(key[0], inputs, *key[1:]) for key, inputs in most.items()]
        return self._held[pipeline]

    def _of(self, plan: Plan, recompute: Recompute) -> tuple[Pieces, Pieces]:
        """Of a layer, and of a dense one if there are both."""
        cut = (
            plan.tensor,
            plan.context,
            plan.context_kind,
            plan.expert,
            plan.expert_tensor,
            plan.sequence,
            plan.chunks,
        )
        key = (*cut, plan.micro_size, recompute)
        if key not in self._pieces:
            program, cluster = self._space.program, self._space.cluster
            piece = Piece(plan.tensor, plan.sequence, context=plan.context, expert=plan.expert)
            data = piece._replace(expert_tensor=plan.expert_tensor).layout.data
            alone = Plan(plan.tensor, 1, 1, data, plan.context, 0, plan.sequence, recompute, plan.micro_size, 1, "1f1b")
            alone = alone._replace(
                chunks=plan.chunks,
                expert=plan.expert,
                expert_tensor=plan.expert_tensor,
                context_kind=plan.context_kind,
            )
            modules, groups = program.describe(alone).modules, groups_of(alone.layout, cluster.node)
            head = sum(map(sum, module_time(modules["head"], groups, cluster)))
            kinds = (modules["layer"], modules.get(DENSE + "layer", modules["layer"]))
            layer, dense = (_pieces(kind, head, groups, cluster) for kind in kinds)
            self._pieces[key] = layer, dense
        return self._pieces[key]


def _pieces(module: ModuleWork, head: float, groups: Mapping[Axis, Group], cluster: ClusterConfig) -> Pieces:
    forward, back, weight = map(sum, module_time(module, groups, cluster))
    whole = forward + back + weight
    copies = sum(map(sum, module_time(sent_to_host(module), groups, cluster))) - whole
    smaller = min(module.working.backward_input, module.working.backward)
    working = module.working._replace(backward_input=smaller, backward=smaller)
    held = (module.saved_bytes, module.deferred_bytes, working)
    return Pieces(whole, forward, back, weight, head, copies, *held, module.parameters, module.experts)
