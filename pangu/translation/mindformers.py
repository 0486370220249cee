"""MindFormers' YAML: what several of its fields say together."""

from __future__ import annotations

from collections.abc import Mapping

from pangu.translation.table import Translation

_MODEL = "model.model_config."
_LOADER = "train_dataset.data_loader."
_FORMATS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


def translate(source: Translation) -> None:
    """Fill in the overrides. Raises UserError for values of the wrong type."""
    source.set_direct()
    for rule in (_model, _layers, _experts, _batch, _layout, _precision, _optimizer, _schedule, _data, _callbacks):
        rule(source)


def _model(source: Translation) -> None:
    kind = source.text(f"{_MODEL}type") or ""
    if kind not in ("PanguAlphaConfig", "GPT2Config", "LlamaConfig"):
        source.lacks(f"{_MODEL}type", "value")
    source.set("model", "pangu_2_6b" if kind == "PanguAlphaConfig" else "gpt2_124m", f"{_MODEL}type")
    if kind == "LlamaConfig":
        llama = {"positions": "rope", "norm": "rmsnorm", "activation": "swiglu", "biases": False, "tied_head": False}
        for key, value in {**llama, "dropout": 0.0, "attention_dropout": 0.0}.items():
            source.set(f"model.{key}", value, f"{_MODEL}type")
        if source.flag(f"{_MODEL}qkv_has_bias"):
            source.set("model.biases", "qkv", f"{_MODEL}qkv_has_bias")
        if source.flag(f"{_MODEL}tie_word_embeddings"):
            source.set("model.tied_head", True, f"{_MODEL}tie_word_embeddings")
        if base := source.number(f"{_MODEL}theta"):
            source.set("model.rope_base", float(base), f"{_MODEL}theta")
    elif source.said([f"{_MODEL}hidden_act"]):
        # MindSpore's gelu is the approximation by tanh
        activations = {"gelu": "gelu_tanh", "fast_gelu": "fast_gelu"}
        source.choose("model.activation", f"{_MODEL}hidden_act", activations)
    if source.flag(f"{_MODEL}post_layernorm_residual"):
        source.lacks(f"{_MODEL}post_layernorm_residual", "value")


