"""Puts a trainer together from a configuration and a mesh."""

from __future__ import annotations

from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.layers.builder import Builder
from pangu.layers.deferred import WeightGradients
from pangu.layers.kernels import choose_attention
from pangu.models.frozen import frozen_parameters
from pangu.models.language_model import Options, build_model
from pangu.pipeline.stages import Stages, plan_stages
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from pangu.training.step import Trainer


def assemble(config: RunConfig, mesh: Mesh, stages: Stages | None = None, kernel: str | None = None) -> Trainer:
    """The trainer of this rank: its chunks of the model with their first values, and a fresh optimizer.

    Args:
        config: the run.
        mesh: live groups and device.
        stages: from `plan_stages`, if it is at hand.
        kernel: from `choose_attention`, if it is at hand.

    Raises:
        ConfigError: if the pipeline's schedule or the attention kernel does not allow what is asked for.
    """
    stages = stages or plan_stages(config, mesh.layout)
    options = Options.of(config, kernel or choose_attention(config.model, config.precision.compute, mesh.device))
    later = WeightGradients() if stages.schedule.splits_backward else None
    build = Builder(PlacementTable(), region=TensorRegion.of(mesh, config.parallel.overlap_chunks), later=later)
    parts = list(stages.of(mesh.at.pipeline).values())
    model, table = build_model(config.model, options, build, parts)
    return Trainer(config, mesh, model, table, stages, later, frozen_parameters(config.train.frozen, table))
