"""Rules for interdependent fields of torchtitan's TOML; defaults of v0.2.2, the last with TOML (job_config.py)."""

from __future__ import annotations

from pangu.interop.translation.table import LLAMA, Translation

_DATA_SETS = {
    "c4": ("hf:{}:en:train", "allenai/c4"),
    "c4_validation": ("hf:{}:en:validation", "allenai/c4"),
    "c4_test": ("{}", "tests/assets/c4_test"),
}
"""Sources of data=stream for torchtitan's datasets, and the path where none is given."""


def translate(source: Translation) -> None:
    """Fill in the overrides. Raises UserError for values of the wrong type."""
    source.set_direct()
    for rule in (_model, _batch, _layout, _precision, _memory, _schedule, _checkpoint, _data):
        rule(source)
    source.choose("optimizer.name")
    betas = [source.number("optimizer.beta1"), source.number("optimizer.beta2")]
    source.set("optimizer.betas", betas, "optimizer.beta1")
    source.set("optimizer.clip", source.number("training.max_norm") or None, "training.max_norm")
    source.switch("auto", "metrics.enable_wandb")
    source.switch(True, "profiling.enable_profiling")


def _model(source: Translation) -> None:
    name = f"{source.text('model.name')} {source.text('model.flavor')}"
    base = name.removesuffix("_attn").removesuffix("_flex").removesuffix("_varlen")
    keys = source.table.models.get(base)
    source.open.pop("model", None)
    source.set("model", "gpt2_124m")
    if keys is None:
        source.lacks("model.flavor", "value")
        for key in ("layers", "hidden", "heads", "vocab"):
            source.needs(f"model.{key}", f"{name} is none of {', '.join(source.table.models)}")
        return
    for key, value in LLAMA.items():
        source.set(f"model.{key}", value, "model.name")
    for key, value in keys.items():
        source.set(f"model.{key}", value, "model.flavor")
    if "rope_scaling" in keys:
        source.differs("scaled_positions")
    if base != name:  # documents of a sample do not see one another
        source.set("data.packing.reset_mask", True, "model.flavor")


def _batch(source: Translation) -> None:
    size, stages = source.integer("training.global_batch_size"), source.integer("parallelism.pipeline_parallel_degree")
    if size is not None and size > 0:
        source.set("batch.global_size", size, "training.global_batch_size")
    else:
        source.needs("batch.global_size", "training.local_batch_size x replicas")
    staged = stages is not None and stages > 1
    name = "parallelism.pipeline_parallel_microbatch_size" if staged else "training.local_batch_size"
    source.set("batch.micro_size", source.integer(name), name)


