"""How every weight is cut over the tensor-parallel ranks, and what those ranks send each other in a micro-batch.

The weights come from the placement table of the very model that a run would build. What a product sends is one table,
`RULES`; the tests count the real collectives of small models and compare them with it.

Shoeybi et al. 2019, section 3, and Korthikanti et al. 2022, section 4.2, with the names s = sequence, b = micro-batch,
h = hidden, t (MindSpore's mp) = tensor-parallel ranks, dp = replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from torch import nn

from pangu.collectives.regions import TensorRegion
from pangu.config.optimizer import LambConfig
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
from pangu.planning.states import BYTES, sum_bytes
from pangu.topology.layout import Layout
from pangu.topology.placement import Placement

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = "all-reduce", "all-gather", "reduce-scatter"
FORWARD, BACKWARD, RECOMPUTE, STEP = "forward", "backward", "recompute", "step"
HEAD = "head"


@dataclass(frozen=True)
class Rule:
    """One collective that a kind of product needs in every micro-batch."""

    collective: str
    phase: str
    why: str
    chunked: bool = False
    """Whether `parallel.overlap_chunks` cuts it into as many calls, which together move the same bytes."""


def _chunked(*rules: Rule) -> tuple[Rule, ...]:
    return tuple(replace(rule, chunked=True) for rule in rules)


_SUM_OUTPUT = Rule(ALL_REDUCE, FORWARD, "sum of the partial outputs")
_SUM_GRADIENT = Rule(ALL_REDUCE, BACKWARD, "sum of the input's gradient")
_GATHER_INPUT = Rule(ALL_GATHER, FORWARD, "whole sequence of the input")
_SCATTER_OUTPUT = Rule(REDUCE_SCATTER, FORWARD, "sum of the partial outputs, cut along the sequence")
_GATHER_GRADIENT = Rule(ALL_GATHER, BACKWARD, "whole sequence of the output's gradient")
_GATHER_AGAIN = Rule(ALL_GATHER, BACKWARD, "input once more, for the weight's gradient")
_SCATTER_GRADIENT = Rule(REDUCE_SCATTER, BACKWARD, "sum of the input's gradient, cut along the sequence")

RULES: dict[tuple[str, bool], tuple[Rule, ...]] = {
    ("columns", False): _chunked(_SUM_GRADIENT),
    ("columns", True): (*_chunked(_GATHER_INPUT, _SCATTER_GRADIENT), _GATHER_AGAIN),
    ("rows", False): _chunked(_SUM_OUTPUT),
    ("rows", True): _chunked(_SCATTER_OUTPUT, _GATHER_GRADIENT),
    ("words", False): (_SUM_OUTPUT,),
    ("words", True): (_SCATTER_OUTPUT, _GATHER_GRADIENT),
    # the head keeps the gathered states, so nothing is gathered a second time
    ("head", False): (_SUM_GRADIENT,),
    ("head", True): (_GATHER_INPUT, _SCATTER_GRADIENT),
}
"""(kind of product, sequence parallelism) -> its collectives. Each moves s x b x width numbers, the width being the
uncut side of the product: its inputs for `columns` and `head`, its outputs for `rows` and `words`. A product of vectors
that every rank looks up for itself (PanGu-α's query) needs none."""

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
class Message:
    """Collectives of one kind, of one product, in one phase of a micro-batch."""

    place: str
    """Product that needs it, below its part."""
    collective: str
    phase: str
    why: str
    calls: int
    numbers: int
    """Elements of the whole (not cut) tensors of all calls together."""
    width: int
    """Bytes of an element."""

    @property
    def bytes(self) -> int:
        """Bytes of those tensors: 2·s·b·h for a 16-bit hidden state."""
        return self.numbers * self.width

    def wire(self, ranks: int) -> float:
        """Bytes that each rank sends on a ring (Thakur et al. 2005): (t-1)/t of the tensor, twice for an all-reduce."""
        return (2 if self.collective == ALL_REDUCE else 1) * self.bytes * (ranks - 1) / ranks


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
    messages: tuple[Message, ...]
    """Of one of them, for one micro-batch."""
    takes: str
    """Shape of the activations that come in, in symbols."""
    gives: str
    """Shape of those that go out."""


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes of one collective."""

    calls: int = 0
    bytes: int = 0


def traffic(messages: Iterable[Message], *phases: str) -> dict[str, Traffic]:
    """Messages of some phases, added up by collective."""
    total: dict[str, Traffic] = {}
    for message in messages:
        if message.phase in phases:
            sofar = total.get(message.collective, Traffic())
            total[message.collective] = Traffic(sofar.calls + message.calls, sofar.bytes + message.bytes)
    return total


def plan_sharding(config: RunConfig, layout: Layout) -> list[Part]:
    """Every part of the model, in the order in which they are built, and the head.

    The model is built as tensor rank 0 would build it, but on the meta device and without a process group.
    """
    region = TensorRegion(rank=0, size=layout.tensor, sequence=layout.sequence, chunks=config.parallel.overlap_chunks)
    model, table = build_model(config.model, build=Builder(region=region))
    parts = [
        _part(config, model, region, name, list(entries))
        for name, entries in groupby(table, key=lambda entry: _part_name(entry.name))
        if name != "head"
    ]
    matrix = table["embedding.word.weight" if config.model.tied_head else "head.weight"]
    return [*_folded(parts), _head(config, region, matrix)]


def step_messages(config: RunConfig, parts: Sequence[Part], ranks: int) -> list[Message]:
    """What the tensor-parallel ranks send each other once per step, beside the micro-batches.

    Under sequence parallelism a rank saw a part of the tokens only, so its gradients of what it holds whole (norms,
    biases behind a sum, position vectors) are partial sums. Those of PanGu-α's query vectors and of norms of heads
    always are: a rank used them for its own heads. The clip norm is one sum of squares, with which the loss goes;
    LAMB's trust ratios (You et al. 2020) need the squares of whole tensors, two numbers each.
    """
    if ranks == 1:
        return []
    own = [part for part in parts if part.name != HEAD or not config.model.tied_head]
    weights = [weight for part in own for weight in part.weights * part.count]
    partial = sum(math.prod(weight.shape) for weight in weights if weight.partial)
    # of those that LAMB does not scale as well: every sum of squares has a place for each tensor
    squares = 2 * len(weights) if isinstance(config.optimizer, LambConfig) else 0
    wide = sum_bytes(config)
    sent = [
        ("gradients", partial, wide, "sum of the gradients of what every rank holds whole"),
        ("clip norm", 2, 8, "squared norm of the gradient, and the loss, over all ranks of the run"),
        ("LAMB", squares, wide, "squared norms of each weight and of its update"),
    ]
    return [Message(place, ALL_REDUCE, STEP, why, 1, numbers, width) for place, numbers, width, why in sent if numbers]


def _part_name(name: str) -> str:
    """`layers.3` of `layers.3.mlp.up.weight`, `embedding` of `embedding.word.weight`."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if rest[0].isdigit() else first


def _part(
    config: RunConfig, model: LanguageModel, region: TensorRegion, name: str, entries: Sequence[Placement]
) -> Part:
    owners = {entry.name: entry.stored_in.rpartition(".")[0] for entry in entries}
    modules = {owner: model.get_submodule(owner) for owner in owners.values()}
    kinds = {owner: _kind(module) for owner, module in modules.items()}
    # a layer that sends nothing has a region of its own
    regions: dict[str, TensorRegion] = {owner: getattr(module, "region", region) for owner, module in modules.items()}
    messages: list[Message] = []
    for entry in entries:
        owner = owners[entry.name]
        # a fused projection is one product: its first logical tensor speaks for it
        if not entry.is_vector and entry.offset == 0:
            width = entry.shape[0] if kinds[owner] == "rows" else entry.shape[1]
            messages += _product(config, regions[owner], kinds[owner], _below(owner, name), width)
    if name.startswith("layers.") and _is_recomputed(config, int(name.removeprefix("layers."))):
        messages += _recomputed(config, messages)
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
        messages=tuple(messages),
        takes=takes,
        gives=gives,
    )


