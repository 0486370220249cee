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
    ],
)
def test_llama_cpp_has_a_place_for_every_tensor(preset: str, architecture: str) -> None:
    gguf = pytest.importorskip("gguf")
    model = replace(config(f"+config={preset}").model, layers=2)
    places = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], model.layers)
    names = [stored.name for stored in table(model, 1)]
    missing = [name for name in names if places.get_name(name, (".weight", ".bias")) is None]
    assert [name for name in missing if not re.search(r"\.experts\.\d+\.", name)] == []  # its converter stacks experts
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
