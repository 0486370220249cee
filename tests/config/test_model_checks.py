"""Contradictions between the keys of experts, one message each."""

from __future__ import annotations

import pytest

from tests.config.test_checks import problems

CONTRADICTIONS = {
    "model.experts_per_token=2 model.router.scale=2": (
        "model.experts_per_token = 2: needs a model with experts, but model.experts = null; set model.experts\n"
        "  model.router.scale = 2.0: needs a model with experts"
    ),
    "model.experts=8 model.experts_per_token=9": (
        "model.experts_per_token = 9: must not exceed model.experts = 8; use 1 to 8"
    ),
    "model.experts=1": ("model.experts_per_token = null: means 2, and must not exceed model.experts = 1; use 1"),
    "model.experts=9007199254740992 model.router.groups=3": (
        "model.experts = 9007199254740992: with model.layers = 4 exceeds 131,072 experts in all; use at most 32768"
    ),
    "model.experts=8 parallel.expert_tensor=2": (
        "parallel.expert_tensor = 2: must be 1 or parallel.tensor = 1; use null or 1"
    ),
    "model.experts=8 model.dense_layers=3": (
        "model.dense_layers, model.expert_every = 3, 1: leave none of the model.layers = 4 layers for experts; use 0, 1"
    ),
    "model.experts=8 model.router.groups=4": "model.router.groups = 4: needs model.router.selection != top, got top",
    "model.experts=8 model.router.selection=each_group model.router.groups=3": (
        "model.router.groups = 3: must divide model.experts = 8; nearest valid values: 1, 2, 4"
    ),
    "model.experts=8 model.router.selection=each_group model.router.groups=4": (
        "model.experts_per_token = null: must be a multiple of model.router.groups = 4: each group contributes "
        "equally; nearest valid values: 4"
    ),
    "model.experts=8 model.router.selection=group_limited model.router.groups=4": (
        "model.router.groups_per_token = null: model.router.selection = group_limited needs a number; use 1 to 4"
    ),
    "model.experts=8 model.router.groups_per_token=1": (
        "model.router.groups_per_token = 1: model.router.selection = top needs null"
    ),
    (
        "model.experts=8 model.router.selection=group_limited model.router.groups=4 model.router.groups_per_token=1 "
        "model.experts_per_token=3"
    ): (
        "model.router.groups_per_token = 1: must be at most model.router.groups = 4, and that many groups of 2 experts "
        "must hold model.experts_per_token = 3; use 4"
    ),
    "model.experts=8 model.router.balance=bias model.router.bias_rate=0": (
        "model.router.bias_rate = 0: has no effect with model.router.balance = bias; use e.g. 0.001"
    ),
    "model.experts=8 model.router.balance=global model.router.balance_sequences=2": (
        "model.router.balance_sequences = 2: needs model.router.balance = sequence, got global; use 1, or "
    ),
    "model.experts=8 model.router.balance_sequences=3 batch.micro_size=4": (
        "model.router.balance_sequences = 3: must divide batch.micro_size = 4, which are computed together; nearest "
        "valid values: 1, 2, 4; or set batch.micro_size to a multiple of 3"
    ),
    "model.experts=8 model.router.balance_sequences=3 batch.micro_size=2 parallel.expert=4 parallel.data=4": (
        "model.router.balance_sequences = 3: must divide batch.micro_size = 2 x 4 data-parallel ranks that share "
        "experts = 8, which are computed together"
    ),
    "model.experts=8 precision=fp8 model.shared_experts=1 model.expert_ffn=24": (
        "precision.matmul = fp8: needs multiples of 16: the shared experts' width = 24; set precision=bf16"
    ),
    "model.experts=8 parallel.tensor=4 model.expert_ffn=6": (
        "parallel.tensor = 4: must divide an expert's width 6; nearest valid values: 1, 2"
    ),
    "parallel.expert=2": "parallel.expert = 2: needs model.experts != null, got null; use 1, or set",
    "parallel.expert_tensor=1": ("parallel.expert_tensor = 1: needs model.experts != null, got null; use null, or set"),
    "parallel.fixed_exchange=true": (
        "parallel.fixed_exchange = true: needs model.experts != null, got null; use false, or set"
    ),
    "model.experts=8 parallel.two_batch_overlap=true": (
        "parallel.two_batch_overlap = true: needs parallel.expert > 1, got 1: no tokens are sent; use false, or a"
    ),
    "model.experts=8 parallel.expert=2 parallel.data=2 parallel.two_batch_overlap=true batch.micro_size=1": (
        "parallel.two_batch_overlap = true: needs batch.micro_size > 1, got 1: it splits micro-batches"
    ),
    "model.experts=8 parallel.expert=2 parallel.data=2 parallel.two_batch_overlap=true model.norm_placement=post": (
        "parallel.two_batch_overlap = true: needs model.norm_placement != post, got post"
    ),
    "model.experts=8 parallel.expert=2 parallel.data=2 parallel.two_batch_overlap=true compile=true": (
        "parallel.two_batch_overlap = true: needs compile = false, got true"
    ),
    (
        "model.experts=8 parallel.expert=2 parallel.data=4 parallel.two_batch_overlap=true batch.micro_size=4 "
        "model.router.balance_sequences=4"
    ): (
        "model.router.balance_sequences = 4: must divide half of batch.micro_size = 4, which are computed together; "
        "nearest valid values: 1, 2; or set batch.micro_size to a multiple of 8"
    ),
    (
        "model.experts=8 parallel.expert=2 parallel.data=2 parallel.two_batch_overlap=true batch.micro_size=2 "
        "precision=fp8 model.sequence=24"
    ): "precision.matmul = fp8: needs multiples of 16: half of batch.micro_size x model.sequence = 24",
    "model.experts=6 parallel.expert=4 parallel.data=4 batch.global_size=4 batch.micro_size=1": (
        "parallel.expert = 4: must divide model.experts = 6 and 4 replicas; nearest valid values: 1, 2"
    ),
    (
        "model.experts=8 parallel.expert=8 parallel.expert_tensor=1 parallel.tensor=2 parallel.data=2 "
        "batch.global_size=4 batch.micro_size=1"
    ): "must divide model.experts = 8 and 2 replicas x parallel.tensor = 2 ranks; nearest valid values: 1, 2, 4",
    "model.experts=6 parallel.expert=6 parallel.data=2 parallel.context=2 batch.micro_size=1": (
        "parallel.expert = 6: must divide model.experts = 6 and 4 replicas; nearest valid values: 1, 2"
    ),
    "model.experts=8 parallel.tensor=4 parallel.expert_tensor=2 model.heads=4 batch.micro_size=1": (
        "parallel.expert_tensor = 2: must be 1 or parallel.tensor = 4; use null, 1 or 4"
    ),
}
"""Command line -> what is said of it on four processes."""


@pytest.mark.parametrize("words", CONTRADICTIONS)
def test_a_contradiction_is_told(words: str) -> None:
    assert CONTRADICTIONS[words] in problems(*words.split(), world=4)


def test_a_model_without_dense_layers_needs_no_width_of_them() -> None:
    words = ("model.kind=gpt", "model.experts=8", "model.expert_ffn=8", "model.ffn=7", "parallel.tensor=4")
    assert "feed-forward" not in problems(*words, world=4)
    assert "must divide the feed-forward width 7" in problems(*words, "model.dense_layers=1", world=4)


def test_groups_of_zero_and_of_experts_hold_each_other() -> None:
    words = ("model.experts=4", "parallel.expert=4", "parallel.zero=1", "parallel.zero_group=6", "batch.global_size=12")
    found = problems(*words, "batch.micro_size=1", world=12)
    rule = "must be made of complete groups of parallel.expert = 4 ranks, or divide one group evenly"
    assert f"parallel.zero_group = 6: {rule}; use 4 or null" in found
