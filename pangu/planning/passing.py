"""Whole weights and gradients of ZeRO-2 and 3 that are there for a while only (Rajbhandari et al. 2020, section 5)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from pangu.config.model import ModelConfig
from pangu.models.parameters import ModelPart, parameters_by_module, place_tensors
from pangu.planning.workload import NOTHING, Working, working_beside
from pangu.topology.experts import ExpertRank
from pangu.topology.placement import TensorRank
from pangu.zero.grouping import IN_FLIGHT, Sharding, buffer_table, divide


class Module(NamedTuple):
    """Memory of a module on one rank, as in `ModuleWork`."""

    saved_bytes: float = 0.0
    deferred_bytes: float = 0.0
    working: Working = NOTHING


class Flat(NamedTuple):
    """A flat parameter of a stage."""

    place: int
    numbers: int
    """Before any sharding over replicas."""
    experts: bool
    """Whether it is of experts that the layout splits."""
    several: bool
    """Whether several chunks use it, so that it is reduced at the end of the step."""


class Chunk(NamedTuple):
    """Modules that follow one another in forward."""

    modules: tuple[Module, ...]
    flats: tuple[tuple[Flat, ...], ...]
    """The flat parameters that each module uses."""
    embedding: bool
    """Whether the first module is the embedding, whose backward reads no weights."""
    head: bool

    def gathers(self, experts: bool) -> int:
        """Return the numbers of experts, or of all other weights, that ZeRO-3 gathers for one micro-batch: a flat
        parameter is resharded after each use, unless the next module uses it too."""
        modules = [{flat for flat in flats if flat.experts == experts} for flats in self.flats]
        # the head's backward follows its forward, and a lookup's reads no weights
        backward = modules[self.embedding : len(modules) - self.head][::-1]
        whole, total = set[Flat](), 0
        for phase in (modules, backward):
            for module in phase:
                total += sum(flat.numbers for flat in module - whole)
                whole = module
            whole = modules[-1] if self.head else set()
        return total

    def gathered(self, kinds: tuple[Passing, Passing], lookups: bool) -> int:
        """Return the numbers that it holds once it is gathered; `lookups`: those of the embedding too."""
        modules = self.flats[self.embedding and not lookups :]
        flats = {flat for flats in modules for flat in flats}
        return sum(flat.numbers for flat in flats if kinds[flat.experts].weights)


@lru_cache(maxsize=1000)
def divided(
    model: ModelConfig, parts: tuple[ModelPart, ...], rank: TensorRank, experts: ExpertRank | None, bucket: float
) -> tuple[tuple[tuple[Flat, ...], ...], ...]:
    """Return the flat parameters of each module of each of a stage's chunks, as a run divides them."""
    table = place_tensors(model, list(parts), rank, experts=experts)
    uses = {chunk: parameters_by_module(model, table, part) for chunk, part in enumerate(parts)}
    places = count()

    def make(chunk: int, names: list[str]) -> Flat:
        numbers = sum(math.prod(table.shapes[name]) for name in names)
        return Flat(next(places), numbers, table.is_expert(names[0]), chunk < 0)

    _, flats_of = divide(table, uses, bucket, make)
    chunks = []
    for modules in flats_of.values():
        bias = modules.pop("position_bias", [])  # the first module's, as far as memory goes
        first, *others = modules.values()
        # gradients are sent in the reverse of the order in which flat parameters were made
        chunks.append(tuple(tuple(sorted(flats)) for flats in ([*bias, *first], *others)))
    return tuple(chunks)


class Stored(NamedTuple):
    """Bytes of a stage on the device."""

    lasting: float
    passing: tuple[tuple[float, float], ...] = ()
    """This and what follows as in `StepWork`."""
    sums: tuple[tuple[float, ...], ...] = ()
    sums_ahead: float = 0.0


class Passing(NamedTuple):
    """What of some weights is there for a while only."""

    weights: bool
    sums: bool
    """Whole sums of gradients."""
    shards: int
    """Ranks that share them."""

    @classmethod
    def of(cls, sharding: Sharding) -> Passing:
        """By the table of buffers."""
        lasting = {row.name for row in buffer_table(sharding.size, True, sharding, True) if row.lasting}
        return cls("weights" not in lasting, "total" not in lasting, sharding.size)


class Formats(NamedTuple):
    """Bytes of a number."""

    weights: int
    sums: int
    """Of gradients over micro-batches."""
    messages: int
    """Of gradients that are sent."""


class Steps(NamedTuple):
    """How a stage goes through the micro-batches."""

    micro_batches: int
    reduces: bool
    """Gradients after each."""
    splits_backward: bool
    chunks_loss: bool
    """The head's gradients are made in forward, as its loss is computed in chunks."""
    overlap: bool
    """The next module's weights are gathered while one computes, and gradients are reduced meanwhile."""


