"""Work and memory between entering and leaving each module, as plain data that a ledger folds over a step.

`pangu.dryrun` measures spans in dry runs of small models that have the same kinds of modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart, parameters_by_module
from pangu.topology.placement import PlacementTable

Replicas = Literal[
    "replicas",
    "shard",
    "gather",
    "copies",
    "expert_replicas",
    "expert_shard",
    "expert_gather",
    "expert_copies",
]
"""Ranks with the same weights: all; those that share states; those that hold the same share. `expert_`: with the same
experts, in a layout that splits them."""
Axis = Literal["tensor", "context", "expert", "pipeline", "ends", "world"] | Replicas
"""Along which axis of the mesh a group's ranks lie. `expert`: those that have all experts together; `ends`: the first
and the last stage."""


class Matmul(NamedTuple):
    """Equal matrix products: [rows, depth] x [depth, columns]."""

    rows: int
    columns: int
    depth: int
    batch: int = 1
    """Products in one kernel."""
    calls: float = 1
    """Kernels."""
    fused: bool = False
    """Part of a fused attention kernel, which writes no scores."""
    fp8: bool = False
    """The operands are fp8."""
    grouped: Literal["", "rows", "depth"] = ""
    """Of experts, each product with another one's matrix: the dimension that its tokens lie along."""

    @property
    def flops(self) -> float:
        """Of all of them, a multiplication and an addition each."""
        return 2.0 * self.rows * self.columns * self.depth * self.batch * self.calls


