"""Rules for Megatron-LM's options of optimizer and schedules that depend on one another."""
# From megatron/training/arguments.py (`validate_args`) and megatron/core/optimizer_param_scheduler.py.

from __future__ import annotations

from collections.abc import Sequence
from math import isclose

from pangu.interop.translation.table import Translation


def optimizer(source: Translation) -> None:
    """Translate the optimizer, with learning rates of embedding and head."""
    source.choose("optimizer")
    betas = [source.number("adam-beta1"), source.number("adam-beta2")]
    source.set("optimizer.betas", betas, "adam-beta1", "adam-beta2")
    source.set("optimizer.clip", source.number("clip-grad") or None, "clip-grad")
    if source.get("optimizer") == "muon":
        _muon(source)
    elif source.flag("qk-clip"):
        source.lacks("qk-clip", "qk_optimizer")
    _decoupled(source)


def _decoupled(source: Translation) -> None:
    rate, own = source.number("lr"), source.number("decoupled-lr")
    if rate and own:
        names = ["embedding.word.weight"] + ["head.weight"] * source.flag("untie-embeddings-and-output-weights")
        source.set("parameter_groups", [{"names": names, "lr_multiplier": own / rate}], "decoupled-lr")
        least = source.number("min-lr") or 0.0
        floor = source.number("decoupled-min-lr")
        if not isclose(least if floor is None else floor, least * own / rate):
            source.differs("decoupled_floor")


def _muon(source: Translation) -> None:
    source.copy(source.number, "muon-momentum")
    source.copy(source.integer, "muon-num-ns-steps")
    source.set("optimizer.nesterov", source.flag("muon-nesterov"), "muon-nesterov")
    names = ("muon-scale-mode", "muon-extra-scale-factor")
    known = {("spectral", 0.2): "match_rms_adamw", ("shape_scaling", 1.0): "original"}
    rule = known.get((source.text(names[0]) or "", source.number(names[1]) or 0.0))
    if rule is None:
        source.lacks(names[1], "muon_scale")
    else:
        source.set("optimizer.adjust_lr", rule, *names)
    if source.flag("qk-clip"):
        source.set("optimizer.qk_clip", source.number("qk-clip-threshold"), "qk-clip", "qk-clip-threshold")
    source.differs("muon_whole")


def schedule(source: Translation) -> None:
    """Translate the number of steps, and what changes over them."""
    samples, size = source.integer("train-samples"), source.count("global-batch-size")
    steps = source.integer("train-iters")
    micro, replicas = source.count("micro-batch-size"), source.get("parallel.data")
    if size is None and micro is not None and isinstance(replicas, int):
        size = micro * replicas
        source.open.pop("batch.global_size", None)
        source.set("batch.global_size", size, "micro-batch-size")
    stages = [] if size is None else _batch_stages(source, size)
    if steps is None and samples is not None and size is not None:
        steps = int(_steps_of(samples, size, stages))
    if steps is None:
        source.needs("train.steps", "neither --train-iters nor --train-samples is given")
    else:
        source.set("train.steps", steps, "train-iters", "train-samples")
    source.choose("lr-decay-style")
    shape = source.get("lr_schedule", "constant")

    def in_steps(name: str) -> int | None:
        count = source.integer(name)
        return None if count is None or size is None else round(_steps_of(count, size, stages))

    end = source.integer("lr-decay-iters") or in_steps("lr-decay-samples") or steps
    fraction = source.number("lr-warmup-fraction")
    warm = source.integer("lr-warmup-iters") or in_steps("lr-warmup-samples") or 0
    if fraction is not None and end is not None:
        warm = round(fraction * end)
    names = ("lr-warmup-iters", "lr-warmup-samples", "lr-warmup-fraction")
    source.set("lr_schedule.warmup_steps", warm, *names)
    decay = end if end != steps else None
    if shape in ("wsd", "inverse_sqrt") and decay is not None:
        source.lacks("lr-decay-iters", "value")
        decay = None
    if shape == "wsd":
        source.choose("lr-wsd-decay-style")
        decay = source.integer("lr-wsd-decay-iters") or in_steps("lr-wsd-decay-samples")
    if shape != "constant":
        source.set("lr_schedule.decay_steps", decay, "lr-decay-iters", "lr-decay-samples", "lr-wsd-decay-iters")
        source.set("lr_schedule.min_lr", source.number("min-lr"), "min-lr")
    if (shape := source.text("weight-decay-incr-style")) in ("linear", "cosine"):
        source.copy(source.number, "end-weight-decay")
        start = {"start": source.number("start-weight-decay") or 0.0, "shape": shape}
        source.set("weight_decay_schedule", start, "start-weight-decay", "weight-decay-incr-style")


def _batch_stages(source: Translation, size: int) -> list[tuple[int, int]]:
    """Translate the ramp-up of batches, and return the step that ends each of its stages, with the batch size."""
    name, stages = "rampup-batch-size", list[tuple[int, int]]()
    if not source.is_given([name]):
        return stages
    words = source.words(name)
    numbers = [int(word) for word in words if word.isdecimal()]
    if len(words) != 3 or len(numbers) != 3 or not 0 < numbers[0] <= size or (size - numbers[0]) % max(1, numbers[1]):
        raise source.wrong(name, f"must be START INCREMENT SAMPLES, with increments from START to {size}")
    start, increment, samples = numbers
    count = (size - start) // max(1, increment)
    steps = consumed = 0
    for number in range(count):
        # the batch grows at the first step after this share of the samples
        current, least = start + number * increment, -(-(number + 1) * samples // count)
        if (made := max(0, -(-(least - consumed) // current))) > 0:
            steps, consumed = steps + made, consumed + made * current
            stages.append((steps, current))
    if stages:
        values = [{"until": until, "global_size": current} for until, current in stages]
        source.set("batch.stages", values, name)
        source.differs("ramp_by_updates")
    return stages


def _steps_of(samples: int, size: int, stages: Sequence[tuple[int, int]]) -> float:
    """Return the number of steps, with a fraction, that take a number of samples in stages, then in batches of size."""
    begin = consumed = 0
    for until, current in stages:
        if consumed + (until - begin) * current >= samples:
            return begin + (samples - consumed) / current
        begin, consumed = until, consumed + (until - begin) * current
    return begin + (samples - consumed) / size
