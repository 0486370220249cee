"""End of a run: summary, pictures, and a few lines about results, files and next commands."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from textwrap import indent
from typing import Any

from pangu.common.commands import PROGRAMS, is_installed_command
from pangu.common.errors import UserError, writing
from pangu.common.files import read_json_object, write_atomically
from pangu.config.data import InstructionsData, StdlibData
from pangu.config.schema import RunConfig
from pangu.metrics.devices import peak_memory_gib
from pangu.metrics.text import duration, figure
from pangu.models.size import num_parameters
from pangu.training.loop import Loop

log = logging.getLogger("pangu")

FIGURES = ("loss", "validation_loss", "validation_perplexity", "evaluation")
"""Figures of the last step, which the summary repeats."""


def finish(loop: Loop, texts: list[str], seconds: float) -> None:
    """Write summary.json and pictures of a complete run, on the first process, and print the results.

    `texts`: generated samples; `seconds`: time of the loop.
    """
    config, record = loop.config, loop.record
    output = Path(config.train.output)
    figures = (
        _earlier(output, loop.trainer.step) if record is None else {name: getattr(record, name) for name in FIGURES}
    )
    summary = {
        "steps": loop.trainer.step,
        "skipped": loop.trainer.skipped,
        "rollbacks": len(loop.spikes.rollbacks),
        "tokens": loop.tokens,
        "parameters": num_parameters(config.model),
        "devices": loop.trainer.mesh.layout.world,
        **figures,
        "deterministic": config.train.deterministic,
        "seconds": seconds,
        "peak_memory_gib": peak_memory_gib(loop.trainer.mesh.device),
        "forecast": loop.forecast and loop.forecast.as_dict(),
        "profile": loop.profile and loop.profile.as_dict(),
        "checkpoint": str(loop.checkpoint) if loop.checkpoint else None,
        "samples": texts,
    }
    if record is not None:
        with writing(output):
            write_atomically(output / "summary.json", json.dumps(summary, indent=1, ensure_ascii=False).encode())
    draw_pictures(loop)
    log.info(summary_lines(config, summary))


def _earlier(output: Path, step: int) -> dict[str, Any]:
    """Return the last step's figures from an earlier start's summary; None where there are none of this step."""
    summary: dict[str, Any] = {}
    with suppress(UserError):
        summary = read_json_object(output / "summary.json")
    is_of_step = summary.get("steps") == step
    values = {name: summary.get(name) for name in FIGURES}
    return {name: value if is_of_step and isinstance(value, float) else None for name, value in values.items()}


def draw_pictures(loop: Loop) -> None:
    """Draw the loss curve and, for a pipeline, the timeline of each stage, unless matplotlib is not installed."""
    if find_spec("matplotlib") is None:
        log.info("no pictures: matplotlib is not installed")
        return
    # matplotlib, an optional package, whose memory training did not take
    from pangu.training.pictures import draw_run  # noqa: PLC0415

    with writing(Path(loop.config.train.output)):
        draw_run(loop)


def summary_lines(config: RunConfig, summary: Mapping[str, Any]) -> str:
    """Return the lines to print; every command in them works in the folder that the run was started in."""
    output = Path(config.train.output)
    lines = [
        f"\n{summary['steps']} steps, {summary['tokens']:,} tokens; "
        f"this part of the run took {duration(summary['seconds'])}"
    ]
    loss, perplexity = summary["validation_loss"], summary["validation_perplexity"]
    if loss is not None and perplexity is not None:
        lines.append(f"held-out loss {loss:.4f}, perplexity {figure(perplexity)}")
    lines += [f"\nsampled:\n{indent(text, '    ')}" for text in summary["samples"]]
    names = {
        "loss curve": "plots/loss.png",
        "pipeline": "plots/pipeline.svg",
        "as measured": "plots/pipeline_measured.svg",
        "a step's time": "plots/profile.png",
        "its trace": "plots/profile.json",
        "every step": "metrics.jsonl",
        "summary": "summary.json",
        "configuration": "config.yaml",
        "checkpoints": "checkpoints",
    }
    lines += ["", f"run folder {output}"]
    lines += [f"  {what:<14} {output / name}" for what, name in names.items() if (output / name).exists()]
    lines += ["", "next"]
    lines += [f"  {command}\n      {what}" for command, what in _next_commands(config)]
    return "\n".join(lines)


def _next_commands(config: RunConfig) -> list[tuple[str, str]]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    pretrain = _program("train")
    start = [*_program("launch"), f"--nproc-per-node={world}", pretrain[-1]] if world > 1 else pretrain
    output = config.train.output
    longer = _changed(sys.argv[1:], f"train.steps={2 * config.train.steps}")
    commands = [(shlex.join([*start, *longer]), "continues for as many steps again")]
    if isinstance(config.data, StdlibData) and config.optimizer.name == "adam":
        lamb = ("optimizer=lamb", f"train.output={output}_lamb", f"data.folder={config.data.folder}")
        commands.append((shlex.join([*start, *_changed(sys.argv[1:], *lamb)]), "the same with LAMB"))
    has_tokenizer = isinstance(config.data, StdlibData) or getattr(config.data, "tokenizer", None) is not None
    if has_tokenizer and config.checkpoint.every:
        what = "answers" if isinstance(config.data, InstructionsData) else "continues a text"
        prompt = [*config.sample.prompts, "Hello"][0]
        commands.append((shlex.join([*_program("generate"), output, "--prompt", prompt]), what))
    if config.checkpoint.init_from and config.checkpoint.every:  # the core does not know which models a format has
        commands.append((shlex.join([*_program("convert"), "--help"]), "exports for Hugging Face and other programs"))
    if config.cluster is not None and config.profile and not config.batch.stages:
        corrected = shlex.join([*_program("calibrate"), "--from", output, "--output", "corrected.yaml"])
        commands.append((corrected, "corrects the cluster's figures with this run"))
    if config.metrics.tensorboard:
        commands.append((shlex.join(["tensorboard", "--logdir", f"{output}/tensorboard"]), "curves in the browser"))
    commands.append((f"{shlex.join(pretrain)} +config=pangu_13b dry_run=true", "what a large preset needs"))
    commands.append((f"{shlex.join(pretrain)} --help", "all groups and keys"))
    return commands


def _changed(words: Sequence[str], *changes: str) -> list[str]:
    keys = {change.partition("=")[0] for change in changes}
    return [*(word for word in words if word.partition("=")[0].lstrip("+") not in keys), *changes]


def _program(command: str) -> list[str]:
    """Return the words that start a program of this project, the last of which is its name or file."""
    if is_installed_command():
        return ["pangu", command] if shutil.which("pangu") else ["python", "-m", "pangu", command]
    return ["python", str(Path(sys.argv[0]).parent / f"{PROGRAMS[command][0]}.py")]
