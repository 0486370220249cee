"""Log-likelihood of given tokens, on any layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pangu.collectives.reduce import all_reduce
from pangu.data.batch import Batch
from pangu.evaluation.inference import LoadedModel, padded_length
from pangu.schedule.schedule import forward_only


@dataclass(frozen=True)
class ScoredSpan:
    """Tokens to be scored, after their context."""

    ids: tuple[int, ...]
    """Ids, at most one more than the model's window: the last one is only predicted."""
    start: int
    """Index of the first scored token, at least 1."""
    weight: int | None = None
    """Number of tokens that the mean loss of the scored ones stands for; None: as many as they are."""

    @property
    def num_scored(self) -> int:
        """Number of scored tokens."""
        return max(0, len(self.ids) - self.start)


@dataclass(frozen=True)
class Score:
    """Result of scoring a span."""

    loss: float
    """Negative log-likelihood of the scored tokens, in nats; with a weight, their mean times the weight."""
    greedy: bool
    """True if greedy decoding would generate the scored tokens."""
    tokens: int
    """Number of scored tokens, or the weight."""


def score(model: LoadedModel, spans: Sequence[ScoredSpan]) -> list[Score]:
    """Score each span; all ranks of all replicas call this together, with the same spans.

    The spans are sorted by length, the longest first, and padded on the right, where a causal model does not look, to
    micro-batches of `model.rows`, which the replicas share.
    """
    window = model.config.sequence
    assert all(span.start >= 1 and len(span.ids) <= window + 1 for span in spans)
    order = sorted((i for i, span in enumerate(spans) if span.num_scored), key=lambda i: -len(spans[i].ids))
    groups = [order[i : i + model.rows] for i in range(0, len(order), model.rows)]
    mesh = model.mesh
    # as many for every replica, which may meet in each: places beyond the last repeat it and do not count
    replicas = mesh.layout.replicas
    places = range(mesh.replica, -(-len(groups) // replicas) * replicas, replicas)
    micro_batches = [groups[min(place, len(groups) - 1)] for place in places]
    batches = [_batch([spans[i] for i in group], model) for group in micro_batches]
    losses = torch.zeros(len(spans), 2, dtype=torch.float64, device=mesh.device)
    if batches:
        language_model = model.runner.model

        def end(hidden: Tensor, batch: Batch) -> Tensor:
            return language_model.token_losses_of(hidden, batch).sum(-1, dtype=torch.float64).t()

        results = model.runner.forward(forward_only(model.schedule, len(batches)), batches, end)
        for place, group, result in zip(places, micro_batches, results, strict=bool(results)):
            if place < len(groups):
                losses[group] = result
    sums = all_reduce(all_reduce(losses, mesh.group("replicas")), mesh.group("pipeline")).tolist()
    return [
        Score(loss, misses == 0, span.num_scored)
        if span.weight is None
        else Score(loss * span.weight / max(1, span.num_scored), misses == 0, span.weight)
        for span, (loss, misses) in zip(spans, sums, strict=True)
    ]


def windows(ids: Sequence[int], window: int, stride: int) -> Iterator[ScoredSpan]:
    """Yield spans that together score every token of a text but the first, each once.

    The first span fills the window; each further one moves on by `stride` tokens and scores these, so that each sees at
    least `window - stride` others.
    """
    assert 1 <= stride <= window
    end = min(len(ids), window + 1)
    yield ScoredSpan(tuple(ids[:end]), 1)
    while end < len(ids):
        scored, end = end, min(len(ids), end + stride)
        begin = end - window - 1
        yield ScoredSpan(tuple(ids[begin:end]), scored - begin)


def huggingface_windows(ids: Sequence[int], window: int, stride: int) -> Iterator[ScoredSpan]:
    """Yield spans like "Perplexity of fixed-length models" of transformers' documentation, which many figures use.

    A window holds at most `window` ids, begins `stride` after the previous one and scores what that has not seen. Its
    mean loss stands for one token fewer than it has new ones. That is how many it scores where it begins with them, as
    the first window does; where it begins with others it scores all of them, and each counts a little less.
    """
    assert 1 <= stride <= window
    end = 0
    for begin in range(0, len(ids), stride):
        seen, end = end, min(len(ids), begin + window)
        yield ScoredSpan(tuple(ids[begin:end]), max(1, seen - begin), weight=end - seen - 1)
        if end == len(ids):
            return


def _batch(spans: Sequence[ScoredSpan], model: LoadedModel) -> Batch:
    """Return one micro-batch [spans, longest] of inputs and labels, on the device."""
    length = padded_length(max(len(span.ids) for span in spans) - 1, model.mesh.layout)
    tokens = torch.zeros(len(spans), length + 1, dtype=torch.int64)
    weights = torch.zeros(len(spans), length)
    for row, span in enumerate(spans):
        tokens[row, : len(span.ids)] = torch.tensor(span.ids)
        weights[row, span.start - 1 : len(span.ids) - 1] = 1.0
    positions = torch.arange(length).expand(len(spans), -1)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, None, tuple(range(len(spans))))
    return batch.to(model.mesh.device)
