"""Command `python -m pangu.pretrain`: pretrain.py of a checkout, available wherever pangu is installed.

Planning, training and dry runs meet only here; each is loaded by the command that needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pangu.training.interrupts import ending_at_once

if TYPE_CHECKING:
    from pangu.planning.forecast import Forecast


def find_configs() -> Path:
    """Return the folder with base.yaml: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parent
    return next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())


def forecast(*run: Any) -> Forecast | None:
    """Return the predicted step time of a run on a known cluster; see `planning.forecast.forecast_run`."""
    from pangu.planning.forecast import forecast_run

    return forecast_run(*run)


def train(configs: Path, values: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Run a composed configuration: choose its layout if `parallel.auto` is set, then train or make a dry run."""
    from pangu.topology.launch import Launch, choose_memory_settings, load_torch
    from pangu.training.command import asks_for_layout

    choose_memory_settings()
    group = values.get("train")
    with ending_at_once():
        # Import the trainer here: commands that only compose a configuration do without it.
        load_torch(group.get("device") if isinstance(group, Mapping) and not values.get("dry_run") else None)
        import torch

        from pangu.training.run import run

    launch = Launch.from_environment()
    planned = asks_for_layout(values)
    if planned or torch.accelerator.is_available():
        from pangu.planning.auto import given_keys, plan_layout, with_cluster_here

        values = with_cluster_here(configs / "cluster", values, launch, planned)
    if planned:
        plan = plan_layout(configs / "cluster", values, given_keys(overrides), launch)
        values = plan.values
        if launch.rank == 0:
            print(*plan.lines, sep="\n", flush=True)
    if status := run(values, forecast):
        sys.exit(status)
    if values["dry_run"] and launch.rank == 0:
        from pangu.dryrun.report import show_dry_run

        show_dry_run(values)


def pretrain(configs: Path) -> None:
    """Compose the configuration from the command line and run it; end the process with its exit status."""
    with ending_at_once():
        # Import after help has had its turn: this loads Hydra and, to train, torch.
        from pangu.training.command import run_command
    run_command(configs, partial(train, configs))


def main() -> None:
    """Print help or run the configuration of the command line; end the process with its exit status."""
    configs = find_configs()
    with ending_at_once():
        from pangu.config.help import show_help

        if show_help(sys.argv[1:], configs):
            return
    pretrain(configs)


if __name__ == "__main__":
    main()
