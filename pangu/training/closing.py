"""The last lines of a run: what came out, where it lies, what to do next."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pangu.config.data import StdlibData
from pangu.config.schema import RunConfig
from pangu.metrics.text import duration


def closing_words(config: RunConfig, summary: Mapping[str, Any]) -> str:
    """Several lines; every command in them works as it stands from the folder that the run was started in."""
    output = Path(config.train.output)
    lines = [
        f"\n{summary['steps']} steps, {summary['tokens']:,} tokens; "
        f"this part of the run took {duration(summary['seconds'])}"
    ]
    if summary["validation_loss"] is not None:
        lines.append(
            f"held-out loss {summary['validation_loss']:.4f}, perplexity {summary['validation_perplexity']:.2f}"
        )
    lines += [f"\nsampled: {text!r}" for text in summary["samples"]]
    places = [
        ("loss curve", output / "plots" / "loss.png"),
        ("pipeline", output / "plots" / "pipeline.svg"),
        ("as measured", output / "plots" / "pipeline_measured.svg"),
        ("its trace", output / "plots" / "pipeline_measured.json"),
        ("every step", output / "metrics.jsonl"),
        ("summary", output / "summary.json"),
        ("configuration", output / "config.yaml"),
        ("checkpoints", output / "checkpoints"),
    ]
    lines += ["", f"run folder {output}"]
    lines += [f"  {name:<14} {place}" for name, place in places if place.exists()]
    lines += ["", "next"]
    lines += [f"  {command}\n      {what}" for command, what in _next_commands(config)]
    return "\n".join(lines)


def _next_commands(config: RunConfig) -> list[tuple[str, str]]:
    """Commands that continue from here, made from the one that was given, and what each does."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    start = (f"torchrun --nproc-per-node={world}" if world > 1 else "python") + " pretrain.py"
    given = [word for word in sys.argv[1:] if not word.startswith("train.steps=")]
    same = shlex.join([*start.split(), *given])
    output = config.train.output
    commands = [(f"{same} train.steps={2 * config.train.steps}", "goes on for as long again")]
    if isinstance(config.data, StdlibData) and config.optimizer.name == "adam":
        other = shlex.join(["optimizer=lamb", f"train.output={output}_lamb", f"data.folder={config.data.folder}"])
        commands.append((f"{same} {other}", "the same with LAMB"))
    if config.sample.prompts and config.checkpoint.every:
        write = shlex.join(["python", "scripts/generate.py", output, "--prompt", config.sample.prompts[0]])
        commands.append((write, "continues a text"))
    if config.metrics.tensorboard:
        commands.append((shlex.join(["tensorboard", "--logdir", f"{output}/tensorboard"]), "curves in the browser"))
    commands.append(("python pretrain.py +config=pangu_13b dry_run=true", "what a large preset asks for"))
    commands.append(("python pretrain.py --help", "all groups and keys"))
    return commands