def _layout(source: Translation) -> None:
    stages = source.count("parallelism.pipeline_parallel_degree") or 1
    if (source.count("parallelism.tensor_parallel_degree") or 1) > 1:
        source.set("parallel.sequence", True, "parallelism.tensor_parallel_degree")
    shard, name = source.integer("parallelism.data_parallel_shard_degree"), "parallelism.data_parallel_shard_degree"
    if shard == 1:
        source.set("parallel.zero", 0, name)
    else:
        keep = source.text("parallelism.fsdp_reshard_after_forward")
        keeps_full = keep == "never" or (keep == "default" and stages > 1)
        # FSDP that keeps full weights from forward to backward is ZeRO-2 here
        source.set("parallel.zero", 2 if keeps_full else 3, name, "parallelism.fsdp_reshard_after_forward")
        copies = source.integer("parallelism.data_parallel_replicate_degree")
        if copies is not None and copies > 1 and shard is not None and shard > 1:
            context = source.count("parallelism.context_parallel_degree") or 1
            source.set("parallel.zero_group", shard * context, name)
            source.set("parallel.data", shard * copies, name, "parallelism.data_parallel_replicate_degree")
            source.differs("hybrid")
    if stages > 1:
        name = "parallelism.pipeline_parallel_schedule"
        schedule = source.table.values[name].get((source.text(name) or "").lower())
        if schedule is not None:
            source.set("parallel.schedule", schedule, name)
        else:
            source.lacks(name, "value")
        virtual = 2 if schedule in ("interleaved", "breadth_first", "zb_v") else 1  # its default for these
        per = source.count("parallelism.pipeline_parallel_layers_per_stage")
        layers = source.get("model.layers")
        if per is not None and isinstance(layers, int):
            virtual = max(1, layers // stages // per)
        if virtual > 1:
            source.set("parallel.virtual_stages", virtual, "parallelism.pipeline_parallel_layers_per_stage")
    if (source.count("parallelism.context_parallel_degree") or 1) > 1:
        source.choose("parallelism.context_parallel_rotate_method")
    if source.integer("parallelism.expert_tensor_parallel_degree") == 1:
        source.set("parallel.expert_tensor", 1, "parallelism.expert_tensor_parallel_degree")


def _precision(source: Translation) -> None:
    converters = source.words("model.converters")
    if any("float8" in converter for converter in converters):
        source.set("precision", "fp8", "model.converters")
        source.differs("fp8_scales")
    else:
        source.choose("training.mixed_precision_param")
        if converters:
            source.lacks("model.converters", "value")
    if source.text("training.mixed_precision_reduce") == "bfloat16":
        source.set("precision.reduce", "bf16", "training.mixed_precision_reduce")
    source.switch(True, "compile.enable")


def _memory(source: Translation) -> None:
    name, option = "activation_checkpoint.mode", source.text("activation_checkpoint.selective_ac_option")
    layers = source.get("model.layers")
    if source.text(name) == "selective" and option is not None and option.isdecimal() and isinstance(layers, int):
        stages = source.count("parallelism.pipeline_parallel_degree") or 1
        source.set("memory.recompute", layers // stages // max(1, int(option)), name)
        source.differs("every_nth")
    else:
        source.choose(name)
    if source.flag("training.enable_cpu_offload"):
        parts = ["optimizer", "parameters"] if source.get("parallel.zero") == 3 else ["optimizer"]
        source.set("memory.offload", parts, "training.enable_cpu_offload")


def _schedule(source: Translation) -> None:
    ratio, name = source.number("lr_scheduler.decay_ratio"), "lr_scheduler.decay_type"
    shapes = {"linear": "linear", "cosine": "cosine", "sqrt": "minus_sqrt"}
    kind = source.text(name) or "linear"
    if kind not in shapes or (ratio is None and kind != "sqrt"):
        source.choose(name)
    else:
        source.set("lr_schedule", "wsd", name)
        source.set("lr_schedule.decay_shape", shapes[kind], name)
        if steps := source.integer("training.steps"):
            length = steps - (source.integer("lr_scheduler.warmup_steps") or 0) if ratio is None else steps * ratio
            source.set("lr_schedule.decay_steps", max(1, round(length)), "lr_scheduler.decay_ratio")
            source.differs("wsd_overlap")
    rate = source.number("optimizer.lr")
    if rate is not None and (least := source.number("lr_scheduler.min_lr_factor")):
        source.set("lr_schedule.min_lr", least * rate, "lr_scheduler.min_lr_factor")


def _checkpoint(source: Translation) -> None:
    if not source.flag("checkpoint.enable"):
        source.set("checkpoint.every", 0, "checkpoint.enable")
        return
    source.copy(source.integer, "checkpoint.interval", "checkpoint.keep_latest_k")
    source.choose("checkpoint.async_mode")


def _data(source: Translation) -> None:
    text = _stream(source, "training")
    source.set("data", "indexed" if text is None else "stream", "training.dataset")
    if text is None:
        source.needs("data.train", "prefixes of indexed files, e.g. [/data/web]")
    else:
        source.set("data.train", [text], "training.dataset_path", "training.dataset")
        source.set("data.shuffle", 0, "training.dataset")
        source.differs("in_order")
        _tokenizer(source)
    source.set("validation.every", 0, "validation.enable")
    if source.flag("validation.enable"):
        source.set("validation.every", source.integer("validation.freq") or 10, "validation.freq")
        held_out = None if text is None else _stream(source, "validation")
        if held_out is None:
            source.needs("data.validation", "held-out data, as data.train")
        else:
            source.set("data.validation", [held_out], "validation.dataset_path", "validation.dataset")


def _stream(source: Translation, group: str) -> str | None:
    """Return the source of text for a torchtitan dataset; None if it is unknown."""
    name = (source.text(f"{group}.dataset") or "").lower()
    if name not in _DATA_SETS:
        if name:
            source.lacks(f"{group}.dataset", "value")
        return None
    form, path = _DATA_SETS[name]
    return form.format(source.text(f"{group}.dataset_path") or path)


def _tokenizer(source: Translation) -> None:
    folder, file = source.text("model.hf_assets_path"), source.text("model.tokenizer_path")
    path = folder if folder is not None else file
    if path is None or (path.endswith(".model") and source.text("model.name") != "llama2"):
        # Llama 3's own file is tiktoken's with an encoding that only its code has
        source.needs("data.tokenizer", "e.g. {kind:huggingface,path:FOLDER}")
    else:
        kind = "sentencepiece" if path.endswith(".model") else "huggingface"
        source.set("data.tokenizer", {"kind": kind, "path": path}, "model.hf_assets_path", "model.tokenizer_path")
