"""Covering arrays: few cases in which every pair of values of two options occurs.

Most faults need one option or two together, hardly any more (Kuhn, Wallace and Gallo 2004), and the number of cases
that hold all pairs grows with the logarithm of the number of options; that of their product grows exponentially.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

Case = dict[str, str]
Choice = tuple[str, str]
"""An option and one of its values."""
Pair = frozenset[Choice]
Rule = Callable[[Mapping[str, str]], bool]
"""False if the values given so far cannot be together, whatever is still missing."""

TRIES = 3
"""Cases made for a missing pair, of which the best is taken."""


def pairs_of(case: Mapping[str, str]) -> set[Pair]:
    """All pairs of values in a case."""
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def all_pairs(factors: Mapping[str, Sequence[str]]) -> Iterator[Pair]:
    """All pairs of values of two options."""
    for one, other in combinations(factors, 2):
        yield from (frozenset({(one, a), (other, b)}) for a in factors[one] for b in factors[other])


class Cover:
    """The greedy way of Cohen et al. 1997 (AETG): a case grows value by value, by those that add most pairs."""

    def __init__(
        self,
        factors: Mapping[str, Sequence[str]],
        rule: Rule,
        cost: Callable[[Mapping[str, str]], float],
        of: str | None = None,
        of_more: Rule | None = None,
    ) -> None:
        """
        Args:
            factors: option -> its values.
            rule: what cannot be together.
            cost: of a case, in new pairs that would pay for it.
            of: if given, only pairs with a value of this option are asked for.
            of_more: of the rule, what single pairs do not tell; None: all of it.
        """
        self._factors, self._rule, self._cost = factors, of_more or rule, cost
        self._chance = random.Random(0)
        self.apart = {pair for pair in all_pairs(factors) if not rule(dict(pair))}
        """Pairs that the rule forbids by themselves."""
        self._never: dict[Choice, set[Choice]] = {(n, v): set() for n, values in factors.items() for v in values}
        for one, other in map(tuple, self.apart):
            self._never[one].add(other)
            self._never[other].add(one)
        self.impossible: set[Pair] = set()
        """Pairs of which there is no case at all: `apart`, and what would need a third value that is apart."""
        self.cases: list[Case] = []
        """Always the same ones."""
        missing = dict.fromkeys(  # in order, unlike a set
            pair for pair in all_pairs(factors) if of is None or any(name == of for name, _ in pair)
        )
        self._wanted: dict[Choice, set[Choice]] = {(n, v): set() for n, values in factors.items() for v in values}
        for one, other in map(tuple, missing):
            self._wanted[one].add(other)
            self._wanted[other].add(one)
        while missing:
            pair = next(iter(missing))
            tries = [] if pair in self.apart else [self.complete(dict(pair)) for _ in range(TRIES)]
            made = [case for case in tries if case is not None]
            if made:
                best = max(made, key=self._worth)
                self.cases.append({name: best[name] for name in factors})
            else:
                self.impossible.add(pair)
            for found in pairs_of(best) if made else (pair,):
                missing.pop(found, None)
                one, other = found
                self._wanted[one].discard(other)
                self._wanted[other].discard(one)

    def _worth(self, case: Case) -> float:
        decided = set(case.items())
        return sum(len(self._wanted[choice] & decided) for choice in decided) / 2 - self._cost(case)

    def complete(self, case: Case) -> Case | None:
        """The case with values for what is missing; None if there is none."""
        allowed = {}
        for name, values in self._factors.items():
            if name not in case:
                fits = [value for value in values if self._fits(case, name, value)]
                if not fits:
                    return None
                allowed[name] = fits
        if not allowed:
            return case
        fewest = min(map(len, allowed.values()))  # what is nearly decided comes first: dead ends are short
        name = self._chance.choice([name for name, values in allowed.items() if len(values) == fewest])
        decided = set(case.items())

        def worth(value: str) -> float:
            return len(self._wanted[name, value] & decided) - self._cost({**case, name: value})

        for value in sorted(self._chance.sample(allowed[name], fewest), key=worth, reverse=True):
            whole = self.complete({**case, name: value})
            if whole is not None:
                return whole
        return None

    def _fits(self, case: Case, name: str, value: str) -> bool:
        return self._never[name, value].isdisjoint(case.items()) and self._rule({**case, name: value})
