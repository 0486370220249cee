"""GPT with rmsnorm, swiglu, rope and grouped heads, without biases and tie, is transformers' Llama."""

from __future__ import annotations

import pytest
import torch

from tests.models.helpers import logical_weights, make, variant
from tests.weights import whole_logits

transformers = pytest.importorskip("transformers")

PARTS = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
OUTSIDE = {
    "embedding.word.weight": "model.embed_tokens.weight",
    "final_norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}


def llama_name(name: str) -> str:
    """The name that our tensor has in Llama."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, layer, *part, kind = name.split(".")
    return f"model.layers.{layer}.{PARTS['.'.join(part)]}.{kind}"


def test_logits() -> None:
    """fp64 weights; 1e-5 for logits of up to 4, because Llama takes its norms and angles in fp32 even then."""
    config = variant(
        kind="gpt",
        norm="rmsnorm",
        activation="swiglu",
        ffn=56,
        biases=False,
        tied_head=False,
        kv_heads=2,
        positions="rope",
    )
    ours, table = make(config)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.hidden,
            intermediate_size=56,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=2,
            max_position_embeddings=config.sequence,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
            attn_implementation="eager",
        )
    ).double()
    weights = {llama_name(name): weight for name, weight in logical_weights(ours, table).items()}
    theirs.load_state_dict(weights)
    tokens = torch.randint(0, config.vocab, (2, config.sequence), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine = whole_logits(ours, tokens, torch.arange(config.sequence).expand_as(tokens)).transpose(0, 1)
        expected = theirs(tokens).logits
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=0)
