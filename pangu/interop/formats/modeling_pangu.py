"""PanGu-α (Zeng et al. 2021) for transformers: blocks, then one query layer that asks by position for the next token.

This file goes with exported weights and needs torch and transformers only; load the folder with
`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`. Weights have the names of the community's port.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CACHE = "cache" if hasattr(CausalLMOutputWithPast, "cache") else "past_key_values"
"""Name of the key-value cache in this version of transformers."""


class PanguConfig(PretrainedConfig):
    """Architecture of PanGu-α; `num_layers` includes the query layer.

    `position_embedding_type`: `absolute`, a table of position vectors, or `rotary`: queries and keys rotate, pair i of
    a head by position x `rope_theta`^(-2i / head size). The query layer keeps its own table either way.
    """

    model_type = "gpt_pangu"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012
    attribute_map = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}  # noqa: RUF012
    base_model_tp_plan = {  # noqa: RUF012
        **{f"h.*.attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        **{"h.*.attn.c_proj": "rowwise", "h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"},
    }

    def __init__(
        self,
        vocab_size: int = 40000,
        max_position_embeddings: int = 1024,
        hidden_size: int = 2560,
        intermediate_size: int | None = None,
        num_layers: int = 32,
        num_heads: int = 32,
        activation_function: str = "gelu_new",
        resid_pdrop: float = 0.1,
        embd_pdrop: float = 0.1,
        attn_pdrop: float = 0.1,
        layer_norm_epsilon: float = 1e-5,
        initializer_range: float = 0.02,
        use_cache: bool = True,
        tie_word_embeddings: bool = True,
        position_embedding_type: str = "absolute",
        rope_theta: float = 10000.0,
        **others: Any,
    ) -> None:
        """Store the architecture. Raises ValueError for an unknown `position_embedding_type`."""
        if position_embedding_type not in ("absolute", "rotary"):
            raise ValueError(f"position_embedding_type = {position_embedding_type!r}: must be absolute or rotary")
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size or 4 * hidden_size
        self.num_layers = num_layers
        self.num_heads = num_heads
        self.activation_function = activation_function
        self.resid_pdrop = resid_pdrop
        self.embd_pdrop = embd_pdrop
        self.attn_pdrop = attn_pdrop
        self.layer_norm_epsilon = layer_norm_epsilon
        self.initializer_range = initializer_range
        self.use_cache = use_cache
        self.position_embedding_type = position_embedding_type
        self.rope_theta = rope_theta
        super().__init__(tie_word_embeddings=tie_word_embeddings, **others)


class PanguRotation:
    """Rotary embedding (Su et al. 2021, section 3.2), in fp32 or better; element i pairs with i + size / 2."""

    def __init__(self, positions: Tensor, size: int, base: float, dtype: torch.dtype) -> None:
        """Compute the rotation at `positions` [batch, new] for heads of `size` elements in `dtype`."""
        self.dtype = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, size, 2, dtype=self.dtype, device=positions.device) / size
        angles = positions[:, None, :, None] * base**-exponents
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, heads: Tensor) -> Tensor:
        """Return rotated heads [batch, heads, new, size]."""
        first, second = heads.to(self.dtype).chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).to(heads.dtype)


def eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, dropout: float, **_: Any
) -> tuple[Tensor, Tensor]:
    """Return [batch, new, heads, size] and the weights [batch, heads, new, all], by plain operations."""
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~mask, -torch.inf)
    weights = F.dropout(scores.float().softmax(-1).to(query.dtype), dropout)
    return (weights @ value).transpose(1, 2), weights


class PanguAttention(nn.Module):
    """Attention whose keys and values come from the layer's input; so do queries, except in the query layer.

    It goes through transformers' interface of attention functions, by which vLLM puts in its own.
    """

    def __init__(self, config: PanguConfig, layer: int) -> None:
        """Create the projections."""
        super().__init__()
        width = config.hidden_size
        self.config, self.layer_idx, self.drop = config, layer, config.attn_pdrop
        self.head_size = width // config.num_heads
        self.scaling = self.head_size**-0.5
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.c_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self,
        x: Tensor,
        asked: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        turn: PanguRotation | None,
        **others: Any,
    ) -> Tensor:
        """Return [batch, new, hidden] for x, asked [batch, new, hidden] and a bool mask [batch, 1, new, all]."""
        query, key, value = (
            projected.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for projected in (self.q_proj(asked), self.k_proj(x), self.v_proj(x))
        )
        if turn is not None:
            query, key = turn(query), turn(key)
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        drop = self.drop if self.training else 0.0
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        mixed, _ = attend(self, query, key, value, mask, scaling=self.scaling, dropout=drop, **others)
        return self.c_proj(mixed.reshape(*x.shape[:-1], -1))


class PanguMLP(nn.Module):
    """Feed-forward layer: up, activation, down."""

    def __init__(self, config: PanguConfig) -> None:
        """Create the two matrices."""
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)
        self.act = ACT2FN[config.activation_function]

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, new, hidden] for x of that shape."""
        return self.c_proj(self.act(self.c_fc(x)))


