"""Rules for DeepSpeed's fields that depend on one another, with the defaults of its documentation."""

from __future__ import annotations

from pangu.interop.translation.table import Translation

_ADAM = ("adam", "adamw", "fusedadam", "deepspeedcpuadam")
_LAMB = ("lamb", "fusedlamb")


def translate(source: Translation) -> None:
    """Fill in the overrides. Raises UserError for values of the wrong type."""
    source.set_direct()
    for rule in (_batch, _precision, _optimizer, _schedule):
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
    elif micro is not None or source.said(["gradient_accumulation_steps"]):
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
        value = source.value(setting) if source.said([setting]) else default
        if value is not None:
            source.set(f"optimizer.{name}", value, setting)
    own, shared = ("optimizer.params.muon_lr", "optimizer.params.adam_lr"), "optimizer.params.lr"
    rates = [shared if source.said([shared]) and not source.said([name]) else name for name in own]
    source.copy(source.number, rates[0])
    # a scheduler with a peak of its own gives it to both
    if source.number(rates[0]) != source.number(rates[1]) and not source.said(["scheduler.params.warmup_max_lr"]):
        source.lacks(rates[1], "muon_rates")
    source.differs("muon_whole")


def _schedule(source: Translation) -> None:
    if not source.said(["scheduler.type"]):
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
