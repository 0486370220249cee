"""Comparison of every operation of a step with the list from `schedule.expand` (`train.check_step`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from pangu.common.errors import LocalError
from pangu.config.optimizer import MuonConfig
from pangu.layers.recompute import is_repeating
from pangu.layers.turns import Turn
from pangu.models.language_model import ModuleHooks
from pangu.schedule.actions import MESSAGES, Action, Kind
from pangu.schedule.expand import UPDATE, Expansion, StepOp
from pangu.schedule.schedule import Schedule
from pangu.zero.muon_schedule import publish_order
from pangu.zero.unshard import passing

if TYPE_CHECKING:
    from pangu.training.step import Trainer


class StepCheck(ModuleHooks):
    """Expected operations of a trainer's step, and the position of the step in them.

    Postponed weight gradients are computed parameter by parameter, and those of lookups when no module is left: of
    these the reductions are compared, not the modules. After an exception in a step, nothing is compared any more.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Watch a trainer's steps from now on."""
        mesh, schedule, parameters = trainer.mesh, trainer.stages.schedule, trainer.parameters
        self._stage = parameters.stage
        self._mesh, self._schedule = mesh, schedule
        optimizer = trainer.config.optimizer
        self._one_by_one = optimizer.name == "adam"
        self._published = None
        if isinstance(optimizer, MuonConfig):
            self._published = publish_order(self._stage, optimizer.split_heads)
        self._name = mesh.name
        self._expected: Iterator[StepOp] | None = None
        """Operations that must follow; None outside of a step."""
        self._divided: set[tuple[str, str]] = set()
        """Kinds of action and modules that the list divides into turns."""
        self._is_stopped = False
        self._action: Action | None = None
        self._count = 0
        """Operations of the step so far."""
        self._below, trainer.model.hooks = trainer.model.hooks, self
        self._unsharder = unsharder = parameters.unsharder
        unsharder.on_operation = lambda operation, flat: self._check(StepOp(operation.value, flat=flat.numbers))
        parameters.gradients.on_operation = unsharder.on_operation
        trainer.runner.on_action = self._begin_action
        trainer.optimizer.register_step_pre_hook(lambda *_: self._check(StepOp(UPDATE)))

    def follow(self, schedule: Schedule) -> None:
        """Expect the operations of another schedule from the next step on."""
        self._schedule = schedule

    def begin(self) -> None:
        """Start to compare a step."""
        if self._is_stopped:
            return
        in_flight = {flat.numbers.index for flat in self._unsharder.in_flight}
        actions, turns = self._schedule.actions[self._mesh.at.pipeline], self._schedule.turns
        ops = Expansion(self._stage, in_flight, turns).step(actions, self._one_by_one, self._published)
        self._divided = {(op.kind, op.module) for op in ops if op.turn is not None}
        self._expected, self._count = filter(self._is_compared, ops), 0

    def drop(self) -> None:
        """Compare nothing until the next step begins: the gradients of this one are dropped."""
        self._expected = None

    def stop(self) -> None:
        """Stop comparing for good: an exception has ended a step and left weights unsharded."""
        self._expected, self._is_stopped = None, True

    def end(self) -> None:
        """Stop comparing at the end of a step. Raises LocalError if operations are missing."""
        if self._expected is not None and (rest := next(self._expected, None)) is not None:
            self._refuse(rest, "the end of the step")
        self._expected = None

    def before(self, module: str, x: Tensor) -> Tensor:
        """Compare the module's forward pass with the list, after the operations on its weights."""
        return passing(self._below.before(module, x), lambda: self._check_module(module), lambda: None)

    def after(self, module: str, x: Tensor) -> Tensor:
        """Compare the module's backward pass with the list, after the operations on its weights."""
        return self._below.after(module, passing(x, lambda: None, lambda: self._check_module(module)))

    def on_turn(self, module: str, turn: Turn, last: Tensor) -> None:
        """Compare the turn's forward pass with the list, and its backward pass when that begins."""
        if is_repeating():
            return  # a recompute is part of the backward pass, and is not backpropagated
        self._check_module(module, turn)
        if last.grad_fn is not None:
            last.grad_fn.register_prehook(lambda _: self._check_module(module, turn))

    def _begin_action(self, action: Action) -> None:
        self._action = action
        if action.kind in MESSAGES:
            self._check(StepOp(action.kind.value, "", None, action.chunk, action.micro, action.peer))

    def _check_module(self, module: str, turn: Turn | None = None) -> None:
        if (action := self._action) is not None and module in self._stage.uses[action.chunk]:
            op = StepOp(action.kind.value, module, None, action.chunk, action.micro, turn=turn)
            if self._is_compared(op):
                self._check(op)

    def _is_compared(self, op: StepOp) -> bool:
        is_forward = op.kind == Kind.FORWARD
        alone = op.kind == Kind.BACKWARD_WEIGHT or (op.module in self._stage.regions.lookups and not is_forward)
        divides = (op.kind, op.module) in self._divided
        return not op.module or not (alone or divides == (op.turn is None))

    def _check(self, op: StepOp) -> None:
        if self._expected is None:
            return
        expected = next(self._expected, None)
        if expected is not None and expected.kind == UPDATE:
            expected = expected._replace(flat=None)
        if expected != op:
            self._refuse(expected, str(op))
        self._count += 1

    def _refuse(self, expected: StepOp | None, found: str) -> None:
        number = self._count + 1
        self._expected = None
        raise LocalError(
            f"{self._name}: train.check_step: operation {number} of the step is {found}, expected "
            f"{'the end of the step' if expected is None else expected}; report this as a bug of pangu"
        )
