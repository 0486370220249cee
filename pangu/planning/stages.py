"""What each pipeline stage would hold, do and send."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np

from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.data.batch import make_batch
from pangu.layers.builder import Builder
from pangu.models.language_model import Part, build_model
from pangu.pipeline.actions import Action, Kind
from pangu.pipeline.simulate import simulate
from pangu.pipeline.stages import Stages, carried_shapes
from pangu.planning.sharding import BYTES
from pangu.topology.layout import Layout
from pangu.topology.placement import PlacementTable


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
    idle, held = timeline.stage_bubbles, timeline.peak_live()
    return [
        StageView(
            tuple(_named(part) for part in stages.of(stage).values()),
            idle[stage],
            held[stage] / layout.virtual,
            *_sent(config, layout, list(stages.of(stage).values()), stages.schedule.actions[stage]),
        )
        for stage in range(layout.pipeline)
    ]


def _named(part: Part) -> str:
    first, last = part.layers[0], part.layers[-1]
    layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    return ", ".join(["embedding"] * part.first + [layers] + ["head"] * part.last)


def _sent(
    config: RunConfig, layout: Layout, parts: list[Part], actions: tuple[Action, ...]
) -> tuple[dict[int, int], dict[str, int]]:
    region = TensorRegion(rank=0, size=layout.tensor, sequence=layout.sequence)
    table = build_model(config.model, build=Builder(PlacementTable(), region=region), parts=parts)[1]
    size, batch = BYTES[config.precision.compute], config.batch.micro_size
    micro_batch = make_batch(np.zeros((batch, config.model.sequence + 1), np.int64), range(batch), config.data.packing)
    message = size * sum(math.prod(shape) for shape in carried_shapes(config.model, region, micro_batch))
    sending = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
    peers = Counter(action.peer for action in actions if action.kind in sending and action.micro == 0)
    wide = max(4, size)
    shared = {entry.name: wide * math.prod(entry.local_shape) for entry in table if entry.shared is not None}
    return {peer: count * message for peer, count in peers.items() if peer is not None}, shared
