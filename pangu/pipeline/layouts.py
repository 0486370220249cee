"""Choice of the layout of a run, from the configuration and the number of processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from pangu.common.errors import ConfigError, Problem
from pangu.config.build import UnusableError, read
from pangu.config.checks import find_problems
from pangu.config.layout_checks import asks_for_layout, data_size, layout_problems
from pangu.config.schema import ParallelConfig, RunConfig
from pangu.config.stages import in_stage
from pangu.pipeline.stages import Stages, plan_stages
from pangu.topology.layout import Layout


class Chosen(NamedTuple):
    """Configuration with its layout and stages on a number of processes."""

    config: RunConfig
    """Configuration with the chosen layout in place of `parallel.layouts`."""
    layout: Layout
    stages: Stages


def choose_layout(values: Mapping[str, Any], world: int, uneven: bool = False) -> Chosen:
    """Build and check a configuration, and choose the layout for `world` processes.

    Args:
        values: Composed configuration as plain dictionaries.
        world: Number of processes.
        uneven: Allow a batch that gives some replicas more micro-batches than others, unless the planner chooses.

    Raises:
        ConfigError: With all problems of the configuration, or with those of each of `parallel.layouts`.
    """
    config, problems = find_problems(values)
    try:
        candidates = _candidates(config, values.get("parallel"), problems)
    except UnusableError:
        candidates = {}
    refused: list[Problem] = []
    for prefix, candidate in candidates.items():
        wrong_here = layout_problems(candidate, world, uneven and not asks_for_layout(values))
        chosen = None if wrong_here else _plan(candidate, world, wrong_here)
        if chosen is not None:
            if problems:
                raise ConfigError(problems)
            return chosen
        refused += [replace(one, key=prefix + one.key) for one in wrong_here]
    raise ConfigError(problems + refused)


def _candidates(config: RunConfig, values: Any, problems: list[Problem]) -> dict[str, RunConfig]:
    """Return the configuration per entry of `parallel.layouts`, by key prefix; append invalid values to `problems`."""
    layouts = config.parallel.layouts
    if not layouts:
        return {"": config}
    candidates = {}
    for number, keys in enumerate(layouts):
        path = f"parallel.layouts[{number}]"
        parallel, wrong = read(ParallelConfig, {**values, **keys, "layouts": ()}, path)
        problems += [one for one in wrong if any(one.key.startswith(f"{path}.{key}") for key in keys)]
        if "layouts" in keys:
            problems.append(Problem(f"{path}.layouts", keys["layouts"], "entries must not contain `layouts`"))
        candidates[f"{path}: "] = replace(config, parallel=parallel)
    return candidates


def _plan(config: RunConfig, world: int, problems: list[Problem]) -> Chosen | None:
    prefix = ""
    try:
        layout = Layout.of(config.parallel, data_size(config, world))
        chosen = Chosen(config, layout, plan_stages(config, layout))
        for number in range(len(config.batch.stages)):
            prefix = f"batch.stages[{number}]: "
            plan_stages(in_stage(config, number), layout)
        return chosen
    except ConfigError as error:
        problems += [replace(one, key=prefix + one.key) for one in error.problems]
    except UnusableError:
        pass
    return None
