"""Search on the composed configuration of a command, and the cluster files that it is about."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Set
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pangu.common.errors import ConfigError, Problem, UserError, shown
from pangu.common.files import refuse_expanding
from pangu.config.checks import find_problems
from pangu.config.cluster import ClusterConfig, cluster_in
from pangu.models.groups import check_groups
from pangu.models.parameters import count_frozen
from pangu.planning.program import KEYS, Plan, key_values
from pangu.planning.search import SearchResult, Space, search, space_of

_NOT_SEARCHED = {"parallel.layouts", "parallel.layers"}
"""Layout keys that no layout found by a search sets."""
_NUMBERS = re.compile(r"( = \d+( x \d+)*)+\b")
"""Pattern of the values of numeric keys in a reason, which vary between layouts rejected for the same reason."""


class Outcome(NamedTuple):
    """Result of a search, with the space that was searched."""

    space: Space
    result: SearchResult
    tokens: float | None
    """Training tokens of the whole run."""


def find_layouts(
    values: Mapping[str, Any],
    given: Set[str],
    top: int,
    tokens: float | None = None,
    note_progress: Callable[[], None] = lambda: None,
) -> Outcome:
    """Return the `top` fastest layouts of a configuration on its `cluster`.

    Args:
        values: the composed configuration.
        given: keys whose values the search keeps.
        top: number of layouts to return.
        tokens: training tokens of the whole run, for the estimates of days and energy.
        note_progress: called after each dry run.

    Raises:
        ConfigError: if the configuration is invalid or fixes a key the search cannot keep; UserError if no layout fits.
    """
    config, problems = find_problems(values)
    if problems:
        raise ConfigError(problems)
    count_frozen(config.model, config.train.frozen)
    check_groups(config.model, config.train.frozen, config.parameter_groups)
    rule = "is not supported by the planner"
    fix = "leave it out, or set parallel=data instead of parallel=auto"
    if lost := {key: value for key in _NOT_SEARCHED & given if (value := attrgetter(key)(config))}:
        raise ConfigError([Problem(*one, rule, fix) for one in lost.items()])
    assert config.cluster is not None
    fixed = {field: attrgetter(key)(config) for field, key in KEYS.items() if key in given}
    space = space_of(config, cluster_in(config.cluster), fixed, note_progress)
    result = search(space, top)
    if not result.best:
        kept = "".join(f" and {KEYS[field]}={shown(value)}" for field, value in fixed.items())
        least = ""
        if one := result.smallest:
            least = f"the smallest one needs {one.peak_gib:.3g} GiB ({' '.join(overrides_of(one.plan))}); "
        raise UserError(
            f"no valid layout for {space.cluster.devices} devices with {space.cluster.memory.gib:g} GiB each{kept}: "
            f"{refusals(result.refused) or 'the degrees do not multiply to the number of devices'}; "
            f"{least}use more devices, a larger batch or fewer fixed keys"
        )
    return Outcome(space, result, tokens)


def require_cluster(folder: Path, values: Mapping[str, Any], what: str) -> ClusterConfig:
    """Return the cluster of a configuration; raise UserError if it has none, naming `what` needs it."""
    if values.get("cluster") is None:
        raise UserError(
            f"{what} needs the description of a cluster: set cluster=NAME, where NAME is one of "
            f"{', '.join(cluster_names(folder))}, or measure this machine with "
            f"tools/calibrate.py --output {folder}/mine.yaml and set cluster=mine"
        )
    return cluster_in(values["cluster"])


def load_cluster(path: Path) -> ClusterConfig:
    """Return the cluster described by a file that has no defaults list.

    Raises:
        UserError: if the file cannot be read; ConfigError if it does not describe a cluster.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        refuse_expanding(values)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read as a cluster file: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: is not a cluster file, which is a mapping of keys")
    return cluster_in({str(key): value for key, value in values.items()}, "")


def cluster_names(folder: Path, whole: bool = False) -> list[str]:
    """Return the names that `cluster=NAME` accepts.

    `folder` is configs/cluster/; `whole` skips files that describe another file's cluster in a different size.
    """
    paths = (path for path in sorted(folder.glob("*.yaml")) if path.stem != "none" and path.is_file())
    return [path.stem for path in paths if not whole or b"defaults:" not in path.read_bytes()]


def cluster_of_device(name: str, files: Collection[str]) -> str | None:
    """Return the cluster file that matches a device name such as `NVIDIA H100 80GB HBM3`, or None.

    A MIG slice (NVIDIA's name for a part of a device) counts as a different device.
    """
    words = re.split(r"[\s_-]+", name.lower())
    matching = [file for file in files if "mig" not in words and set(file.split("_")) <= {*words}]
    return max(matching, key=len, default=None)


def overrides_of(plan: Plan, base: Plan | None = None) -> list[str]:
    """Return the command-line overrides that select a layout, or those that differ from a layout `base`."""
    known = {} if base is None else key_values(base)
    return [f"{key}={shown(value)}" for key, value in key_values(plan).items() if value != known.get(key, ...)]


def refusals(refused: Mapping[str, int], most: int = 5) -> str:
    """Return the most frequent reasons why layouts were rejected."""
    kinds = Counter[str]()
    for reason, count in refused.items():
        kinds[_NUMBERS.sub("", reason)] += count
    return "; ".join(f"{count:,} {reason}" for reason, count in kinds.most_common(most))
