"""Conversion between formats, tensor by tensor, in the memory of a few copies of the largest tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pangu.checkpoint.safetensors_file import CODES
from pangu.common.errors import ConfigError, Problem, UserError, shown, writing
from pangu.common.files import new_path
from pangu.config.data import PackingConfig, TokenizerConfig
from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.interop.formats import huggingface, megatron_dist, megatron_names, megatron_ranks, mindspore, native
from pangu.interop.formats.stored import ABSENT, Job, Stored, WeightSource, join, router_bias, take
from pangu.layers.expert_balance import ExpertBalance
from pangu.models.parameters import logical_shapes


@dataclass(frozen=True)
class Format:
    """File format of another program, or pangu's own."""

    open: Callable[[Path], WeightSource]
    """Function that opens files to read. Raises UserError."""
    table: Callable[[ModelConfig, int], list[Stored]]
    """Function that returns a model's tensors for a tensor-parallel size. Raises UserError for an inexpressible
    model."""
    write: Callable[[Path, Job], None]
    ranks: bool = False
    """True if its files are sharded over tensor-parallel ranks."""
    predicts: Callable[[ModelConfig], bool] = lambda model: False
    """Function that returns whether its files hold the modules of multi-token prediction of a model."""


FORMATS = {
    "pangu": Format(native.PanguSource, native.table, native.write, predicts=lambda model: True),
    "huggingface": Format(
        huggingface.HuggingFaceSource, huggingface.table, huggingface.write, predicts=huggingface.predicts
    ),
    "megatron": Format(megatron_dist.open_folder, megatron_names.rank_table, megatron_ranks.write, ranks=True),
    "mindspore": Format(mindspore.MindSporeSource, mindspore.table, mindspore.write),
}
MEGATRON = {
    "torch": FORMATS["megatron"],
    # for experts that Megatron computes together (`--moe-grouped-gemm`)
    "torch_grouped": replace(FORMATS["megatron"], table=megatron_names.grouped_table),
    "torch_dist": Format(megatron_dist.open_folder, megatron_dist.dist_table, megatron_dist.write),
}
"""Formats of Megatron, which `open_folder` distinguishes."""
_SHAPING = (
    *("kind", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "sequence", "window", "positions"),
    *("latent", "full_layers", "nope_layers", "attention_sinks"),
    *("norm_placement", "partial_rotary_factor", "parallel_block", "embedding_norm"),
    *("sparse", "rope_scaling", "norm", "qk_norm", "biases", "tied_head"),
    *("experts", "experts_per_token", "expert_ffn", "shared_experts", "dense_layers", "expert_every"),
    *("router.score", "router.normalised", "router.scale", "router.learned_scale", "router.learned_bias"),
    *("router.selection", "router.groups", "router.groups_per_token"),
)
"""Keys of `ModelConfig` in which files and a given model must agree; for others, such as `activation`, the given value
wins. `vocab` may differ by the rows of padding, which the tensors' shapes show."""

_Reader = Callable[[str], Tensor]
MOST_LINES = 100
"""Largest number of differences between files and a model in a message."""


def settle_model(known: Mapping[str, Any], given: ModelConfig, named: set[str]) -> ModelConfig:
    """Return the model of some files: `known` keys replace those of `given`, except keys that the user `named`.

    Raises ConfigError with all contradictions, and all keys that neither has: the number of heads, and `ABSENT` ones.
    """
    known = _dotted(known)
    missing = [key for key, value in known.items() if value is ABSENT]
    known = {
        key: value(given.heads) if callable(value) else value for key, value in known.items() if key not in missing
    }
    from_files = {key for key in known if not {key, key.partition(".")[0]} & named}
    model = _with(given, {key: known[key] for key in from_files})
    if model.kv_heads == model.heads:
        model = replace(model, kv_heads=None)
    if model.head_dim is not None and model.head_dim * model.heads == model.hidden:
        model = replace(model, head_dim=None)
    # the same defaults on both sides
    files = _with(model, known)
    problems = [
        Problem(f"model.{key}", attrgetter(key)(given), f"the files have {shown(_plain(files)[key])}")
        for key in _SHAPING
        if key in known and key not in from_files and _plain(given)[key] != _plain(files)[key]
    ]
    if "heads" not in named | known.keys():
        rule = "the files do not store it, and a wrong number would load without an error"
        problems.append(Problem("model.heads", "(missing)", rule, "set a model (model=pangu_2_6b) or model.heads=32"))
    for key in missing:
        if not {key, key.partition(".")[0]} & named:
            rule = "the files do not store it, and a wrong value would load without an error"
            problems.append(Problem(f"model.{key}", "(missing)", rule, f"set model.{key}=VALUE"))
    if problems:
        raise ConfigError(problems)
    return model


def _dotted(keys: Mapping[str, Any]) -> dict[str, Any]:
    plain = {key: value for key, value in keys.items() if key != "router"}
    return plain | {f"router.{key}": value for key, value in vars(keys.get("router", SimpleNamespace())).items()}


def _with(model: ModelConfig, keys: Mapping[str, Any]) -> ModelConfig:
    router = {key.removeprefix("router."): value for key, value in keys.items() if "." in key}
    plain = {key: value for key, value in keys.items() if "." not in key}
    return replace(model, **plain, router=replace(model.router, **router))


