"""Megatron's options, the `args` of its checkpoints: what they say of a model, and what we write there.

The names are those of `megatron/training/arguments.py` and of the configurations that it takes its options from, from
v1.0 to core_v0.19.0. What changes the function is used (`_USED`) or must have the one value that we compute (`_ONLY`);
the others concern training, parallelism, kernels and rounding, or depend on an option of `_ONLY` that is off.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pangu.checkpoint.formats.fields import check_fields, disagreements, refuse, shown
from pangu.checkpoint.formats.stored import PANGU_VOCAB
from pangu.config.errors import Problem, UserError
from pangu.config.model import ModelConfig

ROWS = 128
"""Megatron-Core pads the vocabulary to a multiple of this times the tensor-parallel size."""
TOP = "language_model.topQueryEmbedding.top_query_embeddings.weight"
"""The query embedding of PanGu-α, which no GPT has."""

_NUMBERS = {
    "heads": ("num_attention_heads",),
    "dropout": ("hidden_dropout",),
    "attention_dropout": ("attention_dropout",),
    "norm_eps": ("norm_epsilon", "layernorm_epsilon"),
    "init_std": ("init_method_std",),
}
"""Keys of `ModelConfig` that no shape tells: Megatron's options of the same meaning. Its versions differ in the name of
epsilon."""
_ONLY: dict[str, Sequence[Any]] = {
    "position_embedding_type": ["learned_absolute", "rope"],
    "normalization": ["LayerNorm", "RMSNorm"],
    "rotary_percent": [1.0],
    "rotary_interleaved": [False],
    "rotary_seq_len_interpolation_factor": [None, 1],
    "use_rope_scaling": [False],
    "rope_type": [None, "rope"],
    "no_rope_freq": [None],
    "apply_layernorm_1p": [False],
    "layernorm_zero_centered_gamma": [False],
    "apply_residual_connection_post_layernorm": [False],
    "window_size": [None],
    "softmax_type": ["vanilla"],
    "squared_relu": [False],
    "quick_geglu": [False],
    "glu_linear_offset": [0.0],
    "activation_func_clamp_value": [None],
    "use_te_activation_func": [False],
    "use_transformer_engine_op_fuser": [False],
    "qk_layernorm": [False],
    "qk_l2_norm": [False],
    "export_qk_l2_norm": [False],
    "attention_output_gate": [False],
    "multi_latent_attention": [False],
    "experimental_attention_variant": [None],
    "linear_attention_freq": [None],
    "num_experts": [None],
    "num_moe_experts": [None],
    "mtp_num_layers": [None, 0],
    "retro_add_retriever": [False],
    "heterogeneous_layers_config_path": [None],
    "heterogeneous_layers_config_encoded_json": [None, ""],
    "heterogeneous_block_specs": [False],
    "hybrid_attention_ratio": [0.0],
    "hybrid_mlp_ratio": [0.0],
    "hybrid_layer_pattern": [None],
    "hybrid_override_pattern": [None],
    "mtp_hybrid_override_pattern": [None],
    "is_hybrid_model": [False],
    "enable_gpt_oss": [False],
    "enable_mhc_connections": [False],
    "use_mup": [False],
    "spec": [None],
    "export_model_type": ["GPTModel"],
    "modelopt_enabled": [False],
}
"""Options that change what is computed and that are not read: the values that mean what we compute."""
_USED = """
num_layers encoder_num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels group_query_attention
num_query_groups max_position_embeddings vocab_size padded_vocab_size tensor_model_parallel_size model_parallel_size
pipeline_model_parallel_size hidden_dropout attention_dropout layernorm_epsilon norm_epsilon init_method_std
add_bias_linear swiglu gated_linear_unit bias_gelu_fusion openai_gelu rotary_base
untie_embeddings_and_output_weights softmax_scale virtual_pipeline_model_parallel_size
num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
"""
_HARMLESS = """
_cpu_offloading_context _is_global_batch_size_explicitly_specified account_for_embedding_in_pipeline_split
account_for_loss_in_pipeline_split accumulate_allreduce_grads_in_fp32 activation_func_fp8_input_store
activation_offload_fraction activations_checkpoint_method activations_checkpoint_num_layers adam_*
add_position_embedding add_qkv_bias adlr_* align_grad_reduce align_param_gather allow_ambiguous_pad_tokens
app_tag_run_name app_tag_run_version apply_query_key_layer_scaling apply_rope_fusion apply_wd_to_qk_layernorm async_*
attention_backend attention_softmax_in_fp32 auto_detect_ckpt_format autocast_dtype barrier_with_L1_time
batch_invariant_backend batch_invariant_mode batch_p2p_comm batch_p2p_sync batch_size bert_* beta_fast beta_slow bf16
bias_activation_fusion bias_dropout_fusion bias_swiglu_fusion biencoder_* block_data_path cache_mla_latents
calc_ft_timeouts calculate_per_token_loss chat_template check_* checkpoint_* ckpt_* classes_fraction clip_grad
clone_scatter_output_in_embedding config_logger_dir consumed_* context_parallel_size cp_comm_type cpu_offloading*
create_all_gather_group create_attention_mask_in_dataloader cross_entropy_* cuda_graph_* curr_iteration data_*
dataloader_* dataset_impl ddp_* DDP_impl deallocate_pipeline_outputs decode_only_cuda_graphs
decoder_*_pipeline_num_layers decoder_num_layers decoder_seq_length decoupled_* decrease_batch_size_if_needed
defer_embedding_wgrad_compute delay_grad_reduce delay_offload_until_cuda_graph delay_param_gather delay_wgrad_compute
delta_offload_bytes_across_pp_ranks deprecated_use_mcore_models deterministic_mode dino_* disable_* dist_*
distrib_optim_fully_reshardable_mem_efficient distribute_* distributed_* do_test do_train do_valid dsa_*
dump_param_to_param_group_map dynamic_loss_scale embedding_init_method_std embedding_path empty_unused_memory_level
enable_autocast enable_chunked_prefill enable_cuda_graph enable_experimental enable_ft_package
enable_full_sharding_in_hsdp enable_gloo_process_groups enable_msc enable_one_logger
encoder_pipeline_model_parallel_size encoder_seq_length encoder_tensor_model_parallel_size end_weight_decay
eod_mask_loss eos_id ep_overlap_early_attn_memory_release error_injection_rate error_injection_type eval_*
evidence_data_path exit_* exp_avg_* experimental_attention_variant_loss_scale_func expert_* export_* external_cuda_graph
faiss_use_gpu fake_process_group filter_warnings fim_* finalize_model_grads_func fine_grained_* finetune
finetune_data_files finetune_data_split finetune_hf_dataset first_last_layers_bf16 flash_attention_version flash_decode
flight_recorder_* fp16 fp16_lm_cross_entropy fp32_allreduce fp32_residual_connection fp4 fp4_* fp8 fp8_* freeze_* fsdp_*
ft_num_warmup_iters full_validation fully_parallel_load fully_parallel_save fused_residual_rmsnorm fused_single_qkv_rope
gdp_* global_batch_size gpu_sniff_test_interval grad_* gradient_accumulation_fusion gradient_reduce_div_fusion grpo_*
gtp_* head_lr_mult hetereogenous_dist_checkpoint hierarchical_context_parallel_sizes high_priority_a2a_comm_stream
high_priority_stream_groups hybrid_context_parallel hysteresis ict_* img_dim img_h img_w indexer_batch_size
indexer_log_interval inference_* init_method_xavier_uniform init_model_with_meta_device initial_loss_scale inprocess_*
iter_per_epoch iteration iterations_to_skip keep_fp8_transpose_cache keep_fp8_transpose_cache_when_using_custom_fsdp
kitchen_* kv_lora_rank langrl_* lazy_mpu_init legacy_tokenizer linear_*_dim linear_num_*_heads linear_scaler_* lion_*
load load_* local_rank log_* logging_level logit_dtype logits_load_* logits_save_* loss_scale loss_scale_window lr lr_*
main_*_dtype make_vocab_size_divisible_by mamba_* manual_gc manual_gc_eval manual_gc_interval mask_factor mask_prob
mask_type masked_softmax_fusion max_seqlen_per_dp_cp_rank max_tokens_to_oom megatron_fsdp_* memory_efficient_layer_norm
memory_keys memory_snapshot_path merge_file metadata_path mhc_* micro_batch_size microbatch_group_size_per_vp_stage
mid_level_dataset_surplus min_loss_scale min_lr min_offloaded_tensor_size min_scale mla_down_proj_fusion
mlp_chunks_for_prefill mlp_chunks_for_training mmap_bin_files mmap_warmup mock_data model_type modules_to_filter moe_*
most_recent_k mrope_section mscale mscale_all_dim mtp_* multiple_validation_sets muon_* mup_* nccl_* no_load_*
no_persist_layer_norm no_save_* no_sync_func no_weight_decay_cond_type non_persistent_* null_tokenizer_*
num_*_pipeline_* num_channels num_classes num_dataset_builder_threads num_distributed_optimizer_instances
num_floating_point_operations_so_far num_layers_at_end_in_bf16 num_layers_at_start_in_bf16
num_microbatches_with_partial_activation_checkpoints num_speculative_tokens num_workers nvtx_ranges
object_storage_cache_path offload_modules offset_sampling_seed_by_dp_rank one_logger_* onnx_safe optimizer optimizer_*
original_max_position_embeddings otel_* outer_dp_sharding_strategy output_bert_embeddings overlap_* override_*
pad_vocab_size param_sync_func params_dtype patch_dim per_dataset_sequences_path per_split_data_args_path
perform_initialization perform_rl_step persist_layer_norm phase_transition_iterations pin_cpu_grads pin_cpu_params
pipeline_* pretrained_checkpoint profile profile_* pytorch_profiler_* q_lora_rank qad_train_target qk_clip* qk_head_dim
qk_pos_emb_head_dim quant_recipe query_in_block_prob rampup_batch_size rank recompute_* record_* refit_method
relative_attention_max_distance relative_attention_num_buckets renormalize_blend_weights replication replication_*
report_topk_accuracies rerun_mode reset_attention_mask reset_position_ids result_rejected_tracker_filename retriever_*
retro_* return_log_probs reuse_grad_buf_for_mxfp8_param_ag rl_* rope_scaling_factor rotary_scaling_factor
run_workload_inspector_server runtime_time_unit s3_cache_path sample_rate save save_* scaled_masked_softmax_fusion
scaled_upper_triang_masked_softmax_fusion scatter_gather_tensors_in_pipeline seed seq_length sequence_parallel
set_level_for_all_loggers sft sft_tokenizer_prompt_format sgd_momentum sharp_enabled_group short_seq_prob
skip_prompt_log_probs skip_train skipped_train_samples special_tokens split standalone_embedding_stage
start_eval_at_iter start_weight_decay step_batch_size_schedule straggler_* stream_ckpt_dequant strict_fsdp_dtensor_load
suggested_communication_unit_size swin_backbone_type symmetric_ar_type te_precision_config_file te_rng_tracker
teacher_model_config tensor_parallel_num_weight_shards tensorboard_* test_data_path test_mode throughput_window_size
tiktoken_* timers timing_* titles_data_path tokenizer_* torch_fsdp2_reshard_after_forward tp_* train_* transformer_impl
transformer_pipeline_model_parallel_size trust_remote_code use_*fsdp* use_checkpoint_* use_contiguous_buffers_in_ddp
use_contiguous_buffers_in_local_ddp use_cpu_initialization use_dist_ckpt use_dist_ckpt_deprecated
use_distributed_optimizer use_flash_attn use_flashinfer_fused_rope use_fused_weighted_squared_relu use_gigatoken
use_gloo_process_groups use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_inference_optimized_layers
use_kitchen* use_layer_wise_distributed_optimizer use_layer_wise_param_layout use_legacy_models use_legacy_static_engine
use_mamba_mem_eff_path use_mcore_models use_mp_args_from_checkpoint_args use_nsys_profiler use_one_sent_docs
use_persistent_ckpt_worker use_precision_aware_optimizer use_pytorch_profiler use_ring_exchange_p2p
use_rotary_position_embeddings use_sharp use_te_rng_tracker use_tokenizer_model_from_checkpoint_args
use_torch_optimizer_for_cpu_offload use_tp_pp_dp_mapping v_head_dim valid_data_path validation_set_names
variable_seq_lengths verify_integrity vision_* vocab_extra_ids vocab_file wandb_* warmup wd_incr_steps weight_decay
weight_decay_incr_style wgrad_deferral_limit window_attn_skip_freq world_size wsd_decay_steps yaml_cfg yarn_*
"""
"""Options and families of options that change nothing of what a converted model computes."""

_Options = Mapping[str, Any]
_Shapes = Mapping[str, tuple[int, ...]]


def read_model(
    options: _Options, shapes: _Shapes, ranks: int, layout: Mapping[str, Sequence[Any]], where: object
) -> dict[str, Any]:
    """Keys of `ModelConfig` that a checkpoint tells.

    Args:
        options: Megatron's options, as far as the files have them.
        shapes: the tensors that one tensor-parallel rank has of all layers.
        ranks: tensor-parallel ranks that share each cut tensor.
        layout: options that concern the layout: the values that the files' number means.
        where: stands at the head of messages.

    Raises:
        UserError: naming every option that we do not compute or that does not agree with the tensors, or a tensor
            that every such model has and this one lacks.
    """
    check_fields(options, where, _USED.split(), _HARMLESS.split(), _ONLY)
    problems: list[Problem] = []
    told: dict[str, Any] = {}
    for ours, theirs in ((ours, name) for ours, names in _NUMBERS.items() for name in names if name in options):
        told[ours] = _number(options, theirs, ours == "heads", problems)
    vocab = None if options.get("vocab_size") is None else _number(options, "vocab_size", True, problems)
    refuse(where, problems)
    try:
        told |= (_port if TOP in shapes else _core)(options, shapes, ranks, told.get("heads"), problems)
    except KeyError as error:
        raise UserError(
            f"{where}: neither a PanGu-α of Megatron 1.1 nor a GPT of Megatron-Core: no {error} in it"
        ) from error
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise UserError(f"{where}: the tensors have other shapes than those of a GPT or PanGu-α of Megatron") from error
    layers = len({found[1] for name in shapes if (found := re.search(r"layers\.(\d+)\.", name))})
    agree = dict(layout) | {
        "num_layers": [layers],
        "encoder_num_layers": [layers, None],
        "hidden_size": [told["hidden"]],
        "ffn_hidden_size": [told["ffn"], None],
    }
    if heads := told.get("heads"):
        head = told["hidden"] / heads
        agree |= {"kv_channels": [head, None], "softmax_scale": [None, 1 / math.sqrt(head)]}
    if TOP not in shapes:
        agree |= _core_agrees(options, told)
    refuse(where, problems + disagreements(options, agree))
    return told | {"layers": layers + (TOP in shapes), "vocab": vocab or told["vocab"]}


def _number(options: _Options, name: str, whole: bool, problems: list[Problem]) -> float:
    """A number that is not negative, a positive one if it must be an integer."""
    value = options[name]
    if isinstance(value, int) and not isinstance(value, bool) and whole <= value < 2**31:
        return value if whole else float(value)
    if isinstance(value, float) and not whole and 0 <= value < math.inf:
        return value
    problems.append(Problem(name, shown(value), f"must be {'a positive integer' if whole else 'a positive number'}"))
    return 1


def _port(options: _Options, shapes: _Shapes, ranks: int, heads: int | None, problems: list[Problem]) -> dict[str, Any]:
    """Keys that PanGu-α's tensors tell."""
    rows, hidden = shapes["language_model.embedding.word_embeddings.weight"]
    told = {
        "kind": "pangu",
        "hidden": hidden,
        "vocab": PANGU_VOCAB.get(rows * ranks, rows * ranks),
        "sequence": shapes[TOP][0],
        "ffn": shapes["language_model.transformer.topQueryLayer.mlp.dense_h_to_4h.weight"][0] * ranks,
    }
    if gelus := [options[name] is True for name in ("bias_gelu_fusion", "openai_gelu") if name in options]:
        told["activation"] = "gelu_tanh" if any(gelus) else "gelu"
    return told


