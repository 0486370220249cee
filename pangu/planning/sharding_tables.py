"""Prints how weights are cut and what is sent for them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pangu.config.schema import RunConfig
from pangu.metrics.text import size
from pangu.planning.report import make_table
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
from pangu.topology.layout import Layout


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
    table = make_table("weight", "shape", "local shape", "cut", "activations", "operator and its strategy")
    for weight in part.weights:
        later = "; gradient: see step" if weight.partial else ""
        shapes = (str(list(weight.shape)), str(list(weight.local_shape)))
        table.add_row(*map(Text, (weight.name, *shapes, weight.cut + later, weight.activations, weight.operator)))
    return table


def _messages(messages: Sequence[Message], layout: Layout) -> Table:
    table = make_table("where", "phase", "collective", "calls", "tensor", "sent by each rank", "why")
    for message in messages:
        table.add_row(*map(Text, _row(message, layout.tensor)))
    return table


def _row(message: Message, ranks: int) -> tuple[str, ...]:
    numbers = (str(message.calls), size(message.bytes), size(message.wire(ranks)))
    return (message.place, message.phase, message.collective, *numbers, message.why)


def _print_sums(console: Console, config: RunConfig, parts: Sequence[Part], layout: Layout) -> None:
    """The whole model by phase, and what a step adds."""
    messages = [message for part in parts for message in part.messages * part.count]
    if not messages:
        console.print("\nNothing is sent in a micro-batch: every matrix is whole on its device.")
        return
    stages = f", over its {layout.pipeline} pipeline stages together" if layout.pipeline > 1 else ""
    console.print(Text(f"\nwhole model, one micro-batch{stages}", style="bold"))
    table = make_table("phase", "collective", "calls", "tensor", "sent by each rank")
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
