"""What each kind of module of this program does, counted in dry runs of small pieces of the real step.

A model of five layers is cut into four chunks on two stages: the embedding and a layer; one layer; two layers; one and
the head. What the third chunk does more than the second is a layer's work, and the others follow. Micro-batches of two
and of three sequences tell what is fixed and what each sequence adds: all larger ones lie on the line through them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from itertools import islice
from operator import add
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from pangu.config.errors import UserError
from pangu.config.files import read_json, write_atomically
from pangu.config.optimizer import UPDATED_AT_ONCE
from pangu.config.schema import RunConfig
from pangu.planning.roles import DryRunError, run_jobs
from pangu.planning.workload import Axis, Collective, Matmul, ModuleWork, Work

log = logging.getLogger("pangu")
Job = tuple[Mapping[str, Any], int]
"""A composed configuration and a rank."""
Report = Mapping[str, Any]
"""What matters here of `RankReport`: `phases` and `update`."""
Modules = dict[str, ModuleWork]
"""`layer`; `embedding` and `head`, all that the first and the last chunk have besides layers (in some models the last
layer is special); `inner`, what other chunks have."""
_AXES: Mapping[str, Axis] = {"gather": "shard", "world": "data", "replicas": "data"}
_PIECES = {
    "data": None,
    "zero": 0,
    "zero_group": None,
    "pipeline": 2,
    "virtual": 2,
    "schedule": "zb_v",
    "layers": [1, 1, 2, 1],
    "allowed": (),
    "auto": False,
}
"""One replica; gradients of weights are computed apart from those of inputs, and so counted apart."""
_SIZES = (1, 2, 3)
"""Sequences of the micro-batches that are counted. A single one is contiguous whichever way it is turned: copies that
turn tensors begin with two."""
_LAYERS = 3
"""Of the second stage."""
PATIENCE_SECONDS = 120.0
"""With another process that counts."""
_MATTERS = ("model", "parallel", "batch", "memory", "loss", "precision", "optimizer", "data")
"""Groups of a configuration that a module's work depends on."""


class Piece(NamedTuple):
    """How a layer is cut, and what of it is kept."""

    tensor: int
    sequence: bool
    recompute: str = "none"
    """As `memory.recompute`, in words."""
    chunks: int = 1
    """Of products, as `parallel.overlap_chunks`."""
    context: int = 1
    """Ranks that share the sequences."""


@dataclass
class ModuleCounts:
    """The modules of a configuration's model on one rank, however they are cut, for micro-batches of any size."""

    config: RunConfig
    _reports: dict[Piece, list[Report]] = field(default_factory=dict)
    """Of the second stage with each of `_SIZES`; where all is kept, then of the first stage."""
    _of_sizes: dict[Piece, list[Modules]] = field(default_factory=dict)
    _modules: dict[tuple[Piece, int], Modules] = field(default_factory=dict)

    def count(self, pieces: Collection[Piece]) -> None:
        """Count what has not been counted, on all cores; what was counted before is read from the user's cache folder.

        Raises:
            DryRunError: if the model cannot be carried out so, or some of its layers have experts and some have not.
        """
        model = self.config.model
        if model.experts is not None and len(model.expert_layers) < model.layers - (model.query_layer is not None):
            keys = f"model.dense_layers = {model.dense_layers}, model.expert_every = {model.expert_every}"
            raise DryRunError(f"{keys}: one kind of layer is counted, so 0, 1 work; a dry run carries both out")
        wanted = {*pieces, *(piece._replace(recompute="none") for piece in pieces)}
        jobs = {piece: _jobs(self.config, piece) for piece in sorted(wanted - set(self._reports))}
        if not jobs:
            return
        folder = cache_folder()
        files = {piece: folder / f"modules-{_identity(those)}.json" for piece, those in jobs.items()}
        if not self._missing(files):
            return
        with _alone(folder):
            missing = self._missing(files)  # another process may have counted meanwhile
            for piece, reports in _carry_out({piece: jobs[piece] for piece in missing}) if missing else ():
                self._reports[piece] = reports
                with suppress(OSError):
                    content = {"digest": _digest(reports), "reports": reports}
                    write_atomically(files[piece], json.dumps(content).encode(), sync=False)

    def _missing(self, files: Mapping[Piece, Path]) -> list[Piece]:
        """Read what was counted before; what was not."""
        self._reports |= {piece: reports for piece, file in files.items() if (reports := _read(file))}
        return [piece for piece in files if piece not in self._reports]

    def of(self, piece: Piece, size: int) -> Modules:
        """The modules for micro-batches of `size` sequences."""
        if (piece, size) not in self._modules:
            one, two, three = self._counted(piece)
            line = {kind: _at(size - 1, two[kind], three[kind]) for kind in two}
            self._modules[piece, size] = one if size == 1 else line
        return self._modules[piece, size]

    def _counted(self, piece: Piece) -> list[Modules]:
        """The modules for micro-batches of each of `_SIZES`."""
        if piece not in self._of_sizes:
            self.count([piece])
            reports = self._reports[piece]
            if piece.recompute == "none":
                counted = [_modules(*reports[number :: len(_SIZES)]) for number in range(len(_SIZES))]
            else:
                plain = self._counted(piece._replace(recompute="none"))
                counted = [
                    whole | {"layer": _recomputed(report, whole["layer"])}
                    for report, whole in zip(reports, plain, strict=True)
                ]
            self._of_sizes[piece] = counted
        return self._of_sizes[piece]

    def update(self, piece: Piece, numbers: int) -> tuple[float, float, float]:
        """Of a layer of so many parameters without any sharding: bytes that the optimizer's step reads and writes for
        each of them, its launches, and bytes that it works with for each that is updated at a time."""
        self.count([piece])
        update = self._reports[piece._replace(recompute="none")][0]["update"]
        total = _LAYERS * numbers
        moved, launches = update["memory_bound_bytes"] / total, update["launches"] / _LAYERS
        return moved, launches, update["working_bytes"] / min(total, UPDATED_AT_ONCE)


