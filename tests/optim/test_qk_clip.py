"""QK-clip bounds attention logits by the threshold, by weights of the published parts only (arXiv 2507.20534, 2.1)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pangu.layers import largest_logits
from pangu.layers.kernels import QKV, MaskAndBias, Reference
from pangu.layers.largest_logits import LayerLogits
from pangu.topology.layout import Layout
from pangu.training.step import Trainer
from pangu.zero.flat_parameter import Shard
from tests.parallel.harness import small_trainer

MODELS = {
    "heads": ("model.kv_heads=null",),
    "groups": ("model.kv_heads=2", "model.kind=gpt", "model.positions=rope"),
    "window": ("model.window=3", "model.kind=gpt"),
    "sparse": ("model.sparse={kind:strided,block:1,local_blocks:3,stride:4}",),
    "latent": (
        *("model.kind=gpt", "model.positions=rope"),
        "model.latent={kv_rank:16,q_rank:32,nope_head_dim:16,rope_head_dim:8,value_head_dim:16}",
    ),
    "one_text": ("data.packing.eod=null", "data.packing.reset_mask=false", "data.packing.reset_positions=false"),
}
WORDS = ("model.dropout=0", "model.attention_dropout=0", "model.attention=reference", "model.heads=4", "model.layers=3")
STILL = "optimizer.lr=1e-30"
"""Updates that change nothing, so that only QK-clip does."""


def clipping(threshold: float, *words: str) -> tuple[Trainer, Callable[[], Tensor]]:
    """A trainer, and what makes a step of always the same tokens and returns the largest logits of each head."""
    rest = ("optimizer=muon", "precision=fp64", f"optimizer.qk_clip={threshold}", "lr_schedule=constant", STILL)
    trainer, batches = small_trainer(Layout(), *WORDS, *rest, *words)

    def step() -> Tensor:
        trainer.train_step(batches)
        assert trainer.logits is not None
        return trainer.logits.values.clone()

    return trainer, step


def moved(shards: Iterable[Shard], before: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors that are others than before, by more than such an update."""
    return {s.placement.name for s in shards if not torch.allclose(s.main, before[s.placement.name], 1e-12, 1e-20)}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Largest scores [heads] of the pairs that the mask allows, of each call of the reference kernel."""
    found: list[Tensor] = []
    init, call = Reference.__init__, Reference.__call__

    def begin(self: Any, terms: MaskAndBias) -> None:
        init(self, terms)
        self.mask = terms.dense_mask()

    def attend(self: Any, qkv: QKV, *rest: Any) -> Any:
        output, scores = call(self, qkv, *rest)
        assert scores is not None
        found.append(scores.detach().masked_fill(~self.mask, -math.inf).amax((0, 2, 3)))
        return output, scores

    monkeypatch.setattr(Reference, "__init__", begin)
    monkeypatch.setattr(Reference, "__call__", attend)
    return found


@pytest.mark.parametrize("most", [1, 1 << 26])
@pytest.mark.parametrize("model", MODELS)
def test_the_largest_logits_are_those_of_the_kernel(
    model: str, most: int, seen: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all micro-batches, however few scores exist at a time."""
    monkeypatch.setattr(largest_logits, "MOST_SCORES", most)
    _, step = clipping(1e9, *MODELS[model])
    found = step()
    expected = torch.stack([torch.stack(seen[layer :: len(found)]).amax(0) for layer in range(len(found))])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("model", MODELS)
def test_logits_above_the_threshold_become_the_threshold(model: str) -> None:
    """Those of the first layer, whose input stays: the largest of the heads that share a key; others stay."""
    _, step = clipping(1e9, *MODELS[model])
    before = step()[0]
    groups = before.view(2 if model == "groups" else 4, -1)
    threshold = float(groups.amax(1).median())
    trainer, step = clipping(threshold, *MODELS[model])
    values = trainer.parameters.trained_shards
    first = {one.placement.name: one.main.clone() for one in values}
    assert torch.equal(step()[0], before)
    after, factors = step()[0], (threshold / groups.amax(1, keepdim=True)).clamp(max=1)
    assert 0 < int((factors < 1).sum()) < len(factors)
    torch.testing.assert_close(after, (groups * factors).flatten(), rtol=1e-12, atol=0)
    assert {name.split(".")[-2] for name in moved(values, first)} == {"query", "key"}


@pytest.mark.parametrize("model", ["heads", "groups", "latent"])
def test_the_update_is_followed_by_equal_factors_of_queries_and_keys(model: str) -> None:
    """√γ of each head, and γ of the 8 of 24 rows of a latent query that rotate; other weights are plain Muon's."""
    words = (*MODELS[model], "optimizer.lr=0.01")
    plain, step = clipping(1e9, *words)
    largest = step()
    groups = largest.view(3, 2 if model == "groups" else 4, -1).amax(-1)
    threshold = float(groups[0].median())
    clipped, step = clipping(threshold, *words)
    step()
    gamma = (threshold / groups).clamp(max=1)
    updated = {one.placement.name: one.main for one in plain.parameters.trained_shards}
    for shard in clipped.parameters.trained_shards:
        name, factors = shard.placement.name, torch.ones(shard.placement.shape[0], dtype=torch.float64)
        if kind := re.fullmatch(r"layers\.(\d)\.attention\.(query|key)\.\w+", name):
            of_layer = gamma[int(kind[1])]
            of_heads = of_layer.repeat_interleave(4 // len(of_layer)) if kind[2] == "query" else of_layer
            by_head = factors.view(len(of_heads), -1)
            by_head.copy_(of_heads.sqrt()[:, None].expand_as(by_head))
            if (model, kind[2]) == ("latent", "query"):
                by_head[:, 16:] = of_heads[:, None]
        expected = updated[name].view(len(factors), -1) * factors[:, None]
        torch.testing.assert_close(shard.main, expected.flatten(), rtol=1e-12, atol=1e-15, msg=name)


def test_a_skipped_step_clips_nothing() -> None:
    """The gradients of a loss scale of 1e30 overflow."""
    words = ("optimizer=muon", "optimizer.qk_clip=1e-6", "precision=fp16", "precision.loss_scale.initial=1e30")
    trainer, batches = small_trainer(Layout(), *WORDS, *words)
    before = [flat.main.clone() for flat in trainer.parameters.trained]
    result = trainer.train_step(batches)
    assert result.skipped
    assert result.max_attention_logit is not None
    assert all(torch.equal(flat.main, old) for flat, old in zip(trainer.parameters.trained, before, strict=True))


def test_frozen_weights_are_not_scaled() -> None:
    trainer, step = clipping(1e-6, "train.frozen=[layers.0.attention.*]")
    before = {one.placement.name: one.main.clone() for one in trainer.parameters.shards}
    step()
    assert {name.split(".")[1] for name in moved(trainer.parameters.shards, before)} == {"1", "2"}


def test_a_recompute_and_an_evaluation_note_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = 0

    def note(self: LayerLogits, *_: object) -> None:
        nonlocal noted
        noted += 1

    monkeypatch.setattr(LayerLogits, "raise_to", note)
    trainer, batches = small_trainer(
        Layout(), *WORDS, "optimizer=muon", "optimizer.qk_clip=1", "memory.recompute=full", "memory.selective=[]"
    )
    trainer.train_step(batches)
    assert noted == 3 * len(batches)
    with torch.no_grad():
        trainer.model(next(iter(trainer.stages.of(0).values())), None, batches[0])
    assert noted == 3 * len(batches)
