"""PanGu-α's forward pass and loss in the plainest words, to compare the real model with.

Written from the description of the architecture; it shares no code with the package under test and uses no torch layer,
so that a mistake there cannot hide here. One process, no dropout, the number format of the weights throughout. Slow.

Weights are named `embedding.word.weight` [vocab, hidden], `embedding.position.weight` [sequence, hidden],
`query_embedding.weight` [sequence, hidden], `layers.I.*` and `final_norm.*`; see `pangu_shapes`. Layers 0 .. L-2 are
blocks and layer L-1 is the query layer. Matrices are [out, in].
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

MASKED = -10000.0


def pangu_shapes(
    layers: int, hidden: int, vocab: int, sequence: int, ffn: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight. `layers` counts the query layer; `ffn` is 4 x `hidden` if left out."""
    ffn = 4 * hidden if ffn is None else ffn
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word.weight": (vocab, hidden),
        "embedding.position.weight": (sequence, hidden),
        "query_embedding.weight": (sequence, hidden),
    }
    for i in range(layers):
        shapes[f"layers.{i}.attention_norm.weight"] = (hidden,)
        shapes[f"layers.{i}.attention_norm.bias"] = (hidden,)
        for part in ("query", "key", "value", "output"):
            shapes[f"layers.{i}.attention.{part}.weight"] = (hidden, hidden)
            shapes[f"layers.{i}.attention.{part}.bias"] = (hidden,)
        shapes[f"layers.{i}.mlp_norm.weight"] = (hidden,)
        shapes[f"layers.{i}.mlp_norm.bias"] = (hidden,)
        shapes[f"layers.{i}.mlp.up.weight"] = (ffn, hidden)
        shapes[f"layers.{i}.mlp.up.bias"] = (ffn,)
        shapes[f"layers.{i}.mlp.down.weight"] = (hidden, ffn)
        shapes[f"layers.{i}.mlp.down.bias"] = (hidden,)
    shapes["final_norm.weight"] = (hidden,)
    shapes["final_norm.bias"] = (hidden,)
    return shapes