class PanguBlock(nn.Module):
    """Transformer block: x + Attention(LN(x)), then x + MLP(LN(x))."""

    def __init__(self, config: PanguConfig, layer: int) -> None:
        """Create the sublayers."""
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.attn = PanguAttention(config, layer)
        self.ln_2 = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.mlp = PanguMLP(config)
        self.drop = nn.Dropout(config.resid_pdrop)

    def forward(self, x: Tensor, asked: Tensor | None, *where: Any, **others: Any) -> Tensor:
        """Return the block's output; `asked`: position vectors of the query layer, which are not normed, else None."""
        normed = self.ln_1(x)
        x = x + self.drop(self.attn(normed, normed if asked is None else asked, *where, **others))
        return x + self.drop(self.mlp(self.ln_2(x)))


class PanguPreTrainedModel(PreTrainedModel):
    """Properties that transformers and vLLM ask for."""

    config_class = PanguConfig
    base_model_prefix = "transformer"
    _input_embed_layer = "wte"
    _supports_sdpa = True
    _supports_attention_backend = True
    supports_gradient_checkpointing = True


class PanguModel(PanguPreTrainedModel):
    """PanGu-α without its head."""

    def __init__(self, config: PanguConfig) -> None:
        """Create embeddings, blocks and final norm."""
        super().__init__(config)
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.turns = config.position_embedding_type == "rotary"
        if not self.turns:
            self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.wqe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(PanguBlock(config, layer) for layer in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Callable[..., Tensor] | None = None
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast | tuple[Tensor, Cache | None]:
        """Return [batch, new, hidden], which the head takes unchanged, and the cache; `return_dict=False`: as a tuple.

        `inputs_embeds`, token embeddings [batch, new, hidden], may replace `input_ids`; `others` go to the attention
        function. All else is as for `PanguForCausalLM`.
        """
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError(f"cache and past_key_values differ; this version of transformers takes {CACHE}")
        x = self.wte(input_ids) if inputs_embeds is None else inputs_embeds
        cache = past_key_values if cache is None else cache
        if self.training and self.gradient_checkpointing:
            cache = None  # a layer that is computed again would extend it twice
        elif cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        batch, new, _ = x.shape
        if position_ids is None:
            if attention_mask is None:
                position_ids = torch.arange(past, past + new, device=x.device).expand(batch, new)
            else:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        mask, turn, window = None, None, self.config.max_position_embeddings
        if self.config._attn_implementation in ("eager", "sdpa"):  # others find their texts' limits themselves
            # with that many tokens only, as the comparison waits for the device
            if past + new > window and (last := int(position_ids.max())) >= window:
                raise ValueError(
                    f"a text of {last + 1} tokens: the model has positions for {window} "
                    "(max_position_embeddings); shorten the input or max_new_tokens"
                )
            places = torch.arange(past + new, device=x.device)
            mask = (places <= places[past:, None])[None, None]
            if attention_mask is not None:
                mask = mask & attention_mask[:, None, None, :].bool() | (places == places[past:, None])
        if self.turns:
            size = self.config.hidden_size // self.config.num_heads
            turn = PanguRotation(position_ids, size, self.config.rope_theta, x.dtype)
        else:
            x = x + self.wpe(position_ids)
        x = self.drop(x)
        *blocks, query_layer = self.h
        for block in blocks:
            x = self._layer(block, others, x, None, mask, cache, turn)
        # the final norm stands before the query layer, and nothing is normed after it
        x = self._layer(query_layer, others, self.ln_f(x), self.wqe(position_ids), mask, cache, turn)
        if return_dict is False:
            return x, cache
        return BaseModelOutputWithPast(last_hidden_state=x, **{CACHE: cache})

    def _layer(self, layer: nn.Module, others: dict[str, Any], *arguments: Any) -> Tensor:
        """Return a layer's output, recomputed in backward if transformers has turned gradient checkpointing on."""
        if self.gradient_checkpointing and self.training and self._gradient_checkpointing_func is not None:
            return self._gradient_checkpointing_func(partial(layer.__call__, **others), *arguments)
        return layer(*arguments, **others)


class PanguForCausalLM(PanguPreTrainedModel, GenerationMixin):
    """PanGu-α with its head, which is the token embedding."""

    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: PanguConfig) -> None:
        """Create the model."""
        super().__init__(config)
        self.transformer = PanguModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Return the logits of every next token.

        Args:
            input_ids: [batch, new], the tokens that are not in the cache yet.
            attention_mask: [batch, all], 0 where a token is padding.
            position_ids: [batch, new]; None: counted from each row's first token that is not padding.
            past_key_values: The cache; it is extended.
            labels: [batch, new], the input itself; -100 does not count.
            use_cache: Create a cache if there is none.
            cache: `past_key_values` as transformers from 5.24 on calls it, also in the result.
            others: For the attention function.

        Raises:
            ValueError: A text is longer than the model's window, or two caches are given.
        """
        others |= {"use_cache": use_cache, "cache": cache, "return_dict": False}
        hidden, cache = self.transformer(input_ids, attention_mask, position_ids, past_key_values, **others)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
