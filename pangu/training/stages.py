"""Stages of a run in which batch and sequence length grow, and the shares of its replicas in a batch."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from pangu.config.schema import RunConfig
from pangu.config.stages import describe_stages, in_stage, stage_at
from pangu.data.loader import LoaderStage
from pangu.pipeline.stages import shares_of
from pangu.training.step import Trainer

log = logging.getLogger("pangu")


class BatchStages:
    """Stages of `batch.stages`, and which of them a trainer is prepared for."""

    def __init__(self, config: RunConfig) -> None:
        """Start in the final stage, which a new trainer is made for."""
        self._config = config
        self._entered: tuple[int, tuple[int, ...]] = len(config.batch.stages), ()
        self._shares: list[tuple[int, list[tuple[int, ...]]]] = []
        """First step of each change of the replicas' shares, with their micro-batches in every stage; newest first."""

    def config_at(self, step: int) -> RunConfig:
        """Return the configuration of the stage of step `step` (from 0)."""
        return in_stage(self._config, stage_at(self._config, step))

    def loader_stage_at(self, step: int) -> LoaderStage:
        """Return the size of a step's global batch, the parts of each sample of the data, and the replicas' shares."""
        config = self.config_at(step)
        parts = self._config.model.sequence // config.model.sequence
        return LoaderStage(config.batch.global_size, parts, self._shares_at(step) if self._shares else ())

    def share(self, trainer: Trainer, slowness: Mapping[int, float]) -> None:
        """Give the replicas of slow ranks fewer micro-batches; `slowness`: time of each slow rank over the median.

        All ranks call this together. It holds from the step after the next one on, whose batch may have been read.
        """
        layout, first = trainer.mesh.layout, trainer.step + 2
        replicas = [1.0] * layout.data
        for rank, times in slowness.items():
            replica = layout.coordinates(rank).data
            replicas[replica] = max(replicas[replica], times)
        stages = range(len(self._config.batch.stages) + 1)
        shares = [shares_of(in_stage(self._config, number), layout, replicas) if slowness else () for number in stages]
        if any(shares) if not self._shares else shares != self._shares[0][1]:
            self._shares.insert(0, (first, shares))
            now = self._shares_at(first)
            text = f"the replicas compute {', '.join(map(str, now))}" if now else "all replicas compute equally many"
            log.warning("from step %d on, %s micro-batches", first + 1, text)

    def enter(self, trainer: Trainer) -> None:
        """Prepare a trainer for the stage of its next step, and log where another stage begins."""
        number = stage_at(self._config, trainer.step)
        shares = self._shares_at(trainer.step) if self._shares else ()
        (entered, _), now = self._entered, (number, shares)
        if now != self._entered:
            self._entered = now
            trainer.enter_stage(self.config_at(trainer.step), shares[trainer.mesh.at.data] if shares else None)
        if number != entered:
            text = describe_stages(self._config)[number]
            log.info("%-12s %d of %d, %s", "stage", number + 1, len(self._config.batch.stages) + 1, text)

    def _shares_at(self, step: int) -> tuple[int, ...]:
        number = stage_at(self._config, step)
        return next((shares[number] for first, shares in self._shares if first <= step), ())
