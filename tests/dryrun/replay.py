"""A process that carries out layouts as they are, and the shortened chunks that stand for them, and compares every
span: reads composed configurations and writes what differs, a line for each."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pangu.dryrun.device import load_device

if __name__ == "__main__":
    fake = load_device()

import torch

from pangu.dryrun.measure import SpanRecorder, key_of, measure, spans_in
from pangu.dryrun.run import audited, carry_out, micro_batches, on_fake_tensors
from pangu.dryrun.traces import TraceRequest, Way, jobs_of
from pangu.models.parameters import place_tensors
from pangu.pipeline.layouts import Chosen, choose_layout
from pangu.schedule.actions import MESSAGES, Action
from pangu.schedule.spans import Span, SpanKey, Trace, Work, module_kinds
from pangu.topology.layout import Coordinates
from pangu.topology.placement import TensorRank

Found = Iterator[tuple[str, SpanKey, Span]]


def carried_out(chosen: Chosen, stage: int, device: torch.device) -> Found:
    """The spans of a step of a stage, each with its action."""
    layout = chosen.layout
    rank = layout.rank(Coordinates(stage, 0, 0))
    fakes = on_fake_tensors(rank, layout.world)
    with fakes, audited(chosen, device, fake) as (audit, trainer):
        parts = chosen.stages.of(stage)
        table = place_tensors(chosen.config.model, list(parts.values()), TensorRank(), chosen.config.train.frozen)
        kinds = {chunk: module_kinds(chosen.config, table, part) for chunk, part in parts.items()}
        recorder = SpanRecorder(audit, trainer, kinds)
        for _ in range(2):  # the first step makes what stays
            recorder.restart()
            carry_out(audit, trainer, micro_batches(chosen.config, layout))
            recorder.finish()
        split = chosen.stages.schedule.splits_backward
        for boundary, span in spans_in(recorder.log):
            if isinstance(action := boundary.action, Action):
                yield f"{action}", key_of(boundary, action, kinds[action.chunk], split), span


def measured(chosen: Chosen, stage: int, device: torch.device) -> Trace:
    """The trace of a stage."""
    config, parts = chosen.config, chosen.stages.of(stage)
    table = place_tensors(config.model, list(parts.values()), TensorRank(), config.train.frozen)
    chunks = tuple(tuple(module_kinds(config, table, part).values()) for part in parts.values())
    request = TraceRequest(config, chunks, (chosen.stages.schedule.splits_backward,))
    way = Way.of(request)
    ((_, options),) = jobs_of([(way, request)])
    (trace,) = measure(choose_layout(json.loads(way.values), 1), device, fake, **options)
    return trace


HOST: dict[str, Any] = {"operators": 0.0, "calls": 0.0}
SHARDING = 0.15
"""Share of the operators and Python calls of modules that the hooks of sharded and offloaded weights add."""


def host_sum(one: Work, other: Work) -> Work:
    """What the host does for two spans."""
    return replace(Work(), **{what: getattr(one, what) + getattr(other, what) for what in HOST})


def casts_weights(chosen: Chosen, action: str, told: Span, span: Span) -> bool:
    """Whether two spans differ by the casts of weights to fp8 alone, which the first micro-batch of a step makes."""
    of_casts = HOST | {"bytes": 0, "launches": 0}
    same = replace(told.work, **of_casts) == replace(span.work, **of_casts)
    first = "micro-batch 0" in action and chosen.config.precision.matmul == "fp8"
    return first and same and span.work.launches > told.work.launches


def differences(values: dict[str, Any], device: torch.device) -> Iterator[str]:
    """What of each stage's spans is not as it was measured."""
    chosen = choose_layout(values, 1)
    for stage in range(chosen.layout.pipeline):
        trace, count, split = measured(chosen, stage, device), 0, chosen.stages.schedule.splits_backward
        whole, of_measured = Work(), Work()
        for action, key, span in carried_out(chosen, stage, device):
            told, count = trace.spans.get(key), count + 1
            if key.module in MESSAGES:
                told = trace.message(split, key.module, [key.before, key.after])
            elif key.module in ("UNSHARD", "RESHARD"):
                told = Span()
            if told is None:
                yield f"stage {stage}, {action}: {key} was not measured"
            elif told.segments != span.segments:
                yield f"stage {stage}, {action}: {key}: {told.segments} instead of {span.segments}"
            elif not set(span.until) <= set(told.until):
                yield f"stage {stage}, {action}: {key}: {told.until} instead of {span.until}"
            elif replace(told.work, **HOST) != replace(span.work, **HOST) and not casts_weights(
                chosen, action, told, span
            ):
                yield f"stage {stage}, {action}: {key}: {told.work} instead of {span.work}"
            whole, of_measured = host_sum(whole, span.work), host_sum(of_measured, told.work if told else Work())
        for what in HOST:
            if abs(getattr(of_measured, what) / getattr(whole, what) - 1) > SHARDING:
                yield f"stage {stage}: {getattr(of_measured, what)} {what} instead of {getattr(whole, what)}"
        assert count > 5


if __name__ == "__main__":
    torch.set_num_threads(1)
    for line in sys.stdin:
        print(json.dumps(list(differences(json.loads(line), torch.device("cuda", 0)))), flush=True)
