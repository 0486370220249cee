"""Contradictions between the keys of experts, one message each."""

from __future__ import annotations

import pytest

from tests.config.test_checks import problems

CONTRADICTIONS = {
    "model.experts_per_token=2 model.router.scale=2": (
        "model.experts_per_token = 2: model.experts = null: all layers are dense; give model.experts, or leave it "
        "out\n  model.router.scale = 2.0: model.experts = null"
    ),
    "model.experts=8 model.experts_per_token=9": (
        "model.experts_per_token = 9: must not be above model.experts = 8; 1 to 8 work"
    ),
    "model.experts=1": (
        "model.experts_per_token = null: stands for 2, and must not be above model.experts = 1; 1 works"
    ),
    "model.experts=8 parallel.expert_tensor=2": (
        "parallel.expert_tensor = 2: must be 1 or parallel.tensor = 1; null and 1 work"
    ),
    "model.experts=8 model.dense_layers=3": (
        "model.dense_layers, model.expert_every = 3, 1: leave no layer of model.layers = 4 for experts; 0, 1 work"
    ),
    "model.experts=8 model.router.groups=4": "model.router.groups = 4: model.router.selection = top knows no groups",
    "model.experts=8 model.router.selection=each_group model.router.groups=3": (
        "model.router.groups = 3: must divide model.experts = 8; nearest that work: 1, 2, 4"
    ),
    "model.experts=8 model.router.selection=each_group model.router.groups=4": (
        "model.experts_per_token = null: must be a multiple of model.router.groups = 4, each of which gives as many; "
        "nearest that work: 4"
    ),
    "checkpoint.upcycle=true": (
        "checkpoint.upcycle = true: makes experts of a dense model's layers, and checkpoint.init_from names none; "
        "checkpoint.init_from=CHECKPOINT works, or false\n  checkpoint.upcycle = true: model.experts = null"
    ),
    (
        "model.experts=8 checkpoint.upcycle=true checkpoint.init_from=a model.router.normalised=false "
        "model.router.scale=2.5"
    ): (
        "model.router.normalised = false: with checkpoint.upcycle = true the weights of a token's experts must add "
        "up to 1; true works\n  model.router.scale = 2.5: with checkpoint.upcycle = true"
    ),
    "model.experts=8 checkpoint.upcycle=true checkpoint.init_from=a model.shared_experts=1 model.expert_ffn=64": (
        "model.shared_experts = 1: with checkpoint.upcycle = true they would add to what the copies compute; 0 "
        "works\n  model.expert_ffn = 64: with checkpoint.upcycle = true an expert is a copy of a dense layer of 512 "
        "columns; null works"
    ),
    "model.experts=8 model.router.selection=group_limited model.router.groups=4": (
        "model.router.groups_per_token = null: model.router.selection = group_limited needs one"
    ),
    "model.experts=8 model.router.groups_per_token=1": (
        "model.router.groups_per_token = 1: model.router.selection = top knows no limit; null works"
    ),
    (
        "model.experts=8 model.router.selection=group_limited model.router.groups=4 model.router.groups_per_token=1 "
        "model.experts_per_token=3"
    ): (
        "model.router.groups_per_token = 1: must be at most model.router.groups = 4, and so many groups of 2 must "
        "hold model.experts_per_token = 3; 4 works"
    ),
    "model.experts=8 model.router.balance=bias model.router.bias_rate=0": (
        "model.router.bias_rate = 0: model.router.balance = bias would change nothing; 0.001 is usual"
    ),
    "model.experts=8 precision=fp8": (
        "precision.matmul = fp8: model.experts = 8, whose products are not done in fp8; precision=bf16 works"
    ),
    "model.experts=8 parallel.tensor=4 model.expert_ffn=6": (
        "parallel.tensor = 4: must divide an expert's width 6; nearest that work: 1, 2"
    ),
    "parallel.expert=2": "parallel.expert = 2: model.experts = null: there are none to share; 1 works, or a model",
    "parallel.expert_tensor=1": "parallel.expert_tensor = 1: model.experts = null: there are none to share; null",
    "model.experts=6 parallel.expert=4 parallel.data=4 batch.global_size=4 batch.micro_size=1": (
        "parallel.expert = 4: must divide model.experts = 6 and 4 replicas; nearest that work: 1, 2"
    ),
    (
        "model.experts=8 parallel.expert=8 parallel.expert_tensor=1 parallel.tensor=2 parallel.data=2 "
        "batch.global_size=4 batch.micro_size=1"
    ): "must divide model.experts = 8 and 2 replicas x parallel.tensor = 2 ranks; nearest that work: 1, 2, 4",
    "model.experts=6 parallel.expert=6 parallel.data=2 parallel.context=2 batch.micro_size=1": (
        "parallel.expert = 6: must divide model.experts = 6 and 4 replicas; nearest that work: 1, 2"
    ),
    "model.experts=8 parallel.tensor=4 parallel.expert_tensor=2 model.heads=4 batch.micro_size=1": (
        "parallel.expert_tensor = 2: must be 1 or parallel.tensor = 4; null, 1 and 4 work"
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
    rule = "must hold whole groups of parallel.expert = 4 ranks, or divide one"
    assert f"parallel.zero_group = 6: {rule}; 4 works, or null" in found