def settle_packing(known: Mapping[str, Any], given: PackingConfig, vocab: int) -> PackingConfig:
    """Return the packing with ids of the files' tokenizer, otherwise the given ones; none beyond the vocabulary."""
    packing = replace(given, **known)
    eod, pad = (None if token is None or token >= vocab else token for token in (packing.eod, packing.pad))
    bos = None if isinstance(packing.bos, int) and packing.bos >= vocab else packing.bos
    stop = tuple(token for token in packing.stop if token < vocab)
    resets = {} if eod is not None else {"reset_mask": False, "reset_positions": False}
    return replace(packing, eod=eod, pad=pad, bos=bos, stop=stop, method="concat", index=None, **resets)


def _plain(model: ModelConfig) -> dict[str, Any]:
    head_dim = model.head_dim or (model.heads and model.hidden // model.heads)
    filled = {"ffn": model.ffn_size, "kv_heads": model.kv_heads or model.heads, "head_dim": head_dim}
    if model.experts is not None:
        filled |= {"expert_ffn": model.expert_size, "experts_per_token": model.num_chosen}
        if len(model.expert_layers) == model.num_blocks:
            filled["ffn"] = model.expert_size
    return _dotted(vars(model)) | filled


def convert(
    source: WeightSource,
    target: Format,
    config: RunConfig,
    tokenizer: TokenizerConfig | None,
    output: Path,
    tensor: int,
    tick: Callable[[int], None],
    card: Mapping[str, str | None] | None = None,
) -> None:
    """Write a model in another format, under a temporary name next to `output` until it is complete.

    `config`: the model of the files (see `settle_model`), and the ids of its data (`IndexedData`). `tokenizer` is
    copied where the format has a place for it. `tensor`: tensor-parallel size of the new files. `tick` is called with
    the number of all tensors for each of them. `card`: see `Job.card`. Raises UserError, naming all
    differences between the files and the model; nothing is written then.
    """
    model = config.model
    table = target.table(model, tensor)
    described, read = logical_tensors(source, model)
    balance = stored_balance(source, model, read)
    if balance is not None and balance.bias.any() and model.router.balance != "bias":
        rule = "the files choose experts with biases"
        raise ConfigError([Problem("model.router.balance", model.router.balance, rule, "use bias")])

    def contents() -> Iterator[Tensor]:
        for entry in table:
            tick(len(table))
            yield join(entry, map(read, entry.parts))

    with writing(output), torch.no_grad():
        output.parent.mkdir(parents=True, exist_ok=True)
        with new_path(output) as partial:
            meta = [join(entry, map(described, entry.parts)) for entry in table]
            job = Job(config, tokenizer, output, tensor, table, meta, contents(), source, balance, card or {})
            target.write(partial, job)


def logical_tensors(source: WeightSource, model: ModelConfig) -> tuple[_Reader, _Reader]:
    """Return functions from a logical tensor's name to its meta tensor and to its values, which are read then.

    Raises UserError unless the files match the model.
    """
    table, shapes = source.table(model), logical_shapes(model)
    biases: dict[str, Tensor] = {}
    if model.experts is not None:
        balance = source.balance or ExpertBalance(model)
        biases = {router_bias(layer): balance.bias[row] for row, layer in enumerate(balance.layers)}
    shapes |= {name: tuple(bias.shape) for name, bias in biases.items()}
    where = {part: entry for entry in table for part in entry.parts}
    tensors = fitting_tensors(source, table)
    # parts of a fused tensor come one after the other
    read = lru_cache(maxsize=1)(source.read)

    def taken(part: str, found: Callable[[Stored], Tensor]) -> Tensor:
        stored = where.get(part)
        return biases[part] if stored is None else take(stored, found(stored), part, shapes)

    return (
        lambda part: taken(part, lambda stored: tensors[stored.name]).to("meta"),
        lambda part: taken(part, read),
    )


def stored_balance(source: WeightSource, model: ModelConfig, read: _Reader) -> ExpertBalance | None:
    """Return the load balance of the routers in some files: the source's, or with biases that are among its tensors."""
    parts = {part for entry in source.table(model) for part in entry.parts}
    if source.balance is not None or model.experts is None or not parts & {*map(router_bias, model.expert_layers)}:
        return source.balance
    balance = ExpertBalance(model)
    for row, layer in enumerate(balance.layers):
        if (name := router_bias(layer)) in parts:
            balance.bias[row] = read(name)
    return balance


def fitting_tensors(source: WeightSource, table: list[Stored]) -> Mapping[str, Tensor]:
    """Return the tensors of the files on the meta device. Raises UserError unless they match the table."""
    problems: list[str] = []
    tensors = source.inspect(table, problems)
    expected = {stored.name: stored for stored in table}
    problems += [f"{shown(name)}: {tensor.dtype}" for name, tensor in tensors.items() if tensor.dtype not in CODES]
    problems += [f"{name}: missing" for name in expected if name not in tensors]
    problems += [
        f"{shown(name)}: {list(tensors[name].shape)}, not in the model" for name in tensors if name not in expected
    ]
    for name, stored in expected.items():
        if name in tensors and not _fits(tuple(tensors[name].shape), stored):
            problems.append(f"{name}: {list(tensors[name].shape)} in the files, {list(stored.shape)} in the model")
    if problems:
        if len(problems) > MOST_LINES:
            problems[MOST_LINES:] = [f"and {len(problems) - MOST_LINES} more"]
        lines = "\n".join(f"  {line}" for line in problems)
        raise UserError(f"the files do not match this model; nothing is written:\n{lines}")
    return tensors


def _fits(shape: tuple[int, ...], stored: Stored) -> bool:
    if shape[1:] != stored.shape[1:] or len(shape) != len(stored.shape):
        return False
    return shape[0] == stored.shape[0] or (stored.rows is not None and shape[0] in stored.rows)