def _carry_out(jobs: Mapping[Piece, Sequence[Job]]) -> Iterator[tuple[Piece, list[Report]]]:
    """Dry runs of all jobs together, which may take a minute and so is told."""
    everything = [job for those in jobs.values() for job in those]
    log.info(f"{'counting':<12} what layers do, in {len(everything)} dry runs")
    done = iter(run_jobs(everything))
    for piece, those in jobs.items():
        yield piece, [{what: report[what] for what in ("phases", "update")} for report in islice(done, len(those))]


def _jobs(config: RunConfig, piece: Piece) -> list[Job]:
    """What has to be carried out."""
    values = {**asdict(config), "dry_run": True}
    parallel = {
        "tensor": piece.tensor,
        "context": piece.context,
        "context_kind": config.parallel.context_kind if piece.context > 1 else "auto",
        "sequence": piece.sequence,
        "overlap_chunks": piece.chunks,
        **_PIECES,
    }
    # kernels that a dry run cannot carry out keep as much
    attention = "auto" if config.model.attention in ("flex", "flash_attn") else config.model.attention
    changes: dict[str, dict[str, Any]] = {
        "model": {"layers": _LAYERS + 2, "attention": attention, "dense_layers": 0, "expert_every": 1},
        "parallel": parallel,
        "memory": {"recompute": piece.recompute, "offload": []},
        "train": {"frozen": ()},
    }
    values |= {group: {**values[group], **change} for group, change in changes.items()}
    stages = (1, 0) if piece.recompute == "none" else (1,)
    sizes = ({"global_size": 3 * size, "micro_size": size} for size in _SIZES)
    batches = [{**values, "batch": size} for size in sizes]
    return [(batch, stage * piece.tensor * piece.context) for stage in stages for batch in batches]


