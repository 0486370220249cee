"""Command `python -m pangu.pretrain`: pretrain.py of a checkout, available wherever pangu is installed.

Training, planning, dry runs and benchmark tasks meet only here; each is loaded by the command that needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Set
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pangu.config.help import show_help
from pangu.config.layout_checks import asks_for_layout
from pangu.topology.launch import Launch, choose_settings, load_torch
from pangu.training.interrupts import ending_at_once

if TYPE_CHECKING:
    from pangu.config.schema import RunConfig
    from pangu.report.forecast import Forecast
    from pangu.training.validation import Benchmarks


def find_configs() -> Path:
    """Return the folder with base.yaml: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parent
    return next(folder for folder in (package / "configs", package.parent / "configs") if folder.is_dir())


def planner() -> ModuleType:
    """Return the module that plans, forecasts and dry-runs."""
    # a plain run neither plans nor dry-runs, and does without 6,000 lines
    from pangu import plan_run  # noqa: PLC0415

    return plan_run


def forecast(*run: Any) -> Forecast | None:
    """Return the predicted step time of a run on a known cluster; see `report.forecast.forecast_run`."""
    return planner().forecast_run(*run)


def read_benchmarks(config: RunConfig) -> Benchmarks:
    """Return the benchmarks of a run; see `tasks.ask.read_benchmarks`."""
    # only runs with `evaluate.every` need the benchmarks
    from pangu.tasks import ask  # noqa: PLC0415

    return ask.read_benchmarks(config)


def train(configs: Path, values: Mapping[str, Any], given: Set[str]) -> None:
    """Run a composed configuration: choose its layout if `parallel.auto` is set, then train or make a dry run.

    A plan keeps the keys in `given`, which the command line sets.
    """
    # torch reads these variables while it is imported
    choose_settings()
    group, data, preparation = values.get("train"), values.get("data"), None
    with ending_at_once():
        torch = load_torch(group.get("device") if isinstance(group, Mapping) and not values.get("dry_run") else None)
        # the trainer, and with it torch: help and `--cfg job` answer without
        from pangu.training.elastic import run_elastic  # noqa: PLC0415
        from pangu.training.run import run  # noqa: PLC0415

        if isinstance(data, Mapping) and data.get("kind") in ("stdlib", "instructions"):
            from pangu.prepare import corpora  # noqa: PLC0415

            preparation = corpora

    def attempt(stop_signals: Any) -> int:
        planned_values, launch, planned = values, Launch.from_environment(), asks_for_layout(values)
        if planned or torch.accelerator.is_available():
            planned_values = planner().with_cluster_here(configs / "cluster", values, launch, planned)
        if planned:
            plan_layout = planner().plan_layout
            planned_values, lines, _mesh = plan_layout(configs / "cluster", planned_values, given, launch)
            if launch.rank == 0:
                print(*lines, sep="\n", flush=True)
        status = run(planned_values, forecast, read_benchmarks, preparation, stop_signals)
        if not status and values["dry_run"] and launch.rank == 0:
            planner().show_dry_run(planned_values)
        return status

    if status := run_elastic(values, attempt):
        sys.exit(status)


def pretrain(configs: Path) -> None:
    """Compose the configuration from the command line and run it; end the process with its exit status."""
    with ending_at_once():
        # Hydra, whose import takes longer than all of help
        from pangu.training.command import run_command  # noqa: PLC0415

    run_command(configs, partial(train, configs))


def main() -> None:
    """Print help or run the configuration of the command line; end the process with its exit status."""
    configs = find_configs()
    if not show_help(sys.argv[1:], configs):
        pretrain(configs)


if __name__ == "__main__":
    main()
