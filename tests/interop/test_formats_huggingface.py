"""config.json and the other files of a folder of transformers: each field is used, harmless, or refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pangu.common.errors import UserError, printable
from pangu.config.model import LatentConfig, ModelConfig, RouterConfig
from pangu.config.model_checks import find_model_problems
from pangu.config.rope import Llama3Scaling, YarnScaling
from pangu.interop.formats.convert import fitting_tensors
from pangu.interop.formats.huggingface import HuggingFaceSource
from pangu.interop.formats.huggingface_config import read_model
from pangu.interop.loading import load_model
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.interop.test_formats import HEADS, convert, weights
from tests.references import foreign_checkpoints as foreign

pytest.importorskip("transformers")

import transformers

from pangu.interop.formats.modeling_pangu import PanguConfig

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 16}
LLAMA3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 12}
UNTOLD = {
    **dict.fromkeys(("kv_heads", "rope_base", "relative_buckets", "relative_distance")),
    "attention": "auto",
}
SLIDES, SEES_ALL = "sliding_attention", "full_attention"


def fields(kind: str, **changes: Any) -> dict[str, Any]:
    """What transformers writes into config.json for a small model, with some fields changed."""
    theirs = PanguConfig if kind == "Pangu" else getattr(transformers, f"{kind}Config")
    return {**theirs(**SIZES).to_dict(), **changes}


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Pangu"])
def test_whatever_transformers_writes_is_known(kind: str) -> None:
    assert read_model(fields(kind), Path("config.json"))["hidden"] == 32


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama 3.1 8B": (
        '{"architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,'
        '"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu",'
        '"hidden_size": 4096, "initializer_range": 0.02,'
        '"intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",'
        '"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,'
        '"rms_norm_eps": 1e-05, "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,'
        '"original_max_position_embeddings": 8192, "rope_type": "llama3"}, "rope_theta": 500000.0, "use_cache": true,'
        '"tie_word_embeddings": false, "torch_dtype": "bfloat16", "transformers_version": "4.42.3",'
        '"vocab_size": 128256}',
        {
            "rope_base": 5e5,
            "rope_scaling": Llama3Scaling(
                factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_sequence=8192
            ),
            "kv_heads": 8,
            "biases": False,
        },
    ),
    "Mistral 7B 0.1": (
        '{"architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",'
        '"hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,'
        '"model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,'
        '"rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,'
        '"torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": true, "vocab_size": 32000}',
        {"window": 4096, "biases": False, "qk_norm": False},
    ),
    "Qwen3 0.6B": (
        '{"architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "head_dim": 128,'
        '"bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu", "hidden_size": 1024, "use_cache": true,'
        '"initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960, "vocab_size": 151936,'
        '"max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,'
        '"num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000,'
        '"sliding_window": null, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_sliding_window": false,'
        '"transformers_version": "4.51.0"}',
        {"head_dim": 128, "qk_norm": True, "window": None, "tied_head": True, "rope_base": 1e6},
    ),
    "Mixtral 8x7B 0.1": (
        '{"architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,'
        '"hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,'
        '"max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,'
        '"num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,'
        '"output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,'
        '"sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16",'
        '"transformers_version": "4.36.0.dev0", "use_cache": true, "vocab_size": 32000}',
        {
            "experts": 8,
            "experts_per_token": 2,
            "ffn": 14336,
            "rope_base": 1e6,
            "window": None,
            "router": RouterConfig(),
        },
    ),
    "Qwen3 30B-A3B": (
        '{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,'
        '"bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,'
        '"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,'
        '"max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",'
        '"moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,'
        '"num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,'
        '"rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,'
        '"sliding_window": null, "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_cache": true,'
        '"transformers_version": "4.51.0", "use_sliding_window": false, "vocab_size": 151936}',
        {"experts": 128, "experts_per_token": 8, "expert_ffn": 768, "expert_every": 1, "router": RouterConfig()},
    ),
    "DeepSeek-V3, dequantized": (
        '{"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,'
        '"bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",'
        '"hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,'
        '"max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,'
        '"moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,'
        '"num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,'
        '"num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,'
        '"rms_norm_eps": 1e-06, "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,'
        '"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, "rope_theta": 10000,'
        '"routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": false, "topk_group": 4,'
        '"topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": true,'
        '"v_head_dim": 128, "vocab_size": 129280}',
        {
            "latent": LatentConfig(kv_rank=512, q_rank=1536, nope_head_dim=128, rope_head_dim=64, value_head_dim=128),
            "rope_scaling": YarnScaling(
                name="yarn", factor=40.0, original_sequence=4096, attention_factor=1.0, mscale_all_dim=1.0
            ),
            "dense_layers": 3,
            "shared_experts": 1,
            "router": RouterConfig("sigmoid", True, 2.5, "group_limited", 8, 4, "bias"),
        },
    ),
    "BLOOM 560M": (
        '{"apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0, "bos_token_id": 1,'
        '"architectures": ["BloomForCausalLM"], "attention_softmax_in_fp32": true, "pad_token_id": 3, "n_inner": null,'
        '"eos_token_id": 2, "hidden_dropout": 0.0, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05,'
        '"masked_softmax_fusion": true, "model_type": "bloom", "n_embed": 1024, "n_layer": 24,'
        '"num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1, "skip_bias_add": true,'
        '"skip_bias_add_qkv": false, "slow_but_exact": false, "unk_token_id": 0, "use_cache": true,'
        '"vocab_size": 250880}',
        {"hidden": 1024, "heads": 16, "layers": 24, "sequence": 2048, "embedding_norm": True, "tied_head": True},
    ),
    "Falcon 7B": (
        '{"alibi": false, "apply_residual_connection_post_layernorm": false, "architectures": ["FalconForCausalLM"],'
        '"attention_dropout": 0.0, "bias": false, "bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0,'
        '"hidden_size": 4544, "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "falcon",'
        '"multi_query": true, "new_decoder_architecture": false, "num_attention_heads": 71, "num_hidden_layers": 32,'
        '"parallel_attn": true, "torch_dtype": "bfloat16", "use_cache": true, "vocab_size": 65024}',
        {"kv_heads": 1, "parallel_block": "shared_norm", "biases": False, "ffn": None, "tied_head": True},
    ),
    "GPT-NeoX 20B": (
        '{"architectures": ["GPTNeoXForCausalLM"], "attention_probs_dropout_prob": 0, "bos_token_id": 0,'
        '"eos_token_id": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0, "hidden_size": 6144,'
        '"initializer_range": 0.02, "intermediate_size": 24576, "layer_norm_eps": 1e-05, "model_type": "gpt_neox",'
        '"max_position_embeddings": 2048, "num_attention_heads": 64, "num_hidden_layers": 44, "rotary_pct": 0.25,'
        '"rotary_emb_base": 10000, "tie_word_embeddings": false, "use_cache": true, "vocab_size": 50432}',
        {"partial_rotary_factor": 0.25, "rope_base": 1e4, "parallel_block": True, "dropout": 0.0},
    ),
    "StarCoder2 3B": (
        '{"architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "attention_softmax_in_fp32": true,'
        '"bos_token_id": 0, "embedding_dropout": 0.1, "eos_token_id": 0, "hidden_act": "gelu_pytorch_tanh",'
        '"hidden_size": 3072, "initializer_range": 0.018042, "intermediate_size": 12288, "layer_norm_epsilon": 1e-05,'
        '"max_position_embeddings": 16384, "mlp_type": "default", "model_type": "starcoder2", "norm_epsilon": 1e-05,'
        '"norm_type": "layer_norm", "num_attention_heads": 24, "num_hidden_layers": 30, "num_key_value_heads": 2,'
        '"residual_dropout": 0.1, "rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": true,'
        '"scale_attn_weights": true, "sliding_window": 4096, "use_bias": true, "vocab_size": 49152}',
        {"window": 4096, "kv_heads": 2, "biases": True, "activation": "gelu_tanh", "tied_head": True},
    ),
    "Pangu Pro MoE 72B": (
        '{"architectures": ["PanguProMoEForCausalLM"], "hidden_act": "silu", "hidden_size": 5120,'
        '"initializer_range": 0.02, "max_position_embeddings": 131072, "model_type": "PanguProMoE",'
        '"moe_intermediate_size": 1344, "num_attention_heads": 40, "num_experts": 64, "num_experts_per_tok": 8,'
        '"num_hidden_layers": 48, "num_key_value_heads": 8, "output_router_logits": false, "rms_norm_eps": 1e-05,'
        '"rope_theta": 16000000.0, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5376,'
        '"tie_word_embeddings": false, "use_cache": true, "vocab_size": 153376}',
        {"experts": 64, "expert_ffn": 1344, "shared_experts": 4, "experts_per_token": 8, "biases": "attention"},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    text, expected = PUBLISHED[name]
    told = read_model(json.loads(text), Path("config.json"))
    assert {key: told[key] for key in expected} == expected
    assert not list(find_model_problems(ModelConfig(**{**UNTOLD, **told})))


def test_kimi_k2_and_smollm3_as_published() -> None:
    """Kimi-K2's YaRN has one number of turns from which on pairs are slow; SmolLM3's file has fields without effect."""
    kimi = json.loads(PUBLISHED["DeepSeek-V3, dequantized"][0])
    kimi |= {"model_type": "kimi_k2", "n_group": 1, "topk_group": 1, "n_routed_experts": 384, "pretraining_tp": 1}
    kimi["rope_scaling"] |= {"beta_fast": 1.0, "factor": 32.0}
    told = read_model(kimi, Path("config.json"))
    assert (told["rope_scaling"].beta_fast, told["router"].selection) == (1.0, "top")
    assert not list(find_model_problems(ModelConfig(**{**UNTOLD, **told})))
    smol = fields("SmolLM3", max_window_layers=28, pretraining_tp=2, no_rope_layers=[1, 0])
    assert read_model(smol, Path("config.json"))["nope_layers"] == 2


SLIDING = {"use_sliding_window": True, "max_window_layers": 5}


@pytest.mark.parametrize(("kind", "more"), [("SmolLM3", SLIDING), ("Qwen2", SLIDING), ("GptOss", {})], ids=str)
def test_windows_without_a_list_of_layers_are_those_of_transformers(kind: str, more: dict[str, Any]) -> None:
    sizes = SIZES | {"num_hidden_layers": 8, "sliding_window": 6}
    config = getattr(transformers, f"{kind}Config")(**sizes, **more).to_dict()
    listed = config.pop("layer_types")
    model = ModelConfig(**{**UNTOLD, **read_model(config, Path("config.json"))})
    assert [model.has_window(layer) for layer in range(8)] == [one == SLIDES for one in listed]
    assert SLIDES in listed


def test_other_names_of_fields() -> None:
    sizes = {
        "model_type": "exaone",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "vocab_size": 67,
    }
    names = {"num_layers": 3, "layer_norm_epsilon": 1e-4, "activation_function": "silu", "max_position_embeddings": 16}
    told = read_model(sizes | names, Path("config.json"))
    assert (told["layers"], told["norm_eps"], told["activation"], told["kv_heads"]) == (3, 1e-4, "swiglu", 8)
    for field in ("qkv_bias", "bias"):
        config = {
            **sizes,
            "model_type": "internlm3",
            "num_hidden_layers": 2,
            "max_position_embeddings": 16,
            field: True,
        }
        with pytest.raises(UserError, match="_bias = true: is not supported; use false"):
            read_model(config, Path("config.json"))


MSCALE = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.7, "original_max_position_embeddings": 8}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("GPT2", {"my_option": 3}, "my_option = 3: is unknown"),
    ("GPT2", {"add_cross_attention": True}, "add_cross_attention = true: is not supported; use false"),
    ("GPT2", {"embd_pdrop": 0.5}, "embd_pdrop = 0.5: must be resid_pdrop = 0.1"),
    ("GPT2", {"n_ctx": 8}, "n_ctx = 8: must be n_positions = 16"),
    ("GPT2", {"n_head": "4"}, "n_head = '4': must be an integer"),
    ("GPT2", {"n_head": 0, "n_layer": True}, "n_head = 0: must be at least 1"),
    ("GPT2", {"vocab_size": None}, "vocab_size = null: must be an integer"),
    ("GPT2", {"n_embd": 10**30}, "n_embd = 1000000000000000000000000000000: must be at least 1 and at most 1048576"),
    ("GPT2", {"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon = nan: must be a finite number"),
    ("GPT2", {"activation_function": ["gelu"]}, "activation_function = [gelu]: is none of gelu_new"),
    ("GPT2", {"tie_word_embeddings": 1}, "tie_word_embeddings = 1: must be true or false"),
    ("GPT2", {"quantization_config": {"bits": 4}}, "quantization_config = {bits: 4}: is not supported"),
    ("GPT2", {"model_type": ["gpt2"]}, "model_type = [gpt2]: is not supported"),
    (
        "Pangu",
        {"position_embedding_type": "relative_key"},
        "relative_key: is not supported; use absolute or rotary",
    ),
    ("Pangu", {"position_embedding_type": ["rotary"]}, "position_embedding_type = [rotary]: is not supported"),
    ("Olmo", {"clip_qkv": 8.0}, "clip_qkv = 8.0: is not supported; use null"),
    ("Pangu", {"rope_theta": -1}, "rope_theta = -1.0: must be above 0"),
    ("Pangu", {"rope_scaling": {"factor": 4}}, "rope_scaling = {factor: 4}: is unknown"),
    ("Llama", {"mlp_bias": True}, "mlp_bias = true: is not supported without attention_bias"),
    ("Llama", {"attention_bias": "yes"}, "attention_bias = yes: must be true or false"),
    ("Llama", {"rope_parameters": []}, "rope_parameters = []: must be a JSON object or null"),
    ("Llama", {"rope_parameters": {"rope_theta": 10**400}}, "rope_parameters.rope_theta = 1000"),
    ("Llama", {"rope_scaling": "llama3"}, "rope_scaling = llama3: must be a JSON object or null"),
    ("GPT2", {"initializer_range": 10**400}, "initializer_range = 1000"),
    ("Llama", {"rope_parameters": {"rope_type": ["default"]}}, "rope_parameters.rope_type = [default]"),
    ("Llama", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "longrope: is not supported"),
    ("Llama", {"rope_parameters": {"rope_type": "default", "factor": 4.0}}, "factor = 4.0: is unknown"),
    ("Llama", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_parameters.rope_theta = '1e4': must be a number"),
    ("Llama", {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "factor": None}}, "rope_parameters.factor = null"),
    (
        "Llama",
        {"rope_parameters": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 12.5}},
        "= 12.5",
    ),
    ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling.rope_type = dynamic"),
    ("Llama", {"rope_parameters": {SEES_ALL: {"rope_type": "default"}}}, f"{SEES_ALL} = "),
    ("Llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
    ("Llama", {"sliding_window": 8}, "sliding_window = 8: is not supported; use null"),
    ("Qwen2", {"layer_types": [SEES_ALL, SLIDES]}, "layer_types = [full_attention, sliding_attention]"),
    ("Qwen2", {"layer_types": 7}, "layer_types = 7: is not supported"),
    ("Qwen2", {"layer_types": ["chunked_attention"] * 2}, "use full_attention or sliding_attention for each of the"),
    ("Cwm", {"layer_types": None}, "layer_types must be given"),
    ("SmolLM3", {"no_rope_layers": [1, 2]}, "no_rope_layers = [1, 2]: must be a list of 2 zeros and ones"),
    ("GptOss", {"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4}: is not supported; use bf16 weights, e.g."),
    ("DeepseekV3", {"quantization_config": {"quant_method": "fp8"}}, "fp8}: is not supported; convert the weights"),
    ("Llama", {"quantization_config": {"quant_method": ["gptq"]}}, "is not supported; use the weights before"),
    ("Glm4Moe", {"routed_scaling_factor": None}, "routed_scaling_factor = null: must be a number"),
    ("GptOss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0: is not supported; use 7.0"),
    ("Qwen3", {"use_sliding_window": "no"}, "use_sliding_window = no: must be true or false"),
    ("Mistral", {"sliding_window": -1}, "sliding_window = -1: must be at least 1"),
    ("Mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1: is not supported; use 0.0"),
    ("Mixtral", {"num_local_experts": 0}, "num_local_experts = 0: must be at least 1"),
    ("Qwen3Moe", {"num_experts": 7}, "num_local_experts = 128: must be num_experts = 7"),
    ("Qwen3Moe", {"norm_topk_prob": 1}, "norm_topk_prob = 1: must be true or false"),
    ("Qwen3Moe", {"mlp_only_layers": [0]}, "mlp_only_layers = [0]: is not supported; use [] or null"),
    ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "use default without a factor, which computes the"),
    *(
        ("Llama", {"rope_scaling": {**MSCALE, name: value}}, f"{name} = ")
        for name in ("factor", "mscale", "mscale_all_dim")
        for value in ("x", -1, [1], {"a": 1}, float("nan"))
    ),
    ("Llama", {"rope_scaling": {**MSCALE, "factor": None}}, "factor = null: must be at least 1"),
    ("Llama", {"rope_scaling": {**MSCALE, "factor": 0.5}}, "factor = 0.5: must be at least 1"),
    ("SeedOss", {"attention_bias": False, "attention_out_bias": True}, "attention_out_bias = true: is not supported"),
    ("SeedOss", {"mlp_bias": True}, "attention_out_bias = false: is not supported with mlp_bias = true; use true"),
    ("Bloom", {"n_embed": 64}, "n_embed = 64: must be hidden_size = 32"),
    ("Bloom", {"num_attention_heads": 3, "n_head": 2}, "num_attention_heads = 3: must be n_head = 2"),
]


def test_another_name_of_a_field_may_be_null_or_the_only_one() -> None:
    only = fields("Qwen3Moe", num_local_experts=128)
    both, null = ({**only, "num_experts": 128, "num_local_experts": alias} for alias in (128, None))
    assert read_model(both, Path("x")) == read_model(null, Path("x")) == read_model(only, Path("x"))


@pytest.mark.parametrize(("kind", "changes", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_is_not_computed_is_refused_by_name(kind: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        read_model(fields(kind, **changes), Path("config.json"))
    assert str(error.value).startswith("config.json")
    assert words in str(error.value)


_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_ROPE = st.dictionaries(st.sampled_from(["rope_type", "type", "rope_theta", *LLAMA3]), _ANY | st.just("llama3"))


def read_anything(kind: str, data: st.DataObject) -> None:
    """Any value in the place of any field is read or refused; nothing else is raised."""
    config = fields(kind)
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(_ROPE if key == "rope_parameters" else _ANY)
    said = ""
    try:
        model = ModelConfig(**{**UNTOLD, **read_model(config, Path("config.json"))})
        said = "\n".join(map(str, find_model_problems(model)))
    except UserError as error:
        said = str(error)
    assert printable(said) == said


@pytest.mark.parametrize("kind", ["GPT2", "Qwen3", "Qwen3Moe"])
@settings(max_examples=60)
@given(data=st.data())
def test_any_field_may_be_anything(kind: str, data: st.DataObject) -> None:
    read_anything(kind, data)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Pangu"])
@settings(max_examples=1500)
@given(data=st.data())
def test_any_field_of_any_kind_may_be_anything(kind: str, data: st.DataObject) -> None:
    read_anything(kind, data)


def set_field(name: str, key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        values = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**values, key: value}))

    return change


def index(value: object) -> Callable[[Path], None]:
    """In place of the weights, an index with this map."""

    def change(folder: Path) -> None:
        (folder / "pytorch_model.bin").rename(folder / "other.bin")
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": value}))

    return change


def weights_with(name: object) -> Callable[[Path], None]:
    """The weights and one more tensor."""

    def change(folder: Path) -> None:
        state = torch.load(folder / "pytorch_model.bin")
        (folder / "pytorch_model.bin").unlink()
        torch.save({**state, name: torch.ones(2)}, folder / "pytorch_model.bin")

    return change


def two_files(folder: Path) -> None:
    """An index of two files, which both have all tensors."""
    index({"a": "one.bin", "b": "two.bin"})(folder)
    for name in ("one.bin", "two.bin"):
        (folder / name).symlink_to(folder / "other.bin")


DAMAGES = [
    (lambda folder: (folder / "config.json").write_bytes(b"[" * 10**5), "config.json: is not JSON"),
    (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json: is not JSON"),
    (set_field("config.json", "num_layers", 10**6), "num_layers = 1000000: must be at least 1 and at most 1000"),
    (set_field("config.json", "num_heads", 5), "model.heads = 5: must divide model.hidden = 32"),
    (set_field("config.json", "eos_token_id", "9"), "config.json: eos_token_id = 9: must be an id"),
    (
        set_field("generation_config.json", "eos_token_id", [1, None]),
        "generation_config.json: eos_token_id = [1, null]",
    ),
    (index([1]), "weight_map must be a JSON object that maps tensors to files"),
    (index({"a": 3}), "weight_map must be a JSON object that maps tensors to files"),
    (index({"a": "gone.bin"}), "weight_map names gone.bin, which is not a file in the folder"),
    (index({"a": "\x00\x1b[2J"}), "weight_map names \\x00\\x1b[2J, which is not a file in the folder"),
    (index({"a": "x" * 5000}), "which is not a file in the folder"),
    (two_files, "is in "),
    (weights_with("wte.weight"), "pytorch_model.bin: wte.weight is in "),
    (weights_with(5), "transformer.5: [2], not in the model"),
    (set_field("adapter_config.json", "peft_type", "LORA"), "transformers would add this adapter to the weights"),
]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("theirs") / "theirs"
    foreign.write_huggingface(folder, weights(), HEADS)
    return folder


def copy_of(exported: Path, tmp_path: Path) -> Path:
    """The small files anew, the weights as a link."""
    (tmp_path / "config.json").write_bytes((exported / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").symlink_to(exported / "pytorch_model.bin")
    return tmp_path


@pytest.mark.parametrize(("damage", "words"), DAMAGES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_damaged_folders_are_refused_in_words(
    damage: Callable[[Path], None], words: str, exported: Path, tmp_path: Path
) -> None:
    folder = copy_of(exported, tmp_path)
    damage(folder)
    with pytest.raises(UserError) as error:
        load_model(folder, Mesh(Layout(), 0, torch.device("cpu")))
    assert words in str(error.value)


def test_a_whole_file_comes_before_an_index(exported: Path, tmp_path: Path) -> None:
    """As in transformers: an index that was left behind when its files were merged is not asked."""
    folder = copy_of(exported, tmp_path)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "gone.bin"}}))
    source = HuggingFaceSource(folder)
    table = source.table(ModelConfig(**{**UNTOLD, **source.model_keys}))
    assert torch.equal(source.read(table[0]), weights()["embedding.word.weight"])


def test_many_tensors_are_told_in_a_few_lines(tmp_path: Path, exported: Path) -> None:
    """Each file's header is read once: it took a time in proportion to the square of their number."""
    folder = copy_of(exported, tmp_path)
    save_file({f"transformer.{i}": torch.zeros(1) for i in range(2000)}, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        load_model(folder, Mesh(Layout(), 0, torch.device("cpu")))
    assert str(error.value).count("\n") == 101
    assert str(error.value).endswith(" more")


def test_every_end_of_a_text_is_kept(exported: Path, tmp_path: Path) -> None:
    """The first separates documents, generation stops at each, and the way back writes all of them."""
    (tmp_path / "in").mkdir()
    folder = copy_of(exported, tmp_path / "in")
    set_field("config.json", "eos_token_id", [9, 5])(folder)
    set_field("generation_config.json", "eos_token_id", [5, 9, 11, 10**6])(folder)
    run = convert("huggingface", "pangu", folder, tmp_path / "run")
    packing = yaml.safe_load((run / "config.yaml").read_text())["data"]["packing"]
    assert (packing["eod"], packing["stop"], packing["pad"]) == (9, [5, 11], 6)
    out = convert("pangu", "huggingface", run, tmp_path / "out")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((out / name).read_text())["eos_token_id"] == [9, 5, 11]


def test_links_that_lead_out_of_a_folder_are_not_copied(exported: Path, tmp_path: Path) -> None:
    """A foreign folder could name any file of this machine; the links of Hugging Face's cache are followed."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"key")
    folder = tmp_path / "models--x" / "snapshots" / "1"
    folder.mkdir(parents=True)
    copy_of(exported, folder)
    for name in ("vocab.model", "tokenizer.json"):
        link = folder / name
        link.symlink_to(secret)
        with pytest.raises(UserError, match=rf"{name}: is a link to .*secret, outside the folder, so it is not copied"):
            HuggingFaceSource(folder)
        link.unlink()
    blobs = tmp_path / "models--x" / "blobs"
    blobs.mkdir()
    (blobs / "abc").write_text("{}")
    (folder / "tokenizer.json").symlink_to(Path("../../blobs/abc"))
    run = convert("huggingface", "pangu", folder, tmp_path / "run")
    assert (run / "tokenizer" / "tokenizer.json").read_text() == "{}"


def with_tensors(**more: torch.Tensor) -> Callable[[Path], None]:
    """Add tensors to the weights, or change some."""

    def change(folder: Path) -> None:
        state = load_file(folder / "model.safetensors")
        save_file(state | more, folder / "model.safetensors", {"format": "pt"})

    return change


INV_FREQ = "model.layers.1.self_attn.rotary_emb.inv_freq"
EMBED = torch.randn(64, 32, generator=torch.Generator().manual_seed(3))
CAUSAL = torch.ones(1, 1, 16, 16).tril()
LEFT_OUT: list[tuple[str, dict[str, torch.Tensor], str]] = [
    ("Llama", {"lm_head.weight": EMBED + 1e-3}, "lm_head.weight: differs from model.embed_tokens.weight"),
    ("Llama", {"lm_head.weight": EMBED}, ""),
    ("GPT2", {"lm_head.weight": EMBED * 2}, "lm_head.weight: differs from transformer.wte.weight"),
    ("Llama", {INV_FREQ: 500.0 ** -(torch.arange(4) / 4)}, f"{INV_FREQ}: is not what config.json implies"),
    ("Llama", {INV_FREQ: 10000.0 ** -(torch.arange(4) / 4)}, ""),
    ("Llama", {INV_FREQ: (10000.0 ** -(torch.arange(4) / 4)).half()}, ""),
    ("GPT2", {"transformer.h.0.attn.bias": CAUSAL.triu(-3)}, "transformer.h.0.attn.bias: is not what"),
    ("GPT2", {"transformer.h.0.attn.bias": CAUSAL.byte(), "h.1.attn.masked_bias": torch.tensor(-1e9)}, ""),
    ("GPT2", {"h.1.attn.masked_bias": torch.tensor(-1.0)}, "h.1.attn.masked_bias: is not what"),
    (
        "Llama",
        {"model.embed_tokens.weight": torch.ones(70, 32)},
        "model.embed_tokens.weight: [70, 32] in the files, [64, 32] in the model",
    ),
]


@pytest.mark.parametrize(("kind", "more", "words"), LEFT_OUT, ids=range(len(LEFT_OUT)))
def test_a_tensor_is_left_out_only_if_the_configuration_implies_it(
    kind: str, more: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    config = getattr(transformers, f"{kind}Config")(**SIZES, vocab_size=64, tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(EMBED)
    model.save_pretrained(tmp_path)
    with_tensors(**more)(tmp_path)
    source = HuggingFaceSource(tmp_path)
    table = source.table(ModelConfig(**{**UNTOLD, **source.model_keys}))
    if not words:
        assert not more.keys() & fitting_tensors(source, table).keys()
        return
    with pytest.raises(UserError) as error:
        fitting_tensors(source, table)
    assert words in str(error.value)
