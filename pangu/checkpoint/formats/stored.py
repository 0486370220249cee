"""How tensors stand in another program's files, as data: names, orientation, fusion, cuts; and what reads such files.

A *logical* tensor is ours (`layers.3.attention.query.weight`, [outputs, inputs]). A *stored* one is theirs: one or
several logical tensors one below the other, perhaps transposed. A format is a table of stored tensors for a model, a
`Source` and a function that writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pangu.checkpoint.formats.fields import load_table
from pangu.config.data import TokenizerConfig
from pangu.config.errors import ConfigError, Problem
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.models.parameters import logical_shapes

if TYPE_CHECKING:
    from pangu.layers.expert_balance import ExpertBalance

PANGU_VOCAB = {40064: 40000}
"""Rows of PanGu-α's padded word embedding -> rows with words."""
PANGU_PADDING = 64
"""Rows of padding in PanGu-α's files at most."""
UNTOLD = object()
"""Value of a key of `Source.model_keys` that the files do not tell and that the user has to give."""


@dataclass(frozen=True)
class Stored:
    name: str
    parts: tuple[str, ...]
    """The logical tensors in it, stacked along dimension 0."""
    shape: tuple[int, ...]
    """Of the whole stored tensor, with padding."""
    transposed: bool = False
    """Stored as [inputs, outputs]."""
    groups: int = 1
    """Each part is cut into this many blocks: block 0 of all parts comes first, then block 1 of all."""
    cut: int | None = None
    """Dimension that the files of tensor-parallel ranks shard; None: each has all."""
    rows: range | None = None
    """Numbers of rows that a file may have, because padding varies; None: those of `shape`."""


class Source(ABC):
    """Open files of one format."""

    model_keys: dict[str, Any]
    """Keys of `ModelConfig` that the files tell, or `UNTOLD`; a function computes a value from the number of heads."""
    packing: Mapping[str, Any] = MappingProxyType({})
    """Keys of `PackingConfig` that the files tell."""
    generation: Mapping[str, Any] = MappingProxyType({})
    """Token ids and sampling defaults of each transformers file, by file name; exports keep them."""
    tokenizer: TokenizerConfig | None = None
    chat_template: str | None = None
    """Template of the conversations that the model was fine-tuned on, see `ChatTemplate.portable`."""
    balance: ExpertBalance | None = None
    """What the routers of a model with experts learned of their loads, where the files tell it."""
    tensors: Mapping[str, Tensor]
    """Every tensor of the files, whole and on the meta device; without buffers and the state of the optimizer."""
    problems: Sequence[str] = ()
    """What is wrong with the pieces of tensors."""

    @abstractmethod
    def table(self, model: ModelConfig) -> list[Stored]:
        """The tensors of a model in this format."""

    def inspect(self, table: Sequence[Stored], problems: list[str]) -> Mapping[str, Tensor]:
        """The tensors, of files that hold those of `table`; what is wrong with their pieces goes into `problems`."""
        problems += self.problems
        return self.tensors

    @abstractmethod
    def read(self, stored: Stored) -> Tensor:
        """One whole tensor."""


