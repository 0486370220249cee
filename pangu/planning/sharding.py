"""How every weight is cut over the tensor-parallel ranks, from the placement table of the very model that a run would
build.

Shoeybi et al. 2019, section 3, and Korthikanti et al. 2022, section 4.2, with the names s = sequence, b = micro-batch,
h = hidden, t (MindSpore's mp) = tensor-parallel ranks, dp = replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from pangu.collectives.exchange import ExpertRegion
from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.layers.biases import RelativeBias
from pangu.layers.builder import Builder
from pangu.layers.linear import (
    ColumnParallelLinear,
    LayerNorm,
    PositionEmbedding,
    RMSNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from pangu.models.language_model import LanguageModel, build_model
from pangu.topology.experts import ExpertRank
from pangu.topology.layout import Coordinates, Layout
from pangu.topology.placement import Placement

HEAD = "head"
_KINDS: dict[type[nn.Module], str] = {
    ColumnParallelLinear: "columns",
    RowParallelLinear: "rows",
    VocabParallelEmbedding: "words",
    PositionEmbedding: "positions",
    LayerNorm: "norm",
    RMSNorm: "rms norm",
    RelativeBias: "bias",
}


@dataclass(frozen=True)
class Weight:
    """One logical tensor and what is done with it."""

    name: str
    """Below its part."""
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    """Of tensor rank 0; where the ranks do not divide the vocabulary, the last rank holds less."""
    cut: str
    """In words."""
    operator: str
    """The operator that takes it, with MindSpore's strategy for each of its inputs; tokens are dimension 0."""
    activations: str
    """Shapes on one rank of what goes into its product and what comes out; empty for biases and norms."""
    partial: bool
    """Its gradient is summed over the tensor-parallel ranks once per step."""


@dataclass(frozen=True)
class Part:
    """Layers that are alike, or something else that stands alone."""

    name: str
    """`layers.0-38`, `embedding`, ..."""
    count: int
    """How many there are."""
    weights: tuple[Weight, ...]
    takes: str
    """Shape of the activations that come in, in symbols."""
    gives: str
    """Shape of those that go out."""


def plan_sharding(config: RunConfig, layout: Layout) -> list[Part]:
    """Every part of the model, in the order in which they are built, and the head.

    The model is built as rank 0 would build it, with its share of the experts, but on the meta device and without a
    process group.
    """
    region = TensorRegion(rank=0, size=layout.tensor, sequence=layout.sequence, chunks=config.parallel.overlap_chunks)
    experts = None
    if layout.splits_experts:
        share = ExpertRank.of(layout, Coordinates(0, 0, 0))
        experts = ExpertRegion(share.rank, share.size, share.tensor)
    model, table = build_model(config.model, build=Builder(region=region, experts=experts))
    parts = [
        _part(config, model, region, name, list(entries))
        for name, entries in groupby(table, key=lambda entry: _part_name(entry.name))
        if name != "head"
    ]
    matrix = table["embedding.word.weight" if config.model.tied_head else "head.weight"]
    return [*_folded(parts), _head(config, region, matrix)]


