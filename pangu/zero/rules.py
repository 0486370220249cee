"""Rules that decide when flat parameters are unsharded and their gradients reduced.

They turn the events of a step into operations, without tensors. The runtime executes these operations, and
`schedule.expand` lists them; nothing else decides.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, Generic, TypeVar

from pangu.zero.grouping import IN_FLIGHT, backward_order
from pangu.zero.stage_parameters import FlatSpec, StageParameters


class Operation(StrEnum):
    """Operation on a flat parameter; WAIT_UNSHARD also follows PUBLISH, and WAIT_REDUCE the oldest REDUCE."""

    UNSHARD = "UNSHARD"
    """Start to all-gather the weights, or to copy them from the host."""
    PUBLISH = "PUBLISH"
    """Start to all-gather what the ranks have updated, or to copy it from the host."""
    WAIT_UNSHARD = "WAIT_UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE"
    """Start to sum the gradients over the replicas."""
    WAIT_REDUCE = "WAIT_REDUCE"


F = TypeVar("F", bound=FlatSpec)
Following = Mapping[str, str]
"""Module -> module that is used next."""


class Rules(Generic[F]):
    """Decisions about operations on flat parameters; a subclass executes these in `do`."""

    on_operation: Callable[[Operation, F], None] | None = None
    """Callback that receives every operation before it is executed."""

    def do(self, operation: Operation, flat: F) -> None:
        """Pass an operation to `on_operation`; without tensors there is nothing to execute."""
        if self.on_operation is not None:
            self.on_operation(operation, flat)


class UnshardRules(Rules[F]):
    """Decisions when weights are unsharded.

    At stage 3 a flat parameter is gathered while the previous module computes and resharded after its use, so at most
    two (and a tied token embedding) are gathered at a time; the backward pass gathers them again. A chunk that a
    schedule unshards stays gathered from its first use until `reshard`.
    """

    def __init__(self, stage: StageParameters, flats: Sequence[F]) -> None:
        """Prepare for a stage, whose flat parameters are `flats`, with or without tensors."""
        uses, regions = stage.uses, stage.regions
        self.uses = {
            m: [flats[one.index] for one in used] for chunk_uses in uses.values() for m, used in chunk_uses.items()
        }
        self.regions, self.trained, self.overlap = regions, stage.trained, stage.overlap
        self.flat_parameters = list(dict.fromkeys(flat for used in self.uses.values() for flat in used))
        self._of_chunk = {
            chunk: {flats[one.index]: None for used in modules.values() for one in used}
            for chunk, modules in uses.items()
        }
        alone = len(uses) == 1
        self.forward = {a: b for names in uses.values() for a, b in pairwise(names) if alone or a != regions.shared}
        """Module -> next one in the forward pass; none for a module that several chunks follow."""
        orders = [backward_order(list(names), stage.trained, regions) for names in uses.values()]
        self.backward = {a: b for order in orders for a, b in pairwise(order)}
        self.in_flight: dict[F, None] = {}
        """Flat parameters whose gather or copy is in flight."""
        self.unsharded: set[F] = set()
        """Flat parameters of stage 3 whose full weights are in memory."""
        self._users = dict.fromkeys(self.flat_parameters, 0)
        self._kept: set[F] = set()
        """Flat parameters of chunks that a schedule keeps unsharded."""

    @property
    def state(self) -> Hashable:
        """State between two actions, which determines all later operations."""
        users = tuple((flat, count) for flat, count in self._users.items() if count)
        return tuple(self.in_flight), frozenset(self.unsharded), users, frozenset(self._kept)

    @state.setter
    def state(self, state: Any) -> None:
        in_flight, unsharded, users, kept = state
        self.in_flight, self.unsharded, self._kept = dict.fromkeys(in_flight), set(unsharded), set(kept)
        self._users = dict.fromkeys(self.flat_parameters, 0) | dict(users)

    def publish(self, flats: Iterable[F]) -> None:
        """Start to publish updated weights to all ranks; gathered weights are out of date."""
        for flat in flats:
            self.finish(flat)
            self.do(Operation.PUBLISH, flat)
            sharding = flat.sharding
            if sharding.stage == 3:
                self.release(flat)
            elif sharding.size > 1 or flat.main_on_host:
                self.in_flight[flat] = None
            if not self.overlap:
                self.finish(flat)

    def wait(self, flats: Iterable[F] | None = None) -> None:
        """Wait for all gathers and copies in flight, or for those of `flats`."""
        for flat in list(self.in_flight if flats is None else flats):
            self.finish(flat)

    def unshard(self, chunk: int) -> None:
        """Keep the weights of a chunk, once gathered, until `reshard`."""
        self._kept.update(self._of_chunk[chunk])

    def reshard(self, chunk: int) -> None:
        """Reshard the weights that `unshard` keeps."""
        self._kept.difference_update(self._of_chunk[chunk])
        for flat in self._of_chunk[chunk]:
            self.finish(flat)
            self.release(flat)

    def restart(self) -> None:
        """Release what a failed step left gathered."""
        if self._kept or any(self._users.values()):
            self._kept.clear()
            self._users = dict.fromkeys(self.flat_parameters, 0)
            for flat in self.flat_parameters:
                self.finish(flat)
                self.release(flat)

    def in_use(self, flat: F) -> bool:
        """Return whether a module computes with a flat parameter."""
        return self._users[flat] > 0

    def begin(self, module: str, following: Following, has_begun: bool = False) -> None:
        """Wait for the weights of a module and prefetch the next one's; `has_begun`: its use already has."""
        # the gather of a module must overlap the computation of the previous one, or the device waits for it:
        #
        #    computing   layers.0      layers.1      layers.2          head
        #    gathering   layers.1      layers.2      head              -
        #    gathered    layers.0, 1   layers.1, 2   layers.2, head    head
        for flat in [] if has_begun else self.uses.get(module, ()):
            self._users[flat] += 1
            self.start(flat)
            self.finish(flat)
        for flat in self.uses[following[module]] if self.overlap and module in following else []:
            self.start(flat)

    def end(self, module: str, following: Following) -> None:
        """Reshard the weights of a module, except those that the next one needs."""
        next_uses = self.uses[following[module]] if module in following else []
        for flat in self.uses.get(module, ()):
            self._users[flat] -= 1
            if flat not in next_uses:
                self.release(flat)

    def start(self, flat: F) -> None:
        """Start to gather sharded weights."""
        if flat.sharding.stage == 3 and flat not in self.unsharded and flat not in self.in_flight:
            self.do(Operation.UNSHARD, flat)
            self.in_flight[flat] = None

    def finish(self, flat: F) -> None:
        """Wait for weights in flight."""
        if flat in self.in_flight:
            del self.in_flight[flat]
            self.do(Operation.WAIT_UNSHARD, flat)
            self.unsharded.add(flat)

    def release(self, flat: F) -> None:
        """Reshard weights that no module uses."""
        if flat.sharding.stage == 3 and flat in self.unsharded and not self._users[flat] and flat not in self._kept:
            self.unsharded.discard(flat)
            self.do(Operation.RESHARD, flat)


