"""The actions of a pipeline stage, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the chunk's input and of its weights."""
    BACKWARD_INPUT = "I"
    """Gradient of the chunk's input alone; the weights' follow in BACKWARD_WEIGHT (Qi et al., arXiv 2401.10241)."""
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SEND_ACTIVATION"
    RECV_ACTIVATION = "RECV_ACTIVATION"
    SEND_GRADIENT = "SEND_GRADIENT"
    RECV_GRADIENT = "RECV_GRADIENT"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"

    # that of enumerations is a call in Python, and plans look kinds up millions of times
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
CONTENTS = {
    Kind.SEND_ACTIVATION: "activation",
    Kind.RECV_ACTIVATION: "activation",
    Kind.SEND_GRADIENT: "gradient",
    Kind.RECV_GRADIENT: "gradient",
}
MESSAGES = frozenset(CONTENTS)


class Action(NamedTuple):
    """One action of a stage. SEND_ACTIVATION sends the output of `chunk` to the stage of the next chunk, SEND_GRADIENT
    the gradient of its input to the stage of the chunk before. RECV_ACTIVATION posts a receive of the input of `chunk`,
    RECV_GRADIENT of the gradient of its output; the forward or backward that uses it waits for it. Sends never wait.
    Sharded parameters of a chunk stay whole from their first use after UNSHARD to RESHARD; without these each is
    resharded after its use."""

    kind: Kind
    chunk: int
    """In model order, 0 .. stages * virtual - 1."""
    micro: int | None = None
    peer: int | None = None
    """The other stage of a message."""
    reduce: bool = False
    """Whether the chunk's gradients are reduced over the replicas, as they become complete in this action."""

    def __str__(self) -> str:
        """E.g. `B of chunk 3, micro-batch 7, reduce` or `RECV_GRADIENT of chunk 3, micro-batch 7, peer stage 1`."""
        micro = "" if self.micro is None else f", micro-batch {self.micro}"
        peer = "" if self.peer is None else f", peer stage {self.peer}"
        return f"{self.kind} of chunk {self.chunk}{micro}{peer}" + ", reduce" * self.reduce


@dataclass(frozen=True)
class Durations:
    """Seconds (or any one unit) per action; a sequence has one entry per chunk in model order."""

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    """A BACKWARD takes backward_input + backward_weight."""
    link: float = 0.0
    """Of a message, once it is sent and awaited; messages do not slow each other, those of parameters take none."""

    def per_chunk(self, num_chunks: int) -> dict[Kind, list[float]]:
        """Duration of each kind of compute action, by chunk. Raises ValueError for a sequence of another length."""

        def spread(name: str, value: float | Sequence[float]) -> list[float]:
            values = list(value) if isinstance(value, Sequence) else [value] * num_chunks
            if len(values) != num_chunks:
                raise ValueError(f"{name} has {len(values)} entries: needs one per chunk, {num_chunks}")
            return values

        forward = spread("forward", self.forward)
        to_input = spread("backward_input", self.backward_input)
        to_weight = spread("backward_weight", self.backward_weight)
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: [a + b for a, b in zip(to_input, to_weight, strict=True)],
            Kind.BACKWARD_INPUT: to_input,
            Kind.BACKWARD_WEIGHT: to_weight,
        }
