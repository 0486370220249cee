"""Expansion of a schedule into the step of one rank: actions module by module, and operations on parameters.

The trainer follows the same rules (`zero.rules`); no tensor is involved here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from pangu.layers.turns import LayerPart, Turn
from pangu.schedule.actions import COMPUTE, Action, Kind
from pangu.zero.grouping import backward_order
from pangu.zero.rules import Operation, ReduceRules, UnshardRules
from pangu.zero.stage_parameters import FlatSpec, StageParameters


class StepOp(NamedTuple):
    """Operation of a step."""

    kind: str
    """Kind of an action (of a module if it computes), an `Operation` on a flat parameter, or `UPDATE`."""
    module: str = ""
    flat: FlatSpec | None = None
    chunk: int | None = None
    micro: int | None = None
    peer: int | None = None
    """Stage at the other end of a message."""
    turn: Turn | None = None
    """Part and half of a layer that computes halves of its micro-batch in turns; None: all of a module."""

    def __str__(self) -> str:
        """Format it like `F layers.3, micro-batch 7` or `UNSHARD flat parameter 2 (layers.3.norm.weight, ...)`."""
        words = [self.kind, self.module, *(str(one) for one in (self.turn, self.flat) if one is not None)]
        where = [("chunk", None if self.module or self.flat else self.chunk), ("micro-batch", self.micro)]
        text = " ".join(filter(None, words))
        return ", ".join([text, *(f"{name} {value}" for name, value in where if value is not None)])


UPDATE = "UPDATE"
"""Kind of the optimizer's update of one flat parameter, or of all (None)."""


