"""The training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

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
from pangu.training.faults import Watch, culprits
from pangu.training.finite import find_not_finite
from pangu.training.heartbeat import Heartbeat
from pangu.training.profile import record_step
from pangu.training.replicas import find_difference
from pangu.training.requests import Requests
from pangu.training.saving import Saver
from pangu.training.slow import find_slow_ranks
from pangu.training.step import StepResult, Trainer
from pangu.training.validation import Validation

log = logging.getLogger("pangu")


class Loop:
    """Makes steps until the run is complete."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        sources: Sources,
        validation: Validation | None,
        benchmarks: Callable[[Trainer], dict[str, float]] | None,
        facts: Mapping[str, Any],
        requests: Requests,
        heartbeat: Heartbeat,
    ) -> None:
        """
        Args:
            config: the run.
            trainer: fresh, or as a checkpoint left it.
            sources: of the batches.
            validation: None: there is none.
            benchmarks: their figures, which all processes ask for together; None: there are none.
            facts: of the checkpoint that the run continues from; empty for a new run.
            requests: what signals and the clock ask for.
            heartbeat: says what the run is doing.
        """
        self.config = config
        self.trainer = trainer
        self.sources = sources
        self.validation = validation
        self.benchmarks = benchmarks
        self.requests = requests
        self.heartbeat = heartbeat
        self.watch = Watch(config.faults)
        self.samples = 0
        """Place in the order of the data, over all replicas: samples consumed, and those left out by rollbacks."""
        self._restore(facts)
        self._writers: list[Writer] = []
        self._since = 0.0
        """When the time of the next step begins: at the end of the one before, for a device that still updates weights
        when a step's loss is known does so in the time of the next."""
        self.checkpoint: Path | None = None
        self.stopped: str | None = None
        """Why the run ended before its last step, if it did."""
        self.last_loss: float | None = None
        self.last_validation: float | None = None
        self.last_evaluation: dict[str, float] | None = None
        self.timeline: Timeline | None = None
        """The recorded step, if `profile` asks for one."""

    def run(self) -> None:
        """Make the remaining steps; validate, evaluate, record and save as they fall due."""
        config, trainer, mesh = self.config, self.trainer, self.trainer.mesh
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
            open_ended.callback(self._close_writers)
            self._open_writers()
            saver = open_ended.enter_context(Saver(config, trainer))
            self._since = time.perf_counter()
            while trainer.step < config.train.steps:
                with answered(mesh, partial(self._place, trainer.step + 1)):
                    self._make_step(loader, saver)
                if self.stopped:
                    break
            self._at("saving")
            with answered(mesh, partial(self._place, trainer.step)):
                saver.finish()
            self.checkpoint = saver.newest

    def _make_step(self, loader: Loader, saver: Saver) -> None:
        config, trainer = self.config, self.trainer
        began = time.perf_counter()
        self._at("training")
        batches = loader.micro_batches(self.samples)
        slow: dict[int, float] = {}
        if config.profile and trainer.step == config.train.steps - 1:
            result, self.timeline = record_step(trainer, batches)
        elif config.faults.slow_every and (trainer.step + 1) % config.faults.slow_every == 0:
            result, slow = find_slow_ranks(trainer, batches, config.faults.slow_factor)
        else:
            result = trainer.train_step(batches)
        ended = time.perf_counter()
        seconds, self._since = ended - self._since, ended
        self.samples += config.batch.global_size
        if self._goes_back(result, saver):
            return
        self.last_loss = result.loss
        validated = self._validate() if self._due(config.validation.every) else None
        evaluated = self._evaluate() if self._due(config.evaluate.every) else None
        record = self._meter.record(
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
            evaluation=evaluated,
            trust_ratios=trainer.trust_ratios() if config.metrics.trust_ratios else None,
            slow_ranks=slow or None,
        )
        for writer in self._writers:
            writer.write(record)
        self._check_replicas()
        trainer.doing = "asking who was told to save or stop"
        asked = self.requests.after_step(time.perf_counter() - began, saver.has_failed)
        if asked.stop and trainer.step < config.train.steps:
            self.stopped = asked.stop
        due = self._due(config.checkpoint.every) or (asked.save and config.checkpoint.every)
        if asked.settle or due:
            with self._aside("saving"):
                if asked.settle:
                    saver.settle()
                if due:
                    self._save(saver)

    def _place(self, step: int) -> str:
        return f"step {step}, {self.trainer.doing}"

    def _at(self, doing: str) -> None:
        """Note what the run does now."""
        self.trainer.doing = doing
        self.heartbeat.beat(self.trainer.step, doing)

    @contextmanager
    def _aside(self, doing: str) -> Iterator[None]:
        """Do something that is no part of a step and does not count in its time."""
        self._at(doing)
        since, began = self._since, time.perf_counter()
        yield
        self._since = since + time.perf_counter() - began  # once, where one is within another

    def _goes_back(self, result: StepResult, saver: Saver) -> bool:
        """Say what went wrong in a step, if anything did, and do what is asked for then; True if the run has gone back
        to a checkpoint.

        Raises:
            UserError: on all ranks, if the run is to end.
        """
        if result.skipped:
            log.warning("step %d is skipped: %s", self.trainer.step, culprits(result.not_finite))
        fault = self.watch.fault(result)
        return fault is not None and self._answer(fault, saver)

    def _save(self, saver: Saver) -> None:
        """Begin to save what the run has, unless it is spoiled: a run that goes on from that is lost.

        Raises:
            UserError: on all ranks, if the run is to end.
        """
        spoiled = find_not_finite(self.trainer)
        if spoiled is None:
            saver.save(self.samples, self.watch.state())
            return
        fault = f"nothing is saved, because values that are not finite stand in {spoiled}"
        if not self._answer(fault, saver) and (self.stopped or self.trainer.step == self.config.train.steps):
            raise UserError(f"step {self.trainer.step}: {fault}")

    def _answer(self, fault: str, saver: Saver) -> bool:
        """Do what is asked for at a fault; True if the run has gone back to a checkpoint.

        Raises:
            UserError: on all ranks, if the run is to end.
        """
        trainer, faults = self.trainer, self.config.faults
        where = f"step {trainer.step}: {fault}"
        if faults.action == "warn":
            log.warning(where)
            return False
        if faults.action == "stop":
            raise UserError(
                f"{where}; faults.action=rollback would continue from the newest checkpoint without the batches since"
            )
        if len(self.watch.rollbacks) >= faults.max_rollbacks:
            raise UserError(f"{where}; the run has gone back {len(self.watch.rollbacks)} times (faults.max_rollbacks)")
        log.warning("%s: going back to the newest checkpoint", where)
        with self._aside("going back"):
            step, end = trainer.step, self.samples + faults.skip_after * self.config.batch.global_size
            self._restore(saver.go_back(lambda index: self.watch.back_to(index, step, fault, end)))
        log.warning("continuing after step %d with sample %d", trainer.step, self.samples)
        self._close_writers()
        self._open_writers()
        return True

    def _restore(self, facts: Mapping[str, Any]) -> None:
        """Go on from where a checkpoint was written."""
        self.samples = facts.get("samples", 0)
        self.watch.restore(facts.get("watch", {}))
        self._meter = self._new_meter()

    def _check_replicas(self) -> None:
        if not self._due(self.config.train.check_replicas):
            return
        with self._aside("comparing replicas"):
            difference = find_difference(self.trainer)
        if difference:
            raise UserError(
                f"train.check_replicas: after step {self.trainer.step} copies of {difference} differ; look for a "
                "bad device, and continue from a checkpoint that is older than the fault"
            )

    def _due(self, every: int) -> bool:
        """True in every `every`-th step and in the last; never if `every` is 0."""
        return every > 0 and (self.trainer.step % every == 0 or self.trainer.step == self.config.train.steps)

    def _validate(self) -> float | None:
        if self.validation is not None:
            with self._aside("validating"):
                self.last_validation = self.validation.loss(self.trainer.runner, self.trainer.stages.schedule)
        return self.last_validation

    def _evaluate(self) -> dict[str, float] | None:
        if self.benchmarks is not None:
            with self._aside("evaluating"):
                self.last_evaluation = self.benchmarks(self.trainer)
        return self.last_evaluation

    def _open_writers(self) -> None:
        """Writers that go on after the step that is made; steps that a file holds beyond it will be made again."""
        step, total = self.trainer.step, self.config.train.steps
        if self.trainer.mesh.is_first and step < total:
            output = Path(self.config.train.output)
            self._writers = make_writers(self.config.metrics, output, total, step, asdict(self.config))

    def _close_writers(self) -> None:
        with ExitStack() as closing:
            for writer in self._writers:
                closing.callback(writer.close)
            self._writers = []

    def _new_meter(self) -> Meter:
        device = self.trainer.mesh.device
        return Meter(
            flops_per_token=training_flops_per_token(self.config.model),
            num_devices=self.trainer.mesh.layout.world,
            peak_tflops=peak_tflops(device_name(device), self.config.precision.compute),
            tokens_seen=self.tokens,
        )

    @property
    def tokens(self) -> int:
        """Tokens trained on, without what was left out and what was taken back."""
        return (self.samples - self.watch.left_out) * self.config.model.sequence