def _kind(module: nn.Module) -> str:
    """What a module does with its weights; a norm of heads is one of its own."""
    kind = _KINDS.get(type(module), "whole")
    return f"head {kind}" if getattr(module, "of_heads", False) else kind


def _hidden(region: TensorRegion) -> str:
    return "[s/t, b, h]" if region.slices_sequence else "[s, b, h]"


def _is_recomputed(config: RunConfig, layer: int) -> bool:
    limit = config.memory.recomputed_layers
    return limit is None or layer < limit


def _below(name: str, part: str) -> str:
    return name.removeprefix(part).removeprefix(".") or part


def _product(config: RunConfig, region: TensorRegion, kind: str, place: str, width: int) -> list[Message]:
    """What a product with a cut weight sends; nothing for other kinds and on one rank."""
    rules = RULES.get((kind, region.sequence), ()) if region.size > 1 else ()
    sequence = config.model.sequence
    numbers = sequence * config.batch.micro_size * width
    size = BYTES[config.precision.compute]
    chunks = min(region.chunks, sequence // region.num_slices)
    return [
        Message(place, rule.collective, rule.phase, rule.why, chunks if rule.chunked else 1, numbers, size)
        for rule in rules
    ]


def _recomputed(config: RunConfig, messages: Sequence[Message]) -> list[Message]:
    """The forward collectives that a layer repeats before its backward.

    Torch stops a recompute at the last tensor that backward needs. Behind the last product that is the dropout's mask;
    without dropout it is the product's own input, and its output is not summed again. A norm behind the sum needs it.
    """
    forward = [message for message in messages if message.phase == FORWARD]
    if config.model.dropout == 0.0 and config.model.norm_placement == "pre" and forward:
        forward = [message for message in forward if message.place != forward[-1].place]
    return [replace(message, phase=RECOMPUTE) for message in forward]


def _head(config: RunConfig, region: TensorRegion, table: Placement) -> Part:
    """The head and the loss: three numbers per token go over the wire, never the logits."""
    name = f"{table.name} (tied)" if config.model.tied_head else table.name
    matrix = replace(_weight(config, table, "head", "", region, region.size), name=name)
    messages = [*_product(config, region, "head", "logits", table.shape[1]), *_loss(config, region)]
    return Part(HEAD, 1, (matrix,), tuple(messages), _hidden(region), "logits [s·b, V/t], losses [s·b]")


def _loss(config: RunConfig, region: TensorRegion) -> Iterator[Message]:
    if region.size == 1:
        return
    tokens = config.model.sequence * config.batch.micro_size
    chunks = math.ceil(tokens / config.loss.chunk) if config.loss.chunk else 1
    # a chunk is computed again in backward, its messages included
    for phase in (FORWARD, RECOMPUTE) if config.loss.chunk else (FORWARD,):
        for numbers, why in ((1, "largest logit of each token"), (2, "label's logit and sum of exponentials")):
            yield Message("loss", ALL_REDUCE, phase, why, chunks, numbers * tokens, sum_bytes(config))


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
        "head": ([*outside, columns], [sequence * batch, rows]),
        "bias": ([sequence], [columns, sequence, sequence]),
    }.get(kind, (whole if kind == "words" else outside, [*outside, columns]))
    return f"{before} -> {after}"


def _cut(entry: Placement, kind: str, ranks: int) -> str:
    """Shoeybi's words speak of A in Y = XA; matrices are stored transposed, [outputs, inputs]."""
    if entry.cut_dim is None or ranks == 1:
        return "whole"
    words = {"columns": "columns (outputs)", "rows": "rows (inputs)", "bias": "columns (heads)"}
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
    for _, group in groupby(parts, key=lambda part: (part.name.partition(".")[0], part.weights, part.messages)):
        alike = list(group)
        first, last = alike[0], alike[-1]
        name = first.name if len(alike) == 1 else f"{first.name}-{last.name.rpartition('.')[2]}"
        yield replace(first, name=name, count=len(alike))