def _core(options: _Options, shapes: _Shapes, ranks: int, heads: int | None, problems: list[Problem]) -> dict[str, Any]:
    """Keys that a GPT's tensors and options tell."""
    rows, hidden = shapes["embedding.word_embeddings.weight"]
    layer = "decoder.layers.0."
    ffn = shapes[f"{layer}mlp.linear_fc2.weight"][1] * ranks
    gated = shapes[f"{layer}mlp.linear_fc1.weight"][0] * ranks == 2 * ffn
    biases = f"{layer}self_attention.linear_proj.bias" in shapes
    # the fused kernel is the approximation by tanh; it needs biases
    tanh = biases and options.get("bias_gelu_fusion") is True
    told: dict[str, Any] = {
        "kind": "gpt",
        "hidden": hidden,
        "vocab": rows * ranks,
        "ffn": ffn,
        "activation": "swiglu" if gated else "gelu_tanh" if tanh else "gelu",
        "norm": "layernorm" if "decoder.final_layernorm.bias" in shapes else "rmsnorm",
        "biases": biases,
        "tied_head": "output_layer.weight" not in shapes,
    }
    if heads is not None:
        qkv = shapes[f"{layer}self_attention.linear_qkv.weight"][0] * ranks
        told["kv_heads"] = (qkv - hidden) * heads // hidden // 2
    if table := shapes.get("embedding.position_embeddings.weight"):
        return told | {"positions": "learned", "sequence": table[0]}
    told |= {"positions": "rope", "rope_base": 10000.0}
    if "rotary_base" in options:
        told["rope_base"] = _number(options, "rotary_base", False, problems)
    if options.get("max_position_embeddings") is not None:
        told["sequence"] = _number(options, "max_position_embeddings", True, problems)
    return told


