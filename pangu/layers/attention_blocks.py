"""Attention between some queries and some keys of a sequence, forward and backward, for context parallelism.

A block returns its output and, for each query, the logarithm of the sum of the exponentials of its scores. Blocks of
the same queries are weighted by these (`merge`; Milakov & Gimelshein 2018, section 3), and the gradient of each needs
only the total over all (Dao 2023, algorithm 2). Autograd is not involved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.dropout_masks import dropout
from pangu.layers.kernels import QKV, MaskAndBias

MOST_SCORES = 1 << 26
"""Maximum number of scores that exist at a time."""


class Tile(NamedTuple):
    """Queries and keys of a block, as positions in the sequence; if they overlap, they end together."""

    query: int
    queries: int
    key: int
    keys: int

    @property
    def is_before(self) -> bool:
        """True if all keys precede all queries."""
        return self.key + self.keys <= self.query


@dataclass(frozen=True)
class TileDropout:
    """Dropout of a block."""

    dropout: Dropout
    keys: DropoutKeys | None
    """Dropout keys with rows for the queries."""

    def rows(self, some: slice) -> TileDropout:
        """Return the dropout of a slice of the queries."""
        if self.keys is None or self.keys.rows is None:
            return self
        return replace(self, keys=replace(self.keys, rows=self.keys.rows[some]))

    def __call__(self, probabilities: Tensor, first: int) -> Tensor:
        """Drop from probabilities [batch, heads, queries, keys], whose keys start at number `first`."""
        if self.keys is None or self.dropout.probability == 0.0:
            return probabilities
        rows, key = self.dropout.rows_of(probabilities, self.keys), self.dropout.key(self.keys)
        return dropout(probabilities, None, rows, key, self.dropout.probability, first)


class Output(NamedTuple):
    """Result of attention to a block of keys."""

    output: Tensor
    """Output [batch, heads, queries, head size], as if there were no other keys; 0 for a query without any."""
    log_sum: Tensor
    """Logarithm of the sum of exponentials, [batch, heads, queries], fp32 (fp64 in fp64); -inf without keys."""
    state: Any = None
    """Further state for the backward pass."""


class Gradients(NamedTuple):
    """Gradients to which a backward pass adds, in at least fp32."""

    of: QKV
    bias: Tensor | None = None
    """Gradient [distances, heads] of `Bias.by_distance`."""


class Scores(NamedTuple):
    """Attention scores [batch, heads, queries, keys] between layers (`model.residual_scores`)."""

    below: Tensor | None = None
    """Scores of the layer below, to be added."""
    above: Tensor | None = None
    """Destination of the scores in the forward pass; in the backward pass, their gradient, to be added to."""


class Blocks(Protocol):
    """Block attention, created per micro-batch and called by every layer."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Prepare for `terms` of the full sequence."""

    def forward(self, part: QKV, block: Tile, drops: TileDropout, scores: Scores) -> Output:
        """Return the attention of a part's queries to one block of keys."""

    def backward(
        self, grad: Tensor, part: QKV, block: Tile, drops: TileDropout, scores: Scores, full: Output, into: Gradients
    ) -> None:
        """Add the gradients of a block to `into`, from `grad`, `output` and `log_sum` over all keys and its `state`."""


def merge(one: Output, other: Output) -> Output:
    """Combine the results of the same queries with two blocks of keys; with the first, each query has some key."""
    log_sum = torch.logaddexp(one.log_sum, other.log_sum)
    shares = ((part.log_sum - log_sum).exp().unsqueeze(-1) for part in (one, other))
    return Output(sum(part.output * share for part, share in zip((one, other), shares, strict=True)), log_sum)  # type: ignore[arg-type]


def with_sinks(log_sum: Tensor, sinks: Tensor | None) -> Tensor:
    """Return log sums [batch, heads, queries] with the sinks of the heads, if there are any."""
    return log_sum if sinks is None else torch.logaddexp(log_sum, sinks.to(log_sum.dtype)[:, None])


def grouped(x: Tensor, heads: int) -> Tensor:
    """Return [batch, heads, queries of all heads that share a key head, size]."""
    return x.unflatten(1, (heads, -1)).flatten(2, 3)


