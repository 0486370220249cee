"""Recorder of the boundaries of modules, actions and gradients in a step; cuts its memory and work into spans."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from torch import Tensor

from pangu.dryrun.audit import Audit
from pangu.dryrun.memory import OWNED
from pangu.models.language_model import ModuleHooks
from pangu.schedule.actions import COMPUTE, Action, Kind
from pangu.schedule.spans import END, START, Axis, Collective, Mark, Matmul, Segment, Span, Work, matmuls_of
from pangu.training.step import Trainer
from pangu.zero.unshard import passing

BEGIN, MOVE, FINISH = "begin", "move", "finish"
"""Parts of a step besides its actions: `Trace.begin`, `Trace.move` and `Trace.finish`."""
_LOOKUPS = ("embedding", "position_bias")


class Boundary(NamedTuple):
    """End of a span in the log."""

    action: Any
    module: str
    counts: Mapping[tuple[Any, ...], int]
    """Counters of the span, without those of owners of memory."""


class SpanRecorder(ModuleHooks):
    """Recorder that ends a span of the memory log at each module, and a segment at each added gradient."""

    def __init__(self, audit: Audit, trainer: Trainer, modules: Mapping[int, Mapping[str, str]]) -> None:
        """Create a recorder; `modules` maps a chunk to its modules in forward order, as `spans.module_kinds`."""
        self.log: list[Any] = []
        audit.memory.log, audit.owner_counts = self.log, Counter()
        self._audit, self._modules = audit, modules
        self._hooks, trainer.model.hooks = trainer.model.hooks, self
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in trainer.model.named_parameters()}
        parameters, gradients, store = trainer.parameters, trainer.parameters.gradients, trainer.runner.store
        self._trained = [self._names[p] for flat in parameters.trained for p, _ in flat.parameters]
        for owner, name, method in (
            (audit, "enter", self._enter_action),
            (gradients, "sum_of", self._begin_sum),
            (gradients, "complete", self._end_sum),
            (store, "put", self._postpone),
            (parameters, "update", self._update),
        ):
            setattr(owner, name, partial(method, getattr(owner, name)))
        self.restart()

    def restart(self) -> None:
        """Start the log of another step."""
        self.log.clear()
        self._module = self._kind = ""
        self._started = False
        self._left: Counter[str] = Counter()
        """Number of gradients of each lookup that the backward pass has not completed."""
        self._audit.counts = Counter()

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
        if module not in self._modules[self._audit.action.chunk]:
            return x  # the module has no parameters
        return passing(x, partial(forward, module), partial(backward, module))

    def _enter_action(self, enter: Callable[[Any], None], action: Any) -> None:
        """End an action and its spans: a message has no modules, and separate weight gradients end with the action."""
        if (last := self._audit.action) is None:
            self._end(BEGIN)
        else:
            if self._kind == Kind.BACKWARD_WEIGHT and self._started:
                self._end(self._module)
            self._end(END if getattr(last, "kind", None) in COMPUTE else MOVE)
        counts = self._audit.counts
        enter(action)
        self._audit.counts = counts
        self._kind, self._module, self._started = str(getattr(action, "kind", "")), "", False
        self._left = Counter(name.partition(".")[0] for name in self._trained if name.startswith(_LOOKUPS))

    def _begin_sum(self, sum_of: Callable[..., Any], parameter: Tensor, cleared: bool = False) -> tuple[Tensor, bool]:
        self._mark("add", self._names[parameter], 0 if parameter.grad is None else parameter.grad.nbytes)
        return sum_of(parameter, cleared)[0], False  # like most micro-batches

    def _end_sum(self, complete: Callable[[Tensor], None], parameter: Tensor) -> None:
        name = self._names[parameter]
        self._mark("complete", name)
        complete(parameter)
        lookup = name.partition(".")[0]
        if self._kind == Kind.BACKWARD and lookup in _LOOKUPS:
            self._left[lookup] -= 1
            if not self._left[lookup]:  # nothing follows the last gradient of an embedding
                self._end(lookup)

    def _postpone(self, put: Callable[..., None], parameter: Tensor, part: Tensor, region: Any, gradient: Any) -> None:
        module = self._module

        def compute(whole: Tensor) -> Any:
            if self._started and module != self._module:
                self._end(self._module)
            self._enter(module)
            return gradient(whole)

        put(parameter, part, region, compute)

    def _update(self, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self._mark("update")
        update(*args, **kwargs)

    def _enter(self, module: str) -> None:
        if not self._started:
            self._end(START)
        self._started, self._module = True, module

    def _end(self, module: str) -> None:
        self.log.append(Boundary(self._audit.action, module, self._audit.counts))
        self._audit.counts = Counter()

    def _mark(self, event: Any, name: str = "", grad_bytes: int = 0) -> None:
        if self._module.startswith("layers.") and name.startswith(f"{self._module}."):
            name = name.removeprefix(self._module)
        self.log.append(Mark(event, name, grad_bytes))


def spans_in(log: Sequence[Any]) -> Iterator[tuple[Boundary, Span]]:
    """Yield the spans of a log."""
    born: dict[int, int] = {}
    """Mapping from a storage to the index of the span that allocated it."""
    ends, kept, segments, piece = list[Boundary](), list[Counter[str]](), list[tuple[Segment, ...]](), list[Any]()
    for entry in log:
        piece.append(entry)
        if not isinstance(entry, Boundary):
            continue
        ends.append(entry)
        kept.append(Counter())
        of_span, level, peak = list[Segment](), 0, 0
        for one in piece:
            match one:
                case Mark() | Boundary():
                    of_span.append(Segment(peak, level, one if isinstance(one, Mark) else None))
                    peak = level
                case storage, change if storage.kind not in OWNED:
                    maker = born.setdefault(id(storage), len(ends) - 1)
                    by, module, _ = ends[maker]
                    is_kept = isinstance(by, Action) and by.kind in COMPUTE and module not in (START, END)
                    if change < 0 and entry.module == END and is_kept and by[1:3] == entry.action[1:3]:
                        kept[maker][entry.action.kind.value] -= change
                    else:
                        level += change
                        peak = max(peak, level)
        segments.append(tuple(of_span))
        piece.clear()
    for end, parts, until in zip(ends, segments, kept, strict=True):
        yield end, Span(parts, work_of(end.counts), tuple(sorted(until.items())))


def joined(spans: Sequence[Span]) -> Span:
    """Return consecutive spans joined into one."""
    segments, level = [Segment(0, 0)], 0
    for span in spans:
        segments += [Segment(level + peak, level + end, mark) for peak, end, mark in span.segments]
        level = segments[-1].end
    works = [vars(span.work) for span in spans]
    total = {name: sum((work[name] for work in works), start=zero) for name, zero in vars(Work()).items()}
    return Span((Segment(max(segment.peak for segment in segments), level),), Work(**total))


def work_of(counts: Mapping[tuple[Any, ...], int]) -> Work:
    """Return counters in the form that plans use."""
    matmuls: dict[Matmul, float] = defaultdict(float)
    plain: Counter[str] = Counter()
    collectives: list[Collective] = []
    for (what, *of), amount in counts.items():
        if what == "product":
            operator, shapes, _, computed = of
            for matmul in matmuls_of(operator, shapes, computed):
                matmuls[matmul._replace(calls=1)] += matmul.calls * amount
        elif what == "calls" and of[0] != "pipeline":  # messages belong to the schedule
            hidden, hidden_bytes = (counts.get((name, *of), 0) for name in ("hidden_calls", "hidden_bytes"))
            exposed = (0.0, amount - hidden, counts["bytes", *of] - hidden_bytes)
            for share, some, nbytes in ((1.0, hidden, hidden_bytes), exposed):
                if some:
                    collectives.append(Collective(cast(Any, of[1]), cast(Axis, of[0]), nbytes / some, some, share))
        elif len(of) < 2:
            plain[what] += amount
    return Work(
        tuple(matmul._replace(calls=number) for matmul, number in matmuls.items()),
        plain["memory_bound_bytes"],
        plain["launches"],
        tuple(collectives),
        plain["copy_bytes"],
        plain["host_syncs"] + plain["blocking_copies"],
    )
