"""Today's models through Megatron-Core's files and back: the same weights and configuration, and what no file tells.

The layout of experts is that of `tests/references/megatron_core_files.py`, which shares nothing with the converter.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from pangu.config.build import build
from pangu.config.schema import RunConfig
from tests.interop.test_formats import HEADS_GIVEN, convert, logical, require_equal, require_same_export, weights
from tests.references import foreign_checkpoints
from tests.references import megatron_core_files as foreign
from tools.convert_checkpoint import main

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 24,
}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "rope_theta": 50.0, "factor": 4.0, "original_max_position_embeddings": 12, "beta_fast": 4}
GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 24}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, "rms_norm_eps": 1e-5}),
    ("Qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "tie_word_embeddings": True}),
    ("Qwen3", {"head_dim": 16}),
    ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "norm_topk_prob": True}),
    ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 2, "num_experts_per_tok": 2}),
    ("GPT2", GPT2),
    ("Qwen2", {"rope_parameters": {**YARN, "truncate": False}}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}}),
    ("StableLm", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "use_qkv_bias": True}),
    ("Arcee", {"attention_bias": True, "mlp_bias": True}),
]
FORMATS = [("torch", 1), ("torch", 2), ("torch_grouped", 2), ("torch_dist", 1)]


@pytest.fixture(scope="module", params=range(len(MODELS)), ids=lambda i: f"{MODELS[i][0]}{i}")
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of transformers, and what the converter makes of it by itself."""
    kind, more = MODELS[request.param]
    folder = tmp_path_factory.mktemp(kind)
    torch.manual_seed(1)
    sizes = {"vocab_size": 67} if kind == "GPT2" else SIZES
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    model.save_pretrained(folder / "theirs")
    run = convert("huggingface", "pangu", folder / "theirs", folder / "ours")
    return run, convert("pangu", "huggingface", run, folder / "direct")


@pytest.mark.parametrize(("how", "ranks"), FORMATS)
def test_megatron_and_back_changes_no_bit_and_no_field(
    how: str, ranks: int, theirs: tuple[Path, Path], tmp_path: Path
) -> None:
    run, direct = theirs
    words = ["--megatron-format", how, "--tensor", str(ranks)]
    there = convert("pangu", "megatron", run, tmp_path / "megatron", *words)
    back = convert("megatron", "huggingface", there, tmp_path / "back")
    require_same_export(back, direct)
    grouped = how == "torch_grouped" and "_experts" in (direct / "config.json").read_text()
    assert (" --moe-grouped-gemm " in (there / "README.md").read_text()) == grouped
    for file in there.rglob("*.pt"):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None


def test_transformers_ours_megatron_ours_transformers(theirs: tuple[Path, Path], tmp_path: Path) -> None:
    """The same bits of every weight, and logits bit for bit of a model that leaves as the type that it came as."""
    run, direct = theirs
    there = convert("pangu", "megatron", run, tmp_path / "megatron")
    again = convert("megatron", "pangu", there, tmp_path / "again")
    require_equal(logical(again), logical(run))
    back = convert("pangu", "huggingface", again, tmp_path / "back")
    ids = torch.arange(24)[None] * 7 % 67
    first, last = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (direct.parent / "theirs", back)
    )
    assert first.config.model_type == last.config.model_type
    require_equal(last.state_dict(), first.state_dict())
    with torch.no_grad():
        assert torch.equal(first(ids).logits, last(ids).logits)


def moe_weights(experts: int = 3) -> dict[str, Tensor]:
    """Random weights with our names, of a Llama with experts in all layers."""
    noise = torch.Generator().manual_seed(9)
    made = {name: tensor for name, tensor in foreign.weights(True).items() if ".mlp." not in name}
    for layer in range(foreign.LAYERS):
        made[f"layers.{layer}.mlp.router.weight"] = torch.randn(experts, foreign.HIDDEN, generator=noise)
        for expert in range(experts):
            name = f"layers.{layer}.mlp.experts.{expert}."
            made[f"{name}gate.weight"] = torch.randn(24, foreign.HIDDEN, generator=noise)
            made[f"{name}up.weight"] = torch.randn(24, foreign.HIDDEN, generator=noise)
            made[f"{name}down.weight"] = torch.randn(foreign.HIDDEN, 24, generator=noise)
    return made


