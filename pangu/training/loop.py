"""The training loop."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from pangu.collectives.reduce import answered
from pangu.config.errors import UserError
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import Sources
from pangu.metrics.devices import device_name, peak_memory_gib, peak_tflops
from pangu.metrics.meter import Meter
from pangu.metrics.writers import Writer, make_writers
from pangu.models.size import training_flops_per_token
from pangu.pipeline.simulate import Timeline
from pangu.training.profile import record_step
from pangu.training.replicas import find_difference
from pangu.training.requests import Requests
from pangu.training.saving import Saver
from pangu.training.step import Trainer
from pangu.training.validation import Validation


class Loop:
    """Makes steps until the run is complete."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        sources: Sources,
        validation: Validation | None,
        samples: int,
        requests: Requests,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.sources = sources
        self.validation = validation
        self.samples = samples
        """Samples consumed, over all replicas."""
        self.requests = requests
        self.checkpoint: Path | None = None
        self.stopped: str | None = None
        """Why the run ended before its last step, if it did."""
        self.last_loss: float | None = None
        self.last_validation: float | None = None
        self.timeline: Timeline | None = None
        """The recorded step, if `profile` asks for one."""

    def run(self) -> None:
        """Make the remaining steps; validate, record and save as they fall due."""
        config, trainer, mesh = self.config, self.trainer, self.trainer.mesh
        writers = self._writers()
        meter = self._meter()
        at = mesh.at
        loader = Loader(
            self.sources.train,
            config.data.packing,
            config.batch.global_size,
            config.batch.micro_size,
            at.data,
            mesh.layout.data,
        )
        with ExitStack() as open_ended:
            open_ended.enter_context(self.requests)
            open_ended.enter_context(loader)
            for writer in writers:
                open_ended.callback(writer.close)
            saver = open_ended.enter_context(Saver(config, trainer))
            while trainer.step < config.train.steps:
                with answered(f"rank {mesh.rank}, step {trainer.step + 1}"):
                    self._make_step(loader, meter, writers, saver)
                if self.stopped:
                    break
            saver.finish()
            self.checkpoint = saver.newest

    def _make_step(self, loader: Loader, meter: Meter, writers: Sequence[Writer], saver: Saver) -> None:
        config, trainer = self.config, self.trainer
        began = time.perf_counter()
        batches = loader.micro_batches(self.samples)
        if config.profile and trainer.step == config.train.steps - 1:
            result, self.timeline = record_step(trainer, batches)
        else:
            result = trainer.train_step(batches)
        seconds = time.perf_counter() - began
        self.samples += config.batch.global_size
        self.last_loss = result.loss
        validated = self._validate() if self._due(config.validation.every) else None
        record = meter.record(
            trainer.step,
            tokens=config.batch.global_size * config.model.sequence,
            seconds=seconds,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            peak_memory_gib=peak_memory_gib(trainer.mesh.device),
            skipped=trainer.skipped,
            loss_scale=result.loss_scale if config.precision.loss_scale else None,
            validation_loss=validated,
            trust_ratios=trainer.trust_ratios() if config.metrics.trust_ratios else None,
        )
        for writer in writers:
            writer.write(record)
        if self._due(config.train.check_replicas) and (difference := find_difference(trainer)):
            raise UserError(
                f"train.check_replicas: after step {trainer.step} copies of {difference} differ; look for a "
                "bad device, and continue from a checkpoint that is older than the fault"
            )
        asked = self.requests.after_step(time.perf_counter() - began)
        if self._due(config.checkpoint.every) or (asked.save and config.checkpoint.every):
            saver.save(self.samples)
        if asked.stop and trainer.step < config.train.steps:
            self.stopped = asked.stop

    def _due(self, every: int) -> bool:
        """True in every `every`-th step and in the last; never if `every` is 0."""
        return every > 0 and (self.trainer.step % every == 0 or self.trainer.step == self.config.train.steps)

    def _validate(self) -> float | None:
        if self.validation is not None:
            self.last_validation = self.validation.loss(self.trainer.runner, self.trainer.stages.schedule)
        return self.last_validation

    def _writers(self) -> list[Writer]:
        if not self.trainer.mesh.is_first or self.trainer.step >= self.config.train.steps:
            return []
        output = Path(self.config.train.output)
        return make_writers(
            self.config.metrics, output, self.config.train.steps, self.trainer.step, asdict(self.config)
        )

    def _meter(self) -> Meter:
        device = self.trainer.mesh.device
        return Meter(
            flops_per_token=training_flops_per_token(self.config.model),
            num_devices=self.trainer.mesh.layout.world,
            peak_tflops=peak_tflops(device_name(device), self.config.precision.compute),
            tokens_seen=self.samples * self.config.model.sequence,
        )
