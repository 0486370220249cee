"""What each pipeline stage would hold, do and send."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart, place_tensors
from pangu.models.size import hidden_state_shapes
from pangu.pipeline.actions import SENDS, Action
from pangu.pipeline.simulate import simulate
from pangu.pipeline.stages import Stages
from pangu.topology.layout import Layout
from pangu.topology.placement import TensorRank
from pangu.zero.states import BYTES, sum_bytes


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
    """Every stage of the pipeline, from the model and the schedule that a run would use."""
    timeline = simulate(stages.schedule, stages.durations)
    idle, held = timeline.stage_bubbles, stages.schedule.peak_live()
    return [
        StageView(
            tuple(_named(part) for part in stages.of(stage).values()),
            idle[stage],
            held[stage] / layout.virtual,
            *_sent(config, layout, list(stages.of(stage).values()), stages.schedule.actions[stage]),
        )
        for stage in range(layout.pipeline)
    ]


def _named(part: ModelPart) -> str:
    first, last = part.layers[0], part.layers[-1]
    layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    return ", ".join(["embedding"] * part.first + [layers] + ["head"] * part.last)


def _sent(
    config: RunConfig, layout: Layout, parts: list[ModelPart], actions: tuple[Action, ...]
) -> tuple[dict[int, int], dict[str, int]]:
    rank = TensorRank(0, layout.tensor, layout.sequence)
    table = place_tensors(config.model, parts, rank)
    size, length = BYTES[config.precision.compute], config.model.sequence
    shapes = hidden_state_shapes(config.model, rank, config.batch.micro_size, length, length)
    message = size * sum(math.prod(shape) for shape in shapes)
    peers = Counter(action.peer for action in actions if action.kind in SENDS and action.micro == 0)
    wide = sum_bytes(config)
    shared = {entry.name: wide * math.prod(entry.local_shape) for entry in table if entry.shared is not None}
    return {peer: count * message for peer, count in peers.items() if peer is not None}, shared
