"""What a layout takes and needs at least, thousands of times a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from pangu.pipeline.orders import SCHEDULES
from pangu.planning.cost import collective_seconds, module_time
from pangu.planning.layout_work import REDUCES_EACH, Plan, Recompute, sent_to_host
from pangu.planning.memory import device_overhead, most_held
from pangu.planning.pipeline_time import Pipeline
from pangu.planning.workload import Collective

if TYPE_CHECKING:
    from pangu.planning.search import Space


class Pieces(NamedTuple):
    """Of one micro-batch."""

    whole: float
    """Seconds of a layer, of which the next three are parts."""
    forward: float
    back: float
    weight: float
    head: float
    """Seconds."""
    copies: float
    """Seconds that a layer takes longer whose activations are sent to the host."""
    saved: float
    """Bytes of a layer, this and the following ones as in `ModuleWork`."""
    deferred: float
    working: float


class Bounds:
    """What a layout takes and needs at least, from a few numbers of each size of tensor group and micro-batch."""

    def __init__(self, space: Space) -> None:
        self._space = space
        self._pieces: dict[tuple[int, int, int, bool, str], Pieces] = {}
        self._held: dict[Pipeline, list[tuple[int, int]]] = {}
        self._links: dict[tuple[int, int, int, int], tuple[float, float]] = {}

    def seconds(self, plan: Plan) -> float:
        """Seconds of a step without messages and the update."""
        p, m, layers = plan.pipeline, plan.micro_batches, plan.layers
        pieces = self._of(plan, plan.recompute)
        each, longest = pieces.whole, max(layers) if plan.virtual == 1 else self._space.program.shape.layers / p
        whole = each * self._space.program.shape.layers + pieces.head
        if "activations" in plan.offload:  # but those of each chunk's last layer
            whole += pieces.copies * (self._space.program.shape.layers - p * plan.virtual)
        stage = max(whole / p, longest * each, layers[-1] * each + pieces.head)
        if plan.recomputed:
            share = min(1.0, plan.recomputed / max(layers))
            more = share * (self._of(plan, "full").whole - each)
            whole, stage = whole + more * sum(layers) * 0.9, stage + more * longest * 0.9
        share = self._space.program.shape.layers / p
        forward, back, weight = pieces.forward * share, pieces.back * share, pieces.weight * share
        busy = m * stage + self._replicas(plan, m * stage, back + weight)
        if plan.schedule == "1f1b":
            return busy + whole - stage
        if plan.schedule == "interleaved":
            return busy + (whole - stage) / plan.virtual
        return busy + (p - 1) * max(0.0, forward + back - weight if plan.schedule == "zb_h1" else back / 2) * 0.85

    def _replicas(self, plan: Plan, busy: float, backward: float) -> float:
        """Seconds that a stage waits for replicas at least."""
        if plan.replicas == 1:
            return 0.0
        system, shape = self._space.program.system, self._space.program.shape
        numbers = min(plan.layers) * plan.virtual * shape.layer_matrices / plan.tensor
        shards = plan.shards
        latency, per_byte = self._link(plan)
        sizes = (system.gradient_bytes, system.number_bytes)
        gradients, weights = (numbers * size * per_byte + latency for size in sizes)
        on_host = "optimizer" in plan.offload
        weights_sent = on_host != ("parameters" in plan.offload)
        host = numbers / shards * (sizes[0] * on_host + sizes[1] * weights_sent)
        host /= self._space.cluster.host_gb_s * 1e9
        hidden, two_phases = system.hidden_data, SCHEDULES[plan.schedule].two_phases
        often = plan.micro_batches if plan.zero >= 2 and plan.schedule in REDUCES_EACH else 1
        if plan.zero == 3:  # in two phases chunks are gathered once
            gathers = 1 if two_phases else plan.micro_batches * (1 if plan.recompute == "full" else 2)
            sent = often * gradients + gathers * weights - 3 * latency
            return host + (1 - hidden) * sent + max(0.0, hidden * sent - busy)
        sent = often * gradients + weights if plan.zero else 2 * gradients
        return host + (1 - hidden) * sent + max(0.0, hidden * sent - 1.1 * backward)

    def _link(self, plan: Plan) -> tuple[float, float]:
        """Latency and seconds of a byte of a collective of the replicas that share states."""
        key = (plan.tensor, plan.data, plan.context, plan.zero_group)
        if key not in self._links:
            cluster = self._space.cluster
            group = plan.layout.groups(cluster.node)["shard"]

            def seconds(kind: Literal["all_gather", "reduce_scatter", "all_reduce"], size: float) -> float:
                return collective_seconds(Collective(kind, "shard", size), group, cluster)

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
        program, layers, pieces = self._space.program, min(plan.layers), self._of(plan, plan.recompute)
        layer, words = (size / plan.tensor for size in (program.shape.layer_matrices, program.shape.embedding))
        states = sum(program.stored_bytes(plan, layers * plan.virtual * layer + words, layer, words, 0.0))
        each, working = max(0, layers - plan.recomputed), pieces.working
        if "activations" in plan.offload:  # of the last layer of a chunk they stay, of the one before they are passing
            each = int(plan.recomputed == 0)
            working += pieces.saved * (layers > 1)
        most = max(forwards * pieces.saved + inputs * pieces.deferred for forwards, inputs in self._most(plan.steps))
        memory = self._space.cluster.memory
        held = (each * most + working) * (1 + memory.fragmentation) if each else 0.0
        return (states + held) / 2**30 + device_overhead(memory, plan.axes)

    def _most(self, pipeline: Pipeline) -> list[tuple[int, int]]:
        """Most forwards whose backward is to come on the first stage, and with these gradients of weights that are."""
        if pipeline not in self._held:
            sums = {(sum(one.forwards), sum(one.inputs)) for one in most_held(pipeline)[0]}
            most: dict[int, int] = {}
            for forwards, inputs in sums:
                most[forwards] = max(inputs, most.get(forwards, 0))
            self._held[pipeline] = list(most.items())
        return self._held[pipeline]

    def _of(self, plan: Plan, recompute: Recompute) -> Pieces:
        """The pieces of a layout."""
        key = (plan.tensor, plan.context, plan.micro_size, plan.sequence, recompute)
        if key not in self._pieces:
            space = self._space
            alone = Plan(plan.tensor, 1, 1, 1, plan.context, 0, plan.sequence, recompute, plan.micro_size, 1, "1f1b")
            alone = alone._replace(chunks=plan.chunks)
            modules = space.program.describe(alone).modules
            groups = alone.layout.groups(space.cluster.node)
            counted = modules["layer"]
            those = (counted, modules["head"], sent_to_host(counted))
            layer, head, sent = (module_time(module, groups, space.cluster) for module in those)
            forward, back, weight = map(sum, layer)
            times = (forward + back + weight, forward, back, weight, sum(map(sum, head)))
            copies = sum(map(sum, sent)) - times[0]
            bytes_ = (counted.saved_bytes, counted.deferred_bytes, counted.working_bytes)
            self._pieces[key] = Pieces(*times, copies, *bytes_)
        return self._pieces[key]