def matmuls_of(operator: str, shapes: Sequence[Sequence[int]], computed: float) -> list[Matmul]:
    """Return the products of one kernel; a fused attention kernel, forward or backward, has several."""
    if "attention" in operator:
        # shapes of the gradient, then of query, key and value; or of the latter
        backward = "backward" in operator
        (rows, heads, queries, width), (_, _, keys, _), (*_, columns) = shapes[1:4] if backward else shapes[:3]

        def fused(m: int, n: int, depth: int) -> Matmul:
            return Matmul(m, n, depth, rows * heads, computed, fused=True)

        scores, mixed = fused(queries, keys, width), fused(queries, columns, keys)
        if not backward:
            return [scores, mixed]
        grad_query = fused(queries, width, keys)
        # the scores again, the gradients of probabilities, values, queries and keys
        return [scores, fused(queries, keys, columns), mixed, grad_query, grad_query]
    if operator.startswith("grouped"):  # as if all groups were alike; the ends of these come last
        (rows, depth), other, (groups,) = shapes
        of_each = math.ceil(rows / groups)
        if len(other) == 2:  # gradients of matrices: the rows are summed over
            return [Matmul(depth, other[1], of_each, groups, grouped="depth")]
        return [Matmul(of_each, math.prod(other[1:]) // depth, depth, groups, grouped="rows")]
    fp8 = operator == "_scaled_mm"  # its scales follow
    first, second = shapes[:2] if fp8 else shapes[-2:]
    return [Matmul(first[-2], second[-1], first[-1], first[0] if len(first) == 3 else 1, fp8=fp8)]


class Collective(NamedTuple):
    """Equal collectives of one group."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"]
    axis: Axis
    bytes: float
    """Of the whole buffer: what the group holds together after an all-gather, each rank before a reduction."""
    calls: float = 1
    hidden: float = 0.0
    """Share that can run beside computing."""
    joined: float = 0.0
    """The share that is hidden where gradients of weights are computed at once behind those of inputs."""


@dataclass(frozen=True)
class Work:
    """A unit of work, e.g. the forward of one layer for one micro-batch."""

    matmuls: tuple[Matmul, ...] = ()
    bytes: float = 0.0
    """Read and written by operations that are no matrix products."""
    launches: float = 0.0
    """Kernels, those of the products included."""
    collectives: tuple[Collective, ...] = ()
    host_bytes: float = 0.0
    """Sent to or from host memory, beside computing."""
    waits: float = 0.0
    """Times that the host waits for a value of the device."""


class Mark(NamedTuple):
    """Event of a parameter's gradient, which ends a segment."""

    event: Literal["add", "complete", "update"]
    """`add`: its sum is needed, and is allocated if its flat parameter has none. `complete`: all of its gradient for
    this micro-batch has been added. `update`: the optimizer works, on all parameters."""
    parameter: str = ""
    """Name; of a parameter of the layer itself without `layers.NUMBER.`, see `full_name`."""
    grad_bytes: int = 0
    """Bytes that adding the gradient reads besides the sum, of `add`; 0: a matrix product adds it."""


class Segment(NamedTuple):
    """Live bytes that no buffer of a flat parameter owns, relative to those at the span's beginning."""

    peak: int
    """Most of them; at least the levels at the segment's beginning and end."""
    end: int
    """At its end."""
    mark: Mark | None = None
    """Event that ends it; None: the end of the span."""


@dataclass(frozen=True)
class Span:
    """Work and memory from the end of the module before to the end of this one, for one micro-batch.

    Gathering, resharding and reducing flat parameters are no part of it, nor are the sums of gradients.
    """

    segments: tuple[Segment, ...] = (Segment(0, 0),)
    work: Work = field(default_factory=Work)
    until: tuple[tuple[str, int], ...] = ()
    """Kinds of actions on the chunk, with bytes of what it leaves behind that their `END` frees, whose own span leaves
    this out: a chunk frees as much as its modules keep (`Trace.of_action`)."""

    @property
    def peak(self) -> int:
        """Highest level, relative to the beginning."""
        return max(segment.peak for segment in self.segments)

    @property
    def end(self) -> int:
        """Bytes that it leaves behind; negative: that it frees."""
        return self.segments[-1].end


class SpanKey(NamedTuple):
    """Name of a span: an action, a kind of module (see `module_kinds`) and its neighbours in the chunk.

    An action passes through `START`, the modules, `END`, in forward from the first module to the last and in backward
    the other way round; `before` and `after` are neighbours in this order, and outside of `START` and `END` what the
    chunk has of embedding and head: others receive and send. A module that an action does not reach, as frozen ones in
    backward, has no span. A message's span has its action's kind as `module`, between the first and the last module of
    its chunk.
    """

    action: str
    """`F`, `B`, `I` or `W`, as `actions.Kind`; "" for a message."""
    before: str
    module: str
    after: str


START, END = "start", "end"
"""Spans of an action before it enters its first module, and after it leaves its last one."""


def keys_of(action: str, modules: Sequence[str]) -> list[SpanKey]:
    """The spans of an action on a chunk in the order in which they are carried out: `START`, the chunk's modules
    (`modules` are their kinds, in the order of forward), `END`."""
    order = [START, *(modules if action == "F" else reversed(modules)), END]
    ends = " ".join(name for name in ("embedding", "head") if any(kind.startswith(name) for kind in modules))
    return [SpanKey(action, *key) for key in zip([ends, *order], order, [*order[1:], ends], strict=False)]


class UpdateTrace(NamedTuple):
    """Work and memory of an optimizer's step, as a function of the shards that it updates."""

    bytes_per_element: float
    """Bytes that it reads and writes for each element."""
    launches: float
    launches_per_tensor: float
    launches_per_pass: float
    """Kernel launches: of any step; for each tensor; of each further pass over `UPDATED_AT_ONCE` elements."""
    working: float
    working_per_tensor: float
    working_per_element: float
    """Transient bytes: of any step; for each tensor; for each element of the first pass."""
    working_per_more: float
    """Transient bytes for each element of a second pass, beside those of the first."""

    def at(self, elements: int, tensors: int, at_once: int) -> tuple[float, float, float]:
        """Bytes moved, launches and transient bytes of an update of so many elements, `at_once` of them in a pass."""
        first, second = min(elements, at_once), min(max(elements - at_once, 0), at_once)
        passes = max(0, -(-elements // at_once) - 1)
        working = self.working + self.working_per_tensor * tensors
        working += self.working_per_element * first + self.working_per_more * second
        launches = self.launches + self.launches_per_tensor * tensors + self.launches_per_pass * passes
        return self.bytes_per_element * elements, launches, working


@dataclass(frozen=True)
class Trace:
    """Spans of all modules of a model in one way of computing it, for micro-batches of one size."""

    spans: Mapping[SpanKey, Span | None]
    """None: the action does not reach the module, which is frozen."""
    begin: Span
    """What a step does before its first micro-batch is computed, moving the micro-batches to the device aside."""
    move: Span
    """Moving one micro-batch to the device."""
    finish: Span
    """From the last action to the end of the step; the mark `update` is where the optimizer works."""
    update: UpdateTrace
    lasting_bytes: int = 0
    """Live bytes that no buffer owns and that stay from step to step, such as masks that all micro-batches share."""

    def of_action(self, action: str, modules: Sequence[str]) -> list[tuple[str, Span | None]]:
        """The spans of an action on a chunk, each with its kind of module, in the order of `keys_of`."""
        spans = [(key.module, self.spans[key]) for key in keys_of(action, modules)]
        kept = 0
        for other in {"F", action, "I" if action == "W" else action}:
            made = (self.spans.get(key) for key in keys_of(other, modules))
            kept += sum(dict(span.until).get(action, 0) for span in made if span is not None)
        if (end := spans[-1][1]) is not None:
            *before, last = end.segments
            spans[-1] = END, replace(end, segments=(*before, last._replace(end=last.end - kept)))
        return spans

    def message(self, kind: str, modules: Sequence[str]) -> Span:
        """The span of a message of a chunk, or of another one's that was measured."""
        span = self.spans.get(SpanKey("", modules[0], kind, modules[-1]))
        return span or next(span for key, span in self.spans.items() if key.module == kind and span is not None)


def full_name(module: str, parameter: str) -> str:
    """The name of a mark's parameter in the span of a module, such as `layers.3`."""
    return f"{module}{parameter}" if module.startswith("layers.") and parameter[0] == "." else parameter


def module_kinds(config: RunConfig, table: PlacementTable, part: ModelPart) -> dict[str, str]:
    """Each module of a chunk, in the order of forward, with its kind: modules of a kind, with neighbours of the same
    kinds, have equal spans.

    Layers are told apart by what is in them (experts, the query layer), by what of them is frozen, and by what is kept
    of them: whether they are recomputed, and with `memory.offload=[activations]` whether what they save stays.
    """
    model, kinds, reached = config.model, dict[str, str](), not part.first
    recomputed = config.memory.recomputed_layers
    stop = part.layers.stop if recomputed is None else part.layers.start + recomputed
    for module, parameters in parameters_by_module(model, table, part).items():
        words = [module]
        if module.startswith("layers."):
            layer = int(module.partition(".")[2])
            words = ["layer"]
            words += ["query"] * (layer == model.query_layer)
            words += ["dense"] * (model.experts is not None and not model.has_experts(layer))
            words += ["recomputed"] * (layer < stop)
            words += ["resident"] * ("activations" in config.memory.offload and layer == part.layers[-1])
        frozen = [name.removeprefix(f"{module}.") for name in parameters if not table.is_trained(name)]
        # a tied head has a matrix of its own where the embedding is on another stage
        frozen = [name.removeprefix("embedding.word.") for name in frozen]
        reached = reached or len(frozen) < len(parameters)
        if frozen:
            words += ["frozen"] if len(frozen) == len(parameters) else ["frozen", *frozen]
        kinds[module] = " ".join(words if reached else [*words, "unreached"])
    return kinds
