"""Tensor layouts of other programs' files, as data: names, orientation, fusion, cuts; and their readers.

A *logical* tensor is pangu's (`layers.3.attention.query.weight`, [outputs, inputs]). A *stored* one is theirs: one or
several stacked logical tensors, perhaps transposed. A format is a table of stored tensors for a model, a `WeightSource`
and a function that writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pangu.common.errors import Problem, shown
from pangu.config.data import TokenizerConfig
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.interop.formats.fields import load_table
from pangu.models.parameters import logical_shapes

if TYPE_CHECKING:
    from pangu.layers.expert_balance import ExpertBalance

PANGU_VOCAB = {40064: 40000}
"""Vocabulary size by number of rows of PanGu-α's padded token embedding."""
PANGU_PADDING = 64
"""Largest number of padding rows in PanGu-α's files."""
ABSENT = object()
"""Value of a key of `WeightSource.model_keys` that the files do not store and the user has to give."""


@dataclass(frozen=True)
class Stored:
    """Tensor in a file of another program, made of one or more logical tensors."""

    name: str
    parts: tuple[str, ...]
    """Logical tensors in it, stacked along dimension 0."""
    shape: tuple[int, ...]
    """Shape of the full stored tensor, with padding."""
    transposed: bool = False
    """True if stored as [inputs, outputs]."""
    groups: int = 1
    """Number of blocks that each part is cut into; block 0 of all parts comes first, then block 1 of all."""
    cut: int | None = None
    """Dimension that the files of tensor-parallel ranks shard; None: replicated."""
    rows: range | None = None
    """Numbers of rows that a file may have, because padding varies; None: those of `shape`."""
    skipped: int = 0
    """Number of first rows that are not ours; written as 0."""
    stack: int = 0
    """Number of experts with a matrix or vector each in the tensor, whose first dimension counts them; 0: no stack."""
    paired: tuple[tuple[int, int, int] | None, ...] = ()
    """Head size, first element of a head that rotates, and how many do, for each part whose neighbors are pairs in the
    file; ours are half of them apart. None: as ours, or no rotation."""
    plus: float = 0.0
    """Difference of our values and those of the file."""
    unit_rows: bool = False
    """True if the model divides each row by its norm; ours are divided once."""
    implied: float | None = None
    """Value of all elements of a tensor that files lack; None: they have it."""
    copy: bool = False
    """True if the tensor repeats another one of the files, so that imports do not need it."""


@dataclass(frozen=True)
class Training:
    """Run that trained the weights, as its folder describes it."""

    config: Mapping[str, Any]
    """Keys and values of config.yaml."""
    records: Sequence[Mapping[str, Any]]
    """Lines of metrics.jsonl up to the checkpoint."""


class WeightSource(ABC):
    """Opened files of one format."""

    model_keys: dict[str, Any]
    """Keys of `ModelConfig` that the files store, or `ABSENT`; a function computes a value from the number of heads."""
    packing: Mapping[str, Any] = MappingProxyType({})
    """Keys of `PackingConfig` that the files store."""
    generation: Mapping[str, Any] = MappingProxyType({})
    """Token ids and sampling defaults by file of transformers, and `card.BASE_MODEL`; exports keep them."""
    tokenizer: TokenizerConfig | None = None
    chat_template: str | None = None
    """Chat template of fine-tuning, see `ChatTemplate.portable`."""
    training: Training | None = None
    balance: ExpertBalance | None = None
    """Load balance of the routers, where the files have it."""
    tensors: Mapping[str, Tensor]
    """Meta tensors of the files, complete; without buffers and optimizer state."""
    problems: Sequence[str] = ()
    """Problems of the pieces of tensors."""

    @abstractmethod
    def table(self, model: ModelConfig) -> list[Stored]:
        """Return the tensors of a model in this format."""

    def inspect(self, table: Sequence[Stored], problems: list[str]) -> Mapping[str, Tensor]:
        """Return the tensors of files that hold those of `table`; append the problems of their pieces to `problems`."""
        problems += self.problems
        return self.tensors

    @abstractmethod
    def read(self, stored: Stored) -> Tensor:
        """Return one full tensor."""


