"""Names and shapes of all parameters of a model, without torch: modules and planning read the same table."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from pangu.common.errors import ConfigError, Problem
from pangu.config.model import LatentConfig, ModelConfig
from pangu.topology.experts import ExpertRank
from pangu.topology.placement import Placement, PlacementTable, TensorRank

Parameters = Iterable[tuple[str, list[Placement]]]
"""Names of module parameters, with the logical tensors that each holds."""
VOCABULARY_MULTIPLE = 128
"""Alignment of the vocabulary rows that a rank stores."""


@dataclass(frozen=True)
class ModelPart:
    """Consecutive layers, computed at once; a pipeline stage holds one or more parts."""

    layers: range
    first: bool = False
    last: bool = False
    """True if it includes the final norm, PanGu-α's query table and the head."""

    @classmethod
    def full(cls, config: ModelConfig) -> ModelPart:
        """Return the full model as one part."""
        return cls(range(config.num_blocks), first=True, last=True)


def place_tensors(
    config: ModelConfig,
    parts: Sequence[ModelPart],
    rank: TensorRank,
    frozen: Collection[str] = (),
    experts: ExpertRank | None = None,
) -> PlacementTable:
    """Return the tensors of parts of a model as one tensor-parallel rank holds them, in the order of modules."""
    # `experts`: this rank's share of them; None: all. A parameter is frozen if one of its tensors matches `frozen`.
    # The cache must not keep the process groups of `TensorRegion` and `ExpertRegion`.
    share = None if experts is None else ExpertRank(experts.rank, experts.size, experts.tensor)
    given = TensorRank(rank.rank, rank.size, rank.sequence), tuple(frozen), share
    layers = [_place_layer(config, number, *given) for part in parts for number in part.layers]
    first, last = (_place(of(config, parts), *given) for of in (_input_parameters, _output_parameters))
    table = PlacementTable()
    for one in (first, *layers, last):
        table.extend(one)
    return table


@lru_cache(maxsize=100)
def place_model(config: ModelConfig, frozen: tuple[str, ...] = ()) -> PlacementTable:
    """Return the tensors of a full model on one rank, in the order of modules."""
    return place_tensors(config, [ModelPart.full(config)], TensorRank(), frozen)


def _place(
    parameters: Parameters, rank: TensorRank, frozen: tuple[str, ...], experts: ExpertRank | None
) -> PlacementTable:
    table = PlacementTable()
    for parameter, tensors in parameters:
        trained = not any(_fits(tensor.name, frozen) for tensor in tensors)
        apart = experts if tensors[0].expert else None
        held, place = (tensors, rank) if apart is None else (apart.held(tensors), apart.tensor)
        table.place(parameter, held, place, trained=trained, expert=apart is not None)
    return table


@lru_cache(maxsize=1000)  # a search places the same layers for many layouts
def _place_layer(
    config: ModelConfig, number: int, rank: TensorRank, frozen: tuple[str, ...], experts: ExpertRank | None
) -> PlacementTable:
    return _place(_layer_tensors(config, number), rank, frozen, experts)


@lru_cache(maxsize=1000)
def _layer_tensors(config: ModelConfig, number: int) -> list[tuple[str, list[Placement]]]:
    predicting = _prediction(config, f"mtp.{number - config.layers}") if number >= config.layers else ()
    return [*_layer(config, number), *predicting]