def _part_name(name: str) -> str:
    """`layers.3` of `layers.3.mlp.up.weight`, `embedding` of `embedding.word.weight`."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest[0].isdigit() else first


def _part(
    config: RunConfig, model: LanguageModel, region: TensorRegion, name: str, entries: Sequence[Placement]
) -> Part:
    owners = {entry.name: entry.stored_in.rpartition(".")[0] for entry in entries}
    modules = {owner: model.get_submodule(owner) for owner in owners.values()}
    kinds = {owner: _kind(owner, module) for owner, module in modules.items()}
    # a layer that sends nothing has a region of its own
    regions: dict[str, TensorRegion] = {owner: getattr(module, "region", region) for owner, module in modules.items()}
    takes, gives = (
        ("ids [s, b]" if "embedding" in name else _hidden(region)),
        _hidden(regions[owners[entries[-1].name]]),
    )
    if name == "position_bias":
        takes, gives = "distances [s]", "[heads/t, s, s]"
    return Part(
        name=name,
        count=1,
        weights=tuple(
            _weight(config, entry, kinds[owners[entry.name]], name, regions[owners[entry.name]], region.size)
            for entry in entries
        ),
        takes=takes,
        gives=gives,
    )


def _kind(name: str, module: nn.Module) -> str:
    """What a module does with its weights; a norm of heads is one of its own, and so are matrices of experts."""
    if ".experts." in name:
        return "columns of experts" if name.endswith(".up") else "rows of experts"
    if name.endswith(".router"):
        return "router"
    kind = _KINDS.get(type(module), "whole")
    return f"head {kind}" if getattr(module, "of_heads", False) else kind


def _hidden(region: TensorRegion) -> str:
    return "[s/t, b, h]" if region.slices_sequence else "[s, b, h]"


def _below(name: str, part: str) -> str:
    return name.removeprefix(part).removeprefix(".") or part


def _head(config: RunConfig, region: TensorRegion, table: Placement) -> Part:
    """The head and the loss."""
    name = f"{table.name} (tied)" if config.model.tied_head else table.name
    matrix = replace(_weight(config, table, "head", "", region, region.size), name=name)
    return Part(HEAD, 1, (matrix,), _hidden(region), "logits [s·b, V/t], losses [s·b]")


def _weight(config: RunConfig, entry: Placement, kind: str, part: str, region: TensorRegion, ranks: int) -> Weight:
    return Weight(
        name=_below(entry.name, part),
        shape=entry.shape,
        local_shape=entry.local_shape,
        cut=_cut(entry, kind, ranks),
        operator=_operator(kind, entry.is_vector, region),
        activations="" if entry.is_vector else _activations(config, entry, kind, region),
        partial=entry.partial,
    )


def _activations(config: RunConfig, entry: Placement, kind: str, region: TensorRegion) -> str:
    """`[128, 4, 5120] -> [1024, 4, 640]`: the input as it lies before any gather, the output after any sum."""
    sequence, batch = config.model.sequence, config.batch.micro_size
    whole, outside = [sequence, batch], [sequence // region.num_slices, batch]
    rows, columns = entry.local_shape
    before, after = {
        "columns": ([*outside, columns], [*whole, rows]),
        "rows": ([*whole, columns], [*outside, rows]),
        "columns of experts": (["rows", columns], ["rows", rows]),
        "rows of experts": (["rows", columns], ["rows", rows]),
        "head": ([*outside, columns], [sequence * batch, rows]),
        "bias": ([sequence], [columns, sequence, sequence]),
    }.get(kind, (whole if kind == "words" else outside, [*outside, columns]))
    return f"{before} -> {after}"


def _cut(entry: Placement, kind: str, ranks: int) -> str:
    """Shoeybi's words speak of A in Y = XA; matrices are stored transposed, [outputs, inputs]."""
    if entry.local_shape == entry.shape:
        return "whole"
    words = {"columns": "columns (outputs)", "rows": "rows (inputs)", "bias": "columns (heads)"}
    kind = kind.removesuffix(" of experts")
    return f"{words.get(kind, 'words')} over {ranks} ranks"


def _operator(kind: str, is_vector: bool, region: TensorRegion) -> str:
    """MindSpore's `shard` tuples: how each dimension of each input is cut. Products as X [tokens, in], A [in, out]."""
    sliced = region.slices_sequence
    tokens = "dp*mp" if sliced else "dp"
    summed = f" + ReduceScatter to (({tokens},1))" if sliced else " + AllReduce" if region.size > 1 else ""
    entered = f"AllGather from (({tokens},1)), " if sliced else ""
    return {
        ("columns", False): f"{entered}MatMul ((dp,1),(1,mp))",
        ("columns", True): "Add ((dp,mp),(mp,))",
        ("rows", False): f"MatMul ((dp,mp),(mp,1)){summed}",
        ("rows", True): f"Add (({tokens},1),(1,))",
        ("columns of experts", False): "GroupedMatMul ((dp,1),(1,mp))",
        ("columns of experts", True): "Add ((dp,mp),(mp,))",
        ("rows of experts", False): f"GroupedMatMul ((dp,mp),(mp,1)), of a token's experts{summed}",
        ("rows of experts", True): "Add ((dp,1),(1,))",
        ("router", False): "MatMul ((dp,1),(1,1))",
        ("words", False): f"Gather ((mp,1),(dp,1)){summed}",
        ("head", False): f"{entered}MatMul transpose_b ((dp,1),(mp,1))",
        ("positions", False): f"Gather ((1,1),(dp,{'mp' if sliced else '1'}))",
        ("bias", False): "Gather ((1,mp),(1,))",
        ("rms norm", True): f"RMSNorm (({tokens},1),(1,))",
        ("norm", True): f"LayerNorm (({tokens},1),(1,),(1,))",
        ("head rms norm", True): "RMSNorm ((dp,mp,1),(1,))",
        ("head norm", True): "LayerNorm ((dp,mp,1),(1,),(1,))",
    }.get((kind, is_vector), "")


def _folded(parts: Iterable[Part]) -> Iterator[Part]:
    """Neighbours that differ in their number only become one part."""
    for _, group in groupby(parts, key=lambda part: (part.name.partition(".")[0], part.weights)):
        alike = list(group)
        first, last = alike[0], alike[-1]
        name = first.name if len(alike) == 1 else f"{first.name}-{last.name.rpartition('.')[2]}"
        yield replace(first, name=name, count=len(alike))
