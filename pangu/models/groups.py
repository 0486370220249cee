"""Groups of tensors with a learning rate and a weight decay of their own, chosen by name."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pangu.common.errors import ConfigError, Problem
from pangu.config.model import ModelConfig
from pangu.config.optimizer import ParameterGroup
from pangu.models.parameters import place_model


def group_options(groups: Sequence[ParameterGroup], names: Collection[str]) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the options of each group with the names of its tensors; those that fit none come last.

    A tensor belongs to the first group with a pattern that fits its name. The result depends on names alone, so that
    every rank groups what it holds alike.
    """
    members: list[list[str]] = [[] for _ in [*groups, None]]
    for name in names:
        fitting = (number for number, group in enumerate(groups) if any(fnmatchcase(name, one) for one in group.names))
        members[next(fitting, len(groups))].append(name)
    factors = [(group.lr_multiplier, group.weight_decay_multiplier) for group in groups]
    return [
        ({"lr_multiplier": rate, "decay_multiplier": decay}, chosen)
        for (rate, decay), chosen in zip([*factors, (1.0, 1.0)], members, strict=True)
    ]


def check_groups(model: ModelConfig, frozen: tuple[str, ...], groups: Sequence[ParameterGroup]) -> None:
    """Raise `ConfigError` for a group without patterns, and for a pattern that gets no trained tensor."""
    names = [placement.name for placement in place_model(model, frozen) if placement.trained]
    problems: list[Problem] = []
    for number, (group, (_, members)) in enumerate(zip(groups, group_options(groups, names), strict=False)):
        key = f"parameter_groups[{number}].names"
        if not group.names:
            problems.append(Problem(key, [], "needs a pattern, or the group has no effect", "remove the group"))
        for pattern in group.names:
            if not any(fnmatchcase(name, pattern) for name in names):
                near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or names[:3]
                rule = "matches no trained tensor in the model"
                problems.append(Problem(key, pattern, rule, f"similar names: {', '.join(near)}"))
            elif not any(fnmatchcase(name, pattern) for name in members):
                rule = "matches only tensors of earlier groups, and the first match applies"
                problems.append(Problem(key, pattern, rule, "put this group first, or remove the pattern"))
    if problems:
        raise ConfigError(problems)
