"""The configuration of the architecture."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Count, Length, Natural, NotNegative, Positive, Share
from pangu.config.rope import RopeScaling
from pangu.config.sparse import SparseConfig

MOST_LAYERS = 1000
"""Depth of the deepest Transformers that were trained (DeepNet, Wang et al. 2022)."""


LayerPattern = Count | tuple[Natural, ...] | None
"""N: the last layer of every N; or a list of layers, counted from 0; null: none."""


@dataclass(frozen=True)
class RouterConfig:
    """Routing of tokens to experts in a mixture-of-experts layer, and its load balancing."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Score function of a token's logits, in fp32: `softmax` over all experts (Shazeer et al. 2017), or each expert's
    `sigmoid` (DeepSeek-V3, arXiv 2412.19437)."""
    normalised: bool = True
    """Divide the weights of a token's experts by their sum, as Mixtral and DeepSeek-V3 do."""
    scale: Positive = 1.0
    """Factor of the expert weights, as DeepSeek's `routed_scaling_factor`."""
    selection: Literal["top", "group_limited", "group_limited_best", "each_group"] = "top"
    """Selection of a token's experts. `top`: the best scores; `group_limited`: the best within the `groups_per_token`
    groups with the largest sum of their two best scores (DeepSeek-V3); `group_limited_best`: with the best scores
    (DeepSeek-V2); `each_group`: equally many from each group (Pangu Pro MoE, arXiv 2505.21411). Ties go to the first
    expert."""
    groups: Count = 1
    """Groups of consecutive experts; must divide `model.experts`. 1 with `selection` = top."""
    groups_per_token: Count | None = None
    """With `group_limited` or `group_limited_best`, the maximum number of groups that a token's experts come from. Must
    be null otherwise."""
    balance: Literal["none", "sequence", "global", "bias"] = "sequence"
    """`sequence`: a loss per sequence, number of experts x sum over experts of (fraction of choices x mean score)
    (Fedus et al. 2021, section 2.2; DeepSeek-V3, equation 17), averaged over the sequences of the global batch;
    `global`: the same with the fractions of the previous step's global batch; `bias`: no loss, but a bias added to each
    expert's score for selection only, which falls while the expert has more than the mean load (DeepSeek-V3, section
    2.1.2); `none`."""
    balance_sequences: Count = 1
    """Consecutive sequences of the global batch that share the fractions of `sequence`: their tokens are counted
    together, as in the loss of an expert-parallel group (Pangu Ultra MoE, arXiv 2505.04519) and in Megatron-LM's
    `aux_loss` of a micro-batch. Must divide the sequences that an expert-parallel group computes at the same time."""
    balance_weight: NotNegative = 0.01
    """Factor of the balance loss of `sequence` and `global`."""
    bias_rate: NotNegative = 0.001
    """Change of each expert's bias per step, with `bias`."""
    z_loss: NotNegative = 0.0
    """Factor of the router z-loss, the mean over tokens of logsumexp(logits)^2, which keeps logits small (Zoph et al.
    2022, section 3.3)."""
    learned_bias: bool = False
    """Add a learned bias, initially 0, to each expert's logit before the score function (gpt-oss)."""
    learned_scale: bool = False
    """Multiply each expert's weights by its own learned scale, initially 1 (Pangu Pro MoE's released code)."""


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    kv_rank: Count
    """Width of the normalized latent vector that all heads' keys and values are computed from; generation keeps it."""
    q_rank: Count | None = None
    """Width of the normalized latent vector that queries are computed from; null: they are computed from the input."""
    nope_head_dim: Count
    """Elements of each head's queries and keys that do not rotate."""
    rope_head_dim: Count
    """Elements that rotate, after the others; all heads share those of their keys."""
    value_head_dim: Count
    """Width of each head's values, at most that of its queries."""
    norm_eps: Positive | None = None
    """Epsilon inside the root in the norms of the latent vectors; null means that of the other norms, `model.norm_eps`.
    The released code of DeepSeek and openPangu uses 1e-6, whatever the other norms use."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of the model, independent of its layout over devices."""

    kind: Literal["pangu", "gpt"]
    """`pangu`: PanGu-α (a query layer on top of the blocks); `gpt`: the GPT-2/GPT-3 decoder."""
    layers: Annotated[int, Bounds(least=1, most=MOST_LAYERS)]
    """Number of Transformer layers. PanGu-α counts its query layer, as the paper does (2.6B: 31 blocks + 1 query)."""
    hidden: Annotated[int, Bounds(least=1, most=2**20)]
    """Width of the residual stream."""
    heads: Annotated[int, Bounds(least=1, most=2**20)]
    """Number of attention heads; must divide `hidden` unless `head_dim` is given."""
    vocab: Length
    """Vocabulary size: number of rows of the token embedding."""
    sequence: Length
    """Tokens in a training sample, and rows of the position (and query) embedding where there is one."""
    ffn: Annotated[int, Bounds(least=1, most=2**24)] | None
    """Width of the feed-forward layer; null means 4 x `hidden`, whatever the activation."""
    activation: Literal["gelu_tanh", "gelu", "fast_gelu", "swiglu", "clamped_swiglu", "relu", "squared_relu"]
    """`gelu_tanh`: tanh approximation, as the released PanGu-α weights and GPT-2; `gelu`: the exact erf form;
    `fast_gelu`: x·sigmoid(1.702x); `swiglu` (Shazeer 2020): silu(gate)·up, two matrices of `ffn` columns each;
    `clamped_swiglu` (gpt-oss): gate·sigmoid(1.702 gate)·(up + 1) of a gate up to 7 and an up from -7 to 7; `relu`;
    `squared_relu`: relu(x)² (So et al. 2021)."""
    norm: Literal["layernorm", "rmsnorm"]
    """`layernorm` (Ba et al. 2016); `rmsnorm` (Zhang & Sennrich 2019): no mean and no bias."""
    norm_placement: Literal["pre", "post", "sandwich"]
    """`pre`: x + sublayer(norm(x)), as GPT-2 and PanGu-α; `post`: norm(x + sublayer(x)), as Vaswani et al. 2017;
    `sandwich`: x + norm(sublayer(norm(x))), as Pangu Ultra (arXiv 2504.07866, section 2.1), whose second norms start
    with a gain of 1 / sqrt(`layers`). There is always a final norm."""
    biases: bool | Literal["attention", "qkv"]
    """Bias terms of the linear layers. true: all; `attention`: all of attention; `qkv`: queries, keys and values only
    (Qwen2); false: none. Layer norms always keep theirs."""
    tied_head: bool
    """Use the token embedding as the output matrix; false: the head has its own, `head.weight`."""
    kv_heads: Count | None
    """Number of key and value heads, each shared by `heads` / `kv_heads` neighboring query heads (grouped-query
    attention, Ainslie et al. 2023); must divide `heads`. null: as many as `heads`."""
    positions: Literal["learned", "rope", "alibi", "relative"]
    """Position encoding. `learned`: an embedding of positions; `rope` (Su et al. 2021): queries and keys are rotated by
    their positions; `alibi` (Press et al. 2022): scores fall linearly with the distance, with one slope per head;
    `relative` (T5, Raffel et al. 2020): each head learns a bias for each bucket of distances, in one table for all
    layers. Only `learned` adds position vectors; PanGu-α's query layer always keeps its own table."""
    rope_base: Positive | None
    """Base of rotary embeddings: pair i of a head rotates by position x `rope_base`^(-2i / head size); null means
    10000. Must be null unless `positions` is `rope`."""
    relative_buckets: Annotated[int, Bounds(least=2, most=2**20)] | None
    """Number of distance buckets with `relative`; null means 32. Must be null with other positions."""
    relative_distance: Length | None
    """Distance in tokens from which all positions share the last bucket, with `relative`; null means 128. Must be null
    with other positions."""
    window: Length | None
    """Sliding window in tokens: a query attends to its own key and to those before it in the window; null: to all."""
    residual_scores: bool
    """RealFormer (He et al. 2021): each layer adds the attention scores of the layer below, before bias and mask, to
    its own. Needs `attention=reference`, which `auto` then chooses."""
    dropout: Share
    """Probability of dropping an element of the embedding sum, the attention output and the feed-forward output."""
    attention_dropout: Share
    """Probability of dropping an attention probability."""
    norm_eps: Positive
    """Epsilon inside the root of every norm."""
    init_std: Positive
    """Standard deviation of initial weights; see `scaled_init`."""
    final_norm: Literal["before_query", "after_query"]
    """Position of PanGu-α's final norm. `before_query`: as the released 2.6B and 13B compute it; `after_query`: as the
    pipelined MindSpore build (200B) does. GPT has no query layer and accepts only `before_query`."""
    attention: Literal["auto", "reference", "sdpa", "cudnn", "flash", "flex", "flash_attn", "triton"]
    """Attention kernel. `reference`: explicit scores and fp32 softmax; `sdpa`: torch's scaled_dot_product_attention;
    `cudnn`: cuDNN's attention; `flash`: torch's flash attention, which skips other documents and keys outside the
    window; `flex`: torch's FlexAttention; `flash_attn`: the package flash-attn; `triton`: pangu's flash attention in
    Triton. All but the first two need a GPU, and all of these but `flex` need bf16 or fp16. `reference`, `flex` and
    `triton` drop the same probabilities in every layout. `auto`: the fastest kernel on this device (one of those three
    with `attention_dropout`), timed at the start on an accelerator and named in the log."""

    # Younger than the first run folders, whose config.yaml lacks them: the defaults are what those runs computed.
    head_dim: Annotated[int, Bounds(least=1, most=2**16)] | None = None
    """Head size: width of one attention head; null means `hidden` / `heads`."""
    qk_norm: bool = False
    """Normalize each head's queries and keys with a `norm` before rotation; all heads share its gain (Dehghani et al.
    2023, section 2; Qwen3)."""
    rope_scaling: RopeScaling | None = None
    """Slower rotation, with `rope`, for texts longer than in pretraining; null: unchanged. Must be null with other
    positions."""
    partial_rotary_factor: Annotated[float, Bounds(above=0, most=1)] = 1.0
    """Fraction of each head, from its first element on, that rotates with `rope` (GPT-NeoX, Black et al. 2022, section
    2.1.1). Must be 1 with other positions."""
    parallel_block: bool | Literal["shared_norm"] = False
    """true: the attention and the feed-forward layer both read a layer's input, each through its own norm, and their
    outputs are added (GPT-J, Wang & Komatsuzaki 2021; GPT-NeoX); `shared_norm`: both through one norm (Falcon). Needs
    `norm_placement=pre` and `kind=gpt`."""
    scaled_init: bool = True
    """true: the initial weights of projections into the residual stream have standard deviation `init_std` / sqrt(2 x
    `layers`) (Radford et al. 2019, section 2.3); false: `init_std`, as Llama and DeepSeek-V3. Pangu Ultra's TinyInit is
    false with `init_std` = sqrt(1 / (2 x `hidden` x `layers`)) (arXiv 2504.07866, section 2.2)."""
    embedding_norm: bool = False
    """Normalize the embedding sum (BLOOM, Le Scao et al. 2022, section 3.2.2)."""
    latent: LatentConfig | None = None
    """Multi-head latent attention, with `rope`; null: keys and values are computed from the input. Biases `qkv` are
    then those of the down-projections."""
    sparse: SparseConfig | None = None
    """Block-sparse attention: a query attends to some blocks of keys only, counted from the start of its document, and
    within `window`; null: to all. FlexAttention skips the other blocks, other kernels mask them."""

    full_layers: LayerPattern = None
    """Layers that attend to all tokens despite `window`. N: the last of every N layers (2: every other one, as
    gpt-oss); or a list, counted from 0; null: none."""
    nope_layers: LayerPattern = None
    """Layers whose queries and keys do not rotate with `rope` (NoPE, Kazemnejad et al. 2023). N: the last of every N
    layers (4: as SmolLM3); or a list, counted from 0; null: none."""
    attention_sinks: bool = False
    """Add a learned term per head, exp(sink), to the denominator of the attention softmax, so that a query need not
    attend to any key (gpt-oss, OpenAI 2025)."""

    experts: Count | None = None
    """Routed experts of a mixture-of-experts layer, each a feed-forward layer; null: all layers are dense."""
    experts_per_token: Count | None = None
    """Routed experts per token; null means 2. Must be null without `experts`."""
    expert_ffn: Annotated[int, Bounds(least=1, most=2**24)] | None = None
    """Width of one expert; null means the width of a dense layer. Must be null without `experts`."""
    shared_experts: Natural = 0
    """Number of experts that every token passes through, besides the routed ones, computed as one feed-forward layer
    that is this many times as wide as `expert_ffn`. Must be 0 without `experts`."""
    dense_layers: Natural = 0
    """Number of leading layers that stay dense. PanGu-α's query layer is always dense."""
    expert_every: Count = 1
    """Period of expert layers after the leading dense ones: the last layer of each period has experts; 1: all do."""
    expert_capacity: Positive | None = None
    """Capacity factor in training: an expert computes at most this multiple of its even share of each sequence; tokens
    beyond that, in order, skip it (Lepikhin et al. 2020). null: nothing is dropped."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Routing and load balancing. Must keep its defaults without `experts`."""
    mtp_layers: Annotated[int, Bounds(least=0, most=16)] = 0
    """Multi-token prediction (DeepSeek-V3, section 2.2): number of modules in training, each one more layer, that
    predict the tokens after the next one. Validation and generation do not use them."""

    @property
    def explicit(self) -> ModelConfig:
        """Model with all null defaults written out."""
        ropes, relates, experts = self.positions == "rope", self.positions == "relative", self.experts is not None
        return replace(
            self,
            ffn=self.ffn_size,
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.head_size if self.latent is None else None,
            rope_base=self.rotary_base if ropes else None,
            relative_buckets=self.num_relative_buckets if relates else None,
            relative_distance=self.furthest_relative if relates else None,
            experts_per_token=self.num_chosen if experts else None,
            expert_ffn=self.expert_size if experts else None,
        )

    @property
    def without_experts(self) -> ModelConfig:
        """Model with dense layers only."""
        keys = ("experts", "experts_per_token", "expert_ffn", "expert_capacity")
        numbers = ("shared_experts", "dense_layers", "expert_every")
        defaults = {key: getattr(ModelConfig, key) for key in (*keys, *numbers)}
        return replace(self, **defaults, router=RouterConfig())

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer is a mixture of experts."""
        place = layer - self.dense_layers
        is_expert = place >= 0 and place % self.expert_every == self.expert_every - 1
        return self.experts is not None and is_expert and layer != self.query_layer

    def has_window(self, layer: int) -> bool:
        """Return whether a layer attends within `window` only."""
        return self.window is not None and not is_among(layer, self.full_layers)

    def has_rope(self, layer: int) -> bool:
        """Return whether the queries and keys of a layer rotate."""
        return self.positions == "rope" and not is_among(layer, self.nope_layers)

    def kind_of_layer(self, layer: int) -> tuple[bool, ...]:
        """Return what a layer computes: layers of equal kinds compute alike, with weights of equal shapes."""
        return layer == self.query_layer, self.has_experts(layer), self.has_window(layer), self.has_rope(layer)

    @property
    def num_blocks(self) -> int:
        """Number of layers with those of multi-token prediction, which come last."""
        return self.layers + self.mtp_layers

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Indices of the layers with experts."""
        return tuple(layer for layer in range(self.num_blocks) if self.has_experts(layer))

    @property
    def num_chosen(self) -> int:
        """Routed experts per token, default filled in."""
        return self.experts_per_token if self.experts_per_token is not None else 2

    @property
    def expert_size(self) -> int:
        """Width of one expert, default filled in."""
        return self.expert_ffn if self.expert_ffn is not None else self.ffn_size

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer, default filled in."""
        return self.ffn if self.ffn is not None else 4 * self.hidden

    @property
    def is_gated(self) -> bool:
        """True if a feed-forward layer has a gate."""
        return self.activation in ("swiglu", "clamped_swiglu")

    @property
    def head_size(self) -> int:
        """Width of one head's queries and keys, default filled in."""
        if self.latent is not None:
            return self.latent.nope_head_dim + self.latent.rope_head_dim
        return self.head_dim if self.head_dim is not None else self.hidden // self.heads

    @property
    def head_size_key(self) -> str:
        """Key or formula that `head_size` comes from, for messages."""
        if self.latent is not None:
            return "model.latent.nope_head_dim + model.latent.rope_head_dim"
        return "model.head_dim" if self.head_dim is not None else "model.hidden / model.heads"

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.head_size * self.heads

    @property
    def values_size(self) -> int:
        """Width of the values of all query heads together, which the output projection reads."""
        return self.query_size if self.latent is None else self.latent.value_head_dim * self.heads

    @property
    def rotary_size(self) -> int:
        """Number of elements of each head that rotate."""
        if self.latent is not None:
            return self.latent.rope_head_dim
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def rotary_base(self) -> float:
        """Base of the rotary angles, with the paper's default filled in."""
        return self.rope_base if self.rope_base is not None else 10000.0

    @property
    def num_relative_buckets(self) -> int:
        """Number of distance buckets, with T5's default filled in."""
        return self.relative_buckets if self.relative_buckets is not None else 32

    @property
    def furthest_relative(self) -> int:
        """Distance of the last bucket, with T5's default filled in."""
        return self.relative_distance if self.relative_distance is not None else 128

    @property
    def query_layer(self) -> int | None:
        """Index of PanGu-α's query layer, the last one; None: GPT has none."""
        return self.layers - 1 if self.kind == "pangu" else None

    @property
    def norms_before_query(self) -> bool:
        """True if the final norm normalizes the query layer's input, rather than the head's."""
        return self.query_layer is not None and self.final_norm == "before_query"

    def has_biases(self, where: Literal["qkv", "output", "mlp"]) -> bool:
        """Return whether queries, keys and values, the attention output, or the feed-forward layer have a bias."""
        return self.biases is True or (self.biases, where) in {
            ("qkv", "qkv"),
            ("attention", "qkv"),
            ("attention", "output"),
        }

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads together."""
        return self.head_size * (self.kv_heads if self.kv_heads is not None else self.heads)

    def ranks_per_key_head(self, tensor: int) -> int:
        """Return how many neighboring ones of `tensor` ranks have queries of the same key head."""
        return max(1, tensor // (self.kv_heads if self.kv_heads is not None else self.heads))

    def splits_heads(self, tensor: int) -> bool:
        """Return whether `tensor` ranks can split the heads: whole key heads each, or equal pieces of one."""
        kv_heads, pieces = self.kv_heads if self.kv_heads is not None else self.heads, self.ranks_per_key_head(tensor)
        return self.heads % tensor == 0 and kv_heads * pieces % tensor == 0 and self.head_size % pieces == 0


def is_among(layer: int, pattern: LayerPattern) -> bool:
    """Return whether a pattern has a layer."""
    if isinstance(pattern, int):
        return layer % pattern == pattern - 1
    return pattern is not None and layer in pattern
