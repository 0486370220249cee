"""Rules for DeepSpeed's fields that depend on one another, with the defaults of its documentation."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from math import floor

from pangu.common.errors import UserError
from pangu.config.suggest import divisors
from pangu.interop.translation.table import Translation

_ADAM = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
_LAMB = ("lamb", "fusedlamb")
_SAMPLING = "data_efficiency.data_sampling"
_CURRICULA = {
    "curriculum_learning": ("curriculum_learning.enabled",),
    f"{_SAMPLING}.curriculum_learning.curriculum_metrics.seqlen_truncate": (
        *("data_efficiency.enabled", f"{_SAMPLING}.enabled", f"{_SAMPLING}.curriculum_learning.enabled"),
    ),
}
"""Sections that lengthen sequences, with the settings that switch them on."""
_LAST_STEP = 2**53
"""Larger than the number of steps of any run."""


def translate(source: Translation) -> None:
    """Fill in the overrides. Raises UserError for values of the wrong type."""
    source.set_direct()
    for rule in (_batch, _precision, _optimizer, _schedule, _curriculum):
        rule(source)
    moved = {"offload_optimizer.device": "optimizer", "offload_param.device": "parameters"}
    names = {f"zero_optimization.{name}": part for name, part in moved.items()}
    parts = [part for name, part in names.items() if source.text(name) in ("cpu", "nvme")]
    if source.flag("zero_optimization.cpu_offload"):
        parts = ["optimizer"]
    if parts:
        source.set("memory.offload", parts, *names)
    source.switch("auto", "wandb.enabled")


def _batch(source: Translation) -> None:
    size, micro = source.count("train_batch_size"), source.count("train_micro_batch_size_per_gpu")
    if size is not None:
        source.set("batch.global_size", size, "train_batch_size")
        source.absent.pop("gradient_accumulation_steps", None)
        if micro is None:
            source.needs("batch.micro_size", "train_batch_size / (gradient_accumulation_steps x replicas)")
    elif micro is not None or source.is_given(["gradient_accumulation_steps"]):
        why = "train_micro_batch_size_per_gpu x gradient_accumulation_steps x replicas"
        source.needs("batch.global_size", why)


def _precision(source: Translation) -> None:
    if source.flag("bf16.enabled") or source.flag("bfloat16.enabled"):
        source.set("precision", "bf16", "bf16.enabled")
    elif source.flag("fp16.enabled"):
        source.set("precision", "fp16", "fp16.enabled")
        if source.number("fp16.loss_scale"):
            source.lacks("fp16.loss_scale", "value")
        power = min(source.integer("fp16.initial_scale_power") or 0, 127)
        source.set("precision.loss_scale.initial", 2.0**power, "fp16.initial_scale_power")
        source.copy(source.integer, "fp16.loss_scale_window")
        source.copy(source.number, "fp16.min_loss_scale")
        source.copy(source.count, "fp16.hysteresis")
        if source.count("fp16.hysteresis") != 1:
            source.switch(True, "fp16.consecutive_hysteresis")
    elif source.given:
        source.set("precision", "fp32", "bf16.enabled", "fp16.enabled")


def _optimizer(source: Translation) -> None:
    source.set("optimizer.clip", source.number("gradient_clipping") or None, "gradient_clipping")
    kind = (source.text("optimizer.type") or "").lower()
    if not kind:
        return
    if kind == "muon":
        _muon(source)
        return
    if kind not in (*_ADAM, *_LAMB):
        source.lacks("optimizer.type", "value")
        return
    source.set("optimizer", "adam" if kind in _ADAM else "lamb", "optimizer.type")
    if source.value("optimizer.params.adam_w_mode") is False:
        source.lacks("optimizer.params.adam_w_mode", "l2")
    source.copy(source.number, "optimizer.params.lr", "optimizer.params.eps", "optimizer.params.weight_decay")
    source.copy(source.value, "optimizer.params.betas")
    if kind in _LAMB:
        name = "optimizer.params.max_coeff"
        source.set("optimizer.max_ratio", source.number(name) or 10.0, name)


def _muon(source: Translation) -> None:
    source.set("optimizer", "muon", "optimizer.type")
    source.set("optimizer.adjust_lr", "original")
    source.copy(source.number, "optimizer.params.momentum", "optimizer.params.weight_decay")
    # defaults of its code, other ones than of Adam
    for name, default in (("betas", [0.9, 0.95]), ("eps", 1e-10)):
        setting = f"optimizer.params.{name}"
        value = source.value(setting) if source.is_given([setting]) else default
        if value is not None:
            source.set(f"optimizer.{name}", value, setting)
    own, shared = ("optimizer.params.muon_lr", "optimizer.params.adam_lr"), "optimizer.params.lr"
    rates = [shared if source.is_given([shared]) and not source.is_given([name]) else name for name in own]
    source.copy(source.number, rates[0])
    # a scheduler with a peak of its own gives it to both
    if source.number(rates[0]) != source.number(rates[1]) and not source.is_given(["scheduler.params.warmup_max_lr"]):
        source.lacks(rates[1], "muon_rates")
    source.differs("muon_whole")


def _schedule(source: Translation) -> None:
    if not source.is_given(["scheduler.type"]):
        return
    source.choose("scheduler.type")
    shape = source.get("lr_schedule")
    prefix = "scheduler.params."
    peak, end = source.number(f"{prefix}warmup_max_lr"), source.integer(f"{prefix}total_num_steps")
    if not shape:
        return
    if peak is not None:
        source.set("optimizer.lr", peak, f"{prefix}warmup_max_lr")
    source.copy(source.integer, f"{prefix}warmup_num_steps")
    if source.value(f"{prefix}warmup_min_lr") not in (None, 0) or source.value(f"{prefix}warmup_min_ratio"):
        source.lacks(f"{prefix}warmup_min_lr", "value")
    if source.text(f"{prefix}warmup_type") == "log":
        source.differs("log_warm_up")
    if shape != "constant" and end is not None:
        source.set("train.steps", end, f"{prefix}total_num_steps")
        source.set("lr_schedule.decay_steps", end, f"{prefix}total_num_steps")
    rate = source.get("optimizer.lr")
    if shape == "cosine" and isinstance(rate, float):
        ratio = source.number(f"{prefix}cos_min_ratio") or 0.0
        source.set("lr_schedule.min_lr", ratio * rate, f"{prefix}cos_min_ratio")


def _curriculum(source: Translation) -> None:
    """Translate sequences that grow from step to step."""
    for section, switches in _CURRICULA.items():
        if all(map(source.flag, switches)):
            kinds = {f"{section}.curriculum_type": "seqlen", f"{section}.clustering_type": "single_cluster"}
            others = [name for name, kind in kinds.items() if name in source.given and source.text(name) != kind]
            for name in others:
                source.lacks(name, "data_order")
            if not others:
                source.absent = {name: why for name, why in source.absent.items() if not name.startswith(section)}
                _lengths(source, section)


def _lengths(source: Translation, section: str) -> None:
    """Translate the sequence lengths of a curriculum, which has one for each step, counted from 1."""
    longest, kind = source.count(f"{section}.max_difficulty"), source.text(f"{section}.schedule_type")
    if longest is None or kind not in ("fixed_discrete", "fixed_linear", "fixed_root"):
        source.lacks(f"{section}.{'max_difficulty' if longest is None else 'schedule_type'}", "curriculum")
        return
    if kind == "fixed_discrete":
        lengths, ends = (_counts(source, f"{section}.schedule_config.{name}") for name in ("difficulty", "max_step"))
        if len(lengths) != len(ends) + 1 or any(end <= begin for begin, end in pairwise(ends)):
            rule = "must increase, with one entry fewer than schedule_config.difficulty"
            raise source.wrong(f"{section}.schedule_config.max_step", rule)
        longest = max(lengths)
        if not set(lengths) <= set(_lengths_of_stages(longest, source)):
            source.lacks(f"{section}.schedule_config.difficulty", "curriculum")
            return
    else:
        lengths, ends = _grown_lengths(source, section, _lengths_of_stages(longest, source))
        source.differs("curriculum_lengths")
    source.set("model.sequence", longest, f"{section}.max_difficulty")
    stages = [{"until": end, "sequence": length} for length, end in zip(lengths[:-1], ends, strict=True)]
    source.set("batch.stages", stages, f"{section}.schedule_type")
    source.differs("curriculum_tokens")


def _lengths_of_stages(longest: int, source: Translation) -> list[int]:
    """Return the sequence lengths that a stage can have: a step takes whole samples of the longest length."""
    size = source.count("train_batch_size") or 0
    return [length for length in divisors(longest) if size % (longest // length) == 0]


def _grown_lengths(source: Translation, section: str, possible: list[int]) -> tuple[list[int], list[int]]:
    """Return the largest of the `possible` lengths up to that of each step, and the last step of all but the last."""

    def given(name: str) -> int:
        if (value := source.count(f"{section}.{name}")) is None:
            raise UserError(f"{section}.{name}: is required by schedule_type = {kind}")
        return value

    kind, longest = source.text(f"{section}.schedule_type"), possible[-1]
    least, unit = given("min_difficulty"), given("schedule_config.difficulty_step")
    steps = given("schedule_config.total_curriculum_step")
    degree = given("schedule_config.root_degree") if kind == "fixed_root" else 1
    if least > longest:
        raise source.wrong(f"{section}.min_difficulty", f"must not exceed max_difficulty = {longest}")

    def length(step: int) -> int:
        grown = floor((step / steps) ** (1 / degree) * (longest - least) + least)
        return min(longest, max(grown - grown % unit, -(-least // unit) * unit))

    begins = {1: max((one for one in possible if one <= length(1)), default=possible[0])}
    for one in possible:
        if one > begins[1]:
            # of lengths that are reached in one step, the last one stays
            begins[bisect_left(range(1, _LAST_STEP), one, key=length) + 1] = one
    return [*begins.values()], [begin - 1 for begin in begins][1:]


def _counts(source: Translation, name: str) -> list[int]:
    words = source.words(name)
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise source.wrong(name, "must be a list of integers of at least 1")
    return [int(word) for word in words]
