"""Sharding of every weight over the tensor-parallel ranks, and the communication of each kind of module.

Shoeybi et al. 2019, section 3, and Korthikanti et al. 2022, section 4.2, with the names s = sequence, b = micro-batch,
h = hidden, t (MindSpore's mp) = tensor-parallel ranks, dp = replicas. Communication is measured in a dry run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from operator import add
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from pangu.config.schema import RunConfig
from pangu.dryrun.traces import TraceRequest
from pangu.metrics.text import size
from pangu.models.parameters import ModelPart, parameters_by_module, place_tensors
from pangu.pipeline.stages import Stages
from pangu.planning.program import Program, plan_of
from pangu.schedule.groups import Group, groups_of
from pangu.schedule.spans import Axis, Span, SpanKey, keys_of, module_kinds
from pangu.topology.experts import ExpertRank
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.placement import Placement, TensorRank

_OPERATORS = {
    "columns": ("{gather}MatMul ((dp,1),(1,mp))", "[{slice}, {inputs}] -> [{full}, {outputs}]"),
    "columns bias": ("Add ((dp,mp),(mp,))", ""),
    "query columns": ("MatMul ((dp,1),(1,mp))", "[{full}, {inputs}] -> [{full}, {outputs}]"),
    "rows": ("MatMul ((dp,mp),(mp,1)){sum}", "[{full}, {inputs}] -> [{slice}, {outputs}]"),
    "rows bias": ("Add (({tokens},1),(1,))", ""),
    "expert columns": ("GroupedMatMul ((dp,1),(1,mp))", "[rows, {inputs}] -> [rows, {outputs}]"),
    "expert columns bias": ("Add ((dp,mp),(mp,))", ""),
    "expert rows": ("GroupedMatMul ((dp,mp),(mp,1)) + sum by token{sum}", "[rows, {inputs}] -> [rows, {outputs}]"),
    "expert rows bias": ("Add ((dp,1),(1,))", ""),
    "whole": ("MatMul ((dp,1),(1,1))", "[{full}, {inputs}] -> [{full}, {outputs}]"),
    "embedding.word.weight": ("Gather ((mp,1),(dp,1)){sum}", "[{full}] -> [{slice}, {inputs}]"),
    "embedding.position.weight": ("Gather ((1,1),(dp,{slices}))", "[{slice}] -> [{slice}, {inputs}]"),
    "query_embedding.weight": ("Gather ((1,1),(dp,1))", "[{full}] -> [{full}, {inputs}]"),
    "position_bias.weight": ("Gather ((1,mp),(1,))", "[{s}] -> [{inputs}, {s}, {s}]"),
    "head": ("{gather}MatMul transpose_b ((dp,1),(mp,1))", "[{slice}, {inputs}] -> [{rows}, {outputs}]"),
    "rmsnorm": ("RMSNorm (({tokens},1),(1,))", ""),
    "layernorm": ("LayerNorm (({tokens},1),(1,),(1,))", ""),
    "rmsnorm of heads": ("RMSNorm ((dp,mp,1),(1,))", ""),
    "layernorm of heads": ("LayerNorm ((dp,mp,1),(1,),(1,))", ""),
}
"""Mapping from the role of a weight to its operator, with MindSpore's strategy for each input (dimension 0: tokens),
and the local activations that enter before any gather and leave after any reduction."""
_CUTS = {"columns": "columns (outputs)", "rows": "rows (inputs)", "position_bias": "columns (heads)"}
"""Name of each cut in the terms of Shoeybi et al., A in Y = XA; matrices are stored transposed, [outputs, inputs]."""
_PASSES = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
_ALL = "whole model"


class Weight(NamedTuple):
    """Logical tensor and its role in a module."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    """Shape on tensor rank 0; if the vocabulary does not divide evenly, the last rank holds less."""
    cut: str
    activations: str
    operator: str


class ShardedPart(NamedTuple):
    """Modules of one kind, and the weights of the first of them."""

    modules: tuple[str, ...]
    takes: str
    gives: str
    weights: tuple[Weight, ...]


def plan_sharding(config: RunConfig, layout: Layout, chunks: Iterable[ModelPart]) -> dict[str, ShardedPart]:
    """Return the kinds of modules of a model (`module_kinds`) in forward order, with the weights that rank 0 holds."""
    model, batch, sequence = config.model, config.batch.micro_size, config.model.sequence // layout.context
    experts = ExpertRank.of(layout, Coordinates(0, 0, 0)) if layout.splits_experts else None
    rank = TensorRank(0, layout.tensor, layout.sequence)
    table = place_tensors(model, [ModelPart.full(model)], rank, config.train.frozen, experts)
    hidden, slices, tokens, gather, total = "[s, b, h]", "1", "dp", "", " + AllReduce" * (layout.tensor > 1)
    if rank.slices_sequence:
        hidden, slices, tokens = "[s/t, b, h]", "mp", "dp*mp"
        gather, total = "AllGather from ((dp*mp,1)), ", " + ReduceScatter to ((dp*mp,1))"
    words: dict[str, Any] = {"tokens": tokens, "slices": slices, "gather": gather, "sum": total}
    words |= {"full": f"{sequence}, {batch}", "slice": f"{sequence // rank.num_slices}, {batch}"}
    words |= {"s": model.sequence, "rows": sequence * batch}
    kinds: dict[str, dict[str, list[str]]] = {}
    for chunk in chunks:
        parameters = parameters_by_module(model, tuple(table.shapes), chunk)
        for module, kind in module_kinds(config, table, chunk).items():
            kinds.setdefault(kind, {})[module] = parameters[module]
    ends = {
        "embedding": ("ids [s, b]", hidden),
        "position_bias": ("distances [s]", "[heads/t, s, s]"),
        "head": (hidden, "logits [s·b, V/t], losses [s·b]"),
    }
    parts = {}
    for kind, modules in kinds.items():
        name, names = next(iter(modules.items()))
        entries = (entry for parameter in names for entry in table.stored_in(parameter))
        weights = tuple(_weight(entry, name, _role(entry, name, model.norm), words, layout.tensor) for entry in entries)
        parts[kind] = ShardedPart(tuple(modules), *ends.get(name, (hidden, hidden)), weights)
    return parts


def _role(entry: Placement, module: str, norm: str) -> str:
    if "norm." in entry.name:
        return f"{norm} of heads" if re.search(r"(query|key)_norm", entry.name) else norm
    if module == "head" or entry.name in _OPERATORS:
        return "head" if module == "head" else entry.name
    if entry.cut_dim is None and not entry.is_vector:
        return "whole"
    kind = "expert " if ".experts." in entry.name else "query " * entry.stored_in.endswith("attention.query.weight")
    return f"{kind}{'columns' if entry.cut_dim == 0 else 'rows'}{' bias' * entry.is_vector}"


def _weight(entry: Placement, module: str, role: str, words: Mapping[str, Any], ranks: int) -> Weight:
    cut = f"{next((cut for name, cut in _CUTS.items() if name in role), 'vocabulary')} over {ranks} ranks"
    outputs, inputs = entry.local_shape[0], entry.local_shape[-1]
    operator, activations = (text.format(**words, inputs=inputs, outputs=outputs) for text in _OPERATORS[role])
    return Weight(
        entry.name.removeprefix(f"{module}.") if module.startswith("layers.") else entry.name,
        entry.shape,
        entry.local_shape,
        ("whole" if entry.local_shape == entry.shape else cut) + "; gradient: summed once a step" * entry.partial,
        activations,
        operator,
    )


def print_sharding(console: Console, config: RunConfig, layout: Layout, stages: Stages) -> None:
    """Print each kind of module's weights and communication per micro-batch; raise DryRunError if unmeasurable."""
    console.print(
        f"\ns = {config.model.sequence // layout.context} tokens, b = {config.batch.micro_size} sequences per "
        f"micro-batch, h = {config.model.hidden}, V = {config.model.vocab}, mp = t = {layout.tensor} tensor ranks, "
        f"dp = {layout.replicas} replicas; activations in {config.precision.compute}"
        f"{', sequence parallelism' * layout.sequence}.\n"
        "Matmuls are X [tokens, inputs] times A [inputs, outputs] in MindSpore's tuples; weights are stored as "
        "[outputs, inputs]. Local shapes are those of tensor rank 0.",
        highlight=False,
        markup=False,
    )
    for kind, part in plan_sharding(config, layout, stages.parts).items():
        several = f" ({len(modules)}, {modules[0]} to {modules[-1]})" if len(modules := part.modules) > 1 else ""
        console.print(Text(f"\n{kind}{several}: {part.takes} -> {part.gives}", style="bold"))
        # expert names differ only in the expert's index
        weights = dict.fromkeys((re.sub(r"(experts\.)\d+", r"\1*", name), *rest) for name, *rest in part.weights)
        console.print(_table(weights, *(name.replace("_", " ") for name in Weight._fields)))
    if layout.tensor * layout.expert * layout.context == 1:
        console.print("\nNo communication within a micro-batch: every device holds complete matrices.")
        return
    console.print(Text("\nCommunication per micro-batch of the ranks that share modules", style="bold"))
    numbers = (Column(head, justify="right") for head in ("calls", "buffers", "sent by each rank"))
    rows = sent_rows(module_spans(config, layout, stages), groups_of(layout, 1))
    console.print(_table(rows, "module", "pass", "ranks", "collective", *numbers))
    console.print(
        "\nThe backward pass includes recomputation. Sent by each rank: (n-1)/n of the buffer over n ranks, twice that "
        "for an all-reduce (Thakur et al. 2005). For a whole step, see --dry-run.",
        highlight=False,
    )


