"""Preview of each pipeline stage: its modules, memory, idle time and messages."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from pangu.config.model import ModelConfig
from pangu.config.schema import RunConfig
from pangu.models.parameters import ModelPart, place_tensors
from pangu.pipeline.stages import Stages
from pangu.schedule.actions import SENDS
from pangu.schedule.simulate import simulate
from pangu.schedule.stage_ledger import message_bytes
from pangu.topology.layout import Layout
from pangu.topology.placement import TensorRank
from pangu.zero.states import Formats


@dataclass(frozen=True)
class StageView:
    """Pipeline stage as seen by one of its tensor-parallel ranks."""

    chunks: tuple[str, ...]
    """Modules of each chunk: its layers and those next to them, e.g. `embedding, layers 0-3` or `layer 4, head, 1 mtp
    module`."""
    idle: float
    """Share of the step that is idle, simulated with times in proportion to FLOPs."""
    held: float
    """Peak number of micro-batches whose activations the stage holds, each through all its chunks."""
    sends: dict[int, int]
    """Mapping from a stage to the bytes of activations and gradients sent to it per micro-batch."""
    shared: dict[str, int]
    """Mapping from a tensor that other stages hold too to the bytes of its gradient, summed with them once per step."""


def view_stages(config: RunConfig, layout: Layout, stages: Stages) -> list[StageView]:
    """Return the stages of the pipeline from the model and schedule of a run, without a dry run."""
    idle, held = simulate(stages.schedule, stages.durations).stage_bubbles, stages.schedule.peak_live()
    message, wide = sum(message_bytes(config)), Formats.of(config).sums
    rank = TensorRank(0, layout.tensor, layout.sequence)
    views = []
    for stage, actions in enumerate(stages.schedule.actions):
        parts = list(stages.of(stage).values())
        peers = Counter(action.peer for action in actions if action.kind in SENDS and action.micro == 0)
        sends = {peer: count * message for peer, count in peers.items() if peer is not None}
        table = place_tensors(config.model, parts, rank)
        shared = {entry.name: wide * math.prod(entry.local_shape) for entry in table if entry.shared is not None}
        batches = held[stage] / layout.virtual_stages
        chunks = tuple(_named(part, config.model) for part in parts)
        views.append(StageView(chunks, idle[stage], batches, sends, shared))
    return views


def _named(part: ModelPart, model: ModelConfig) -> str:
    own = [layer for layer in part.layers if layer < model.layers]
    layers = f"layer {own[0]}" if len(own) == 1 else f"layers {own[0]}-{own[-1]}"
    predicts = len(part.layers) - len(own)
    modules = [f"{predicts} mtp module{'s' * (predicts > 1)}"] * (predicts > 0)
    return ", ".join(["embedding"] * part.first + [layers] + ["head"] * part.last + modules)
