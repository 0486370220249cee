"""Published formulas in place of measured modules, for tests of what is planned from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from benchmarks.planner_accuracy.published import (
    MEGATRON_2021,
    Module,
    Recompute,
    Setup,
    Shape,
    embedding_work,
    head_work,
    layer_work,
)
from pangu.config.schema import RunConfig
from pangu.dryrun.traces import Request, _content
from pangu.models.parameters import ModelPart, parameters_by_module, place_tensors
from pangu.pipeline.actions import MESSAGES
from pangu.pipeline.spans import Mark, Segment, Span, SpanKey, Trace, UpdateTrace, Work, module_kinds
from pangu.planning.layout_work import Plan, System, assemble, state_bytes
from pangu.planning.layout_work import Shape as OldShape
from pangu.planning.passing import Chunk, Stored
from pangu.planning.program import Program
from pangu.planning.workload import ModuleWork, Workload
from pangu.topology.layout import Layout
from pangu.topology.placement import TensorRank

ADAM = UpdateTrace(34.0, 24.0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""Fused Adam in fp32: reads and writes of weight, gradient and moments."""
WORKS = {"embedding": embedding_work, "layer": layer_work, "head": head_work}


@dataclass
class FormulaTraces:
    """Traces of Megatron-LM of 2021 by the formulas of its papers, in place of `pangu.dryrun.traces.Traces`."""

    note_progress: Callable[[], None] = lambda: None
    """Never called: formulas need no dry runs."""

    def measure(self, requests: Collection[Request]) -> None:
        """Formulas need no measuring."""

    def of(self, request: Request) -> Trace:
        """Return the trace of some chunks."""
        config, names = request.config, {kind.partition(" ")[0] for chunk in request.chunks for kind in chunk}
        setup, gradients = _setup(config), _gradients(config, "embedding" in names, "head" in names)
        keys = {key for chunk in request.chunks for key in request.keys(chunk)}
        keys |= {SpanKey("", chunk[0], kind, chunk[-1]) for chunk in request.chunks for kind in MESSAGES}
        spans = {key: _span(setup, key, gradients.get(_content(key.module), ())) for key in keys}
        return Trace(spans, Span(), Span(), Span(), ADAM)


def _setup(config: RunConfig) -> Setup:
    """Return the published run of the same shape; what ZeRO sends is no part of a module's work."""
    model, parallel = config.model, config.parallel
    heads = model.heads, model.kv_heads or model.heads
    gated = model.activation == "swiglu"
    shape = Shape(
        model.layers, model.hidden, *heads, model.ffn_size, model.vocab, model.sequence, gated, model.tied_head
    )
    layout = Layout(parallel.tensor, sequence=parallel.sequence, context=parallel.context)
    recompute: Recompute = "selective" if config.memory.recompute == "selective" else "none"
    return Setup(shape, MEGATRON_2021, layout, recompute, config.batch.micro_size, 1, "1f1b", (model.layers,))


@lru_cache(maxsize=1000)
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
        for module, names in parameters_by_module(model, table, part).items()
    }


@lru_cache(maxsize=100_000)
def _span(setup: Setup, key: SpanKey, gradients: tuple[str, ...]) -> Span | None:
    """Return the span of an action on a module."""
    name, *words = key.module.split()
    if "unreached" in words and key.action != "F":
        return None
    if name not in WORKS or not key.action:
        return Span()
    module = WORKS[name](setup)
    saved = kept = 0 if "unreached" in words else int(module.saved_bytes)
    if "recomputed" in words:
        module = WORKS[name](setup._replace(recompute="full"))
        kept = int(module.saved_bytes)
    work = _work(setup, key.action, module)
    if key.action == "F":
        return Span((Segment(saved, kept),), work)
    marks = [Mark(event, name) for name in gradients for event in ("add", "complete")] if key.action in "BW" else []
    # the gradient of the input makes again what is not kept, those of the weights free it
    again, freed = saved - kept if key.action in "BI" else 0, kept if key.action in "BW" else 0
    return Span((*(Segment(again, 0, mark) for mark in marks), Segment(again, -freed)), work)


def _work(setup: Setup, action: str, module: Module) -> Work:
    """Return the work of an action; recomputing comes before the gradient of the input."""
    forward, recompute, backward_input, backward_weight = module.passes
    passes = {"F": [forward], "I": [recompute, backward_input], "W": [backward_weight]}
    passes["B"] = passes["I"] + passes["W"]
    return Work(
        tuple(one for part in passes[action] for one in part.matmuls),
        sum(part.bytes for part in passes[action]),
        sum(part.launches for part in passes[action]),
        tuple(one for part in passes[action] for one in part.collectives if getattr(setup.layout, one.axis) > 1),
    )


MEGATRON = System(2, spare_bytes=4)
"""Megatron-LM of 2021, as `MEGATRON_2021`."""


def describe(shape: OldShape, plan: Plan) -> Workload:
    """The step of a layout by Megatron-LM."""
    zero = 3 if plan.zero == 3 else 0
    layout = Layout(plan.tensor, data=plan.data, zero=zero, sequence=plan.sequence, context=plan.context)
    model = Shape(*shape[: len(Shape._fields)])  # type: ignore[arg-type]
    setup = Setup(model, MEGATRON_2021, layout, plan.recompute, plan.micro_size, 1, "1f1b", (shape.layers,))
    modules = _modules(setup)
    if plan.recomputed:
        modules = {**modules, "recomputed": _modules(setup._replace(recompute="full"))["layer"]}
    return assemble(shape, MEGATRON, plan, modules)


@lru_cache(maxsize=100_000)
def _modules(setup: Setup) -> dict[str, ModuleWork]:
    return {
        "embedding": _counted(embedding_work(setup)),
        "layer": _counted(layer_work(setup)),
        "head": _counted(head_work(setup)),
    }


def _counted(module: Module) -> ModuleWork:
    forward, recompute, backward_input, backward_weight = module.passes
    return ModuleWork(
        forward, backward_input, backward_weight, recompute, module.saved_bytes, parameters=module.parameters
    )


@dataclass
class Formulas:
    """Megatron-LM in the place of this program."""

    config: RunConfig
    exact: bool = True
    """They know all numbers of ranks."""
    note_progress: Callable[[], None] = lambda: None
    """Never called: formulas need no dry runs."""
    system = MEGATRON

    @cached_property
    def shape(self) -> OldShape:
        """Of the model."""
        return Program(self.config).shape

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Formulas need no preparing."""

    def describe(self, plan: Plan) -> Workload:
        """The step of a layout."""
        return describe(self.shape, plan)

    def stored_bytes(self, plan: Plan, numbers: float, experts: float, chunks: Sequence[Chunk]) -> Stored:
        """Bytes that last."""
        return Stored(state_bytes(self.system, plan, numbers))
