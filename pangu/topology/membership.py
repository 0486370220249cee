"""Membership of an elastic run: which processes are ranks, and which are spares (`topology.supervisor`)."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence


class Membership:
    """Ranks and spares of an elastic run, by the numbers of their processes; a data structure that sends nothing."""

    def __init__(self) -> None:
        """Begin without processes."""
        self.ranks: list[int] = []
        self.spares: list[int] = []
        self._nodes: dict[int, int] = {}
        self._local_ranks: dict[int, int] = {}
        self._losses: dict[int, int] = {}
        """Number of ranks that each node has lost."""
        self._world = 0
        self._avoided: set[tuple[int, int]] = set()
        """Nodes and local ranks of processes that were exchanged: their devices are slow or wrong."""
        self._places = sys.maxsize
        """Number of devices of a node."""

    def add(self, node: int, numbers: Sequence[int], count: int = 0) -> None:
        """Add processes of a node, the first `count` of them as ranks."""
        self._nodes |= dict.fromkeys(numbers, node)
        self._local_ranks |= {number: local for local, number in enumerate(numbers[:count])}
        self.ranks += numbers[:count]
        self.spares += numbers[count:]
        self._world += count

    def processes_of(self, node: int) -> list[int]:
        """Return the processes of a node that run."""
        return [number for number in (*self.ranks, *self.spares) if self._nodes[number] == node]

    def make_spare(self, number: int) -> None:
        """Make a rank a spare, because no layout has a place for it."""
        if number in self.ranks:
            self.ranks.remove(number)
            self.spares.append(number)

    @property
    def can_grow(self) -> bool:
        """True if ranks are missing, and spares are there."""
        return len(self.ranks) < self._world and bool(self.spares)

    def grow(self) -> None:
        """Add spares as ranks until no rank of the beginning is missing."""
        while self.can_grow:
            self.ranks.append(self.spares.pop(0))

    def replace(self, lost: Sequence[int]) -> dict[int, int]:
        """Remove processes, replace ranks by spares, and return which one replaces which lost one.

        A spare of the same node is preferred. If too few are left, nodes that have lost none come first, so that
        tensor-parallel groups stay within nodes.
        """
        self.spares = [number for number in self.spares if number not in lost]
        replaced: dict[int, int] = {}
        for rank, number in enumerate(self.ranks):
            if number not in lost:
                continue
            node = self._nodes[number]
            self._losses[node] = self._losses.get(node, 0) + 1
            near = [spare for spare in self.spares if self._nodes[spare] == node]
            if self.spares:
                replaced[number] = self.ranks[rank] = spare = (near or self.spares)[0]
                self.spares.remove(spare)
        kept = [number for number in self.ranks if number not in lost]
        if len(kept) < len(self.ranks):
            kept.sort(key=lambda number: self._losses.get(self._nodes[number], 0))
        self.ranks = kept
        return replaced

    def exchange(self, numbers: Sequence[int], places: int, now: bool) -> bool:
        """Replace ranks with slow or wrong devices if `now`; without a spare for each, return False and change nothing.

        A spare needs a device that no other rank of its node has, and that was not exchanged: `places` are on each.
        """
        avoided = self._avoided | {(self._nodes[number], self._local_ranks[number]) for number in numbers}
        taken = avoided | {(self._nodes[number], self._local_ranks[number]) for number in self.ranks}
        devices, usable = Counter(node for node, _ in taken), list[int]()
        for spare in self.spares:
            devices[self._nodes[spare]] += 1
            if devices[self._nodes[spare]] <= places:
                usable.append(spare)
        if len(usable) < len(numbers) or not now:
            return len(usable) >= len(numbers)
        rest = [spare for spare in self.spares if spare not in usable]
        self._avoided, self._places, self.spares = avoided, places, usable
        self.replace(numbers)
        self.spares += rest
        return True

    def record(self) -> list[tuple[int, int]]:
        """Return number and local rank of each rank; a new one takes the first local rank that is free on its node."""
        for number in self.ranks:
            node = self._nodes[number]
            taken = {self._local_ranks.get(one) for one in self.ranks if self._nodes[one] == node and one != number}
            if self._local_ranks.get(number, -1) in {-1, *taken}:
                free = set(range(len(self.ranks) + len(self._avoided))) - taken
                # better a slow device than none
                self._local_ranks[number] = min(
                    free, key=lambda local: (local >= self._places, (node, local) in self._avoided, local)
                )
        return [(number, self._local_ranks[number]) for number in self.ranks]
