"""What a model, or a part of it, holds and hands on: every parameter by name and shape, before any exists.

The modules take their parameters from the table that is made here, and so do plans, which need no torch for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pangu.config.model import ModelConfig
from pangu.topology.placement import NewTensor, PlacementTable, TensorRank

Stored = Iterator[tuple[str, list[NewTensor]]]
"""Names of module parameters, and the logical tensors that each holds."""


@dataclass(frozen=True)
class ModelPart:
    """Consecutive layers of a model: what is computed in one go, and what a pipeline stage holds one or more of."""

    layers: range
    """Global numbers of the layers."""
    first: bool = False
    """Begins with the embedding."""
    last: bool = False
    """Holds the final norm, PanGu-α's query table and the head."""

    @classmethod
    def whole(cls, config: ModelConfig) -> ModelPart:
        """The model in one part."""
        return cls(range(config.layers), first=True, last=True)


def place_tensors(config: ModelConfig, parts: Sequence[ModelPart], rank: TensorRank) -> PlacementTable:
    """The tensors of some parts of a model, in the order of its modules, and what of them one tensor-parallel rank
    holds."""
    table = PlacementTable()
    for stored_in, tensors in _tensors(config, parts):
        table.place(stored_in, tensors, rank)
    return table


def logical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and global shape of every logical tensor of a model."""
    return {
        placement.name: placement.shape for placement in place_tensors(config, [ModelPart.whole(config)], TensorRank())
    }


def regions(config: ModelConfig, table: PlacementTable, part: ModelPart) -> dict[str, list[str]]:
    """Regions of a part (see `layers.gate`) in the order in which forward enters them, and the module parameters that
    each uses; `table` may hold other parts too."""
    layers = [f"layers.{number}" for number in part.layers]
    names = ["position_bias", *["embedding"] * part.first, *layers, *["head"] * part.last]
    uses: dict[str, list[str]] = {name: [] for name in names}
    query_layer = f"layers.{config.query_layer}"
    used_in = {"query_embedding": query_layer, "final_norm": query_layer if config.norms_before_query else "head"}
    for parameter in table.shapes:
        first, second, *_ = parameter.split(".")
        region = f"layers.{second}" if first == "layers" else used_in.get(first, first)
        if region in uses:
            uses[region].append(parameter)
    if part.last and "head.weight" not in table.shapes:
        uses["head"].append("embedding.word.weight")
    return {name: parameters for name, parameters in uses.items() if parameters}


def residual_std(config: ModelConfig) -> float:
    """Standard deviation of weights that write into the residual stream (Radford et al. 2019, section 2.3)."""
    return config.init_std / math.sqrt(2 * config.layers)


def _tensors(config: ModelConfig, parts: Sequence[ModelPart]) -> Stored:
    std, width = config.init_std, config.hidden
    begins, ends = (any(getattr(part, end) for part in parts) for end in ("first", "last"))
    # where the head is tied and the embedding is elsewhere, the head holds a copy of it
    shared = "ends" if config.tied_head and begins != ends else None
    if begins:
        yield from _one("embedding.word.weight", (config.vocab, width), std, cut_dim=0, shared=shared)
        if config.positions == "learned":
            yield from _one("embedding.position.weight", (config.sequence, width), std)
    if config.positions == "relative":
        complete = sum(len(part.layers) for part in parts) == config.layers
        shape = (config.num_relative_buckets, config.heads)
        yield from _one("position_bias.weight", shape, std, cut_dim=1, shared=None if complete else "stages")
    for part in parts:
        for number in part.layers:
            yield from _layer(config, f"layers.{number}", number == config.query_layer)
    if ends:
        yield from _norm(config, "final_norm", width)
        if not (config.tied_head and begins):
            name = "embedding.word.weight" if config.tied_head else "head.weight"
            yield "head.weight", [NewTensor(name, (config.vocab, width), std, cut_dim=0, shared=shared)]
        if config.query_layer is not None:
            # every rank looks all positions up, for its own heads
            yield from _one("query_embedding.weight", (config.sequence, width), std, partial=True)


def _layer(config: ModelConfig, path: str, is_query: bool) -> Stored:
    """Of one layer; a query layer's queries are a product of their own."""
    width, query, group, inner = config.hidden, config.query_size, config.kv_size, config.ffn_size
    attention, mlp = f"{path}.attention", f"{path}.mlp"
    projections: dict[str, Mapping[str, int]] = {"qkv": {"query": query, "key": group, "value": group}}
    if is_query:
        projections = {"query": {"query": query}, "key_value": {"key": group, "value": group}}
    yield from _norm(config, f"{path}.attention_norm", width)
    for name, outputs in projections.items():
        yield from _columns(config, attention, name, outputs, config.has_biases("qkv"))
    for name in ("query_norm", "key_norm") if config.qk_norm else ():
        yield from _norm(config, f"{attention}.{name}", config.head_size, of_heads=True)
    yield from _rows(config, f"{attention}.output", query, config.has_biases("output"))
    yield from _norm(config, f"{path}.mlp_norm", width)
    widths = {"gate": inner, "up": inner} if config.activation == "swiglu" else {"up": inner}
    yield from _columns(config, mlp, "up", widths, config.has_biases("mlp"))
    yield from _rows(config, f"{mlp}.down", inner, config.has_biases("mlp"))


def _one(name: str, shape: tuple[int, ...], std: float | None, constant: float = 0.0, **cut: Any) -> Stored:
    """A tensor that is stored alone, under its own name."""
    yield name, [NewTensor(name, shape, std, constant, **cut)]


def _norm(config: ModelConfig, name: str, width: int, of_heads: bool = False) -> Stored:
    """Gain 1 and, in a layer norm, bias 0. Each rank norms its own heads: gradients are parts of the sum."""
    yield from _one(f"{name}.weight", (width,), None, 1.0, partial=of_heads)
    if config.norm == "layernorm":
        yield from _one(f"{name}.bias", (width,), None, partial=of_heads)


def _columns(config: ModelConfig, path: str, name: str, outputs: Mapping[str, int], biases: bool) -> Stored:
    """Of a `ColumnParallelLinear`; `outputs`: widths of its logical projections, which stand one below the other."""
    shapes = {out: (width, config.hidden) for out, width in outputs.items()}
    yield (
        f"{path}.{name}.weight",
        [NewTensor(f"{path}.{out}.weight", shape, config.init_std, cut_dim=0) for out, shape in shapes.items()],
    )
    if biases:
        vectors = [NewTensor(f"{path}.{out}.bias", (width,), None, cut_dim=0) for out, width in outputs.items()]
        yield f"{path}.{name}.bias", vectors


def _rows(config: ModelConfig, name: str, inputs: int, biases: bool) -> Stored:
    """Of a `RowParallelLinear`."""
    yield from _one(f"{name}.weight", (config.hidden, inputs), residual_std(config), cut_dim=1)
    if biases:
        yield from _one(f"{name}.bias", (config.hidden,), None)
