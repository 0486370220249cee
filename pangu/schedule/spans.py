"""Spans: work and memory between entering and leaving each module, as plain data that a ledger folds over a step.

`pangu.dryrun` measures spans in dry runs of small models with the same kinds of modules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart, parameters_by_module
from pangu.topology.placement import PlacementTable

# `expert_`: with the same experts, in layouts that split them.
Replicas = Literal[
    "replicas", "shard", "gather", "copies", "expert_replicas", "expert_shard", "expert_gather", "expert_copies"
]
"""Groups of ranks with equal weights: all; those that share states; those with the same shard."""
Axis = Literal["tensor", "context", "expert", "pipeline", "ends", "world"] | Replicas
"""Mesh axis of a group; `expert`: ranks that hold all experts together; `ends`: first and last stage."""


class Matmul(NamedTuple):
    """Equal matmuls [rows, depth] x [depth, columns]."""

    rows: int
    columns: int
    depth: int
    batch: int = 1
    """Number of matmuls per kernel."""
    calls: float = 1
    """Number of kernel launches."""
    fused: bool = False
    """True if it is part of a fused attention kernel, which writes no scores."""
    fp8: bool = False
    """True if the operands are fp8."""
    grouped: Literal["", "rows", "depth"] = ""
    """Dimension along which the tokens of a grouped matmul over experts lie; "": not grouped."""

    @property
    def flops(self) -> float:
        """FLOPs of all these matmuls, counting multiplications and additions."""
        return 2.0 * self.rows * self.columns * self.depth * self.batch * self.calls


def matmuls_of(operator: str, shapes: Sequence[Sequence[int]], computed: float = 1.0) -> list[Matmul]:
    """Return the matmuls of one kernel; a fused attention kernel, forward or backward, has several."""
    if "atten" in operator:
        (rows, heads, queries, width), (_, _, keys, _), (*_, columns) = shapes

        def fused(m: int, n: int, depth: int) -> Matmul:
            return Matmul(m, n, depth, rows * heads, computed, fused=True)

        scores, mixed = fused(queries, keys, width), fused(queries, columns, keys)
        if "backward" not in operator:
            return [scores, mixed]
        # one kernel, or those of `triton_attention`, which compute scores and gradients of probabilities for each
        shared, grad_query = [scores, fused(queries, keys, columns)], fused(queries, width, keys)
        return [*shared * (1 + (operator == "attend_backward")), mixed, grad_query, grad_query]
    if operator.startswith("grouped"):  # assume equal groups; the last operand has their ends
        (rows, depth), other, (groups,) = shapes
        group_rows = math.ceil(rows / groups)
        if len(other) == 2:  # weight gradients sum over rows
            return [Matmul(depth, other[1], group_rows, groups, grouped="depth")]
        return [Matmul(group_rows, math.prod(other[1:]) // depth, depth, groups, grouped="rows")]
    fp8 = operator.startswith("_scaled_mm")  # the scales follow
    first, second = shapes[:2] if fp8 else shapes[-2:]
    return [Matmul(first[-2], second[-1], first[-1], first[0] if len(first) == 3 else 1, fp8=fp8)]


class Collective(NamedTuple):
    """Equal collectives of one group."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "receive"]
    axis: Axis
    bytes: float
    """Bytes of the full buffer, as in the output of an all-gather or the input of a reduction."""
    calls: float = 1
    hidden: float = 0.0
    """Fraction that overlaps computation."""
    ranks: int = 0
    """Neighboring ranks of the group that exchange with each other; 0: all."""


@dataclass(frozen=True)
class Work:
    """Work of a unit such as the forward pass of one layer for one micro-batch."""

    matmuls: tuple[Matmul, ...] = ()
    bytes: float = 0.0
    """Bytes that non-matmul operations read and write."""
    launches: float = 0.0
    """Number of kernel launches, including those of matmuls."""
    collectives: tuple[Collective, ...] = ()
    host_bytes: float = 0.0
    """Bytes copied to or from the host, overlapping computation."""
    waits: float = 0.0
    """Number of host syncs."""
    operators: float = 0.0
    """Number of operators that the host dispatches, including views."""
    calls: float = 0.0
    """Number of Python functions that the host calls besides."""
    sums: float = 0.0
    """Number of weight gradients that matmuls add to their sums; on a host a kernel adds each of them afterwards."""
    sum_bytes: float = 0.0
    """Bytes that these kernels read and write."""


