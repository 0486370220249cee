"""Covering arrays: few cases in which every pair of values of two options occurs.

Most faults need one option or two together, hardly any more (Kuhn, Wallace and Gallo 2004), and the number of cases
that hold all pairs grows with the logarithm of the number of options; that of their product grows exponentially.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache, reduce
from itertools import combinations
from operator import or_
from pathlib import Path

from filelock import FileLock

Case = dict[str, str]
Choice = tuple[str, str]
"""An option and one of its values."""
Pair = frozenset[Choice]
Rule = Callable[[Mapping[str, str]], bool]
"""False if the values given so far cannot be together, whatever is still missing."""

TRIES = 10
"""Cases made for a missing pair, of which the best is taken."""


@cache
def _sources() -> str:
    """Return a checksum of all test files: arrays depend on factors and rules."""
    files = sorted(Path(__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def pairs_of(case: Mapping[str, str]) -> set[Pair]:
    """All pairs of values in a case."""
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


def all_pairs(factors: Mapping[str, Sequence[str]]) -> Iterator[Pair]:
    """All pairs of values of two options."""
    for one, other in combinations(factors, 2):
        yield from (frozenset({(one, a), (other, b)}) for a in factors[one] for b in factors[other])


def with_every_value(cases: Sequence[Case]) -> list[Case]:
    """Few of the cases, in which each value occurs that occurs in any."""
    chosen, missing = [], {choice for case in cases for choice in case.items()}
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & case.items())))
        missing -= chosen[-1].items()
    return chosen


class Cover:
    """The greedy way of Cohen et al. 1997 (AETG): a case grows value by value, by those that add most pairs."""

    def __init__(
        self,
        factors: Mapping[str, Sequence[str]],
        rule: Rule,
        cost: Callable[[Mapping[str, str]], float],
        of: str | None = None,
        more: tuple[Rule, Collection[str]] | None = None,
    ) -> None:
        """
        Args:
            factors: option -> its values.
            rule: what cannot be together.
            cost: of a case, in new pairs that would pay for it.
            of: if given, only pairs with a value of this option are asked for.
            more: of the rule, what single pairs do not tell, and the options that it looks at; None: all of it.
        """
        self._factors, self._cost = factors, cost
        self._rule, self._looks_at = more or (rule, factors)
        self._chance = random.Random(0)
        self._bit = {(name, value): 1 << number for number, (name, value) in enumerate(_choices(factors))}
        self.apart = {pair for pair in all_pairs(factors) if not rule(dict(pair))}
        """Pairs that the rule forbids by themselves."""
        self.impossible: set[Pair] = set()
        """Pairs of which there is no case at all: `apart`, and what would need a third value that is apart."""
        self.cases: list[Case] = []
        """Always the same ones."""
        sources = f"{_sources()} {rule.__qualname__} {json.dumps(dict(factors))}"
        path = Path(__file__).parents[1] / ".pytest_cache" / "covers" / f"{rule.__module__}.{of}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):  # several processes collect the tests at the same time
            kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
            if kept.get("sources") != sources:
                self._draw(of)
                pairs = [sorted(pair) for pair in self.impossible]
                kept = {"sources": sources, "cases": self.cases, "impossible": pairs}
                whole = path.with_suffix(".new")
                whole.write_text(json.dumps(kept), "utf-8")
                whole.replace(path)
        self.cases = kept["cases"]
        self.impossible = {frozenset((name, value) for name, value in pair) for pair in kept["impossible"]}

    def _draw(self, of: str | None) -> None:
        factors = self._factors
        self._never = self._partners(self.apart)
        self._ever = {name: reduce(or_, (self._never[name, value] for value in factors[name])) for name in factors}
        missing = dict.fromkeys(  # in order, unlike a set
            pair for pair in all_pairs(factors) if of is None or any(name == of for name, _ in pair)
        )
        self._wanted = self._partners(missing)
        while missing:
            pair = next(iter(missing))
            best = None if pair in self.apart else self._best(dict(pair))
            if best is None:
                self.impossible.add(pair)
            else:
                self.cases.append({name: best[name] for name in factors})
            for each in (pair,) if best is None else pairs_of(best):
                missing.pop(each, None)
                one, other = each
                self._wanted[one] &= ~self._bit[other]
                self._wanted[other] &= ~self._bit[one]

    def _partners(self, pairs: Iterable[Pair]) -> dict[Choice, int]:
        """Each value -> those of other options that it is with in one of the pairs, as bits."""
        partners = dict.fromkeys(self._bit, 0)
        for one, other in pairs:
            partners[one] |= self._bit[other]
            partners[other] |= self._bit[one]
        return partners

    def _best(self, begun: Case) -> Case | None:
        """Of some cases with the values of `begun`, the one with most that is new; None if there is none."""
        made = (self._complete(begun, self._left(begun, self._factors, begun)) for _ in range(TRIES))
        return max((case for case in made if case is not None), key=self._worth, default=None)

    def _worth(self, case: Case) -> float:
        decided = self._bits(case)
        return sum((self._wanted[choice] & decided).bit_count() for choice in case.items()) / 2 - self._cost(case)

    def _bits(self, case: Case) -> int:
        return sum(self._bit[choice] for choice in case.items())

    def _left(self, case: Case, values: Mapping[str, Sequence[str]], new: Case) -> dict[str, list[str]] | None:
        """Of the values of options that a case lacks, those that fit now that it has the `new` ones; None if an option
        has none left."""
        left, decided = {}, self._bits(new)
        looks_at = self._looks_at if any(name in self._looks_at for name in new) else ()
        for name in (name for name in values if name not in case):
            fits = values[name]
            if self._ever[name] & decided:  # hardly any option: most have nothing against the new values
                fits = [value for value in fits if not self._never[name, value] & decided]
            if name in looks_at:
                fits = [value for value in fits if self._rule({**case, name: value})]
            if not fits:
                return None
            left[name] = fits
        return left

    def _complete(self, case: Case, left: Mapping[str, list[str]] | None) -> Case | None:
        """The case with values for the options that are left, of those that fit; None if there is none."""
        if not left:
            return case if left is not None else None
        fewest = min(map(len, left.values()))  # what is nearly decided comes first: dead ends are short
        name = self._chance.choice([name for name, values in left.items() if len(values) == fewest])
        decided = self._bits(case)

        def worth(value: str) -> float:
            return (self._wanted[name, value] & decided).bit_count() - self._cost({**case, name: value})

        for value in sorted(self._chance.sample(left[name], fewest), key=worth, reverse=True):
            more = {**case, name: value}
            whole = self._complete(more, self._left(more, left, {name: value}))
            if whole is not None:
                return whole
        return None


def _choices(factors: Mapping[str, Sequence[str]]) -> Iterator[Choice]:
    for name, values in factors.items():
        yield from ((name, value) for value in values)
