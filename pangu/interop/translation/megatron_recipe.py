"""Rules for Megatron-LM's options of optimizer and schedules that depend on one another."""
# From megatron/training/arguments.py (`validate_args`) and megatron/core/optimizer_param_scheduler.py.

from __future__ import annotations

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
    if steps is None and samples is not None and size is not None:
        steps = samples // size
    if steps is None:
        source.needs("train.steps", "neither --train-iters nor --train-samples is given")
    else:
        source.set("train.steps", steps, "train-iters", "train-samples")
    source.choose("lr-decay-style")
    shape = source.get("lr_schedule", "constant")

    def in_steps(name: str) -> int | None:
        count = source.integer(name)
        return None if count is None or size is None else round(count / size)

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
    _weight_decay(source)


def _weight_decay(source: Translation) -> None:
    if (shape := source.text("weight-decay-incr-style")) in ("linear", "cosine"):
        source.copy(source.number, "end-weight-decay")
        start = {"start": source.number("start-weight-decay") or 0.0, "shape": shape}
        source.set("weight_decay_schedule", start, "start-weight-decay", "weight-decay-incr-style")
