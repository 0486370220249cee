"""Run of a configuration up to its summary: the only module that wires all parts together."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

from pangu.checkpoint.index import read_index
from pangu.checkpoint.run_folder import keep_generation, keep_template, keep_tokenizer, make_run_folder, save_config
from pangu.collectives.agreement import agree_on_first, agree_on_long_work, report_unresponsive_ranks
from pangu.collectives.reduce import gather_objects
from pangu.common.console import outlive_console
from pangu.common.errors import PrintableFormatter, UserError, allocating
from pangu.config.data import InstructionsData
from pangu.config.schema import RunConfig
from pangu.data.boundaries import begin_id, describe_ids
from pangu.data.sources import Sources, open_sources, pack, tokenizer_of, with_ids
from pangu.evaluation.generation import Sampling, continue_prompts, encode_prompts
from pangu.layers import apex
from pangu.layers.fp8 import require_fp8
from pangu.layers.kernel_choice import attention_kernels
from pangu.metrics.devices import require_format
from pangu.metrics.text import size
from pangu.metrics.writers import ForecastWriter
from pangu.models.groups import check_groups
from pangu.models.parameters import count_frozen
from pangu.optim.build import implementation
from pangu.pipeline.layouts import choose_layout
from pangu.pipeline.stages import Stages
from pangu.schedule.advice import advise
from pangu.topology.backends import backend_of, describe_environment, record_collectives
from pangu.topology.launch import MEMBER, Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.alerts import Alerts
from pangu.training.autotune import Choices, choose, save_choices, warn_of_slow_format
from pangu.training.describe import advise_less_memory, describe
from pangu.training.determinism import deterministic
from pangu.training.interrupts import Interrupts
from pangu.training.layer_timing import warm_up
from pangu.training.loop import Loop
from pangu.training.memory_checkpoints import MemoryCheckpoints
from pangu.training.preflight import check_cluster, raise_open_files, require_same_text
from pangu.training.process import Heartbeat, StopSignals, describe_rank, only_run, save_nodes
from pangu.training.resuming import load_checkpoint
from pangu.training.saving import begin, find_checkpoint
from pangu.training.step import Trainer
from pangu.training.summary import draw_pictures, finish
from pangu.training.validation import Benchmarks, Validation, in_training
from pangu.training.watchdog import Watchdog, place_of
from pangu.zero.states import held_bytes, peak_states, plan_states

log = logging.getLogger("pangu")


Expect = Callable[[RunConfig, Layout, Stages, Callable[[], None]], ForecastWriter | None]
"""Function that returns the forecast of a run, or None if nothing is known; it calls its last argument to report
progress. Raises UserError if the run needs more memory than a device has."""
ReadBenchmarks = Callable[[RunConfig], Benchmarks]
"""Function that reads the benchmarks of a run. Raises UserError if their files are missing or wrong."""
T = TypeVar("T")


def run(
    values: Mapping[str, Any],
    expect: Expect | None = None,
    read_benchmarks: ReadBenchmarks | None = None,
    corpora: ModuleType | None = None,
    stop_signals: Callable[[float, float | None], StopSignals] = StopSignals,
) -> int:
    """Check the configuration, composed as plain dictionaries, then train, and return the exit status.

    `expect` makes the forecast if the cluster is known, `read_benchmarks` reads the benchmarks in `evaluate.tasks`, and
    `corpora` prepares data=stdlib and data=instructions (`prepare`, `portable_template`); without it they must be
    prepared. `stop_signals` makes the handler of signals. Raises UserError for all errors that the user can fix.
    """
    began = time.perf_counter()
    launch = Launch.from_environment()
    _set_up_logging(launch.rank == 0)
    config, layout, stages = choose_layout(values, launch.world, uneven=launch.epoch > 0)
    if config.evaluate.every and read_benchmarks is None:
        raise UserError("evaluate.every: start with pretrain.py, pass `read_benchmarks`, or set evaluate.every=0")
    _log_plan(config, layout, stages)
    if config.dry_run:
        if expect is not None and config.cluster is not None and launch.rank == 0:
            expect(config, layout, stages, lambda: None)
        return 0
    outlive_console()
    output = Path(config.train.output)
    place = f"rank {launch.rank} on {socket.gethostname()}"
    with ExitStack() as stack, allocating(lambda: place, advise_less_memory(config)):
        device = choose_device(config.train.device, launch, threads=config.train.threads)
        _require_support(config, device)
        if launch.world > 1:
            raise_open_files(launch.world)
        stack.enter_context(Interrupts(speaks=launch.rank == 0))
        if device.type != "cpu":
            given = dict(os.environ)
            if launch.world > 1 and backend_of(device) == "nccl":
                stack.enter_context(record_collectives(output))
            log.info("%-12s %s", "environment", describe_environment(given))
        if config.train.deterministic:
            stack.enter_context(deterministic())
            log.info("%-12s bitwise reproducible on this hardware with these library versions", "determinism")
        mesh = Mesh.connect(layout, device, config.parallel.timeout_s, launch.attempt)
        stack.push(lambda kind, *_: mesh.close(failed=kind is not None))
        stack.enter_context(report_unresponsive_ranks(mesh, lambda: "before or after training"))
        watchdog = None if mesh.store is None else stack.enter_context(Watchdog(mesh, output))
        agree_on_first(mesh, lambda: make_run_folder(output))
        if launch.world > 1:
            check_cluster(config, mesh)
        agree_on_first(mesh, lambda: stack.enter_context(only_run(output)))
        alerts = config.train.alert_command  # one rank starts it; all are sent a bool, which can be pickled
        agree_on_first(mesh, lambda: bool(stack.enter_context(Alerts(alerts, output))))
        forecast = None
        if expect is not None and config.cluster is not None:
            measure = partial(expect, config, layout, stages)
            forecast = _do_long_work(mesh, watchdog, "measuring the layers", measure, mesh.is_first)
        signals = stop_signals(began, config.train.stop_after_s)
        in_memory = _memory(config, mesh, stack)
        return _train(config, mesh, launch, stages, signals, forecast, watchdog, read_benchmarks, corpora, in_memory)


def _memory(config: RunConfig, mesh: Mesh, stack: ExitStack) -> MemoryCheckpoints | None:
    """Return the copies in memory if they are asked for, or if surviving ranks may keep their state there."""
    is_asked = config.checkpoint.memory_every > 0
    if not is_asked and MEMBER not in os.environ:
        return None
    try:
        return stack.enter_context(MemoryCheckpoints(config, mesh))
    except UserError as error:
        if is_asked:
            raise
        log.warning("survivors: ranks will not keep their state: %s", error)
        return None


def _log_plan(config: RunConfig, layout: Layout, stages: Stages) -> None:
    frozen = count_frozen(config.model, config.train.frozen)
    check_groups(config.model, config.train.frozen, config.parameter_groups)
    log.info(describe(config, layout, None if config.dry_run else peak_states(config, layout, stages.of)))
    if frozen:
        log.info("%-12s %s parameters (train.frozen)", "frozen", f"{frozen:,}")
    if layout.pipeline > 1:
        for line in advise(stages.schedule, stages.durations, config.model.layers, config.batch.micro_size):
            log.info(line)


def _require_support(config: RunConfig, device: torch.device) -> None:
    """Raise UserError at once for formats and kernels that a device does not have."""
    compute, matmul = config.precision.compute, config.precision.matmul
    if device.type != "cpu":
        require_format(compute, device)
    attention_kernels(config.model, compute, device)
    for use in apex.USES:
        apex.candidates(use, config, device)
    if matmul != "compute":
        log.info("%-12s %s", "fp8", require_fp8(compute, device, matmul))


def _set_up_logging(is_first: bool) -> None:
    logging.basicConfig(level=logging.INFO if is_first else logging.ERROR, force=True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableFormatter("%(message)s"))
        handler.addFilter(lambda record: record.levelno >= logging.WARNING or record.name == log.name)


def _do_long_work(
    mesh: Mesh,
    watchdog: Watchdog | None,
    doing: str,
    action: Callable[[Callable[[], None]], T],
    runs_here: bool,
    leave: Callable[[], None] = lambda: None,
) -> T | None:
    """Carry out work like `agree_on_long_work`, and return the first process's result there, None elsewhere."""
    if watchdog is None:  # nobody waits, and Ctrl-C reaches the work in this thread
        return action(lambda: None) if runs_here else None
    results = agree_on_long_work(mesh, doing, action, runs_here=runs_here, watch=watchdog.set_activity, leave=leave)
    return results[0] if results else None


