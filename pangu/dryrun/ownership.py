"""Owners of a step's memory: flat parameters, gradient sums and the optimizer; the rest are activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from pangu.dryrun.audit import Audit
from pangu.training.step import Trainer
from pangu.zero.gradients import GradientSum
from pangu.zero.sharded import ShardedParameters
from pangu.zero.unshard import Unsharder

_OWNERS: tuple[tuple[type, str, str], ...] = (
    (ShardedParameters, "__init__", "parameters"),
    (ShardedParameters, "norm_and_loss", "gradients"),
    (ShardedParameters, "update", "optimizer"),
    (Unsharder, "publish", "gathered"),
    (Unsharder, "do", "gathered"),
    (GradientSum, "start_step", "gradients"),
    (GradientSum, "sum_of", "gradients"),
    (GradientSum, "complete", "gradients"),
    (GradientSum, "reduce", "gradients"),
    (GradientSum, "finish", "gradients"),
    (GradientSum, "_add", "gradients"),
)
"""Class, method, and the kind of memory allocated while the method runs."""


@contextmanager
def ownership(audit: Audit) -> Iterator[None]:
    """Tell the audit which owner operations within the block belong to."""

    def within(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            with audit.owned(kind):
                return original(*args, **kwargs)

        return method

    with ExitStack() as stack:
        for owner, name, kind in _OWNERS:
            stack.enter_context(patch.object(owner, name, within(getattr(owner, name), kind)))
        yield


def label_states(audit: Audit, trainer: Trainer) -> None:
    """Tell the audit which owner each persistent buffer belongs to."""
    kinds = {"total": "gradients", "grad": "gradients", "main": "optimizer"}
    for flat in trainer.parameters.flat_parameters:
        for row in reversed(flat.table):  # an alias is labeled as the buffer it points to
            tensor = getattr(flat, row.name)
            if row.alias is None and tensor is not None:
                audit.memory.label(tensor, kinds.get(row.name, "parameters") if row.lasting else "gathered")
    for state in trainer.optimizer.state.values():
        for tensor in state.values():
            audit.memory.label(tensor, "optimizer")
