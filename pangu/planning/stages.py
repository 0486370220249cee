"""What each pipeline stage would hold, do and send."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart, place_tensors
from pangu.pipeline.actions import SENDS
from pangu.pipeline.simulate import simulate
from pangu.pipeline.stages import Stages
from pangu.planning.program import message_bytes
from pangu.topology.layout import Layout
from pangu.topology.placement import TensorRank
from pangu.zero.states import sum_bytes


@dataclass(frozen=True)
class StageView:
    """One stage, as one of its tensor ranks sees it."""

    chunks: tuple[str, ...]
    """Layers of each chunk and what stands beside them, e.g. `embedding, layers 0-3`."""
    idle: float
    """Share of the step, simulated with times in proportion to FLOPs."""
    held: float
    """Most activations that it holds, in micro-batches of all its chunks."""
    sends: dict[int, int]
    """Stage -> bytes of activations and gradients that it is sent in each micro-batch."""
    shared: dict[str, int]
    """Tensor that other stages hold too -> bytes of its gradient, which they sum once per step."""


def view_stages(config: RunConfig, layout: Layout, stages: Stages) -> list[StageView]:
    """Return every stage of the pipeline, from the model and the schedule that a run would use, without a dry run."""
    idle, held = simulate(stages.schedule, stages.durations).stage_bubbles, stages.schedule.peak_live()
    message, wide, rank = sum(message_bytes(config)), sum_bytes(config), TensorRank(0, layout.tensor, layout.sequence)
    views = []
    for stage, actions in enumerate(stages.schedule.actions):
        parts = list(stages.of(stage).values())
        peers = Counter(action.peer for action in actions if action.kind in SENDS and action.micro == 0)
        sends = {peer: count * message for peer, count in peers.items() if peer is not None}
        table = place_tensors(config.model, parts, rank)
        shared = {entry.name: wide * math.prod(entry.local_shape) for entry in table if entry.shared is not None}
        views.append(StageView(tuple(map(_named, parts)), idle[stage], held[stage] / layout.virtual, sends, shared))
    return views


def _named(part: ModelPart) -> str:
    first, last = part.layers[0], part.layers[-1]
    layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    return ", ".join(["embedding"] * part.first + [layers] + ["head"] * part.last)
