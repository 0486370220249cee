"""A run from its configuration to its summary: the only place that wires all parts together."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from pangu.checkpoint.index import read_index
from pangu.checkpoint.run_folder import make_run_folder, save_config
from pangu.checkpoint.run_tokenizer import keep_tokenizer
from pangu.collectives.reduce import answered
from pangu.config.errors import writing
from pangu.config.files import write_atomically
from pangu.config.printable import PrintableFormatter
from pangu.config.schema import RunConfig
from pangu.data.sources import Sources, open_sources, prepare, tokenizer_of
from pangu.evaluation.generation import Sampling
from pangu.evaluation.text import continue_prompts, encode_prompts
from pangu.layers.kernels import attention_kernels
from pangu.metrics.devices import peak_memory_gib
from pangu.metrics.meter import perplexity
from pangu.models.frozen import count_frozen
from pangu.models.language_model import build_model
from pangu.models.size import num_parameters
from pangu.optim.build import implementation
from pangu.pipeline.advice import advise
from pangu.pipeline.simulate import simulate
from pangu.pipeline.stages import Stages
from pangu.planning.layouts import choose_layout
from pangu.planning.report import describe
from pangu.planning.states import fullest_states, held_bytes, plan_states, tell_states
from pangu.topology.launch import Launch, choose_device
from pangu.topology.mesh import Mesh
from pangu.training.assemble import assemble, in_training
from pangu.training.choices import Choices, choose, save_choices, warn_of_slow_format
from pangu.training.closing import closing_words
from pangu.training.heartbeat import Heartbeat
from pangu.training.lock import only_run
from pangu.training.loop import Loop
from pangu.training.preflight import check_cluster, raise_open_files
from pangu.training.profile import show
from pangu.training.requests import Requests
from pangu.training.saving import begin_with, find_checkpoint, load_checkpoint
from pangu.training.step import Trainer
from pangu.training.together import together
from pangu.training.validation import Validation

log = logging.getLogger("pangu")


def run(values: Mapping[str, Any]) -> None:
    """Check the configuration, then train.

    Args:
        values: the composed configuration as plain dictionaries.

    Raises:
        UserError: for everything that the user can mend.
    """
    began = time.perf_counter()
    launch = Launch.from_environment()
    logging.basicConfig(level=logging.INFO if launch.rank == 0 else logging.ERROR, force=True)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(PrintableFormatter("%(message)s"))
    config, layout, stages = choose_layout(values, launch.world)
    frozen = count_frozen(config.train.frozen, build_model(config.model)[1])
    log.info(describe(config, layout, fullest_states(config, layout, stages)))
    if frozen:
        log.info("%-12s %s parameters (train.frozen)", "frozen", f"{frozen:,}")
    if layout.pipeline > 1:
        for line in advise(stages.schedule, stages.durations, config.model.layers, config.batch.micro_size):
            log.info(line)
    if config.dry_run:
        return
    device = choose_device(config.train.device, launch)
    attention_kernels(config.model, config.precision.compute, device)  # one that cannot run here is refused at once
    raise_open_files(launch.world)
    mesh = Mesh.connect(layout, device, config.parallel.timeout_s, launch.attempt)
    try:
        output = Path(config.train.output)
        with ExitStack() as held:
            held.enter_context(answered(mesh, lambda: "before or after training"))
            together(mesh, lambda: make_run_folder(output), here=mesh.is_first)
            check_cluster(config, mesh)
            together(mesh, lambda: held.enter_context(only_run(output)), here=mesh.is_first)
            requests = Requests(mesh, began, config.train.stop_after_s)
            _train(config, mesh, launch, stages, requests)
    finally:
        mesh.close()


def _train(config: RunConfig, mesh: Mesh, launch: Launch, stages: Stages, requests: Requests) -> None:
    output = Path(config.train.output)
    sources = _sources(config, mesh, launch)
    prompts = _prompts(config, sources)
    benchmarks = _benchmarks(config, sources)
    checkpoint = find_checkpoint(config, mesh)
    warn_of_slow_format(config, mesh)
    choices = choose(config, mesh, None if checkpoint is None else read_index(checkpoint).get("choices"))
    torch.set_float32_matmul_precision(choices.products)
    trainer = assemble(config, mesh, stages, choices)
    where = "host" if "optimizer" in config.memory.offload else "device"
    log.info("%-12s %s on the %s, by %s", "update", config.optimizer.name, where, implementation(trainer.optimizer))
    for line in tell_states(
        plan_states(config, mesh.layout, mesh.rank, stages),
        held_bytes(trainer.parameters.units, trainer.optimizer),
        mesh.layout,
    ):
        log.info(line)
    facts: dict[str, Any] = {}
    if checkpoint is not None:
        facts = load_checkpoint(checkpoint, config, trainer)
        log.info("continuing from %s (step %d)", checkpoint, trainer.step)
    elif config.checkpoint.init_from is not None:
        begin_with(Path(config.checkpoint.init_from), config, trainer)
        log.info("beginning with the weights of %s", config.checkpoint.init_from)
    # only now: a run that is refused must not overwrite what another one left
    together(mesh, lambda: _describe_folder(output, config, choices), here=mesh.is_first)
    with Heartbeat(output if mesh.is_first else None) as heartbeat:
        validation = None
        if sources.validation is not None and config.validation.every:
            validation = Validation(config, sources.validation, mesh)
        loop = Loop(config, trainer, sources, validation, benchmarks, facts, requests, heartbeat)
        if trainer.step >= config.train.steps:
            log.info("all %d steps of this run are made; a larger train.steps continues it", config.train.steps)
        started = time.perf_counter()
        loop.run()
        if loop.stopped:
            saved = f"{loop.checkpoint} is written" if loop.checkpoint else "nothing is written (checkpoint.every = 0)"
            log.info("stopped after step %d (%s): %s; the same command continues", trainer.step, loop.stopped, saved)
            if mesh.is_first:
                with writing(output):
                    _draw(loop, trainer, output)
            if loop.stopped == "SIGTERM":
                requests.linger()
            return
        _finish(config, trainer, loop, _samples(config, trainer, sources, prompts), time.perf_counter() - started)


def _describe_folder(output: Path, config: RunConfig, choices: Choices) -> None:
    """Configuration and tokenizer, with which the folder can be used without what it was made from, and choices."""
    save_config(output, config)
    save_choices(output, choices)
    if tokenizer := tokenizer_of(config.data):
        keep_tokenizer(output, tokenizer)


def _sources(config: RunConfig, mesh: Mesh, launch: Launch) -> Sources:
    """Prepare the data once per file system (the first node's first, so that a shared one is found ready), open it."""

    def make() -> None:
        prepare(config.data, config.model, show_progress=mesh.is_first)

    together(mesh, make, here=mesh.is_first)
    together(mesh, make, here=launch.local_rank == 0 and not mesh.is_first)
    return open_sources(config.data, config.model, config.train.seed)


def _benchmarks(config: RunConfig, sources: Sources) -> Callable[[Trainer], dict[str, float]] | None:
    """What measures the tasks of `evaluate`; None if it asks for none. Raises UserError if their files are wrong."""
    if not config.evaluate.every:
        return None
    # the tasks are a part of the package that most runs do without
    from pangu.training.evaluation import Evaluation

    return Evaluation(config, sources).figures


def _finish(config: RunConfig, trainer: Trainer, loop: Loop, texts: list[str], seconds: float) -> None:
    """Summary, plot, sampled text and closing words, by the first process."""
    if not trainer.mesh.is_first:
        return
    output = Path(config.train.output)
    summary = {
        "steps": trainer.step,
        "skipped": trainer.skipped,
        "rollbacks": len(loop.watch.rollbacks),
        "tokens": loop.tokens,
        "parameters": num_parameters(config.model),
        "devices": trainer.mesh.layout.world,
        "loss": loop.last_loss,
        "validation_loss": loop.last_validation,
        "validation_perplexity": None if loop.last_validation is None else perplexity(loop.last_validation),
        "evaluation": loop.last_evaluation,
        "seconds": seconds,
        "peak_memory_gib": peak_memory_gib(trainer.mesh.device),
        "checkpoint": str(loop.checkpoint) if loop.checkpoint else None,
        "samples": texts,
    }
    with writing(output):
        if loop.last_loss is not None:
            write_atomically(output / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False).encode())
        _draw(loop, trainer, output)
    log.info(closing_words(config, summary))


