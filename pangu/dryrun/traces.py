"""Traces of modules: measured in dry runs of shortened chunks, once per way to compute them, and cached."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, cast

from pangu.config.parallelism import least_data
from pangu.config.schema import RunConfig
from pangu.dryrun.cache import cache_folder, identify, read_cached, write_cached
from pangu.dryrun.roles import run_with_progress
from pangu.models.parameters import ModelPart, place_model
from pangu.schedule.spans import SpanKey, Trace, keys_of, module_kinds

_MATTERS = ("model", "parallel", "batch", "memory", "loss", "precision", "optimizer", "data")
"""Configuration groups that a module's work depends on."""
_RECOMPUTED = 1
"""Value of `memory.recompute` in measured runs; each chunk begins where that leaves as many layers as it has."""
_ENDS = 2
"""Cost of the beginning and end of a chunk, in modules that take about as long to carry out."""
_PLACES = {"follows", "recomputed", "resident", "second", "unreached"}
"""Words of a kind that describe the position of a layer, not its content."""
Chunk = tuple[str, ...]
"""Kinds of the modules of a chunk, in forward order (`spans.module_kinds`)."""


class TraceRequest(NamedTuple):
    """Request for the spans of the chunks of one stage."""

    config: RunConfig
    chunks: tuple[Chunk, ...]
    splits: tuple[bool, ...] = (False,)
    """Flags for backward passes, True to split input and weight gradients; both flags if a schedule uses both."""

    @property
    def actions(self) -> list[str]:
        """Names of the actions that compute a chunk."""
        return ["F", *(kind for split in self.splits for kind in ("IW" if split else "B"))]

    def keys(self, chunk: Chunk) -> set[SpanKey]:
        """Return the keys of the spans of a chunk."""
        return {key for action in self.actions for key in keys_of(action, chunk)}


class Way(NamedTuple):
    """Way to compute a model."""

    values: str
    """Configuration to carry out, as JSON."""
    head: bool | None
    """True if the stage has the head, not the embedding, if these use one matrix and are split; None: irrelevant."""
    size: int
    """Sequences per micro-batch."""

    @classmethod
    def of(cls, request: TraceRequest) -> Way:
        """Return the way in which a request's chunks are computed."""
        config, kinds = request.config, {kind.partition(" ")[0] for chunk in request.chunks for kind in chunk}
        shares = config.model.tied_head or config.model.mtp_layers > 0
        head = "head" in kinds if shares and not {"embedding", "head"} <= kinds else None
        return cls(_values_of(replace(config, cluster=None)), head, config.batch.micro_size)

    @property
    def file(self) -> Path:
        """Cache file of the measurements."""
        values = json.loads(self.values)
        matters = [{group: values[group] for group in _MATTERS}, values["train"]["frozen"], self.head, self.size]
        return cache_folder() / f"trace-{identify(matters)}.pickle"


@dataclass
class Traces:
    """Traces of runs, measured on first use."""

    _known: dict[Way, Trace] = field(default_factory=dict)

    def measure(self, requests: Collection[TraceRequest]) -> list[Trace]:
        """Return the traces of the requested chunks; measure those that have not been measured, on all cores.

        Raises:
            DryRunError: if the dry run is unavailable here, or the model cannot be carried out in it.
        """
        ways = [(Way.of(request), request) for request in requests]
        if self._missing(ways):
            for way in dict(ways):
                if (trace := read_cached(way.file)) is not None:
                    self._add(way, trace)
        if missing := self._missing(ways):
            for way, trace in _carry_out(missing):
                self._add(way, trace)
                write_cached(way.file, self._known[way])
        return [self._known[way] for way, _ in ways]

    def _add(self, way: Way, trace: Trace) -> None:
        known = self._known.get(way)
        self._known[way] = known.joined(trace) if known else trace

    def _missing(self, ways: Collection[tuple[Way, TraceRequest]]) -> list[tuple[Way, TraceRequest]]:
        """Return requests for the chunks that have not been measured, and only for these."""
        missing = []
        for way, request in ways:
            known = self._known[way].spans.keys() if way in self._known else set[SpanKey]()
            chunks = tuple(chunk for chunk in request.chunks if not request.keys(chunk) <= known)
            if chunks:
                missing.append((way, request._replace(chunks=chunks)))
        return missing


def jobs_of(missing: Iterable[tuple[Way, TraceRequest]]) -> Iterator[tuple[list[Way], dict[str, Any]]]:
    """Yield the dry runs to make: ways of one model in several micro-batch sizes, and the options of `measure`."""
    groups: dict[tuple[str, bool | None], list[tuple[Way, TraceRequest]]] = {}
    for way, request in missing:
        groups.setdefault((way.values, way.head), []).append((way, request))
    for group in groups.values():
        splits = sorted({split for _, request in group for split in request.splits})
        wanted = group[0][1]._replace(splits=tuple(splits))
        whole = {shortened(chunk) for _, request in group for chunk in request.chunks}
        ways = sorted({way for way, _ in group}, key=lambda way: way.size)
        everything = set[SpanKey]().union(*map(wanted.keys, whole))
        keys = {chunk: wanted.keys(chunk) & everything for chunk in whole | {*map(_with_pairs, whole)}}
        chunks = list(_numbered(wanted.config, _covering(keys)))
        yield ways, {"chunks": chunks, "sizes": [way.size for way in ways], "splits": splits}


