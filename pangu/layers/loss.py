"""The head and the loss, over a vocabulary that is sharded over the tensor-parallel ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pangu.collectives.regions import enter
from pangu.layers.builder import Builder
from pangu.layers.tensor_parallel_matmul import ALONE, column_parallel_matmul, leaves_no_gradient
from pangu.layers.vocab_parallel_loss import VocabParallelLoss


class Head(nn.Module):
    """The output matrix, without bias, and the loss. A tied head (Press & Wolf 2017) uses the word embedding."""

    def __init__(self, build: Builder, vocab: int, chunk: int | None) -> None:
        """`vocab`: number of words, without padding. `chunk`: tokens whose logits exist at a time; None: all."""
        super().__init__()
        self.region = build.region
        self.store = build.store
        self.vocab = vocab
        self.chunk = chunk
        self.weight = build.optional("head.weight")

    def loss(
        self, hidden: Tensor, table: Tensor, labels: Tensor, weights: Tensor, scale: Tensor | None = None
    ) -> Tensor:
        """Sum over tokens of weight x negative log-likelihood, in fp32 (fp64 for fp64 states). `hidden`: [sequence (/
        ranks with sequence parallelism), batch, width]; `table`: this rank's rows of the output matrix [vocab / ranks,
        width], padding included; `labels` (int64) and `weights` (0 where a token does not count): [batch, sequence].
        `scale`: the gradient that the sum is going to be given in backward, None: 1; of chunks gradients are made with
        it, whatever comes then."""
        tokens = enter(hidden, self.region).flatten(0, 1)
        flat_labels, flat_weights = labels.t().flatten(), weights.t().flatten()
        if self.chunk is None or self.chunk >= len(tokens):
            # the states are whole already
            logits = column_parallel_matmul(tokens, table, None, ALONE, self.store)
            losses = VocabParallelLoss.apply(logits, flat_labels, self.region, self.vocab)
            return (losses * flat_weights).sum()
        from pangu.layers.chunked_loss import ChunkedLoss, Chunks

        chunks = Chunks(self.chunk, table, self.store, self.region, self.vocab, torch.is_grad_enabled())
        matrix = table.detach() if leaves_no_gradient(tokens, self.store) else table
        return ChunkedLoss.apply(tokens, matrix, flat_labels, flat_weights, scale, chunks)
