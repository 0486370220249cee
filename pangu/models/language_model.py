"""GPT and PanGu-α as functions from tokens to logits and loss, whole or in parts. Nothing here knows of ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pangu.config.model import ModelConfig
from pangu.data.batch import Batch
from pangu.layers.biases import Alibi, RelativeBias
from pangu.layers.builder import Builder
from pangu.layers.cache import Cache
from pangu.layers.dropout import DropoutKeys, hidden_dropout
from pangu.layers.gate import Gate
from pangu.layers.kernels import KERNELS, Terms, over_cache
from pangu.layers.linear import PositionEmbedding, VocabParallelEmbedding, make_norm
from pangu.layers.loss import Head
from pangu.layers.masks import AttentionMask
from pangu.layers.offload import Offload, address
from pangu.layers.recompute import SavedTensors, checkpointed
from pangu.layers.rotary import Rotation
from pangu.models.block import Block, Carried, Options, Pass, QueryBlock
from pangu.models.parts import Part, carried_shapes, place_tensors
from pangu.topology.placement import PlacementTable


class TokenEmbedding(nn.Module):
    """Word vector + learned position vector (if positions are learned), then dropout."""

    def __init__(self, config: ModelConfig, build: Builder) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(build, "word")
        self.position = PositionEmbedding(build, "position") if config.positions == "learned" else None
        self.dropout = hidden_dropout(build, config.dropout, "sum")

    def forward(self, tokens: Tensor, run: Pass) -> Tensor:
        """int64 [batch, sequence] -> [sequence, batch, hidden]."""
        words = self.word(tokens.t())
        return self.dropout(words if self.position is None else words + self.position(run.positions), run.keys)


def _make_bias(config: ModelConfig, build: Builder) -> Alibi | RelativeBias | None:
    """What tells attention of positions, if its scores do."""
    if config.positions == "alibi":
        return Alibi(build, config.heads)
    if config.positions == "relative":
        return RelativeBias(build, "position_bias", config.furthest_relative)
    return None


class LanguageModel(nn.Module, ABC):
    """Embedding, layers and head, or those of them that some parts need; what GPT and PanGu-α have in common."""

    def __init__(self, config: ModelConfig, build: Builder, options: Options, parts: Sequence[Part]) -> None:
        """
        Args:
            config: the architecture.
            build: at the root of the table of these parts (`place_tensors`).
            options: how it is computed.
            parts: what is built.
        """
        super().__init__()
        self.parts = tuple(parts)
        self.gate = Gate()
        self.region = build.region
        self.config = config
        self.embedding = TokenEmbedding(config, build.at("embedding")) if any(part.first for part in parts) else None
        self.position_bias = _make_bias(config, build)
        self.layers = nn.ModuleDict(
            {str(number): self._make_layer(config, build, number, options) for part in parts for number in part.layers}
        )
        self.head: Head | None = None
        if any(part.last for part in parts):
            self.final_norm = make_norm(build, "final_norm", config.norm_eps, config.norm)
            self.head = Head(build, config.vocab, options.loss_chunk)
        self.rotary = (config.head_size, config.rotary_base) if config.positions == "rope" else None
        self.rope_scaling = config.rope_scaling
        self.kernel, self.window = KERNELS[options.kernel], config.window
        self.recomputed_layers = options.recompute
        self.offload = options.offload

    @abstractmethod
    def _make_layer(self, config: ModelConfig, build: Builder, number: int, options: Options) -> nn.Module:
        """A layer, built below `layers.NUMBER`."""

    def hidden(
        self,
        part: Part,
        received: Carried | None,
        batch: Batch,
        keys: DropoutKeys | None = None,
        cache: Cache | None = None,
    ) -> Carried:
        """What one part makes of a micro-batch.

        Args:
            part: one that was built.
            received: what the part before it returned; None for the first one.
            batch: the micro-batch; only its inputs are read. `documents` may be longer than the rest: then the last of
                its tokens are here, and the cache knows those before them.
            keys: keys of the dropout masks; None drops nothing.
            cache: of this micro-batch; None if nothing is kept.

        Returns:
            What the next part receives; the hidden states of the last part are ready for the head.
        """
        run = self._pass(AttentionMask(batch.documents), batch.positions, keys, cache)
        return self._hidden(part, received, batch.tokens, run)

    def carried_shapes(self, batch: Batch) -> list[tuple[int, ...]]:
        """Shapes of the tensors that one part hands to the next for a micro-batch."""
        rows, length = batch.tokens.shape
        seen = length if batch.documents is None else batch.documents.shape[1]
        return carried_shapes(self.config, self.region, rows, length, seen)

    def loss_of(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Sum of the weighted token losses of a micro-batch, from what the last part returned; the caller divides by
        the global number of targets."""
        assert self.head is not None
        return self.gate.after("head", self.head.loss(hidden, self._output_matrix, batch.labels, batch.weights))

    def token_losses_of(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Loss of each target token of a micro-batch, and whether greedy decoding misses it: [2, batch, sequence], from
        what the last part returned (see `Head.token_losses`)."""
        assert self.head is not None
        found = self.head.token_losses(hidden, self._output_matrix, batch.labels, batch.weights)
        return self.gate.after("head", torch.stack(found))

    def logits_of(self, hidden: Tensor, places: slice = slice(None)) -> Tensor:
        """Scores [places, batch, vocab] of the tokens after these places, from what the last part returned."""
        assert self.head is not None
        return self.gate.after("head", self.head.logits(hidden, self._output_matrix, places))

    def loss(self, batch: Batch, keys: DropoutKeys | None = None) -> Tensor:
        """`hidden`, then `loss_of`, of a model that was built in one part."""
        return self.loss_of(self.hidden(self._only_part, None, batch, keys).hidden, batch)

    def logits(self, tokens: Tensor, positions: Tensor, mask: AttentionMask, keys: DropoutKeys | None = None) -> Tensor:
        """Scores of every next token by a model that was built in one part.

        Args:
            tokens: int64 [batch, sequence].
            positions: int64 [batch, sequence].
            mask: who sees whom; the model's own window is put on top.
            keys: keys of the dropout masks; None drops nothing.

        Returns:
            [sequence, batch, vocab].
        """
        run = self._pass(mask, positions, keys)
        return self.logits_of(self._hidden(self._only_part, None, tokens, run).hidden)

    @property
    def _only_part(self) -> Part:
        (part,) = self.parts
        return part

    @property
    def _output_matrix(self) -> Tensor:
        assert self.head is not None
        if self.head.weight is not None:
            return self.head.weight
        assert self.embedding is not None
        return self.embedding.word.weight

    def _pass(
        self, mask: AttentionMask, positions: Tensor, keys: DropoutKeys | None, cache: Cache | None = None
    ) -> Pass:
        dtype = next(self.parameters()).dtype
        here, device = positions.shape[1], positions.device
        length = here if mask.documents is None else mask.documents.shape[1]
        first = length - here
        bias = None
        if self.position_bias is not None:
            self.gate.before("position_bias", positions)
            bias = self.position_bias(length, dtype, device)
            self.gate.after("position_bias", positions)
        # made here, outside of what is recomputed, as all layers share it
        kind = over_cache(self.kernel) if first else self.kernel
        kernel = kind(Terms(replace(mask, window=self.window), bias, length, dtype, device, first))
        rotation = Rotation(positions, *self.rotary, dtype, self.rope_scaling) if self.rotary else None
        offload = None
        if self.offload:
            offload = Offload(device, {address(parameter) for parameter in self.parameters()})
        return Pass(kernel, positions, keys, SavedTensors(offload), rotation, cache, first)

    def _hidden(self, part: Part, received: Carried | None, tokens: Tensor, run: Pass) -> Carried:
        carried = received
        if part.first:
            assert self.embedding is not None
            tokens = self.gate.before("embedding", tokens)
            carried = Carried(self.gate.after("embedding", self.embedding(tokens, run)))
        assert carried is not None
        for place, number in enumerate(part.layers):
            again = self.recomputed_layers is None or place < self.recomputed_layers
            with run.saved.layer():
                carried = self._layer(number, carried, run, again)
        return Carried(self._top(carried.hidden)) if part.last else carried

    def _layer(self, number: int, carried: Carried, run: Pass, again: bool) -> Carried:
        """From what the layer below hands over to what this one does; `again`: its activations are computed again in
        backward."""
        return self._through(number, carried, run, again=again)

    def _through(self, number: int, carried: Carried, *more: Any, again: bool) -> Carried:
        region = f"layers.{number}"
        carried = carried._replace(hidden=self.gate.before(region, carried.hidden))
        carried = checkpointed(self.layers[str(number)], carried, *more, on=again)
        return carried._replace(hidden=self.gate.after(region, carried.hidden))

    def _top(self, hidden: Tensor) -> Tensor:
        """What stands between the last layer and the head."""
        return self.final_norm(self.gate.before("head", hidden))


class GPT(LanguageModel):
    """The decoder of GPT-2 (Radford et al. 2019, section 2.3) and GPT-3 (Brown et al. 2020, section 2.1)."""

    def _make_layer(self, config: ModelConfig, build: Builder, number: int, options: Options) -> nn.Module:
        return Block(config, build.at(f"layers.{number}"), options)


class PanGu(LanguageModel):
    """PanGu-α (Zeng et al. 2021, section 2.2): blocks, then one query layer that asks by position for the next token.

    As the released 2.6B and 13B weights were trained, the final norm stands before the query layer and nothing is
    normed after it; `model.final_norm=after_query` is the order of the pipelined MindSpore build.
    """

    def __init__(self, config: ModelConfig, build: Builder, options: Options, parts: Sequence[Part]) -> None:
        super().__init__(config, build, options, parts)
        self.query_layer = config.layers - 1
        if any(part.last for part in parts):
            self.query_embedding = PositionEmbedding(build, "query_embedding", whole=True)
        self.norm_before_query = config.final_norm == "before_query"

    def _make_layer(self, config: ModelConfig, build: Builder, number: int, options: Options) -> nn.Module:
        kind = QueryBlock if number == config.layers - 1 else Block
        return kind(config, build.at(f"layers.{number}"), options)

    def _layer(self, number: int, carried: Carried, run: Pass, again: bool) -> Carried:
        if number != self.query_layer:
            return super()._layer(number, carried, run, again)
        carried = carried._replace(hidden=self.gate.before("head", carried.hidden))
        if self.norm_before_query:
            carried = carried._replace(hidden=self.final_norm(carried.hidden))
        # the row of a token's own position asks for the token after it; no shift of the index
        queries = self.query_embedding(run.positions)
        return self._through(number, carried, queries, run, again=again)

    def _top(self, hidden: Tensor) -> Tensor:
        return hidden if self.norm_before_query else self.final_norm(hidden)


def build_model(
    config: ModelConfig,
    options: Options | None = None,
    build: Builder | None = None,
    parts: Sequence[Part] | None = None,
) -> tuple[LanguageModel, PlacementTable]:
    """A model on the meta device (it takes no memory) and the table of its logical tensors.

    Args:
        config: the architecture.
        options: how it is computed.
        build: an empty builder; the ranks it names share the model, and this is one rank's part. None: one process.
        parts: those that this rank holds; None: the whole model in one part.
    """
    build, parts = build or Builder(), parts or [Part.whole(config)]
    build = replace(build, table=place_tensors(config, parts, build.region))
    kind = PanGu if config.kind == "pangu" else GPT
    return kind(config, build, options or Options(), parts), build.table
