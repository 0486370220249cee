"""Measurement of spans: one rank's step of chunks shortened until no layer equals both of its neighbors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from typing import Any, cast

import torch

from pangu.collectives.point_to_point import Channels
from pangu.common.errors import UserError
from pangu.config.optimizer import UPDATED_AT_ONCE
from pangu.config.schema import RunConfig
from pangu.dryrun.audit import Audit
from pangu.dryrun.device import FakeDevice
from pangu.dryrun.memory import OWNED
from pangu.dryrun.recorder import BEGIN, FINISH, MOVE, Boundary, SpanRecorder, joined, spans_in
from pangu.dryrun.run import audited, carry_out, dry_run, micro_batches, on_fake_tensors
from pangu.dryrun.traces import TraceRequest, as_data
from pangu.models.parameters import ModelPart, place_tensors
from pangu.optim.build import make_optimizer
from pangu.pipeline.layouts import Chosen, choose_layout
from pangu.pipeline.stages import Stages
from pangu.schedule.actions import SENDS, Action, Durations, Kind
from pangu.schedule.schedule import Schedule
from pangu.schedule.spans import END, START, Span, SpanKey, Trace, UpdateTrace, keys_of, module_kinds
from pangu.topology.placement import Placement, TensorRank


def answer(fake: FakeDevice | str, values: Mapping[str, Any], rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """Return the traces of a job that names `chunks`, or the report of a rank; or the `error`."""
    place = (torch.device("cpu"), None) if isinstance(fake, str) else (torch.device("cuda", 0), fake)
    try:
        chosen = choose_layout(values, 1)
        if "chunks" in options:
            report = {"traces": list(map(as_data, measure(chosen, *place, **options)))}
        else:
            report = asdict(dry_run(chosen, rank, *place, **options))
    except UserError as error:
        return {"error": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {**report, "device": fake if isinstance(fake, str) else None}


class _Picked(tuple[int, ...]):
    """Layers of a chunk that starts before them: the first `memory.recompute` from `start` on are recomputed."""

    start: int


def _part(chunk: Mapping[str, Any]) -> ModelPart:
    layers = _Picked(chunk["layers"])
    layers.start = chunk["start"]
    return ModelPart(cast(range, layers), chunk["first"], chunk["last"])


def measure(
    chosen: Chosen,
    device: torch.device,
    fake: FakeDevice | None,
    chunks: Sequence[Mapping[str, Any]],
    sizes: Sequence[int],
    splits: Sequence[bool],
) -> list[Trace]:
    """Carry out the forward and backward pass of each chunk on one rank, and return the trace for each size.

    Args:
        chosen: a run without a pipeline; chunks are carried out as if there was a second stage.
        device: device that the tensors are placed on.
        fake: fake device that tells its streams apart.
        chunks: their `layers` (as large as the real chunk's, without those between equal ones), the layer where the
            real chunk would `start` if it began so late, and whether each is the `first` and the `last` of the model.
        sizes: sequences per micro-batch.
        splits: whether weight gradients are computed separately; both values to measure both ways.
    """
    config, layout = chosen.config, replace(chosen.layout, pipeline=2)
    parts = {2 * place + 1: _part(chunk) for place, chunk in enumerate(chunks)}
    schedule = _schedule(parts, splits)
    layers = sorted({layer for part in parts.values() for layer in part.layers})
    ends = (any(getattr(part, end) for part in parts.values()) for end in ("first", "last"))
    together = ModelPart(cast(range, tuple(layers)), *ends)
    built = Stages((together,), replace(schedule, stage_of=(0,)), Durations())
    traces: list[Trace] = []
    # dry runs of full steps look for races
    with (
        on_fake_tensors(0, layout.world),
        audited(config, layout, built, device, fake, thorough=False) as (audit, trainer),
    ):
        trainer.stages = replace(built, schedule=schedule)
        trainer.runner = replace(trainer.runner, parts=parts, channels=Channels(trainer.mesh, schedule.channels))
        table = place_tensors(config.model, [together], TensorRank(), config.train.frozen)
        kinds = {chunk: module_kinds(config, table, part) for chunk, part in parts.items()}
        update = _measure_update(audit, config, device)
        recorder = SpanRecorder(audit, trainer, kinds)
        for size in sizes:
            batch = replace(config.batch, micro_size=size, global_size=size * schedule.micro_batches * layout.data)
            trainer.config = replace(trainer.config, batch=batch)
            if trainer.model.head is not None:
                trainer.model.head.chunk = trainer.config.loss_chunk
            recorder.restart()
            carry_out(audit, trainer, micro_batches(trainer.config, layout))
            recorder.finish()
            traces.append(_trace(TraceRequest(config, (), tuple(splits)), audit, recorder.log, kinds, update))
    return traces


def _schedule(parts: Mapping[int, ModelPart], splits: Sequence[bool]) -> Schedule:
    """Return a schedule that runs each chunk on its own, forward and backward, once for each kind of backward.

    A first micro-batch of the first chunk creates what all share. The second stage, never carried out, has the others.
    """
    micros = [(0, False), *((micro, split) for micro, split in enumerate(splits, 1))]

    def actions() -> Iterator[Action]:
        for micro, split in micros:
            for chunk, part in list(parts.items())[: None if micro else 1]:
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
    keys = (wanted.keys(tuple(modules.values())) for modules in kinds.values())
    spans: dict[SpanKey, Span | None] = dict.fromkeys(chain.from_iterable(keys))
    beside: dict[str, list[Span]] = {BEGIN: [], MOVE: [], FINISH: []}
    for boundary, span in spans_in(log):
        action = boundary.action
        if isinstance(action, Action) and action.micro:
            key = key_of(boundary, action, kinds[action.chunk])
            until = dict(span.until) | dict(before.until if (before := spans.get(key)) else ())
            spans[key] = replace(span, until=tuple(sorted(until.items())))
        elif boundary.module in beside and not isinstance(action, Action):
            beside[boundary.module].append(span)
    lasting = sum(size for kind, size in audit.memory.bytes.items() if kind not in OWNED)
    return Trace(spans, joined(beside[BEGIN]), beside[MOVE][-1], beside[FINISH][-1], update, lasting)


def key_of(boundary: Boundary, action: Action, kinds: Mapping[str, str]) -> SpanKey:
    """Return the key of a span of a chunk with these kinds of modules."""
    if boundary.module == MOVE:
        modules = list(kinds.values())
        return SpanKey("", modules[0], action.kind.value, modules[-1])
    order = [START, *(kinds if action.kind is Kind.FORWARD else reversed([*kinds])), END]
    return keys_of(action.kind.value, list(kinds.values()))[order.index(boundary.module)]


def _measure_update(audit: Audit, config: RunConfig, device: torch.device) -> UpdateTrace:
    """Measure optimizer updates of tensors of several sizes, and of enough elements to need three passes."""

    def step(*sizes: int) -> tuple[float, float, float]:
        """Return the bytes moved, kernel launches and transient bytes of an update."""
        tensors = [torch.zeros(size, device=device) for size in sizes]
        for tensor in tensors:
            tensor.grad = torch.zeros_like(tensor)
        places = [Placement(str(place), (size, 1), 0.0) for place, size in enumerate(sizes)]
        optimizer = make_optimizer(config.optimizer, list(zip(places, tensors, strict=True)))
        numbers = torch.zeros((), device=device), torch.ones((), device=device)
        optimizer.found_inf, optimizer.grad_scale = numbers  # type: ignore[attr-defined]
        audit.counts.clear()
        memory = audit.memory
        start = memory.high = memory.total
        optimizer.step()
        return audit.counts["memory_bound_bytes",], audit.counts["launches",], memory.high - start

    size, most = 2**20, UPDATED_AT_ONCE
    (moved, launches, one), (_, launches_of_two, two), (twice_moved, _, twice), (_, launches_of_three, three) = (
        step(*sizes) for sizes in ((size,), (size // 2,) * 2, (2 * size,), (most,) * 3)
    )
    another = launches_of_two - launches
    per_pass = (launches_of_three - launches - 2 * another) / 2
    per_tensor, per_element = two - one, (twice - one) / size
    fixed = one - per_tensor - per_element * size
    more = (three - fixed - 3 * per_tensor - per_element * most) / most
    bytes_per_element = (twice_moved - moved) / size
    return UpdateTrace(bytes_per_element, launches - another, another, per_pass, fixed, per_tensor, per_element, more)