def _train(
    config: RunConfig,
    mesh: Mesh,
    launch: Launch,
    stages: Stages,
    signals: StopSignals,
    forecast: ForecastWriter | None,
    watchdog: Watchdog | None,
    read_benchmarks: ReadBenchmarks | None,
    corpora: ModuleType | None,
    in_memory: MemoryCheckpoints | None,
) -> int:
    output = Path(config.train.output)
    checkpoint = find_checkpoint(config, mesh, in_memory)  # first: data may take long to prepare
    sources = _sources(config, mesh, launch, watchdog, corpora)
    # from here on, and in config.yaml, ids stand in place of what follows the tokenizer
    config = replace(config, data=with_ids(config.data))
    packing = config.data.packing
    if sources.tokenizer is not None:
        bos = begin_id(packing.bos, sources.tokenizer)
        log.info("%-12s %s", "tokenizer", describe_ids(sources.tokenizer, packing.eod, bos))
    prompts = _prompts(config, sources)
    validates = sources.validation is not None and config.validation.every
    validation = Validation(config, sources, mesh) if validates else None
    benchmarks = read_benchmarks(config) if read_benchmarks and config.evaluate.every else None
    warn_of_slow_format(config, mesh)
    recorded = None
    if checkpoint is not None:
        recorded = read_index(checkpoint).get("choices")
    choices = choose(config, mesh, recorded)
    torch.set_float32_matmul_precision(choices.fp32_matmul)
    if mesh.device.type != "cpu":
        warm_up(config, mesh, choices.attention, choices.compile == "true")
    trainer = Trainer(config, mesh, stages, choices)
    if watchdog is not None:
        watchdog.follow(trainer)
    _log_states(config, trainer)
    index = _begin(config, trainer, checkpoint, in_memory)
    ranks = gather_objects(describe_rank(mesh, launch.local_rank), mesh.group("world"))
    # only now: a run that is refused must not overwrite what another one left
    agree_on_first(mesh, lambda: _describe_folder(output, config, choices, ranks, corpora))
    with Heartbeat(output if mesh.is_first else None) as heartbeat:
        loop = Loop(config, trainer, sources, validation, benchmarks, index, signals, heartbeat, forecast, in_memory)
        if trainer.step >= config.train.steps:
            log.info("all %d steps of this run are done; set a larger train.steps to continue it", config.train.steps)
        started = time.perf_counter()
        with allocating(lambda: f"{mesh.name} ({mesh.device}), {place_of(trainer).words}", advise_less_memory(config)):
            loop.run()
        if loop.stopped:
            _stop(loop, signals)
            return config.train.stop_status
        _finish(loop, prompts, time.perf_counter() - started)
        return 0


