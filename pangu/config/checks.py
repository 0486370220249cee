"""Contradictions between the keys of a configuration, all found in one pass and told in plain words."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pangu.config import architecture, evaluate
from pangu.config.attention import obstacles
from pangu.config.data import IndexedData, StdlibData, SyntheticData
from pangu.config.errors import ConfigError, Problem
from pangu.config.faults import contradictions
from pangu.config.optimizer import LambConfig
from pangu.config.rules import any_of, at_least, divisors_near, multiples_near, positive, within
from pangu.config.schema import RunConfig

MINIMUM_STDLIB_VOCAB = 512
"""256 bytes, ten special pieces and the characters of Python sources need about this many pieces."""

BF16_BETA = 0.99
"""Largest decay of a moment that bf16 can follow: x - x / 100 rounds to another number than x, x - x / 1000 to x."""


def check(config: RunConfig, world: int) -> int:
    """Check a configuration against the number of processes.

    Returns:
        The data-parallel size: `parallel.data`, or what remains if it is left out. For a dry run it need not fit
        `world`.

    Raises:
        ConfigError: with every contradiction found.
    """
    problems = [problem for rule in _RULES for problem in rule(config)]
    data = data_size(config, world)
    problems += [] if config.dry_run else _devices(config, world)
    if not problems or not any(problem.key.startswith("parallel") for problem in problems):
        problems += _batch(config, data)
    if problems:
        raise ConfigError(problems)
    return data


def data_size(config: RunConfig, world: int) -> int:
    """`parallel.data`, or what `world` leaves for it."""
    return config.parallel.data or max(1, world // max(1, config.parallel.tensor * config.parallel.pipeline))


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    yield from architecture.contradictions(model)
    if model.attention != "auto" and model.heads > 0:
        yield from obstacles(model.attention, model, config.precision.compute)


def _parallel(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    yield from at_least("parallel.tensor", parallel.tensor, 1)
    yield from at_least("parallel.pipeline", parallel.pipeline, 1)
    if parallel.data is not None:
        yield from at_least("parallel.data", parallel.data, 1)
    if parallel.bucket_mib is not None:
        yield from positive("parallel.bucket_mib", parallel.bucket_mib)
    if parallel.tensor > 0:
        yield from architecture.shared_matrices(config.model, parallel.tensor)
    if parallel.sequence and parallel.tensor > 0 and config.model.sequence % parallel.tensor:
        rule = f"with parallel.sequence=true it must divide model.sequence = {config.model.sequence}"
        yield Problem(
            "parallel.tensor", parallel.tensor, rule, any_of(divisors_near(config.model.sequence, parallel.tensor))
        )
    if parallel.sequence and parallel.tensor == 1:
        rule = "has nothing to share with parallel.tensor = 1"
        yield Problem("parallel.sequence", "true", rule, "false works, or a larger parallel.tensor")
    yield from at_least("parallel.overlap_chunks", parallel.overlap_chunks, 1)
    if parallel.overlap_chunks > 1 and parallel.tensor == 1:
        rule = "has no communication to hide with parallel.tensor = 1"
        yield Problem("parallel.overlap_chunks", parallel.overlap_chunks, rule, "1 works, or a larger parallel.tensor")
    if isinstance(config.memory.recompute, int) and not 0 <= config.memory.recompute <= config.model.layers:
        rule = f"must be none, selective, full or a number of layers up to model.layers = {config.model.layers}"
        yield Problem("memory.recompute", config.memory.recompute, rule)
    if config.memory.recompute == "selective" and not config.memory.selective:
        yield Problem("memory.selective", "[]", "names no part to compute again", "[attention, activation, norm] works")
    if "activations" in config.memory.offload and config.model.layers <= parallel.pipeline:
        rule = f"the last layer of a stage keeps its own, and no stage of model.layers = {config.model.layers} has two"
        yield Problem("memory.offload", "[activations]", rule, "[] works, or a smaller parallel.pipeline")
    if "parameters" in config.memory.offload and parallel.zero != 3:
        rule = f"parallel.zero = {parallel.zero} keeps all parameters on the device"
        yield Problem("memory.offload", "[parameters]", rule, "[optimizer] works, or parallel.zero=3")
    if config.loss.chunk is not None:
        yield from at_least("loss.chunk", config.loss.chunk, 1)
    chunks, layers = parallel.pipeline * parallel.virtual, config.model.layers
    if chunks > layers > 0:
        key = "parallel.pipeline" if parallel.virtual == 1 else "parallel.pipeline x parallel.virtual"
        yield Problem(key, chunks, f"each chunk needs at least one of model.layers = {layers}", f"1 to {layers} work")
    yield from at_least("parallel.virtual", parallel.virtual, 1)
    yield from positive("parallel.timeout_s", parallel.timeout_s)
    if parallel.zero_group is not None and parallel.zero == 0:
        rule = "parallel.zero = 0 shards nothing"
        yield Problem("parallel.zero_group", parallel.zero_group, rule, "null works, or parallel.zero=1, 2 or 3")


def _devices(config: RunConfig, world: int) -> Iterator[Problem]:
    parallel = config.parallel
    one_model = parallel.tensor * parallel.pipeline
    if one_model < 1 or (parallel.data is not None and parallel.data < 1):
        return
    keys = "parallel.tensor, parallel.pipeline" + (", parallel.data" if parallel.data else "")
    values = f"{parallel.tensor}, {parallel.pipeline}" + (f", {parallel.data}" if parallel.data else "")
    needed = one_model * (parallel.data or 1)
    if world < needed:
        yield Problem(
            keys,
            values,
            f"needs {'' if parallel.data else 'at least '}{needed} devices, one process each, and this run has {world}",
            f"start {needed} processes (torchrun --nproc-per-node and --nnodes), look at the layout on this machine "
            "with dry_run=true, or take a smaller preset such as +config=quickstart",
        )
    elif world % one_model or (parallel.data and world != needed):
        rule = f"this run has {world} processes, which is not {'a multiple of ' if not parallel.data else ''}{needed}"
        works = f"processes that work: {needed}" if parallel.data else any_of(multiples_near(one_model, world))
        yield Problem(keys, values, rule, works)


def _batch(config: RunConfig, data: int) -> Iterator[Problem]:
    batch, group = config.batch, config.parallel.zero_group
    if group is not None and (group < 1 or data % group):
        near = any_of(divisors_near(data, group))
        yield Problem("parallel.zero_group", group, f"must divide the data-parallel size {data}", near)
    wrong = [*at_least("batch.global_size", batch.global_size, 1), *at_least("batch.micro_size", batch.micro_size, 1)]
    yield from wrong
    if not wrong and batch.global_size % (batch.micro_size * data):
        unit = batch.micro_size * data
        rule = f"must be a multiple of batch.micro_size x data-parallel size = {batch.micro_size} x {data} = {unit}"
        works = any_of(multiples_near(unit, batch.global_size))
        if batch.global_size % data == 0:
            micro = divisors_near(batch.global_size // data, batch.micro_size)
            works += f"; or batch.micro_size = {' or '.join(map(str, micro))}"
        yield Problem("batch.global_size", batch.global_size, rule, works)


def _precision(config: RunConfig) -> Iterator[Problem]:
    precision = config.precision
    if (precision.compute == "fp16") != (precision.loss_scale is not None):
        rule = "fp16 needs precision.loss_scale and no other format takes one"
        yield Problem("precision.compute", precision.compute, rule, "precision=fp16, bf16 or fp32 sets both")
    if precision.compute != "fp32" and precision.fp32_products != "auto":
        rule = f"concerns fp32, and precision.compute = {precision.compute}"
        yield Problem("precision.fp32_products", precision.fp32_products, rule, "auto works, or precision=fp32")
    if precision.compute == "fp64" and precision.reduce == "bf16":
        yield Problem("precision.reduce", "bf16", "fp64 is for exact comparisons", "fp32 keeps sums in fp64")
    if precision.loss_scale is not None:
        scale = precision.loss_scale
        yield from positive("precision.loss_scale.minimum", scale.minimum)
        yield from at_least("precision.loss_scale.growth_interval", scale.growth_interval, 1)
        if scale.initial < scale.minimum:
            rule = f"must not be below precision.loss_scale.minimum = {scale.minimum:g}"
            yield Problem("precision.loss_scale.initial", scale.initial, rule, "65536 is usual")


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    yield from positive("optimizer.lr", optimizer.lr)
    yield from positive("optimizer.eps", optimizer.eps)
    yield from at_least("optimizer.weight_decay", optimizer.weight_decay, 0)
    for i, beta in enumerate(optimizer.betas):
        yield from within(f"optimizer.betas[{i}]", beta, 0.0, 1.0)
        if optimizer.moments == "bf16" and beta > BF16_BETA:
            rule = "bf16 moments have 8 bits: one that decays by less than a part in 256 in a step stays where it is"
            yield Problem(f"optimizer.betas[{i}]", beta, rule, f"{BF16_BETA:g} works, or optimizer.moments=fp32")
    if optimizer.moments == "bf16" and config.precision.compute == "fp64":
        yield Problem("optimizer.moments", "bf16", "fp64 is for exact comparisons", "fp32 keeps moments in fp64")
    if optimizer.clip is not None:
        yield from positive("optimizer.clip", optimizer.clip)
    if config.metrics.trust_ratios and not isinstance(optimizer, LambConfig):
        yield Problem("metrics.trust_ratios", "true", "Adam has none", "false works, or optimizer=lamb")
    if isinstance(optimizer, LambConfig) and optimizer.max_ratio is not None:
        yield from positive("optimizer.max_ratio", optimizer.max_ratio)


def _lr_schedule(config: RunConfig) -> Iterator[Problem]:
    schedule, total = config.lr_schedule, config.train.steps
    yield from at_least("lr_schedule.warmup_steps", schedule.warmup_steps, 0)
    yield from at_least("lr_schedule.min_lr", schedule.min_lr, 0)
    if schedule.min_lr > config.optimizer.lr:
        rule = f"must not be above optimizer.lr = {config.optimizer.lr:g}"
        yield Problem("lr_schedule.min_lr", schedule.min_lr, rule, "0 works")
    if schedule.shape == "constant":
        if schedule.decay_steps is not None:
            yield Problem(
                "lr_schedule.decay_steps", schedule.decay_steps, "a constant rate does not decay", "null works"
            )
        if schedule.min_lr:
            yield Problem("lr_schedule.min_lr", schedule.min_lr, "a constant rate does not decay", "0 works")
        return
    if schedule.decay_steps is not None:
        yield from at_least("lr_schedule.decay_steps", schedule.decay_steps, 1)
    if schedule.shape == "wsd":
        length = schedule.decay_steps if schedule.decay_steps is not None else max(1, total // 10)
        if schedule.warmup_steps + length > total:
            rule = f"warm-up ({schedule.warmup_steps}) and decay ({length}) must fit into train.steps = {total}"
            yield Problem(
                "lr_schedule.warmup_steps, lr_schedule.decay_steps", f"{schedule.warmup_steps}, {length}", rule
            )
    elif schedule.decay_steps is not None and schedule.decay_steps < schedule.warmup_steps:
        rule = f"must not be above lr_schedule.decay_steps = {schedule.decay_steps}, where the decay ends"
        yield Problem("lr_schedule.warmup_steps", schedule.warmup_steps, rule)


def _data(config: RunConfig) -> Iterator[Problem]:
    data, packing, vocab = config.data, config.data.packing, config.model.vocab
    for key in ("eod", "pad"):
        value = getattr(packing, key)
        if value is not None and not 0 <= value < vocab:
            yield Problem(
                f"data.packing.{key}", value, f"must be an id below model.vocab = {vocab}", "null: there is none"
            )
    if any(not 0 <= token < vocab for token in packing.stop):
        yield Problem("data.packing.stop", list(packing.stop), f"must be ids below model.vocab = {vocab}", "[] works")
    if packing.eod is None and (packing.reset_mask or packing.reset_positions):
        rule = "must be given if data.packing.reset_mask or data.packing.reset_positions is true"
        yield Problem("data.packing.eod", None, rule)
    if packing.eod is not None and packing.eod == packing.pad:
        rule = f"must differ from data.packing.pad = {packing.pad}: the end of a document counts in the loss"
        yield Problem("data.packing.eod", packing.eod, rule)
    if isinstance(data, StdlibData):
        yield from within("data.validation_fraction", data.validation_fraction, 0.0, 1.0, open_low=True)
        if vocab < MINIMUM_STDLIB_VOCAB:
            rule = "the tokenizer of data=stdlib needs more pieces"
            yield Problem("model.vocab", vocab, rule, f"{MINIMUM_STDLIB_VOCAB} or more work")
    if isinstance(data, IndexedData):
        if not data.train and not config.dry_run:
            rule = "names no files"
            works = "data.train=[PREFIX] works, where PREFIX.bin and PREFIX.idx are made by tools/preprocess_data.py"
            yield Problem("data.train", "[]", rule, works)
        if data.weights is not None and len(data.weights) != len(data.train):
            rule = f"must have one weight for each of the {len(data.train)} prefixes of data.train"
            yield Problem("data.weights", list(data.weights), rule, "null: in proportion to their tokens")
        for i, weight in enumerate(data.weights or ()):
            yield from positive(f"data.weights[{i}]", weight)


def _run(config: RunConfig) -> Iterator[Problem]:
    yield from at_least("train.steps", config.train.steps, 1)
    yield from at_least("train.seed", config.train.seed, 0)
    yield from _stop_after(config)
    yield from at_least("train.check_replicas", config.train.check_replicas, 0)
    yield from at_least("validation.every", config.validation.every, 0)
    yield from at_least("validation.sequences", config.validation.sequences, 1)
    yield from at_least("checkpoint.every", config.checkpoint.every, 0)
    yield from at_least("checkpoint.keep", config.checkpoint.keep, 0)
    yield from _checkpoint(config)
    yield from contradictions(config.faults, saves=config.checkpoint.every > 0)
    yield from evaluate.contradictions(config.evaluate, config.data)
    yield from at_least("metrics.every", config.metrics.every, 1)
    yield from at_least("sample.tokens", config.sample.tokens, 0)
    yield from at_least("sample.top_k", config.sample.top_k, 0)
    yield from at_least("sample.temperature", config.sample.temperature, 0)
    data = config.data
    if (
        config.validation.every
        and not config.dry_run
        and (isinstance(data, SyntheticData) or (isinstance(data, IndexedData) and not data.validation))
    ):
        works = "validation.every=0 works" + (
            "" if isinstance(data, SyntheticData) else ", or data.validation=[PREFIX]"
        )
        yield Problem(
            "validation.every", config.validation.every, f"data.kind = {data.kind} has no held-out data here", works
        )
    if config.sample.tokens and (
        isinstance(data, SyntheticData) or (isinstance(data, IndexedData) and data.tokenizer is None)
    ):
        works = "sample.tokens=0 works" + ("" if isinstance(data, SyntheticData) else ", or give data.tokenizer")
        yield Problem("sample.tokens", config.sample.tokens, f"data.kind = {data.kind} has no tokenizer here", works)
    if config.sample.tokens and not config.sample.prompts:
        yield Problem("sample.prompts", "[]", "sample.tokens > 0 needs a text to continue")


def _checkpoint(config: RunConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    yield from at_least("checkpoint.keep_every", checkpoint.keep_every, 0)
    if checkpoint.every > 0 and checkpoint.keep_every % checkpoint.every:
        near = multiples_near(checkpoint.every, checkpoint.keep_every)
        rule = f"must be a multiple of checkpoint.every = {checkpoint.every}"
        yield Problem("checkpoint.keep_every", checkpoint.keep_every, rule, any_of(near))
    if checkpoint.init_from is not None and checkpoint.resume not in ("auto", "none"):
        rule = f"a run that continues checkpoint.resume = {checkpoint.resume} has its weights from there"
        yield Problem("checkpoint.init_from", checkpoint.init_from, rule, "null works, or checkpoint.resume=auto")


def _stop_after(config: RunConfig) -> Iterator[Problem]:
    given = config.train.stop_after
    try:
        limit = config.train.stop_after_s
    except ValueError:
        yield Problem("train.stop_after", given, "must be a time", "5400, 90m, 1h30m or null work")
        return
    if limit is not None:
        yield from positive("train.stop_after", limit)
        if not config.checkpoint.every:
            yield Problem(
                "train.stop_after", given, "checkpoint.every = 0 saves nothing that could be continued", "null works"
            )


_RULES: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _model,
    _parallel,
    _precision,
    _optimizer,
    _lr_schedule,
    _data,
    _run,
)
