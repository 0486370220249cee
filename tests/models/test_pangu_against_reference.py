"""PanGu-α equals a plain reference written from the report's facts, which shares no code with it."""

from __future__ import annotations

import gc
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from pangu.config.data import PackingConfig
from pangu.config.model import ModelConfig
from pangu.data.batch import make_batch
from pangu.models.language_model import Options, build_model
from tests.memory import LiveBytes
from tests.models.helpers import TINY, logical_gradients, logical_weights, make, variant
from tests.references.pangu_reference import pangu_loss, pangu_shapes
from tests.weights import whole_logits, whole_loss

EOD, PAD = 9, 6


def samples() -> torch.Tensor:
    """Two rows of random ids with three document ends, one of them at the last input, and some padding."""
    tokens = torch.randint(10, TINY.vocab, (2, TINY.sequence + 1), generator=torch.Generator().manual_seed(1))
    tokens[0, [4, 11, TINY.sequence - 1]] = EOD
    tokens[1, 17:21] = PAD
    tokens[1, 0] = EOD
    return tokens


CASES = list(
    itertools.product(
        ["gelu_tanh", "gelu"],
        ["before_query", "after_query"],
        [(False, False), (True, False), (True, True)],
        ["reference", "sdpa"],
    )
)


@pytest.mark.parametrize(("activation", "final_norm", "resets", "kernel"), CASES)
def test_loss_and_every_gradient(activation: str, final_norm: str, resets: tuple[bool, bool], kernel: str) -> None:
    """1e-11: a chain of three layers of sums of at most 128 products in fp64 (1.1e-16 each), times the conditioning."""
    mask, positions = resets
    model, table = make(variant(activation=activation, final_norm=final_norm), kernel)
    weights = {name: weight.requires_grad_() for name, weight in logical_weights(model, table).items()}
    assert {name: tuple(w.shape) for name, w in weights.items()} == pangu_shapes(
        TINY.layers, TINY.hidden, TINY.vocab, TINY.sequence
    )
    rows = samples()
    packing = PackingConfig(eod=EOD, pad=PAD, reset_mask=mask, reset_positions=positions)
    batch = make_batch(rows.numpy(), range(2), packing)
    loss = whole_loss(model, batch) / batch.weights.sum()
    expected = pangu_loss(
        weights,
        rows[:, :-1],
        rows[:, 1:],
        heads=TINY.heads,
        activation=activation,
        eod=EOD,
        pad=PAD,
        reset_mask=mask,
        reset_positions=positions,
        final_norm=final_norm,
    )
    torch.testing.assert_close(loss, expected, atol=1e-11, rtol=1e-11)
    loss.backward()
    expected.backward()
    gradients = logical_gradients(model, table)
    assert len(gradients) == 16 * TINY.layers + 5
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, weights[name].grad, atol=1e-11, rtol=1e-11, msg=name)


def test_the_number_of_heads_matters() -> None:
    """32 or 40 heads have the same shapes; the wrong number must not pass unnoticed here."""
    model, _ = make()
    other, _ = make(variant(heads=8))
    other.load_state_dict(model.state_dict())
    tokens = samples()[:, :-1]
    positions = torch.arange(TINY.sequence).expand_as(tokens)
    difference = whole_logits(model, tokens, positions) - whole_logits(other, tokens, positions)
    assert difference.abs().max() > 1e-3


PARTS = ("attention", "activation", "norm")
LLAMA = {"norm": "rmsnorm", "activation": "swiglu", "positions": "rope", "kv_heads": 2}


@pytest.mark.parametrize(
    "options",
    [
        *(Options(recompute=layers) for layers in (None, 1, 2)),
        *(Options(recompute_parts=(part,)) for part in PARTS),
        Options(recompute=1, recompute_parts=PARTS),
        Options(offload=True),
        Options(recompute=None, offload=True),
        Options(recompute=1, recompute_parts=PARTS, offload=True),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "changes", [{"kind": "pangu"}, {"kind": "gpt"}, {"norm_placement": "post"}, {"kind": "gpt", **LLAMA}], ids=str
)
def test_recompute_and_offload_change_nothing_with_dropout(changes: dict[str, Any], options: Options) -> None:
    """Bit for bit: backward computes the same numbers again, dropout masks included, or gets them back."""
    from pangu.layers.dropout import DropoutKeys

    config = variant(**changes, dropout=0.2, attention_dropout=0.2)
    packing = PackingConfig(eod=EOD, pad=PAD, reset_mask=True, reset_positions=True)
    batch = make_batch(samples().numpy(), range(2), packing)
    for kernel in ("reference", "sdpa"):
        kept, table = make(config, kernel)
        again, _ = build_model(config, replace(options, kernel=kernel))
        again.load_state_dict(kept.state_dict(), assign=True)
        keys = DropoutKeys(seed=1, step=2, samples=batch.samples)
        losses = []
        for model in (kept, again):
            for parameter in model.parameters():
                parameter.requires_grad_()
                parameter.grad = None
            loss = whole_loss(model, batch, keys)
            loss.backward()
            losses.append((loss, logical_gradients(model, table)))
        assert losses[0][0] != whole_loss(kept, batch)  # dropout did something
        assert torch.equal(losses[0][0], losses[1][0])
        assert all(torch.equal(losses[0][1][name], losses[1][1][name]) for name in losses[0][1])


def kept_bytes(config: ModelConfig = TINY, after_backward: bool = False, **options: Any) -> int:
    """What a forward pass leaves behind for backward, or what both leave behind."""
    batch = make_batch(samples().numpy(), range(2), PackingConfig(None, None, False, False))
    kept, _ = make(config)
    model, _ = build_model(config, Options(**options))
    model.load_state_dict(kept.state_dict(), assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_()
    with LiveBytes(*model.parameters()) as live:
        loss = whole_loss(model, batch)
        if after_backward:
            loss.backward()
        gc.collect()
        assert loss.requires_grad
        return live.bytes


def test_recompute_keeps_fewer_activations() -> None:
    """Selective recompute keeps exactly the part's own tensors less; whole layers keep less still."""
    none, one, two, full = (kept_bytes(recompute=layers) for layers in (0, 1, 2, None))
    assert none > one > two > full
    rows = 2 * TINY.sequence
    # the output of the non-linearity, fp64
    assert none - kept_bytes(recompute_parts=("activation",)) == TINY.layers * 8 * rows * TINY.ffn_size
    # the probabilities
    probabilities = 8 * rows * TINY.sequence * TINY.heads
    assert none - kept_bytes(recompute_parts=("attention",)) == TINY.layers * probabilities
    # two outputs of norms; in post-norm one of them is the layer's own output
    norm = TINY.layers * 8 * rows * TINY.hidden
    assert none - kept_bytes(recompute_parts=("norm",)) == 2 * norm
    post = variant(norm_placement="post")
    assert kept_bytes(post) - kept_bytes(post, recompute_parts=("norm",)) == norm


@pytest.mark.parametrize("options", [{}, {"recompute": None}, {"recompute_parts": PARTS}], ids=str)
def test_offload_empties_every_layer_but_the_last(options: dict[str, Any]) -> None:
    """Where the host is the device, its copies take the place of what the device gave back: no layer exists twice, the
    last one neither, which is not copied."""
    for config in (gpt := variant(kind="gpt"), replace(gpt, layers=5)):
        assert kept_bytes(config, offload=True, **options) == kept_bytes(config, **options)
    assert kept_bytes(after_backward=True, offload=True, **options) == kept_bytes(after_backward=True, **options)