@dataclass(frozen=True)
class Job:
    """A model to be written."""

    config: RunConfig
    """The model, and the ids of its data (`IndexedData`)."""
    tokenizer: TokenizerConfig | None
    """The tokenizer, which exists."""
    output: Path
    """The final name of the files."""
    tensor: int
    """Tensor-parallel ranks that the files are for."""
    table: Sequence[Stored]
    described: Sequence[Tensor]
    """The tensors on the meta device."""
    contents: Iterator[Tensor]
    """Their values, one at a time."""
    balance: ExpertBalance | None = None
    """As `Source.balance`."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """See `Source.generation`."""
    chat_template: str | None = None
    """See `Source.chat_template`."""


def make_table(
    model: ModelConfig, names: str, multiple: int = 1, spare: int = 0, groups: Mapping[str, int] | None = None
) -> list[Stored]:
    """The tensors of a model, which the format can express.

    Args:
        names: the format's entry in tensor_names.yaml.
        multiple: rows of the word embedding and the head are padded to a multiple of it.
        spare: rows of padding that files have at most.
        groups: number of blocks of the parts of a module, see `Stored.groups`.
    """
    shapes, naming = logical_shapes(model), load_table("tensor_names")[names]
    table = []
    for part, name in naming["outside"].items():
        if part in shapes:
            table.append(Stored(name, (part,), shapes[part]))
            if part in ("embedding.word.weight", "head.weight"):
                rows, width = shapes[part]
                padded = (-(-rows // multiple) * multiple, width)
                table[-1] = replace(table[-1], shape=padded, cut=0, rows=range(rows, rows + spare + 1))
    for layer in range(model.layers):
        prefix = naming["layer"].format(layer)
        if layer == model.query_layer:
            prefix = naming.get("query_layer", prefix)
        for pattern, module, modules in _modules(naming["modules"], model.experts or 0):
            for kind in ("weight", "bias"):
                parts = tuple(part for name in modules if (part := f"layers.{layer}.{name}.{kind}") in shapes)
                if parts:
                    matrix = kind == "weight"
                    suffix = naming.get("norms", {}).get(kind, kind) if "norm" in parts[0] else kind
                    shape = (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
                    transposed = matrix and pattern in naming.get("transposed", ())
                    cut = 0 if pattern in naming.get("columns", ()) else None
                    if matrix and pattern in naming.get("rows", ()):
                        cut = 1
                    blocks = (groups or {}).get(pattern, 1)
                    shape = shape[::-1] if transposed else shape
                    table.append(Stored(f"{prefix}{module}.{suffix}", parts, shape, transposed, blocks, cut))
    left_out = shapes.keys() - {part for stored in table for part in stored.parts}
    assert not left_out, f"the format has no names for {sorted(left_out)}"
    return table


def _modules(naming: Mapping[str, Sequence[str]], experts: int) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield the modules of a layer, as patterns and as names, and what is stored in them; those of experts for each."""
    for pattern, ours in naming.items():
        for number in range(experts if "{}" in pattern else 1):
            yield pattern, pattern.format(number), [name.format(number) for name in ours]


def join(stored: Stored, parts: Sequence[Tensor]) -> Tensor:
    """The stored tensor of some logical ones; padding is 0."""
    whole = parts[0]
    # 2 groups of query (q), key (k) and value (v), the rows of each in order: q0 q1, k0 k1, v0 v1 -> q0 k0 v0 q1 k1 v1;
    # that is how a tensor-parallel rank of Megatron finds what belongs to its heads in one piece
    if len(parts) > 1:
        whole = torch.cat([part.unflatten(0, (stored.groups, -1)) for part in parts], dim=1).flatten(0, 1)
    if stored.transposed:
        whole = whole.t()
    missing = stored.shape[0] - whole.shape[0]
    return torch.cat([whole, whole.new_zeros(missing, *whole.shape[1:])]) if missing else whole


def take(stored: Stored, tensor: Tensor, part: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
    """A logical tensor out of a stored one; `shapes` are those of the logical tensors."""
    whole = tensor.t() if stored.transposed else tensor
    if len(stored.parts) == 1:
        return whole[: shapes[part][0]]
    widths = [shapes[name][0] // stored.groups for name in stored.parts]
    blocks = whole.unflatten(0, (stored.groups, -1)).split(widths, dim=1)
    return blocks[stored.parts.index(part)].flatten(0, 1)


def require_expressible(model: ModelConfig, format_: str, only: Mapping[str, Any], **choices: Sequence[Any]) -> None:
    """Raise a ConfigError that names all keys of a model (`router.score` is one) that a format cannot express; it knows
    the values of `only` and those among `choices`, which come first."""
    needs = {key: [value] for key, value in only.items()} | choices
    problems = [
        Problem(f"model.{key}", value, f"cannot be expressed in {format_}", f"{list(values)} can")
        for key, values in needs.items()
        if (value := attrgetter(key)(model)) not in values
    ]
    if problems:
        raise ConfigError(problems)
