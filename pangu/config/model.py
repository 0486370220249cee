"""The configuration of the architecture."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Count, Length, Natural, NotNegative, Positive, Share
from pangu.config.sparse import SparseConfig

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
class RouterConfig:
    """How a mixture-of-experts layer sends tokens to experts, and keeps their loads alike."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Of the logits of a token, in fp32: `softmax` over all experts (Shazeer et al. 2017), or each expert's `sigmoid`
    (DeepSeek-V3, arXiv 2412.19437)."""
    normalised: bool = True
    """The weights of a token's experts are divided by their sum, as Mixtral and DeepSeek-V3 do."""
    scale: Positive = 1.0
    """Factor of the weights, as DeepSeek's `routed_scaling_factor`."""
    selection: Literal["top", "group_limited", "each_group"] = "top"
    """Where a token's experts may be: `top`: those with the best scores; `group_limited`: the best of the
    `groups_per_token` groups that it likes best, by the sum of the two best scores in each (DeepSeek-V3);
    `each_group`: equally many of every group (Pangu Pro MoE, arXiv 2505.21411). Of equal scores the first expert."""
    groups: Count = 1
    """Groups of neighbouring experts; must divide `model.experts`. 1 with `selection` = top."""
    groups_per_token: Count | None = None
    """With `group_limited`, groups that a token's experts lie in at most. Must be null with other selections."""
    balance: Literal["none", "sequence", "global", "bias"] = "sequence"
    """`sequence`: a loss of each sequence, number of experts x sum over experts of (share of choices x mean score)
    (Fedus et al. 2021, section 2.2; DeepSeek-V3, equation 17), a mean over the sequences of the global batch; `global`:
    the same with the shares of the global batch of the step before; `bias`: no loss, but a number beside each expert's
    score where experts are chosen, which falls while the expert has more than the mean load (DeepSeek-V3, section
    2.1.2); `none`."""
    balance_weight: NotNegative = 0.01
    """Factor of the loss of `sequence` and `global`."""
    bias_rate: NotNegative = 0.001
    """What a step adds to or takes from the number of `bias`."""
    z_loss: NotNegative = 0.0
    """Factor of the mean over tokens of logsumexp(logits)^2, which keeps logits small (Zoph et al. 2022, section
    3.3)."""


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
    attention: Literal["auto", "reference", "sdpa", "cudnn", "flash", "flex", "flash_attn", "triton"]
    """Attention kernel. `reference`: explicit scores and fp32 softmax; `sdpa`: torch's scaled_dot_product_attention;
    `cudnn`: the same by cuDNN; `flash`: torch's flash attention, which skips other documents and what is outside of the
    window; `flex`: torch's FlexAttention; `flash_attn`: the package flash-attn; `triton`: our own flash attention. All
    but the first two are for GPUs, and all of these but `flex` for bf16 and fp16. `reference`, `flex` and `triton` drop
    the same probabilities in every layout. `auto`: the fastest one here, with `attention_dropout` of those three, timed
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
    sparse: SparseConfig | None = None
    """Block-sparse attention: a query sees the keys of some blocks only, counted from the start of its document, and of
    these what `window` leaves; null: all. FlexAttention skips the others, other kernels mask them."""

    experts: Count | None = None
    """Routed experts of a mixture-of-experts layer, each a feed-forward layer; null: all layers are dense."""
    experts_per_token: Count | None = None
    """Routed experts that compute a token; null means 2. Must be null without `experts`."""
    expert_ffn: Annotated[int, Bounds(least=1, most=2**24)] | None = None
    """Width of one expert; null means the width of a dense layer. Must be null without `experts`."""
    shared_experts: Natural = 0
    """Experts that compute every token, beside the routed ones: one feed-forward layer of so many times `expert_ffn`.
    Must be 0 without `experts`."""
    dense_layers: Natural = 0
    """Layers, from the first on, that stay dense. PanGu-α's query layer is dense whatever this says."""
    expert_every: Count = 1
    """Of so many layers after those, each time the last one has experts; 1: all have."""
    expert_capacity: Positive | None = None
    """In training an expert computes so many times its even share of each sequence at most; what the sequence sends it
    beyond that, in the order of tokens, passes by (Lepikhin et al. 2020). null: nothing is dropped."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Must be as it is without `experts`."""

    @property
    def explicit(self) -> ModelConfig:
        """The same model with the values that null stands for written out."""
        ropes, relates, experts = self.positions == "rope", self.positions == "relative", self.experts is not None
        return replace(
            self,
            ffn=self.ffn_size,
            kv_heads=self.heads if self.kv_heads is None else self.kv_heads,
            head_dim=self.head_size,
            rope_base=self.rotary_base if ropes else None,
            relative_buckets=self.num_relative_buckets if relates else None,
            relative_distance=self.furthest_relative if relates else None,
            experts_per_token=self.num_chosen if experts else None,
            expert_ffn=self.expert_size if experts else None,
        )

    @property
    def without_experts(self) -> ModelConfig:
        """The same model with dense layers only."""
        return replace(
            self,
            experts=None,
            experts_per_token=None,
            expert_ffn=None,
            shared_experts=0,
            dense_layers=0,
            expert_every=1,
            expert_capacity=None,
            router=RouterConfig(),
        )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        place = layer - self.dense_layers
        is_expert = place >= 0 and place % self.expert_every == self.expert_every - 1
        return self.experts is not None and is_expert and layer != self.query_layer

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers with experts."""
        return tuple(layer for layer in range(self.layers) if self.has_experts(layer))

    @property
    def num_chosen(self) -> int:
        """Routed experts of a token with the default filled in."""
        return self.experts_per_token if self.experts_per_token is not None else 2

    @property
    def expert_size(self) -> int:
        """Width of one expert with the default filled in."""
        return self.expert_ffn if self.expert_ffn is not None else self.ffn_size

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
