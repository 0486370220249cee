"""What is exported loads in transformers and computes the same; what transformers saved computes the same here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor

from pangu.checkpoint.index import read_index
from pangu.checkpoint.reading import newest_checkpoint
from pangu.config.build import build
from pangu.config.data import TokenizerConfig
from pangu.config.rope import Llama3Scaling
from pangu.config.schema import RunConfig
from pangu.data.tokenizers import load_tokenizer
from pangu.evaluation.generation import Sampling, generate
from pangu.interop.formats.huggingface_config import kinds, read_model
from pangu.interop.loading import load_model
from pangu.layers.expert_balance import ExpertBalance
from pangu.models.language_model import LanguageModel
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.interop.test_formats import HEADS, SEQUENCE, VOCAB, convert, logical, weights
from tests.models.helpers import make
from tests.references import foreign_checkpoints as foreign
from tests.references.pangu_reference import pangu_forward
from tests.weights import logical_view, whole_logits
from tools.convert_checkpoint import main

pytest.importorskip("transformers")

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bloom import modeling_bloom

from pangu.interop.formats.modeling_pangu import PanguConfig, PanguForCausalLM

SHAPES = (
    {"n_layer": 2, "n_embd": 32, "n_head": 4},
    {"n_layer": 3, "n_embd": 48, "n_head": 2, "n_inner": 80, "activation_function": "gelu"},
    {"n_layer": 1, "n_embd": 16, "n_head": 1, "tie_word_embeddings": False},
)


def tokens(vocab: int, sequence: int) -> Tensor:
    return torch.randint(0, vocab, (2, sequence), generator=torch.Generator().manual_seed(0))


def our_model(run: Path, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model in a run folder, in the format of its weights or another one."""
    config = build(RunConfig, yaml.safe_load((run / "config.yaml").read_text())).model
    found = logical(run)
    model, table = make(config, dtype=dtype or next(iter(found.values())).dtype)
    parameters = dict(model.named_parameters())
    assert found.keys() == {placement.name for placement in table}
    with torch.no_grad():
        for placement in table:
            logical_view(parameters[placement.stored_in], placement).copy_(found[placement.name])
        if (balance := model.balance_on(torch.device("cpu"))) is not None:
            balance.restore(run, read_index(newest_checkpoint(run))["experts"])
    return model


