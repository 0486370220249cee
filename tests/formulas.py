"""Published formulas in place of measured modules, for tests of what is planned from them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from benchmarks.planner_accuracy.published import (
    SYSTEMS,
    Module,
    Setup,
    embedding_work,
    head_work,
    layer_work,
)
from pangu.config.schema import RunConfig
from pangu.dryrun.traces import TraceRequest, _content
from pangu.models.parameters import ModelPart, parameters_by_module, place_tensors
from pangu.planning.cost import memory_of
from pangu.planning.program import Plan
from pangu.planning.search import Candidate, Space
from pangu.schedule.actions import MESSAGES
from pangu.schedule.spans import Mark, Segment, Span, SpanKey, Trace, UpdateTrace, Work, module_kinds
from pangu.topology.placement import TensorRank

ADAM = UpdateTrace(34.0, 24.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Fused Adam in fp32: reads and writes of weight, gradient and moments."""
WORKS = {"embedding": embedding_work, "layer": layer_work, "head": head_work}


@dataclass
class FormulaTraces:
    """Traces of Megatron-LM of 2021 by the formulas of its papers, in place of `pangu.dryrun.traces.Traces`."""

    _traces: dict[tuple[Setup, bool, bool, bool], Trace] = field(default_factory=dict)
    _gradients: dict[Any, dict[str, tuple[str, ...]]] = field(default_factory=dict)

    def measure(self, requests: Collection[TraceRequest]) -> list[Trace]:
        """Return the traces of some chunks, worked out together."""
        asked: dict[tuple[Setup, bool, bool, bool], list[TraceRequest]] = {}
        for request in requests:
            asked.setdefault(_key(request), []).append(request)
        for key, those in asked.items():
            known = self._traces[key].spans if key in self._traces else {}
            keys = {span for request in those for chunk in request.chunks for span in request.keys(chunk)}
            chunks = {chunk for request in those for chunk in request.chunks}
            keys |= {SpanKey(one, chunk[0], kind, chunk[-1]) for one in "BI" for chunk in chunks for kind in MESSAGES}
            if missing := keys - known.keys():
                setup, *ends, offload = key
                config = those[0].config
                of_model = config.model, config.train.frozen, *ends
                if of_model not in self._gradients:
                    self._gradients[of_model] = _gradients(config, *ends)
                gradients = self._gradients[of_model]
                spans = {one: _span(setup, one, gradients.get(_content(one.module), ()), offload) for one in missing}
                self._traces[key] = Trace({**known, **spans}, Span(), Span(), Span(), ADAM)
        return [self._traces[_key(request)] for request in requests]


def _key(request: TraceRequest) -> tuple[Setup, bool, bool, bool]:
    names = {kind.split()[0] for chunk in request.chunks for kind in chunk}
    offload = "activations" in request.config.memory.offload
    return _setup(request.config), "embedding" in names, "head" in names, offload


def _setup(config: RunConfig) -> Setup:
    """Return the published run of the same shape; what ZeRO sends is no part of a module's work."""
    model, parallel = config.model.without_experts, config.parallel
    recompute = "selective" if config.memory.recompute == "selective" else "none"
    sizes = parallel.tensor, 1, 1, 1, parallel.context, 0, parallel.sequence
    plan = Plan(*sizes, recompute, config.batch.micro_size, 1, "1f1b", (model.layers,))
    return Setup(model, SYSTEMS["megatron of 2021"], plan)


def _gradients(config: RunConfig, first: bool, last: bool) -> dict[str, tuple[str, ...]]:
    """Return the parameters that backward adds gradients to, as the marks of each kind of module name them."""
    model = config.model
    part = ModelPart(range(model.layers), first, last)
    table = place_tensors(model, [part], TensorRank(), config.train.frozen)
    kinds = module_kinds(config, table, part)
    return {
        _content(kinds[module]): tuple(
            name.removeprefix(module) if module.startswith("layers.") else name
            for name in names
            if table.is_trained(name)
        )
        for module, names in parameters_by_module(model, tuple(table.shapes), part).items()
    }


@lru_cache(maxsize=100_000)
def _span(setup: Setup, key: SpanKey, gradients: tuple[str, ...], offload: bool) -> Span | None:
    """Return the span of an action on a module."""
    name, *words = key.module.split()
    if "unreached" in words and key.action != "F":
        return None
    if name not in WORKS:
        return Span()
    module = WORKS[name](setup)
    saved = kept = 0 if "unreached" in words else int(module.saved_bytes)
    if "recomputed" in words:
        module = WORKS[name](setup._replace(plan=setup.plan._replace(recompute="full")))
        kept = int(module.saved_bytes)
    # all layers but the last wait on the host: each frees the one before it, whose backward pass brings it back first
    layer = offload and name == "layer"
    copied = kept * (layer and "resident" not in words and key.action in "FBI")
    work = replace(_work(setup, key.action, module), host_bytes=float(copied))
    if key.action == "F":
        return Span((Segment(saved, kept - kept * (layer and key.before.startswith("layer"))),), work)
    marks = [Mark(event, name) for name in gradients for event in ("add", "complete")] if key.action in "BW" else []
    # the gradient of the input makes again what is not kept, those of the weights free it
    again, freed = saved - kept if key.action in "BI" else 0, kept if key.action in "BW" else 0
    back = kept * (layer and key.action in "BI" and key.after.startswith("layer"))
    return Span((*(Segment(again + back, back, mark) for mark in marks), Segment(again + back, back - freed)), work)


def _work(setup: Setup, action: str, module: Module) -> Work:
    """Return the work of an action; recomputing comes before the gradient of the input."""
    forward, recompute, backward_input, backward_weight = module.passes
    passes = {"F": [forward], "I": [recompute, backward_input], "W": [backward_weight]}
    passes["B"] = passes["I"] + passes["W"]
    return Work(
        tuple(one for part in passes[action] for one in part.matmuls),
        sum(part.bytes for part in passes[action]),
        sum(part.launches for part in passes[action]),
        tuple(one for part in passes[action] for one in part.collectives if getattr(setup.plan, one.axis) > 1),
    )


def as_planned(space: Space, tried: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield layouts as `pangu.planning.search.carried_out` does, as if dry runs had found what is planned."""
    for one in tried:
        memory = tuple(memory_of(stage, space.cluster) for stage in space.program.describe(one.plan).stages)
        yield one._replace(memory=memory, measured=max(stage.total for stage in memory))
