"""Parameters of a pipeline stage from sizes alone: their placement, and their grouping into flat parameters."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count

from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart, parameters_by_module, place_tensors
from pangu.topology.experts import ExpertRank
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.placement import Placement, PlacementTable, TensorRank
from pangu.zero.grouping import Buffer, Regions, Sharding, Uses, buffer_table, divide, trained_modules


@dataclass(eq=False)
class FlatSpec:
    """Specification of a flat parameter: its tensors, size and sharding; `FlatParameter` adds the data."""

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
    fp8: Mapping[str, int] = field(default_factory=dict)
    """Elements of its matrices whose casts to fp8 are kept, by name of the parameter."""

    @cached_property
    def main_on_host(self) -> bool:
        """True if its main parameters are in host memory."""
        return self.trained and "optimizer" in self.sharding.offload

    def buffers(self, narrow: bool) -> dict[str, Buffer]:
        """Return its buffers by name; `narrow`: the compute dtype is below fp32."""
        casts = 2 * sum(self.fp8.values())
        return {row.name: row for row in buffer_table(self.padded, narrow, self.sharding, self.trained, casts)}

    def tensor_ranges(self, table: PlacementTable) -> Iterator[tuple[Placement, slice]]:
        """Yield its logical tensors, each with the range of this rank's slice in the buffer."""
        begin = 0
        for name in self.names:
            for entry in table.stored_in(name):
                yield entry, slice(begin + entry.offset, begin + entry.offset + entry.local_numel)
            begin += math.prod(table.shapes[name])

    def shard_ranges(self, table: PlacementTable) -> Iterator[tuple[Placement, slice, int]]:
        """Yield the tensors of the local shard, each with its range in the shard and its first element there."""
        local = self.sharding.span(self.padded)
        for entry, span in self.tensor_ranges(table):
            low, high = max(span.start, local.start), min(span.stop, local.stop)
            if low < high:
                yield entry, slice(low - local.start, high - local.start), low - span.start

    def __str__(self) -> str:
        """Return the name in messages."""
        return f"flat parameter {self.index} ({self.names[0]}{', ...' if len(self.names) > 1 else ''})"


@dataclass(frozen=True)
class StageParameters:
    """Parameters of a rank's stage, as the rules, the runtime and the expansion of a step need them."""

    table: PlacementTable
    regions: Regions
    trained: frozenset[str]
    """Modules whose output has a gradient whatever their input."""
    flats: tuple[FlatSpec, ...]
    uses: Mapping[int, Mapping[str, Sequence[FlatSpec]]]
    """Chunk -> module, in the order of the forward pass -> flat parameters."""
    reduced: Mapping[int, Sequence[FlatSpec]]
    """Chunk -> trained flat parameters in the order of the forward pass; -1: of several chunks, reduced last."""
    offload: tuple[str, ...]
    """Host-memory states, as in `memory.offload`."""
    reduce_each: bool
    overlap: bool
    loss_in_chunks: bool = False
    """True if the loss is computed in chunks: the head then computes its weight gradient in the forward pass."""
    cuts: tuple[TensorRank, TensorRank] = (TensorRank(), TensorRank())
    """Positions among the ranks that cut tensors, and that cut those of experts that the layout splits."""

    @classmethod
    def of(
        cls,
        table: PlacementTable,
        regions: Regions,
        layout: Layout,
        at: Coordinates,
        bucket_bytes: float,
        offload: Collection[str],
        reduce_each: bool,
        overlap: bool,
        loss_in_chunks: bool = False,
        fp8: bool = False,
    ) -> StageParameters:
        """Group the parameters of the rank at `at` into flat parameters of about `bucket_bytes` of fp32 gradients.

        With `reduce_each`, gradients are reduced after every micro-batch (ZeRO-2 and 3) instead of once per step; with
        `fp8`, casts of the layers' matrices are kept next to them.
        """
        kinds = (False, True) if layout.splits_experts else (False,)
        shardings = {apart: Sharding.of(layout, at, offload, apart) for apart in kinds}
        reduced: dict[int, list[FlatSpec]] = {}
        indices = count()

        def make(chunk: int, names: list[str]) -> FlatSpec:
            sharding, trained = shardings[table.is_expert(names[0])], table.is_trained(names[0])
            numel = sum(math.prod(table.shapes[name]) for name in names)
            casts = {name: math.prod(table.shapes[name]) for name in names if fp8 and table.is_in_fp8(name)}
            padded = sharding.padded(numel)
            flat = FlatSpec(next(indices), chunk, tuple(names), numel, padded, sharding, trained, casts)
            if trained:
                # a sum in the buffer that the next micro-batch adds to cannot be reduced before the last one
                late = reduce_each and sharding.size == 1
                reduced.setdefault(-1 if late else chunk, []).append(flat)
            return flat

        flats, uses = divide(table, regions.uses, bucket_bytes, make)
        trained, on_host = frozenset(trained_modules(table, regions)), shardings[False].offload
        experts = ExpertRank.of(layout, at).tensor if layout.splits_experts else TensorRank()
        cuts = TensorRank(at.tensor, layout.tensor, layout.sequence), experts
        settings = on_host, reduce_each, overlap, loss_in_chunks, cuts
        return cls(table, regions, trained, tuple(flats), uses, reduced, *settings)

    @classmethod
    def of_run(
        cls, config: RunConfig, layout: Layout, at: Coordinates, chunks: Mapping[int, ModelPart], reduce_each: bool
    ) -> StageParameters:
        """Return the parameters of the rank at `at`, whose stage has these chunks; `reduce_each`: see `Schedule`."""
        table, uses = place_stage(config, layout, at, chunks)
        # the modules of `ModuleHooks`
        regions = Regions(uses, ("embedding", "position_bias"), "position_bias", "embedding", "head")
        bucket_bytes = config.parallel.bucket_bytes(layout.zero, layout.replicas)
        grouping = bucket_bytes, config.memory.offload, reduce_each, config.parallel.overlap
        loss_in_chunks, fp8 = config.loss_chunk is not None, config.precision.matmul == "fp8"
        return cls.of(table, regions, layout, at, *grouping, loss_in_chunks=loss_in_chunks, fp8=fp8)


def place_stage(
    config: RunConfig, layout: Layout, at: Coordinates, chunks: Mapping[int, ModelPart]
) -> tuple[PlacementTable, Uses]:
    """Return the placement of a stage's parameters, and their uses by modules."""
    share = ExpertRank.of(layout, at) if layout.splits_experts else None
    tensor_rank = TensorRank(at.tensor, layout.tensor, layout.sequence)
    table = place_tensors(config.model, [*chunks.values()], tensor_rank, config.train.frozen, share)
    names = tuple(table.shapes)
    return table, {chunk: parameters_by_module(config.model, names, part) for chunk, part in chunks.items()}
