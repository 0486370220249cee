"""Contradictions between the keys of experts, one message each."""

from __future__ import annotations

import pytest

from tests.config.test_checks import problems

EXPERTS = "model.experts=8"
UPCYCLED = (EXPERTS, "checkpoint.upcycle=true", "checkpoint.init_from=a")
LIMITED = ("model.router.selection=group_limited", "model.router.groups=4")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["model.experts_per_token=2", "model.router.scale=2"],
            "model.experts_per_token = 2: model.experts = null: all layers are dense; give model.experts, or leave it "
            "out\n  model.router.scale = 2.0: model.experts = null",
        ),
        (
            [EXPERTS, "model.experts_per_token=9"],
            "model.experts_per_token = 9: must not be above model.experts = 8; 1 to 8 work",
        ),
        (
            [EXPERTS, "model.dense_layers=3"],
            "model.dense_layers, model.expert_every = 3, 1: leave no layer of model.layers = 4 for experts; 0, 1 work",
        ),
        ([EXPERTS, "model.router.groups=4"], "model.router.groups = 4: model.router.selection = top knows no groups"),
        (
            [EXPERTS, "model.router.selection=each_group", "model.router.groups=3"],
            "model.router.groups = 3: must divide model.experts = 8; nearest that work: 1, 2, 4",
        ),
        (
            [EXPERTS, "model.router.selection=each_group", "model.router.groups=4"],
            "model.experts_per_token = null: must be a multiple of model.router.groups = 4, each of which gives as "
            "many; nearest that work: 4",
        ),
        (
            ["checkpoint.upcycle=true"],
            "checkpoint.upcycle = true: makes experts of a dense model's layers, and checkpoint.init_from names none; "
            "checkpoint.init_from=CHECKPOINT works, or false\n  checkpoint.upcycle = true: model.experts = null",
        ),
        (
            [*UPCYCLED, "model.router.normalised=false", "model.router.scale=2.5"],
            "model.router.normalised = false: with checkpoint.upcycle = true the weights of a token's experts must add "
            "up to 1; true works\n  model.router.scale = 2.5: with checkpoint.upcycle = true",
        ),
        (
            [*UPCYCLED, "model.shared_experts=1", "model.expert_ffn=64"],
            "model.shared_experts = 1: with checkpoint.upcycle = true they would add to what the copies compute; 0 "
            "works\n  model.expert_ffn = 64: with checkpoint.upcycle = true an expert is a copy of a dense layer of "
            "512 columns; null works",
        ),
        ([EXPERTS, *LIMITED], "model.router.groups_per_token = null: model.router.selection = group_limited needs one"),
        (
            [EXPERTS, "model.router.groups_per_token=1"],
            "model.router.groups_per_token = 1: model.router.selection = top knows no limit; null works",
        ),
        (
            [EXPERTS, *LIMITED, "model.router.groups_per_token=1", "model.experts_per_token=3"],
            "model.router.groups_per_token = 1: must be at most model.router.groups = 4, and so many groups of 2 must "
            "hold model.experts_per_token = 3; 4 works",
        ),
        (
            [EXPERTS, "model.router.balance=bias", "model.router.bias_rate=0"],
            "model.router.bias_rate = 0: model.router.balance = bias would change nothing; 0.001 is usual",
        ),
        (
            [EXPERTS, "precision=fp8"],
            "precision.matmul = fp8: model.experts = 8, whose products are not done in fp8; precision=bf16 works",
        ),
        (
            [EXPERTS, "parallel.tensor=4", "model.expert_ffn=6"],
            "parallel.tensor = 4: must divide an expert's width 6; nearest that work: 1, 2",
        ),
    ],
    ids=str,
)
def test_a_contradiction_is_told(overrides: list[str], expected: str) -> None:
    assert expected in problems(*overrides, world=4)


def test_a_model_without_dense_layers_needs_no_width_of_them() -> None:
    words = ("model.kind=gpt", EXPERTS, "model.expert_ffn=8", "model.ffn=7", "parallel.tensor=4")
    assert "feed-forward" not in problems(*words, world=4)
    assert "must divide the feed-forward width 7" in problems(*words, "model.dense_layers=1", world=4)
