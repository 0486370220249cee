"""Rules that decide when flat parameters are unsharded and their gradients reduced.

They turn the events of a step into operations and know no tensors. The runtime executes these operations, and
`pipeline.expand` lists them; nothing else decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

from pangu.zero.grouping import IN_FLIGHT, Regions, Sharding, backward_order


class Operation(StrEnum):
    """Operation on a flat parameter."""

    UNSHARD = "UNSHARD"
    """Begin to gather its weights, or to copy them from the host."""
    PUBLISH = "PUBLISH"
    """Begin to send every rank what the others have updated, or to copy it from the host."""
    WAIT_UNSHARD = "WAIT_UNSHARD"
    """Wait for one of these two."""
    RESHARD = "RESHARD"
    """Free the whole weights."""
    REDUCE = "REDUCE"
    """Begin to sum its gradients over the replicas."""
    WAIT_REDUCE = "WAIT_REDUCE"
    """Wait for the oldest of these sums."""


class Shardable(Hashable, Protocol):
    """Interface of a flat parameter that the rules need."""

    @property
    def sharding(self) -> Sharding: ...

    @property
    def main_on_host(self) -> bool: ...


F = TypeVar("F", bound=Shardable)
Following = Mapping[str, str]
"""Module -> the one that is used next."""


class UnshardRules(ABC, Generic[F]):
    """Decides when weights are unsharded; a subclass executes its operations in `do`.

    At stage 3 a flat parameter is gathered while the module before it computes and resharded after its use, so at most
    two (and a tied word embedding) are whole at a time; backward gathers them again. A chunk that a schedule unshards
    stays whole from its first use until `reshard`.
    """

    def __init__(
        self, uses: Mapping[int, Mapping[str, Sequence[F]]], regions: Regions, trained: Collection[str], overlap: bool
    ) -> None:
        """`uses`: chunk -> module, in the order of forward -> its flat parameters. `trained`: modules whose output has
        a gradient whatever their input is. `overlap` false: gather when needed, not before."""
        self.uses = {module: flats for of_chunk in uses.values() for module, flats in of_chunk.items()}
        self.regions, self.trained, self.overlap = regions, trained, overlap
        self.flat_parameters = list(dict.fromkeys(flat for flats in self.uses.values() for flat in flats))
        self._of_chunk = {
            chunk: {flat: None for flats in modules.values() for flat in flats} for chunk, modules in uses.items()
        }
        alone = len(uses) == 1
        self.forward = {a: b for names in uses.values() for a, b in pairwise(names) if alone or a != regions.shared}
        """Module -> the next one in forward; none after one that several chunks follow."""
        orders = [backward_order(list(names), trained, regions) for names in uses.values()]
        self.backward = {a: b for order in orders for a, b in pairwise(order)}
        self.in_flight: dict[F, None] = {}
        """Flat parameters whose gather or copy has begun."""
        self.whole: set[F] = set()
        """Unsharded flat parameters of stage 3."""
        self._users = dict.fromkeys(self.flat_parameters, 0)
        self._kept: set[F] = set()
        """Flat parameters of chunks that a schedule has unsharded."""

    note: Callable[[Operation, F], None] | None = None
    """Callback that receives every operation before it is executed."""

    @property
    def state(self) -> Hashable:
        """State between two actions, on which all later operations depend."""
        users = tuple((flat, count) for flat, count in self._users.items() if count)
        return tuple(self.in_flight), frozenset(self.whole), users, frozenset(self._kept)

    @state.setter
    def state(self, state: Any) -> None:
        in_flight, whole, users, kept = state
        self.in_flight, self.whole, self._kept = dict.fromkeys(in_flight), set(whole), set(kept)
        self._users = dict.fromkeys(self.flat_parameters, 0) | dict(users)

    @abstractmethod
    def do(self, operation: Operation, flat: F) -> None:
        """Execute an operation."""

    def publish(self, flats: Iterable[F]) -> None:
        """Begin to send every rank what the others have updated; gathered weights are out of date."""
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
        """Wait for all that is on its way, or of it for these."""
        for flat in list(self.in_flight if flats is None else flats):
            self.finish(flat)

    def unshard(self, chunk: int) -> None:
        """Keep the weights of a chunk, once gathered, until `reshard`."""
        self._kept.update(self._of_chunk[chunk])

    def reshard(self, chunk: int) -> None:
        """Reshard what `unshard` has kept."""
        self._kept.difference_update(self._of_chunk[chunk])
        for flat in self._of_chunk[chunk]:
            self.finish(flat)
            self.release(flat)

    def in_use(self, flat: F) -> bool:
        """Return whether a module computes with it."""
        return self._users[flat] > 0

    def begin(self, module: str, following: Following, goes_on: bool = False) -> None:
        """Wait for the weights of a module, and begin to gather those of the next one. `goes_on`: its use has begun."""
        # the gather of a module must be behind the computation of the one before it, or the device waits for it:
        #
        #     computing   layers.0      layers.1      layers.2          head
        #     gathering   layers.1      layers.2      head              -
        #     whole       layers.0, 1   layers.1, 2   layers.2, head    head
        for flat in [] if goes_on else self.uses.get(module, ()):
            self._users[flat] += 1
            self.start(flat)
            self.finish(flat)
        for flat in self.uses[following[module]] if self.overlap and module in following else []:
            self.start(flat)

    def end(self, module: str, following: Following) -> None:
        """Reshard what a module used, unless the next one needs it."""
        next_uses = self.uses[following[module]] if module in following else []
        for flat in self.uses.get(module, ()):
            self._users[flat] -= 1
            if flat not in next_uses:
                self.release(flat)

    def start(self, flat: F) -> None:
        """Begin to gather weights that are sharded."""
        if flat.sharding.stage == 3 and flat not in self.whole and flat not in self.in_flight:
            self.do(Operation.UNSHARD, flat)
            self.in_flight[flat] = None

    def finish(self, flat: F) -> None:
        """Wait for weights, if they are on their way."""
        if flat in self.in_flight:
            del self.in_flight[flat]
            self.do(Operation.WAIT_UNSHARD, flat)
            self.whole.add(flat)

    def release(self, flat: F) -> None:
        """Reshard weights that nobody needs."""
        if flat.sharding.stage == 3 and flat in self.whole and not self._users[flat] and flat not in self._kept:
            self.whole.discard(flat)
            self.do(Operation.RESHARD, flat)


class ReduceRules(ABC, Generic[F]):
    """Decides when gradients are reduced; a subclass executes its operations in `do`.

    Flat parameters of a chunk are sent in the reverse of the forward order whatever order they complete in, so that
    every replica issues the same collectives in the same order.
    """

    def __init__(self, chunks: Mapping[int, Sequence[F]], reduce_each: bool, overlap: bool) -> None:
        """`chunks`: chunk -> its flat parameters in the order of forward; -1: those of several chunks, sent at the end
        of the step. `reduce_each`: `reduce` runs after each micro-batch, so that no whole gradients are stored (ZeRO-2
        and 3). `overlap` false: wait for each reduction at once."""
        self.flat_parameters = {chunk: list(reversed(flats)) for chunk, flats in chunks.items()}
        self.reduce_each, self.overlap = reduce_each, overlap
        self._missing: dict[int, list[int]] = {}
        """Chunk being reduced -> number of parameters that each flat parameter still waits for."""
        self._num_sent: dict[int, int] = {}
        self._reducing: list[F] = []
        """Oldest first."""

    note: Callable[[Operation, F], None] | None = None
    """Callback that receives every operation before it is executed."""

    @property
    def state(self) -> Hashable:
        """State between two actions, on which all later operations depend."""
        return tuple(self._reducing)

    @state.setter
    def state(self, state: Any) -> None:
        self._reducing = list(state)

    @abstractmethod
    def do(self, operation: Operation, flat: F) -> None:
        """Execute an operation."""

    def restart(self) -> None:
        """Forget the step before."""
        self._missing.clear()
        self._num_sent.clear()

    def expect_counts(self, chunk: int, counts: Sequence[int]) -> None:
        """So many gradients of each flat parameter of a chunk follow, the last ones before `reduce`: send what becomes
        complete."""
        self._missing[chunk] = list(counts)

    def count(self, chunk: int, index: int) -> None:
        """One of the gradients that a flat parameter waits for has been added: send what that completes."""
        if chunk in self._missing:
            missing = self._missing[chunk]
            missing[index] -= 1
            self._send(chunk, next((place for place, count in enumerate(missing) if count > 0), len(missing)))

    def reduce(self, chunk: int) -> None:
        """Send the rest of a chunk, for which other replicas wait, including flat parameters with parameters that
        backward did not reach."""
        self._send(chunk, len(self.flat_parameters.get(chunk, ())))
        self._missing.pop(chunk, None)
        self._num_sent.pop(chunk, None)

    def finish_all(self) -> None:
        """Send what several chunks use, and wait for all sums."""
        self.reduce(-1)
        self._wait(0)

    def _send(self, chunk: int, stop: int) -> None:
        # replicas may complete the gradients of a chunk in different orders, and collectives of one group must meet in
        # one: only what is complete from the first on is sent. Of three that complete as 2, 0, 1:
        #
        #     completed    2        0        1
        #     sent         2        -        1, 0
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
