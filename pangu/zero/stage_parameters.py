"""Parameters of a pipeline stage from sizes alone: their placement, and their grouping into flat parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart, parameters_by_module, place_tensors
from pangu.topology.experts import ExpertRank
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.placement import PlacementTable, TensorRank
from pangu.zero.grouping import Regions, Sharding, Uses, divide, trained_modules
from pangu.zero.rules import Shardable

F = TypeVar("F", bound=Shardable)


def regions_of(uses: Uses) -> Regions:
    """Return the regions of a language model, which consists of the modules of `ModuleHooks`."""
    return Regions(uses, ("embedding", "position_bias"), "position_bias", "embedding", "head")


@dataclass(frozen=True, eq=False)
class FlatNumbers:
    """Flat parameter without tensors."""

    index: int
    """Index among the flat parameters of the rank, in the order of the forward pass but trained ones first."""
    chunk: int
    """Chunk of its parameters; -1: several chunks."""
    names: tuple[str, ...]
    numel: int
    """Number of elements on this rank, without padding."""
    padded: int
    sharding: Sharding
    trained: bool

    @property
    def main_on_host(self) -> bool:
        """True if its main parameters are in host memory."""
        return self.trained and "optimizer" in self.sharding.offload

    def __str__(self) -> str:
        """Return the name in messages."""
        return f"flat parameter {self.index} ({self.names[0]}{', ...' if len(self.names) > 1 else ''})"


@dataclass(frozen=True)
class StageParameters:
    """Parameters of a rank's stage, as the rules and the expansion of a step need them."""

    table: PlacementTable
    regions: Regions
    trained: frozenset[str]
    """Modules whose output has a gradient whatever their input."""
    flats: tuple[FlatNumbers, ...]
    uses: Mapping[int, Mapping[str, Sequence[FlatNumbers]]]
    """Chunk -> module, in the order of the forward pass -> flat parameters."""
    reduced: Mapping[int, Sequence[FlatNumbers]]
    """Chunk -> trained flat parameters in the order of the forward pass, as `ReduceRules` needs them."""
    reduce_each: bool
    overlap: bool
    loss_in_chunks: bool
    """True if the loss is computed in chunks: the head then computes its weight gradient in the forward pass."""

    @classmethod
    def of_run(
        cls, config: RunConfig, layout: Layout, at: Coordinates, chunks: Mapping[int, ModelPart], reduce_each: bool
    ) -> StageParameters:
        """Return the parameters of the rank at `at`, whose stage has these chunks; `reduce_each`: see `Schedule`."""
        table, uses, shardings = place_stage(config, layout, at, chunks)
        regions, numel = regions_of(uses), {name: math.prod(shape) for name, shape in table.shapes.items()}
        made: list[FlatNumbers] = []

        def make(chunk: int, names: list[str]) -> FlatNumbers:
            sharding, count = shardings[table.is_expert(names[0])], sum(numel[name] for name in names)
            flat = FlatNumbers(
                len(made), chunk, tuple(names), count, sharding.padded(count), sharding, table.is_trained(names[0])
            )
            made.append(flat)
            return flat

        bucket = config.parallel.bucket_bytes(layout.zero, layout.replicas)
        flats, uses_of, reduced = group(table, regions, bucket, reduce_each, make)
        trained = frozenset(trained_modules(table, regions))
        overlap, in_chunks = config.parallel.overlap, config.loss_chunk is not None
        return cls(table, regions, trained, tuple(flats), uses_of, reduced, reduce_each, overlap, in_chunks)


def place_stage(
    config: RunConfig, layout: Layout, at: Coordinates, chunks: Mapping[int, ModelPart]
) -> tuple[PlacementTable, Uses, dict[bool, Sharding]]:
    """Return the placement of a stage's parameters, their uses by modules, and shardings by is_expert."""
    share, shardings = None, {False: Sharding.of(layout, at, config.memory.offload)}
    if layout.splits_experts:
        share, shardings[True] = ExpertRank.of(layout, at), Sharding.of(layout, at, config.memory.offload, experts=True)
    tensor_rank = TensorRank(at.tensor, layout.tensor, layout.sequence)
    table = _placed(config.model, tuple(chunks.values()), tensor_rank, tuple(config.train.frozen), share)
    uses = {chunk: parameters_by_module(config.model, table, part) for chunk, part in chunks.items()}
    return table, uses, shardings


_placed = lru_cache(maxsize=100)(place_tensors)  # a search places the same stage for many layouts


def group(
    table: PlacementTable, regions: Regions, bucket: float, reduce_each: bool, make: Callable[[int, list[str]], F]
) -> tuple[list[F], dict[int, dict[str, list[F]]], dict[int, list[F]]]:
    """Return flat parameters and uses as in `divide`, and the trained ones by chunk as `ReduceRules` needs them."""
    reduced: dict[int, list[F]] = {}

    def make_and_sort(chunk: int, names: list[str]) -> F:
        flat = make(chunk, names)
        if table.is_trained(names[0]):
            # a sum in the buffer that the next micro-batch adds to cannot be reduced before the last one
            late = reduce_each and flat.sharding.size == 1
            reduced.setdefault(-1 if late else chunk, []).append(flat)
        return flat

    flats, uses = divide(table, regions.uses, bucket, make_and_sort)
    return flats, uses, reduced
