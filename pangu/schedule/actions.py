"""Actions of a pipeline stage, and their durations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """Kind of an action."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of the chunk's input and weights."""
    BACKWARD_INPUT = "I"
    """Gradient of the chunk's input alone; BACKWARD_WEIGHT computes the rest later (Qi et al., arXiv 2401.10241)."""
    BACKWARD_WEIGHT = "W"
    SEND_ACTIVATION = "SEND_ACTIVATION"
    RECV_ACTIVATION = "RECV_ACTIVATION"
    SEND_GRADIENT = "SEND_GRADIENT"
    RECV_GRADIENT = "RECV_GRADIENT"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"

    # str's own hash: that of enumerations is a Python call, and planning looks kinds up millions of times
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
    """Action of a stage on a chunk.

    SEND_ACTIVATION sends the output of `chunk`, SEND_GRADIENT the gradient of its input; RECV_ACTIVATION and
    RECV_GRADIENT post the receives. Sends never wait; the pass that uses a message waits for it. Sharded parameters
    stay gathered from their first use after UNSHARD to RESHARD; without these they are resharded after each use.
    """

    kind: Kind
    chunk: int
    """Chunk in model order, 0 .. stages * virtual_stages - 1."""
    micro: int | None = None
    peer: int | None = None
    """Stage at the other end of a message."""
    reduce: bool = False
    """True if the chunk's gradients become complete in this action and are reduced over the replicas."""

    def __str__(self) -> str:
        """Format the action, e.g. `B of chunk 3, micro-batch 7, reduce` or `RECV_GRADIENT of chunk 3, peer stage 1`."""
        micro = "" if self.micro is None else f", micro-batch {self.micro}"
        peer = "" if self.peer is None else f", peer stage {self.peer}"
        return f"{self.kind} of chunk {self.chunk}{micro}{peer}" + ", reduce" * self.reduce


@dataclass(frozen=True)
class Durations:
    """Seconds (or any other unit) per action; a sequence has one entry per chunk in model order."""

    forward: float | Sequence[float] = 1.0
    backward_input: float | Sequence[float] = 1.0
    backward_weight: float | Sequence[float] = 1.0
    """Duration of BACKWARD_WEIGHT; a BACKWARD takes backward_input + backward_weight."""
    link: float = 0.0
    """Transfer time of a message once sent and awaited; messages do not slow each other, parameter traffic is free."""

    def per_chunk(self, num_chunks: int) -> dict[Kind, list[float]]:
        """Return durations by kind of compute action and chunk; raise `ValueError` for a sequence of wrong length."""

        def values_of(name: str, value: float | Sequence[float]) -> list[float]:
            values = list(value) if isinstance(value, Sequence) else [value] * num_chunks
            if len(values) != num_chunks:
                raise ValueError(f"{name} has {len(values)} entries: needs one per chunk, {num_chunks}")
            return values

        forward = values_of("forward", self.forward)
        to_input = values_of("backward_input", self.backward_input)
        to_weight = values_of("backward_weight", self.backward_weight)
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: [a + b for a, b in zip(to_input, to_weight, strict=True)],
            Kind.BACKWARD_INPUT: to_input,
            Kind.BACKWARD_WEIGHT: to_weight,
        }
