"""Exports have the names that programs which serve models look for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from pangu.interop.formats.huggingface import table
from pangu.interop.formats.huggingface_config import write_model
from tests.configs import config


@pytest.mark.parametrize(
    ("preset", "architecture"),
    [
        ("gpt2_124m", "GPT2"),
        ("llama3_8b", "LLAMA"),
        ("openpangu_1b", "LLAMA"),
        ("qwen3_8b", "QWEN3"),
        ("pangu_ultra_135b", "GLM4"),
        ("qwen3_30b_a3b", "QWEN3MOE"),
        ("mixtral_8x7b", "LLAMA"),
        ("deepseek_v3_671b", "DEEPSEEK2"),
        ("gpt_oss_20b", "GPT_OSS"),
    ],
)
def test_llama_cpp_has_a_place_for_every_tensor(preset: str, architecture: str) -> None:
    gguf = pytest.importorskip("gguf")
    model = replace(config(f"+config={preset}").model, layers=4)
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], model.layers)
    # its converter gives DeepSeek's vector a point
    names = [stored.name.replace("correction_bias", "correction.bias") for stored in table(model, 1)]
    missing = [name for name in names if places.get_name(name, (".weight", ".bias")) is None]
    # its converter stacks experts, and takes gates and biases of gpt-oss's stacks apart
    own = r"\.experts\.(\d+\.|gate_up_proj|down_proj_bias)"
    assert [name for name in missing if not re.search(own, name)] == []
    assert bool(missing) == bool(model.experts)


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("gpt2_124m", {"n_ctx": 1024}),  # llama.cpp's converter stops without it
        ("deepseek_v3_671b", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}),
    ],
)
def test_fields_that_transformers_knows_by_itself_are_written(preset: str, fields: dict[str, Any]) -> None:
    """vLLM scores experts by softmax, without the biases that choose them, where the fields of DeepSeek-V3 lack."""
    assert fields.items() <= write_model(config(f"+config={preset}").model).items()


def test_gpt_neox_has_its_own_names_of_rotation() -> None:
    """Readers that know no other names rotate a quarter of each head, by default."""
    changes = {"positions": "rope", "partial_rotary_factor": 0.5, "rope_base": 5e4, "parallel_block": True}
    model = replace(config("+config=gpt2_124m").model, **changes, activation="gelu", tied_head=False)
    written = write_model(model)
    assert (written["model_type"], written["rotary_pct"], written["rotary_emb_base"]) == ("gpt_neox", 0.5, 5e4)