def our_logits(run: Path, ids: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[batch, sequence, vocab] of the model in a run folder."""
    with torch.no_grad():
        places = torch.arange(ids.shape[1]).expand_as(ids)
        return whole_logits(our_model(run, dtype), ids, places).transpose(0, 1)


@contextmanager
def in_double() -> Iterator[None]:
    """Let transformers compute all in fp64: its norms, tables of rope, softmax and routers ask for fp32 by name."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        # transformers has eight digits of the square root of 2 / pi in it
        patch.setattr(modeling_bloom, "bloom_gelu_forward", partial(torch.nn.functional.gelu, approximate="tanh"))
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def require_equal_in_double(theirs: torch.nn.Module, run: Path, ids: Tensor) -> None:
    """Logits equal to 1e-10 in fp64, of the same weights."""
    with in_double(), torch.no_grad():
        exact = type(theirs)(theirs.config).eval()
        exact.load_state_dict(theirs.state_dict())
        # torch multiplies groups of matrices in fp32 at most
        exact.config._experts_implementation = "eager"
        expected = exact(ids).logits
    assert expected.dtype == torch.float64
    torch.testing.assert_close(our_logits(run, ids, torch.float64), expected, atol=1e-10, rtol=0)


def require_equal_text(theirs: torch.nn.Module, run: Path, prompt: list[int]) -> None:
    """The most likely tokens, one by one and with cached keys and values."""
    model, text = load_model(run, Mesh(Layout(), 0, torch.device("cpu"))), list(prompt)
    ends = {model.eod, *model.stop}
    while len(text) < len(prompt) + 10 and text[-1] not in ends:
        with torch.no_grad():
            text.append(int(theirs(torch.tensor([text])).logits[0, -1].argmax()))
    assert generate(model, [prompt], Sampling(10, 0.0)) == [
        [token for token in text[len(prompt) :] if token not in ends]
    ]


def there_and_back(theirs: torch.nn.Module, tmp_path: Path, vocab: int, sequence: int) -> None:
    """Logits equal to 1e-5 here, to 1e-10 in fp64, and bit for bit after the way back; 1e-5 if it leaves as another
    type. Greedy text is equal."""
    ids = tokens(vocab, sequence)
    theirs.eval().save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = theirs(ids).logits
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    torch.testing.assert_close(our_logits(run, ids), expected, atol=1e-5, rtol=0)
    require_equal_in_double(theirs, run, ids)
    require_equal_text(theirs, run, ids[0, : sequence // 2].tolist())
    back = convert("pangu", "huggingface", run, tmp_path / "back")
    kind = type(theirs) if isinstance(theirs, PanguForCausalLM) else transformers.AutoModelForCausalLM
    loaded, info = kind.from_pretrained(back, output_loading_info=True)
    assert not any(info.values()), info
    exact = loaded.config.model_type == theirs.config.model_type
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(ids).logits, expected, atol=0 if exact else 1e-5, rtol=0)


@pytest.mark.parametrize("shape", SHAPES)
def test_gpt2(shape: dict[str, object], tmp_path: Path) -> None:
    torch.manual_seed(1)
    config = transformers.GPT2Config(vocab_size=67, n_positions=24, initializer_range=0.2, eos_token_id=9, **shape)
    there_and_back(transformers.GPT2LMHeadModel(config), tmp_path, 67, 24)


def test_gpt2_files_without_the_name_of_the_trunk(tmp_path: Path) -> None:
    """As the first GPT-2 was published: no `transformer.`, and causal masks among the weights."""
    config = transformers.GPT2Config(vocab_size=67, n_positions=24, n_layer=2, n_embd=16, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").unlink()
    state = {name.removeprefix("transformer."): tensor for name, tensor in theirs.transformer.state_dict().items()}
    torch.save(state | {"h.0.attn.bias": torch.ones(1, 1, 24, 24).tril()}, tmp_path / "theirs" / "pytorch_model.bin")
    found = logical(convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours"))
    assert torch.equal(found["layers.1.mlp.up.weight"], state["h.1.mlp.c_fc.weight"].T)


SCALING = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, "original_max_position_embeddings": 12}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 12, "beta_fast": 4}
RELATIVE = {
    **{"vocab_size": 67, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "max_position_embeddings": 24, "initializer_range": 0.2},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
LLAMA3 = Llama3Scaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0, original_sequence=12)
DEEPSEEK = {
    **{"kv_lora_rank": 10, "q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "n_group": 3, "topk_group": 2},
}
GLM_MOE = {
    **{"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "n_routed_experts": 6},
    **{"num_experts_per_tok": 3},
}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"]
TURNS = {"num_hidden_layers": 3, "rope_parameters": {**YARN, "truncate": False, "beta_slow": 1.0}}
LLAMAS = [
    ("Llama", {"num_key_value_heads": 2}),
    ("Llama", {"attention_bias": True, "mlp_bias": True}),
    ("Llama", {"attention_bias": True, "head_dim": 12, "rope_parameters": {"rope_theta": 50.0}}),
    ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 20.0, **SCALING}}),
    ("Mistral", {"sliding_window": 5, "num_key_value_heads": 2}),
    ("Mistral", {"sliding_window": None, "head_dim": 12}),
    ("Qwen2", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("Qwen3", {"head_dim": 12, "num_key_value_heads": 2}),
    ("Qwen3", {"attention_bias": True, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": MIXED, "num_hidden_layers": 5}),
    ("Cwm", {"sliding_window": 5, "head_dim": 12, "num_hidden_layers": 5, "num_key_value_heads": 2}),
    ("SmolLM3", {"num_key_value_heads": 2, "num_hidden_layers": 5}),
    ("SmolLM3", {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0], "attention_bias": True}),
    ("SmolLM3", {"no_rope_layers": [1, 1], "mlp_bias": True, "attention_bias": True}),
    ("Mixtral", {"num_local_experts": 5, "num_key_value_heads": 2}),
    ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 5, "head_dim": 12}),
    ("GptOss", {"num_local_experts": 5, "head_dim": 8, "num_key_value_heads": 2, "sliding_window": 5, **TURNS}),
    ("GptOss", {"num_local_experts": 4, "head_dim": 12, "layer_types": MIXED[:2], "sliding_window": 3}),
    ("Qwen3Moe", {"num_experts": 5, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 40, "num_experts_per_tok": 2, "decoder_sparse_step": 2}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}}),
    ("Llama", {"rope_parameters": {**YARN, "truncate": False, "attention_factor": 1.2}}),
    ("Qwen2", {"rope_parameters": YARN}),
    ("Phi3", {"num_key_value_heads": 2, "sliding_window": 5}),
    ("Ministral", {"sliding_window": 5, "head_dim": 8}),
    ("IQuestCoder", {"num_key_value_heads": 2, "head_dim": 12, "attention_bias": True}),
    ("InternLM3", {"num_key_value_heads": 2, "head_dim": 12}),
    ("Exaone", {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    ("SeedOss", {"num_key_value_heads": 2, "head_dim": 12}),
    ("SeedOss", {"attention_out_bias": True, "head_dim": 8}),
    ("Ernie4_5", {"use_bias": True, "head_dim": 12, "num_key_value_heads": 2}),
    ("Helium", {"attention_bias": True, "head_dim": 8}),
    ("Glm", {"head_dim": 8, "num_key_value_heads": 2}),
    ("Glm4", {"head_dim": 12, "num_key_value_heads": 2, "attention_bias": False}),
    ("Arcee", {"attention_bias": True, "mlp_bias": True, "head_dim": 8}),
    ("Jais2", {"num_key_value_heads": 2, "head_dim": 12}),
    ("Starcoder2", {"sliding_window": 5, "num_key_value_heads": 2}),
    ("StableLm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "num_key_value_heads": 2}),
    ("StableLm", {"use_qkv_bias": True, "use_parallel_residual": True}),
    ("GPTNeoX", {}),
    ("GPTNeoX", {"use_parallel_residual": False, "tie_word_embeddings": True}),
    ("Persimmon", {}),
    ("Falcon", {"ffn_hidden_size": 56}),
    ("Falcon", {"multi_query": False, "parallel_attn": False, "bias": True}),
    ("Falcon", {"multi_query": False}),
    ("Olmo", {"num_key_value_heads": 2}),
    ("Nemotron", {"num_key_value_heads": 2, "head_dim": 8}),
    ("Nemotron", {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "rope_parameters": {"rope_theta": 50.0}}),
    ("Bloom", {"n_layer": 2, "n_head": 4, "seq_length": 24}),
    ("OPT", {"ffn_dim": 56, "word_embed_proj_dim": 32, "init_std": 0.2}),
    ("DeepseekV3", DEEPSEEK | {"n_group": 3, "topk_group": 2, "attention_bias": True}),
    ("DeepseekV3", DEEPSEEK | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
    ("DeepseekV3", DEEPSEEK | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("DeepseekV3", DEEPSEEK | {"rms_norm_eps": 0.1}),
    ("DeepseekV3", DEEPSEEK | {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}}),
    ("DeepseekV2", DEEPSEEK | {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0, "attention_bias": True}),
    ("DeepseekV2", DEEPSEEK | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0}),
    ("Glm4Moe", GLM_MOE | {"use_qk_norm": True, "attention_bias": True}),
    ("Glm4Moe", GLM_MOE | {"n_group": 3, "topk_group": 2, "norm_topk_prob": False, "routed_scaling_factor": 2.5}),
    ("SolarOpen", GLM_MOE | {"n_shared_experts": 2}),
    ("GPTBigCode", {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 40}),
    ("GPTBigCode", {"n_positions": 24, "n_embd": 32, "n_layer": 2, "n_head": 4, "multi_query": False}),
]


@pytest.mark.parametrize(("kind", "variant"), LLAMAS, ids=str)
def test_every_type_of_transformers(kind: str, variant: dict[str, object], tmp_path: Path) -> None:
    kind_of_config = getattr(transformers, f"{kind}Config")
    known = {*kind_of_config().to_dict(), *kind_of_config.attribute_map}
    config = kind_of_config(**{key: value for key, value in RELATIVE.items() if key in known} | variant)
    kind_of_model = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    there_and_back(random_vectors(getattr(transformers, kind_of_model), config), tmp_path, 67, 24)


def test_each_type_has_been_compared() -> None:
    compared = {getattr(transformers, f"{kind}Config").model_type for kind, _ in LLAMAS} | {"gpt2", "gpt_pangu"}
    others = {"PanguEmbedded", "internlm2", "baichuan", "PanguProMoE", "pangu_ultra_moe", "kimi_k2"}
    assert compared | others == kinds().keys()
    assert len(compared & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()) >= 36


@pytest.mark.parametrize("kind", ["PanguEmbedded", "internlm2"])
def test_types_that_transformers_lacks(kind: str, tmp_path: Path) -> None:
    """openPangu-Embedded computes what Llama does with biases in attention; InternLM2 holds queries, keys and values of
    a key head in one piece."""
    config = transformers.LlamaConfig(**RELATIVE | {"num_key_value_heads": 2}, attention_bias=True)
    theirs = random_vectors(transformers.LlamaForCausalLM, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    told = json.loads((tmp_path / "theirs" / "config.json").read_text())
    told = {
        key: value
        for key, value in told.items()
        if key not in ("attention_bias", "mlp_bias", "head_dim", "pretraining_tp")
    }
    (tmp_path / "theirs" / "config.json").write_text(json.dumps({**told, "model_type": kind, "bias": True}))
    if kind == "internlm2":
        save_file(as_internlm2(theirs.state_dict()), tmp_path / "theirs" / "model.safetensors")
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    with torch.no_grad():
        torch.testing.assert_close(our_logits(run, tokens(67, 24)), theirs(tokens(67, 24)).logits, atol=1e-5, rtol=0)
    back = transformers.AutoModelForCausalLM.from_pretrained(convert("pangu", "huggingface", run, tmp_path / "back"))
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in back.state_dict().items())


def test_kimi_k2_without_the_layer_of_multi_token_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is a DeepSeek-V3, and leaves as one; biases that choose experts go along, also where nothing is converted. A
    layer of multi-token prediction that is not complete has to be left out."""
    config = transformers.DeepseekV3Config(**RELATIVE | DEEPSEEK | {"n_group": 1, "topk_group": 1})
    theirs = random_vectors(transformers.DeepseekV3ForCausalLM, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    told = json.loads((tmp_path / "theirs" / "config.json").read_text())
    published = {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    published |= {"num_nextn_predict_layers": 1, "ep_size": 1, "seq_aux": True, "aux_loss_alpha": 0.001}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(told | published))
    file = tmp_path / "theirs" / "model.safetensors"
    ahead = {"model.layers.2.enorm.weight": torch.rand(32), "model.layers.2.eh_proj.weight": torch.rand(32, 64)}
    state = load_file(file)
    save_file(state | ahead, file)
    words = ["--from", "huggingface", "--to", "pangu", "--input", str(tmp_path / "theirs"), "--output"]
    assert main([*words, str(tmp_path / "ours")]) == 2
    assert "model.layers.2.*: tensors of multi-token prediction are missing" in capsys.readouterr().err
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours", "model.mtp_layers=0")
    assert "model.mtp_layers = 1: left out; as given, 0 of 1 are kept" in capsys.readouterr().out
    with torch.no_grad():
        expected = theirs(tokens(67, 24)).logits
    torch.testing.assert_close(our_logits(run, tokens(67, 24)), expected, atol=1e-5, rtol=0)
    back = convert("pangu", "huggingface", run, tmp_path / "back")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(back)
    assert loaded.config.model_type == "deepseek_v3"
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in loaded.state_dict().items())
    opened = load_model(tmp_path / "theirs", Mesh(Layout(), 0, torch.device("cpu")))
    balance = opened.runner.model.balance_on(torch.device("cpu"))
    assert balance is not None
    assert torch.equal(balance.bias[0], state["model.layers.1.mlp.gate.e_score_correction_bias"])


def test_norms_that_a_type_lacks_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.OlmoConfig(**RELATIVE)
    transformers.OlmoForCausalLM(config).save_pretrained(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.rand(32)}, file)
    words = ["--from", "huggingface", "--to", "pangu", "--input", str(tmp_path / "theirs")]
    assert main([*words, "--output", str(tmp_path / "ours")]) == 2
    assert "model.norm.weight: olmo has no such tensor" in capsys.readouterr().err


@pytest.mark.parametrize(("vocab", "normalized"), [(67, True), (64000, False)])
def test_baichuan(vocab: int, normalized: bool, tmp_path: Path) -> None:
    """A Llama with queries, keys and values in one tensor; Baichuan2 divides each row of the head by its norm."""
    config = transformers.LlamaConfig(**RELATIVE | {"vocab_size": vocab})
    theirs = random_vectors(transformers.LlamaForCausalLM, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    told = json.loads((tmp_path / "theirs" / "config.json").read_text())
    llamas = ("attention_bias", "mlp_bias", "head_dim", "num_key_value_heads", "attention_dropout", "pretraining_tp")
    told = {key: value for key, value in told.items() if key not in llamas}
    told |= {"model_type": "baichuan", "model_max_length": 24, "z_loss_weight": 0}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(told))
    state = theirs.state_dict()
    for layer in ("model.layers.0.self_attn.", "model.layers.1.self_attn."):
        state[f"{layer}W_pack.weight"] = torch.cat([state.pop(f"{layer}{one}_proj.weight") for one in "qkv"])
    save_file(state, tmp_path / "theirs" / "model.safetensors")
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    alone = Mesh(Layout(), 0, torch.device("cpu"))
    assert load_model(tmp_path / "theirs", alone).config.attention_dropout == 0  # which the file does not name
    with torch.no_grad():
        if normalized:
            theirs.lm_head.weight /= theirs.lm_head.weight.norm(dim=1, keepdim=True)
        expected = theirs(tokens(vocab, 24)).logits
        torch.testing.assert_close(our_logits(run, tokens(vocab, 24)), expected, atol=1e-5, rtol=0)
        back = convert("pangu", "huggingface", run, tmp_path / "back")
        loaded = transformers.AutoModelForCausalLM.from_pretrained(back)
        torch.testing.assert_close(loaded(tokens(vocab, 24)).logits, expected, atol=1e-5, rtol=0)


def as_internlm2(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a Llama with 2 key heads for 4 heads of 8, by InternLM2's names."""
    names = {"self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3"}
    names |= {"mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "lm_head": "output"}
    names |= {"post_attention_layernorm": "ffn_norm", "embed_tokens": "tok_embeddings"}
    found = {}
    for name, tensor in state.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        found[name] = tensor
    for name in [name for name in found if "q_proj" in name]:
        query, key, value = (found.pop(name.replace("q_proj", f"{one}_proj")) for one in "qkv")
        pieces = [query[:16], key[:8], value[:8], query[16:], key[8:], value[8:]]
        found[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(pieces)
    return found


def test_pangu_pro_moe(tmp_path: Path) -> None:
    """Mixtral's layers with experts of a group each, shared ones, and a learned factor of each expert's weight."""
    torch.manual_seed(1)
    sizes, layer, names = (32, 24, 8), "model.layers.0.", ("gate_proj", "up_proj", "down_proj")
    hidden, width, experts = sizes
    state = {"model.embed_tokens.weight": torch.randn(67, hidden), "lm_head.weight": torch.randn(67, hidden)}
    state["model.norm.weight"] = torch.rand(hidden)
    for one in "qkvo":
        state[f"{layer}self_attn.{one}_proj.weight"] = torch.randn(hidden // (2 if one in "kv" else 1), hidden) / 8
        state[f"{layer}self_attn.{one}_proj.bias"] = torch.randn(hidden // (2 if one in "kv" else 1))
    for norm in ("input_layernorm", "post_attention_layernorm"):
        state[f"{layer}{norm}.weight"] = torch.rand(hidden)
    state |= {
        f"{layer}mlp.gate.weight": torch.randn(experts, hidden),
        f"{layer}mlp.router_scale": torch.rand(1, experts),
    }
    for expert, inner in (*((f"experts.{i}", width) for i in range(experts)), ("shared_expert", 2 * width)):
        for name in names:
            shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
            state[f"{layer}mlp.{expert}.{name}.weight"] = torch.randn(*shape) / 6
    told = {key: value for key, value in RELATIVE.items() if key != "initializer_range"} | {
        **{"model_type": "PanguProMoE", "num_hidden_layers": 1, "num_key_value_heads": 2, "num_experts": experts},
        **{"num_experts_per_tok": 4, "moe_intermediate_size": width, "shared_expert_intermediate_size": 2 * width},
        **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1.6e7, "tie_word_embeddings": False},
    }
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(told))
    save_file(state, tmp_path / "theirs" / "model.safetensors")
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    # a Llama computes the rest, and this its feed-forward layer
    config = transformers.LlamaConfig(**{**RELATIVE, **told, "model_type": "llama"}, attention_bias=True)
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.load_state_dict(state, strict=False)

    def mixture(x: Tensor) -> Tensor:
        def expert(name: str) -> Tensor:
            gate, up, down = (state[f"{layer}mlp.{name}.{one}.weight"] for one in names)
            return torch.nn.functional.silu(x @ gate.T) * (x @ up.T) @ down.T

        scores = (x @ state[f"{layer}mlp.gate.weight"].T).softmax(-1).unflatten(-1, (4, 2))
        best = scores == scores.amax(-1, keepdim=True)  # one of each group of two
        weights = (scores * best).flatten(-2) * state[f"{layer}mlp.router_scale"]
        return sum((weights[..., [i]] * expert(f"experts.{i}") for i in range(experts)), expert("shared_expert"))

    llama.model.layers[0].mlp.forward = mixture
    with torch.no_grad():
        torch.testing.assert_close(our_logits(run, tokens(67, 24)), llama(tokens(67, 24)).logits, atol=1e-4, rtol=0)
    back = load_file(convert("pangu", "huggingface", run, tmp_path / "back") / "model.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.items())


def test_what_is_told_of_a_router(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The files say how it chooses, the user how it is balanced. What no type chooses like is not written."""
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=24, num_local_experts=3
    )
    transformers.MixtralForCausalLM(config).save_pretrained(tmp_path / "theirs")
    balanced = ("model.router.balance=bias", "model.expert_capacity=1.25")
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours", *balanced)
    model = build(RunConfig, yaml.safe_load((run / "config.yaml").read_text())).model
    assert (model.router.balance, model.expert_capacity, model.num_chosen) == ("bias", 1.25, 2)
    ExpertBalance(model).restore(run, read_index(newest_checkpoint(run))["experts"])
    for source, target, folder, changes, said in (
        ("huggingface", "pangu", "theirs", ["model.router.score=sigmoid"], "score = sigmoid: the files have softmax"),
        ("huggingface", "pangu", "theirs", ["model.experts=4"], "model.experts = 4: the files have 3"),
        ("pangu", "huggingface", "ours", [], "model.router.balance = bias: cannot be expressed in transformers' mixtr"),
        ("pangu", "megatron", "ours", [], "model.router.balance = bias: cannot be expressed in Megatron-Core"),
    ):
        words = ["--from", source, "--to", target, "--input", str(tmp_path / folder), "--output", str(tmp_path / "x")]
        assert main([*words, *changes]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_pangu_with_rotary_positions(base: float, tmp_path: Path) -> None:
    """The query layer's queries turn as well; there is no table of positions but its own."""
    turns = {"position_embedding_type": "rotary", "rope_theta": base}
    sizes = {"vocab_size": 67, "max_position_embeddings": 24, "hidden_size": 32, "num_layers": 3, "num_heads": 4}
    config = PanguConfig(**sizes, **turns, initializer_range=0.2)
    there_and_back(random_vectors(PanguForCausalLM, config), tmp_path, 67, 24)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert {key: written[key] for key in turns} == turns
    assert "embedding.position.weight" not in logical(tmp_path / "ours")


def random_vectors(kind: Any, config: object) -> torch.nn.Module:
    """A new model in which every bias and gain is random, so that none can be forgotten."""
    torch.manual_seed(1)
    model = kind(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                # of ten binary digits, so that nothing is rounded where 1 is added to them
                parameter.copy_((1024 * (parameter + 0.3 * torch.randn(parameter.shape))).round() / 1024)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.3 * torch.randn(buffer.shape)
    return model


def test_rope_as_older_versions_of_transformers_wrote_it(tmp_path: Path) -> None:
    """The type `default` is what no scaling is; `rope_scaling` and `rope_theta` say the same as `rope_parameters`."""
    config = transformers.LlamaConfig(hidden_size=32, num_attention_heads=4).to_dict()
    del config["rope_parameters"]
    path = Path("config.json")
    for written, base, scaling in (
        ({"rope_theta": 500, "rope_scaling": {"type": "default"}}, 500.0, None),
        ({"rope_theta": 500, "rope_scaling": None}, 500.0, None),
        ({"rope_theta": 9, "rope_scaling": {"rope_type": "llama3", **SCALING}}, 9.0, LLAMA3),
        ({}, 1e4, None),
    ):
        told = read_model({**config, **written}, path)
        assert (told["rope_base"], told["rope_scaling"]) == (base, scaling)


_FRESH = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, other, ids, out = sys.argv[1:]
model, info = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, output_loading_info=True)
assert not any(info.values()), info
model.eval()
ids = torch.load(ids)
with torch.no_grad():
    logits = model(ids).logits
    loss = model(ids, labels=ids).loss
prompt = ids[:1, :7]
options = dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
ones = torch.ones_like(prompt)
cached = model.generate(prompt, attention_mask=ones, **options)
plain = model.generate(prompt, attention_mask=ones, use_cache=False, **options)
padded = torch.cat([torch.full((1, 3), 6), prompt[:, 3:]], dim=1)
both = torch.cat([prompt, padded])
mask = torch.ones_like(both)
mask[1, :3] = 0
batch = model.generate(both, attention_mask=mask, **options)
alone = model.generate(prompt[:, 3:], attention_mask=ones[:, 3:], **options)
texts = ["def f(x):\\n    return x", "今天 是一个好天气", ""]
tokenizers = []
for path in (folder, other):
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    told = [tokenizer(text)["input_ids"] for text in texts]
    tokenizers.append((told, [tokenizer.decode(i) for i in told], tokenizer.eos_token_id))
    tokenizer.save_pretrained(path + "-tokenizer")
    again = AutoTokenizer.from_pretrained(path + "-tokenizer", trust_remote_code=True)
    assert again(texts[1])["input_ids"] == told[1]
torch.save({
    "logits": logits, "loss": loss, "cached": cached, "plain": plain, "batch": batch, "alone": alone,
    "tokenizers": tokenizers,
}, out)
"""


def small_vocabulary(folder: Path) -> str:
    """A SentencePiece model of 67 pieces with PanGu-α's marks."""
    text = folder / "text.txt"
    text.write_text("def f(x): return x\n今天 是 一个 好 天气\n" * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "small"),
        vocab_size=VOCAB,
        hard_vocab_limit=False,
        user_defined_symbols=["▃", "▂", "<sep>", "<pad>", "<mask>", "<eod>", "<eot>"],
        minloglevel=2,
    )
    return str(folder / "small.model")


def write_openpangu(folder: Path, vocabulary: Path) -> None:
    """A small openPangu-Embedded as it is published: its tokenizer is a SentencePiece model and code of its own."""
    config = transformers.LlamaConfig(**RELATIVE | {"num_key_value_heads": 2, "vocab_size": 512}, attention_bias=True)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text())
    told = {key: told[key] for key in told if key not in ("attention_bias", "mlp_bias", "head_dim", "pretraining_tp")}
    (folder / "config.json").write_text(json.dumps(told | {"model_type": "PanguEmbedded", "bias": True}))
    shutil.copy(vocabulary, folder / "tokenizer.model")
    (folder / "tokenization_openpangu.py").write_text("raise AssertionError")
    code = {"AutoTokenizer": ["tokenization_openpangu.PanguTokenizer", None]}
    turn = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    facts = {"tokenizer_class": "PanguTokenizer", "auto_map": code, "chat_template": turn}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def test_a_tokenizer_with_code_of_its_own_comes_as_its_sentencepiece_model(tmp_path: Path) -> None:
    """Nobody runs the code of the folder, and what is imported generates."""
    write_openpangu(tmp_path / "theirs", Path(small_vocabulary(tmp_path)))
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    data = build(RunConfig, yaml.safe_load((run / "config.yaml").read_text())).data
    kept = TokenizerConfig("sentencepiece", str(run / "tokenizer.model"))
    assert data.tokenizer == kept
    assert load_tokenizer(kept).encode("def f(x)")
    assert (run / "tokenizer.model").read_bytes() == (tmp_path / "small.model").read_bytes()


def test_pangu_in_a_fresh_process(tmp_path: Path) -> None:
    """Its own code, tokenizers and cache work where nothing of ours is imported; logits as the reference's.

    1e-5 of the largest logit: fp32 sums of at most 128 products.
    """
    tensors = weights(torch.float32)
    foreign.write_checkpoint(tmp_path / "a.ckpt", foreign.mindspore_tensors(tensors))
    path = small_vocabulary(tmp_path)
    kinds, folders = ("pangu", "sentencepiece"), []
    for kind in kinds:
        given = (f"model.heads={HEADS}", f"data.tokenizer={{kind: {kind}, path: {path}}}")
        run = convert("mindspore", "pangu", tmp_path / "a.ckpt", tmp_path / f"ours_{kind}", *given)
        folders.append(convert("pangu", "huggingface", run, tmp_path / f"export_{kind}"))
    assert json.loads((folders[0] / "generation_config.json").read_text())["eos_token_id"] == 9
    ids = tokens(VOCAB, SEQUENCE)
    torch.save(ids, tmp_path / "ids.pt")
    done = subprocess.run(
        [sys.executable, "-c", _FRESH, *map(str, (*folders, tmp_path / "ids.pt", tmp_path / "out.pt"))],
        cwd=tmp_path,
        # several threads share a product as the machine's load has it, and these weights magnify roundings
        env={"HOME": str(tmp_path), "PATH": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "out.pt")
    doubles = {name: tensor.double() for name, tensor in tensors.items()}
    expected = pangu_forward(doubles, ids, heads=HEADS)
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(found["logits"].double(), expected, atol=bound, rtol=0)
    torch.testing.assert_close(our_logits(run, ids).double(), expected, atol=bound, rtol=0)
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(found["loss"].double(), loss, atol=1e-4, rtol=1e-4)
    assert torch.equal(found["cached"], found["plain"])
    assert torch.equal(found["batch"][0], found["cached"][0])
    assert torch.equal(found["batch"][1, 7:], found["alone"][0, 4:])
    for kind, folder, (told, decoded, eos) in zip(kinds, folders, found["tokenizers"], strict=True):
        tokenizer = load_tokenizer(TokenizerConfig(kind, path))
        assert told == [tokenizer.encode(text) for text in ("def f(x):\n    return x", "今天 是一个好天气", "")]
        assert decoded == [tokenizer.decode(ids) for ids in told]
        assert eos == 9
        back = convert("huggingface", "pangu", folder, tmp_path / f"back_{kind}")
        data = build(RunConfig, yaml.safe_load((back / "config.yaml").read_text())).data
        assert data.tokenizer == TokenizerConfig(kind, str(back / "tokenizer.model"))
