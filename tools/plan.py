"""Shows what a configuration needs before it is started, without its devices and data.

By default: the layout, and what each pipeline stage holds, computes and sends. --sharding: how each weight is split
over tensor-parallel ranks, and their collectives. --dry-run: peak memory, communication and host syncs of a step,
which is run without devices. --search: the fastest layouts of the model and batch on a cluster."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.common.commands import as_typed
from pangu.common.errors import writing
from pangu.common.exit_status import exit_status
from pangu.config.cluster import ClusterConfig, cluster_in
from pangu.config.layout_checks import asks_for_layout
from pangu.config.optimizer import PrecisionConfig
from pangu.config.schema import RunConfig
from pangu.dryrun.roles import DryRunError
from pangu.metrics.text import size
from pangu.models.groups import check_groups
from pangu.models.parameters import count_frozen
from pangu.pipeline.layouts import choose_layout
from pangu.pipeline.stages import Stages
from pangu.planning.find import Outcome, find_layouts, overrides_of, refusals
from pangu.report.auto import prepare_choice, require_cluster
from pangu.report.dry_run import WIDTH, dry_run_roles, print_dry_run, require_kernels
from pangu.report.forecast import Forecast
from pangu.report.search_tables import explain, page, rows, run_words, search_data, sentences
from pangu.report.sharding import module_spans, print_sharding
from pangu.report.stages import view_stages
from pangu.schedule.advice import advise
from pangu.topology.launch import Launch
from pangu.topology.layout import Layout
from pangu.training.command import compose, given_keys
from pangu.training.describe import describe
from pangu.zero.states import peak_states

_EXAMPLE = """example:
  python tools/plan.py +config=pangu_13b
  python tools/plan.py +config=pangu_13b parallel.sequence=true batch.micro_size=8 --sharding
  python tools/plan.py +config=pangu_13b --dry-run --json
  python tools/plan.py +config=pangu_200b cluster=ascend910_2048 --search --explain
  python tools/plan.py +config=gpt3_175b cluster=a100 cluster.devices=1024 --search --tokens 300e9 --html layouts.html

The overrides are those of pretrain.py; if parallel.data is left out, the plan is for one replica. A search keeps
the layout keys that are given on the command line, e.g. parallel.tensor=8, and tries all values of the others.
"""
log = logging.getLogger("plan")
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"
TOP = 10
MOST_TOKENS = 1e20


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=as_typed(str(__doc__)),
        epilog=as_typed(_EXAMPLE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help=as_typed("as for pretrain.py, e.g. +config=pangu_13b")
    )
    parser.add_argument("--sharding", action="store_true", help="show how weights are split and which collectives run")
    parser.add_argument("--dry-run", action="store_true", help="run a step of each stage without devices")
    parser.add_argument("--modules", action="store_true", help="show work and memory of each kind of module")
    parser.add_argument("--search", action="store_true", help="find the fastest layouts that fit (needs cluster=NAME)")
    parser.add_argument("--top", type=int, metavar="N", help=f"number of layouts to show ({TOP})")
    parser.add_argument("--explain", action="store_true", help="explain why neighbors of the fastest layout are slower")
    parser.add_argument("--tokens", type=float, metavar="N", help="show days, energy and cost of training on N tokens")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    parser.add_argument("--json", action="store_true", help="print only the dry run, modules or search, as JSON")
    options = parser.parse_intermixed_args(arguments)
    problem = next(_contradictions(options), None)
    if problem:
        parser.error(problem)
    return options


def _contradictions(options: argparse.Namespace) -> Iterator[str]:
    """Options that would be ignored."""
    if options.search and (options.dry_run or options.modules or options.sharding):
        yield "--search covers all layouts: leave out --dry-run, --modules and --sharding, which describe one"
    if options.modules and (options.dry_run or options.sharding):
        yield "--modules prints nothing but JSON: leave out --dry-run and --sharding"
    if options.json and not (options.dry_run or options.search or options.modules):
        yield "--json needs --dry-run, --modules or --search"
    if options.json and options.sharding:
        yield "--json prints no tables: leave out --sharding"
    only = {"--top": options.top, "--explain": options.explain, "--tokens": options.tokens, "--html": options.html}
    alone = [name for name, value in only.items() if value not in (None, False)]
    if alone and not options.search:
        yield f"{', '.join(alone)}: only for --search"
    if options.top is not None and options.top < 1:
        yield f"--top {options.top}: must be at least 1; use e.g. --top {TOP}"
    if options.tokens is not None and not 0 < options.tokens < MOST_TOKENS:
        yield f"--tokens {options.tokens:g}: must be above 0 and below {MOST_TOKENS:g}; use e.g. --tokens 300e9"


def planned(overrides: Sequence[str]) -> dict[str, Any]:
    """The composed configuration of a dry run. Raises UserError."""
    values = compose(_CONFIGS, overrides)
    return {**values, "dry_run": values.get("dry_run", False) is False or values["dry_run"]}


def laid_out(overrides: Sequence[str]) -> Mapping[str, Any]:
    """Return `planned(overrides)` with the planner's choice for `parallel=auto`. Raises UserError."""
    values = planned(overrides)
    if not asks_for_layout(values):
        return values
    _, choose = prepare_choice(_CONFIGS / "cluster", values, given_keys(overrides), Launch())
    return choose()[0]