class Mark(NamedTuple):
    """Event of a parameter's gradient, which ends a segment."""

    # `add` allocates the sum if the flat parameter has none; `update` concerns all parameters.
    event: Literal["add", "complete", "update"]
    """`add` (gradient added to its sum), `complete` (last gradient of a micro-batch), or `update` (optimizer)."""
    parameter: str = ""
    """Name of the parameter, without `layers.NUMBER.` for one of the layer itself (see `full_name`)."""


class Segment(NamedTuple):
    """Live bytes outside the buffers of flat parameters, relative to the start of the span."""

    peak: int
    """Peak, not below the levels at both ends of the segment."""
    end: int
    """Level at the end of the segment."""
    mark: Mark | None = None
    """Event that ends the segment; None: end of the span."""


@dataclass(frozen=True)
class Span:
    """Work and memory from the end of the previous module to the end of this one, for one micro-batch.

    Gathering, resharding and reducing flat parameters are excluded, as are gradient sums.
    """

    segments: tuple[Segment, ...] = (Segment(0, 0),)
    work: Work = field(default_factory=Work)
    # The span of that action excludes them: a chunk frees what its own modules keep (`Trace.of_action`).
    until: tuple[tuple[str, int], ...] = ()
    """Later kinds of action -> bytes left behind here that the `END` of the action frees."""

    @property
    def peak(self) -> int:
        """Peak bytes relative to the start."""
        return max(segment.peak for segment in self.segments)

    @property
    def end(self) -> int:
        """Bytes that the span leaves behind; negative: frees."""
        return self.segments[-1].end


class SpanKey(NamedTuple):
    """Name of a span: action, kind of module (see `module_kinds`) and neighbors in the chunk.

    An action passes `START`, the modules (in forward order, or reversed in the backward pass) and `END`; `before` and
    `after` are neighbors in this order, and outside of `START` and `END`, and with `START`, the chunk's embedding and
    head: other chunks receive and send. A module that an action does not reach, such as a frozen one in the backward
    pass, has no span, and is not in front of `END`.
    The span of a message has the action's kind as `module`, between first and last module of its chunk.
    """

    action: str
    """Kind of action, `F`, `B`, `I` or `W` as in `actions.Kind`; for a message, that of input gradients."""
    before: str
    module: str
    after: str

    @classmethod
    def of_message(cls, kind: str, modules: Sequence[str], split: bool) -> SpanKey:
        """Return the key of a message of a chunk; `split`: its weight gradients are computed apart."""
        return cls("I" if split else "B", modules[0], kind, modules[-1])


START, END = "start", "end"
"""Modules of the spans before an action enters its first module, and after it leaves its last one."""


def keys_of(action: str, modules: Sequence[str]) -> list[SpanKey]:
    """Return the spans of an action on a chunk, in order: `START`, its `modules` (kinds in forward order), `END`."""
    order = [START, *(modules if action == "F" else reversed(modules)), END]
    ends = " ".join(name for name in ("embedding", "head") if any(kind.startswith(name) for kind in modules))
    # the first module frees messages of the chunk
    before, after = [ends, f"{START} {ends}", *order[1:-1]], [*order[1:], ends]
    if action != "F":  # `END` has the backward pass of the last module that is reached
        before[-1] = next(kind for kind in reversed(order[:-1]) if not kind.endswith("unreached"))
    return [SpanKey(action, *key) for key in zip(before, order, after, strict=True)]