def _begin(config: RunConfig, trainer: Trainer, path: Path | None, memory: MemoryCheckpoints | None) -> dict[str, Any]:
    """Restore a trainer from a checkpoint and return its index, or start from the beginning."""
    if path is not None:
        if memory is not None:
            memory.fetch(path, trainer)
        index = load_checkpoint(path, config, trainer)
        log.info("continuing from %s (step %d)", path, trainer.step)
        return index
    index = begin(config, trainer)
    if index:
        rollbacks = len(index["watch"].get("rollbacks", ()))
        log.info("starting again from the seed with sample %d, after %d rollbacks", index["samples"], rollbacks)
    return index


def _log_states(config: RunConfig, trainer: Trainer) -> None:
    mesh, optimizer = trainer.mesh, trainer.optimizer
    place = "host" if "optimizer" in config.memory.offload else "device"
    log.info("%-12s %s on the %s, by %s", "update", config.optimizer.name, place, implementation(optimizer))
    planned = plan_states(config, mesh.layout, mesh.rank, trainer.stages.of(mesh.at.pipeline))
    held = sum(held_bytes(trainer.parameters.flat_parameters, optimizer).values())
    log.info(f"{'memory':<12} {planned.words()}; measured {size(held)}")


def _describe_folder(
    output: Path, config: RunConfig, choices: Choices, ranks: Sequence[Mapping[str, Any]], corpora: ModuleType | None
) -> None:
    """Write configuration, tokenizer, chat template, choices and ranks, so that the run folder is self-contained."""
    save_config(output, config)
    save_choices(output, choices)
    save_nodes(output, ranks)
    if tokenizer := tokenizer_of(config.data):
        keep_tokenizer(output, tokenizer)
    if config.checkpoint.init_from is not None:
        keep_generation(output, Path(config.checkpoint.init_from))
    if not isinstance(config.data, InstructionsData):
        keep_template(output, None)
    elif corpora is not None:
        keep_template(output, corpora.portable_template(config.data))


