"""Measurement of spans: one rank's step of chunks shortened until no layer equals both of its neighbors.

A recorder notes the boundaries of modules, actions and gradients; its log is then cut into the spans between them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from pangu.collectives.point_to_point import Channels
from pangu.common.errors import UserError
from pangu.config.optimizer import UPDATED_AT_ONCE, OptimizerConfig
from pangu.dryrun.audit import Audit, work_of
from pangu.dryrun.device import FakeDevice
from pangu.dryrun.memory import OWNED
from pangu.dryrun.run import audited, carry_out, dry_run, micro_batches, on_fake_tensors
from pangu.dryrun.traces import PickedLayers, TraceRequest
from pangu.models.language_model import ModuleHooks
from pangu.models.parameters import ModelPart, place_tensors
from pangu.optim.build import make_optimizer
from pangu.pipeline.layouts import Chosen, choose_layout
from pangu.pipeline.stages import Stages
from pangu.schedule.actions import COMPUTE, SENDS, Action, Durations, Kind
from pangu.schedule.schedule import Schedule
from pangu.schedule.spans import END, START, Mark, Segment, Span, SpanKey, Trace, UpdateTrace, keys_of, module_kinds
from pangu.topology.placement import Placement, TensorRank
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
        self._begins = trainer.config.parallel.zero > 1 and trainer.config.precision.matmul == "fp8"
        for owner, name, method in (
            (audit, "enter", self._enter_action),
            (gradients, "sum_of", self._begin_sum),
            (gradients, "complete", self._end_sum),
            (store, "put", self._postpone),
        ):
            setattr(owner, name, partial(method, getattr(owner, name)))
        vars(parameters)["update"] = lambda *_: self._mark("update")  # `_measure_update` measures it
        del parameters._counted[1:]  # the number of tensors whose norms are computed is irrelevant to spans
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
        self._mark("add", self._names[parameter])
        total = sum_of(parameter, cleared)[0]
        # see `zero.gradients.fuses_gradient_accumulation`
        if self._kind == Kind.BACKWARD and self._module.startswith("layers.") and parameter.dim() > 1 and not cleared:
            self._audit.counts["sums",] += 1
            self._audit.counts["sum_bytes",] += parameter.nbytes + 2 * total.nbytes
        return total, self._begins  # like most micro-batches

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

    def _enter(self, module: str) -> None:
        if not self._started:
            self._end(START)
        self._started, self._module = True, module

    def _end(self, module: str) -> None:
        self.log.append(Boundary(self._audit.action, module, self._audit.counts))
        self._audit.counts = Counter()

    def _mark(self, event: Any, name: str = "") -> None:
        if self._module.startswith("layers.") and name.startswith(f"{self._module}."):
            name = name.removeprefix(self._module)
        self.log.append(Mark(event, name))


def spans_in(log: Sequence[Any]) -> Iterator[tuple[Boundary, Span]]:
    """Yield the spans of a log."""
    born: dict[int, int] = {}
    """Mapping from a storage to the index of the span that allocated it."""
    ends, kept, segments, piece = list[Boundary](), list[Counter[str]](), list[tuple[Segment, ...]](), list[Any]()
    left = set[tuple[Any, ...]]()
    """Modules that backward passes have left, each with its chunk and micro-batch."""
    for entry in log:
        piece.append(entry)
        if not isinstance(entry, Boundary):
            continue
        ends.append(entry)
        kept.append(Counter())
        is_backward = getattr(entry.action, "kind", None) in COMPUTE - {Kind.FORWARD}
        if entry.module not in (START, END) and is_backward:
            left.add((entry.module, *entry.action[1:3]))
        span_segments, level, peak = list[Segment](), 0, 0
        for one in piece:
            match one:
                case Mark() | Boundary():
                    span_segments.append(Segment(peak, level, one if isinstance(one, Mark) else None))
                    peak = level
                case storage, change if storage.kind not in OWNED:
                    maker = born.setdefault(id(storage), len(ends) - 1)
                    by, module, _ = ends[maker]
                    is_kept = isinstance(by, Action) and by.kind in COMPUTE and module not in (START, END)
                    # not what the lowest trained module kept, whose backward pass is part of `END`
                    is_kept = is_kept and (not is_backward or (module, *by[1:3]) in left)
                    if change < 0 and entry.module == END and is_kept and by[1:3] == entry.action[1:3]:
                        kept[maker][entry.action.kind.value] -= change
                    else:
                        level += change
                        peak = max(peak, level)
        segments.append(tuple(span_segments))
        piece.clear()
    for end, parts, until in zip(ends, segments, kept, strict=True):
        yield end, Span(parts, work_of(end.counts), tuple(sorted(until.items())))


def answer(fake: FakeDevice | str, values: Mapping[str, Any], rank: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the traces of a job that names `chunks`, or the report of a rank; or the `error`."""
    place = (torch.device("cpu"), None) if isinstance(fake, str) else (torch.device("cuda", 0), fake)
    try:
        chosen = choose_layout(values, 1)
        if "chunks" in options:
            report = {"traces": measure(chosen, *place, **options)}
        else:
            report = vars(dry_run(chosen, rank, *place, **options))
    except Exception as error:
        return {"error": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"}
    return {**report, "device": fake if isinstance(fake, str) else None}


def measure(
    chosen: Chosen,
    device: torch.device,
    fake: FakeDevice | None,
    chunks: Sequence[ModelPart],
    sizes: Sequence[int],
    splits: Sequence[bool],
) -> list[Trace]:
    """Carry out the forward and backward pass of each chunk on one rank, and return the trace for each size.

    Args:
        chosen: a run without a pipeline; chunks are carried out as if there was a second stage.
        device: device that the tensors are placed on.
        fake: fake device that tells its streams apart.
        chunks: as real ones, without the layers between equal ones.
        sizes: sequences per micro-batch.
        splits: whether weight gradients are computed separately; both values to measure both ways.
    """
    config, layout = chosen.config, replace(chosen.layout, pipeline=2)
    config = replace(config, faults=replace(config.faults, verify_weights=False))  # `StageProgram` counts that
    layers = sorted({layer for part in chunks for layer in part.layers})
    first, last = (any(getattr(part, end) for part in chunks) for end in ("first", "last"))
    together = ModelPart(cast(range, PickedLayers(layers)), first, last)
    parts = {2 * place + 1: part for place, part in enumerate([together, *chunks])}
    schedule = replace(_schedule(parts, splits), turns=chosen.stages.schedule.turns)
    built = Stages((together,), replace(schedule, stage_of=(0,)), Durations())
    own, replies = schedule.actions
    later = replace(schedule, actions=(tuple(action for action in own if action.micro), replies))
    traces: list[Trace] = []
    # dry runs of full steps look for races
    with (
        on_fake_tensors(0, layout.world),
        audited(Chosen(config, layout, built), device, fake, thorough=False) as (audit, trainer),
    ):
        trainer.stages = replace(built, schedule=schedule)
        trainer.runner = replace(trainer.runner, parts=parts, channels=Channels(trainer.mesh, schedule.channels))
        table = place_tensors(config.model, [together], TensorRank(), config.train.frozen)
        kinds = {chunk: module_kinds(config, table, part) for chunk, part in parts.items()}
        update = _measure_update(audit, config.optimizer, device)
        recorder = SpanRecorder(audit, trainer, kinds)
        for size in sizes:
            batch = replace(config.batch, micro_size=size, global_size=size * schedule.micro_batches * layout.data)
            trainer.config = replace(trainer.config, batch=batch)
            if trainer.model.head is not None:
                trainer.model.head.chunk = trainer.config.loss_chunk
            if traces:
                trainer.stages = replace(built, schedule=later)
            recorder.restart()
            carry_out(audit, trainer, micro_batches(trainer.config, layout))
            recorder.finish()
            traces.append(_trace(TraceRequest(config, (), tuple(splits)), audit, recorder.log, kinds, update))
    return traces


def _schedule(parts: Mapping[int, ModelPart], splits: Sequence[bool]) -> Schedule:
    """Return a schedule that runs each chunk on its own, forward and backward, once for each kind of backward.

    The first chunk is carried out in a micro-batch of its own, which later sizes leave out, to create the tensors that
    all micro-batches share. The second stage, never carried out, has the other chunks.
    """
    micros = [(0, False), *((micro, split) for micro, split in enumerate(splits, 1))]
    warm_up, *measured = parts.items()

    def actions() -> Iterator[Action]:
        for micro, split in micros:
            for chunk, part in measured if micro else [warm_up]:
                if not part.first:
                    yield Action(Kind.RECV_ACTIVATION, chunk, micro, 1)
                yield Action(Kind.FORWARD, chunk, micro)
                if not part.last:
                    yield Action(Kind.SEND_ACTIVATION, chunk, micro, 1)
                    yield Action(Kind.RECV_GRADIENT, chunk, micro, 1)
                yield Action(Kind.BACKWARD_INPUT if split else Kind.BACKWARD, chunk, micro)
                if not part.first:
                    yield Action(Kind.SEND_GRADIENT, chunk, micro, 1)
                if split:
                    yield Action(Kind.BACKWARD_WEIGHT, chunk, micro)

    stage_of = tuple(int(chunk not in parts) for chunk in range(max(parts) + 1))
    replies = tuple(Action(kind, 0, 0, 0) for kind in SENDS)
    return Schedule("measured", 2, len(parts), len(micros), stage_of, (tuple(actions()), replies))


def _trace(
    wanted: TraceRequest, audit: Audit, log: list[Any], kinds: Mapping[int, Mapping[str, str]], update: UpdateTrace
) -> Trace:
    _, *measured = kinds.values()
    keys = (wanted.keys(tuple(modules.values())) for modules in measured)
    spans: dict[SpanKey, Span | None] = dict.fromkeys(chain.from_iterable(keys))
    parts: dict[str, Span] = {}
    """Last span of each part of the step besides its actions: before the micro-batches are moved nothing is kept."""
    for boundary, span in spans_in(log):
        action = boundary.action
        if isinstance(action, Action) and action.micro:
            key = key_of(boundary, action, kinds[action.chunk], wanted.splits[action.micro - 1])
            until = dict(span.until) | dict(before.until if (before := spans.get(key)) else ())
            spans[key] = replace(span, until=tuple(sorted(until.items())))
        elif not isinstance(action, Action):
            parts[boundary.module] = span
    lasting = sum(size for kind, size in audit.memory.bytes.items() if kind not in OWNED)
    return Trace(spans, parts[BEGIN], parts[MOVE], parts[FINISH], update, lasting)


def key_of(boundary: Boundary, action: Action, kinds: Mapping[str, str], split: bool) -> SpanKey:
    """Return the key of a span of a chunk with these kinds of modules; `split`: weight gradients are apart."""
    kind, modules = action.kind.value, list(kinds.values())
    if boundary.module == MOVE:
        return SpanKey.of_message(kind, modules, split)
    order = [START, *(kinds if action.kind is Kind.FORWARD else reversed([*kinds])), END]
    return keys_of(kind, modules)[order.index(boundary.module)]


def _measure_update(audit: Audit, config: OptimizerConfig, device: torch.device) -> UpdateTrace:
    """Measure optimizer updates of tensors of several sizes, and of enough elements to need three passes."""

    def step(*sizes: int, rows: int = 1) -> np.ndarray:
        """Return the bytes moved, kernel launches and transient bytes of an update; Muon's matrices have many rows."""
        shapes = [(rows, size // rows) for size in sizes]
        tensors = [torch.zeros(shape, device=device) for shape in shapes]
        for tensor in tensors:
            tensor.grad = torch.zeros_like(tensor)
        places = [Placement(str(place), shape, 0.0) for place, shape in enumerate(shapes)]
        optimizer = make_optimizer(config, list(zip(places, tensors, strict=True)))
        numbers = torch.zeros((), device=device), torch.ones((), device=device)
        optimizer.found_inf, optimizer.grad_scale = numbers  # type: ignore[attr-defined]
        audit.counts.clear()
        start = audit.memory.total
        audit.memory.restart()
        optimizer.step()
        counts = audit.counts["memory_bound_bytes",], audit.counts["launches",]
        return np.array([*counts, audit.memory.peak - start], dtype=np.float64)

    size, most = 2**20, UPDATED_AT_ONCE
    one, two, twice, three = (step(*sizes) for sizes in ((size,), (size // 2,) * 2, (2 * size,), (most,) * 3))
    per_tensor, per_element = two - one, (twice - one) / size
    fixed = one - per_tensor - per_element * size
    further = three - fixed - 3 * per_tensor - per_element * most
    matrix = np.zeros(3)
    if config.name == "muon":
        matrix = step(size, size, rows=2**10) - step(size, rows=2**10)
    launches = fixed[1], per_tensor[1], further[1] / 2
    working = fixed[2], per_tensor[2], per_element[2], further[2] / most
    return UpdateTrace(*map(float, (per_element[0], *launches, *working, matrix[0] / size, matrix[1])))
