"""GPT and PanGu-α as functions from tokens to logits and loss. Nothing here knows of ranks or devices."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from pangu.config.model import ModelConfig
from pangu.data.batch import Batch
from pangu.layers.attention import AttentionMask
from pangu.layers.builder import Builder
from pangu.layers.dropout import DropoutKeys, hidden_dropout
from pangu.layers.linear import PositionEmbedding, VocabParallelEmbedding, make_norm
from pangu.layers.loss import Head
from pangu.layers.recompute import checkpointed
from pangu.layers.rotary import Rotation
from pangu.models.block import Block, Options, Pass, QueryBlock
from pangu.topology.placement import PlacementTable


class TokenEmbedding(nn.Module):
    """Word vector + learned position vector (none with rotary positions), then dropout."""

    def __init__(self, config: ModelConfig, build: Builder) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(build, "word", config.vocab, config.hidden, config.init_std)
        self.position = (
            PositionEmbedding(build, "position", config.sequence, config.hidden, config.init_std)
            if config.positions == "learned"
            else None
        )
        self.dropout = hidden_dropout(build, config.dropout, "sum")

    def forward(self, tokens: Tensor, run: Pass) -> Tensor:
        """int64 [batch, sequence] -> [sequence, batch, hidden]."""
        words = self.word(tokens.t())
        return self.dropout(words if self.position is None else words + self.position(run.positions), run.keys)


class LanguageModel(nn.Module, ABC):
    """Embedding, layers and head; what GPT and PanGu-α have in common."""

    def __init__(self, config: ModelConfig, build: Builder, options: Options) -> None:
        """
        Args:
            config: the architecture.
            build: at the root of an empty placement table.
            options: how it is computed.
        """
        super().__init__()
        self.embedding = TokenEmbedding(config, build.at("embedding"))
        self.layers = self._make_layers(config, build.at("layers"), options)
        self.final_norm = make_norm(build, "final_norm", config.hidden, config.norm_eps, config.norm)
        own = None if config.tied_head else (config.hidden, config.init_std)
        self.head = Head(build, config.vocab, options.loss_chunk, own)
        self.rotary = (config.head_size, config.rotary_base) if config.positions == "rope" else None
        self.recomputed_layers = len(self.layers) if options.recompute is None else options.recompute

    def recomputes(self, layer: int) -> bool:
        """Whether a layer's activations are computed again in backward."""
        return layer < self.recomputed_layers

    @abstractmethod
    def _make_layers(self, config: ModelConfig, build: Builder, options: Options) -> nn.ModuleList:
        """The layers, built below `layers.0`, `layers.1`, ..."""

    @abstractmethod
    def _transform(self, hidden: Tensor, run: Pass) -> Tensor:
        """[sequence, batch, hidden] from the embedding -> the same, ready for the head."""

    def logits(self, tokens: Tensor, positions: Tensor, mask: AttentionMask, keys: DropoutKeys | None = None) -> Tensor:
        """Scores of every next token.

        Args:
            tokens: int64 [batch, sequence].
            positions: int64 [batch, sequence].
            mask: who sees whom.
            keys: keys of the dropout masks; None drops nothing.

        Returns:
            [sequence, batch, vocab].
        """
        hidden = self._hidden(tokens, self._pass(mask, positions, keys))
        return self.head.logits(hidden, self._output_matrix)

    def loss(self, batch: Batch, keys: DropoutKeys | None = None) -> Tensor:
        """Sum of the weighted token losses of a micro-batch; the caller divides by the global number of targets."""
        hidden = self._hidden(batch.tokens, self._pass(AttentionMask(batch.documents), batch.positions, keys))
        return self.head.loss(hidden, self._output_matrix, batch.labels, batch.weights)

    @property
    def _output_matrix(self) -> Tensor:
        return self.embedding.word.weight if self.head.weight is None else self.head.weight

    def _pass(self, mask: AttentionMask, positions: Tensor, keys: DropoutKeys | None) -> Pass:
        dtype = self.embedding.word.weight.dtype
        return Pass(mask, positions, keys, Rotation(positions, *self.rotary, dtype) if self.rotary else None)

    def _hidden(self, tokens: Tensor, run: Pass) -> Tensor:
        return self._transform(self.embedding(tokens, run), run)


class GPT(LanguageModel):
    """The decoder of GPT-2 (Radford et al. 2019, section 2.3) and GPT-3 (Brown et al. 2020, section 2.1)."""

    def _make_layers(self, config: ModelConfig, build: Builder, options: Options) -> nn.ModuleList:
        return nn.ModuleList(Block(config, build.at(i), options) for i in range(config.layers))

    def _transform(self, hidden: Tensor, run: Pass) -> Tensor:
        for number, layer in enumerate(self.layers):
            hidden = checkpointed(layer, hidden, run, on=self.recomputes(number))
        return self.final_norm(hidden)


class PanGu(LanguageModel):
    """PanGu-α (Zeng et al. 2021, section 2.2): blocks, then one query layer that asks by position for the next token.

    As the released 2.6B and 13B weights were trained, the final norm stands before the query layer and nothing is
    normed after it; `model.final_norm=after_query` is the order of the pipelined MindSpore build.
    """

    def __init__(self, config: ModelConfig, build: Builder, options: Options) -> None:
        super().__init__(config, build, options)
        self.query_embedding = PositionEmbedding(
            build, "query_embedding", config.sequence, config.hidden, config.init_std
        )
        self.norm_before_query = config.final_norm == "before_query"

    def _make_layers(self, config: ModelConfig, build: Builder, options: Options) -> nn.ModuleList:
        blocks = [Block(config, build.at(i), options) for i in range(config.layers - 1)]
        return nn.ModuleList([*blocks, QueryBlock(config, build.at(config.layers - 1), options)])

    def _transform(self, hidden: Tensor, run: Pass) -> Tensor:
        *blocks, query_layer = self.layers
        for number, block in enumerate(blocks):
            hidden = checkpointed(block, hidden, run, on=self.recomputes(number))
        if self.norm_before_query:
            hidden = self.final_norm(hidden)
        # the row of a token's own position asks for the token after it; no shift of the index
        queries = self.query_embedding(run.positions)
        hidden = checkpointed(query_layer, hidden, queries, run, on=self.recomputes(len(blocks)))
        return hidden if self.norm_before_query else self.final_norm(hidden)


def build_model(
    config: ModelConfig, options: Options | None = None, build: Builder | None = None
) -> tuple[LanguageModel, PlacementTable]:
    """A model on the meta device (it takes no memory) and the table of its logical tensors.

    Args:
        config: the architecture.
        options: how it is computed.
        build: an empty builder; the ranks it names share the model, and this is one rank's part. None: one process.
    """
    build = build or Builder(PlacementTable())
    kind = PanGu if config.kind == "pangu" else GPT
    return kind(config, build, options or Options()), build.table
