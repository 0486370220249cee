"""Contradictions between the keys of a configuration; bounds of single values are declared with their fields."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pangu.common.errors import ConfigError, Problem
from pangu.config import dependencies
from pangu.config.attention import ABILITIES, obstacles
from pangu.config.build import findings, read
from pangu.config.data import DataConfig, IndexedData, InstructionsData, StdlibData, StreamData, SyntheticData
from pangu.config.dependencies import unmet
from pangu.config.layout_checks import data_size, layout_problems
from pangu.config.model_checks import contradictions
from pangu.config.optimizer import MuonConfig
from pangu.config.schema import RunConfig
from pangu.config.stages import stage_problems
from pangu.config.suggest import any_of, multiples_near

MINIMUM_STDLIB_VOCAB = 512
"""Smallest vocabulary of the stdlib tokenizer: 256 bytes, ten special tokens and the characters of Python sources."""

BF16_BETA = 0.99
"""Largest beta for bf16 moments: x - x / 100 rounds to a different number, x - x / 1000 back to x."""

Rule = Callable[[RunConfig], Iterator[Problem]]


def check(config: RunConfig, world: int) -> int:
    """Check a configuration against the number of processes and return the data-parallel size.

    A dry run need not fit `world`. Raises ConfigError with all invalid values and contradictions.
    """
    checked, problems = find_problems(asdict(config))
    problems += layout_problems(checked, world)
    if problems:
        raise ConfigError(problems)
    return data_size(config, world)


def find_problems(values: Mapping[str, Any]) -> tuple[RunConfig, list[Problem]]:
    """Return the parsed configuration and all problems that do not depend on the number of processes."""
    config, problems = read(RunConfig, values)
    problems += contradictions(config.model) + [problem for rule in _RULES for problem in findings(rule, config)]
    problems += unmet(config, dependencies.RECIPE)
    return config, problems


def _kernel(config: RunConfig) -> Iterator[Problem]:
    if config.model.attention != "auto":
        yield from obstacles(config.model.attention, config.model, config.precision.compute)


def _determinism(config: RunConfig) -> Iterator[Problem]:
    kernel = config.model.attention
    if config.train.deterministic and kernel != "auto" and not ABILITIES[kernel].ordered:
        rule = "is not deterministic (its sums vary in order), and train.deterministic = true"
        yield Problem("model.attention", kernel, rule, "set model.attention=auto or train.deterministic=false")


def _recompute(config: RunConfig) -> Iterator[Problem]:
    memory, layers = config.memory, config.model.layers
    if isinstance(memory.recompute, int) and memory.recompute > layers:
        rule = f"must be none, selective, full or a number of layers up to model.layers = {layers}"
        yield Problem("memory.recompute", memory.recompute, rule)
    if memory.recompute == "selective" and not memory.selective:
        yield Problem("memory.selective", [], "lists nothing to recompute", "use [attention, activation, norm]")


def _moments(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    rates = {f"optimizer.betas[{i}]": beta for i, beta in enumerate(optimizer.betas)}
    if isinstance(optimizer, MuonConfig):
        rates["optimizer.momentum"] = optimizer.momentum
    for key, rate in rates.items():
        if optimizer.moments == "bf16" and rate > BF16_BETA:
            rule = "bf16 moments have 8 bits of precision, so a decay of less than 1/256 per step has no effect"
            yield Problem(key, rate, rule, f"use {BF16_BETA:g}, or set optimizer.moments=fp32")


def _loss_scale(config: RunConfig) -> Iterator[Problem]:
    precision, scale = config.precision, config.precision.loss_scale
    if (precision.compute == "fp16") != (scale is not None):
        rule = "precision.loss_scale is required for fp16, and must be null for other formats"
        yield Problem("precision.compute", precision.compute, rule, "set precision=fp16, bf16 or fp32, which sets both")
    if scale is not None and scale.initial < scale.minimum:
        rule = f"must be at least precision.loss_scale.minimum = {scale.minimum:g}"
        yield Problem("precision.loss_scale.initial", scale.initial, rule, "use e.g. 65536")


def _least_rate(config: RunConfig) -> Iterator[Problem]:
    schedule = config.lr_schedule
    if schedule.min_lr > config.optimizer.lr:
        rule = f"must not exceed optimizer.lr = {config.optimizer.lr:g}"
        yield Problem("lr_schedule.min_lr", schedule.min_lr, rule, "use 0")


def _decay(config: RunConfig) -> Iterator[Problem]:
    schedule, total = config.lr_schedule, config.train.steps
    if schedule.shape == "wsd":
        # as `learning_rate` does
        length = schedule.decay_steps if schedule.decay_steps is not None else max(1, total // 10)
        if schedule.warmup_steps + length > total:
            keys, values = "lr_schedule.warmup_steps, lr_schedule.decay_steps", f"{schedule.warmup_steps}, {length}"
            yield Problem(keys, values, f"together must not exceed train.steps = {total}", "lower one of them")
    elif schedule.shape in ("cosine", "linear") and (schedule.decay_steps or math.inf) < schedule.warmup_steps:
        rule = f"must not exceed lr_schedule.decay_steps = {schedule.decay_steps}, the step at which the decay ends"
        fix = "lower it, or raise lr_schedule.decay_steps"
        yield Problem("lr_schedule.warmup_steps", schedule.warmup_steps, rule, fix)


def _packing(config: RunConfig) -> Iterator[Problem]:
    packing, vocab = config.data.packing, config.model.vocab
    for key in ("eod", "pad", "bos"):
        value = getattr(packing, key)
        if isinstance(value, int) and value >= vocab:
            rule = f"must be an id below model.vocab = {vocab}"
            yield Problem(f"data.packing.{key}", value, rule, "use null if there is none")
    if any(token >= vocab for token in packing.stop):
        yield Problem("data.packing.stop", packing.stop, f"must be ids below model.vocab = {vocab}", "use [] for none")
    packed, is_stream = packing.method != "concat", isinstance(config.data, StreamData)
    lacks_eod = packing.eod is None and not (packed and is_stream)  # a stream's tokenizer has one
    if packed and isinstance(config.data, SyntheticData):
        yield Problem("data.packing.method", packing.method, "data=synthetic has no documents", "use concat")
    elif isinstance(config.data, InstructionsData):
        if not packed:
            rule = "would split conversations"
            yield Problem("data.packing.method", "concat", rule, "use best_fit or single")
    elif packed and lacks_eod and not isinstance(packing.bos, int):  # where a document begins, the last one ends
        rule = f"data.packing.method = {packing.method} needs the end-of-document id"
        yield Problem("data.packing.eod", None, rule, "set an id, or data.packing.method=concat")
    elif lacks_eod and (packing.reset_mask or packing.reset_positions):
        rule = "is required if data.packing.reset_mask or data.packing.reset_positions is true"
        yield Problem("data.packing.eod", None, rule, "set the end-of-document id, or use false for both")
    if packing.index is not None and (is_stream or not packed):
        rule = "only packed samples of indexed files have an index"
        fix = "use null" if is_stream else "use null, or set data.packing.method=best_fit"
        yield Problem("data.packing.index", packing.index, rule, fix)
    if packing.eod is not None and packing.eod == packing.pad:
        rule = f"must differ from data.packing.pad = {packing.pad}: ends of documents count in the loss"
        yield Problem("data.packing.eod", packing.eod, rule)


def _vocabulary(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config.data, StdlibData) and config.model.vocab < MINIMUM_STDLIB_VOCAB:
        rule = "is too small for the tokenizer of data=stdlib"
        yield Problem("model.vocab", config.model.vocab, rule, f"use {MINIMUM_STDLIB_VOCAB} or more")


def _files(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if not isinstance(data, (IndexedData, StreamData, InstructionsData)):
        return
    if not data.train and not config.dry_run:  # a dry run reads no data
        examples = {
            "indexed": "[PREFIX], where PREFIX.bin and PREFIX.idx are written by tools/preprocess_data.py",
            "stream": "[FOLDER]",
            "instructions": "[FILE.jsonl], with one conversation per line",
        }
        yield Problem("data.train", [], "lists no files", f"set data.train={examples[data.kind]}")
    stages = data.weight_schedule if isinstance(data, IndexedData) else ()
    later_stages = [(f"data.weight_schedule[{i}].weights", stage.weights) for i, stage in enumerate(stages)]
    for key, weights in (("data.weights", data.weights), *later_stages):
        if weights is not None and len(weights) != len(data.train):
            by_default = "in proportion to tokens" if isinstance(data, IndexedData) else "as one source"
            rule = f"needs one weight for each entry of data.train, {len(data.train)} in all"
            fix = f"set data.weights=null to sample {by_default}" if key == "data.weights" else "add or remove weights"
            yield Problem(key, weights, rule, fix)
        elif weights is not None and not any(weights):
            yield Problem(key, weights, "at least one weight must be above 0")
    samples = [stage.sample for stage in stages]
    if samples != sorted(set(samples)):
        yield Problem("data.weight_schedule", samples, "`sample` must increase from one entry to the next")
    if data.tokenizer is None and not isinstance(data, IndexedData) and not config.dry_run:
        fix = "set data.tokenizer={kind:huggingface,path:FOLDER}, or another kind"
        yield Problem("data.tokenizer", None, "is needed to turn text into tokens", fix)
    if data.tokenizer is not None and bool(data.tokenizer.path) == (data.tokenizer.kind == "bytes"):
        kind = data.tokenizer.kind
        rule = f"a tokenizer of kind {kind} {'takes no path' if kind == 'bytes' else 'needs a file or folder'}"
        yield Problem("data.tokenizer.path", data.tokenizer.path, rule)


def _validation(config: RunConfig) -> Iterator[Problem]:
    data, every = config.data, config.validation.every
    without = isinstance(data, SyntheticData) or (not isinstance(data, StdlibData) and not data.validation)
    if isinstance(data, StreamData) and data.holdout:
        without = False
    if every and not config.dry_run and without:
        fix = "" if isinstance(data, SyntheticData) else ", or set data.validation"
        fix += " or data.holdout" if isinstance(data, StreamData) else ""
        rule = f"data.kind = {data.kind} has no held-out data"
        yield Problem("validation.every", every, rule, f"set validation.every=0{fix}")


def _sample(config: RunConfig) -> Iterator[Problem]:
    tokens = config.sample.tokens
    if tokens:
        yield from _without_tokenizer(config.data, "sample.tokens", tokens)
    if tokens and not config.sample.prompts:
        yield Problem("sample.prompts", [], "sample.tokens > 0 needs a prompt to continue", "use e.g. ['Once']")


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    if checkpoint.init_from is not None and checkpoint.resume not in ("auto", "none"):
        rule = f"checkpoint.resume = {checkpoint.resume} already provides the weights"
        yield Problem("checkpoint.init_from", checkpoint.init_from, rule, "use null, or set checkpoint.resume=auto")
    yield from _upcycling(config)
    if checkpoint.every > 0 and checkpoint.keep_every % checkpoint.every:
        near = multiples_near(checkpoint.every, checkpoint.keep_every)
        rule = f"must be a multiple of checkpoint.every = {checkpoint.every}"
        yield Problem("checkpoint.keep_every", checkpoint.keep_every, rule, any_of(near))
    apart, validation = checkpoint.every, config.validation.every
    # steps that are saved and validated are frequent only if one interval divides the other
    if checkpoint.keep_best and apart and (not validation or (apart % validation and validation % apart)):
        rule = f"needs checkpoints of validated steps: checkpoint.every = {apart}, validation.every = {validation}"
        fix = f"use 0, or set validation.every={apart} or another divisor or multiple of checkpoint.every"
        yield Problem("checkpoint.keep_best", checkpoint.keep_best, rule, fix)


def _upcycling(config: RunConfig) -> Iterator[Problem]:
    """Yield the reasons why experts copied from dense layers would not compute the same as those layers."""
    given, model = "with checkpoint.upcycle = true", config.model
    if not config.checkpoint.upcycle or model.experts is None:
        return
    rule = f"{given} the weights of a token's experts must add up to 1"
    if not model.router.normalised:
        yield Problem("model.router.normalised", False, rule, "use true")
    if model.router.scale != 1:
        yield Problem("model.router.scale", model.router.scale, rule, "use 1")
    if model.shared_experts:
        rule = f"{given} shared experts would add to the output of the copies"
        yield Problem("model.shared_experts", model.shared_experts, rule, "use 0")
    if model.expert_size != model.ffn_size:
        rule = f"{given} each expert is a copy of a dense layer of {model.ffn_size} columns"
        yield Problem("model.expert_ffn", model.expert_ffn, rule, "use null")


def _local_paths(config: RunConfig) -> Iterator[Problem]:
    paths = {
        "train.output": config.train.output,
        "checkpoint.resume": config.checkpoint.resume,
        "checkpoint.init_from": config.checkpoint.init_from,
        "data.folder": getattr(config.data, "folder", None),
        "data.packing.index": config.data.packing.index,
    }
    for key, path in paths.items():
        if isinstance(path, str) and re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
            rule = f"{path.partition(':')[0]}:// is not supported, only folders mounted on this machine"
            fix = f"use a path such as {path.partition('://')[2] or 'runs/default'}"
            yield Problem(key, path, rule, fix + f" and checkpoint.remote={path}" * (key == "train.output"))
    if (remote := config.checkpoint.remote) is None:
        return
    kind, mark, folder = remote.partition("://")
    if not mark:
        yield Problem("checkpoint.remote", remote, "must be a URL", f"use e.g. s3://BUCKET/RUN, or file://{remote}")
    elif kind in ("file", "local") and Path(folder).resolve() == Path(config.train.output).resolve():
        yield Problem("checkpoint.remote", remote, "is the same folder as train.output", "use another folder, or null")


def _stop_after(config: RunConfig) -> Iterator[Problem]:
    value = config.train.stop_after
    try:
        limit = config.train.stop_after_s
    except (ValueError, OverflowError):
        yield Problem("train.stop_after", value, "must be a duration", "use e.g. 5400, 90m, 1h30m or null")
        return
    if limit is not None and not limit > 0:
        yield Problem("train.stop_after", value, "must be above 0", "use null for no limit")


def _faults(config: RunConfig) -> Iterator[Problem]:
    if config.faults.action == "rollback" and not config.checkpoint.every:
        rule = "checkpoint.every = 0 saves no checkpoint to roll back to"
        yield Problem("faults.action", "rollback", rule, "use stop, or set checkpoint.every=100")


def _evaluate(config: RunConfig) -> Iterator[Problem]:
    evaluate, off = config.evaluate, "set evaluate.every=0"
    if evaluate.every and not evaluate.tasks:
        yield Problem("evaluate.tasks", "[]", "lists no task", f"{off}, or e.g. evaluate.tasks=[lambada]")
    if evaluate.every and evaluate.data is None:
        yield Problem("evaluate.data", None, "must be the folder that holds the tasks' files", f"set it, or {off}")
    if evaluate.every:
        yield from _without_tokenizer(config.data, "evaluate.every", evaluate.every)


def _without_tokenizer(data: DataConfig, key: str, value: int) -> Iterator[Problem]:
    """Yield the problem of a key that needs the tokenizer of the data where there is none."""
    if isinstance(data, SyntheticData) or (isinstance(data, (IndexedData, StreamData)) and data.tokenizer is None):
        fix = "" if isinstance(data, SyntheticData) else ", or set data.tokenizer"
        yield Problem(key, value, f"data.kind = {data.kind} has no tokenizer", f"set {key}=0{fix}")


_RULES: tuple[Rule, ...] = (
    _kernel,
    _determinism,
    _recompute,
    _moments,
    _loss_scale,
    _least_rate,
    _decay,
    stage_problems,
    _packing,
    _vocabulary,
    _files,
    _validation,
    _sample,
    _checkpoint,
    _stop_after,
    _faults,
    _local_paths,
    _evaluate,
)