@lru_cache(maxsize=10_000)
def most_passing(
    chunk: Chunk, dense: Passing, experts: Passing, formats: Formats, steps: Steps, before: Chunk | None = None
) -> float:
    """Return the bytes by which transient weights and gradients raise the peak of a chunk (see `zero.unshard` and
    `zero.gradients`). The backward of `before`, another chunk, precedes this one's and leaves what it sent last."""
    saved = [module.saved_bytes for module in chunk.modules]
    beside = working_beside(chunk.modules, steps.splits_backward)
    modules = chunk.flats
    first, last = int(chunk.embedding), len(modules) - 1  # backward of a lookup reads no weights
    kinds = dense, experts
    whole, sums = set[Flat](), set[Flat]()
    sent = _messages(before, kinds, formats) if before is not None and steps.reduces and steps.overlap else ()
    flying, most = deque(sent, IN_FLIGHT), 0.0

    def measure(activations: float) -> None:
        """Besides all that the chunk keeps."""
        nonlocal most
        weights, gradients = (sum(flat.numbers for flat in flats) for flats in (whole, sums))
        most = max(most, formats.weights * weights + formats.sums * gradients + sum(flying) + activations)

    def compute(place: int, following: int, part: int) -> None:
        """And gather for the next one."""
        after = modules[following]
        gathered = (*modules[place], *after) if steps.overlap else modules[place]
        whole.update(flat for flat in gathered if kinds[flat.experts].weights)
        measure(beside[place][part])
        whole.difference_update(set(modules[place]) - set(after))

    def begin(*flats: Flat) -> None:
        """The sums of their gradients."""
        sums.update(flat for flat in flats if steps.reduces and kinds[flat.experts].sums)

    def send(place: int) -> None:
        """The gradients that no module before it adds to."""
        for flat in _complete(modules, place):
            if place < first:  # the words' begin when those of the positions, looked up after them, have been sent
                begin(flat)
                measure(beside[place][1])
            if flat in sums:
                if formats.messages == formats.sums:
                    sums.discard(flat)
                flying.append(_message(flat, kinds, formats))
                measure(-sum(saved[place + 1 :]))
                sums.discard(flat)
                if not steps.overlap:
                    flying.clear()

    for _ in range(min(2, steps.micro_batches)):  # what the first one sent last is there when the next one begins
        for place in range(len(modules)):
            if place == last and chunk.head and steps.chunks_loss:
                begin(*modules[place])
            compute(place, min(place + 1, last), 0)
        for place in range(last, -1, -1):
            if place >= first:
                begin(*modules[place])
                compute(place, max(place - 1, first), 1)
            send(place)
        whole.clear()
    return max(0.0, most - max(0.0, *map(max, beside)))


def _complete(modules: Sequence[tuple[Flat, ...]], place: int) -> Iterator[Flat]:
    """Flat parameters whose gradients are complete with those of a module, in the order in which they are sent."""
    unfinished = {flat for before in modules[:place] for flat in before}
    return (flat for flat in reversed(modules[place]) if flat not in unfinished and not flat.several)


def _message(flat: Flat, kinds: tuple[Passing, Passing], formats: Formats) -> float:
    """Bytes of its gradients while they are reduced, and of this rank's part of the result."""
    return formats.messages * flat.numbers * (1 + 1 / kinds[flat.experts].shards)


def _messages(chunk: Chunk, kinds: tuple[Passing, Passing], formats: Formats) -> Iterator[float]:
    """Those of a chunk's backward, in order."""
    modules = chunk.flats
    flats = (flat for place in reversed(range(len(modules))) for flat in _complete(modules, place))
    return (_message(flat, kinds, formats) for flat in flats if kinds[flat.experts].sums)


def sums_of(chunks: Sequence[Chunk], dense: Passing, experts: Passing, size: int) -> tuple[tuple[float, ...], ...]:
    """`StepWork.sums` of the chunks of a stage, of `size` bytes a number."""
    kinds, begun = (dense, experts), set[Flat]()
    if not any(kind.sums for kind in kinds):
        return ()
    of_chunks = []
    for chunk in reversed(chunks):
        begun = {flat for flat in begun if flat.several}
        before, sums = sum(flat.numbers for flat in begun), list[float]()
        for flats in reversed(chunk.flats):
            begun.update(flat for flat in flats if kinds[flat.experts].sums)
            sums.append(size * (sum(flat.numbers for flat in begun) - before))
        of_chunks.append(tuple(reversed(sums)))
    return tuple(reversed(of_chunks))
