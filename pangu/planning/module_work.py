"""What each kind of module of this program does, counted in dry runs of small pieces of the real step.

A model of five layers is cut into four chunks on two stages: the embedding and a layer; one layer; two layers; one and
the head. What the third chunk does more than the second is a layer's work, and the others follow. Micro-batches of two
and of three sequences tell what is fixed and what each sequence adds: all larger ones lie on the line through them; a
single one is counted where it is asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from pangu.config.expert_layout import least_data
from pangu.config.optimizer import UPDATED_AT_ONCE
from pangu.config.schema import RunConfig
from pangu.dryrun.cache import cache_folder, identify, one_process, read_cached, write_cached
from pangu.dryrun.roles import run_jobs, with_progress
from pangu.planning.module_reports import (
    Modules,
    Report,
    at_size,
    inner,
    modules_of,
    on_more_ranks,
    recomputed,
    without_neighbours,
)
from pangu.planning.workload import ModuleWork
from pangu.topology.layout import Layout
from pangu.zero.states import BYTES

log = logging.getLogger("pangu")
Job = tuple[Mapping[str, Any], int]
"""A composed configuration and a rank."""
_PIECES = {
    "zero": 0,
    "zero_group": None,
    "pipeline": 2,
    "virtual": 2,
    "schedule": "zb_v",
    "layers": [1, 1, 2, 1],
    "allowed": (),
    "auto": False,
}
"""Gradients of weights are computed apart from those of inputs, and so counted apart; for one micro-batch at once."""
_SINGLE, _SEVERAL = (1,), (2, 3)
"""Sequences of the micro-batches that are counted, where one or where more are asked for. A single one is contiguous
whichever way it is turned: copies that turn tensors begin with two."""
_Sizes = tuple[int, ...]
_LAYERS = 3
"""Of the second stage."""
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
    context_kind: str = "auto"
    """How, as `parallel.context_kind`."""
    expert: int = 1
    """Ranks that share the experts."""
    expert_tensor: int = 0
    """Tensor ranks that share each expert; 0: all."""
    dense: bool = False
    """A layer without experts, in a model whose others have some."""
    loss_chunks: int = 1
    """Of the tokens of a micro-batch, of which the logits of one exist at a time; 1: all logits, which are kept for
    backward; 0: chunks of a number of tokens that `loss.chunk` says."""

    @property
    def layout(self) -> Layout:
        """The smallest that cuts a layer so."""
        data = least_data(self.expert, self.expert_tensor, self.tensor, self.context)
        return Layout(
            self.tensor,
            data=data,
            sequence=self.sequence,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
        )

    @property
    def counted(self) -> Piece:
        """The same with experts on as few ranks as tell what they do on so many."""
        least = next((ranks for ranks in range(2, self.expert + 1) if self.expert % ranks == 0), 1)
        return self._replace(expert=least)

    @property
    def without_recompute(self) -> Piece:
        """The same where nothing is computed again."""
        return self._replace(recompute="none")

    @property
    def without_experts(self) -> Piece:
        """A dense layer, cut alike, without a head."""
        chunks = self.chunks if self.tensor > 1 else 1
        return self._replace(expert=1, expert_tensor=0, dense=True, chunks=chunks, loss_chunks=1)


_Counted = tuple[Piece, _Sizes]


@dataclass
class ModuleCounts:
    """The modules of a configuration's model on one rank, however they are cut, for micro-batches of any size."""

    config: RunConfig
    exact: bool = True
    """Each number of ranks that share the experts is counted; false: few of them, from which the others follow. Memory
    that layers work with is then said to be more than it is."""
    note_progress: Callable[[], None] = lambda: None
    """Called after each dry run."""
    _reports: dict[_Counted, list[Report]] = field(default_factory=dict)
    """Of the second stage with each of the sizes, then, if its ends are others, of the first stage."""
    _of_sizes: dict[_Counted, list[Modules]] = field(default_factory=dict)
    _modules: dict[tuple[Piece, int], Modules] = field(default_factory=dict)

    def count(self, pieces: Collection[tuple[Piece, int]]) -> None:
        """Count what has not been counted of pieces, for micro-batches of so many sequences, on all cores; what was
        counted before is read from the user's cache folder.

        Raises:
            DryRunError: if the dry run is unavailable here, or the model cannot be carried out so.
        """
        counted = {(self._counted_for(piece), sizes) for piece, size in pieces for sizes in self._sizes(piece, size)}
        wanted = counted | {(piece.without_recompute, sizes) for piece, sizes in counted}
        jobs = {one: _jobs(self.config, *one) for one in sorted(wanted - set(self._reports))}
        if not jobs:
            return
        folder = cache_folder()
        files = {one: folder / f"modules-{identify(_inputs(those))}.json" for one, those in jobs.items()}
        if not self._missing(files):
            return
        with one_process(folder):
            missing = self._missing(files)  # another process may have counted meanwhile
            jobs = {one: jobs[one] for one in missing}
            for one, reports in _carry_out(jobs, self.note_progress) if missing else ():
                self._reports[one] = reports
                write_cached(files[one], reports)

    def _missing(self, files: Mapping[_Counted, Path]) -> list[_Counted]:
        """Read what was counted before; what was not."""
        self._reports |= {one: reports for one, file in files.items() if (reports := read_cached(file))}
        return [one for one in files if one not in self._reports]

    def of(self, piece: Piece, size: int) -> Modules:
        """The modules for micro-batches of `size` sequences; of a dense layer beside others it alone."""
        if (piece, size) not in self._modules:
            self.count([(piece, size)])
            counted = self._counted_for(piece)
            modules = self._at(counted, size)
            if counted != piece:
                times, fixed = piece.expert // counted.expert, self._at(counted, 0)
                modules = {kind: on_more_ranks(module, fixed[kind], times) for kind, module in modules.items()}
            if "head" in modules:
                modules = modules | {"head": self._with_logits(modules["head"], piece)}
                with_ends = counted if _counts_ends(self.config, counted) else counted.without_recompute
                modules = without_neighbours(modules, self._at(with_ends, size)["layer"])
            self._modules[piece, size] = modules
        return self._modules[piece, size]

    def _with_logits(self, head: ModuleWork, piece: Piece) -> ModuleWork:
        """The head, which works with as many logits at a time as are asked for, not those that were counted."""
        if piece.loss_chunks:
            return head
        chunk = self.config.loss.chunk
        assert isinstance(chunk, int)
        columns = -(-self.config.model.vocab // piece.tensor)
        more = (chunk - _even_chunk(self.config, piece)) * columns * BYTES[self.config.precision.compute]
        return replace(head, working=head.working._replace(forward=head.working.forward + more))

    def _counted_for(self, piece: Piece) -> Piece:
        return piece if self.exact else piece.counted

    def _sizes(self, piece: Piece, size: int) -> set[_Sizes]:
        """What has to be counted for micro-batches of `size` sequences. Of experts on more ranks also what is fixed."""
        asked = _SINGLE if size == 1 else _SEVERAL
        return {asked} if self._counted_for(piece) == piece else {asked, _SEVERAL}

    def _at(self, piece: Piece, size: int) -> Modules:
        """The modules of a piece that is counted; 0: what is fixed of them."""
        if size == 1:
            return self._of(piece, _SINGLE)[0]
        two, three = self._of(piece, _SEVERAL)
        return {kind: at_size(size - 1, two[kind], three[kind]) for kind in two}

    def _of(self, piece: Piece, sizes: _Sizes) -> list[Modules]:
        """The modules for micro-batches of each of the sizes."""
        if (piece, sizes) not in self._of_sizes:
            reports = self._reports[piece, sizes]
            if piece.dense:
                counted = [{"layer": inner(report)[1]} for report in reports]
            elif len(reports) > len(sizes):
                stages = zip(reports[: len(sizes)], reports[len(sizes) :], strict=True)
                counted = [modules_of(*of_size) for of_size in stages]
            else:
                counted = self._of(piece.without_recompute, sizes)
            if piece.recompute != "none":
                of_sizes = zip(reports[: len(sizes)], counted, self._of(piece.without_recompute, sizes), strict=True)
                counted = [whole | {"layer": recomputed(one, plain["layer"])} for one, whole, plain in of_sizes]
            self._of_sizes[piece, sizes] = counted
        return self._of_sizes[piece, sizes]

    def update(self, piece: Piece, size: int, numbers: int) -> tuple[float, float, float]:
        """Of a layer that has so many parameters as it is counted, without any sharding: bytes that the optimizer's
        step reads and writes for each of them, its launches, and bytes that it works with for each that is updated at a
        time."""
        self.count([(piece, size)])
        sizes = _SINGLE if size == 1 else _SEVERAL
        update = self._reports[self._counted_for(piece).without_recompute, sizes][0]["update"]
        total = _LAYERS * numbers
        moved, launches = update["memory_bound_bytes"] / total, update["launches"] / _LAYERS
        return moved, launches, update["working_bytes"] / min(total, UPDATED_AT_ONCE)


def _carry_out(
    jobs: Mapping[_Counted, Sequence[Job]], note_progress: Callable[[], None]
) -> Iterator[tuple[_Counted, list[Report]]]:
    """Carry out all jobs together, which may take minutes, and yield the reports of each piece.

    Raises:
        DryRunError: if the dry run is unavailable here, or one fails.
    """
    everything = [job for those in jobs.values() for job in those]
    reports = with_progress(run_jobs(everything, joins=True), len(everything), note_progress)
    for one, those in jobs.items():
        yield one, [{what: report[what] for what in ("phases", "update")} for report in islice(reports, len(those))]


def _jobs(config: RunConfig, piece: Piece, micro_sizes: _Sizes) -> list[Job]:
    """What has to be carried out."""
    model = config.model.without_experts if piece.dense else config.model
    values = {**asdict(replace(config, model=model)), "dry_run": True}
    layout = piece.layout
    parallel = {
        "tensor": piece.tensor,
        "data": layout.data,
        "context": piece.context,
        "context_kind": piece.context_kind,
        "sequence": piece.sequence,
        "overlap_chunks": piece.chunks,
        "expert": piece.expert,
        "expert_tensor": piece.expert_tensor or None,
        **_PIECES,
    }
    # a kernel that a dry run cannot carry out keeps as much
    attention = "auto" if model.attention == "flash_attn" else model.attention
    changes: dict[str, dict[str, Any]] = {
        "model": {"layers": _LAYERS + 2, "attention": attention, "dense_layers": 0, "expert_every": 1},
        "parallel": parallel,
        "memory": {"recompute": piece.recompute, "offload": []},
        "precision": {"reduce": "fp32"},  # replicas that share experts send nothing else
        "train": {"frozen": ()},
        "checkpoint": {"upcycle": False},
    }
    values |= {group: {**values[group], **change} for group, change in changes.items()}
    stages = (1, 0) if _counts_ends(config, piece) else (1,)
    sizes = ({"global_size": 3 * size * layout.data, "micro_size": size} for size in micro_sizes)
    losses = ({"chunk": _loss_chunk(config, piece, size)} for size in micro_sizes)
    batches = [{**values, "batch": size, "loss": loss} for size, loss in zip(sizes, losses, strict=True)]
    return [(batch, stage * layout.tensor * layout.replicas) for stage in stages for batch in batches]


def _counts_ends(config: RunConfig, piece: Piece) -> bool:
    """Whether embedding and head are counted with this layer, or with the same one when all is kept: a query layer
    among layers of experts is recomputed unlike them."""
    unlike = config.model.query_layer is not None and config.model.experts is not None
    return not piece.dense and (piece.recompute == "none" or unlike)


def _loss_chunk(config: RunConfig, piece: Piece, micro_size: int) -> int | None:
    """`loss.chunk` of a micro-batch of so many sequences that is counted."""
    tokens = config.model.sequence // piece.context
    if piece.loss_chunks:
        return None if piece.loss_chunks == 1 else tokens * micro_size // piece.loss_chunks
    return _even_chunk(config, piece)


def _even_chunk(config: RunConfig, piece: Piece) -> int:
    """At most as many tokens as `loss.chunk`, and a divisor of those of a sequence: so micro-batches of all sizes have
    chunks of one shape, and what is counted of them lies on a line."""
    assert isinstance(config.loss.chunk, int)
    tokens = config.model.sequence // piece.context
    return max(size for size in range(1, min(config.loss.chunk, tokens) + 1) if tokens % size == 0)


def _inputs(jobs: Sequence[Job]) -> list[Any]:
    """Everything that the reports of dry runs depend on."""
    return [[{group: values[group] for group in _MATTERS}, rank] for values, rank in jobs]
