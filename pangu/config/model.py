"""The configuration of the architecture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Count, Length, Positive, Share

MOST_LAYERS = 1000
"""Of the deepest Transformers that were trained (DeepNet, Wang et al. 2022)."""


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's rotary embedding for texts longer than those of pretraining (Grattafiori et al. 2024, section 3.4.2,
    and its released code): pairs that turn slowly turn slower still, those that turn fast stay as they are."""

    factor: Annotated[float, Bounds(least=1)]
    """Pairs with fewer than `low_freq_factor` turns in the original texts turn so many times slower."""
    low_freq_factor: Positive
    """Turns in `original_sequence` tokens up to which a pair is slow."""
    high_freq_factor: Positive
    """Turns from which on a pair is fast; between the two the frequency is interpolated."""
    original_sequence: Length
    """Tokens in a sample of pretraining."""


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. Nothing in here depends on how the model is spread over devices."""

    kind: Literal["pangu", "gpt"]
    """`pangu`: PanGu-α (a query layer on top of the blocks); `gpt`: the GPT-2/GPT-3 decoder."""
    layers: Annotated[int, Bounds(least=1, most=MOST_LAYERS)]
    """Number of Transformer layers. PanGu-α counts its query layer, as the paper does (2.6B: 31 blocks + 1 query)."""
    hidden: Annotated[int, Bounds(least=1, most=2**20)]
    """Width of the residual stream."""
    heads: Count
    """Number of attention heads; must divide `hidden` unless `head_dim` is given."""
    vocab: Length
    """Number of rows of the word embedding."""
    sequence: Length
    """Tokens in a training sample, and rows of the position (and query) table where there is one."""
    ffn: Annotated[int, Bounds(least=1, most=2**24)] | None
    """Width of the feed-forward layer; null means 4 x `hidden`, whatever the activation."""
    activation: Literal["gelu_tanh", "gelu", "fast_gelu", "swiglu"]
    """`gelu_tanh`: tanh approximation, as the released PanGu-α weights and GPT-2; `gelu`: the exact erf form;
    `fast_gelu`: x·sigmoid(1.702x); `swiglu` (Shazeer 2020): silu(gate)·up, two matrices of `ffn` columns each."""
    norm: Literal["layernorm", "rmsnorm"]
    """`layernorm` (Ba et al. 2016); `rmsnorm` (Zhang & Sennrich 2019): neither mean nor bias."""
    norm_placement: Literal["pre", "post"]
    """`pre`: x + sublayer(norm(x)), as GPT-2 and PanGu-α; `post`: norm(x + sublayer(x)), as Vaswani et al. 2017. The
    final norm stays either way."""
    biases: bool | Literal["attention", "qkv"]
    """Linear layers add a bias: true: all; `attention`: all of attention; `qkv`: queries, keys and values only (Qwen2);
    false: none. A layer norm keeps its own either way."""
    tied_head: bool
    """The word embedding is the output matrix as well; false: the head has its own, `head.weight`."""
    kv_heads: Count | None
    """Number of key and value heads, each serving `heads` / `kv_heads` neighbouring query heads (grouped-query
    attention, Ainslie et al. 2023); must divide `heads`. null: as many as `heads`."""
    positions: Literal["learned", "rope", "alibi", "relative"]
    """`learned`: a table of position vectors; `rope` (Su et al. 2021): queries and keys turn by their positions;
    `alibi` (Press et al. 2022): scores fall linearly with the distance, by a slope of each head; `relative` (T5, Raffel
    et al. 2020): each head learns a bias for each bucket of distances, in one table for all layers. Only `learned` has
    position vectors; PanGu-α's query layer keeps its own table whatever this says."""
    rope_base: Positive | None
    """With `rope`, pair i of a head turns by position x `rope_base`^(-2i / head size); null means 10000. Must be null
    with other positions."""
    relative_buckets: Annotated[int, Bounds(least=2, most=2**20)] | None
    """With `relative`, number of buckets; null means 32. Must be null with other positions."""
    relative_distance: Length | None
    """With `relative`, distance in tokens from which on all share the last bucket; null means 128. Must be null with
    other positions."""
    window: Length | None
    """Sliding window: a query sees so many latest keys, its own among them; null: all."""
    residual_scores: bool
    """RealFormer (He et al. 2021): each layer adds the attention scores of the layer below, before bias and mask, to
    its own. Needs `attention=reference`, which `auto` takes then."""
    dropout: Share
    """Probability of dropping an element of the embedding sum, the attention output and the feed-forward output."""
    attention_dropout: Share
    """Probability of dropping an attention probability."""
    norm_eps: Positive
    """Epsilon inside the root of every norm."""
    init_std: Positive
    """Standard deviation of initial weights; outputs into the residual stream get `init_std` / sqrt(2 x `layers`)."""
    final_norm: Literal["before_query", "after_query"]
    """Where PanGu-α's final norm stands. `before_query`: as the released 2.6B and 13B compute it; `after_query`: as the
    pipelined MindSpore build (200B) does. GPT has no query layer and accepts only `before_query`."""
    attention: Literal["auto", "reference", "sdpa", "cudnn", "flash", "flex", "flash_attn"]
    """Attention kernel. `reference`: explicit scores and fp32 softmax; `sdpa`: torch's scaled_dot_product_attention;
    `cudnn`: the same by cuDNN; `flash`: torch's flash attention, which skips other documents and what is outside of the
    window; `flex`: torch's FlexAttention, without attention dropout; `flash_attn`: the package flash-attn; all but the
    first two on GPUs, `cudnn`, `flash` and `flash_attn` in bf16 and fp16. `auto`: the fastest one on this device, timed
    at the start and named in the log."""

    # Younger than the first run folders, whose config.yaml lacks them: the defaults are what those runs computed.
    head_dim: Annotated[int, Bounds(least=1, most=2**16)] | None = None
    """Width of one attention head; null means `hidden` / `heads`."""
    qk_norm: bool = False
    """Each head's queries and keys pass a norm of the kind of `norm` before they turn; all heads share its gain
    (Dehghani et al. 2023, section 2; Qwen3)."""
    rope_scaling: RopeScaling | None = None
    """With `rope`, slows the slow pairs down for texts longer than those of pretraining; null: none are. Must be null
    with other positions."""

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer with the default filled in."""
        return self.ffn if self.ffn is not None else 4 * self.hidden

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.head_dim if self.head_dim is not None else self.hidden // self.heads

    @property
    def head_size_key(self) -> str:
        """Where `head_size` comes from, for messages."""
        return "model.head_dim" if self.head_dim is not None else "model.hidden / model.heads"

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.head_size * self.heads

    @property
    def rotary_base(self) -> float:
        """Base of the rotary angles with the paper's default filled in."""
        return self.rope_base if self.rope_base is not None else 10000.0

    @property
    def num_relative_buckets(self) -> int:
        """Buckets of distances with T5's default filled in."""
        return self.relative_buckets if self.relative_buckets is not None else 32

    @property
    def furthest_relative(self) -> int:
        """Distance of the last bucket with T5's default filled in."""
        return self.relative_distance if self.relative_distance is not None else 128

    @property
    def query_layer(self) -> int | None:
        """Number of PanGu-α's query layer, the last one; None: GPT has none."""
        return self.layers - 1 if self.kind == "pangu" else None

    @property
    def norms_before_query(self) -> bool:
        """Whether the final norm belongs to the query layer, whose input it norms, rather than to the head."""
        return self.query_layer is not None and self.final_norm == "before_query"

    def has_biases(self, where: Literal["qkv", "output", "mlp"]) -> bool:
        """Whether queries, keys and values, the attention's output, or the feed-forward layer add a bias."""
        return self.biases is True or (self.biases, where) in {
            ("qkv", "qkv"),
            ("attention", "qkv"),
            ("attention", "output"),
        }

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.head_size * (self.kv_heads if self.kv_heads is not None else self.heads)