def _covering(keys: Mapping[Chunk, set[SpanKey]]) -> list[Chunk]:
    """Return chunks that cover all spans, found by greedy set cover (Chvatal 1979): most new spans per module first."""
    picked, left = list[Chunk](), set[SpanKey]().union(*keys.values())
    while left:
        picked.append(max(sorted(keys), key=lambda chunk: len(keys[chunk] & left) / (len(chunk) + _ENDS)))
        left -= keys[picked[-1]]
    for chunk in tuple(picked):
        if keys[chunk] <= set[SpanKey]().union(*(keys[other] for other in picked if other != chunk)):
            picked.remove(chunk)
    return picked


@lru_cache(maxsize=10_000)
def shortened(chunk: Chunk) -> Chunk:
    """Return the shortest chunk that still has every pair of neighbors around a module: of equal layers, three stay."""
    kept = list(chunk)

    def neighbors(kinds: Sequence[str]) -> set[tuple[str, str, str]]:
        around = ["", *kinds, ""]
        return set(zip(around, kinds, around[2:], strict=False))

    everything, place = neighbors(kept), 0
    while place < len(kept):
        for end in range(place + 1, len(kept)):
            shorter = kept[:place] + kept[end:]
            if kept[end] == kept[place] and neighbors(shorter) == everything:
                kept = shorter
                break
        else:
            place += 1
    return tuple(kept)


def _with_pairs(chunk: Chunk) -> Chunk:
    """Return a chunk with two of each three equal layers: no layer equals both of its neighbors."""
    return tuple(kind for place, kind in enumerate(chunk) if chunk[max(0, place - 2) : place] != (kind, kind))


class PickedLayers(tuple[int, ...]):
    """Layers of a chunk that starts before them: the first `memory.recompute` from `start` on are recomputed."""

    start: int = -1


def _numbered(config: RunConfig, chunks: Iterable[Chunk]) -> Iterator[ModelPart]:
    """Yield chunks of the model's first layers of each kind."""
    kinds = module_kinds(config, place_model(config.model, config.train.frozen), ModelPart.full(config.model))
    contents = [_content(kind) for name, kind in kinds.items() if name.startswith("layers.")]
    for chunk in chunks:
        layers: list[int] = []
        start = -_RECOMPUTED
        for kind in chunk:
            if kind.startswith("layer"):
                layers.append(contents.index(_content(kind), layers[-1] + 1 if layers else 0))
                start = layers[-1] + 1 - _RECOMPUTED if "recomputed" in kind.split() else start
        first, last = (any(kind.startswith(name) for kind in chunk) for name in ("embedding", "head"))
        picked = PickedLayers(layers)
        picked.start = start
        yield ModelPart(cast(range, picked), first, last)


def _content(kind: str) -> str:
    return " ".join(word for word in kind.split() if word not in _PLACES)


@lru_cache(maxsize=1000)
def _values_of(config: RunConfig) -> str:
    """Return the configuration to carry out as JSON, with only the values that the work of modules depends on."""
    parallel, model = config.parallel, config.model
    data, zero = least_data(parallel.expert, parallel.expert_tensor, parallel.tensor, parallel.context), 0
    offload = [what for what in config.memory.offload if what == "activations"]
    # the backward pass ends at the first trained module, unless the weights of that module must be resharded
    reshards = parallel.zero > 0 and (parallel.zero_group or (parallel.data or 1) * parallel.context) > 1
    if config.train.frozen and (reshards or len(config.memory.offload) > len(offload)):
        data, zero = 2 * data, 1
    elif config.precision.matmul == "fp8" and parallel.zero > 1:
        zero = 2  # shards nothing on one replica, but each micro-batch begins new sums, to which nothing is added
    # measured in all sizes at once, unless halves or the size tell who counts the choices of a balance loss
    micro = config.batch.micro_size if model.router.balance_sequences > 1 or parallel.two_batch_overlap else 1
    values = {**asdict(config), "dry_run": True, "cluster": None}
    changes: dict[str, dict[str, Any]] = {
        # replaces a kernel that a dry run cannot carry out, and that keeps as much
        "model": {"attention": "auto" if model.attention == "flash_attn" else model.attention},
        "parallel": {
            **{"pipeline": 1, "virtual_stages": 1, "schedule": "1f1b", "layers": None},
            **{"data": data, "zero": zero, "zero_group": None, "bucket_mib": None, "overlap": True},
            **{"layouts": (), "auto": False, "timeout_s": 600.0},
        },
        "batch": {"micro_size": micro, "global_size": 2 * data * micro, "stages": ()},
        "memory": {
            "recompute": "selective" if config.memory.recompute == "selective" else _RECOMPUTED,
            "offload": offload,
        },
        "precision": {"reduce": "fp32"},
        "checkpoint": {"upcycle": False},
    }
    return json.dumps(values | {group: {**values[group], **change} for group, change in changes.items()})


def _carry_out(missing: Sequence[tuple[Way, TraceRequest]]) -> Iterator[tuple[Way, Trace]]:
    """Measure all that is missing, which may take a minute, and yield the traces; raise DryRunError on failure."""
    jobs = list(jobs_of(missing))
    described = [(json.loads(ways[0].values), 0, options) for ways, options in jobs]
    for (ways, _), report in zip(jobs, run_with_progress(described), strict=True):
        yield from zip(ways, report["traces"], strict=True)
