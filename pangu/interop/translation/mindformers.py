"""Rules for fields of MindFormers' YAML that depend on one another."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from pangu.interop.formats.huggingface_config import LATENT_FIELDS
from pangu.interop.formats.megatron_experts import layer_pattern
from pangu.interop.translation.table import LLAMA, Translation

_MODEL = "model.model_config."
_LOADER = "train_dataset.data_loader."
_KIND, _UNTIE = f"{_MODEL}type", f"{_MODEL}untie_embeddings_and_output_weights"
_GPTS = ("pangualpha", "gpt2")
_ARCHITECTURES = (None, "LlamaForCausalLM", "GPT2LMHeadModel", "PanguAlphaHeadModel")
"""Classes that compute what their configuration says; others, such as Baichuan's, share LlamaConfig and differ."""
_DEEPSEEK = ("DeepseekV3ForCausalLM",)
"""Class of models with latent attention."""
_LEAST_RATE = dict.fromkeys(("PolynomialWithWarmUpLR", "polynomial", "WarmUpStableDecayLR"), 1e-7)
"""Defaults of `lr_end`; others have 0."""
_LIKE_LLAMA = {
    "hidden_act": ("swiglu", "fusedswiglu", "silu", "LlamaSiLU"),
    "normalization": ("RMSNorm", "FusedRMSNorm"),
    "gated_linear_unit": (True,),
    "position_embedding_type": ("rope",),
}
"""Values that are implied by a Llama."""


def translate(source: Translation) -> None:
    """Fill in the overrides. Raises UserError for values of the wrong type."""
    source.set_direct()
    for rule in (_model, _layers, _experts, _batch, _layout, _precision, _optimizer, _schedule, _data, _callbacks):
        rule(source)


def _model(source: Translation) -> None:
    kind = _kind(source)
    known = (*_GPTS, "llama", "qwen2", "qwen3", "qwen3_moe", "deepseekv3")
    if kind not in known:
        source.lacks(_KIND if source.is_given([_KIND]) else f"{_MODEL}model_type", "other_model")
    if source.text("model.arch.type") not in (*_ARCHITECTURES, *_DEEPSEEK[kind != "deepseekv3" :]):
        source.lacks("model.arch.type", "other_model")
    source.set("model", "pangu_2_6b" if kind == "pangualpha" else "gpt2_124m", _KIND, f"{_MODEL}model_type")
    if kind not in _GPTS:
        _llama(source, kind)
        _latent(source, kind)
    elif source.is_given([f"{_MODEL}hidden_act"]):
        source.choose(f"{_MODEL}hidden_act")
    if source.flag(f"{_MODEL}post_layernorm_residual"):
        source.lacks(f"{_MODEL}post_layernorm_residual", "value")


def _kind(source: Translation) -> str:
    """Return the name of the architecture: `LlamaConfig` and `llama` are one."""
    text = source.text(_KIND) or source.text(f"{_MODEL}model_type")
    if text is None:
        text = (source.words(f"{_MODEL}architectures") or [""])[0].removesuffix("ForCausalLM")
    name = text.removesuffix("Config").lower()
    return {"qwen3moe": "qwen3_moe", "deepseek_v3": "deepseekv3"}.get(name, name)


def _llama(source: Translation, kind: str) -> None:
    """Set the keys that Llama and Qwen share, and those of their fields."""
    for key, value in LLAMA.items():
        if f"model.{key}" not in source.overrides:
            source.set(f"model.{key}", value, _KIND)
    if kind.startswith("qwen3") and "model.qk_norm" not in source.overrides:
        source.set("model.qk_norm", True, f"{_MODEL}model_type")
    for name, values in _LIKE_LLAMA.items():
        if source.is_given([f"{_MODEL}{name}"]) and source.value(f"{_MODEL}{name}") not in values:
            source.lacks(f"{_MODEL}{name}", "value")
    if source.flag(f"{_MODEL}add_bias_linear"):
        source.set("model.biases", True, f"{_MODEL}add_bias_linear")
    elif source.flag(f"{_MODEL}qkv_has_bias") or (kind == "qwen2" and not source.is_given([f"{_MODEL}qkv_has_bias"])):
        source.set("model.biases", "qkv", f"{_MODEL}qkv_has_bias")
    if source.flag(f"{_MODEL}tie_word_embeddings") or source.value(_UNTIE) is False:
        source.set("model.tied_head", True, f"{_MODEL}tie_word_embeddings", _UNTIE)
    if base := source.number(f"{_MODEL}theta"):
        source.set("model.rope_base", float(base), f"{_MODEL}theta")
    extension, scaling = f"{_MODEL}extend_method", f"{_MODEL}scaling_factor."
    if (source.text(extension) or "None").lower() == "llama3":
        numbers = {key: source.number(f"{scaling}{key}") for key in ("factor", "low_freq_factor", "high_freq_factor")}
        original = source.integer(f"{scaling}original_max_position_embeddings")
        source.set("model.rope_scaling", {**numbers, "original_sequence": original}, extension)
    elif (source.text(extension) or "None") != "None":
        source.lacks(extension, "extension")


