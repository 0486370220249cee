"""openPangu-Ultra-MoE, and multi-token prediction as DeepSeek-V3, GLM-4.5 and openPangu publish it: both ways, bit for
bit, with the logits and losses of plain lines after their code and papers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pangu.config.data import PackingConfig
from pangu.data.batch import make_batch, with_mtp_targets
from pangu.evaluation.generation import Sampling, generate
from pangu.interop.formats.megatron_latent import inexpressible_latent
from pangu.interop.formats.stored import inexpressible
from pangu.interop.loading import load_model
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.configs import config
from tests.interop.test_formats import convert, logical
from tests.interop.test_formats_transformers import DEEPSEEK, GLM_MOE, RELATIVE, our_logits, our_model, random_vectors
from tests.references.openpangu_reference import OpenPangu, prediction_losses
from tests.weights import whole_loss
from tools.convert_checkpoint import main

transformers = pytest.importorskip("transformers")

Reference = Callable[[dict[str, Tensor], Tensor], Tensor]
"""Losses of the modules from the tensors of the files and ids [batch, sequence + 1]."""
OPENPANGU: dict[str, Any] = {
    "auto_map": {
        "AutoConfig": "configuration_openpangu_moe.PanguUltraMoEConfig",
        "AutoModel": "modeling_openpangu_moe.PanguUltraMoEModel",
        "AutoModelForCausalLM": "modeling_openpangu_moe.PanguUltraMoEForCausalLM",
    },
    **{"architectures": ["PanguUltraMoEForCausalLM"], "model_type": "pangu_ultra_moe", "attention_bias": False},
    **{"first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 32, "initializer_range": 0.02},
    **{"intermediate_size": 56, "kv_lora_rank": 10, "max_position_embeddings": 24, "moe_intermediate_size": 20},
    **{"n_routed_experts": 6, "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 4},
    **{"num_experts_per_tok": 3, "num_hidden_layers": 2, "num_key_value_heads": 4, "num_nextn_predict_layers": 1},
    **{"q_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "rms_norm_eps": 0.01, "rope_theta": 50.0},
    **{"routed_scaling_factor": 2.5, "sandwich_norm": True, "tie_word_embeddings": False, "torch_dtype": "float32"},
    **{"transformers_version": "4.48.2", "use_cache": True, "v_head_dim": 8, "vocab_size": 67},
}
FIRST_RELEASE = {
    **{"q_lora_rank": "attention_q_lora_dim", "kv_lora_rank": "attention_kv_lora_dim", "v_head_dim": "attention_v_dim"},
    **{"qk_nope_head_dim": "attention_qk_dim", "qk_rope_head_dim": "attention_qk_rope_dim"},
    **{"first_k_dense_replace": "num_dense_layers", "n_routed_experts": "num_routed_experts"},
    **{"n_shared_experts": "num_shared_experts", "num_nextn_predict_layers": "num_mtp_layers"},
}
IDS = torch.randint(0, 67, (2, 25), generator=torch.Generator().manual_seed(0))


def modules(state: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """What a layer of multi-token prediction holds beside a layer of the model."""
    draws = torch.Generator().manual_seed(layer)
    norms = {f"model.layers.{layer}.{one}.weight": torch.rand(32, generator=draws) for one in ("enorm", "hnorm")}
    return norms | {
        f"model.layers.{layer}.shared_head.norm.weight": torch.rand(32, generator=draws),
        f"model.layers.{layer}.eh_proj.weight": torch.randn(32, 64, generator=draws) / 8,
        f"model.layers.{layer}.embed_tokens.weight": state["model.embed_tokens.weight"].clone(),
        f"model.layers.{layer}.shared_head.head.weight": state["lm_head.weight"].clone(),
    }


def openpangu(folder: Path, names: dict[str, str] | None = None) -> dict[str, Tensor]:
    """Write a small openPangu-Ultra-MoE with its published names; return its tensors."""
    draws = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draws) / columns**0.5

    state = {"model.embed_tokens.weight": matrix(67, 32), "lm_head.weight": matrix(67, 32) * 4}
    norms = ["model.norm"]
    for number in range(3):
        layer = f"model.layers.{number}"
        shapes = {"q_a_proj": (12, 32), "q_b_proj": (40, 12), "kv_a_proj_with_mqa": (14, 32)}
        shapes |= {"kv_b_proj": (56, 10), "o_proj": (32, 32)}
        state |= {f"{layer}.self_attn.{name}.weight": matrix(*shape) * 2 for name, shape in shapes.items()}
        sublayers = {"": 56} if number == 0 else {"shared_experts.": 40} | {f"experts.{one}.": 20 for one in range(6)}
        for name, width in sublayers.items():
            for one, shape in (("gate", (width, 32)), ("up", (width, 32)), ("down", (32, width))):
                state[f"{layer}.mlp.{name}{one}_proj.weight"] = matrix(*shape)
        if number:
            state[f"{layer}.mlp.gate.weight"] = matrix(6, 32) * 3
        kinds = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
        norms += [f"{layer}.{kind}" for kind in kinds]
        for kind, width in (("q_a_layernorm", 12), ("kv_a_layernorm", 10)):
            state[f"{layer}.self_attn.{kind}.weight"] = torch.rand(width, generator=draws)
    state |= {f"{name}.weight": torch.rand(32, generator=draws) for name in norms} | modules(state, 2)
    folder.mkdir()
    told = {(names or {}).get(field, field): value for field, value in OPENPANGU.items()}
    (folder / "config.json").write_text(json.dumps(told))
    save_file(state, folder / "model.safetensors")
    return state


def openpangu_losses(state: dict[str, Tensor], ids: Tensor) -> Tensor:
    plain = OpenPangu(state, OPENPANGU)
    return prediction_losses(state, plain.hidden(ids[:, :-1]), ids, 2, plain.layer, OPENPANGU["rms_norm_eps"])


def published(kind: str, folder: Path) -> tuple[dict[str, Tensor], Reference]:
    """Write a small model whose last layers are multi-token prediction; return its tensors and a reference."""
    if kind == "openpangu":
        return openpangu(folder), openpangu_losses
    type_, own = {"deepseek": ("DeepseekV3", DEEPSEEK), "glm": ("Glm4Moe", GLM_MOE)}[kind]
    sizes = RELATIVE | own | {"num_hidden_layers": 4, "rms_norm_eps": 1e-6}
    theirs = random_vectors(
        getattr(transformers, f"{type_}ForCausalLM"), getattr(transformers, f"{type_}Config")(**sizes)
    ).eval()
    theirs.save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state |= modules(state, 2) | modules(state, 3)
    save_file(state, folder / "model.safetensors")
    told = json.loads((folder / "config.json").read_text())
    told |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 2}
    (folder / "config.json").write_text(json.dumps(told))

    def layer(number: int, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])[None]
        future = torch.full((x.shape[1],) * 2, -torch.inf, dtype=x.dtype).triu(1)[None, None]
        turns = theirs.model.rotary_emb(x, places)
        found = theirs.model.layers[number](x, attention_mask=future, position_ids=places, position_embeddings=turns)
        return found if isinstance(found, Tensor) else found[0]

    def losses(state: dict[str, Tensor], ids: Tensor) -> Tensor:
        hidden = theirs.model.embed_tokens(ids[:, :-1])
        for number in range(2):
            hidden = layer(number, hidden)
        return prediction_losses(state, theirs.model.norm(hidden), ids, 2, layer, 1e-6)

    return state, losses


def require_same_files(found: Path, state: dict[str, Tensor]) -> None:
    back = load_file(found / "model.safetensors")
    assert back.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in back.items())


@pytest.mark.parametrize("names", [None, FIRST_RELEASE], ids=["names of DeepSeek", "names of the first release"])
def test_openpangu_ultra_moe(names: dict[str, str] | None, tmp_path: Path) -> None:
    """Logits in two formats, greedy text from the files and from a run, and all weights back."""
    state = openpangu(tmp_path / "theirs", names)
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    assert "mtp.0.merge.weight" in logical(run)
    plain, doubles = OpenPangu(state, OPENPANGU), OpenPangu({n: x.double() for n, x in state.items()}, OPENPANGU)
    torch.testing.assert_close(our_logits(run, IDS[:, :24]), plain.logits(IDS[:, :24]), atol=1e-5, rtol=0)
    found = our_logits(run, IDS[:, :24], torch.float64)
    torch.testing.assert_close(found, doubles.logits(IDS[:, :24]), atol=1e-10, rtol=0)
    prompt = IDS[0, :5].tolist()
    text = list(prompt)
    for _ in range(12):
        text.append(int(plain.logits(torch.tensor([text]))[0, -1].argmax()))
    for folder in (tmp_path / "theirs", run):
        model = load_model(folder, Mesh(Layout(), 0, torch.device("cpu")))
        assert generate(model, [prompt], Sampling(12, 0.0)) == [text[5:]]
    back = convert("pangu", "huggingface", run, tmp_path / "back")
    require_same_files(back, state)
    told = json.loads((back / "config.json").read_text())
    expected = {key: x for key, x in OPENPANGU.items() if key not in ("transformers_version", "use_cache")}
    assert {key: told[key] for key in expected} == expected


@pytest.mark.parametrize("kind", ["openpangu", "deepseek", "glm"])
def test_multi_token_prediction_of_published_files(kind: str, tmp_path: Path) -> None:
    """The loss of each module, for documents without an end; all tensors return, copies of embedding and head too. The
    layers of transformers compute in fp32, those of openPangu here in fp64."""
    state, reference = published(kind, tmp_path / "theirs")
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    dtype, bound = (torch.float64, 1e-10) if kind == "openpangu" else (torch.float32, 1e-5)
    model = our_model(run, dtype)
    packing = PackingConfig(eod=None, pad=None, reset_mask=False, reset_positions=False)
    batch = with_mtp_targets(make_batch(IDS.numpy(), range(2), packing), model.config.mtp_layers, None)
    with torch.no_grad():
        found = whole_loss(model, batch)[1:]
        expected = reference({name: tensor.to(dtype) for name, tensor in state.items()}, IDS)
    torch.testing.assert_close(found, expected, atol=0, rtol=bound)
    require_same_files(convert("pangu", "huggingface", run, tmp_path / "back"), state)
    told = json.loads((tmp_path / "back" / "config.json").read_text())
    assert told["num_nextn_predict_layers"] == len(expected)


def test_modules_may_be_left_out_or_lack_their_copies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, _ = published("deepseek", tmp_path / "theirs")
    without = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "without", "model.mtp_layers=0")
    assert "model.mtp_layers = 2: left out; as given, 0 of 2 are kept" in capsys.readouterr().out
    assert not any(name.startswith(("mtp.", "layers.2.")) for name in logical(without))
    back = convert("pangu", "huggingface", without, tmp_path / "back")
    own = {name: x for name, x in state.items() if not name.startswith(("model.layers.2.", "model.layers.3."))}
    require_same_files(back, own)
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 0
    copies = [name for name in state if name.endswith((".embed_tokens.weight", "shared_head.head.weight"))]
    file = tmp_path / "theirs" / "model.safetensors"
    save_file({name: x for name, x in state.items() if name not in copies[1:]}, file)
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "ours")
    require_same_files(convert("pangu", "huggingface", run, tmp_path / "whole"), state)


def test_a_module_with_an_embedding_of_its_own_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state, _ = published("deepseek", tmp_path / "theirs")
    name = "model.layers.3.embed_tokens.weight"
    save_file(state | {name: state[name] + 1}, tmp_path / "theirs" / "model.safetensors")
    words = ["--from", "huggingface", "--to", "pangu", "--input", str(tmp_path / "theirs")]
    assert main([*words, "--output", str(tmp_path / "ours")]) == 2
    said = capsys.readouterr().err
    assert f"{name}: differs from model.embed_tokens.weight, but pangu keeps only one copy" in said
    assert "set model.mtp_layers=0" in said


def test_the_norms_of_latent_vectors_have_one_term_in_files_of_transformers() -> None:
    model = config("+config=openpangu_ultra_moe_718b").model
    assert model.latent is not None
    for eps, expected in ((1e-6, []), (None, [1e-5]), (1e-4, [1e-4])):
        problems = inexpressible(replace(model, latent=replace(model.latent, norm_eps=eps)), "pangu_ultra_moe")
        assert [(each.key, each.value) for each in problems] == [("model.latent.norm_eps", one) for one in expected]
    assert [each.key for each in inexpressible_latent(model)] == ["model.latent.norm_eps"]
    assert not inexpressible_latent(replace(model, norm_eps=1e-6))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sandwich_norm": False}, "sandwich_norm = false: is not supported; use true"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "model.rope_scaling"),
        ({"num_mtp_layers": 2}, "num_mtp_layers = 2: must be num_nextn_predict_layers = 1"),
        ({"n_group": 8}, "n_group = 8: is unknown and may change what the model computes"),
    ],
    ids=str,
)
def test_what_openpangu_does_not_compute_is_refused(
    changes: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    openpangu(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(OPENPANGU | changes))
    words = ["--from", "huggingface", "--to", "pangu", "--input", str(tmp_path / "theirs")]
    assert main([*words, "--output", str(tmp_path / "ours")]) == 2
    assert said in capsys.readouterr().err