def moe_tensors(made: dict[str, Tensor], layout: str, experts: int = 3) -> dict[str, Tensor]:
    """Megatron's names; `layout` is one of sequential, grouped, legacy and (for torch_dist) dist and singleton."""
    dense = {name.replace("mlp.experts.0.", "mlp."): tensor for name, tensor in made.items() if "experts.0." in name}
    plain = {name: tensor for name, tensor in made.items() if ".mlp." not in name}
    theirs = foreign.whole_tensors(plain | dense, True)
    theirs = {name: tensor for name, tensor in theirs.items() if "mlp.linear_fc" not in name or "layer_norm" in name}
    for layer in range(foreign.LAYERS):
        at, ours = f"decoder.layers.{layer}.", f"layers.{layer}.mlp."
        theirs[f"{at}pre_mlp_layernorm.weight"] = theirs.pop(f"{at}mlp.linear_fc1.layer_norm_weight")
        theirs[f"{at}mlp.router.weight"] = made[f"{ours}router.weight"]
        pairs = [[made[f"{ours}experts.{e}.{half}.weight"] for half in ("gate", "up")] for e in range(experts)]
        first = [torch.cat(pair) for pair in pairs]
        second = [made[f"{ours}experts.{e}.down.weight"] for e in range(experts)]
        at += "mlp.experts."
        if layout == "legacy":
            theirs[f"{at}weight1"] = torch.stack([m.t() for m in first]).reshape(foreign.HIDDEN, -1)
            theirs[f"{at}weight2"] = torch.cat([m.t() for m in second])
        elif layout == "dist":
            theirs[f"{at}experts.linear_fc1.weight"] = torch.stack(first)
            theirs[f"{at}experts.linear_fc2.weight"] = torch.stack(second)
        for e in range(experts if layout not in ("legacy", "dist") else 0):
            if layout == "singleton":
                theirs[f"{at}experts.{e}.linear_fc1.weight_w"], theirs[f"{at}experts.{e}.linear_fc1.weight_v"] = pairs[
                    e
                ]
                theirs[f"{at}experts.{e}.linear_fc2.weight"] = second[e]
            elif layout == "grouped":
                theirs[f"{at}linear_fc1.weight{e}"], theirs[f"{at}linear_fc2.weight{e}"] = first[e], second[e]
            else:
                theirs[f"{at}local_experts.{e}.linear_fc1.weight"] = first[e]
                theirs[f"{at}local_experts.{e}.linear_fc2.weight"] = second[e]
    return theirs


MOE = foreign.LLAMA | {"num_experts": 3, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_layer_freq": 1}


def write_moe(folder: Path, layout: str, **options: Any) -> dict[str, Tensor]:
    made = moe_weights()
    tensors = moe_tensors(made, layout)
    if layout in ("dist", "singleton"):
        tensors = foreign.stacked(tensors) if layout == "dist" else tensors
        foreign.write_dist(folder, tensors, MOE | options)
    else:
        file = folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt"
        file.parent.mkdir(parents=True)
        torch.save({"args": argparse.Namespace(**(MOE | options)), "model": tensors}, file)
        (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return made


@pytest.mark.parametrize("layout", ["sequential", "grouped", "legacy", "dist", "singleton"])
def test_experts_are_found_in_every_layout(layout: str, tmp_path: Path) -> None:
    made = write_moe(tmp_path / "in", layout)
    require_equal(logical(convert("megatron", "pangu", tmp_path / "in", tmp_path / "out")), made)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("moe_router_score_function", "sqrtsoftplus"),
        ("moe_router_topk_scaling_factor", -2.5),
        ("moe_router_group_topk", 2),
        ("moe_shared_expert_intermediate_size", 64),
        ("moe_layer_freq", [0, 1, 0, 1]),
        ("moe_ffn_hidden_size", 48),
        ("moe_router_enable_expert_bias", True),
        ("moe_my_own", 1),
        ("num_experts", 4),
        ("num_experts", None),
        ("expert_model_parallel_size", 2),
    ],
)
def test_options_of_experts_that_change_the_function_are_refused(
    option: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_moe(tmp_path / "in", "sequential", **{option: value})
    assert refused(tmp_path, capsys).count(f"{option} = ") == 1


def test_routers_of_any_score_and_scale_are_read(tmp_path: Path) -> None:
    options = {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 2.5}
    options |= {"moe_router_num_groups": 1, "moe_router_group_topk": 1}
    write_moe(tmp_path / "in", "sequential", **options)
    run = convert("megatron", "pangu", tmp_path / "in", tmp_path / "out")
    router = build(RunConfig, yaml.safe_load((run / "config.yaml").read_text())).model.router
    assert (router.score, router.normalised, router.scale) == ("sigmoid", True, 2.5)
    assert (router.selection, router.groups, router.groups_per_token) == ("top", 1, None)


def refused(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    words = ["--from", "megatron", "--to", "pangu", "--input", str(folder / "in"), "--output", str(folder / "out")]
    assert main([*words, *more]) == 2
    assert not (folder / "out").exists()
    return capsys.readouterr().err


def without_options(folder: Path, whole: dict[str, Tensor]) -> None:
    """A file as other programs than Megatron write it."""
    file = folder / "in" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"model": whole}, file)


