"""Published formulas in the place of counted modules, where a test is of what is made of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from benchmarks.planner_accuracy.published import MEGATRON_2021, describe
from pangu.config.schema import RunConfig
from pangu.planning.layout_work import Plan, Shape, state_bytes
from pangu.planning.passing import Chunk, Stored
from pangu.planning.program import Program
from pangu.planning.workload import Workload


@dataclass
class Formulas:
    """Megatron-LM in the place of this program."""

    config: RunConfig
    exact: bool = True
    """They know all numbers of ranks."""
    note_progress: Callable[[], None] = lambda: None
    """Never called: formulas need no dry runs."""
    system = MEGATRON_2021

    @cached_property
    def shape(self) -> Shape:
        """Of the model."""
        return Program(self.config).shape

    def prepare(self, plans: Iterable[Plan]) -> None:
        """Formulas need no preparing."""

    def describe(self, plan: Plan) -> Workload:
        """The step of a layout."""
        return describe(self.shape, self.system, plan)

    def stored_bytes(self, plan: Plan, numbers: float, experts: float, chunks: Sequence[Chunk]) -> Stored:
        """Bytes that last."""
        return Stored(state_bytes(self.system, plan, numbers))
