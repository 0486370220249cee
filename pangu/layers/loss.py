"""Head and loss over a vocabulary that is sharded over the tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pangu.collectives.regions import enter
from pangu.layers.builder import Builder
from pangu.layers.chunked_loss import ChunkedLoss, Chunks, add_up
from pangu.layers.tensor_parallel_matmul import ALONE, column_parallel_matmul, leaves_no_gradient
from pangu.layers.vocab_parallel_loss import VocabParallelLoss


class Head(nn.Module):
    """Output matrix, without bias, and loss; a tied head (Press & Wolf 2017) uses the token embedding."""

    def __init__(self, build: Builder, vocab: int, chunk: int | None) -> None:
        """Build the head for `vocab` tokens, without padding; `chunk`: tokens with logits at a time (None: all)."""
        super().__init__()
        self.region = build.region
        self.store = build.store
        self.vocab = vocab
        self.chunk = chunk
        self.weight = build.optional("head.weight")

    def loss(
        self, hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor, scale: Tensor | None = None, sums: int = 1
    ) -> Tensor:
        """Return the sum over tokens of weight x negative log likelihood, in fp32 (fp64 for fp64 states).

        With `sums` > 1, return one sum for each of that many equal parts of the batch: [sums].

        `hidden`: [sequence (/ ranks with sequence parallelism), batch, width]; `table`: output matrix [vocab / ranks,
        width], with padding; `labels` (int64), `weights`: [batch, sequence]; `scale`: gradient that the
        sum will get in the backward pass (None: 1), which a loss in chunks needs early.
        """
        tokens = enter(hidden, self.region).flatten(0, 1)
        flat_labels, flat_weights = labels.t().flatten(), weights.t().flatten()
        if self.chunk is None or self.chunk >= len(tokens):
            # the states are gathered already
            logits = column_parallel_matmul(tokens, table, None, ALONE, self.store)
            losses = VocabParallelLoss.apply(logits, flat_labels, self.region, self.vocab)
            return add_up(losses * flat_weights, len(labels), sums)
        train = torch.is_grad_enabled()
        chunks = Chunks(self.chunk, table, self.store, self.region, self.vocab, train, len(labels), sums)
        matrix = table.detach() if leaves_no_gradient(tokens, self.store) else table
        return ChunkedLoss.apply(tokens, matrix, flat_labels, flat_weights, scale, chunks)
