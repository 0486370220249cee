"""Numbers of parameters of each kind of module on one rank, from the placement table of the very model."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from pangu.config.model import ModelConfig
from pangu.models.parameters import ModelPart, place_tensors
from pangu.planning.module_work import Piece
from pangu.topology.experts import ExpertRank
from pangu.topology.layout import Coordinates
from pangu.topology.placement import TensorRank


class Numbers(NamedTuple):
    """Parameters of a module on one rank, as in `ModuleWork`."""

    parameters: int
    experts: int
    forward_only: int = 0


@lru_cache(maxsize=1000)
def module_parameters(model: ModelConfig, piece: Piece) -> dict[str, Numbers]:
    """Return the parameters of each kind of module.

    A lookup's backward needs no weights, and the head's backward follows its forward.
    """
    layout, top = piece.layout, range(model.layers - 1, model.layers)
    share = ExpertRank.of(layout, Coordinates(0, 0, 0)) if layout.splits_experts else None

    def of(layers: range, first: bool = False, last: bool = False) -> Numbers:
        table = place_tensors(model, [ModelPart(layers, first, last)], TensorRank(0, piece.tensor), experts=share)
        experts = sum(math.prod(shape) for name, shape in table.shapes.items() if table.is_expert(name))
        return Numbers(sum(map(math.prod, table.shapes.values())) - experts, experts)

    number = (dense_layers(model) if piece.dense else model.expert_layers or (0,))[0]
    layer = of(range(number, number + 1))

    def beside(layers: range, first: bool = False, last: bool = False) -> Numbers:
        chunk, alone = of(layers, first, last), of(layers)
        less = layer if last and model.query_layer is not None else alone  # PanGu's query layer counts as a layer
        parameters, experts = chunk.parameters - less.parameters, chunk.experts - less.experts
        return Numbers(parameters, experts, chunk.parameters - alone.parameters)

    embedding, head = beside(range(1), first=True), beside(top, last=True)
    return {"layer": layer, "embedding": embedding, "head": head, "inner": Numbers(0, 0)}


def dense_layers(model: ModelConfig) -> tuple[int, ...]:
    """Return the layers without experts, in a model whose others have some; PanGu's query layer is like none."""
    alike = (layer for layer in range(model.layers) if layer != model.query_layer)
    return tuple(layer for layer in alike if model.experts is not None and not model.has_experts(layer))


@lru_cache(maxsize=100)
def table_parameters(model: ModelConfig, tensor: int) -> int:
    """Return the parameters of a head matrix shared with the embedding on one of `tensor` ranks."""
    table = place_tensors(model, [ModelPart(range(1), first=True)], TensorRank(0, tensor))
    return math.prod(table.shapes["embedding.word.weight"])