class UpdateTrace(NamedTuple):
    """Work and memory of an optimizer update, as a function of the shards that it updates."""

    bytes_per_element: float
    """Bytes read and written per element."""
    launches: float
    launches_per_tensor: float
    launches_per_pass: float
    """Kernel launches: per step; per tensor; per further pass over `UPDATED_AT_ONCE` elements."""
    working: float
    working_per_tensor: float
    working_per_element: float
    """Transient bytes: per step; per tensor; per element of the first pass."""
    working_per_more: float
    """Additional transient bytes per element of a second pass."""
    bytes_of_matrix: float = 0.0
    launches_of_matrix: float = 0.0
    """Bytes read and written per element of a matrix that Muon orthogonalizes, and kernel launches per matrix."""

    def at(self, elements: int, tensors: int, at_once: int) -> tuple[float, float, float]:
        """Return bytes moved, launches and transient bytes of an update of `elements`, `at_once` of them per pass."""
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
    """Spans by key; None: the action does not reach the module, which is frozen."""
    begin: Span
    """Work of a step before its first micro-batch, except moving the micro-batches to the device."""
    move: Span
    """Copy of one micro-batch to the device."""
    finish: Span
    """Work from the last action to the end of the step; the mark `update` is the optimizer's."""
    update: UpdateTrace
    lasting_bytes: int = 0
    """Live bytes outside buffers that stay between steps, such as masks shared by all micro-batches."""

    def of_action(self, action: str, modules: Sequence[str]) -> list[tuple[str, Span | None]]:
        """Return the spans of an action on a chunk, each with its kind of module, in the order of `keys_of`."""
        spans = [(key.module, self.spans[key]) for key in keys_of(action, modules)]
        kept = 0
        for other in {"F", action, "I" if action == "W" else action}:
            made = (self.spans.get(key) for key in keys_of(other, modules))
            kept += sum(dict(span.until).get(action, 0) for span in made if span is not None)
        if (end := spans[-1][1]) is not None:
            *before, last = end.segments
            spans[-1] = END, replace(end, segments=(*before, last._replace(end=last.end - kept)))
        return spans

    def message(self, split: bool, kind: str, modules: Sequence[str]) -> Span:
        """Return the span of a message of a chunk, or of any chunk with such a message and such a backward pass."""
        key = SpanKey.of_message(kind, modules, split)
        alike = (span for other, span in self.spans.items() if other[::2] == key[::2] and span is not None)
        return self.spans.get(key) or next(alike)

    def joined(self, later: Trace) -> Trace:
        """Return the trace with the spans of a later measurement, which changes none but adds kinds of actions."""
        spans = {**later.spans, **self.spans}
        for key, span in self.spans.items():
            if span is not None and (other := later.spans.get(key)) is not None:
                spans[key] = replace(span, until=tuple(sorted({**dict(other.until), **dict(span.until)}.items())))
        return replace(self, spans=spans)


_SHARED = ("embedding.word.weight", "head.weight", "mtp.lookup")


def full_name(module: str, parameter: str) -> str:
    """Return the full name of a mark's parameter in the span of a module such as `layers.3`."""
    return f"{module}{parameter}" if module.startswith("layers.") and parameter[0] == "." else parameter


def module_kinds(config: RunConfig, table: PlacementTable, part: ModelPart) -> dict[str, str]:
    """Return the modules of a chunk in forward order, each with its kind.

    Modules with equal kinds, and neighbors of equal kinds, have equal spans. The kind of a layer names its contents
    (experts, query layer, norm of the embedding), its frozen parameters, and what is kept of it: whether it is
    recomputed, and with `memory.offload=[activations]` whether its saved tensors stay on the device. The second layer
    that the backward pass reaches is a kind of its own where it frees less than later layers: offloaded, if the chunk's
    input belongs to the caller (`second`); or behind modules that are not reached, as the first one then ends with the
    action (`follows`).
    """
    model, kinds, reached, layers = config.model, dict[str, str](), not part.first, 0
    recomputed = config.memory.recomputed_layers
    stop = part.layers.stop if recomputed is None else part.layers.start + recomputed
    offload = "activations" in config.memory.offload
    for module, parameters in parameters_by_module(model, tuple(table.shapes), part).items():
        words = [module]
        if module.startswith("layers."):
            layer = int(module.partition(".")[2])
            words = ["layer"]
            words += [f"mtp{layer - model.layers}"] * (layer >= model.layers)
            words += ["query"] * (layer == model.query_layer) + ["first"] * (layer == 0 and model.embedding_norm)
            words += ["dense"] * (model.experts is not None and not model.has_experts(layer))
            words += ["full"] * (model.full_layers is not None and not model.has_window(layer))
            words += ["nope"] * (model.positions == "rope" and not model.has_rope(layer))
            words += ["recomputed"] * (layer < stop)
            words += ["resident"] * (offload and layer == part.layers[-1])
        frozen = [name.removeprefix(f"{module}.") for name in parameters if not table.is_trained(name)]
        # the head and multi-token prediction have their own copy of the matrix if the embedding is on another stage
        frozen = ["weight" if name in _SHARED else name for name in frozen]
        reached = reached or len(frozen) < len(parameters)
        layers += reached and words[0] == "layer"
        if layers == 2 and words[0] == "layer":
            follows = any(kind.endswith("unreached") for kind in kinds.values())
            words += ["follows"] * follows + ["second"] * (offload and not part.first)
        if frozen:
            words += ["frozen"] if len(frozen) == len(parameters) else ["frozen", *frozen]
        kinds[module] = " ".join(words if reached else [*words, "unreached"])
    return kinds
