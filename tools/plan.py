"""Tells what a configuration asks for before it is started: of a pipeline what each stage holds, does and sends; with
--sharding how every weight is cut over the tensor-parallel ranks and what those ranks send each other; with --dry-run
what a step of the fullest device takes, sends and waits for, carried out without devices.

Needs neither the devices of the run nor its data."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pangu.config.errors import exit_status
from pangu.config.schema import RunConfig
from pangu.dryrun.report import WIDTH, plan_dry_run, print_dry_run
from pangu.metrics.text import size
from pangu.pipeline.advice import advise
from pangu.pipeline.stages import Stages
from pangu.planning.layouts import Chosen, choose_layout
from pangu.planning.report import describe, make_table
from pangu.planning.stages import view_stages
from pangu.planning.states import fullest_states
from pangu.topology.layout import Layout
from pangu.training.command import compose

_EXAMPLE = """example:
  python tools/plan.py +config=pangu_13b
  python tools/plan.py +config=pangu_13b parallel.sequence=true batch.micro_size=8 --sharding
  python tools/plan.py +config=pangu_13b --dry-run --json

The overrides are those of pretrain.py; where parallel.data is left out, one replica is planned for.
"""
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for pretrain.py, e.g. +config=pangu_13b")
    parser.add_argument("--sharding", action="store_true", help="how each weight is cut, and which collective runs")
    parser.add_argument("--dry-run", action="store_true", help="carry out a step of each stage without devices")
    parser.add_argument("--json", action="store_true", help="the dry run as data, and nothing else")
    options = parser.parse_intermixed_args(arguments)
    if options.json and not options.dry_run:
        parser.error("--json goes with --dry-run")
    return options


def load(overrides: Sequence[str]) -> Chosen:
    """Compose and check the configuration as pretrain.py would for a dry run.

    Raises:
        UserError: for everything that is wrong with it.
    """
    return choose_layout(planned(overrides), world=1)


def planned(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration of a dry run. Raises UserError."""
    values = compose(_CONFIGS, overrides)
    return {**values, "dry_run": values["dry_run"] or True}


def print_stages(console: Console, config: RunConfig, layout: Layout, stages: Stages) -> None:
    """What the schedule asks for, and a table of the pipeline's stages."""
    for line in advise(stages.schedule, stages.durations, config.model.layers, config.batch.micro_size):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    table = make_table("stage", "holds", "idle", "micro-batches held", "sends in a micro-batch", "sums once per step")
    for stage, view in enumerate(view_stages(config, layout, stages)):
        sends = "; ".join(f"{size(count)} to stage {peer}" for peer, count in view.sends.items())
        sums = "; ".join(f"{name} {size(count)}" for name, count in view.shared.items())
        numbers = (f"{view.idle:.1%}", f"{view.held:.3g}")
        table.add_row(*map(Text, (str(stage), " | ".join(view.chunks), *numbers, sends, sums)))
    console.print()
    console.print(table)


def plan(options: argparse.Namespace) -> None:
    """Print what the options ask for. Raises UserError."""
    if options.json:
        print(json.dumps(plan_dry_run(planned(options.overrides)), indent=1))
        return
    config, layout, stages = load(options.overrides)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    fullest = fullest_states(config, layout, stages)
    console.print(describe(config, layout, fullest), markup=False, highlight=False, soft_wrap=True)
    if layout.pipeline > 1:
        print_stages(console, config, layout, stages)
    if options.sharding:
        # which builds the model and imports torch for it; the rest of a plan does without
        from pangu.planning.sharding_tables import print_sharding

        print_sharding(console, config, layout)
    if options.dry_run:
        report = plan_dry_run(planned(options.overrides))
        print_dry_run(console, layout, report, config.dry_run == "all")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    # a plan is made of millions of small objects without cycles, and looking for these took most of its time
    gc.disable()
    try:
        return exit_status(lambda: plan(options), "\nerror")
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
