"""What one rank does in a step, as plain data that says nothing of how fast a device is.

`published` makes it from formulas, `module_work` from the operations of a real step; `cost` makes seconds and bytes
of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import NamedTuple, Protocol

from pangu.pipeline.spans import Axis as Axis
from pangu.pipeline.spans import Collective as Collective
from pangu.pipeline.spans import Matmul as Matmul
from pangu.pipeline.spans import Replicas as Replicas
from pangu.pipeline.spans import Work as Work


class Working(NamedTuple):
    """Most bytes that a module needs while it is computed and no longer."""

    forward: float = 0.0
    backward_input: float = 0.0
    backward_weight: float = 0.0
    """This and the one before where a schedule computes the gradients of weights apart."""
    backward: float = 0.0
    """Of both at once."""


NOTHING = Working()


@dataclass(frozen=True)
class ModuleWork:
    """A module of the model (embedding, layer, head) on one rank."""

    forward: Work
    backward_input: Work
    backward_weight: Work
    recompute: Work = field(default_factory=Work)
    """What backward computes again before it begins."""
    saved_bytes: float = 0.0
    """Activations that are kept from forward to backward for one micro-batch."""
    deferred_bytes: float = 0.0
    """Kept from the gradient of the input to those of the weights, where these are computed apart."""
    working: Working = NOTHING
    """What is there besides: of the embedding, the head and `inner` 0 where a layer next to them takes more."""
    parameters: float = 0.0
    """Numbers that this rank holds of its weights before any sharding over replicas."""
    experts: float = 0.0
    """The same of experts that the layout splits, whose replicas are others and which `parameters` leave out."""
    forward_only: float = 0.0
    """Those of `parameters` that backward does not read (or has still, from the forward just before it)."""

    @property
    def working_bytes(self) -> float:
        """Most that is there besides while it is computed."""
        return max(self.working)


class Keeps(Protocol):
    """What `working_beside` asks of a module, as in `ModuleWork`."""

    @property
    def saved_bytes(self) -> float: ...

    @property
    def deferred_bytes(self) -> float: ...

    @property
    def working(self) -> Working: ...


def not_kept(saved: float, deferred: float) -> Working:
    """What modules that keep so much do not keep while one before them works: in forward they have not begun, and of
    their backward is left what the gradients of weights need that are still to come."""
    return Working(saved, saved - deferred, deferred, saved)


def working_beside(modules: Sequence[Keeps], splits_backward: bool) -> list[tuple[float, ...]]:
    """Of each module of a chunk, in the order of forward, what is there while it works besides all that the chunk keeps
    of a micro-batch: in forward, in backward's part for the input and in that for the weights, or in forward and in
    backward."""
    saved = deferred = 0.0
    beside: list[tuple[float, ...]] = []
    for module in reversed(modules):
        most = Working(*map(sub, module.working, not_kept(saved, deferred)))
        beside.append(most[:3] if splits_backward else (most.forward, most.backward))
        saved, deferred = saved + module.saved_bytes, deferred + module.deferred_bytes
    return beside[::-1]


@dataclass(frozen=True)
class StepWork:
    """What a stage does once a step besides the micro-batches."""

    parameters: float = 0.0
    """Numbers that a rank holds of its weights before any sharding over replicas."""
    experts: float = 0.0
    """As in `ModuleWork`."""
    update_bytes: float = 0.0
    """Read and written by the optimizer."""
    launches: float = 0.0
    collectives: tuple[Collective, ...] = ()
    host_bytes: float = 0.0
    """Sent to and from host memory, beside nothing else."""
    host_update_bytes: float = 0.0
    """Read and written by an optimizer whose state is in host memory."""
    state_bytes: float = 0.0
    """Parameters, gradients and optimizer state."""
    communicators: int = 0
    """Groups in which the stage sends, each with buffers of its own."""
    passing: tuple[tuple[float, float], ...] = ()
    """Of whole parameters and gradients that come and go, at most: in forward and in backward of each of its chunks.
    (), and so the next one: there are none."""
    sums: tuple[tuple[float, ...], ...] = ()
    """Of whole gradients of each of its chunks that stay from its first backward to the end of the micro-batches: those
    that are there once that backward has come to each module, in the order of forward."""
    sums_ahead: float = 0.0
    """Of these, what the head makes in forward already, as its loss is computed in chunks."""
    update_working_bytes: float = 0.0
    """Besides states, once the micro-batches are done."""


@dataclass(frozen=True)
class Workload:
    """A step of all stages."""

    modules: Mapping[str, ModuleWork]
    """By kind, e.g. `embedding`, `layer`, `recomputed`, `dense layer`, `head`."""
    chunks: tuple[Mapping[str, int], ...]
    """Chunk in model order -> how many modules of each kind it has."""
    orders: tuple[tuple[str, ...], ...]
    """Chunk -> the kinds of its modules in the order of forward."""
    steps: tuple[StepWork, ...]
    """Of each stage."""
    message_bytes: float
    """What a stage sends to the next one in a micro-batch."""
    more_saved: tuple[float, ...] = ()
    """Of each chunk, bytes that it saves for a micro-batch besides what its modules do (negative: less); (): none."""
