"""DeepSeek-V3 and its kin through Megatron-Core's files and back: latent attention, biased routers, shared experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pangu.config.build import build
from pangu.config.schema import RunConfig
from tests.interop.test_formats import convert, logical, require_equal, require_same_export
from tests.interop.test_formats_transformers import (
    DEEPSEEK,
    GLM_MOE,
    RELATIVE,
    YARN,
    our_logits,
    random_vectors,
    tokens,
)
from tests.references import megatron_latent
from tools.convert_checkpoint import main

transformers = pytest.importorskip("transformers")

EVEN = DEEPSEEK | {"num_hidden_layers": 3, "num_experts_per_tok": 4, "n_routed_experts": 6, "topk_group": 2}
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("DeepseekV3", EVEN | {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("DeepseekV3", EVEN | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}),
    ("DeepseekV2", EVEN | {"rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}}),
    ("DeepseekV2", EVEN | {"topk_method": "group_limited_greedy", "topk_group": 3, "num_experts_per_tok": 3}),
    ("DeepseekV3", EVEN | {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.5}}),
    (
        "Glm4Moe",
        GLM_MOE
        | {"num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "use_qk_norm": True},
    ),
]


@pytest.fixture(scope="module", params=range(len(MODELS)), ids=lambda i: f"{MODELS[i][0]}{i}")
def theirs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of transformers, and what the converter makes of it by itself."""
    kind, more = MODELS[request.param]
    folder = tmp_path_factory.mktemp(kind)
    kind_of_config = getattr(transformers, f"{kind}Config")
    known = {*kind_of_config().to_dict(), *kind_of_config.attribute_map}
    config = kind_of_config(**{key: value for key, value in RELATIVE.items() if key in known} | more)
    random_vectors(getattr(transformers, f"{kind}ForCausalLM"), config).save_pretrained(folder / "theirs")
    run = convert("huggingface", "pangu", folder / "theirs", folder / "ours")
    return run, convert("pangu", "huggingface", run, folder / "direct")


@pytest.mark.parametrize(("how", "ranks"), [("torch", 2), ("torch_grouped", 1), ("torch_dist", 1)])
def test_megatron_and_back_changes_no_bit_and_no_field(
    how: str, ranks: int, theirs: tuple[Path, Path], tmp_path: Path
) -> None:
    run, direct = theirs
    words = ["--megatron-format", how, "--tensor", str(ranks)]
    there = convert("pangu", "megatron", run, tmp_path / "megatron", *words)
    again = convert("megatron", "pangu", there, tmp_path / "again")
    require_equal(logical(again), logical(run))
    back = convert("pangu", "huggingface", again, tmp_path / "back")
    require_same_export(back, direct)


@pytest.mark.parametrize("theirs", range(5), indirect=True)
def test_logits_of_the_files_are_ours(theirs: tuple[Path, Path], tmp_path: Path) -> None:
    """From the tensors and options that we write, by Megatron-Core's formulas in fp64; 1e-5: ours are fp32."""
    run, _ = theirs
    file = convert("pangu", "megatron", run, tmp_path / "megatron") / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    ids = tokens(67, 24)
    for row, expected in zip(ids, our_logits(run, ids), strict=True):
        found = megatron_latent.logits(state["model"], state["args"], row)[:, :67]
        torch.testing.assert_close(found.float(), expected, atol=1e-5, rtol=0)


def saved(folder: Path) -> Any:
    """A small DeepSeek-V3 in Megatron's file of one rank; return its content."""
    run = folder / "ours"
    config = transformers.DeepseekV3Config(**RELATIVE | EVEN)
    random_vectors(transformers.DeepseekV3ForCausalLM, config).save_pretrained(folder / "theirs")
    convert("huggingface", "pangu", folder / "theirs", run)
    convert("pangu", "megatron", run, folder / "in")
    return torch.load(folder / "in" / "release" / "mp_rank_00" / "model_optim_rng.pt", weights_only=False)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("kv_lora_rank", 12, "does not match the tensors; use 10"),
        ("qk_layernorm", False, "does not match the tensors; use true"),
        ("rotary_scaling_factor", 0.5, "must be at least 1"),
        ("mscale", -1.0, "must be at least 0"),
        ("rotary_percent", 0.5, "is not supported with rope_type = rope; use 1.0"),
        ("moe_router_group_topk", 1, "is not supported with moe_router_topk = 4"),
        ("moe_router_num_groups", None, "needs moe_router_num_groups"),
        ("moe_shared_expert_intermediate_size", 20, "does not match the tensors; use 40"),
        ("moe_router_enable_expert_bias", False, "does not match the tensors; use true"),
    ],
)
def test_options_that_contradict_the_tensors_are_refused(
    option: str, value: object, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = saved(tmp_path)
    setattr(state["args"], option, value)
    torch.save(state, tmp_path / "in" / "release" / "mp_rank_00" / "model_optim_rng.pt")
    words = ["--from", "megatron", "--to", "pangu", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "model_optim_rng.pt:" in message
    assert option in message
    assert said in message


@pytest.mark.parametrize("keeps", [True, False])
def test_older_files_and_files_without_options(keeps: bool, tmp_path: Path) -> None:
    """Ranks that share the first matrices; without options, the shapes of heads follow from their number."""
    state = saved(tmp_path)
    halves: list[dict[str, torch.Tensor]] = [{}, {}]
    rows = ("_down_proj.weight", "_up_proj.weight", "embeddings.weight", "output_layer.weight")
    for name, tensor in state["model"].items():
        gated, columns = "linear_fc1.weight" in name, "linear_proj.weight" in name or "linear_fc2.weight" in name
        for rank, half in enumerate(halves):
            half[name] = tensor.chunk(2)[rank] if name.endswith(rows) else tensor
            if columns:
                half[name] = tensor.chunk(2, 1)[rank]
            if gated:
                half[name] = torch.cat([part.chunk(2)[rank] for part in tensor.chunk(2)])
    state["args"].tensor_model_parallel_size = state["args"].expert_tensor_parallel_size = 2
    state["args"].model_parallel_size = 2
    for rank, half in enumerate(halves):
        (tmp_path / "older" / f"mp_rank_{rank:02d}").mkdir(parents=True)
        content = {**state, "model": half} if keeps else {"model": half}
        torch.save(content, tmp_path / "older" / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    given = ["heads=4", "vocab=67", "rope_base=10000", "rope_scaling=null", "norm_eps=1e-6", "sequence=24"]
    given += ["experts_per_token=4", "router.score=sigmoid", "router.normalised=true", "router.scale=2.5"]
    given += ["router.selection=group_limited", "router.groups=3", "router.groups_per_token=2"]
    more = [] if keeps else [f"model.{key}" for key in given]
    run = convert("megatron", "pangu", tmp_path / "older", tmp_path / "again", *more)
    require_equal(logical(run), logical(tmp_path / "ours"))
    files = [folder / "config.yaml" for folder in (run, tmp_path / "ours")]
    models = [build(RunConfig, yaml.safe_load(file.read_text())).model for file in files]
    assert models[0].latent == models[1].latent
    assert models[0].router == models[1].router
