"""Stages of a run in which batch and sequence length grow."""

from __future__ import annotations

import logging

from pangu.config.schema import RunConfig
from pangu.config.stages import describe_stages, in_stage, stage_at
from pangu.data.loader import LoaderStage
from pangu.training.step import Trainer

log = logging.getLogger("pangu")


class BatchStages:
    """Stages of `batch.stages`, and which of them a trainer is prepared for."""

    def __init__(self, config: RunConfig) -> None:
        """Start in the final stage, which a new trainer is made for."""
        self._config = config
        self._entered = len(config.batch.stages)

    def config_at(self, step: int) -> RunConfig:
        """Return the configuration of the stage of step `step` (from 0)."""
        return in_stage(self._config, stage_at(self._config, step))

    def loader_stage_at(self, step: int) -> LoaderStage:
        """Return the size of a step's global batch, and into how many samples it cuts a sequence of the data."""
        config = self.config_at(step)
        return LoaderStage(config.batch.global_size, self._config.model.sequence // config.model.sequence)

    def enter(self, trainer: Trainer) -> None:
        """Prepare a trainer for the stage of its next step, and log where another stage begins."""
        number = stage_at(self._config, trainer.step)
        if number != self._entered:
            self._entered = number
            trainer.enter_stage(self.config_at(trainer.step))
            text = describe_stages(self._config)[number]
            log.info("%-12s %d of %d, %s", "stage", number + 1, len(self._config.batch.stages) + 1, text)
