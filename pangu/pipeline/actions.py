"""What a pipeline stage can be told to do."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """The kinds of action."""

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
    GATHER = "GATHER"
    RELEASE = "RELEASE"
    REDUCE = "REDUCE"

    # that of enumerations is a call in Python, and plans look kinds up millions of times
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
MESSAGES = frozenset({Kind.SEND_ACTIVATION, Kind.RECV_ACTIVATION, Kind.SEND_GRADIENT, Kind.RECV_GRADIENT})


class Action(NamedTuple):
    """One thing that a stage does.

    SEND_ACTIVATION sends the output of `chunk` to the stage of the next chunk, SEND_GRADIENT the gradient of its input
    to the stage of the chunk before. RECV_ACTIVATION posts a receive of the input of `chunk`, RECV_GRADIENT of the
    gradient of its output; the forward or backward that uses it waits for it. Sends never wait. GATHER collects the
    chunk's sharded parameters, RELEASE lets go of what was gathered, REDUCE sums its gradients over the replicas.
    """

    kind: Kind
    chunk: int
    """Index of the model chunk in model order, 0 .. stages * virtual - 1."""
    micro: int | None = None
    """Index of the micro-batch; None for GATHER, RELEASE and REDUCE."""
    peer: int | None = None
    """The other stage of a message; None for all else."""

    def __str__(self) -> str:
        """E.g. `F of chunk 3, micro-batch 7` or `RECV_GRADIENT of chunk 3, micro-batch 7, peer stage 1`."""
        micro = "" if self.micro is None else f", micro-batch {self.micro}"
        return f"{self.kind} of chunk {self.chunk}{micro}" + ("" if self.peer is None else f", peer stage {self.peer}")