def warn_of_format(cluster: ClusterConfig, precision: PrecisionConfig) -> None:
    """Warn if the matmuls are in bf16 and the cluster's devices have none."""
    if precision.compute == "bf16" and not cluster.matmul.bf16:
        rule = "has no bf16 (cluster.matmul.bf16 = false): these are its figures in fp16; set precision=fp16"
        log.warning("precision.compute = bf16: %s %s", cluster.name, rule)


def expected(config: RunConfig, layout: Layout, stages: Stages) -> str:
    """Return time and memory of a step, or the reason why there is no forecast."""
    try:
        return Forecast.of(config, layout, stages).lines()
    except DryRunError as error:
        return f"{'expected':<12} no forecast: {error}"


def print_stages(console: Console, config: RunConfig, layout: Layout, stages: Stages) -> None:
    """Print the needs of the schedule, and a table of the pipeline's stages."""
    for line in advise(stages.schedule, stages.durations, config.model.layers, config.batch.micro_size):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    heads = ("stage", "holds", "idle", "micro-batches held", "sends in a micro-batch", "sums once per step")
    table = Table(*heads, box=None, header_style="italic", pad_edge=False)
    for stage, view in enumerate(view_stages(config, layout, stages)):
        sends = "; ".join(f"{size(count)} to stage {peer}" for peer, count in view.sends.items())
        sums = "; ".join(f"{name} {size(count)}" for name, count in view.shared.items())
        numbers = (f"{view.idle:.1%}", f"{view.held:.3g}")
        table.add_row(*map(Text, (str(stage), " | ".join(view.chunks), *numbers, sends, sums)))
    console.print()
    console.print(table)


def find(options: argparse.Namespace) -> Outcome:
    """Search. Raises UserError, if there is nothing to search on, or nothing fits."""
    values = planned(options.overrides)
    require_cluster(_CONFIGS / "cluster", values, "--search")
    outcome = find_layouts(values, given_keys(options.overrides), options.top or TOP)
    return outcome._replace(tokens=options.tokens)


def require_writable(path: Path) -> None:
    """Raise UserError unless a file can be written: the search before it may take minutes."""
    target, existed = path.resolve(), path.exists()
    with writing(path):
        target.open("ab").close()
        if not existed:
            target.unlink()


def print_layouts(options: argparse.Namespace) -> None:
    """Carry out --search. Raises UserError."""
    if options.html is not None:
        require_writable(options.html)
    outcome = find(options)
    warn_of_format(outcome.space.cluster, outcome.space.config.precision)
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
    result, cluster = outcome.result, outcome.space.cluster
    cells = list(rows(outcome))
    table = Table(*cells[0], box=None, header_style="italic", pad_edge=False)
    for row in cells:
        table.add_row(*map(Text, row.values()))
    console.print(
        f"{result.layouts:,} layouts on {cluster.devices:,} x {cluster.name}; refused: {refusals(result.refused)}"
    )
    console.print(table)
    for line in sentences(outcome):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if any(one.measured is None for one in result.best):
        console.print("?: predicted memory; the others show the memory of a dry run")
    if run := run_words(outcome):
        console.print(run, highlight=False)
    console.print(
        f"the first: {' '.join(overrides_of(result.best[0].plan))}", markup=False, highlight=False, soft_wrap=True
    )
    for reason in explain(outcome) if options.explain else ():
        console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)


def as_data(value: Any) -> Any:
    """Return nested dataclasses and named tuples as JSON has them."""
    if is_dataclass(value) or hasattr(value, "_fields"):
        fields = value._asdict() if hasattr(value, "_fields") else vars(value)
        return {name: as_data(one) for name, one in fields.items()}
    return [as_data(one) for one in value] if isinstance(value, tuple) else value


def plan(options: argparse.Namespace) -> None:
    """Print what the options ask for. Raises UserError."""
    if options.search:
        print_layouts(options)
        return
    values = laid_out(options.overrides)
    config, layout, stages = choose_layout(values, world=1)
    count_frozen(config.model, config.train.frozen)
    check_groups(config.model, config.train.frozen, config.parameter_groups)
    if config.cluster is not None:
        warn_of_format(cluster_in(config.cluster), config.precision)
    if options.modules:
        require_kernels(config)
        spans = dict(module_spans(config, layout, stages))
        print(json.dumps([{**as_data(key), **as_data(span)} for key, span in spans.items()], indent=1))
        return
    if options.json:
        print(json.dumps(dry_run_roles(values), indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    peak = None if options.dry_run else peak_states(config, layout, stages.of)
    console.print(describe(config, layout, peak), markup=False, highlight=False, soft_wrap=True)
    if config.cluster is not None:
        console.print(expected(config, layout, stages), markup=False, highlight=False, soft_wrap=True)
    if layout.pipeline > 1:
        print_stages(console, config, layout, stages)
    if options.sharding:
        print_sharding(console, config, layout, stages)
    if options.dry_run:
        print_dry_run(console, layout, dry_run_roles(values), config.dry_run == "all")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # a plan is made of millions of small objects without cycles, and looking for these took most of its time
    gc.disable()
    atexit.register(gc.freeze)  # nor does the end of the process look for them
    try:
        return exit_status(lambda: plan(parse(arguments)))
    finally:
        gc.enable()


if __name__ == "__main__":
    sys.exit(main())
