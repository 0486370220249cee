"""Ledger of one rank's step: memory over time, collectives and work, folded over the operations of the step.

    operations    START F0 | gather a | F embedding | gather b | F layers.0 | free a | ... | END | SEND | ... | REDUCE b
    live bytes    persistent bytes + transient buffers of flat parameters + bytes that module spans use and keep

The time, memory and communication of modules are measured (`pangu.pipeline.spans`); the points where flat parameters
are gathered and reduced follow the same rules as a run. Most passes of a step are alike, so each is folded only once
for each state of the flat parameters in which it begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import add
from typing import NamedTuple

from pangu.pipeline.expand import StepOp
from pangu.pipeline.spans import Collective, Mark, Span, full_name
from pangu.zero.rules import Operation

GRAIN = 512
"""Allocation granularity in bytes: device allocators round up to multiples of it."""
ACTIVATIONS, GATHERED, GRADIENTS = range(3)
KINDS = ("activations", "gathered", "gradients")
"""Kinds of transient memory: activations, gathered weights, and gradient sums including their reduction."""


def allocated(nbytes: float) -> int:
    """Return the bytes of a tensor, rounded up as the device's allocator does."""
    return -(-int(nbytes) // GRAIN) * GRAIN


class Buffers(NamedTuple):
    """Transient buffers of a flat parameter, in bytes, and the collectives that use them."""

    weights: int
    """Gathered weights; 0 if they are persistent."""
    total: int
    """Accumulated gradients; 0 if they are persistent."""
    message: int
    """Copy of the gradient sum in the communication format; 0 if the sum itself is sent."""
    part: int
    """Local shard of the reduced gradients; 0 if they are reduced into a persistent buffer."""
    norms: int
    """Norms of the gradients of a reduction, kept until the end of the step."""
    gathers: tuple[Collective, ...] = ()
    reductions: tuple[Collective, ...] = ()
    fetched: float = 0.0
    """Bytes copied from host memory for each gather."""


class Pass(NamedTuple):
    """Ledger of one action, relative to the live bytes when it begins."""

    peak: int
    """Peak live bytes."""
    kinds: tuple[int, ...]
    """Bytes of each of `KINDS` at the peak."""
    place: str
    """Module or operation in which the peak is reached."""
    change: tuple[int, ...]
    """Net change in the bytes of each of `KINDS` after the action."""
    spans: tuple[Span, ...] = ()
    collectives: tuple[Collective, ...] = ()
    """Gathers and reductions that begin in the action."""
    fetched: float = 0.0
    """Bytes of weights copied from host memory."""

    @classmethod
    def of(cls, span: Span) -> Pass:
        """Return the pass of a span that belongs to no module."""
        return cls(span.peak, (span.peak, 0, 0), "", (span.end, 0, 0), (span,))


class Meter:
    """Live bytes by kind, and their peak."""

    def __init__(self) -> None:
        """Start with no live bytes."""
        self.level = [0] * len(KINDS)
        self.peak, self.kinds, self.place = 0, tuple(self.level), ""

    def change(self, kind: int, nbytes: int, place: str = "") -> None:
        """Allocate or free bytes."""
        self.level[kind] += nbytes
        self.note(0, place)

    def note(self, beside: int, place: str) -> None:
        """Update the peak with the live bytes plus `beside` bytes of activations."""
        total = sum(self.level) + beside
        if total > self.peak:
            activations, *others = self.level
            self.peak, self.kinds, self.place = total, (activations + beside, *others), place

    def follow(self, one: Pass, place: object) -> None:
        """Add a folded action; `place` names it."""
        total = sum(self.level) + one.peak
        if total > self.peak:
            self.peak, self.kinds = total, tuple(map(add, self.level, one.kinds))
            self.place = f"{place}, {one.place}" if one.place else str(place)
        self.level = list(map(add, self.level, one.change))

    def skip(self, passes: Iterable[Pass]) -> None:
        """Add actions in which no peak is reached."""
        self.level = [sum(column) for column in zip(self.level, *(one.change for one in passes), strict=True)]


class Fold:
    """Fold of the operations of one action over the spans of its modules."""

    def __init__(self, buffers: Sequence[Buffers], flat_of: Mapping[str, int], begun: set[int], hidden: float) -> None:
        """Begin an action.

        Args:
            buffers: buffers of each flat parameter of the stage.
            flat_of: mapping from a parameter to its flat parameter.
            begun: flat parameters whose gradient sums exist; the operations update it.
            hidden: share of the communication in flight during compute that the compute hides.
        """
        self._buffers, self._flat_of, self._begun, self._hidden = buffers, flat_of, begun, hidden
        self._meter = Meter()
        self._spans: list[Span] = []
        self._collectives: list[Collective] = []
        self._fetched = 0.0
        self._module = self._before = ""
        """Module being computed, and the previous one."""
        self._in_flight: dict[int, range] = {}
        """Flat parameters being gathered or reduced -> indices of their collectives, without those already hidden."""

    def result(self) -> Pass:
        """Return the ledger of the folded action; the compute that follows hides what is still in flight."""
        self._hide()
        meter = self._meter
        spans, collectives = tuple(self._spans), tuple(self._collectives)
        return Pass(meter.peak, meter.kinds, meter.place, tuple(meter.level), spans, collectives, self._fetched)

    def operations(self, operations: Iterable[StepOp]) -> None:
        """Apply operations on flat parameters."""
        for one in operations:
            if one.flat is not None:
                self._operation(one.kind, one.flat.index)

    def _operation(self, kind: str, flat: int) -> None:
        buffers, meter = self._buffers[flat], self._meter
        match kind:
            case Operation.UNSHARD:
                meter.change(GATHERED, buffers.weights, "gathering parameters")
                self._fetched += buffers.fetched
                self._start(flat, buffers.gathers)
            case Operation.RESHARD:
                meter.change(GATHERED, -buffers.weights)
            case Operation.REDUCE:
                self._begin_sum(flat)
                self._begun.discard(flat)
                meter.change(GRADIENTS, buffers.norms, "reducing gradients")
                meter.change(GRADIENTS, buffers.message + buffers.part, "reducing gradients")
                if buffers.message:
                    meter.change(GRADIENTS, -buffers.total)
                self._start(flat, buffers.reductions)
            case Operation.WAIT_REDUCE:
                meter.change(GRADIENTS, -buffers.message - buffers.part)
                if not buffers.message:
                    meter.change(GRADIENTS, -buffers.total)
        if kind in (Operation.WAIT_UNSHARD, Operation.WAIT_REDUCE):
            self._in_flight.pop(flat, None)

    def span(self, place: str, module: str, span: Span, reductions: Sequence[StepOp] = ()) -> None:
        """Apply a span of a module, with the reductions that its gradients complete."""
        self._hide()
        self._spans.append(span)
        if module != self._module:
            self._before, self._module = self._module, module
        meter, start, waiting = self._meter, self._meter.level[ACTIVATIONS], self._placed(module, span, reductions)
        for number, segment in enumerate(span.segments):
            meter.note(start + segment.peak - meter.level[ACTIVATIONS], place)
            meter.change(ACTIVATIONS, start + segment.end - meter.level[ACTIVATIONS], place)
            if segment.mark is not None and segment.mark.event == "add":
                self._begin_sum(self._flat(module, segment.mark))
            self.operations(waiting.get(number, ()))

    def _placed(self, module: str, span: Span, reductions: Sequence[StepOp]) -> dict[int, list[StepOp]]:
        """Return the operations after each segment: reductions in order, each after its last gradient."""
        last = {
            self._flat(module, segment.mark): number
            for number, segment in enumerate(span.segments)
            if segment.mark is not None and segment.mark.event == "complete"
        }
        placed: dict[int, list[StepOp]] = {}
        place, waits = 0, list[StepOp]()
        for one in reductions:
            waits.append(one)
            if one.flat is not None and one.kind == Operation.REDUCE:
                place = max(place, last.get(one.flat.index, 0))
                placed.setdefault(place, []).extend(waits)
                waits = []
        placed.setdefault(place, []).extend(waits)
        return placed

    def _flat(self, module: str, mark: Mark) -> int:
        """Return the flat parameter of a gradient in the span of a module."""
        name = mark.parameter
        if name.startswith("layers."):  # a gradient of the previous layer, numbered as in the measured model
            module, name = self._before, name[name.index(".", len("layers.")) :]
        return self._flat_of[full_name(module, name)]

    def _begin_sum(self, flat: int) -> None:
        if flat not in self._begun:
            self._begun.add(flat)
            self._meter.change(GRADIENTS, self._buffers[flat].total, "adding gradients")

    def _start(self, flat: int, collectives: Sequence[Collective]) -> None:
        count = len(self._collectives)
        self._collectives += collectives
        self._in_flight[flat] = range(count, count + len(collectives))

    def _hide(self) -> None:
        for place in chain.from_iterable(self._in_flight.values()):
            self._collectives[place] = self._collectives[place]._replace(hidden=self._hidden)
        self._in_flight.clear()
