"""Recorder of the boundaries of modules, actions and gradients in a step; cuts its memory and work into spans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor

from pangu.dryrun.audit import Audit, Scope
from pangu.dryrun.memory import OWNED
from pangu.dryrun.run import Observer
from pangu.models.language_model import ModuleHooks
from pangu.pipeline.actions import COMPUTE, Action, Kind
from pangu.pipeline.spans import END, START, Axis, Collective, Mark, Matmul, Segment, Span, Work, matmuls_of
from pangu.training.step import Trainer
from pangu.zero.unshard import _Passing

BEGIN, MOVE, FINISH = "begin", "move", "finish"
"""Parts of a step besides its actions: `Trace.begin`, `Trace.move` and `Trace.finish`."""
_LOOKUPS = ("embedding", "position_bias")


class Boundary(NamedTuple):
    """End of a span in the log."""

    action: Any
    module: str
    part: int
    """Scope of the span's counters (`Scope.part`)."""


class SpanRecorder(Observer, ModuleHooks):
    """Recorder that ends a span of the memory log at each module, and a segment at each added gradient."""

    def __init__(self, audit: Audit, trainer: Trainer, modules: Mapping[int, Mapping[str, str]]) -> None:
        """Create a recorder; `modules` maps a chunk to its modules in forward order, as `spans.module_kinds`."""
        super().__init__(audit)
        self.log: list[Any] = []
        audit.memory.log = self.log
        self._modules = modules
        self._hooks, trainer.model.hooks = trainer.model.hooks, self
        names: dict[Tensor, str] = {parameter: name for name, parameter in trainer.model.named_parameters()}
        gradients, store = trainer.parameters.gradients, trainer.runner.store
        assert store is not None
        sum_of, complete, put = gradients.sum_of, gradients.complete, store.put

        def begin_sum(parameter: Tensor, cleared: bool = False) -> tuple[Tensor, bool]:
            self._mark("add", names[parameter], 0 if parameter.grad is None else parameter.grad.nbytes)
            return sum_of(parameter, cleared)[0], False  # like most micro-batches

        def end_sum(parameter: Tensor) -> None:
            self._mark("complete", names[parameter])
            complete(parameter)
            self._end_lookup(names[parameter])

        def postpone(parameter: Tensor, part: Tensor, region: Any, gradient: Callable[[Tensor], Any]) -> None:
            module = self._module

            def compute(whole: Tensor) -> Any:
                self._begin_products(module)
                return gradient(whole)

            put(parameter, part, region, compute)

        def update(*args: Any, **kwargs: Any) -> None:
            self._mark("update", "")
            work(*args, **kwargs)

        work = trainer.parameters.update
        patches = ((gradients, "sum_of", begin_sum), (gradients, "complete", end_sum), (store, "put", postpone))
        for owner, name, method in (*patches, (trainer.parameters, "update", update)):
            setattr(owner, name, method)
        self._trained = [names[p] for flat in trainer.parameters.trained for p, _ in flat.parameters]
        self._module = self._kind = ""
        self._started = False
        self._left: Counter[str] = Counter()
        """Number of gradients of each lookup that the backward pass has not completed."""

    def begin(self, action: Any) -> None:
        """Begin an action."""
        self._end(BEGIN)
        super().begin(action)
        self._open()
        self._kind, self._module, self._started = str(getattr(action, "kind", "")), "", False
        self._left = Counter(name.partition(".")[0] for name in self._trained if name.startswith(_LOOKUPS))

    def end(self, action: Any) -> None:
        """End an action and its spans: a message has no modules, and separate weight gradients end with the action."""
        if self._kind == Kind.BACKWARD_WEIGHT and self._started:
            self._end(self._module)
        self._end(END if getattr(action, "kind", None) in COMPUTE else MOVE)
        super().end(action)
        self._open()

    def finish(self) -> None:
        """End the step."""
        self._end(FINISH)

    def before(self, module: str, x: Tensor) -> Tensor:
        """Mark the module's start in forward and its end in backward."""
        return self._passing(module, self._hooks.before(module, x), self._enter, self._end)

    def after(self, module: str, x: Tensor) -> Tensor:
        """Mark the module's end in forward and its start in backward."""
        return self._passing(module, self._hooks.after(module, x), self._end, self._enter)

    def _passing(self, module: str, x: Tensor, forward: Callable[..., None], backward: Callable[..., None]) -> Tensor:
        if module not in self._modules[self.audit.scope.action.chunk]:
            return x  # the module has no parameters
        return _Passing.apply(x, partial(forward, module), partial(backward, module))

    def _enter(self, module: str) -> None:
        if not self._started:
            self._end(START)
        self._started, self._module = True, module

    def _begin_products(self, module: str) -> None:
        if self._started and module != self._module:
            self._end(self._module)
        self._enter(module)

    def _end_lookup(self, name: str) -> None:
        """Note a complete gradient: the last one of an embedding ends its backward pass, as nothing follows."""
        lookup = name.partition(".")[0]
        if self._kind == Kind.BACKWARD and lookup in _LOOKUPS:
            self._left[lookup] -= 1
            if not self._left[lookup]:
                self._end(lookup)

    def _end(self, module: str) -> None:
        self.log.append(Boundary(self.audit.scope.action, module, self.audit.scope.part))
        self._open()

    def _open(self) -> None:
        self.audit.scope = self.audit.scope._replace(part=len(self.log))

    def _mark(self, event: Any, name: str, grad_bytes: int = 0) -> None:
        if name.startswith(f"{self._module}."):
            name = name.removeprefix(self._module) if self._module.startswith("layers.") else name
        self.log.append(Mark(event, name, grad_bytes))