def _fits(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def count_frozen(config: ModelConfig, patterns: tuple[str, ...]) -> int:
    """Return the number of frozen weights of a full model; raise `ConfigError` for a pattern that makes no sense."""
    # Errors: a pattern fits no tensor, a parameter would be frozen in part, or nothing is left to train.
    table = place_model(config, patterns)
    problems: list[Problem] = []
    names = [placement.name for placement in table]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            rule = "matches no tensor in the model"
            problems.append(Problem("train.frozen", pattern, rule, f"names look like {', '.join(names[:3])}"))
    for parameter in sorted(parameter for parameter in table.shapes if not table.is_trained(parameter)):
        stored = [placement.name for placement in table.stored_in(parameter)]
        if free := [name for name in stored if not _fits(name, patterns)]:
            fitting = [name for name in stored if name not in free]
            rule = f"freezes {', '.join(fitting)} but not {', '.join(free)}, which are stored as one matrix"
            problems.append(Problem("train.frozen", list(patterns), rule, "freeze all of them or none"))
    if all(_fits(name, patterns) for name in names):
        problems.append(Problem("train.frozen", list(patterns), "freezes all parameters", "leave some out"))
    if problems:
        raise ConfigError(problems)
    return sum(placement.numel for placement in table if not placement.trained)


def logical_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every logical tensor of a model."""
    return {placement.name: placement.shape for placement in place_model(config)}


def is_of_mtp(name: str, layers: int) -> bool:
    """Return whether a tensor belongs to multi-token prediction, and not to one of the model's own `layers`."""
    found = re.match(r"(?:mtp|layers\.(\d{1,9}))\.", name)
    return found is not None and (found[1] is None or int(found[1]) >= layers)


@lru_cache(maxsize=1000)  # a search groups the same names for many layouts
def parameters_by_module(config: ModelConfig, parameters: tuple[str, ...], part: ModelPart) -> dict[str, list[str]]:
    """Return modules of a part (`ModuleHooks`) -> those of `parameters` that are theirs, in forward order."""
    layers = [f"layers.{number}" for number in part.layers]
    names = ["position_bias", *["embedding"] * part.first, *layers, *["head"] * part.last]
    uses: dict[str, list[str]] = {name: [] for name in names}
    query_layer, predicts = f"layers.{config.query_layer}", config.layers in part.layers
    used_in = {
        "query_embedding": query_layer,
        "embedding_norm": "layers.0",
        "final_norm": query_layer if config.norms_before_query else f"layers.{config.layers}" if predicts else "head",
    }
    for parameter in parameters:
        first, second, *_ = parameter.split(".")
        module = f"layers.{second}" if first == "layers" else used_in.get(first, first)
        if first == "mtp":
            module = f"layers.{config.layers + (int(second) if second.isdigit() else 0)}"
        if module in uses:
            uses[module].append(parameter)
    tied = "head.weight" if "head.weight" in parameters else "embedding.word.weight"
    if part.last and tied != "head.weight":
        uses["head"].append(tied)
    if predicts and "mtp.lookup" not in parameters:
        uses[f"layers.{config.layers}"].append(tied if config.tied_head else "embedding.word.weight")
    return {name: used for name, used in uses.items() if used}


def _vocabulary_fields(config: ModelConfig, parts: Sequence[ModelPart]) -> dict[str, Any]:
    begins, ends = any(part.first for part in parts), any(part.last for part in parts)
    # a tied head on another stage than the embedding holds a copy of it, and so does multi-token prediction
    shared = "ends" if (config.tied_head or config.mtp_layers) and begins != ends else None
    return {"std": config.init_std, "cut_dim": 0, "multiple": VOCABULARY_MULTIPLE, "shared": shared}


def _input_parameters(config: ModelConfig, parts: Sequence[ModelPart]) -> Parameters:
    """Yield the parameters before the layers."""
    if any(part.first for part in parts):
        yield from _one("embedding.word.weight", (config.vocab, config.hidden), **_vocabulary_fields(config, parts))
        if config.positions == "learned":
            yield from _one("embedding.position.weight", (config.sequence, config.hidden), config.init_std)
    if config.positions == "relative":
        complete = sum(len(part.layers) for part in parts) == config.num_blocks
        shape, shared = (config.num_relative_buckets, config.heads), None if complete else "pipeline"
        yield from _one("position_bias.weight", shape, config.init_std, cut_dim=1, shared=shared)


def _output_parameters(config: ModelConfig, parts: Sequence[ModelPart]) -> Parameters:
    """Yield the parameters behind the layers."""
    if not any(part.last for part in parts):
        return
    begins, words, shape = (
        any(part.first for part in parts),
        _vocabulary_fields(config, parts),
        (config.vocab, config.hidden),
    )
    yield from _norm(config, "final_norm", config.hidden)
    if not (config.tied_head and begins):
        name = "embedding.word.weight" if config.tied_head else "head.weight"
        untied = {} if config.tied_head else {"shared": None}
        yield "head.weight", [Placement(name, shape, **words | untied)]
    if config.mtp_layers and not (config.tied_head or begins):
        yield "mtp.lookup", [Placement("embedding.word.weight", shape, **words)]
    if config.query_layer is not None:
        # every rank looks up all positions, for its own heads
        yield from _one("query_embedding.weight", (config.sequence, config.hidden), config.init_std, partial=True)


def _layer(config: ModelConfig, number: int) -> Parameters:
    path = f"layers.{number}"
    attention, mlp = f"{path}.attention", f"{path}.mlp"
    if number == 0 and config.embedding_norm:
        yield from _norm(config, "embedding_norm", config.hidden)
    yield from _norm(config, f"{path}.attention_norm", config.hidden)
    if config.attention_sinks:
        yield from _one(f"{attention}.sinks", (config.heads,), config.init_std, cut_dim=0)
    if config.latent is None:
        yield from _heads(config, attention, number == config.query_layer)
    else:
        yield from _latent(config, attention, config.latent)
    yield from _rows(config, f"{attention}.output", config.values_size, config.has_biases("output"))
    if config.parallel_block != "shared_norm":
        yield from _norm(config, f"{path}.mlp_norm", config.hidden)
    for name in ("attention_output_norm", "mlp_output_norm") if config.norm_placement == "sandwich" else ():
        # the residual stream then grows like that of a shallow model (Pangu Ultra, arXiv 2504.07866, section 2.2)
        yield from _norm(config, f"{path}.{name}", config.hidden, gain=1 / math.sqrt(config.layers))
    if not config.has_experts(number):
        yield from _feed_forward(config, mlp, config.ffn_size)
        return
    # each rank's gradient covers only its part of the experts
    yield from _one(f"{mlp}.router.weight", (config.experts or 0, config.hidden), config.init_std, partial=True)
    if config.router.learned_bias:
        yield from _one(f"{mlp}.router.logit_bias", (config.experts or 0,), None, partial=True)
    if config.router.learned_scale:
        yield from _one(f"{mlp}.router.scale", (config.experts or 0,), None, constant=1.0, partial=True)
    yield from _experts(config, f"{mlp}.experts")
    if config.shared_experts:
        yield from _feed_forward(config, f"{mlp}.shared", config.shared_experts * config.expert_size)


def _heads(config: ModelConfig, path: str, query_layer: bool) -> Parameters:
    query, key_value = config.query_size, config.kv_size
    projections: dict[str, Mapping[str, int]] = {"qkv": {"query": query, "key": key_value, "value": key_value}}
    if query_layer:
        projections = {"query": {"query": query}, "key_value": {"key": key_value, "value": key_value}}
    for name, outputs in projections.items():
        yield from _columns(config, path, name, outputs, config.has_biases("qkv"))
    for name in ("query_norm", "key_norm") if config.qk_norm else ():
        yield from _norm(config, f"{path}.{name}", config.head_size, per_head=True)


def _latent(config: ModelConfig, path: str, latent: LatentConfig) -> Parameters:
    down = {} if latent.q_rank is None else {"query_down": latent.q_rank}
    down |= {"kv_down": latent.kv_rank, "shared_key": latent.rope_head_dim}
    yield from _columns(config, path, "down", down, config.has_biases("qkv"), cut_dim=None)
    if latent.q_rank is not None:
        yield from _norm(config, f"{path}.query_norm", latent.q_rank)
    yield from _norm(config, f"{path}.kv_norm", latent.kv_rank)
    yield from _columns(config, path, "query", {"query": config.query_size}, False, latent.q_rank)
    outputs = {"key": latent.nope_head_dim * config.heads, "value": config.values_size}
    yield from _columns(config, path, "key_value", outputs, False, latent.kv_rank)


def _prediction(config: ModelConfig, path: str) -> Parameters:
    for name in ("embedding_norm", "hidden_norm", "output_norm"):
        yield from _norm(config, f"{path}.{name}", config.hidden)
    yield from _one(f"{path}.merge.weight", (config.hidden, 2 * config.hidden), config.init_std)


def _feed_forward(config: ModelConfig, path: str, inner: int) -> Parameters:
    widths = {"gate": inner, "up": inner} if config.is_gated else {"up": inner}
    yield from _columns(config, path, "up", widths, config.has_biases("mlp"))
    yield from _rows(config, f"{path}.down", inner, config.has_biases("mlp"))


def _experts(config: ModelConfig, path: str) -> Parameters:
    stacked: dict[str, list[Placement]] = {}
    for number in range(config.experts or 0):
        for parameter, tensors in _feed_forward(config, f"{path}.{number}", config.expert_size):
            # one of the ranks adds the bias of the sum
            once = [replace(tensor, partial=tensor.cut_dim is None, expert=True) for tensor in tensors]
            stacked.setdefault(parameter.replace(f"{path}.{number}", path), []).extend(once)
    yield from stacked.items()


def _one(name: str, shape: tuple[int, ...], std: float | None, **fields: Any) -> Parameters:
    yield name, [Placement(name, shape, std, **fields)]


def _norm(config: ModelConfig, name: str, width: int, per_head: bool = False, gain: float = 1.0) -> Parameters:
    # Each rank norms only its own heads, so gradients are partial sums.
    yield from _one(f"{name}.weight", (width,), None, constant=gain, partial=per_head)
    if config.norm == "layernorm":
        yield from _one(f"{name}.bias", (width,), None, partial=per_head)


def _columns(
    config: ModelConfig,
    path: str,
    name: str,
    outputs: Mapping[str, int],
    biases: bool,
    inputs: int | None = None,
    cut_dim: int | None = 0,
) -> Parameters:
    widths, depth = outputs.items(), config.hidden if inputs is None else inputs
    kv_heads = config.kv_heads or config.heads
    heads = {"query": config.heads, "key": kv_heads, "value": kv_heads}
    matrices = [
        Placement(f"{path}.{out}.weight", (n, depth), config.init_std, cut_dim=cut_dim, heads=heads.get(out, 1))
        for out, n in widths
    ]
    yield f"{path}.{name}.weight", matrices
    if biases:
        yield f"{path}.{name}.bias", [Placement(f"{path}.{out}.bias", (n,), cut_dim=cut_dim) for out, n in widths]


def _rows(config: ModelConfig, name: str, inputs: int, biases: bool) -> Parameters:
    std = config.init_std / (math.sqrt(2 * config.layers) if config.scaled_init else 1.0)
    yield from _one(f"{name}.weight", (config.hidden, inputs), std, cut_dim=1)
    if biases:
        yield from _one(f"{name}.bias", (config.hidden,), None)