def random_weights(
    shapes: dict[str, tuple[int, ...]], seed: int = 0, std: float = 0.3, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Normal weights; norms are 1 + normal. All of them, biases too, are far from 0, so that none can be forgotten."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = std * torch.randn(shape, generator=generator, dtype=torch.float64)
        weights[name] = (noise + 1 if name.endswith("norm.weight") else noise).to(dtype)
    return weights


def pangu_forward(
    weights: dict[str, Tensor],
    tokens: Tensor,
    *,
    heads: int,
    norm_eps: float = 1e-5,
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh",
    eod: int | None = None,
    reset_mask: bool = True,
    reset_positions: bool = True,
    final_norm: Literal["before_query", "after_query"] = "before_query",
) -> Tensor:
    """Logits [batch, sequence, vocab] of `tokens` [batch, sequence].

    Where `eod` is not None, a token after it does not attend to it or to anything before it (`reset_mask`), and the
    position ids begin again at 0 after it (`reset_positions`).
    """
    return torch.stack(
        [
            _forward_one(
                weights,
                row,
                heads=heads,
                norm_eps=norm_eps,
                activation=activation,
                mask=attention_mask(row, eod if reset_mask else None),
                positions=position_ids(row, eod if reset_positions else None),
                final_norm=final_norm,
            )
            for row in tokens
        ]
    )


def pangu_loss(
    weights: dict[str, Tensor],
    tokens: Tensor,
    labels: Tensor,
    *,
    heads: int,
    norm_eps: float = 1e-5,
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh",
    eod: int | None = None,
    pad: int | None = None,
    reset_mask: bool = True,
    reset_positions: bool = True,
    final_norm: Literal["before_query", "after_query"] = "before_query",
) -> Tensor:
    """Scalar: sum of w x nll over sum of w in the whole batch, where w is 0 if the *input* token is `pad`, else 1.

    `tokens` and `labels` are [batch, sequence]; the label of a position is the token after it.
    """
    logits = pangu_forward(
        weights,
        tokens,
        heads=heads,
        norm_eps=norm_eps,
        activation=activation,
        eod=eod,
        reset_mask=reset_mask,
        reset_positions=reset_positions,
        final_norm=final_norm,
    )
    total = torch.zeros((), dtype=logits.dtype)
    count = 0
    for b in range(tokens.shape[0]):
        for t in range(tokens.shape[1]):
            if pad is not None and int(tokens[b, t]) == pad:
                continue
            probabilities = softmax(logits[b, t])
            total = total - torch.log(probabilities[labels[b, t]])
            count += 1
    return total / count


def attention_mask(row: Tensor, eod: int | None) -> Tensor:
    """[sequence, sequence], True where the query position (row) may look at the key position (column)."""
    length = len(row)
    allowed = torch.zeros(length, length, dtype=torch.bool)
    for query in range(length):
        for key in range(query + 1):
            ends_between = any(int(row[i]) == eod for i in range(key, query))
            allowed[query, key] = not ends_between
    return allowed


def position_ids(row: Tensor, eod: int | None) -> Tensor:
    """[sequence]: 0, 1, 2, ..., beginning again after every `eod`."""
    positions = []
    position = 0
    for token in row.tolist():
        positions.append(position)
        position = 0 if token == eod else position + 1
    return torch.tensor(positions)


def _forward_one(
    weights: dict[str, Tensor],
    row: Tensor,
    *,
    heads: int,
    norm_eps: float,
    activation: str,
    mask: Tensor,
    positions: Tensor,
    final_norm: str,
) -> Tensor:
    """Logits [sequence, vocab] of one sequence."""
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("layers."))
    word = weights["embedding.word.weight"]

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(x, weights[f"{name}.weight"], weights[f"{name}.bias"], norm_eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def feed_forward(x: Tensor, i: int) -> Tensor:
        inner = linear(norm(x, f"layers.{i}.mlp_norm"), f"layers.{i}.mlp.up")
        return linear(gelu(inner, activation), f"layers.{i}.mlp.down")

    def attend(query_from: Tensor, key_value_from: Tensor, i: int) -> Tensor:
        query = linear(query_from, f"layers.{i}.attention.query")
        key = linear(key_value_from, f"layers.{i}.attention.key")
        value = linear(key_value_from, f"layers.{i}.attention.value")
        merged = attention(query, key, value, mask, heads)
        return linear(merged, f"layers.{i}.attention.output")

    x = word[row] + weights["embedding.position.weight"][positions]
    for i in range(layers - 1):
        a = norm(x, f"layers.{i}.attention_norm")
        x = x + attend(a, a, i)
        x = x + feed_forward(x, i)

    if final_norm == "before_query":
        x = norm(x, "final_norm")
    i = layers - 1
    # The query comes from the position alone and is not normed; keys, values and the residual come from the blocks.
    p = weights["query_embedding.weight"][positions]
    a = norm(x, f"layers.{i}.attention_norm")
    x = x + attend(p, a, i)
    x = x + feed_forward(x, i)
    if final_norm == "after_query":
        x = norm(x, "final_norm")
    return x @ word.T


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, heads: int) -> Tensor:
    """Scaled dot-product attention [sequence, hidden], one head after the other; heads are contiguous column slices."""
    size = query.shape[1] // heads
    outputs = []
    for head in range(heads):
        columns = slice(head * size, (head + 1) * size)
        q, k, v = query[:, columns], key[:, columns], value[:, columns]
        scores = q @ k.T / math.sqrt(size)
        scores = scores + (1 - mask.to(scores.dtype)) * MASKED
        outputs.append(softmax(scores) @ v)
    return torch.cat(outputs, dim=1)


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension."""
    shifted = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return shifted / shifted.sum(dim=-1, keepdim=True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Over the last dimension, with the biased variance."""
    mean = x.sum(dim=-1, keepdim=True) / x.shape[-1]
    centred = x - mean
    variance = (centred * centred).sum(dim=-1, keepdim=True) / x.shape[-1]
    return centred / torch.sqrt(variance + eps) * weight + bias


def gelu(x: Tensor, activation: str) -> Tensor:
    """x Phi(x), by the error function (`gelu`) or by its tanh approximation (`gelu_tanh`)."""
    if activation == "gelu":
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
    assert activation == "gelu_tanh", activation
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
