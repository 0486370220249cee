"""Contradictions between the layout, the model, the batch and the number of processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pangu.common.errors import ConfigError
from pangu.config.checks import check
from pangu.config.suggest import divisors_near, multiples_near
from tests.config.test_checks import problems
from tests.configs import config

CONTRADICTIONS = {
    "parallel.virtual_stages=0": "parallel.virtual_stages = 0: must be at least 1",
    "parallel.pipeline=2 parallel.virtual_stages=9": (
        "parallel.pipeline x parallel.virtual_stages = 18: each chunk needs"
    ),
    "parallel.pipeline=2 parallel.virtual_stages=2 parallel.schedule=interleaved memory.offload=[activations]": (
        "memory.offload = [activations]: the last layer of a chunk is not offloaded, and no chunk of model.layers = 4 "
        "has two; use [], or a smaller parallel.pipeline x parallel.virtual_stages"
    ),
    "parallel.zero_group=2": "parallel.zero_group = 2: needs parallel.zero > 0, got 0: ZeRO 0 shards nothing; use null",
    "parallel.context=0": "parallel.context = 0: must be at least 1",
    "parallel.context_kind=ring": "parallel.context_kind = ring: needs parallel.context > 1, got 1; use auto",
    "parallel.context=3 model.sequence=64": (
        "parallel.context = 3: 2 x parallel.context must divide model.sequence = 64; nearest valid values: 1, 2, 4"
    ),
    "parallel.context=4 parallel.tensor=8 parallel.sequence=true model.sequence=16": (
        "parallel.context = 4: parallel.context x parallel.tensor must divide model.sequence = 16; nearest valid "
        "values: 1, 2"
    ),
    "parallel.context=16 parallel.context_kind=ulysses": (
        "parallel.context_kind = ulysses: parallel.context = 16 must divide the 8 heads of a tensor-parallel "
        "rank; use gather or ring"
    ),
    "parallel.context=2 parallel.context_kind=ring model.attention=flex": (
        "model.attention = flex: with parallel.context_kind = ring needs one of reference, sdpa, flash, triton; use "
        "auto, or set parallel.context_kind=ulysses"
    ),
    "parallel.context=2 parallel.context_kind=ring model.attention=flash model.window=8": (
        "model.attention = flash: does not support a window with parallel.context_kind = ring; set "
        "parallel.context_kind=gather"
    ),
    "parallel.context_ulysses=2": "parallel.context_ulysses = 2: needs parallel.context_kind = ring, got auto; use 1",
    "parallel.context=4 parallel.context_ulysses=2": (
        "parallel.context_ulysses = 2: needs parallel.context_kind = ring, got auto; use 1, or set"
    ),
    "parallel.context=4 parallel.context_kind=ring parallel.context_ulysses=4": (
        "parallel.context_ulysses = 4: must be below parallel.context = 4 and divide it and the 8 heads of a "
        "tensor-parallel rank; nearest valid values: 1, 2"
    ),
    "parallel.context=2 parallel.zero=1 parallel.zero_group=3 parallel.data=2": (
        "must divide the data-parallel size 2 x parallel.context = 4; nearest valid values: 1, 2, 4"
    ),
    "parallel.zero=1 parallel.zero_group=3 parallel.data=4": "must divide the data-parallel size 4",
    "parallel.timeout_s=0": "parallel.timeout_s = 0.0: must be above 0",
}
"""Command line -> what is said of it on four processes."""


@pytest.mark.parametrize(
    ("recipe", "needed"), [("pangu_2_6b", 8), ("pangu_13b", 8), ("pangu_200b", 128), ("gpt3_175b", 96)]
)
def test_too_few_devices(recipe: str, needed: int) -> None:
    text = problems(f"+config={recipe}", "data.train=[a]", "data.validation=[b]")
    assert text.startswith("1 problem")
    assert f"needs at least {needed} processes, one per device, got 1" in text
    assert "dry_run=true" in text
    assert "+config=quickstart" in text
    few = problems("+config=pangu_2_6b", "data.train=[a]", "data.validation=[b]", "parallel.data=3", world=16)
    assert "needs 24 processes, one per device, got 16; set parallel.data=2 or start 24 processes" in few


def test_devices_that_do_not_fit_the_layout() -> None:
    base = ["+config=pangu_13b", "data.train=[a]", "data.validation=[b]"]
    assert "needs a multiple of 8 processes, got 12; start 8 or 16 processes" in problems(*base, world=12)
    assert "needs 16 processes, got 24; set parallel.data=3 or start 16 processes" in problems(
        *base, "parallel.data=2", world=24
    )
    assert (
        "parallel.tensor = 3: must divide model.heads = 40 and the feed-forward width 20480; nearest valid values: 1, "
        "2, 4" in problems(*base, "parallel.tensor=3", world=3)
    )


def test_tensor_parallel_ranks_divide_the_key_heads_or_are_divided_by_them() -> None:
    for tensor in (1, 2, 4):
        assert check(config("model.kv_heads=2", f"parallel.tensor={tensor}"), tensor) == 1
    twelve = ("model.heads=12", "model.hidden=96", "model.kv_heads=4", "model.ffn=384")
    text = problems(*twelve, "parallel.tensor=6", world=6)
    assert text.startswith("1 problem")
    rule = "must divide model.kv_heads = 4, or be a multiple of it that cuts model.head_dim evenly"
    assert f"parallel.tensor = 6: {rule}; nearest valid values: 1, 2, 4" in text
    assert check(config(*twelve, "parallel.tensor=4"), 4) == 1
    # three ranks would share a head of 8 elements
    text = problems(*twelve, "parallel.tensor=12", world=12)
    assert f"parallel.tensor = 12: {rule}; nearest valid values: 1, 2, 4" in text


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_contradiction_is_told(words: str) -> None:
    assert CONTRADICTIONS[words] in problems(*words.split(), world=4)


def test_data_size_is_what_remains() -> None:
    assert check(config("parallel.data=null", "batch.micro_size=4"), 4) == 4
    assert check(config("parallel.data=2"), 2) == 2


@given(st.integers(1, 5000), st.integers(1, 200))
def test_suggestions_work(number: int, near: int) -> None:
    assert all(number % divisor == 0 for divisor in divisors_near(number, near))
    assert all(multiple % near == 0 and multiple > 0 for multiple in multiples_near(near, number))
    assert divisors_near(number, near)
    assert multiples_near(near, number)


def test_fp8_looks_at_each_ranks_share() -> None:
    """A share of 24 of 48 query rows is none that a kernel takes; in fp64, where products are emulated, any is."""
    words = ("model.hidden=48", "model.heads=4", "model.ffn=96", "parallel.tensor=2", "precision.matmul=fp8")
    assert "the queries' width on each of parallel.tensor = 2 ranks = 24; set precision=bf16" in problems(
        *words, "precision=bf16", world=2
    )
    assert problems(*words, "precision=fp64", world=2) == str(ConfigError([]))
    assert problems("precision=fp8") == str(ConfigError([]))


def test_no_block_of_fp8_lies_on_two_ranks() -> None:
    """In fp64 too, and of each of keys and values, and of both chunks of a sequence that a rank has."""
    words = (
        "model.hidden=256",
        "model.heads=4",
        "model.ffn=256",
        "model.sequence=256",
        "precision.matmul=fp8_blockwise",
    )
    assert problems(*words, "parallel.tensor=2", "precision=fp64", world=2) == str(ConfigError([]))
    assert "the keys' and values' width on each of parallel.tensor = 4 ranks = 64" in problems(
        *words, "parallel.tensor=4", "precision=fp64", world=4
    )
    assert "needs multiples of 128: model.sequence / (2 x parallel.context = 2) = 64; set precision=bf16" in problems(
        *words, "parallel.context=2", world=2
    )
