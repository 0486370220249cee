"""Tensors that are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from pangu.config.errors import ConfigError, Problem
from pangu.topology.placement import PlacementTable


def frozen_parameters(patterns: Sequence[str], table: PlacementTable) -> set[str]:
    """Module parameters that hold a tensor whose name one of the patterns fits."""
    return {entry.stored_in for entry in table if any(fnmatchcase(entry.name, pattern) for pattern in patterns)}


def count_frozen(patterns: Sequence[str], table: PlacementTable) -> int:
    """Number of frozen weights of a whole model.

    Raises:
        ConfigError: if a pattern fits no tensor, a module parameter would be frozen in part, or nothing is left.
    """
    problems: list[Problem] = []
    names = [entry.name for entry in table]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            rule = "fits no tensor of the model"
            problems.append(Problem("train.frozen", pattern, rule, f"names are like {', '.join(names[:3])}"))
    frozen = {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}
    for parameter in sorted(frozen_parameters(patterns, table)):
        together = [entry.name for entry in table.stored_in(parameter)]
        if free := [name for name in together if name not in frozen]:
            held = [name for name in together if name in frozen]
            rule = f"freezes {', '.join(held)} but not {', '.join(free)}, which are stored in one matrix"
            problems.append(Problem("train.frozen", list(patterns), rule, "freeze all of them or none"))
    if len(frozen) == len(names):
        problems.append(Problem("train.frozen", list(patterns), "leaves nothing to train"))
    if problems:
        raise ConfigError(problems)
    return sum(table[name].numel for name in frozen)
