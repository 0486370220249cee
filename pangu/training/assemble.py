"""Puts a trainer together from a configuration and a mesh."""

from __future__ import annotations

from dataclasses import asdict, replace

from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.data.tokenizers import Tokenizer
from pangu.evaluation.loaded import LoadedModel
from pangu.layers.builder import Builder
from pangu.layers.kernels import attention_kernels
from pangu.layers.weight_gradient_store import WeightGradientStore
from pangu.models.frozen import frozen_parameters
from pangu.models.language_model import Options, build_model
from pangu.pipeline.stages import Stages, plan_stages
from pangu.topology.mesh import Algorithms, Mesh
from pangu.training.choices import Choices
from pangu.training.step import Trainer


def assemble(config: RunConfig, mesh: Mesh, stages: Stages | None = None, choices: Choices | None = None) -> Trainer:
    """The trainer of this rank: its chunks of the model with their first values, and a fresh optimizer.

    Args:
        config: the run.
        mesh: live groups and device.
        stages: from `plan_stages`, if it is at hand.
        choices: from `choose`; None: the preferred ones, without timing any.

    Raises:
        ConfigError: if the pipeline's schedule or the attention kernel does not allow what is asked for.
    """
    stages = stages or plan_stages(config, mesh.layout)
    if choices is None:
        kernel = attention_kernels(config.model, config.precision.compute, mesh.device)[0]
    else:
        kernel, mesh = choices.attention, replace(mesh, algorithms=Algorithms(choices.gather, choices.scatter))
    options = Options.of(config, kernel)
    weight_gradients = WeightGradientStore() if stages.schedule.splits_backward else None
    build = Builder(region=TensorRegion.of(mesh, config.parallel.overlap_chunks), weight_gradients=weight_gradients)
    parts = list(stages.of(mesh.at.pipeline).values())
    model, table = build_model(config.model, options, build, parts)
    trainer = Trainer(
        config, mesh, model, table, stages, weight_gradients, frozen_parameters(config.train.frozen, table)
    )
    trainer.choices = None if choices is None else asdict(choices)
    return trainer


def in_training(config: RunConfig, trainer: Trainer, tokenizer: Tokenizer | None) -> LoadedModel:
    """A model that is being trained, to be asked in between."""
    schedule, packing, rows = trainer.stages.schedule, config.data.packing, config.batch.micro_size
    return LoadedModel(trainer.runner, schedule, trainer.mesh, config.model, tokenizer, packing.eod, rows, packing.stop)
