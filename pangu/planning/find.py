"""Search for the layouts of a command's composed configuration on its cluster, with their overrides and refusals."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Set
from operator import attrgetter
from typing import Any, NamedTuple

from pangu.common.errors import ConfigError, Problem, UserError, shown
from pangu.config.checks import find_problems
from pangu.config.cluster import cluster_in
from pangu.metrics.text import quantity
from pangu.models.groups import check_groups
from pangu.models.parameters import count_frozen
from pangu.planning.program import KEYS, Plan, key_values
from pangu.planning.search import SearchResult, Space, search, space_of

_NUMBERS = re.compile(r"( = \d+( x \d+)*)+\b")
"""Pattern of the values of numeric keys in a reason, which vary between layouts rejected for the same reason."""


class Outcome(NamedTuple):
    """Result of a search, with the space that was searched."""

    space: Space
    result: SearchResult
    tokens: float | None = None
    """Training tokens of the whole run, for the estimates of days and energy."""


def find_layouts(values: Mapping[str, Any], given: Set[str], top: int) -> Outcome:
    """Return the `top` fastest layouts of a configuration on its `cluster`.

    Args:
        values: the composed configuration.
        given: keys whose values the search keeps.
        top: number of layouts to return.

    Raises:
        ConfigError: if the configuration is invalid or fixes a key the search cannot keep; UserError if no layout fits.
    """
    config, problems = find_problems(values)
    if problems:
        raise ConfigError(problems)
    count_frozen(config.model, config.train.frozen)
    check_groups(config.model, config.train.frozen, config.parameter_groups)
    rule, fix = "is not supported by the planner", "leave it out, or set parallel=data instead of parallel=auto"
    if lost := {
        key: value for key in {"parallel.layouts", "parallel.layers"} & given if (value := attrgetter(key)(config))
    }:
        raise ConfigError([Problem(*one, rule, fix) for one in lost.items()])
    assert config.cluster is not None
    fixed = {field: attrgetter(key)(config) for field, key in KEYS.items() if key in given}
    space = space_of(config, cluster_in(config.cluster), fixed)
    result = search(space, top)
    if not result.best:
        kept = "".join(f" and {KEYS[field]}={shown(value)}" for field, value in fixed.items())
        least = ""
        if one := result.smallest:
            least = f"the smallest one needs {one.peak_gib:.3g} GiB ({' '.join(overrides_of(one.plan))}); "
        raise UserError(
            f"no valid layout for {quantity(space.cluster.devices, 'device')} with "
            f"{space.cluster.memory.gib:g} GiB each{kept}: "
            f"{refusals(result.refused) or 'the degrees do not multiply to the number of devices'}; "
            f"{least}use more devices, a larger batch or fewer fixed keys"
        )
    return Outcome(space, result)


def overrides_of(plan: Plan, base: Plan | None = None) -> list[str]:
    """Return the command-line overrides that select a layout, or those that differ from a layout `base`."""
    known = {} if base is None else key_values(base)
    changed = {key: value for key, value in key_values(plan).items() if value != known.get(key, ...)}
    lists = {key: f"[{','.join(map(str, value))}]" for key, value in changed.items() if isinstance(value, list)}
    return [f"{key}={lists.get(key) or shown(value)}" for key, value in changed.items()]


def refusals(refused: Mapping[str, int], most: int = 5) -> str:
    """Return the most frequent reasons why layouts were rejected."""
    kinds = Counter[str]()
    for reason, count in refused.items():
        kinds[_NUMBERS.sub("", reason)] += count
    return "; ".join(f"{reason} ({count:,})" for reason, count in kinds.most_common(most))