def test_what_tensors_do_not_tell_is_asked_for_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong rope base moved logits by 0.32; the number of key heads follows from that of heads."""
    made = foreign.weights(True)
    without_options(tmp_path, foreign.whole_tensors(made, True))
    said = refused(tmp_path, capsys)
    for key in ("heads", "rope_base", "rope_scaling", "partial_rotary_factor", "norm_eps", "sequence"):
        assert f"model.{key} = (missing)" in said
    given = ["model.heads=4", "model.rope_base=500", "model.norm_eps=1e-6", "model.sequence=12"]
    given += ["model.rope_scaling=null", "model.partial_rotary_factor=1"]
    require_equal(logical(convert("megatron", "pangu", tmp_path / "in", tmp_path / "out", *given)), made)


def test_rows_that_may_be_padding_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron pads the vocabulary to a multiple of 128: padded rows became words that took part in the softmax."""
    made = foreign.weights(True)
    whole = foreign.whole_tensors(made, True)
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        whole[name] = torch.cat([whole[name], torch.ones(128 - len(whole[name]), whole[name].shape[1])])
    without_options(tmp_path, whole)
    given = ["model.heads=4", "model.rope_base=500", "model.norm_eps=1e-6", "model.sequence=12"]
    given += ["model.rope_scaling=null", "model.partial_rotary_factor=1"]
    assert "model.vocab = (missing)" in refused(tmp_path, capsys, *given)
    given.append("model.vocab=64")
    require_equal(logical(convert("megatron", "pangu", tmp_path / "in", tmp_path / "out", *given)), made)


def test_the_activation_of_an_ungated_layer_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_options(tmp_path, foreign.whole_tensors(foreign.weights(False), False))
    said = refused(tmp_path, capsys)
    assert "model.activation = (missing)" in said
    assert "model.sequence" not in said


def test_how_experts_are_chosen_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_options(tmp_path, moe_tensors(moe_weights(), "sequential"))
    said = refused(tmp_path, capsys)
    for key in ("experts_per_token", "router.normalised"):
        assert f"model.{key} = (missing)" in said


def test_a_tied_copy_in_the_last_stage_must_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign.write_ranks(tmp_path / "in", foreign.whole_tensors(foreign.weights(False), False), False, 1, 2, 1)
    file = tmp_path / "in" / "iter_0000007" / "mp_rank_00_001" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"]["output_layer.weight"] = state["model"]["output_layer.weight"] + 1
    torch.save(state, file)
    assert "output_layer.weight differs from embedding.word_embeddings.weight" in refused(tmp_path, capsys)


def test_a_tensor_that_all_ranks_have_must_be_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign.write_ranks(tmp_path / "in", foreign.whole_tensors(foreign.weights(True), True), True, 2, 1, 1)
    file = tmp_path / "in" / "iter_0000007" / "mp_rank_01" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(state, file)
    assert "decoder.final_layernorm.weight: differs between" in refused(tmp_path, capsys)


@pytest.mark.parametrize("ranks", [1, 2])
def test_checksums_of_the_port_are_right(ranks: int, tmp_path: Path) -> None:
    """Room for tensors was left in the file and filled later, which the zip's checksums did not know."""
    foreign_checkpoints.write_huggingface(tmp_path / "in", weights(), 8)
    out = convert("huggingface", "megatron", tmp_path / "in", tmp_path / "out", HEADS_GIVEN, "--tensor", str(ranks))
    files = sorted(out.rglob("*.pt"))
    assert len(files) == ranks
    for file in files:
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
        assert torch.load(file, weights_only=False, mmap=True)["model"]