def spans_in(log: Sequence[Any], counts: Mapping[Scope, Counter[tuple[Any, ...]]]) -> Iterator[tuple[Boundary, Span]]:
    """Yield the spans of a log with their counters."""
    works = {scope.part: counted for scope, counted in counts.items() if not scope.owner}
    pieces: list[list[Any]] = [[]]
    born: dict[int, int] = {}
    for entry in log:
        pieces[-1].append(entry)
        if isinstance(entry, Boundary):
            pieces.append([])
        elif not isinstance(entry, Mark):
            born.setdefault(id(entry[0]), len(pieces) - 1)
    ends: list[Boundary] = [piece[-1] for piece in pieces[:-1]]
    kept = [Counter[str]() for _ in ends]
    segments: list[tuple[Segment, ...]] = []
    for piece, end in zip(pieces, ends, strict=False):
        of_piece, level, peak = list[Segment](), 0, 0
        for entry in piece:
            match entry:
                case Mark() | Boundary():
                    of_piece.append(Segment(peak, level, entry if isinstance(entry, Mark) else None))
                    peak = level
                case storage, change if storage.kind not in OWNED:
                    maker = born[id(storage)]
                    if change < 0 and end.module == END and _is_module(ends[maker], end.action):
                        kept[maker][end.action.kind.value] -= change
                    else:
                        level += change
                        peak = max(peak, level)
        segments.append(tuple(of_piece))
    for end, of_span, until in zip(ends, segments, kept, strict=True):
        work = work_of(works.get(end.part, Counter()))
        yield end, Span(of_span, work, tuple(sorted(until.items())))


def _is_module(end: Boundary, action: Action) -> bool:
    one = end.action
    same = isinstance(one, Action) and one[1:3] == action[1:3]
    return same and one.kind in COMPUTE and end.module not in (START, END)


def joined(spans: Sequence[Span]) -> Span:
    """Return consecutive spans joined into one."""
    segments, level = [Segment(0, 0)], 0
    for span in spans:
        segments += [Segment(level + peak, level + end, mark) for peak, end, mark in span.segments]
        level = segments[-1].end
    works = [span.work for span in spans]
    return Span(
        (Segment(max(segment.peak for segment in segments), level),),
        Work(
            tuple(matmul for work in works for matmul in work.matmuls),
            sum(work.bytes for work in works),
            sum(work.launches for work in works),
            tuple(collective for work in works for collective in work.collectives),
            sum(work.host_bytes for work in works),
            sum(work.waits for work in works),
        ),
    )


def work_of(counts: Mapping[tuple[Any, ...], int]) -> Work:
    """Return counters in the form that plans use."""
    matmuls: dict[Matmul, float] = defaultdict(float)
    calls: Counter[tuple[str, str]] = Counter()
    plain: Counter[str] = Counter()
    for (what, *of), amount in counts.items():
        if what == "product":
            operator, shapes, _, computed = of
            for matmul in matmuls_of(operator, shapes, computed):
                matmuls[matmul._replace(calls=1)] += matmul.calls * amount
        elif what == "calls" and of[0] != "pipeline":  # messages belong to the schedule
            calls[of[0], of[1]] += amount
        elif len(of) < 2:
            plain[what] += amount
    collectives: list[Collective] = []
    for (axis, kind), number in calls.items():
        total, hidden = counts["bytes", axis, kind], counts.get(("hidden_calls", axis, kind), 0)
        hidden_bytes = counts.get(("hidden_bytes", axis, kind), 0)
        for share, some, nbytes in ((1.0, hidden, hidden_bytes), (0.0, number - hidden, total - hidden_bytes)):
            if some:
                collectives.append(Collective(cast(Any, kind), cast(Axis, axis), nbytes / some, some, share))
    return Work(
        tuple(matmul._replace(calls=number) for matmul, number in matmuls.items()),
        plain["memory_bound_bytes"],
        plain["launches"],
        tuple(collectives),
        plain["copy_bytes"],
        plain["host_sync"] + plain["blocking_copy"],
    )
