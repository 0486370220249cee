"""Ledger of one rank's actions: memory over time, collectives and work, folded over the operations of the step.

    operations    START F0 | gather a | F embedding | gather b | F layers.0 | free a | ... | END | SEND | ... | REDUCE b
    live bytes    persistent bytes + transient buffers of flat parameters + bytes that module spans use and keep

The time, memory and communication of modules are measured (`pangu.schedule.spans`); the points where flat parameters
are gathered and reduced follow the same rules as a run. Most passes of a step are alike, so each is folded only once
for each state of the flat parameters in which it begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from pangu.schedule.buffers import Buffers
from pangu.schedule.expand import StepOp
from pangu.schedule.spans import Collective, Mark, Span, full_name
from pangu.zero.rules import Operation


class Pass(NamedTuple):
    """Ledger of one action, relative to the live bytes when it begins."""

    peak: int
    """Peak live bytes."""
    change: int
    """Net change in live bytes."""
    buffers: int
    """Part of `change` that buffers of flat parameters take, which outlive activations."""
    spans: tuple[Span, ...]
    collectives: tuple[Collective, ...]
    """Gathers and reductions that begin in the action."""
    fetched: float
    """Bytes of weights copied from host memory."""


class Fold:
    """Fold of the operations of one action over the spans of its modules."""

    def __init__(
        self, buffers: Sequence[Buffers], flat_of: Mapping[str, int], fp8: Iterable[str], begun: set[int], hidden: float
    ) -> None:
        """Begin an action; `hidden`: share of the communication in flight during compute that the compute hides."""
        # `flat_of`: parameter -> flat parameter; `begun`: those whose gradient sums exist, updated by the operations;
        # `fp8`: parameters whose gradient can be written to its sum at once, but needs a buffer to be added to it
        self._buffers, self._flat_of, self._begun, self._hidden = buffers, flat_of, begun, hidden
        self._written = {name for name in fp8 if flat_of[name] not in begun}
        self._level = self._peak = 0
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
        spans, change = tuple(self._spans), self._level
        buffers = change - sum(span.end for span in spans)
        return Pass(self._peak, change, buffers, spans, tuple(self._collectives), self._fetched)

    def modules(self, operations: Iterable[StepOp], modules: Iterable[tuple[str, Span | None]]) -> None:
        """Apply the operations of an action on a chunk, including the compute of its modules, with their spans."""
        left, last, reductions = deque(operations), "", list[StepOp]()
        for module, span in modules:
            at = next((place for place, one in enumerate(left) if module and one.module == module), None)
            if at is not None:
                self.operations(left.popleft() for _ in range(at))
                left.popleft()
                last = module
            while left and left[0].kind.endswith("REDUCE"):
                reductions.append(left.popleft())
            if span is not None:  # a module that begins the backward pass may not end: its work is part of `END`
                self.span(last, span, reductions)
                reductions = []
        self.operations([*reductions, *left])

    def operations(self, operations: Iterable[StepOp]) -> None:
        """Apply operations on flat parameters."""
        for one in operations:
            if one.flat is not None:
                self._operation(one.kind, one.flat.index)

    def _operation(self, kind: str, flat: int) -> None:
        buffers = self._buffers[flat]
        match kind:
            case Operation.UNSHARD:
                self._allocate(buffers.weights)
                self._fetched += buffers.fetched
                self._start(flat, buffers.gathers)
            case Operation.RESHARD:
                self._allocate(-buffers.weights)
            case Operation.REDUCE:
                self._begin_sum(flat)
                self._begun.discard(flat)
                self._allocate(buffers.norms + buffers.message + buffers.part)
                if buffers.message:
                    self._allocate(-buffers.total)
                self._start(flat, buffers.reductions)
            case Operation.WAIT_REDUCE:
                self._allocate(-buffers.part - (buffers.message or buffers.total))
        if kind in (Operation.WAIT_UNSHARD, Operation.WAIT_REDUCE):
            self._in_flight.pop(flat, None)

    def span(self, module: str, span: Span, reductions: Sequence[StepOp] = ()) -> None:
        """Apply a span of a module, with the reductions that its gradients complete."""
        self._hide()
        self._spans.append(span)
        if module != self._module:
            self._before, self._module = self._module, module
        kept, waiting, written = 0, self._placed(module, span, reductions), None
        for number, segment in enumerate(span.segments):
            if written is None or segment.mark != written:
                self._peak = max(self._peak, self._level + segment.peak - kept)
            self._allocate(segment.end - kept)
            kept, written = segment.end, None
            if segment.mark is not None and segment.mark.event == "add":
                name = self._name(module, segment.mark)
                self._begin_sum(self._flat_of[name])
                if name in self._written:
                    self._written.discard(name)
                    written = segment.mark._replace(event="complete")
            self.operations(waiting.get(number, ()))

    def _placed(self, module: str, span: Span, reductions: Sequence[StepOp]) -> dict[int, list[StepOp]]:
        """Return the operations after each segment: reductions in order, each after its last gradient."""
        last = {
            self._flat_of[self._name(module, segment.mark)]: number
            for number, segment in enumerate(span.segments)
            if segment.mark is not None and segment.mark.event == "complete"
        }
        placed: dict[int, list[StepOp]] = {}
        place, waits, reduced = 0, list[StepOp](), None
        for one in reductions:
            waits.append(one)
            starts = one.kind == Operation.REDUCE
            if starts and one.flat is not None:
                place, reduced = max(place, last.get(one.flat.index, 0)), one.flat
            if starts or one.flat is reduced:  # without overlap, a reduction is waited for at once
                placed.setdefault(place, []).extend(waits)
                waits = []
        placed.setdefault(place, []).extend(waits)
        return placed

    def _name(self, module: str, mark: Mark) -> str:
        """Return the parameter of a gradient in the span of a module."""
        name = mark.parameter
        if name.startswith("layers."):  # a gradient of the previous layer, numbered as in the measured model
            module, name = self._before, name[name.index(".", len("layers.")) :]
        return full_name(module, name)

    def _begin_sum(self, flat: int) -> None:
        if flat not in self._begun:
            self._begun.add(flat)
            self._allocate(self._buffers[flat].total)

    def _allocate(self, nbytes: int) -> None:
        self._level += nbytes
        self._peak = max(self._peak, self._level)

    def _start(self, flat: int, collectives: Sequence[Collective]) -> None:
        count = len(self._collectives)
        self._collectives += collectives
        self._in_flight[flat] = range(count, count + len(collectives))

    def _hide(self) -> None:
        for place in chain.from_iterable(self._in_flight.values()):
            self._collectives[place] = self._collectives[place]._replace(hidden=self._hidden)
        self._in_flight.clear()
