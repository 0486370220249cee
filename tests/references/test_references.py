"""The references must be right on their own before anything is compared with them."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from .lamb_reference import AdamWReference, LambReference
from .pangu_reference import attention_mask, pangu_forward, pangu_loss, pangu_shapes, position_ids, random_weights

Weights = dict[str, Tensor]
Activation = Literal["gelu_tanh", "gelu"]
FinalNorm = Literal["before_query", "after_query"]

LAYERS, HIDDEN, HEADS, VOCAB, SEQUENCE, EOD, PAD = 3, 8, 2, 11, 7, 9, 6
SHAPES = pangu_shapes(LAYERS, HIDDEN, VOCAB, SEQUENCE)


@pytest.fixture
def weights() -> Weights:
    return random_weights(SHAPES)


@pytest.fixture
def tokens() -> Tensor:
    # Documents of 3 and 4 tokens in the first row; none ends in the second.
    return torch.tensor([[1, 2, EOD, 3, 4, 5, 1], [0, 1, PAD, 2, 3, 7, 8]])


@pytest.mark.parametrize(
    ("layers", "hidden", "published"),
    [(24, 1024, 345_368_576), (32, 2560, 2_625_295_360), (40, 5120, 12_800_870_400), (64, 16384, 206_861_008_896)],
)
def test_number_of_weights_follows_the_formula(layers: int, hidden: int, published: int) -> None:
    shapes = pangu_shapes(layers, hidden, vocab=40000, sequence=1024)
    counted = sum(math.prod(shape) for shape in shapes.values())
    formula = 40000 * hidden + 2 * 1024 * hidden + layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    assert counted == formula == published
    assert len(shapes) == 16 * layers + 5


@pytest.mark.parametrize("final_norm", ["before_query", "after_query"])
def test_a_token_changes_no_earlier_logits_and_all_later_ones(
    weights: Weights, tokens: Tensor, final_norm: FinalNorm
) -> None:
    before = pangu_forward(weights, tokens, heads=HEADS, final_norm=final_norm)
    changed = tokens.clone()
    changed[:, 4] = 10
    after = pangu_forward(weights, changed, heads=HEADS, final_norm=final_norm)
    assert torch.equal(before[:, :4], after[:, :4])
    assert ((before[:, 4:] - after[:, 4:]).abs().amax(dim=-1) > 1e-6).all()


def test_documents_give_the_logits_that_each_gives_alone(weights: Weights, tokens: Tensor) -> None:
    together = pangu_forward(weights, tokens[:1], heads=HEADS, eod=EOD)
    first = pangu_forward(weights, tokens[:1, :3], heads=HEADS)
    second = pangu_forward(weights, tokens[:1, 3:], heads=HEADS)
    torch.testing.assert_close(together, torch.cat([first, second], dim=1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("reset_mask", "reset_positions"), [(True, False), (False, True)])
def test_both_resets_are_needed_for_that(
    weights: Weights, tokens: Tensor, reset_mask: bool, reset_positions: bool
) -> None:
    both = pangu_forward(weights, tokens[:1], heads=HEADS, eod=EOD)
    one = pangu_forward(
        weights, tokens[:1], heads=HEADS, eod=EOD, reset_mask=reset_mask, reset_positions=reset_positions
    )
    assert torch.equal(both[:, :3], one[:, :3])
    assert ((both[:, 3:] - one[:, 3:]).abs().amax(dim=-1) > 1e-6).all()


def test_mask_and_positions_by_hand() -> None:
    row = torch.tensor([1, EOD, 2, 3, EOD])
    expected = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]])
    assert torch.equal(attention_mask(row, EOD), expected.bool())
    assert position_ids(row, EOD).tolist() == [0, 1, 0, 1, 2]
    assert torch.equal(attention_mask(row, None), torch.ones(5, 5).tril().bool())
    assert position_ids(row, None).tolist() == [0, 1, 2, 3, 4]


def test_loss_leaves_out_positions_whose_input_is_padding(weights: Weights, tokens: Tensor) -> None:
    labels = tokens.roll(-1, dims=1)
    loss = pangu_loss(weights, tokens, labels, heads=HEADS, pad=PAD)
    logits = pangu_forward(weights, tokens, heads=HEADS)
    keep = tokens.flatten() != PAD
    assert int((~keep).sum()) == 1
    expected = F.cross_entropy(logits.flatten(0, 1)[keep], labels.flatten()[keep])
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert abs(float(loss - pangu_loss(weights, tokens, labels, heads=HEADS))) > 1e-4


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize("final_norm", ["before_query", "after_query"])
def test_forward_equals_the_same_model_made_of_torch_operators(
    weights: Weights, tokens: Tensor, activation: Activation, final_norm: FinalNorm
) -> None:
    """A second writing of the model, with torch's fused operators in place of the formulas."""

    def block(i: int, x: Tensor, query_from: Tensor | None) -> Tensor:
        w = {name.removeprefix(f"layers.{i}."): value for name, value in weights.items()}

        def heads_of(y: Tensor, part: str) -> Tensor:
            projected = F.linear(y, w[f"attention.{part}.weight"], w[f"attention.{part}.bias"])
            return projected.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        a = F.layer_norm(x, (HIDDEN,), w["attention_norm.weight"], w["attention_norm.bias"], eps=1e-5)
        q = heads_of(a if query_from is None else query_from, "query")
        out = F.scaled_dot_product_attention(q, heads_of(a, "key"), heads_of(a, "value"), is_causal=True)
        out = out.transpose(1, 2).flatten(-2)
        x = x + F.linear(out, w["attention.output.weight"], w["attention.output.bias"])
        m = F.layer_norm(x, (HIDDEN,), w["mlp_norm.weight"], w["mlp_norm.bias"], eps=1e-5)
        m = F.linear(m, w["mlp.up.weight"], w["mlp.up.bias"])
        m = F.gelu(m, approximate="tanh" if activation == "gelu_tanh" else "none")
        return x + F.linear(m, w["mlp.down.weight"], w["mlp.down.bias"])

    def last_norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (HIDDEN,), weights["final_norm.weight"], weights["final_norm.bias"], eps=1e-5)

    x = F.embedding(tokens, weights["embedding.word.weight"]) + weights["embedding.position.weight"]
    for i in range(LAYERS - 1):
        x = block(i, x, None)
    positions = weights["query_embedding.weight"].expand(len(tokens), -1, -1)
    if final_norm == "before_query":
        x = block(LAYERS - 1, last_norm(x), positions)
    else:
        x = last_norm(block(LAYERS - 1, x, positions))
    expected = F.linear(x, weights["embedding.word.weight"])
    actual = pangu_forward(weights, tokens, heads=HEADS, activation=activation, final_norm=final_norm)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_gradient_of_the_loss_equals_finite_differences(weights: Weights, tokens: Tensor) -> None:
    """Central differences along a random direction of every weight: also shows that no weight is left unused."""
    labels = tokens.roll(-1, dims=1)

    def loss_at(values: dict[str, Tensor]) -> Tensor:
        return pangu_loss(values, tokens, labels, heads=HEADS, eod=EOD, pad=PAD)

    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    loss_at(leaves).backward()
    generator = torch.Generator().manual_seed(1)
    for name, leaf in leaves.items():
        grad = leaf.grad
        assert grad is not None, name
        direction = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype)
        h = 1e-5
        ahead = loss_at(weights | {name: weights[name] + h * direction})
        behind = loss_at(weights | {name: weights[name] - h * direction})
        slope = float(ahead - behind) / (2 * h)
        assert float((grad * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-8), name
        if not name.endswith("attention.key.bias"):  # the softmax over keys does not see a shift common to all keys
            assert float(grad.norm()) > 1e-4, name


def test_single_lamb_step_by_hand() -> None:
    """w = (3, 4), g = (1, -2): after bias correction m = g and v = g², so each element moves by g / sqrt(g² + eps)."""
    eps, decay, lr = 0.5, 0.1, 0.01
    start = {"w": torch.tensor([3.0, 4.0]), "bias": torch.tensor([2.0])}
    grads = {"w": torch.tensor([1.0, -2.0]), "bias": torch.tensor([3.0])}
    inside = LambReference(start, lr=lr, eps=eps, eps_inside_root=True, weight_decay=decay, excluded={"bias"})
    inside.step(grads)
    update = [1 / math.sqrt(1.5) + 0.3, -2 / math.sqrt(4.5) + 0.4]
    ratio = 5 / math.hypot(*update)
    assert inside.ratios["w"] == pytest.approx(ratio)
    assert inside.weights["w"].tolist() == pytest.approx([3 - lr * ratio * update[0], 4 - lr * ratio * update[1]])
    assert inside.weights["bias"].item() == pytest.approx(2 - lr * 3 / math.sqrt(9.5))

    outside = LambReference(start, lr=lr, eps=eps, eps_inside_root=False, weight_decay=decay, max_ratio=1.5)
    outside.step(grads)
    update = [1 / 1.5 + 0.3, -2 / 2.5 + 0.4]
    assert 5 / math.hypot(*update) > 1.5
    assert outside.weights["w"].tolist() == pytest.approx([3 - lr * 1.5 * update[0], 4 - lr * 1.5 * update[1]])


def test_second_lamb_step_by_hand() -> None:
    """One element, no decay: the ratio makes every step lr x |w| in the direction of the averaged gradient."""
    lamb = LambReference({"w": torch.tensor([2.0])}, lr=0.1, weight_decay=0.0, eps=1e-12)
    lamb.step({"w": torch.tensor([5.0])})
    assert lamb.weights["w"].item() == pytest.approx(1.8)
    # m = 0.9 x 0.5 + 0.1 x (-4.6) < 0: the second gradient just outweighs the first.
    lamb.step({"w": torch.tensor([-4.6])}, lr=0.2)
    assert lamb.weights["w"].item() == pytest.approx(1.8 * 1.2)


@pytest.mark.parametrize(("weight", "grad"), [(0.0, 1.0), (1.0, 0.0)])
def test_lamb_ratio_is_1_where_a_norm_is_0(weight: float, grad: float) -> None:
    lamb = LambReference({"w": torch.full((2,), weight)}, lr=0.1, weight_decay=0.0, eps=1e-12)
    lamb.step({"w": torch.full((2,), grad)})
    assert lamb.ratios["w"] == 1.0
    assert lamb.weights["w"].tolist() == pytest.approx([weight - 0.1 * grad] * 2)


def test_adamw_equals_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    start = {name: torch.randn(5, generator=generator, dtype=torch.float64) for name in ("w", "bias")}
    reference = AdamWReference(start, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2, excluded={"bias"})
    leaves = {name: value.clone().requires_grad_() for name, value in start.items()}
    groups = [{"params": [leaves["w"]], "weight_decay": 0.2}, {"params": [leaves["bias"]], "weight_decay": 0.0}]
    torch_adamw = torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), eps=1e-3)
    for step in range(5):
        rate = 0.1 / (step + 1)
        grads = {name: torch.randn(5, generator=generator, dtype=torch.float64) for name in start}
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        for group in torch_adamw.param_groups:
            group["lr"] = rate
        torch_adamw.step()
        reference.step(grads, lr=rate)
    for name, leaf in leaves.items():
        torch.testing.assert_close(reference.weights[name], leaf.detach(), rtol=1e-12, atol=1e-12)
