"""PanGu-α (Zeng et al. 2021) for transformers: blocks, then one query layer that asks by position for the next token.

This file goes with exported weights and needs torch and transformers only; load the folder with
`AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`. Weights have the names of the community's port.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

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


class PanguAttention(nn.Module):
    """Attention whose keys and values come from the layer's input; so do queries, except in the query layer."""

    def __init__(self, config: PanguConfig, layer: int) -> None:
        """Create the projections."""
        super().__init__()
        width = config.hidden_size
        self.layer, self.heads, self.drop = layer, config.num_heads, config.attn_pdrop
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.c_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, x: Tensor, asked: Tensor, mask: Tensor, cache: Cache | None, turn: PanguRotation | None
    ) -> Tensor:
        """Return [batch, new, hidden] for x, asked [batch, new, hidden] and a bool mask [batch, 1, new, all]."""
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projected in (self.q_proj(asked), self.k_proj(x), self.v_proj(x))
        )
        if turn is not None:
            query, key = turn(query), turn(key)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        drop = self.drop if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=drop)
        return self.c_proj(mixed.transpose(1, 2).flatten(2))


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

    def forward(
        self, x: Tensor, asked: Tensor | None, mask: Tensor, cache: Cache | None, turn: PanguRotation | None
    ) -> Tensor:
        """Return the block's output; `asked`: position vectors of the query layer, which are not normed, else None."""
        normed = self.ln_1(x)
        x = x + self.drop(self.attn(normed, normed if asked is None else asked, mask, cache, turn))
        return x + self.drop(self.mlp(self.ln_2(x)))


class PanguTrunk(nn.Module):
    """PanGu-α without its head."""

    def __init__(self, config: PanguConfig) -> None:
        """Create embeddings, blocks and final norm."""
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.turns, self.rope_theta = config.position_embedding_type == "rotary", config.rope_theta
        self.head_size = config.hidden_size // config.num_heads
        if not self.turns:
            self.wpe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.wqe = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.drop = nn.Dropout(config.embd_pdrop)
        self.h = nn.ModuleList(PanguBlock(config, layer) for layer in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, config.layer_norm_epsilon)
        self.gradient_checkpointing = False
        self._gradient_checkpointing_func: Callable[..., Tensor] | None = None

    def forward(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: Cache | None) -> Tensor:
        """Return [batch, new, hidden] for tokens and positions [batch, new]; the head takes it unchanged."""
        x, turn = self.wte(tokens), None
        if self.turns:
            turn = PanguRotation(positions, self.head_size, self.rope_theta, x.dtype)
        else:
            x = x + self.wpe(positions)
        x = self.drop(x)
        *blocks, query_layer = self.h
        for block in blocks:
            x = self._layer(block, x, None, mask, cache, turn)
        # the final norm stands before the query layer, and nothing is normed after it
        return self._layer(query_layer, self.ln_f(x), self.wqe(positions), mask, cache, turn)

    def _layer(self, layer: nn.Module, *arguments: Any) -> Tensor:
        """Return a layer's output, recomputed in backward if transformers has turned gradient checkpointing on."""
        if self.gradient_checkpointing and self.training and self._gradient_checkpointing_func is not None:
            return self._gradient_checkpointing_func(layer.__call__, *arguments)
        return layer(*arguments)


class PanguForCausalLM(PreTrainedModel, GenerationMixin):
    """PanGu-α with its head, which is the token embedding."""

    config_class = PanguConfig
    base_model_prefix = "transformer"
    _supports_sdpa = True
    supports_gradient_checkpointing = True
    _tied_weights_keys = {"lm_head.weight": "transformer.wte.weight"}  # noqa: RUF012

    def __init__(self, config: PanguConfig) -> None:
        """Create the model."""
        super().__init__(config)
        self.transformer = PanguTrunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """Return the token embedding."""
        return self.transformer.wte

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding; `tie_weights` shares it with the head."""
        self.transformer.wte = value

    def get_output_embeddings(self) -> nn.Module:
        """Return the head."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the head."""
        self.lm_head = value

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **_: Any,
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
            _: Ignored.

        Raises:
            ValueError: A text is longer than the model's window, or two caches are given.
        """
        if cache is not None and past_key_values is not None and cache is not past_key_values:
            raise ValueError(f"cache and past_key_values are two caches; this version of transformers takes {CACHE}")
        checkpoints = self.training and self.transformer.gradient_checkpointing
        cache = past_key_values if cache is None else cache
        if checkpoints:
            cache = None  # a layer that is computed again would extend it twice
        elif cache is None and (self.config.use_cache if use_cache is None else use_cache):
            cache = DynamicCache()
        past = 0 if cache is None else cache.get_seq_length()
        batch, new = input_ids.shape
        if attention_mask is None:
            attention_mask = torch.ones(batch, past + new, dtype=torch.long, device=input_ids.device)
        if position_ids is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past:]
        window = self.config.max_position_embeddings
        # with that many tokens only, as the comparison waits for the device
        if past + new > window and int(position_ids.max()) >= window:
            raise ValueError(
                f"a text of {int(position_ids.max()) + 1} tokens: the model has positions for {window} "
                "(max_position_embeddings); shorten the input or max_new_tokens"
            )
        places = torch.arange(past + new, device=input_ids.device)
        itself = places == places[past:, None]
        mask = (places <= places[past:, None]) & attention_mask[:, None, None, :].bool() | itself
        hidden = self.transformer(input_ids, position_ids, mask, cache)
        logits = self.lm_head(hidden)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: cache})