class Expansion:
    """Builder of the list of operations."""

    def __init__(
        self, parameters: StageParameters, in_flight: Collection[int] | None, turns: Sequence[Turn] = ()
    ) -> None:
        """Start as after the previous step, or with the flat parameters of these indices in flight.

        `turns`: order in which layers compute halves of a micro-batch, as in `Schedule`.
        """
        self.parameters = parameters
        self.ops = ops = list[StepOp]()
        self._turns: dict[str, list[Turn | None]] = {}
        """Turns of the forward passes of modules that compute halves."""
        for modules in parameters.uses.values() if turns else ():
            for module in (name for name in modules if name.startswith("layers.")):
                exchanges = any(flat.sharding.experts for flat in modules[module])
                self._turns[module] = [turn for turn in turns if exchanges or turn.part is LayerPart.OUTPUT]

        def record(operation: Operation, flat: FlatSpec) -> None:
            ops.append(StepOp(operation.value, flat=flat))

        self.unsharding = UnshardRules[FlatSpec](parameters, parameters.flats)
        self.reducing = ReduceRules[FlatSpec](parameters, parameters.flats)
        self.unsharding.on_operation = self.reducing.on_operation = record
        self.trained = [flat for flat in parameters.flats if flat.trained]
        if in_flight is None:
            self.unsharding.publish(self.trained)
            self.ops.clear()
        else:
            self.unsharding.in_flight = {flat: None for flat in parameters.flats if flat.index in in_flight}

    @property
    def state(self) -> tuple[Any, Any]:
        """State between two actions, which determines all later operations."""
        return self.unsharding.state, self.reducing.state

    @state.setter
    def state(self, state: tuple[Any, Any]) -> None:
        self.unsharding.state, self.reducing.state = state
        self.ops.clear()

    def add(self, action: Action) -> None:
        """Append the operations of an action."""
        if action.kind in COMPUTE:
            self._compute(action)
        elif action.kind is Kind.UNSHARD:
            self.unsharding.unshard(action.chunk)
        elif action.kind is Kind.RESHARD:
            self.unsharding.reshard(action.chunk)
        else:
            self.ops.append(StepOp(action.kind.value, "", None, action.chunk, action.micro, action.peer))

    def step(
        self, actions: Iterable[Action], one_by_one: bool, published: Sequence[FlatSpec] | None = None
    ) -> list[StepOp]:
        """Return the operations of a full step.

        Args:
            actions: Actions of the rank's stage, from the schedule.
            one_by_one: True if an optimizer with its state on the host updates one flat parameter at a time.
            published: Trained flat parameters in the order in which the update publishes them; None: as they are.
        """
        for action in actions:
            self.add(action)
        # reductions that are still in flight after the last micro-batch
        self.reducing.finish_all()
        on_host = any("optimizer" in flat.sharding.offload for flat in self.parameters.flats)
        groups = [[flat] for flat in self.trained] if one_by_one and on_host else [published or self.trained]
        for flats in groups:
            self.ops.append(StepOp(UPDATE, flat=flats[0] if len(groups) > 1 else None))
            self.unsharding.publish(flats)
        return self.ops

    def _compute(self, action: Action) -> None:
        parameters, chunk = self.parameters, action.chunk
        modules, regions = parameters.uses[chunk], parameters.regions
        backward = backward_order(list(modules), parameters.trained, regions)
        if action.kind is Kind.FORWARD:
            for module in modules:
                self.unsharding.begin(module, self.unsharding.forward)
                for turn in self._turns.get(module, (None,)):
                    self.ops.append(StepOp(action.kind.value, module, None, chunk, action.micro, None, turn))
                if module != regions.last or module not in backward:  # its backward pass follows directly
                    self.unsharding.end(module, self.unsharding.forward)
            return
        # no gradient passes a lookup, so that lookups add theirs last
        order = [*backward, *(module for module in reversed(list(modules)) if module in regions.lookups)]
        order = [module for module in order if module in backward or self._adds(modules[module])]
        if action.kind is Kind.BACKWARD_WEIGHT:
            order = [module for module in order if self._postpones(module)]
        if action.reduce:
            # a flat parameter is reduced when the last module that uses it has added its gradient
            users = Counter(flat for module in order for flat in modules[module])
            self.reducing.expect_counts(chunk, [users[flat] for flat in self.reducing.flat_parameters.get(chunk, [])])
        for module in order:
            self._backward(action, module, modules[module], module in backward)
        if action.reduce:
            self.reducing.reduce(chunk)

    def _backward(self, action: Action, module: str, flats: Sequence[FlatSpec], reads_weights: bool) -> None:
        """Append one module of a backward pass, or of its input or weight part."""
        reads_weights = reads_weights and action.kind is not Kind.BACKWARD_WEIGHT
        if reads_weights:
            has_begun = module == self.parameters.regions.last
            self.unsharding.begin(module, self.unsharding.backward, has_begun)
        turns = self._backward_turns(action, module, flats)
        last = turns[-1]
        # gradients of experts are complete before attention is computed
        last_of_experts = next((turn for turn in turns[::-1] if turn and turn.part is LayerPart.EXPERTS), last)
        for turn in turns:
            self.ops.append(StepOp(action.kind.value, module, None, action.chunk, action.micro, None, turn))
            if action.reduce:
                places = self.reducing.flat_parameters.get(action.chunk, [])
                completed = (flat for flat in flats if turn is (last_of_experts if flat.sharding.experts else last))
                for index in sorted(places.index(flat) for flat in completed if flat in places):
                    self.reducing.count(action.chunk, index)
        if reads_weights:
            self.unsharding.end(module, self.unsharding.backward)

    def _backward_turns(self, action: Action, module: str, flats: Sequence[FlatSpec]) -> Sequence[Turn | None]:
        """Return the turns of a module's backward pass, which autograd takes in the opposite order."""
        # With frozen parameters the layer stays one operation: some of its parts have no backward pass.
        if module not in self._turns or action.kind is Kind.BACKWARD_WEIGHT or not all(flat.trained for flat in flats):
            return (None,)
        return self._turns[module][::-1]

    def _adds(self, flats: Sequence[FlatSpec]) -> bool:
        return any(flat.trained for flat in flats)

    def _postpones(self, module: str) -> bool:
        """Return whether a module's weight gradients are computed apart from its input gradient."""
        parameters = self.parameters
        adds = any(self._adds(modules.get(module, ())) for modules in parameters.uses.values())
        return adds and not (module == parameters.regions.last and parameters.loss_in_chunks)