def _core_agrees(options: _Options, told: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
    """Options that a GPT's tensors tell as well: what they say."""
    gated = told["activation"] == "swiglu"
    agree: dict[str, Sequence[Any]] = {
        "normalization": ["LayerNorm" if told["norm"] == "layernorm" else "RMSNorm"],
        "add_bias_linear": [told["biases"]],
        "swiglu": [gated],
        "gated_linear_unit": [gated],
        "position_embedding_type": ["learned_absolute" if told["positions"] == "learned" else "rope"],
        "untie_embeddings_and_output_weights": [not told["tied_head"]],
    }
    if told["positions"] == "learned":
        agree["max_position_embeddings"] = [told["sequence"]]
    if "kv_heads" in told:
        grouped = told["kv_heads"] != told["heads"]
        agree["group_query_attention"] = [grouped, True]
        if options.get("group_query_attention") is True:
            agree["num_query_groups"] = [told["kv_heads"]]
    return agree


def write_options(model: ModelConfig, rows: int, ranks: int) -> argparse.Namespace:
    """Megatron's options that concern the architecture; the word embedding has so many rows, padding included."""
    pangu, tanh = model.kind == "pangu", model.activation == "gelu_tanh"
    rope = model.positions == "rope"
    values = {theirs: getattr(model, ours) for ours, names in _NUMBERS.items() for theirs in names} | {
        "num_layers": model.layers - pangu,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn_size,
        "kv_channels": model.head_size,
        "seq_length": model.sequence,
        "max_position_embeddings": model.sequence,
        "vocab_size": model.vocab,
        "padded_vocab_size": rows,
        "make_vocab_size_divisible_by": ROWS,
        "model_parallel_size": ranks,
        "tensor_model_parallel_size": ranks,
        "pipeline_model_parallel_size": 1,
        "group_query_attention": model.kv_heads not in (None, model.heads),
        "num_query_groups": model.kv_heads or model.heads,
        "add_bias_linear": model.biases,
        # Megatron-Core knows the approximation by its fused kernel alone, the port by either
        "bias_gelu_fusion": tanh and not pangu,
        "openai_gelu": tanh and pangu,
        "swiglu": model.activation == "swiglu",
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "position_embedding_type": "rope" if rope else "learned_absolute",
        "add_position_embedding": not rope,
        "use_rotary_position_embeddings": rope,
        "rotary_base": model.rotary_base,
        "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": not model.tied_head,
    }
    return argparse.Namespace(**values)