def _sources(
    config: RunConfig, mesh: Mesh, launch: Launch, watchdog: Watchdog | None, corpora: ModuleType | None
) -> Sources:
    """Prepare the data once per file system, then open it; this may be slow, but must report progress.

    The first node goes first, so that the others find a shared file system ready.
    """
    num_validation = config.validation.sequences if config.validation.every else 0
    opened: list[Sources] = []

    def make(on_progress: Callable[[], None]) -> None:
        if corpora is None:
            pack(config.data, config.model, on_progress)
        else:
            corpora.prepare(config.data, config.model, mesh.is_first, on_progress)

    def open_all(on_progress: Callable[[], None]) -> None:
        sizes = config.batch.global_size, num_validation
        opened.append(open_sources(config.data, config.model, config.train.seed, *sizes, on_progress))

    before = set(active_children())

    def end_workers() -> None:
        for worker in {*active_children()} - before:
            worker.kill()  # Python would wait for one that hangs

    doing, is_first_on_node = f"preparing data={config.data.kind}", launch.local_rank == 0 and not mesh.is_first
    for action, runs_here in ((make, mesh.is_first), (make, is_first_on_node), (open_all, True)):
        _do_long_work(mesh, watchdog, doing, action, runs_here, end_workers)
    if watchdog is not None:
        watchdog.set_activity()
    (sources,) = opened
    if (position := sources.train.position) is not None:
        require_same_text(mesh, position)
    return sources


def _prompts(config: RunConfig, sources: Sources) -> list[list[int]]:
    """Return the encoded prompts of `sample`, if tokens are asked for. Raises UserError if a prompt is too long."""
    if not config.sample.tokens:
        return []
    assert sources.tokenizer is not None
    ids = (config.data.packing.eod, config.model.sequence, begin_id(config.data.packing.bos, sources.tokenizer))
    return encode_prompts(config.sample.prompts, sources.tokenizer, *ids)


def _stop(loop: Loop, signals: StopSignals) -> None:
    saved = "no checkpoint is saved (checkpoint.every = 0); the same command starts where this one did"
    if loop.checkpoint:
        saved = f"{loop.checkpoint} is saved; start the same command again to continue"
    stopped = "stopped after step %d (%s): %s"
    log.info(stopped, loop.trainer.step, loop.stopped, saved, extra={"alert": "stopped"})
    if loop.trainer.mesh.is_first:
        draw_pictures(loop)
    if loop.stopped == "SIGTERM":
        signals.linger()


def _finish(loop: Loop, prompts: list[list[int]], seconds: float) -> None:
    """Finish a complete run: all processes generate text together, and the first one writes and prints."""
    config, texts = loop.config, []
    if prompts:
        model = in_training(config, loop.trainer, loop.sources.tokenizer)
        sampling = Sampling(
            config.sample.tokens, config.sample.temperature, config.sample.top_k, seed=config.train.seed
        )
        texts = [text.prompt + text.text for text in continue_prompts(model, prompts, sampling)]
    if loop.trainer.mesh.is_first:
        finish(loop, texts, seconds)
