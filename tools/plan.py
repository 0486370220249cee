"""Tells what a configuration asks for before it is started: of a pipeline what each stage holds, does and sends; with
--sharding how every weight is cut over the tensor-parallel ranks and what those ranks send each other; with --dry-run
what a step of the fullest device takes, sends and waits for, carried out without devices; with --search the fastest
layouts of its model and batch on a cluster.

Needs neither the devices of the run nor its data."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from pangu.config.errors import UserError, writing
from pangu.config.exit_status import exit_status
from pangu.config.schema import RunConfig
from pangu.dryrun.report import WIDTH, plan_dry_run, print_dry_run
from pangu.metrics.text import size
from pangu.pipeline.advice import advise
from pangu.pipeline.stages import Stages
from pangu.planning.auto import find_layouts, given_keys, plan_layout
from pangu.planning.layouts import Chosen, choose_layout
from pangu.planning.report import describe, make_table
from pangu.planning.search import MODEL_ERROR
from pangu.planning.search_report import (
    HEADS,
    Outcome,
    explain,
    lines,
    overrides_of,
    page,
    refusals,
    run_words,
    search_data,
)
from pangu.planning.stages import view_stages
from pangu.planning.states import fullest_states
from pangu.topology.launch import Launch
from pangu.topology.layout import Layout
from pangu.training.command import asks_for_layout, compose

_EXAMPLE = """example:
  python tools/plan.py +config=pangu_13b
  python tools/plan.py +config=pangu_13b parallel.sequence=true batch.micro_size=8 --sharding
  python tools/plan.py +config=pangu_13b --dry-run --json
  python tools/plan.py +config=pangu_200b cluster=ascend910_2048 --search --explain
  python tools/plan.py +config=gpt3_175b cluster=a100 cluster.devices=1024 --search --tokens 300e9 --html layouts.html

The overrides are those of pretrain.py; where parallel.data is left out, one replica is planned for. A search keeps to
the keys of a layout that are given on the command line, e.g. parallel.tensor=8, and tries all values of the others.
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
    parser.add_argument("--modules", action="store_true", help="what each kind of module does, counted, as data")
    parser.add_argument("--search", action="store_true", help="the fastest layouts that fit (needs cluster=NAME)")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="how many of them")
    parser.add_argument("--explain", action="store_true", help="why the neighbours of the fastest are slower")
    parser.add_argument("--tokens", type=float, metavar="N", help="days, energy and money for so many tokens")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--json", action="store_true", help="the dry run or the search as data, and nothing else")
    options = parser.parse_intermixed_args(arguments)
    if options.json and not (options.dry_run or options.search):
        parser.error("--json goes with --dry-run or --search")
    return options


def load(overrides: Sequence[str]) -> Chosen:
    """Compose and check the configuration as pretrain.py would for a dry run.

    Raises:
        UserError: for everything that is wrong with it.
    """
    return choose_layout(laid_out(overrides), world=1)


def planned(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration of a dry run. Raises UserError."""
    values = compose(_CONFIGS, overrides)
    return {**values, "dry_run": values["dry_run"] or True}


def laid_out(overrides: Sequence[str]) -> Mapping[str, Any]:
    """The same, with the planner's choice in the place of `parallel=auto`. Raises UserError."""
    values = planned(overrides)
    return plan_layout(_CONFIGS / "cluster", values, overrides, Launch())[0] if asks_for_layout(values) else values


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


def find(options: argparse.Namespace) -> Outcome:
    """Search. Raises UserError, if there is nothing to search on, or nothing fits."""
    if options.top < 1 or not (options.tokens is None or 0 < options.tokens < 1e20):
        raise UserError(f"--top {options.top} --tokens {options.tokens}: must be above 0; --top 10 --tokens 300e9 work")
    values = planned(options.overrides)
    if values["cluster"] is None:
        names = ", ".join(sorted(path.stem for path in (_CONFIGS / "cluster").glob("*.yaml") if path.stem != "none"))
        raise UserError(f"--search needs a cluster: cluster=NAME works, where NAME is one of {names}")
    return find_layouts(values, given_keys(options.overrides), options.top, options.tokens)


def print_layouts(options: argparse.Namespace) -> None:
    """What --search asks for. Raises UserError."""
    outcome = find(options)
    if options.html is not None:
        with writing(options.html):
            options.html.write_text(page(outcome), encoding="utf-8")
    if options.json:
        print(
            json.dumps(
                {**search_data(outcome), "explain": list(explain(outcome)) if options.explain else None}, indent=2
            )
        )
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    found, cluster = outcome.found, outcome.space.cluster
    table = make_table(*HEADS)
    for line in lines(outcome):
        table.add_row(*map(Text, line))
    console.print(
        f"{found.layouts:,} layouts on {cluster.devices:,} x {cluster.name}; refused: {refusals(found.refused)}"
    )
    console.print(table)
    console.print(f"=: within the model's error of {MODEL_ERROR:.0%}, which cannot tell it from the first")
    if run := run_words(outcome):
        console.print(run, highlight=False)
    console.print(
        f"the first: {' '.join(overrides_of(found.best[0].plan))}", markup=False, highlight=False, soft_wrap=True
    )
    for reason in explain(outcome) if options.explain else ():
        console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)


def plan(options: argparse.Namespace) -> None:
    """Print what the options ask for. Raises UserError."""
    if options.search:
        print_layouts(options)
        return
    if options.modules:
        from pangu.planning.module_work import profile_modules

        modules = profile_modules(planned(options.overrides))
        print(json.dumps({name: asdict(module) for name, module in modules.items()}, indent=1))
        return
    if options.json:
        print(json.dumps(plan_dry_run(laid_out(options.overrides)), indent=1))
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
        report = plan_dry_run(laid_out(options.overrides))
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