def _layers(source: Translation) -> None:
    """Widths."""
    hidden, gated = source.integer(f"{_MODEL}hidden_size"), source.text(f"{_MODEL}type") == "LlamaConfig"
    names = tuple(f"{_MODEL}{name}" for name in ("intermediate_size", "ffn_hidden_size", "ffn_dim_multiplier"))
    width = source.integer(names[0]) or source.integer(names[1])
    if width is None and hidden is not None and gated:
        multiple = source.count(f"{_MODEL}multiple_of") or 256
        width = int(int(2 * 4 * hidden / 3) * (source.number(names[2]) or 1.0))
        width = -(-width // multiple) * multiple
    elif width is None and hidden is not None and (ratio := source.integer(f"{_MODEL}expand_ratio")):
        width = ratio * hidden
    if width is not None:
        source.set("model.ffn", width, *names)
    if (heads := source.integer(f"{_MODEL}n_kv_heads")) is not None:
        source.set("model.kv_heads", heads, f"{_MODEL}n_kv_heads")


_EXPERTS = {
    "num_experts_chosen": "experts_per_token",
    "moe_intermediate_size": "expert_ffn",
    "shared_expert_num": "shared_experts",
    "first_k_dense_replace": "dense_layers",
}
"""Whole numbers of moe_config that are keys of the model."""
_ROUTER = {
    "capacity_factor": "expert_capacity",
    "aux_loss_factor": "router.balance_weight",
    "z_loss_factor": "router.z_loss",
    "routed_scaling_factor": "router.scale",
}
"""Numbers."""


def _experts(source: Translation) -> None:
    if (source.count("moe_config.expert_num") or 1) < 2:
        return
    source.set("model.experts", source.integer("moe_config.expert_num"), "moe_config.expert_num")
    for name, key in _EXPERTS.items():
        if (count := source.integer(f"moe_config.{name}")) is not None:
            source.set(f"model.{key}", count, f"moe_config.{name}")
    for name, key in _ROUTER.items():
        if (value := source.number(f"moe_config.{name}")) is not None:
            source.set(f"model.{key}", float(value), f"moe_config.{name}")
    if source.value("moe_config.norm_topk_prob") is False:
        source.set("model.router.normalised", False, "moe_config.norm_topk_prob")
    if source.flag("moe_config.use_gating_sigmoid"):
        source.set("model.router.score", "sigmoid", "moe_config.use_gating_sigmoid")
    groups = source.integer("moe_config.n_group")
    if groups is not None and groups > 1:
        source.set("model.router.selection", "group_limited", "moe_config.n_group")
        source.set("model.router.groups", groups, "moe_config.n_group")
        source.set("model.router.groups_per_token", source.integer("moe_config.topk_group"), "moe_config.topk_group")
    if source.flag("moe_config.balance_via_topk_bias"):
        source.overrides.pop("model.router.balance_weight", None)
        source.set("model.router.balance", "bias", "moe_config.balance_via_topk_bias")
        if (rate := source.number("moe_config.topk_bias_update_rate")) is not None:
            source.set("model.router.bias_rate", float(rate), "moe_config.topk_bias_update_rate")


def _batch(source: Translation) -> None:
    """A replica computes so many micro-batches of `runner_config.batch_size` in a step."""
    micro, replicas = source.count("runner_config.batch_size"), source.count("parallel_config.data_parallel")
    counts = (
        "parallel_config.micro_batch_num",
        "runner_config.gradient_accumulation_steps",
        "micro_batch_interleave_num",
    )
    if micro is None or replicas is None:
        source.needs("batch.global_size", "runner_config.batch_size x data_parallel x micro_batch_num")
        return
    stages = source.count("parallel_config.pipeline_stage") or 1
    size = micro * replicas
    for name in counts:
        # without a pipeline there is one
        if name != counts[0] or stages > 1:
            size *= source.count(name) or 1
    source.set("batch.global_size", size, "runner_config.batch_size", *counts)


def _layout(source: Translation) -> None:
    tensor, stages = source.count("parallel_config.model_parallel") or 1, source.count("parallel_config.pipeline_stage")
    if source.flag("parallel_config.use_seq_parallel") and tensor > 1:
        source.set("parallel.sequence", True, "parallel_config.use_seq_parallel")
    shards = ("parallel.enable_parallel_optimizer", "parallel_config.optimizer_shard")
    if any(map(source.flag, shards)):
        source.set("parallel.zero", 1, *shards)
    virtual, name = source.count(f"{_MODEL}pp_interleave_num"), f"{_MODEL}pp_interleave_num"
    if virtual is not None and virtual > 1 and stages is not None and stages > 1:
        source.set("parallel.virtual", virtual, name)
        source.set("parallel.schedule", "interleaved", name)
    if (source.count("parallel_config.context_parallel") or 1) > 1:
        ways = {"colossalai_cp": "gather", "ulysses_cp": "ulysses"}
        source.choose("parallel.context_kind", "parallel_config.context_parallel_algo", ways)
        if source.flag(f"{_MODEL}use_ring_attention"):
            source.set("parallel.context_kind", "ring", f"{_MODEL}use_ring_attention")
    recomputed = source.value("recompute_config.recompute")
    if isinstance(recomputed, list):
        source.lacks("recompute_config.recompute", "value")
    elif recomputed is True or (isinstance(recomputed, int) and recomputed > 0):
        source.set("memory.recompute", "full" if recomputed is True else recomputed, "recompute_config.recompute")
    elif source.value("recompute_config.select_recompute"):
        source.set("memory.recompute", "selective", "recompute_config.select_recompute")
        source.differs("selective")


def _precision(source: Translation) -> None:
    name = f"{_MODEL}compute_dtype"
    if source.said([name]):
        source.choose("precision", name, _FORMATS)
    elif source.given:
        source.set("precision", "fp16", name)
    scale = "runner_wrapper.scale_sense."
    if source.overrides.get("precision", ("", ()))[0] == "fp16":
        if (first := source.number(f"{scale}loss_scale_value")) is not None:
            source.set("precision.loss_scale.initial", float(first), f"{scale}loss_scale_value")
        if (window := source.integer(f"{scale}scale_window")) is not None:
            source.set("precision.loss_scale.growth_interval", window, f"{scale}scale_window")


def _optimizer(source: Translation) -> None:
    kind = source.text("optimizer.type") or "AdamW"
    if "adam" not in kind.lower():
        source.lacks("optimizer.type", "value")
    source.set("optimizer", "adam", "optimizer.type")
    betas = source.value("optimizer.betas") or [source.number("optimizer.beta1"), source.number("optimizer.beta2")]
    source.set("optimizer.betas", betas, "optimizer.betas", "optimizer.beta1", "optimizer.beta2")
    clips = source.flag("runner_wrapper.use_clip_grad")
    source.set(
        "optimizer.clip",
        source.number("runner_wrapper.max_grad_norm") if clips else None,
        "runner_wrapper.use_clip_grad",
    )
    name = "lr_schedule.learning_rate" if source.said(["lr_schedule.learning_rate"]) else "optimizer.learning_rate"
    if (rate := source.number(name)) is not None:
        source.set("optimizer.lr", rate, name)


def _schedule(source: Translation) -> None:
    steps = source.integer("lr_schedule.total_steps")
    if steps is None or steps < 1:
        steps = None
        source.needs("train.steps", "runner_config.epochs x samples / batch.global_size")
    else:
        source.set("train.steps", steps, "lr_schedule.total_steps")
    shapes = {
        **dict.fromkeys(("CosineWithWarmUpLR", "cosine"), "cosine"),
        **dict.fromkeys(("LinearWithWarmUpLR", "linear", "PolynomialWithWarmUpLR", "polynomial"), "linear"),
        **dict.fromkeys(("ConstantWarmUpLR", "constant", "constant_with_warmup"), "constant"),
    }
    if source.said(["lr_schedule.type"]):
        source.choose("lr_schedule", "lr_schedule.type", shapes)
    shape = source.overrides.get("lr_schedule", ("", ()))[0]
    if not shape:
        return
    ratio, warm = source.number("lr_schedule.warmup_ratio"), source.integer("lr_schedule.warmup_steps") or 0
    if ratio is not None and steps is None:
        source.needs("lr_schedule.warmup_steps", f"{ratio:g} x train.steps")
    else:
        warm = warm if ratio is None or steps is None else int(steps * ratio)
        source.set("lr_schedule.warmup_steps", warm, "lr_schedule.warmup_steps", "lr_schedule.warmup_ratio")
    if shape != "constant":
        source.set("lr_schedule.min_lr", source.number("lr_schedule.lr_end") or 0.0, "lr_schedule.lr_end")
        if (end := source.integer("lr_schedule.decay_steps")) is not None:
            source.set("lr_schedule.decay_steps", end, "lr_schedule.decay_steps")


def _data(source: Translation) -> None:
    pangu = source.overrides["model"][0] == "pangu_2_6b"
    source.set("data", "indexed_pangu" if pangu else "indexed")
    source.needs("data.train", "prefixes of indexed files, e.g. [/data/web]")
    if source.text(f"{_LOADER}type") == "BlendedMegatronDatasetDataLoader":
        prefixes, weights = source.blend(f"{_LOADER}config.data_path")
        if prefixes:
            source.open.pop("data.train")
            source.set("data.train", prefixes, f"{_LOADER}config.data_path")
        if weights:
            source.set("data.weights", weights, f"{_LOADER}config.data_path")
    elif source.said([f"{_LOADER}type"]):
        source.lacks(f"{_LOADER}type", "other_files")
    source.set("validation.every", 0)
    for name in ("eod", "pad"):
        number = source.integer(f"{_LOADER}config.{name}")
        if number is not None and number >= 0:
            source.set(f"data.packing.{name}", number, f"{_LOADER}config.{name}")
    of_both = source.flag("train_dataset.eos_reset")
    for key, name in (("reset_mask", "reset_attention_mask"), ("reset_positions", "reset_position_ids")):
        resets = of_both or source.flag(f"{_LOADER}config.{name}")
        if resets != pangu:
            source.set(f"data.packing.{key}", resets, "train_dataset.eos_reset", f"{_LOADER}config.{name}")
        if resets and not pangu and "data.packing.eod" not in source.overrides:
            source.needs("data.packing.eod", "the tokenizer's id that ends a document")


def _callbacks(source: Translation) -> None:
    """Only what saves is read."""
    listed = source.value("callbacks")
    for callback in listed if isinstance(listed, list) else []:
        if isinstance(callback, Mapping) and str(callback.get("type", "")).startswith("Checkpoint"):
            names = {"save_checkpoint_steps": "every", "keep_checkpoint_max": "keep", "async_save": "asynchronous"}
            for name, key in names.items():
                if name in callback:
                    source.set(f"checkpoint.{key}", callback[name], "callbacks")