def _latent(source: Translation, kind: str) -> None:
    """Set latent attention of a DeepSeek-V3, and its multi-token prediction."""
    names = {key: f"{_MODEL}{name}" for key, name in LATENT_FIELDS.items()}
    prediction = (f"{_MODEL}mtp_depth", f"{_MODEL}mtp_loss_factor")
    if kind != "deepseekv3":
        for name in (*names.values(), *prediction):
            if source.value(name):
                source.lacks(name, "extension")
        return
    sizes = {key: source.count(name) for key, name in names.items()}
    if missing := [names[key] for key, size in sizes.items() if size is None and key != "q_rank"]:
        source.needs("model.latent", f"{', '.join(missing)} is not given")
    else:
        source.set("model.latent", sizes, *names.values())
    for key in ("head_dim", "qk_norm"):
        source.overrides.pop(f"model.{key}", None)
    if source.value(f"{_MODEL}extend_method") is None:
        # its default is YaRN
        source.lacks(_KIND, "extension")
    if source.integer(prediction[0]):
        source.copy(source.integer, prediction[0])
        source.copy(source.real, prediction[1])


def _layers(source: Translation) -> None:
    hidden, gated = source.integer(f"{_MODEL}hidden_size"), _kind(source) not in _GPTS
    names = tuple(f"{_MODEL}{name}" for name in ("intermediate_size", "ffn_hidden_size", "ffn_dim_multiplier"))
    width = source.integer(names[0]) or source.integer(names[1])
    if width is None and hidden is not None and gated:
        multiple = source.count(f"{_MODEL}multiple_of") or 256
        factor = source.number(names[2])
        width = int(2 * (4 * hidden if factor is None else int((factor + 0.01) * 4 * hidden)) / 3)
        width = -(-width // multiple) * multiple
    elif width is None and hidden is not None and (ratio := source.integer(f"{_MODEL}expand_ratio")):
        width = ratio * hidden
    if width is not None:
        source.set("model.ffn", width, *names)
    if _kind(source) != "deepseekv3":
        source.copy(source.integer, f"{_MODEL}n_kv_heads")


_SHARED = "moe_config.moe_shared_expert_intermediate_size"
_EXPERTS = ("expert_num", "num_experts_chosen", "moe_intermediate_size", "shared_expert_num", "first_k_dense_replace")
"""Integers of moe_config that are keys of the model."""
_ROUTER = ("aux_loss_factor", "z_loss_factor", "routed_scaling_factor")
"""Floating-point numbers of moe_config that are keys of the model."""


def _experts(source: Translation) -> None:
    if (source.count("moe_config.expert_num") or 1) < 2:
        return
    source.copy(source.integer, *(f"moe_config.{name}" for name in _EXPERTS))
    if (source.number("moe_config.capacity_factor") or 0) > 0:
        source.copy(source.real, "moe_config.capacity_factor")
    source.copy(source.real, *(f"moe_config.{name}" for name in _ROUTER))
    if shared := source.integer(_SHARED):
        width = source.count("moe_config.moe_intermediate_size") or source.count(f"{_MODEL}intermediate_size") or 1
        source.set("model.shared_experts", shared // width, _SHARED)
        if shared % width:
            source.lacks(_SHARED, "value")
    _expert_layers(source)
    _balance(source)
    softmax_first = source.value(f"{_MODEL}moe_router_pre_softmax") is not False
    if softmax_first and source.value("moe_config.norm_topk_prob") is False:
        source.set("model.router.normalised", False, "moe_config.norm_topk_prob")
    if source.is_given(["moe_config.use_gating_sigmoid"]):
        source.choose("moe_config.use_gating_sigmoid")
    groups = source.integer("moe_config.n_group")
    if groups is not None and groups > 1:
        source.set("model.router.selection", "group_limited", "moe_config.n_group")
        source.set("model.router.groups", groups, "moe_config.n_group")
        source.set("model.router.groups_per_token", source.integer("moe_config.topk_group"), "moe_config.topk_group")


def _expert_layers(source: Translation) -> None:
    name, layers = f"{_MODEL}moe_layer_freq", source.count(f"{_MODEL}num_layers") or 1
    frequency, dense = source.value(name), max(0, source.integer("moe_config.first_k_dense_replace") or 0)
    if frequency in (None, 1):
        return
    source.set_expert_layers(layer_pattern(frequency, layers, dense), name)


def _balance(source: Translation) -> None:
    """Choose the loss or the biases that balance the experts."""
    kinds, factors = source.words("moe_config.aux_loss_types"), source.words("moe_config.aux_loss_factors")
    if kinds == ["expert"] and len(factors) == 1:
        try:
            source.set("model.router.balance_weight", float(factors[0]), "moe_config.aux_loss_factors")
        except ValueError:
            raise source.wrong("moe_config.aux_loss_factors", "must be numbers") from None
    elif kinds:
        source.lacks("moe_config.aux_loss_types", "other_router")
    if source.flag("moe_config.balance_via_topk_bias"):
        source.overrides.pop("model.router.balance_weight", None)
        source.set("model.router.balance", "bias", "moe_config.balance_via_topk_bias")
        source.copy(source.real, "moe_config.topk_bias_update_rate")


_COUNTS = ("parallel_config.micro_batch_num", "runner_config.gradient_accumulation_steps", "micro_batch_interleave_num")
"""Factors of the micro-batches in a step."""


def _batch(source: Translation) -> None:
    """Set the batch from MindFormers' micro-batch size and gradient accumulation."""
    micro, replicas = source.count("runner_config.batch_size"), source.count("parallel_config.data_parallel")
    if micro is None or replicas is None:
        source.needs("batch.global_size", "runner_config.batch_size x data_parallel x micro_batch_num")
        return
    stages = source.count("parallel_config.pipeline_stage") or 1
    # without a pipeline there is one micro-batch
    used = _COUNTS if stages > 1 else _COUNTS[1:]
    size = micro * replicas * prod(source.count(name) or 1 for name in used)
    source.set("batch.global_size", size, "runner_config.batch_size", *_COUNTS)


def _layout(source: Translation) -> None:
    tensor, stages = source.count("parallel_config.model_parallel") or 1, source.count("parallel_config.pipeline_stage")
    if source.flag("parallel_config.use_seq_parallel") and tensor > 1:
        source.set("parallel.sequence", True, "parallel_config.use_seq_parallel")
    expert, data = source.count("parallel_config.expert_parallel") or 1, source.count("parallel_config.data_parallel")
    if data is not None and data % expert and data * tensor % expert == 0:  # groups span tensor-parallel ranks
        source.set("parallel.expert_tensor", 1, "parallel_config.expert_parallel")
    shards = ("parallel.enable_parallel_optimizer", "parallel_config.optimizer_shard")
    if any(map(source.flag, shards)):
        source.set("parallel.zero", 1, *shards)
    virtual, name = source.count(f"{_MODEL}pp_interleave_num"), f"{_MODEL}pp_interleave_num"
    if virtual is not None and virtual > 1 and stages is not None and stages > 1:
        source.set("parallel.virtual_stages", virtual, name)
        source.set("parallel.schedule", "interleaved", name)
    if (source.count("parallel_config.context_parallel") or 1) > 1:
        source.choose("parallel_config.context_parallel_algo")
        if source.flag(f"{_MODEL}use_ring_attention"):
            source.set("parallel.context_kind", "ring", f"{_MODEL}use_ring_attention")
    offset, layers = source.value(f"{_MODEL}offset"), source.integer(f"{_MODEL}num_layers")
    if isinstance(offset, list) and len(offset) == stages and layers is not None and (virtual or 1) == 1:
        if all(isinstance(one, int) for one in offset) and any(offset):
            source.set("parallel.layers", [layers // stages + one for one in offset], f"{_MODEL}offset")
    elif offset and isinstance(offset, list):
        source.lacks(f"{_MODEL}offset", "layers_by_time")
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
    if source.is_given([name]):
        source.choose(name)
    elif source.given:
        source.set("precision", "fp16", name)
    scale = "runner_wrapper.scale_sense."
    if source.get("precision") == "fp16":
        source.copy(source.real, f"{scale}loss_scale_value")
        source.copy(source.integer, f"{scale}scale_window")


def _optimizer(source: Translation) -> None:
    kind = source.text("optimizer.type") or "AdamW"
    if "adam" not in kind.lower():
        source.lacks("optimizer.type", "value")
    source.set("optimizer", "adam", "optimizer.type")
    betas = source.value("optimizer.betas") or [source.number("optimizer.beta1"), source.number("optimizer.beta2")]
    source.set("optimizer.betas", betas, "optimizer.betas", "optimizer.beta1", "optimizer.beta2")
    clips = source.flag("runner_wrapper.use_clip_grad")
    limit = source.number("runner_wrapper.max_grad_norm") if clips else None
    source.set("optimizer.clip", limit, "runner_wrapper.use_clip_grad")
    name = "lr_schedule.learning_rate" if source.is_given(["lr_schedule.learning_rate"]) else "optimizer.learning_rate"
    source.copy(source.number, name)


def _schedule(source: Translation) -> None:
    steps = source.integer("lr_schedule.total_steps")
    if steps is None or steps < 1:
        steps = None
        source.needs("train.steps", "runner_config.epochs x samples / batch.global_size")
    else:
        source.set("train.steps", steps, "lr_schedule.total_steps")
    if source.is_given(["lr_schedule.type"]):
        source.choose("lr_schedule.type")
    shape = source.get("lr_schedule")
    if not shape:
        return
    ratio, warm = source.number("lr_schedule.warmup_ratio"), source.integer("lr_schedule.warmup_steps") or 0
    if ratio is not None and steps is None:
        source.needs("lr_schedule.warmup_steps", f"{ratio:g} x train.steps")
    else:
        warm = warm if ratio is None or steps is None else int(steps * ratio)
        source.set("lr_schedule.warmup_steps", warm, "lr_schedule.warmup_steps", "lr_schedule.warmup_ratio")
    if shape != "constant":
        end = source.number("lr_schedule.lr_end")
        default = _LEAST_RATE.get(str(source.value("lr_schedule.type")), 0.0)
        source.set("lr_schedule.min_lr", default if end is None else end, "lr_schedule.lr_end")
        source.copy(source.integer, "lr_schedule.decay_steps")
    if shape == "wsd":
        _stable(source, steps)


def _stable(source: Translation, steps: int | None) -> None:
    """Set the length of the decay after stable rates, which MindFormers gives by its first step."""
    names = "lr_schedule.decay_start_steps", "lr_schedule.decay_start_ratio"
    start, ratio = source.integer(names[0]), source.number(names[1])
    if ratio is not None and steps is not None:
        start = int(steps * ratio)
    if start is None or steps is None:
        source.needs(
            "lr_schedule.decay_steps", f"train.steps - {'the first step of the decay' if start is None else start}"
        )
    else:
        source.set("lr_schedule.decay_steps", steps - start, *names)


def _data(source: Translation) -> None:
    pangu = source.get("model") == "pangu_2_6b"
    source.set("data", "indexed_pangu" if pangu else "indexed")
    source.needs("data.train", "prefixes of indexed files, e.g. [/data/web]")
    if source.text(f"{_LOADER}type") == "BlendedMegatronDatasetDataLoader":
        prefixes, weights = source.blend(f"{_LOADER}config.data_path")
        if prefixes:
            source.open.pop("data.train")
            source.set("data.train", prefixes, f"{_LOADER}config.data_path")
        if weights:
            source.set("data.weights", weights, f"{_LOADER}config.data_path")
    elif source.is_given([f"{_LOADER}type"]):
        source.lacks(f"{_LOADER}type", "other_files")
    source.set("validation.every", 0)
    for name in ("eod", "pad"):
        number = source.integer(f"{_LOADER}config.{name}")
        if number is not None and number >= 0:
            source.set(f"data.packing.{name}", number, f"{_LOADER}config.{name}")
    resets_both = source.flag("train_dataset.eos_reset")
    for key, name in (("reset_mask", "reset_attention_mask"), ("reset_positions", "reset_position_ids")):
        resets = resets_both or source.flag(f"{_LOADER}config.{name}")
        if resets != pangu:
            source.set(f"data.packing.{key}", resets, "train_dataset.eos_reset", f"{_LOADER}config.{name}")
        if resets and not pangu and "data.packing.eod" not in source.overrides:
            source.needs("data.packing.eod", "the tokenizer's id that ends a document")


def _callbacks(source: Translation) -> None:
    """Set the checkpoint keys; only settings that save are read."""
    listed = source.value("callbacks")
    for callback in listed if isinstance(listed, list) else []:
        if isinstance(callback, Mapping) and str(callback.get("type", "")).startswith("Checkpoint"):
            names = {"save_checkpoint_steps": "every", "keep_checkpoint_max": "keep", "async_save": "asynchronous"}
            for name, key in names.items():
                if name in callback:
                    source.set(f"checkpoint.{key}", callback[name], "callbacks")
