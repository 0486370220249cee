"""Names of transformers: of tensors, and of the fields of config.json that all types of model share."""

from __future__ import annotations

from typing import Any

from pangu.checkpoint.formats.stored import Naming, one_by_one

_GPT2_OUTSIDE = {
    "embedding.word.weight": "transformer.wte.weight",
    "embedding.position.weight": "transformer.wpe.weight",
    "final_norm.weight": "transformer.ln_f.weight",
    "final_norm.bias": "transformer.ln_f.bias",
    "head.weight": "lm_head.weight",
}
GPT2_NAMES = Naming(
    _GPT2_OUTSIDE,
    {
        "ln_1": ("attention_norm",),
        "attn.c_attn": ("attention.query", "attention.key", "attention.value"),
        "attn.c_proj": ("attention.output",),
        "ln_2": ("mlp_norm",),
        "mlp.c_fc": ("mlp.up",),
        "mlp.c_proj": ("mlp.down",),
    },
    lambda layer: f"transformer.h.{layer}.",
    transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
)
PANGU_NAMES = Naming(
    {**_GPT2_OUTSIDE, "query_embedding.weight": "transformer.wqe.weight"},
    one_by_one(
        "ln_1",
        *("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.c_proj"),
        *("ln_2", "mlp.c_fc", "mlp.c_proj"),
    ),
    lambda layer: f"transformer.h.{layer}.",
)
LLAMA_NAMES = Naming(
    {
        "embedding.word.weight": "model.embed_tokens.weight",
        "final_norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    },
    {
        "input_layernorm": ("attention_norm",),
        "self_attn.q_proj": ("attention.query",),
        "self_attn.k_proj": ("attention.key",),
        "self_attn.v_proj": ("attention.value",),
        "self_attn.q_norm": ("attention.query_norm",),
        "self_attn.k_norm": ("attention.key_norm",),
        "self_attn.o_proj": ("attention.output",),
        "post_attention_layernorm": ("mlp_norm",),
        "mlp.gate_proj": ("mlp.gate",),
        "mlp.up_proj": ("mlp.up",),
        "mlp.down_proj": ("mlp.down",),
    },
    lambda layer: f"model.layers.{layer}.",
)

ONLY: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "quantization_config": (None,),
}
"""Fields of every type that change what is computed: the only values that we compute."""
HARMLESS = (
    # where the file comes from, and which code of transformers it is for
    *(
        "_name_or_path",
        "_commit_hash",
        "architectures",
        "transformers_version",
        "model_type",
        "auto_map",
        "torch_dtype",
    ),
    *("dtype", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "torchscript"),
    *("use_cache", "use_bfloat16", "tf_legacy_loss", "gradient_checkpointing", "chunk_size_feed_forward", "is_decoder"),
    # what it returns, and heads of other tasks
    *("return_dict", "output_attentions", "output_hidden_states", "output_scores", "return_dict_in_generate"),
    *("id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params"),
    # ids, of which `read_ids` takes some, and how texts are drawn
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "tokenizer_class"),
    *(
        "prefix",
        "max_length",
        "min_length",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "temperature",
    ),
    *("diversity_penalty", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "bad_words_ids"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "forced_bos_token_id"),
    *("forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens"),
    *("begin_suppress_tokens", "max_new_tokens"),
)
"""Fields of every type that do not change it."""