def _table(rows: Iterable[Iterable[Any]], *heads: str | Column) -> Table:
    table = Table(*heads, box=None, header_style="italic", pad_edge=False)
    for row in rows:
        table.add_row(*(Text(str(list(cell) if isinstance(cell, tuple) else cell)) for cell in row))
    return table


def module_spans(config: RunConfig, layout: Layout, stages: Stages) -> Iterator[tuple[SpanKey, Span]]:
    """Yield the spans of all modules for one micro-batch, stage by stage; raise DryRunError if a dry run fails."""
    program, plan, schedule = Program(config), plan_of(config, layout), stages.schedule
    program.prepare([plan])
    actions = TraceRequest(config, (), (schedule.splits_backward,)).actions
    parts = {stage: part for part in program.cut(plan) for stage in part.stages}
    for _, part in sorted(parts.items()):
        trace = program.known(plan, part)
        assert trace is not None
        for action, kinds in product(actions, program.kinds(plan, part)):
            spans = (span for _, span in trace.of_action(action, kinds))
            yield from ((key, span) for key, span in zip(keys_of(action, kinds), spans, strict=True) if span)


def sent_rows(spans: Iterable[tuple[SpanKey, Span]], groups: Mapping[Axis, Group]) -> Iterator[tuple[str, ...]]:
    """Yield table rows with the communication of each module of a kind, then of all modules."""
    sent: dict[tuple[str, ...], tuple[float, ...]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for key, span in spans:
        counts[key.module, key.action] += 1
        for one in span.work.collectives:
            ranks, nbytes = groups[one.axis].size, one.bytes * one.calls
            added = one.calls, nbytes, nbytes * (2 if one.kind == "all_reduce" else 1) * (ranks - 1) / ranks
            for module in (key.module, _ALL):
                place = module, key.action, one.axis, one.kind
                sent[place] = tuple(map(add, sent.get(place, (0.0, 0.0, 0.0)), added))
    for (module, action, axis, kind), numbers in sorted(sent.items(), key=lambda item: item[0][0] == _ALL):
        count = counts[module, action] or 1
        calls, buffers, sent_bytes = (number / count for number in numbers)
        name = f"{module} (each of {count})" if count > 1 else module
        yield name, _PASSES[action], axis, kind.replace("_", "-"), f"{calls:g}", size(buffers), size(sent_bytes)