def cache_folder() -> Path:
    """Where what this machine has counted is kept; where the user's folder cannot be written, a temporary one."""
    temporary = Path(tempfile.gettempdir()) / f"pangu-{os.getuid()}"
    try:
        home = Path.home()
    except RuntimeError:  # as of a user who is a mere number, in a container
        home = temporary
    for folder in (Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "pangu", temporary):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
                return folder
    return temporary


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Of many processes that want the same, one counts at a time. One that takes too long is not waited for: it may be
    stopped."""
    with ExitStack() as stack:
        with suppress(OSError):
            lock = stack.enter_context((folder / "modules.lock").open("w"))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not _locked(lock) and time.monotonic() < deadline:
                time.sleep(0.1)
        yield


def _locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@cache
def _program() -> bytes:
    """What tells this version of the program from others."""
    files = sorted(Path(__file__).resolve().parents[1].glob("**/*.[pc]*"))
    return version("torch").encode() + b"".join(file.read_bytes() for file in files if file.suffix in (".py", ".cpp"))


def _identity(jobs: Sequence[Job]) -> str:
    matters = [[{group: values[group] for group in _MATTERS}, rank] for values, rank in jobs]
    return hashlib.sha256(_program() + json.dumps(matters, sort_keys=True).encode()).hexdigest()[:32]


def _digest(reports: Sequence[Report]) -> str:
    return hashlib.sha256(json.dumps(reports).encode()).hexdigest()


def _read(file: Path) -> list[Report] | None:
    """What was written, if it is whole."""
    with suppress(OSError, UserError):
        content = read_json(file)
        if isinstance(content, dict) and content.get("digest") == _digest(content.get("reports", ())):
            return cast(list[Report], content["reports"])
    return None


def _modules(second: Report, first: Report) -> Modules:
    alone, layer = _inner(second)
    chunks = {"embedding": _module(first["phases"]["0"]), "inner": alone, "head": _module(first["phases"]["3"])}
    ends = {kind: _less(chunk, layer) for kind, chunk in chunks.items()}
    saved = (layer.saved_bytes, layer.saved_bytes, layer.deferred_bytes)
    ends["embedding"] = replace(ends["embedding"], working=tuple(map(add, ends["embedding"].working, saved)))
    return {"layer": layer, **ends}


def _recomputed(second: Report, plain: ModuleWork) -> ModuleWork:
    """A layer that is computed again, as it is besides the same layer when all is kept."""
    _, layer = _inner(second)
    recompute = _minus(layer.backward_input, plain.backward_input)
    return replace(layer, backward_input=plain.backward_input, recompute=recompute)


def _inner(second: Report) -> tuple[ModuleWork, ModuleWork]:
    """A chunk of one layer between the first and the last, and what each further layer adds."""
    alone, two = (_module(second["phases"][chunk]) for chunk in "12")
    return alone, replace(_less(two, alone), working=alone.working)


def _module(phases: Mapping[str, Any]) -> ModuleWork:
    """All that a chunk does."""
    forward, back, weight = (phases[kind] for kind in "FIW")
    saved = forward["end"] - forward["start"]
    return ModuleWork(
        _work(forward),
        _work(back),
        _work(weight),
        saved_bytes=saved,
        deferred_bytes=saved + back["end"] - back["start"],
        working=(forward["peak"] - forward["end"], back["peak"] - back["start"], weight["peak"] - weight["start"]),
    )


def _less(whole: ModuleWork, part: ModuleWork) -> ModuleWork:
    """What is besides a part; it works with as much memory."""
    return ModuleWork(
        _minus(whole.forward, part.forward),
        _minus(whole.backward_input, part.backward_input),
        _minus(whole.backward_weight, part.backward_weight),
        saved_bytes=whole.saved_bytes - part.saved_bytes,
        deferred_bytes=whole.deferred_bytes - part.deferred_bytes,
        working=whole.working,
    )


def _minus(work: Work, other: Work) -> Work:
    return Work(
        _joined(work.matmuls, other.matmuls),
        work.bytes - other.bytes,
        work.launches - other.launches,
        _joined(work.collectives, other.collectives),
    )


def _joined(entries: Iterable[Any], less: Iterable[Any] = ()) -> tuple[Any, ...]:
    """Equal entries as one, with their calls added up; those of `less` are taken off."""
    calls: Counter[Any] = Counter()
    for sign, those in ((1, entries), (-1, less)):
        for entry in those:
            calls[entry._replace(calls=0)] += sign * entry.calls
    return tuple(entry._replace(calls=count) for entry, count in calls.items() if count)


def _work(phase: Mapping[str, Any]) -> Work:
    products = [matmul for product in phase["products"] for matmul in _matmuls(product)]
    collectives = [
        Collective(cast(Any, kind), _AXES.get(axis, cast(Axis, axis)), nbytes / calls, calls, hidden)
        for axis, kinds in phase["collectives"].items()
        for kind, one in kinds.items()
        for hidden, calls, nbytes in _by_exposure(one)
        if axis != "pipeline" and calls  # those are the schedule's
    ]
    return Work(_joined(products), phase["memory_bound_bytes"], phase["launches"], _joined(collectives))


def _by_exposure(one: Mapping[str, int]) -> Iterator[tuple[float, int, int]]:
    """Collectives that a product hides, and those that none does: share that is hidden, calls, bytes."""
    calls, nbytes = one.get("hidden_calls", 0), one.get("hidden_bytes", 0)
    yield from ((1.0, calls, nbytes), (0.0, one["calls"] - calls, one["bytes"] - nbytes))


def _matmuls(product: Mapping[str, Any]) -> list[Matmul]:
    """Of a product or of a fused attention kernel, forward or backward."""
    operator, shapes, calls = product["operator"], product["shapes"], product["calls"]
    if "attention" in operator:
        # shapes of the gradient, then of query, key and value; or of the latter
        (rows, heads, queries, width), (_, _, keys, _) = shapes[1:3] if "backward" in operator else shapes[:2]
        count = calls * product["computed"]
        scores = Matmul(queries, keys, width, rows * heads, count, fused=True)
        mixed = Matmul(queries, width, keys, rows * heads, count, fused=True)
        # backward: the scores again, the gradients of probabilities, values, queries and keys
        return [scores, mixed] if "backward" not in operator else [scores, scores, mixed, mixed, mixed]
    if operator.startswith("grouped"):  # as if all groups were alike; the ends of these come last
        (rows, depth), other, (groups,) = shapes
        if len(other) == 2:  # gradients of matrices: the rows are summed over
            return [Matmul(depth, other[1], rows // groups, groups, calls)]
        return [Matmul(rows // groups, math.prod(other[1:]) // depth, depth, groups, calls)]
    fp8 = operator == "_scaled_mm"  # its scales follow
    first, second = shapes[:2] if fp8 else shapes[-2:]
    batch = first[0] if len(first) == 3 else 1
    return [Matmul(first[-2], second[-1], first[-1], batch, calls, fp8=fp8)]


def _at(size: int, one: Any, two: Any) -> Any:
    """What is `one` at 1 and `two` at 2, at `size`: each number lies on a line."""
    if isinstance(one, (str, bool)):
        return one
    if isinstance(one, (int, float)):
        return one + (size - 1) * (two - one)
    if isinstance(one, tuple):
        parts = [_at(size, *both) for both in zip(one, two, strict=True)]
        return type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
    return replace(one, **{name: _at(size, value, getattr(two, name)) for name, value in vars(one).items()})