def _draw(loop: Loop, trainer: Trainer, output: Path) -> None:
    """The pictures of a run."""
    # matplotlib is a fifth of all that a run imports, and only the first process draws, at the end
    from pangu.metrics.plots import plot_loss
    from pangu.pipeline.draw import draw

    if trainer.mesh.layout.pipeline > 1:
        stages = trainer.stages
        draw(simulate(stages.schedule, stages.durations), output / "plots" / "pipeline", "simulated")
    if loop.timeline is not None:
        show(loop.timeline, output / "plots")
    plot_loss(output / "metrics.jsonl", output / "plots" / "loss.png", output.name)


def _prompts(config: RunConfig, sources: Sources) -> list[list[int]]:
    """What `sample` asks to continue; none if it asks for nothing. Raises UserError if a prompt is too long."""
    if not config.sample.tokens:
        return []
    assert sources.tokenizer is not None
    return encode_prompts(config.sample.prompts, sources.tokenizer, config.data.packing.eod, config.model.sequence)


def _samples(config: RunConfig, trainer: Trainer, sources: Sources, prompts: list[list[int]]) -> list[str]:
    """The prompts and what the model writes after them; all processes draw the text together."""
    if not prompts:
        return []
    model = in_training(config, trainer, sources.tokenizer)
    wanted = config.sample
    sampling = Sampling(wanted.tokens, wanted.temperature, wanted.top_k, seed=config.train.seed)
    return [found.prompt + found.text for found in continue_prompts(model, prompts, sampling)]
