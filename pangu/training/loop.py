"""Training loop."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from pangu.collectives.agreement import report_unresponsive_ranks
from pangu.collectives.reduce import gather_objects
from pangu.common.errors import DeviceError, UserError
from pangu.config.schema import RunConfig
from pangu.config.stages import num_samples
from pangu.data.loader import Loader
from pangu.data.sources import Sources
from pangu.metrics.devices import device_name, peak_memory_gib, peak_tflops
from pangu.metrics.record import StepRecord, speed
from pangu.metrics.writers import ForecastWriter, Writers, make_writers
from pangu.models.size import training_flops_per_token
from pangu.topology.copy_stream import DeviceEvent
from pangu.training.device_checks import DeviceChecks, Stragglers
from pangu.training.elastic import replace_ranks
from pangu.training.faults import Goodput, SpikeDetector, culprits, find_non_finite, log_on_failure, not_finite
from pangu.training.memory_checkpoints import MemoryCheckpoints
from pangu.training.process import Heartbeat, StopSignals, read_flags
from pangu.training.profile import PROFILED, Profile
from pangu.training.replicas import find_replica_difference
from pangu.training.saving import Saver
from pangu.training.stages import BatchStages
from pangu.training.step import PendingResult, StepResult, Trainer
from pangu.training.survivors import Border, UnreadResult, keeping_state, result_of, unread_of
from pangu.training.validation import Benchmarks, Validation, in_training, trust_ratios

log = logging.getLogger("pangu")


class Loop:
    """Loop over the steps of a run until it is complete."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Trainer,
        sources: Sources,
        validation: Validation | None,
        benchmarks: Benchmarks | None,
        checkpoint: Mapping[str, Any],
        signals: StopSignals,
        heartbeat: Heartbeat,
        forecast: ForecastWriter | None = None,
        in_memory: MemoryCheckpoints | None = None,
    ) -> None:
        """Start from a new `trainer`, or one restored from a checkpoint, whose index is `checkpoint` (empty: new)."""
        self.config = config
        self.trainer = trainer
        self.sources = sources
        self.stages = BatchStages(config)
        self.validation, self.benchmarks = validation, benchmarks
        self.signals, self.heartbeat, self.forecast, self._in_memory = signals, heartbeat, forecast, in_memory
        self.spikes = SpikeDetector(config.faults)
        self.devices = DeviceChecks(trainer, heartbeat)
        self._stragglers = Stragglers(trainer, config.faults, self.stages)
        self._goodput = Goodput(signals.began)
        self.samples = 0
        """Position in the data, over all replicas: samples consumed, and those skipped by rollbacks."""
        self._position: Mapping[str, Any] | None = None
        """Position of the data source after the last step."""
        self._continued_from: int | None = None
        """Step of the checkpoint that the next step continues from, if no step has been recorded since."""
        self._writers = Writers()
        self._pending: UnreadResult | None = None
        """Last step whose result has not been read."""
        self._details: tuple[dict[int, float] | None, dict[str, Any]] = None, {}
        """Stragglers of the step that is being computed, and the data part of its record."""
        self._asked: list[bool] = []
        """Requests in the flags of earlier steps that are not done yet."""
        self._step_began: DeviceEvent | None = None
        """End of the last step whose result was read; None: start a new measurement."""
        self._outside_s = 0.0
        """Seconds since then that belong to no step."""
        self._step_s = 0.0
        self._restore(checkpoint)
        self.checkpoint: Path | None = None
        self.stopped: str | None = None
        """Reason why the run ended before its last step, if it did."""
        self.record: StepRecord | None = None
        """Record of the last step."""
        self.profile: Profile | None = None
        """Profile of a step, if `profile` asks for one."""
        self._profiled_after = min(trainer.step + PROFILED, config.train.steps) - 1 if config.profile else -1
        """Step after which one is profiled; negative: none."""

    def run(self) -> None:
        """Run the remaining steps; validate, evaluate, record and save when due."""
        config, trainer, mesh = self.config, self.trainer, self.trainer.mesh
        data, batch = config.data, config.batch
        sizes = (batch.global_size, batch.micro_size, mesh.at.data, mesh.layout.data)
        loader = Loader(self.sources.train, data.packing, *sizes, mesh.device, self.stages.loader_stage_at)
        with self.signals, loader, ExitStack() as stack:
            stack.callback(self._writers.close)
            self._open_writers()
            saver = stack.enter_context(Saver(config, trainer, self._in_memory))
            if self._in_memory is not None:
                stack.enter_context(keeping_state(self, self._in_memory.folder))
            with report_unresponsive_ranks(mesh, partial(self._place, trainer.step)):
                if self._in_memory is not None:
                    self._in_memory.release()
                if self._pending is not None:  # surviving ranks kept it
                    self._handle_result(saver, at_once=True)
                    self._step_began = None  # the time since the restart belongs to no step
            while trainer.step < config.train.steps and self.stopped is None:
                with report_unresponsive_ranks(mesh, partial(self._place, trainer.step + 1)), self._profiled(saver):
                    self._train_step(loader, saver)
            self._enter_phase("saving")
            with report_unresponsive_ranks(mesh, partial(self._place, trainer.step)):
                saver.finish()
                self.checkpoint = saver.newest
                saver.finish_uploads()

    def _train_step(self, loader: Loader, saver: Saver) -> None:
        """Compute gradients, read the previous step's result, which has arrived meanwhile, then update the weights.

        So the host never waits for an idle device, and a bad step is known before another one changes its state. If
        work that needs the result of this step is due, it is read at once.
        """
        # computing   | gradients 5 | update 5 | gradients 6 | update 6 | gradients 7 | update 7 |
        # looking at                           4 |                        5 |                  6, 7 (the last step)
        trainer = self.trainer
        self._enter_phase("training")
        if self._step_began is None:
            self._step_began, self._outside_s = DeviceEvent(trainer.mesh.device), 0.0
        recorder = trainer.mesh.recorder
        self.stages.enter(trainer)
        with recorder.span("loading"):
            batches = loader.micro_batches(self.samples, trainer.step)
            self._position = loader.position
        self.devices.before_step(batches)
        with recorder.span("update"):
            stragglers = self._stragglers.forward_backward(batches)
        if self._pending is not None and not self._handle_result(saver, at_once=False):
            return  # these gradients are those of a state that is gone
        self._details = stragglers, {"data_wait_s": loader.waited_s, "padding": loader.padding}
        self.devices.computed = batches, trainer.config
        trainer.loss_limit = self.spikes.limit if self.devices.repeats else None
        with recorder.span("update"):
            saver.finish_copy()
            self.finish_step(trainer.update(self.signals.flags(self._step_s, saver.has_failed)))
        config = self.config
        every = [config.checkpoint.every, config.checkpoint.memory_every, config.validation.every]
        every += [config.evaluate.every, config.train.check_replicas]
        is_asked = any(self._asked) or self._stragglers.slow or trainer.step == config.train.steps
        if is_asked or any(map(self._is_due, every)):
            with recorder.span("interlude"):  # the time is a part of the next step, as always
                self._handle_result(saver, at_once=True)

    def finish_step(self, result: PendingResult) -> None:
        """Enter the border between a step, whose update has returned `result`, and the next one."""
        stage = self.stages.loader_stage_at(self.trainer.step - 1)
        self._pending = result, *self._details
        self.samples += stage.global_size // stage.parts
        if self._in_memory is not None:
            self._enter_border()

    def _enter_border(self) -> None:
        times = self._step_began, self._outside_s
        self.border = Border(self._pending, self.spikes.state(), self._position, *times)

    def _handle_result(self, saver: Saver, at_once: bool) -> bool:
        """Read the result of the last update and act on it; return False if the run has gone back to a checkpoint.

        `at_once`: no other step is in flight.
        """
        assert self._pending is not None
        assert self._step_began is not None
        (pending, stragglers, data_fields), self._pending = self._pending, None
        result = self.trainer.read(pending)
        self._asked = [any(flags) for flags in zip(result.flags, self._asked or result.flags, strict=True)]
        self._step_s = pending.end.seconds_since(self._step_began) - self._outside_s
        self._step_began, self._outside_s = pending.end, 0.0
        # The order matters: a step that is taken back is not recorded; what is recorded is on the disk before a
        # checkpoint says that it was made; replicas that differ are found before they are saved; and what a signal
        # asks for is done last, so that the step that was just made is saved.
        if self._handle_fault(result, saver):
            return False
        record = self._make_record(result, self._step_s, stragglers)
        counts = saver.failures | {"rollbacks": len(self.spikes.rollbacks)}
        goodput = self._goodput.after(self.trainer.step, self._step_s, result.skipped)
        fields: dict[str, Any] = {name: count or None for name, count in counts.items()} | data_fields | saver.copies
        self.record = replace(record, continued_from=self._continued_from, goodput=goodput, **fields)
        self._continued_from = None
        self.heartbeat.counts = {**counts, "skipped": self.trainer.skipped, "goodput": goodput}
        self._writers.write(self.record)
        saver.statuses.mark_proven(self.spikes.good_steps, saver.is_writing)
        self._check_replicas(saver)
        if at_once:
            self._handle_signals(saver)
        return True

    def _handle_signals(self, saver: Saver) -> None:
        (save, stop, settle), self._asked = read_flags(self._asked), []
        if stop and self.trainer.step < self.config.train.steps:
            self.stopped = stop
        if settle:
            with self._outside_step("saving"):
                saver.wait()
        every, slow = self.config.checkpoint.every, self._stragglers.slow
        if self._is_due(every) or ((save or slow) and every):
            with self._outside_step("saving"):
                self._save(saver)
        saver.save_in_memory(self.samples, self.spikes.state(), self._position)
        if slow:
            self._stragglers.forget()
            saver.wait()
            if not saver.failed and not self.stopped and self.trainer.step < self.config.train.steps:
                replace_ranks(self.trainer.mesh, slow)

    @contextmanager
    def _profiled(self, saver: Saver) -> Iterator[None]:
        trainer, config = self.trainer, self.config
        if trainer.step != self._profiled_after:
            yield
            return
        Profile.begin(trainer.mesh)
        yield
        recording = trainer.mesh.recorder.stop()
        if self._pending is not None:
            self._handle_result(saver, at_once=True)
        if trainer.step <= self._profiled_after:
            return  # the run has gone back, and will come to this step again
        self._profiled_after = -1
        with self._outside_step("profiling"):
            expected = None if self.forecast is None else self.forecast.as_dict()["terms_s"]
            self.profile = Profile.of(trainer, recording, expected)
            if self.forecast is not None:
                self.forecast.set_profile([one.parts for one in self.profile.ranks])
            if trainer.mesh.is_first:
                self.profile.write_trace(Path(config.train.output) / "plots" / "profile.json")
                log.info(self.profile.table())

    def _make_record(self, result: StepResult, seconds: float, stragglers: dict[int, float] | None) -> StepRecord:
        """Validate and evaluate if due, and return the record of the step."""
        config, trainer, mesh = self.config, self.trainer, self.trainer.mesh
        validation: dict[str, Any] = {}
        stage_config = self.stages.config_at(trainer.step - 1)
        evaluation, ratios = None, trust_ratios(trainer) if config.metrics.trust_ratios else None
        if self.validation is not None and self._is_due(config.validation.every):
            with self._outside_step("validating"):
                validation = self.validation.figures(trainer)
        if self.benchmarks is not None and self._is_due(config.evaluate.every):
            with self._outside_step("evaluating"):
                evaluation = self.benchmarks(in_training(config, trainer, self.sources.tokenizer))
        return StepRecord(
            step=trainer.step,
            tokens=self.tokens,
            loss=result.loss,
            lr=result.lr,
            grad_norm=result.grad_norm,
            **speed(
                stage_config.batch.global_size * stage_config.model.sequence,
                seconds,
                training_flops_per_token(stage_config.model),
                mesh.layout.world,
                peak_tflops(device_name(mesh.device), config.precision.compute),
            ),
            peak_memory_gib=peak_memory_gib(mesh.device),
            skipped=trainer.skipped,
            loss_scale=result.loss_scale if config.precision.loss_scale else None,
            **validation,
            evaluation=evaluation,
            trust_ratios=ratios,
            slow_ranks=stragglers,
            experts=result.experts,
            mtp_loss=result.mtp_loss,
            max_attention_logit=result.max_attention_logit,
        )

    def _place(self, step: int) -> str:
        return f"step {step}, {self.trainer.doing}"

    def _enter_phase(self, doing: str) -> None:
        self.trainer.doing = doing
        self.heartbeat.beat(self.trainer.step, doing)

    @contextmanager
    def _outside_step(self, doing: str) -> Iterator[None]:
        """Run a block whose time belongs to no step."""
        self._enter_phase(doing)
        outside_s, began = self._outside_s, time.perf_counter()
        with self.trainer.mesh.recorder.span("interlude"):
            yield
        self._outside_s = outside_s + time.perf_counter() - began  # once, where one is within another

    def _handle_fault(self, result: StepResult, saver: Saver) -> bool:
        """Handle a step's fault, if any; return True if the run has gone back. May raise UserError on all ranks."""
        if result.skipped and not result.loss > self.spikes.limit:
            mesh = self.trainer.mesh
            nonfinite = gather_objects(not_finite(result.norms), mesh.group("world"))
            alert = None if self.config.precision.loss_scale else "skipped_step"  # fp16 skips steps to find its scale
            log.warning("step %d is skipped: %s", self.trainer.step, culprits(mesh, nonfinite), extra={"alert": alert})
        if (found := self.devices.find(result)) is not None and self._respond(found[0], saver, found[1]):
            return True
        if (fault := self.spikes.fault(result)) is None:
            return False
        fault, intact = self.devices.diagnose(fault, result)
        return self._respond(fault, saver, intact)

    def _save(self, saver: Saver) -> None:
        """Save a checkpoint; non-finite weights or moments are a fault of the run instead."""
        if (tensors := find_non_finite(self.trainer)) is None:
            loss = self.record.validation_loss if self.record and self.record.step == self.trainer.step else None
            saver.save(self.samples, self.spikes.state(), self._position, loss)
            return
        fault = f"no checkpoint is saved, because of non-finite values in {tensors}"
        if not self._respond(fault, saver) and (self.stopped or self.trainer.step == self.config.train.steps):
            raise UserError(f"step {self.trainer.step}: {fault}")

    def _respond(self, fault: str, saver: Saver, intact: int | None = None) -> bool:
        """Handle a fault as configured; return True if the run has gone back. May raise UserError on all ranks.

        `intact`: last step whose state is surely right, if a device is at fault, and no batches are.
        """
        trainer, faults, is_of_data = self.trainer, self.config.faults, intact is None
        message = f"step {trainer.step}: {fault}"
        if faults.action == "warn":
            log.warning(message, extra={"alert": "fault"})
            return False
        rollbacks, goes_back = len(self.spikes.rollbacks), faults.action == "rollback"
        with log_on_failure(message):
            saver.wait(is_fault=True)
        if goes_back and rollbacks >= faults.max_rollbacks:
            fix = "; lower optimizer.lr" * is_of_data
            raise UserError(f"{message}; faults.max_rollbacks = {rollbacks} is reached{fix}")
        with log_on_failure(message):
            if intact is None:
                blamed = saver.statuses.add_fault(trainer.step, self.spikes.good_steps, fault, goes_back)
            else:
                blamed = saver.statuses.condemn_after(intact, message)
        if faults.action == "stop":
            fix = "; set faults.action=rollback to continue from the newest proven checkpoint without these batches"
            raise (UserError if is_of_data else DeviceError)(f"{message}; {blamed}{fix * is_of_data}")
        log.warning("%s: rolling back%s", message, f"; {blamed}" * is_of_data, extra={"alert": "rollback"})
        with self._outside_step("rolling back"):
            step, last = trainer.step, trainer.step + faults.skip_after
            end = self.samples + num_samples(self.config, last) - num_samples(self.config, step) if is_of_data else None
            self._restore(saver.go_back(lambda index: self.spikes.back_to(index, step, fault, end)))
        place = saver.newest or "the beginning"
        log.warning("rolled back to %s: continuing after step %d with sample %d", place, trainer.step, self.samples)
        replace_ranks(trainer.mesh, self.devices.wrong)
        self._open_writers()
        return True

    def _restore(self, checkpoint: Mapping[str, Any]) -> None:
        self.samples = checkpoint.get("samples", 0)
        self.sources.train.resume(checkpoint.get("position"))
        self.spikes.restore(checkpoint.get("watch", {}))
        self._position, unread = checkpoint.get("position"), unread_of(checkpoint, self.trainer)
        self._pending, self._step_began, self._outside_s = None, None, 0.0
        if unread is not None:
            self._step_began = DeviceEvent(self.trainer.mesh.device)
            self._pending, self._outside_s = result_of(unread, self.trainer), -unread["seconds"]
        self._continued_from = self.trainer.step - (unread is not None) if checkpoint else None
        self._enter_border()
        self.trainer.is_whole = True

    def _check_replicas(self, saver: Saver) -> None:
        step, every = self.trainer.step, self.config.train.check_replicas
        if not self._is_due(every):
            return
        with self._outside_step("comparing replicas"):
            difference = find_replica_difference(self.trainer)
        if difference:
            last = (step - 1) // every * every
            message = f"train.check_replicas: after step {step} replicas differ: {difference}; check the device"
            fault = f"step {step}: replicas differ, last compared in {last}"
            with log_on_failure(message):
                saver.wait(is_fault=True)
                continues = saver.statuses.condemn_after(last, fault)
            raise DeviceError(f"{message}; {continues}")

    def _is_due(self, every: int) -> bool:
        return every > 0 and (self.trainer.step % every == 0 or self.trainer.step == self.config.train.steps)

    def _open_writers(self) -> None:
        """Open writers that continue after the last step that was read; later ones in a file will be made again."""
        step, total = self.trainer.step - (self._pending is not None), self.config.train.steps
        if self.trainer.mesh.is_first and step < total:
            output = Path(self.config.train.output)
            writers = make_writers(self.config.metrics, output, total, step, asdict(self.config))
            self._writers.open([*writers, *([] if self.forecast is None else [self.forecast])])

    @property
    def tokens(self) -> int:
        """Tokens trained on, without skipped and undone ones."""
        return (self.samples - self.spikes.left_out) * self.config.model.sequence