class ExplicitBlocks:
    """Blocks with explicit scores of some queries at a time, and a softmax in fp32 (fp64 in fp64)."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Prepare for `terms` of the full sequence."""
        self.terms = terms
        self.wide = torch.promote_types(terms.dtype, torch.float32)

    def forward(self, part: QKV, block: Tile, drops: TileDropout, scores: Scores) -> Output:
        """Attend to a block of keys; see `Blocks`."""
        outputs, log_sums = [], []
        for rows, tile in self._tiles(part, block):
            logits = self._logits(part, rows, tile, scores, passes_on=True)
            log_sum = logits.logsumexp(-1)
            # all are -inf for a query that sees nothing
            shares = (logits - log_sum.clamp(min=torch.finfo(log_sum.dtype).min).unsqueeze(-1)).exp()
            shares = drops.rows(rows)(shares.to(part.query.dtype), block.key)
            heads = part.value.shape[1]
            outputs.append((grouped(shares, heads) @ part.value).view(*shares.shape[:-1], -1))
            log_sums.append(log_sum)
        return Output(torch.cat(outputs, 2), torch.cat(log_sums, 2))

    def backward(
        self, grad: Tensor, part: QKV, block: Tile, drops: TileDropout, scores: Scores, full: Output, into: Gradients
    ) -> None:
        """Add the gradients of a block; see `Blocks`."""
        dtype, heads, scale = part.query.dtype, part.key.shape[1], 1.0 / math.sqrt(part.query.shape[-1])
        # mean of the gradients of each query's probabilities
        means = (grad.to(self.wide) * full.output.to(self.wide)).sum(-1, keepdim=True)
        for rows, tile in self._tiles(part, block):
            logits = self._logits(part, rows, tile, scores)
            shares = (logits - full.log_sum[:, :, rows, None]).exp()
            drop, grad_rows = drops.rows(rows), grouped(grad[:, :, rows], heads)
            dropped = grouped(drop(shares.to(dtype), block.key), heads)
            into.of.value.add_(dropped.transpose(-2, -1) @ grad_rows)
            grad_shares = drop((grad_rows @ part.value.transpose(-2, -1)).view(shares.shape), block.key)
            grad_logits = shares.mul_(grad_shares.to(self.wide) - means[:, :, rows])
            if into.bias is not None:
                pair_grads = grad_logits.sum(0).permute(1, 2, 0).flatten(0, 1).to(into.bias.dtype)
                into.bias.index_add_(0, _distances(tile, pair_grads.device).flatten(), pair_grads)
            if scores.above is not None:
                grad_logits = scores.above[:, :, rows].add_(grad_logits)
            grad_scores = grouped(grad_logits.to(dtype), heads)
            grad_queries = (grad_scores @ part.key).view(*shares.shape[:-1], -1)
            into.of.query[:, :, rows].add_(grad_queries, alpha=scale)
            queries = grouped(part.query[:, :, rows], heads)
            into.of.key.add_(grad_scores.transpose(-2, -1) @ queries, alpha=scale)

    def _tiles(self, part: QKV, block: Tile) -> Iterator[tuple[slice, Tile]]:
        batch, heads = part.query.shape[:2]
        size = max(1, MOST_SCORES // (batch * heads * block.keys))
        for start in range(0, block.queries, size):
            count = min(size, block.queries - start)
            yield slice(start, start + count), block._replace(query=block.query + start, queries=count)

    def _logits(self, part: QKV, rows: slice, tile: Tile, scores: Scores, passes_on: bool = False) -> Tensor:
        """Return logits [batch, heads, queries, keys], -inf where masked; `passes_on`: also to the layer above."""
        heads = part.key.shape[1]
        logits = grouped(part.query[:, :, rows], heads) @ part.key.transpose(-2, -1)
        logits = logits.view(*part.query.shape[:2], tile.queries, tile.keys) * (1.0 / math.sqrt(part.query.shape[-1]))
        if scores.below is not None:
            logits = logits + scores.below[:, :, rows]
        if passes_on and scores.above is not None:
            scores.above[:, :, rows] = logits
        bias = bias_of(self.terms, tile, self.wide)
        return logits.to(self.wide) if bias is None else logits + bias


def _distances(block: Tile, device: torch.device) -> Tensor:
    queries = torch.arange(block.query, block.query + block.queries, device=device)[:, None]
    return (queries - torch.arange(block.key, block.key + block.keys, device=device)).abs()


def bias_of(terms: MaskAndBias, block: Tile, dtype: torch.dtype) -> Tensor | None:
    """Return the bias [batch or 1, heads / ranks or 1, queries, keys], -inf where masked, or None without both."""
    if terms.bias is None and terms.mask.is_plain_causal and block.is_before:
        return None
    bias = torch.zeros((), dtype=dtype, device=terms.device)
    if terms.bias is not None:
        bias = terms.bias.by_distance.detach()[_distances(block, terms.device)].permute(2, 0, 1).to(dtype)
    queries, keys = (range(first, first + count) for first, count in (block[:2], block[2:]))
    return torch.where(terms.mask.dense(queries, keys, terms.device), bias, -math.inf)


class FlashBlocks:
    """Blocks with torch's flash attention (Dao 2023) for GPUs."""

    def __init__(self, terms: MaskAndBias) -> None:
        """Prepare for `terms` of the full sequence."""
        self.terms, self.mask = terms, terms.mask
        assert self.mask.documents is None or self.mask.bounds is not None

    def forward(self, part: QKV, block: Tile, drops: TileDropout, scores: Scores) -> Output:
        """Attend to a block of keys; see `Blocks`."""
        probability = drops.dropout.in_kernel(drops.keys)
        output, log_sum, *state = flash_forward(
            self._laid(part), self._lengths(block), probability, self._options(block)
        )
        batch, _, queries, _ = part.query.shape
        if self.mask.bounds is not None:
            log_sum = log_sum.view(-1, batch, queries).transpose(0, 1)
        log_sum = log_sum.masked_fill(log_sum == math.inf, -math.inf)  # a query that sees nothing
        return Output(output.view(batch, queries, *output.shape[-2:]).transpose(1, 2), log_sum, (probability, *state))

    def backward(
        self, grad: Tensor, part: QKV, block: Tile, drops: TileDropout, scores: Scores, full: Output, into: Gradients
    ) -> None:
        """Add the gradients of a block; see `Blocks`."""
        log_sum = full.log_sum if self.mask.bounds is None else full.log_sum.transpose(0, 1).flatten(1)
        grad, output = self._laid((grad, full.output))
        tensors = (grad, *self._laid(part), output, log_sum.contiguous())
        probability, *state = full.state
        grads = flash_backward(tensors, self._lengths(block), probability, state, self._options(block))
        for total, gradient in zip(into.of, grads, strict=True):
            batch, _, length, _ = total.shape
            total.add_(gradient.view(batch, length, *gradient.shape[-2:]).transpose(1, 2))

    def _laid(self, parts: Sequence[Tensor]) -> list[Tensor]:
        laid = [part.transpose(1, 2) for part in parts]
        return laid if self.mask.bounds is None else [part.flatten(0, 1) for part in laid]

    def _lengths(self, block: Tile) -> Lengths:
        if self.mask.bounds is None:
            return Lengths(None, None, block.queries, block.keys)
        row, place = self.mask.bounds // self.terms.length, self.mask.bounds % self.terms.length
        spans = ((block.query, block.queries), (block.key, block.keys))
        queries, keys = ((row * count + (place - first).clamp(0, count)).int() for first, count in spans)
        return Lengths(queries, keys, block.queries, block.keys)

    def _options(self, block: Tile) -> dict[str, Any]:
        window = self.mask.window
        if window is None:
            return {"is_causal": not block.is_before}
        assert not block.is_before
        return {"is_causal": False, "window_size_left": window - 1, "window_size_right": 0}


class Lengths(NamedTuple):
    """Start of each document among queries and keys of all rows (int32, or None), and maximum lengths."""

    queries: Tensor | None
    keys: Tensor | None
    longest_queries: int
    longest_keys: int


def flash_forward(
    qkv: Sequence[Tensor], lengths: Lengths, probability: float, options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return output, logarithms of sums, and generator state (two tensors), like `gpu_kernels.flash_attention`."""
    # if there are more keys than queries, both end together
    forward = torch.ops.aten._flash_attention_forward
    return forward(*qkv, *lengths, probability, return_debug_mask=False, **options)[:4]


def flash_backward(
    tensors: Sequence[Tensor], lengths: Lengths, probability: float, state: Sequence[Tensor], options: dict[str, Any]
) -> tuple[Tensor, ...]:
    """Return gradients of queries, keys and values; `tensors`: output gradient, these, output, logarithms of sums."""
    options, causal = dict(options), options["is_causal"]
    del options["is_causal"]
    return torch.ops.aten._flash_attention_backward(*tensors, *lengths, probability, causal, *state, **options)
