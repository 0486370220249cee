"""Multi-token prediction: what each module adds to one more layer of the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn

from pangu.config.model import ModelConfig
from pangu.data.batch import Batch
from pangu.layers.builder import Builder
from pangu.layers.linear import make_norm, vocab_parallel_lookup
from pangu.layers.loss import Head


class Prediction(nn.Module):
    """Input and output of the layer of one module (DeepSeek-AI 2024, arXiv 2412.19437, equations 21 to 23).

    Module j, from 1 on, knows the token j positions ahead and predicts the one after that: its layer reads M [e; h],
    with e the normed embedding of that token, and h the normed output of the previous module, or what the head reads.
    As in the released weights, e comes first, and each module has an output norm; the head is shared.
    """

    def __init__(self, config: ModelConfig, build: Builder) -> None:
        """Build the norms and M, which every tensor-parallel rank holds."""
        super().__init__()
        self.embedding_norm = make_norm(build, "embedding_norm", config.norm_eps, config.norm)
        self.hidden_norm = make_norm(build, "hidden_norm", config.norm_eps, config.norm)
        self.output_norm = make_norm(build, "output_norm", config.norm_eps, config.norm)
        self.merge = nn.Linear(2 * config.hidden, config.hidden, bias=False, device="meta")
        self.merge.weight = build.parameter("merge.weight")

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """Return the input of the layer, [sequence (/ ranks with sequence parallelism), batch, hidden]."""
        merged = torch.cat([self.embedding_norm(embedded), self.hidden_norm(hidden)], -1)
        return cast(Tensor, self.merge(merged))


class Predictions(nn.ModuleDict):
    """Modules of multi-token prediction on the last stage, by number from 0; empty elsewhere."""

    def __init__(self, config: ModelConfig, build: Builder, layers: Iterable[int]) -> None:
        """Build the modules of those of these layers that follow the model's own."""
        numbers = sorted({layer - config.layers for layer in layers if layer >= config.layers})
        super().__init__({str(number): Prediction(config, build.at(number)) for number in numbers})
        self.lookup = build.optional("lookup")
        """Copy of the token embedding, on another stage than that; None: the head's matrix, or the embedding itself."""
        self._first = config.layers

    def module(self, layer: int) -> Prediction:
        """Return the module of a layer."""
        return cast(Prediction, self[str(layer - self._first)])

    def embed(self, batch: Batch, table: Tensor | None, head: Head | None, completes: bool) -> list[Tensor]:
        """Return the embedding of the token that each module knows; none if none computes, as in evaluation.

        `table`: token embedding; `completes`: no other gradient of it follows in the backward pass.
        """
        if batch.mtp_labels is None:
            return []
        assert table is not None
        assert head is not None
        ids = torch.cat([batch.labels, *batch.mtp_labels[:, :-1].unbind(1)]).t()
        words = vocab_parallel_lookup(ids, table, head.vocab, head.region, head.store, completes)
        return list(words.chunk(batch.mtp_labels.shape[1], 1))
