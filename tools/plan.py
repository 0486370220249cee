"""Tells what a configuration asks for before it is started: of a pipeline what each stage holds, does and sends; with
--sharding how every weight is cut over the tensor-parallel ranks and what those ranks send each other.

Needs neither the devices of the run nor its data."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pangu.config.errors import exit_status
from pangu.config.schema import RunConfig
from pangu.metrics.text import size
from pangu.pipeline.advice import advise
from pangu.pipeline.stages import Stages
from pangu.planning.layouts import Chosen, choose_layout
from pangu.planning.report import describe
from pangu.planning.sharding import (
    BACKWARD,
    FORWARD,
    RECOMPUTE,
    Message,
    Part,
    plan_sharding,
    step_messages,
    traffic,
)
from pangu.planning.stages import view_stages
from pangu.planning.states import fullest_states
from pangu.topology.layout import Layout
from pangu.training.command import compose

_EXAMPLE = """example:
  python tools/plan.py +config=pangu_13b
  python tools/plan.py +config=pangu_13b parallel.sequence=true batch.micro_size=8 --sharding

The overrides are those of pretrain.py; where parallel.data is left out, one replica is planned for.
"""
_CONFIGS = Path(__file__).resolve().parent.parent / "configs"
_WIDTH = 200
"""Columns of the tables where the output is not a terminal."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as for pretrain.py, e.g. +config=pangu_13b")
    parser.add_argument("--sharding", action="store_true", help="how each weight is cut, and which collective runs")
    return parser.parse_intermixed_args(arguments)


def load(overrides: Sequence[str]) -> Chosen:
    """Compose and check the configuration as pretrain.py would for a dry run.

    Raises:
        UserError: for everything that is wrong with it.
    """
    # a plan is a dry run: the devices and the data need not be here
    return choose_layout({**compose(_CONFIGS, overrides), "dry_run": True}, world=1)


def print_stages(console: Console, config: RunConfig, layout: Layout, stages: Stages) -> None:
    """What the schedule asks for, and a table of the pipeline's stages."""
    for line in advise(stages.schedule, stages.durations, config.model.layers, config.batch.micro_size):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    table = _table("stage", "holds", "idle", "micro-batches held", "sends in a micro-batch", "sums once per step")
    for stage, view in enumerate(view_stages(config, layout, stages)):
        sends = "; ".join(f"{size(count)} to stage {peer}" for peer, count in view.sends.items())
        sums = "; ".join(f"{name} {size(count)}" for name, count in view.shared.items())
        numbers = (f"{view.idle:.1%}", f"{view.held:.3g}")
        table.add_row(*map(Text, (str(stage), " | ".join(view.chunks), *numbers, sends, sums)))
    console.print()
    console.print(table)


def print_sharding(console: Console, config: RunConfig, layout: Layout) -> None:
    """A table of weights and one of messages for each part, then the sums."""
    parts = plan_sharding(config, layout)
    batch, model = config.batch.micro_size, config.model
    console.print(
        f"\ns = {model.sequence} tokens, b = {batch} sequences per micro-batch, h = {model.hidden}, V = {model.vocab}, "
        f"mp = t = {layout.tensor} tensor ranks, dp = {layout.data} replicas; activations in {config.precision.compute}"
        f"{', sequence parallelism' if layout.sequence else ''}.\n"
        "Products are X [tokens, inputs] times A [inputs, outputs] in MindSpore's tuples; weights are stored as "
        "[outputs, inputs]. Local shapes are those of tensor rank 0.",
        highlight=False,
        markup=False,
    )
    for part in parts:
        _print_part(console, part, layout)
    _print_sums(console, config, parts, layout)


def _print_part(console: Console, part: Part, layout: Layout) -> None:
    several = f" ({part.count} layers; one of them)" if part.count > 1 else ""
    console.print(Text(f"\n{part.name}{several}: {part.takes} -> {part.gives}", style="bold"))
    console.print(_weights(part))
    if part.messages:
        console.print(_messages(part.messages, layout))


def _weights(part: Part) -> Table:
    table = _table("weight", "shape", "local shape", "cut", "activations", "operator and its strategy")
    for weight in part.weights:
        later = "; gradient: see step" if weight.partial else ""
        shapes = (str(list(weight.shape)), str(list(weight.local_shape)))
        table.add_row(*map(Text, (weight.name, *shapes, weight.cut + later, weight.activations, weight.operator)))
    return table


def _messages(messages: Sequence[Message], layout: Layout) -> Table:
    table = _table("where", "phase", "collective", "calls", "tensor", "sent by each rank", "why")
    for message in messages:
        table.add_row(*map(Text, _row(message, layout.tensor)))
    return table


def _row(message: Message, ranks: int) -> tuple[str, ...]:
    numbers = (str(message.calls), size(message.bytes), size(message.wire(ranks)))
    return (message.place, message.phase, message.collective, *numbers, message.why)


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="italic", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in ("calls", "tensor", "sent by each rank") else "left")
    return table


def _print_sums(console: Console, config: RunConfig, parts: Sequence[Part], layout: Layout) -> None:
    """The whole model by phase, and what a step adds."""
    messages = [message for part in parts for message in part.messages * part.count]
    if not messages:
        console.print("\nNothing is sent in a micro-batch: every matrix is whole on its device.")
        return
    stages = f", over its {layout.pipeline} pipeline stages together" if layout.pipeline > 1 else ""
    console.print(Text(f"\nwhole model, one micro-batch{stages}", style="bold"))
    table = _table("phase", "collective", "calls", "tensor", "sent by each rank")
    for phase in (FORWARD, BACKWARD, RECOMPUTE):
        for collective, total in traffic(messages, phase).items():
            sent = sum(m.wire(layout.tensor) for m in messages if (m.phase, m.collective) == (phase, collective))
            table.add_row(phase, collective, str(total.calls), size(total.bytes), size(sent))
    console.print(table)
    console.print(Text("\nwhole model, once per step, over the tensor ranks", style="bold"))
    console.print(_messages(step_messages(config, parts, layout.tensor), layout))
    console.print(
        "\nSent by each rank: (t-1)/t of the tensor on a ring, twice that for an all-reduce.", highlight=False
    )


def plan(options: argparse.Namespace) -> None:
    """Print what the options ask for. Raises UserError."""
    config, layout, stages = load(options.overrides)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    fullest = fullest_states(config, layout, stages)
    console.print(describe(config, layout, fullest), markup=False, highlight=False, soft_wrap=True)
    if layout.pipeline > 1:
        print_stages(console, config, layout, stages)
    if options.sharding:
        print_sharding(console, config, layout)


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
