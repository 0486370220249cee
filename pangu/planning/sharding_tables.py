"""Prints how weights are cut and what is sent for them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pangu.config.schema import RunConfig
from pangu.metrics.text import size
from pangu.pipeline.stages import Stages
from pangu.planning.forecast import plan_of
from pangu.planning.program import Program
from pangu.planning.sharding import Part, plan_sharding
from pangu.planning.workload import ModuleWork
from pangu.topology.layout import Layout

Sent = defaultdict[tuple[str, str, str], float]
"""Phase, collective and `calls`, `bytes` (of the whole tensor) or `wire` (sent by each rank) -> how many."""


def print_sharding(console: Console, config: RunConfig, layout: Layout, stages: Stages) -> None:
    """A table of weights for each part, and what the tensor ranks send in a micro-batch, as a dry run counts it.

    Raises:
        DryRunError: if that cannot be counted.
    """
    batch, model = config.batch.micro_size, config.model
    console.print(
        f"\ns = {model.sequence} tokens, b = {batch} sequences per micro-batch, h = {model.hidden}, V = {model.vocab}, "
        f"mp = t = {layout.tensor} tensor ranks, dp = {layout.replicas} replicas; "
        f"activations in {config.precision.compute}{', sequence parallelism' if layout.sequence else ''}.\n"
        "Products are X [tokens, inputs] times A [inputs, outputs] in MindSpore's tuples; weights are stored as "
        "[outputs, inputs]. Local shapes are those of tensor rank 0.",
        highlight=False,
        markup=False,
    )
    for part in plan_sharding(config, layout):
        several = f" ({part.count} layers; one of them)" if part.count > 1 else ""
        console.print(Text(f"\n{part.name}{several}: {part.takes} -> {part.gives}", style="bold"))
        console.print(_weights(part))
    if layout.tensor == layout.expert == 1:
        console.print("\nNothing is sent in a micro-batch: every matrix is whole on its device.")
        return
    workload = Program(config).describe(plan_of(config, layout, stages))
    counts = sum((Counter(chunk) for chunk in workload.chunks), Counter[str]())
    to_experts = " and to experts" * (layout.expert > 1)
    console.print(Text(f"\nsent by the tensor ranks{to_experts} in one micro-batch", style="bold"))
    console.print(_sent(workload.modules, counts, layout))
    console.print(
        "\nSent by each rank: (t-1)/t of the tensor on a ring, twice that for an all-reduce (Thakur et al. 2005); of "
        "an all-to-all over e ranks (e-1)/e. What a step adds: --dry-run.",
        highlight=False,
    )


def _weights(part: Part) -> Table:
    heads = ("weight", "shape", "local shape", "cut", "activations", "operator and its strategy")
    table = Table(*heads, box=None, header_style="italic", pad_edge=False)
    for weight in part.weights:
        gradient = "; gradient: summed once a step" if weight.partial else ""
        shapes = (str(list(weight.shape)), str(list(weight.local_shape)))
        table.add_row(*map(Text, (weight.name, *shapes, weight.cut + gradient, weight.activations, weight.operator)))
    return table


def _sent(modules: Mapping[str, ModuleWork], counts: Mapping[str, int], layout: Layout) -> Table:
    """Each kind of module, then all of the model."""
    numbers = (Column(head, justify="right") for head in ("calls", "tensor", "sent by each rank"))
    table = Table("module", "phase", "collective", *numbers, box=None, header_style="italic", pad_edge=False)
    total = Sent(float)
    for kind, count in counts.items():
        each = sent_by(modules[kind], layout)
        for what, amount in each.items():
            total[what] += count * amount
        for row in _rows(each):
            table.add_row(*map(Text, (f"{kind} (each of {count})" if count > 1 else kind, *row)))
    for row in _rows(total):
        table.add_row(*map(Text, ("whole model", *row)))
    return table


def _rows(sent: Sent) -> Iterator[tuple[str, ...]]:
    for phase, kind in dict.fromkeys((phase, kind) for phase, kind, _ in sent):
        calls, tensor, wire = (sent[phase, kind, what] for what in ("calls", "bytes", "wire"))
        yield phase, kind.replace("_", "-"), f"{calls:g}", size(round(tensor)), size(round(wire))


def sent_by(module: ModuleWork, layout: Layout) -> Sent:
    """What the tensor ranks, and those that share the experts, send for a module."""
    sent, sizes = Sent(float), {"tensor": layout.tensor, "expert": layout.expert}
    backward = (module.backward_input, module.backward_weight)
    for phase, works in (("forward", (module.forward,)), ("backward", backward), ("recompute", (module.recompute,))):
        for one in (one for work in works for one in work.collectives if one.axis in sizes):
            moved, ranks = one.bytes * one.calls, sizes[one.axis]
            sent[phase, one.kind, "calls"] += one.calls
            sent[phase, one.kind, "bytes"] += moved
            sent[phase, one.kind, "wire"] += (2 if one.kind == "all_reduce" else 1) * moved * (ranks - 1) / ranks
    return sent