@dataclass(frozen=True)
class Job:
    """Model to be written."""

    config: RunConfig
    """Model, and the ids of its data (`IndexedData`)."""
    tokenizer: TokenizerConfig | None
    """Tokenizer whose files exist."""
    output: Path
    """Final path of the files."""
    tensor: int
    """Tensor-parallel size of the files."""
    table: Sequence[Stored]
    described: Sequence[Tensor]
    """Meta tensors in the order of `table`."""
    contents: Iterator[Tensor]
    """Values of the tensors, one at a time."""
    source: WeightSource
    balance: ExpertBalance | None
    """Load balance of the routers, which the files may have among their tensors."""
    card: Mapping[str, str | None]
    """Fields of the model card: `license`, an identifier of the Hugging Face hub, and `name`, a repository there."""


def make_table(
    model: ModelConfig, kind: str, multiple: int = 1, spare: int = 0, groups: Mapping[str, int] | None = None
) -> list[Stored]:
    """Return the stored tensors of a model that the format can express.

    Args:
        model: The architecture.
        kind: The format's entry in model_types.yaml.
        multiple: Unit to which rows of token embedding and head are padded.
        spare: Largest number of padding rows in files.
        groups: Number of blocks of the parts of a module, see `Stored.groups`.
    """
    shapes, naming = logical_shapes(model), load_table("model_types")[kind]["tensors"]
    table = []
    for part, name in naming["outside"].items():
        if part in shapes:
            table.append(Stored(name, (part,), shapes[part]))
            if part in ("embedding.word.weight", "head.weight"):
                rows, width = shapes[part]
                padded = (-(-rows // multiple) * multiple, width)
                table[-1] = replace(table[-1], shape=padded, cut=0, rows=range(rows, rows + spare + 1))
            if skipped := naming.get("skipped", {}).get(part, 0):
                table[-1] = replace(table[-1], shape=(shapes[part][0] + skipped, *shapes[part][1:]), skipped=skipped)
    for layer in range(model.num_blocks):
        prefix = naming["layer"].format(layer)
        if layer == model.query_layer:
            prefix = naming.get("query_layer", prefix)
        for pattern, module, modules in _modules(_naming(model, naming), model.experts or 0):
            for suffix in ("weight", "bias"):
                parts = tuple(part for name in modules if (part := f"layers.{layer}.{name}.{suffix}") in shapes)
                if parts:
                    matrix = suffix == "weight"
                    own = naming.get("norms", {}).get(suffix, suffix) if "norm" in parts[0] else suffix
                    stack = model.experts or 0 if "{}" not in pattern and "experts" in parts[0] else 0
                    end = f".{own}" if not stack else "" if matrix else "_bias"  # stacks are parameters, not modules
                    each = parts[: len(parts) // stack] if stack else parts
                    shape = (sum(shapes[part][0] for part in each), *shapes[each[0]][1:])
                    transposed = matrix and pattern in naming.get("transposed", ())
                    cut = 0 if pattern in naming.get("columns", ()) else None
                    if matrix and pattern in naming.get("rows", ()):
                        cut = 1
                    blocks = (groups or {}).get(pattern, 1)
                    if pattern in naming.get("grouped", ()):
                        blocks = model.kv_heads or model.heads  # heads that share a key stand together
                    if pattern in naming.get("in_turn", ()):
                        blocks = shapes[parts[0]][0]  # gate and up, row by row
                    shape = shape[::-1] if transposed else shape
                    paired = _rotary_pairs(model, parts) if naming.get("neighbors", False) else ()
                    name, shape = f"{prefix}{module}{end}", (stack, *shape) if stack else shape
                    table.append(Stored(name, parts, shape, transposed, blocks, cut, paired=paired, stack=stack))
        if naming.get("router_bias") and model.has_experts(layer):
            table.append(Stored(f"{prefix}{naming['router_bias']}", (router_bias(layer),), (model.experts or 0,)))
        for key, unit in (("one_row", [1]), ("plain", [])):
            for ours, name in naming.get(key, {}).items():
                if (part := f"layers.{layer}.{ours}") in shapes:
                    table.append(Stored(f"{prefix}{name}", (part,), (*unit, *shapes[part])))
        table += _prediction(naming, prefix, layer - model.layers, shapes) if layer >= model.layers else ()
    left_out = shapes.keys() - {part for stored in table for part in stored.parts}
    assert not left_out, f"the format has no names for {sorted(left_out)}"
    return [_with_values(stored, naming) for stored in table]


def _prediction(
    naming: Mapping[str, Any], prefix: str, module: int, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Stored]:
    """Yield what a module of multi-token prediction has in the files besides a layer."""
    for name, ours in naming.get("predicts", {}).items():
        part = ours.format(module)
        part = part if part in shapes else "embedding.word.weight"  # a tied head
        yield Stored(f"{prefix}{name}", (part,), shapes[part], copy=not part.startswith("mtp."))


def _with_values(stored: Stored, naming: Mapping[str, Any]) -> Stored:
    """Return a stored tensor with the difference between its values and ours."""
    part = stored.parts[0]
    weight = part.endswith("norm.weight")
    if naming.get("plain_norms", False) and (weight or part.endswith("norm.bias")):
        return replace(stored, implied=float(weight))
    if naming.get("gains_below_one", False) and weight:
        return replace(stored, plus=1.0)
    if part in naming.get("unit_rows", {}):
        return replace(stored, unit_rows=stored.shape[0] not in naming["unit_rows"][part])
    return stored


def router_bias(layer: int) -> str:
    """Return the name of the biases by which a layer chooses experts: no parameter, but a tensor of some types."""
    return f"layers.{layer}.mlp.router.bias"


def _modules(naming: Mapping[str, Sequence[str]], experts: int) -> Iterator[tuple[str, str, Sequence[str]]]:
    for pattern, ours in naming.items():
        for number in range(experts if "{}" in pattern else 1):
            numbers = [number] if "{}" in pattern or "{}" not in "".join(ours) else range(experts)
            yield pattern, pattern.format(number), [name.format(one) for one in numbers for name in ours]


def _experts_of(stored: Stored) -> Iterator[Stored]:
    """Yield what a stack holds of each expert."""
    count = len(stored.parts) // stored.stack
    for first in range(0, len(stored.parts), count):
        yield replace(stored, stack=0, parts=stored.parts[first : first + count], shape=stored.shape[1:])


def _naming(model: ModelConfig, naming: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    renamed = naming.get("direct_query", {}) if model.latent is not None and model.latent.q_rank is None else {}
    return {renamed.get(pattern, pattern): ours for pattern, ours in naming["modules"].items()}


def _rotary_pairs(model: ModelConfig, parts: Iterable[str]) -> tuple[tuple[int, int, int] | None, ...]:
    """Return `Stored.paired` of some parts."""
    kinds = dict.fromkeys(("query", "key"), (model.head_size, 0, model.rotary_size))
    if model.latent is not None:
        nope, rotary = model.latent.nope_head_dim, model.latent.rope_head_dim
        kinds = {"query": (model.head_size, nope, rotary), "shared_key": (rotary, 0, rotary)}
    return tuple(kinds.get(part.split(".")[-2]) for part in parts)


def _paired(stored: Stored, part: str, tensor: Tensor, apart: bool) -> Tensor:
    """Return the rows of a logical tensor with pairs half of the rotating elements `apart`, or side by side."""
    paired = stored.paired[stored.parts.index(part)] if stored.paired else None
    if paired is None:
        return tensor
    size, first, rotary = paired
    before, pairs, after = tensor.unflatten(0, (-1, size)).split([first, rotary, size - first - rotary], dim=1)
    pairs = pairs.unflatten(1, (rotary // 2, 2) if apart else (2, rotary // 2))
    return torch.cat([before, pairs.transpose(1, 2).flatten(1, 2), after], dim=1).flatten(0, 1)


def join(stored: Stored, parts: Iterable[Tensor]) -> Tensor:
    """Return the stored tensor made of logical ones; padding is 0."""
    if stored.stack:
        parts = iter(parts)
        return torch.stack([join(one, islice(parts, len(one.parts))) for one in _experts_of(stored)])
    joined, *others = (_paired(stored, name, part, False) for name, part in zip(stored.parts, parts, strict=True))
    # 2 groups of query (q), key (k) and value (v), the rows of each in order: q0 q1, k0 k1, v0 v1 -> q0 k0 v0 q1 k1 v1;
    # that is how a tensor-parallel rank of Megatron finds what belongs to its heads in one piece
    if others:
        parts = [part.unflatten(0, (stored.groups, -1)) for part in (joined, *others)]
        joined = torch.cat(parts, dim=1).flatten(0, 1)
    if stored.transposed:
        joined = joined.t()
    if stored.plus:
        joined = joined - stored.plus
    if stored.skipped:
        joined = torch.cat([joined.new_zeros(stored.skipped, *joined.shape[1:]), joined])
    if joined.dim() < len(stored.shape):
        joined = joined[None]
    missing = stored.shape[0] - joined.shape[0]
    return torch.cat([joined, joined.new_zeros(missing, *joined.shape[1:])]) if missing else joined


def take(stored: Stored, tensor: Tensor, part: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """Return a logical tensor cut out of a stored one; `shapes` are those of the logical tensors."""
    if stored.stack:
        number, one = next((n, one) for n, one in enumerate(_experts_of(stored)) if part in one.parts)
        return take(one, tensor[number], part, shapes)
    full = tensor.t() if stored.transposed else tensor.flatten() if len(shapes[part]) < tensor.dim() else tensor
    if stored.plus:
        full = full + stored.plus
    if stored.unit_rows:
        full = torch.nn.functional.normalize(full)
    if len(stored.parts) == 1:
        return _paired(stored, part, full[stored.skipped :][: shapes[part][0]], True)
    widths = [shapes[name][0] // stored.groups for name in stored.parts]
    blocks = full.unflatten(0, (stored.groups, -1)).split(widths, dim=1)
    return _paired(stored, part, blocks[stored.parts.index(part)].flatten(0, 1), True)


def inexpressible(model: ModelConfig, kind: str, **choices: Sequence[Any]) -> list[Problem]:
    """Return a problem for each key of a model that the entry `kind` of model_types.yaml cannot express.

    `choices`: values that it can express, where they are not in the entry.
    """
    entry = load_table("model_types")[kind]
    needs = {key: [value] for key, value in entry["means"].items()} | entry.get("choices", {}) | choices
    for meanings in entry.get("values", {}).values():
        for key in {key for keys in meanings.values() for key in keys}:
            needs[key] = [keys[key] for keys in meanings.values() if key in keys]
    label = entry.get("label", f"transformers' {kind}")
    problems = [
        Problem(f"model.{key}", value, f"cannot be expressed in {label}", f"{shown(values)} can")
        for key, values in needs.items()
        if (value := attrgetter(key)(model)) not in (values or [value])
    ]
    eps = entry.get("defaults", {}).get("latent.norm_eps")
    if model.latent is not None and eps not in (None, latent_eps := model.latent.norm_eps or model.norm_eps):
        problems.append(Problem("model.latent.norm_eps", latent_eps, f"is always {eps} in {label}", f"use {eps}"))
    rule = f"must be given in {label}"
    return problems + [Problem(f"model.{key}", None, rule) for key in entry.get("given", ()) if not getattr(model, key)]
