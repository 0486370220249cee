"""Published formulas in the place of counted modules, where a test is of what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from benchmarks.planner_accuracy import published
from benchmarks.planner_accuracy.published import MEGATRON_2021, Module, Setup, embedding_work, head_work, layer_work
from pangu.config.schema import RunConfig
from pangu.planning.layout_work import Plan, Shape, System, assemble, state_bytes
from pangu.planning.passing import Chunk, Stored
from pangu.planning.program import Program
from pangu.planning.workload import ModuleWork, Workload
from pangu.topology.layout import Layout

MEGATRON = System(2, spare_bytes=4)
"""Megatron-LM of 2021, as `MEGATRON_2021`."""


def describe(shape: Shape, plan: Plan) -> Workload:
    """The step of a layout by Megatron-LM."""
    zero = 3 if plan.zero == 3 else 0
    layout = Layout(plan.tensor, data=plan.data, zero=zero, sequence=plan.sequence, context=plan.context)
    model = published.Shape(*shape[: len(published.Shape._fields)])
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
    def shape(self) -> Shape:
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
