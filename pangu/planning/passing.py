"""Whole weights and gradients of ZeRO-2 and 3 that are there for a while only (Rajbhandari et al. 2020, section 5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from pangu.planning.workload import NOTHING, Working, working_beside
from pangu.zero.grouping import IN_FLIGHT, Sharding, buffer_table


class Module(NamedTuple):
    """What a module has on one rank."""

    parameters: float
    """Before any sharding over replicas, as the next ones."""
    experts: float = 0.0
    """Of experts that the layout splits, which `parameters` leave out."""
    saved_bytes: float = 0.0
    """This and the next ones as in `ModuleWork`."""
    deferred_bytes: float = 0.0
    working: Working = NOTHING


class Chunk(NamedTuple):
    """Modules that follow one another in forward."""

    layers: tuple[Module, ...]
    embedding: Module | None = None
    """Without `words`; None: it is not here."""
    head: Module | None = None
    """The same."""
    words: float | None = None
    """Of the words' table that embedding and head share; None: it is part of their numbers."""

    @property
    def has_both(self) -> bool:
        """Whether embedding and head have one table here."""
        return None not in (self.embedding, self.head, self.words)

    def numbers(self, parameters: bool, experts: bool) -> float:
        """All weights of the chunk: those that all replicas share, and those of experts that the layout splits, where
        it is asked for them."""
        tables = (self.embedding is not None) + (self.head is not None and not self.has_both)
        modules = (*self.layers, *filter(None, (self.embedding, self.head)))
        whole = sum(module.parameters for module in modules) + (self.words or 0.0) * tables
        return whole * parameters + sum(layer.experts for layer in self.layers) * experts


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


_TABLE = 0
"""Place of the words' table that stands alone."""


class _Flat(NamedTuple):
    """A flat parameter."""

    place: int
    numbers: float
    experts: bool


@lru_cache(maxsize=10_000)
def most_passing(
    chunk: Chunk, dense: Passing, experts: Passing, formats: Formats, steps: Steps, before: Chunk | None = None
) -> float:
    """Bytes by which a chunk needs more at its fullest moment because of what passes while its modules compute one
    after the other: weights that are gathered for the one that computes and for the next (`zero.unshard`); where each
    micro-batch is reduced also gradients that are summed, and sent once they are complete (`zero.gradients`). What is
    saved and worked with at that moment may be less than at the fullest without them. `before`: the other chunk whose
    backward comes before this one's, and leaves what it sent last."""
    names = [module for module in (chunk.embedding, *chunk.layers, chunk.head) if module is not None]
    saved, beside = [module.saved_bytes for module in names], working_beside(names, steps.splits_backward)
    modules = list(_modules(chunk))
    first, last = int(chunk.embedding is not None), len(modules) - 1  # backward of a lookup reads no weights
    kinds = dense, experts
    whole, sums = set[_Flat](), set[_Flat]()
    sent = _messages(before, kinds, formats) if before is not None and steps.reduces else ()
    flying, most = deque(sent, IN_FLIGHT), 0.0

    def measure(activations: float) -> None:
        """Besides all that the chunk keeps."""
        nonlocal most
        weights, gradients = (sum(flat.numbers for flat in flats) for flats in (whole, sums))
        most = max(most, formats.weights * weights + formats.sums * gradients + sum(flying) + activations)

    def compute(place: int, following: int, part: int) -> None:
        """And gather for the next one."""
        after = modules[following]
        whole.update(flat for flat in (*modules[place], *after) if kinds[flat.experts].weights)
        measure(beside[place][part])
        whole.difference_update(set(modules[place]) - set(after))

    def begin(*flats: _Flat) -> None:
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

    for _ in range(min(2, steps.micro_batches)):  # what the first one sent last is there when the next one begins
        for place in range(len(modules)):
            if place == last and chunk.head is not None and steps.chunks_loss:
                begin(*modules[place])
            compute(place, min(place + 1, last), 0)
        for place in range(last, -1, -1):
            if place >= first:
                begin(*modules[place])
                compute(place, max(place - 1, first), 1)
            send(place)
        whole.clear()
    return max(0.0, most - max(0.0, *map(max, beside)))


def _complete(modules: Sequence[tuple[_Flat, ...]], place: int) -> Iterator[_Flat]:
    """Flat parameters whose gradients are complete with those of a module, in the order in which they are sent."""
    unfinished = {flat for before in modules[:place] for flat in before}
    return (flat for flat in reversed(modules[place]) if flat not in unfinished)


def _message(flat: _Flat, kinds: tuple[Passing, Passing], formats: Formats) -> float:
    """Bytes of its gradients while they are reduced, and of this rank's part of the result."""
    return formats.messages * flat.numbers * (1 + 1 / kinds[flat.experts].shards)


def _messages(chunk: Chunk, kinds: tuple[Passing, Passing], formats: Formats) -> Iterator[float]:
    """Those of a chunk's backward, in order."""
    modules = list(_modules(chunk))
    flats = (flat for place in reversed(range(len(modules))) for flat in _complete(modules, place))
    return (_message(flat, kinds, formats) for flat in flats if kinds[flat.experts].sums)


def sums_of(chunks: Sequence[Chunk], dense: Passing, experts: Passing, size: int) -> tuple[tuple[float, ...], ...]:
    """`StepWork.sums` of the chunks of a stage, of `size` bytes a number."""
    kinds, begun = (dense, experts), set[_Flat]()
    if not any(kind.sums for kind in kinds):
        return ()
    of_chunks = []
    for chunk in reversed(chunks):
        begun = {flat for flat in begun if flat.place == _TABLE}  # another chunk adds to the same
        before, sums = sum(flat.numbers for flat in begun), list[float]()
        for flats in reversed(list(_modules(chunk))):
            begun.update(flat for flat in flats if kinds[flat.experts].sums)
            sums.append(size * (sum(flat.numbers for flat in begun) - before))
        of_chunks.append(tuple(reversed(sums)))
    return tuple(reversed(of_chunks))


def _modules(chunk: Chunk) -> Iterator[tuple[_Flat, ...]]:
    """The flat parameters of each module in the order of forward."""
    number = 0

    def flat(numbers: float, experts: bool = False) -> _Flat:
        nonlocal number
        number += 1
        return _Flat(number, numbers, experts)

    table: tuple[_Flat, ...] = ()
    if chunk.embedding is not None:
        if chunk.has_both:
            table = (flat(chunk.embedding.parameters + (chunk.words or 0.0)),)
            yield table
        else:
            apart = () if chunk.words is None else (_Flat(_TABLE, chunk.words, False),)
            yield *apart, flat(chunk.embedding.parameters)
    for layer in chunk.layers:
        apart = (flat(layer.experts, True),) if layer.experts else ()
        yield flat(layer.parameters), *apart
    if chunk.head is not None:
        if chunk.words is not None and not table:
            table = (_Flat(_TABLE, chunk.words, False),)
        yield *table, flat(chunk.head.parameters)