class ReduceRules(Rules[F]):
    """Decisions when gradients are reduced.

    Flat parameters of a chunk are reduced in reverse forward order, whatever order they complete in, so that every
    replica issues the same collectives in the same order.
    """

    def __init__(self, stage: StageParameters, flats: Sequence[F]) -> None:
        """Prepare for a stage, whose flat parameters are `flats`, with or without tensors."""
        # With `reduce_each`, `reduce` runs after each micro-batch and no full gradients are stored (ZeRO-2 and 3);
        # without `overlap`, each reduction is waited for at once.
        self.flat_parameters = {c: [flats[one.index] for one in reversed(used)] for c, used in stage.reduced.items()}
        """Chunk -> flat parameters in backward order; -1: of several chunks, reduced last."""
        self.reduce_each, self.overlap = stage.reduce_each, stage.overlap
        self._missing: dict[int, list[int]] = {}
        """Chunk being reduced -> number of gradients that each flat parameter still waits for."""
        self._num_sent: dict[int, int] = {}
        self._reducing: list[F] = []
        """Reductions in flight, oldest first."""

    @property
    def state(self) -> Hashable:
        """State between two actions, which determines all later operations."""
        return tuple(self._reducing)

    @state.setter
    def state(self, state: Any) -> None:
        self._reducing = list(state)

    def restart(self) -> None:
        """Forget the previous step."""
        self._missing.clear()
        self._num_sent.clear()

    def expect_counts(self, chunk: int, counts: Sequence[int]) -> None:
        """Set the number of gradients per flat parameter of a chunk before `reduce`, and reduce those that complete."""
        self._missing[chunk] = list(counts)

    def count(self, chunk: int, index: int) -> None:
        """Count one gradient of a flat parameter as added, and start the reductions that it completes."""
        if (missing := self._missing.get(chunk)) is None:
            return
        missing[index] -= 1
        start = stop = self._num_sent.get(chunk, 0)
        while stop < len(missing) and missing[stop] <= 0:
            stop += 1
        if stop > start:
            self._send(chunk, stop)

    def reduce(self, chunk: int) -> None:
        """Reduce the rest of a chunk, including parameters without a gradient: other replicas wait for them."""
        self._send(chunk, len(self.flat_parameters.get(chunk, ())))
        self._missing.pop(chunk, None)
        self._num_sent.pop(chunk, None)

    def finish_all(self) -> None:
        """Reduce what several chunks use, and wait for all reductions."""
        self.reduce(-1)
        self._wait(0)

    def _send(self, chunk: int, stop: int) -> None:
        # replicas may complete the gradients of a chunk in different orders, but collectives of a group must have one
        # order: only a complete prefix is sent. If three complete as 2, 0, 1:
        #
        #    completed    2        0        1
        #    sent         2        -        1, 0
        start = self._num_sent.get(chunk, 0)
        for flat in self.flat_parameters.get(chunk, [])[start:stop]:
            if self.reduce_each:
                self._wait(IN_FLIGHT - 1)
            self.do(Operation.REDUCE, flat)
            self._reducing.append(flat)
            if not self.overlap:
                self._wait(0)
        self._num_sent[chunk] = max(start, stop)

    def _wait(self, leave: int) -> None:
        while len(self._reducing) > leave:
            self.do(Operation.WAIT_REDUCE, self._reducing.pop(0))
