"""PanGu-α equals a plain reference written from the report's facts, which shares no code with it."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pangu.config.data import PackingConfig
from pangu.data.batch import make_batch
from pangu.layers.masks import AttentionMask
from pangu.models.language_model import Options, build_model
from tests.models.helpers import TINY, logical_gradients, logical_weights, make, variant
from tests.references.pangu_reference import pangu_loss, pangu_shapes

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
    loss = model.loss(batch) / batch.weights.sum()
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
    difference = model.logits(tokens, positions, AttentionMask(None)) - other.logits(
        tokens, positions, AttentionMask(None)
    )
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("recompute", "parts"),
    [(None, ()), (1, ()), (2, ()), (0, ("attention",)), (0, ("activation",)), (1, ("attention", "activation"))],
)
@pytest.mark.parametrize("kind", ["pangu", "gpt"])
def test_recompute_changes_nothing_with_dropout(kind: str, recompute: int | None, parts: tuple[str, ...]) -> None:
    """Bit for bit: backward computes the same numbers again, dropout masks included."""
    from pangu.layers.dropout import DropoutKeys

    config = variant(kind=kind, dropout=0.2, attention_dropout=0.2)
    packing = PackingConfig(eod=EOD, pad=PAD, reset_mask=True, reset_positions=True)
    batch = make_batch(samples().numpy(), range(2), packing)
    for kernel in ("reference", "sdpa"):
        kept, table = make(config, kernel)
        again, _ = build_model(config, Options(kernel, recompute, parts))
        again.load_state_dict(kept.state_dict(), assign=True)
        keys = DropoutKeys(seed=1, step=2, samples=batch.samples)
        losses = []
        for model in (kept, again):
            for parameter in model.parameters():
                parameter.requires_grad_()
                parameter.grad = None
            loss = model.loss(batch, keys)
            loss.backward()
            losses.append((loss, logical_gradients(model, table)))
        assert losses[0][0] != kept.loss(batch)  # dropout did something
        assert torch.equal(losses[0][0], losses[1][0])
        assert all(torch.equal(losses[0][1][name], losses[1][1][name]) for name in losses[0][1])


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that were made within the block and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.bytes += storage.nbytes()
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return result

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.bytes -= size


def kept_bytes(*options: Any) -> int:
    """What a forward pass leaves behind for backward."""
    batch = make_batch(samples().numpy(), range(2), PackingConfig(None, None, False, False))
    kept, _ = make()
    model, _ = build_model(TINY, Options("reference", *options))
    model.load_state_dict(kept.state_dict(), assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_()
    with LiveBytes() as live:
        loss = model.loss(batch)
        gc.collect()
        assert loss.requires_grad
        return live.bytes


def test_recompute_keeps_fewer_activations() -> None:
    """Selective recompute keeps exactly the part's own tensors less; whole layers keep less still."""
    none, one, two, full = (kept_bytes(layers) for layers in (0, 1, 2, None))
    assert none > one > two > full
    rows = 2 * TINY.sequence
    # the output of the non-linearity, fp64
    assert none - kept_bytes(0, ("activation",)) == TINY.layers * 8 * rows * TINY.ffn_size
    # the probabilities; what is computed again needs the mask that all layers share
    probabilities, mask = 8 * rows * TINY.sequence * TINY.heads, 8 * TINY.sequence**2
    assert none - kept_bytes(0, ("attention",)) == TINY.layers * probabilities - mask
