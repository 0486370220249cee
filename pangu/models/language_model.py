"""GPT and PanGu-α as functions from tokens to logits and loss, in one or several parts, without knowledge of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from pangu.config.model import ModelConfig
from pangu.data.batch import Batch, all_targets
from pangu.layers.attention import KVCache
from pangu.layers.biases import make_bias
from pangu.layers.block_pattern import BlockPattern
from pangu.layers.builder import Builder
from pangu.layers.context_attention import context_kernel, sequence_kernel
from pangu.layers.dropout import Dropout, DropoutKeys
from pangu.layers.expert_balance import ExpertBalance
from pangu.layers.experts import Routes
from pangu.layers.gpu_kernels import KERNELS
from pangu.layers.kernels import Kernel, MaskAndBias, densely_masked
from pangu.layers.linear import PositionEmbedding, VocabParallelEmbedding, make_norm
from pangu.layers.loss import Head
from pangu.layers.masks import AttentionMask
from pangu.layers.offload import Offload
from pangu.layers.recompute import SavedTensors, address, checkpointed
from pangu.layers.rotary import RotaryEmbedding
from pangu.layers.scores import logits, token_losses
from pangu.layers.turns import Turn
from pangu.models.block import ForwardContext, HiddenStates, Options, in_turns, make_block
from pangu.models.parameters import ModelPart, place_tensors
from pangu.models.prediction import Predictions
from pangu.models.size import hidden_state_shapes
from pangu.topology.placement import PlacementTable, TensorRank


class ModuleHooks:
    """Hooks around the modules `position_bias`, `embedding`, `layers.NUMBER` and `head`, in this order; no-ops here."""

    def before(self, module: str, x: Tensor) -> Tensor:
        """Return the input of a module; in the backward pass, its gradient ends the use of the module."""
        return x

    def after(self, module: str, x: Tensor) -> Tensor:
        """Return the output of a module; in the backward pass, its gradient starts the use of the module."""
        return x

    def on_turn(self, module: str, turn: Turn, last: Tensor) -> None:
        """Note that a module has taken a turn, whose backward pass begins with the gradient of `last`."""


class TokenEmbedding(nn.Module):
    """Sum of token and learned position embeddings, with dropout."""

    def __init__(self, config: ModelConfig, build: Builder) -> None:
        """Build the embedding tables."""
        super().__init__()
        self.word = VocabParallelEmbedding(build, "word")
        self.position = PositionEmbedding(build, "position") if config.positions == "learned" else None
        self.dropout = Dropout(build, config.dropout, "sum")

    def forward(self, tokens: Tensor, positions: Tensor, keys: DropoutKeys | None) -> Tensor:
        """Map tokens and positions int64 [batch, sequence] to [sequence, batch, hidden]."""
        words = self.word(tokens.t())
        if self.position is not None:
            words = words + self.position(positions)
        return self.dropout.hidden(words, keys)


class LanguageModel(nn.Module):
    """Language model: embedding, layers and head, or those of them that some parts need.

    GPT is the decoder of GPT-2 (Radford et al. 2019, section 2.3) and GPT-3 (Brown et al. 2020, section 2.1). The last
    layer of PanGu-α (Zeng et al. 2021, section 2.2) is a query layer, whose queries are position vectors. As in the
    released 2.6B and 13B weights, the final norm precedes it and nothing is normed after it;
    `model.final_norm=after_query` is the order of the pipelined MindSpore build.
    """

    def __init__(self, config: ModelConfig, build: Builder, options: Options, parts: Sequence[ModelPart]) -> None:
        """Build `parts`, with `build` at the root of their placement table (`place_tensors`)."""
        super().__init__()
        self.config = config
        self.hooks = ModuleHooks()
        self.compute: Callable[..., HiddenStates] = checkpointed
        self.embedding = TokenEmbedding(config, build.at("embedding")) if any(part.first for part in parts) else None
        self.embedding_norm: nn.Module | None = None
        if config.embedding_norm and any(0 in part.layers for part in parts):
            self.embedding_norm = make_norm(build, "embedding_norm", config.norm_eps, config.norm)
        self.position_bias = None
        if config.positions in ("alibi", "relative"):
            self.position_bias = make_bias(config, build)
        self.layers = nn.ModuleDict(
            {
                str(number): make_block(config, build.at(f"layers.{number}"), options, number)
                for part in parts
                for number in part.layers
            }
        )
        self.mtp = Predictions(config, build.at("mtp"), chain.from_iterable(part.layers for part in parts))
        self.head: Head | None = None
        if any(part.last for part in parts):
            self.final_norm = make_norm(build, "final_norm", config.norm_eps, config.norm)
            self.head = Head(build, config.vocab, options.loss_chunk)
            if config.query_layer is not None:
                self.query_embedding = PositionEmbedding(build, "query_embedding", whole=True)
        self.kernel = KERNELS[options.kernel]
        drops = config.attention_dropout > 0
        self._sequence_kernel = sequence_kernel(options.kernel, config.attention_sinks, drops)
        if config.sparse is not None:
            self._pattern = lru_cache(1)(BlockPattern.of)
        self._windows = sorted({config.has_window(layer) for layer in range(config.num_blocks)})
        self._lasting_kernel = lru_cache(len(self._windows))(self._new_kernel)
        self.context = build.context
        if build.context is not None:
            recompute = "attention" in options.recompute_parts
            self._context_kernel = context_kernel(config, options.kernel, recompute, build.context)
        self.recomputed_layers, self.offload = options.recompute, options.offload
        self.turns = options.turns
        self._balance, self._notes_logits = build.balance, build.logits is not None

    def forward(
        self,
        part: ModelPart,
        received: HiddenStates | None,
        batch: Batch,
        keys: DropoutKeys | None = None,
        cache: KVCache | None = None,
    ) -> HiddenStates:
        """Return the hidden states of one part for a micro-batch; those of the last part are ready for the head.

        `received` has the hidden states of the previous part, None for the first. Only the inputs of `batch` are read;
        its `documents` may be longer than its tokens, which then come last, after those in `cache`. `keys` of None: no
        dropout.
        """
        drops, hooks = self.config.dropout > 0 or self.config.attention_dropout > 0, self.hooks
        keys = keys.on(batch.positions, batch.part) if keys is not None and drops else None
        context, *others = self._contexts(batch, keys, cache)
        compute, given = self.compute, (context, *others) if others else context
        if part.first:
            assert self.embedding is not None
            tokens = hooks.before("embedding", batch.tokens)
            received = HiddenStates(hooks.after("embedding", self.embedding(tokens, batch.positions, keys)))
        assert received is not None
        # multi-token prediction: embeddings of the tokens ahead, and what else the head reads
        words, read = list[Tensor](), list[Tensor]()
        hidden, scores = received
        del received  # so that the first layer's input can be freed
        recomputed = len(part.layers) if self.recomputed_layers is None else self.recomputed_layers
        for layer in part.layers:
            queries: Tensor | None = None
            with context.saved.layer(last=layer == part.layers[-1]):
                hidden = hooks.before(f"layers.{layer}", hidden)
                if layer == 0 and self.embedding_norm is not None:
                    hidden = self.embedding_norm(hidden)
                if layer == self.config.query_layer:
                    hidden = self.final_norm(hidden) if self.config.norms_before_query else hidden
                    # the query at a token's position predicts the next token; the index is not shifted
                    queries = self.query_embedding(batch.positions)
                block, on = self.layers[str(layer)], layer < part.layers.start + recomputed
                if others:
                    on_turn = partial(hooks.on_turn, f"layers.{layer}")
                    compute = partial(checkpointed, partial(in_turns, self.turns, on_turn))
                if layer == self.config.layers:
                    hidden = self._normed(hidden)
                    words = self.mtp.embed(batch, self.input_matrix, self.head, completes=self.embedding is None)
                if layer < self.config.layers:
                    # no other name refers to the input, which would keep it alive while the next layer computes
                    hidden, scores = compute(block, HiddenStates(hidden, scores), given, queries, on=on)
                elif words:
                    module = self.mtp.module(layer)
                    read.append(hidden)
                    merged = HiddenStates(module(hidden, words.pop(0)))
                    hidden = module.output_norm(compute(block, merged, given, None, on=on).hidden)
            # the previous layer's offloaded tensors are freed by now, and so count for this layer
            hidden = hooks.after(f"layers.{layer}", hidden)
        if not part.last:
            return HiddenStates(hidden, scores)
        hidden = hooks.before("head", torch.cat([*read, hidden], 1) if read else hidden)
        return HiddenStates(hidden if self.config.mtp_layers else self._normed(hidden))

    def loss_of(self, hidden: Tensor, batch: Batch, scale: Tensor | None = None) -> Tensor:
        """Return the sum of weighted token losses (see `Head.loss`); the caller divides by the number of targets.

        With multi-token prediction, [1 + modules]: the sum for the next token, and one for each module.
        """
        assert self.head is not None
        labels, weights, sums = all_targets(batch)
        loss = self.head.loss(hidden, self._output_matrix, labels, weights, scale, sums)
        return self.hooks.after("head", loss)

    def token_losses_of(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Return losses and misses [2, batch, sequence], see `scores.token_losses`."""
        assert self.head is not None
        losses = token_losses(self.head, hidden, self._output_matrix, batch.labels, batch.weights)
        return self.hooks.after("head", losses)

    def logits_of(self, hidden: Tensor, places: slice = slice(None)) -> Tensor:
        """Return the logits [places, batch, vocab] of the tokens after these places."""
        assert self.head is not None
        return self.hooks.after("head", logits(self.head, hidden, self._output_matrix, places))

    def from_message(self, tensors: Sequence[Tensor]) -> HiddenStates:
        """Return the hidden states from the tensors of a message."""
        return HiddenStates(*tensors)

    def output_shapes(self, chunk: int, batch: Batch, region: TensorRank) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors that a part sends to the next for a micro-batch, equal for all parts."""
        (rows, length), part, context = batch.tokens.shape, batch.part, self.context
        shared = context.ulysses if context is not None and part is not None else 1
        return hidden_state_shapes(self.config, region, rows, length, _length(batch), shared)

    def balance_on(self, device: torch.device) -> ExpertBalance | None:
        """Return the load statistics of the experts, moved to a device; None without experts."""
        return None if self._balance is None else self._balance.to(device)

    @property
    def input_matrix(self) -> Tensor | None:
        """Token embedding, or this stage's copy of it; None if it has none."""
        if self.embedding is not None:
            return self.embedding.word.weight
        tied = self.head is not None and self.config.tied_head and self.config.mtp_layers > 0
        return self._output_matrix if tied else self.mtp.lookup

    def _normed(self, hidden: Tensor) -> Tensor:
        return hidden if self.config.norms_before_query else cast(Tensor, self.final_norm(hidden))

    @property
    def _output_matrix(self) -> Tensor:
        assert self.head is not None
        if self.head.weight is not None:
            return self.head.weight
        assert self.embedding is not None
        return self.embedding.word.weight

    def _contexts(self, batch: Batch, keys: DropoutKeys | None, cache: KVCache | None) -> list[ForwardContext]:
        """Return the context of a micro-batch, or those of both halves if they are computed in turns."""
        config, positions, contexts, resident = self.config, batch.positions, list[ForwardContext](), set[int]()
        dtype, device, length = next(self.parameters()).dtype, positions.device, _length(batch)
        first, bias = length - positions.shape[1] if batch.part is None else 0, None
        if self.position_bias is not None:
            self.hooks.before("position_bias", positions)
            bias = self.position_bias(length, dtype, device)
            self.hooks.after("position_bias", positions)
        sparse = None if config.sparse is None else self._pattern(config.sparse, length, device)
        lasts = batch.documents is None and not first and config.positions != "relative"
        make = self._lasting_kernel if lasts else self._new_kernel
        saved = SavedTensors(Offload(device, resident) if self.offload else None)
        for part in batch.halves() if self.turns and torch.is_grad_enabled() else [batch]:
            kernels, terms, rotary, routes = list[Kernel](), list[MaskAndBias](), None, None
            # all parts of a model make the kernels of both kinds, so that memory does not depend on where it is cut
            for windowed in self._windows:
                mask = AttentionMask(part.documents, config.window if windowed else None, part.bounds, sparse)
                terms.append(MaskAndBias(mask, bias, length, dtype, device, first))
                kernels.append(make(terms[-1], batch.part is not None))
            if config.positions == "rope":
                rotary = RotaryEmbedding(part.positions, config, dtype)
            if self.offload:
                tensors = (*self.parameters(), *chain.from_iterable(vars(kernel).values() for kernel in kernels))
                resident |= {address(x) for x in tensors if isinstance(x, Tensor)}
            if config.experts is not None:
                routes = Routes(None if part.padding is None else part.padding.t())
            own = keys if keys is None or part is batch else keys.select(part.samples)
            both, masks = (kernels[0], kernels[-1]), (terms[0], terms[-1]) if self._notes_logits else ()
            contexts.append(ForwardContext(both, part.positions, own, saved, rotary, cache, first, routes, masks))
        return contexts

    def _new_kernel(self, terms: MaskAndBias, shares: bool) -> Kernel:
        if shares:
            return self._context_kernel(terms)
        unbounded = terms.mask.documents is not None and terms.mask.bounds is None
        if terms.first or unbounded:
            return densely_masked(self.kernel, self.config.attention_sinks)(terms)
        return self._sequence_kernel(terms)


def _length(batch: Batch) -> int:
    """Return the number of tokens that each of a batch sees: all of its sequence, with those of a KV cache."""
    if batch.documents is not None:
        return batch.documents.shape[1]
    return batch.tokens.shape[1] * (1 if batch.part is None else batch.part.size)


def build_model(
    config: ModelConfig,
    options: Options | None = None,
    build: Builder | None = None,
    parts: Sequence[ModelPart] | None = None,
    frozen: Collection[str] = (),
) -> tuple[LanguageModel, PlacementTable]:
    """Return a model on the meta device, without memory, and the table of its logical tensors.

    `build` is an empty builder, which has the shard of one of several ranks; `parts` are those of this rank (None: all
    in one); `frozen` has patterns of tensor names that are not trained.
    """
    build, parts = build or Builder(), parts or [ModelPart.full(config)]
    build = replace(build, table=place_tensors(config, parts, build.region, frozen, build.experts))
    if config.experts is not None:
        build = replace(build, balance=ExpertBalance(config))
    return LanguageModel(config, build, options or Options(), parts), build.table
