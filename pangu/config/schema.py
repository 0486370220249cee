"""The configuration of a run: frozen dataclasses, one docstring under every field.

Nothing here is changed after it is built, and this module imports only the standard library, so that a planner or a
test can make thousands of configurations without importing torch. `pangu.config.build` fills these classes from plain
dictionaries and `pangu.config.checks` finds contradictions between fields.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ModelConfig:
    """The architecture. Nothing in here depends on how the model is spread over devices."""

    kind: Literal["pangu", "gpt"]
    """`pangu`: PanGu-α (a query layer on top of the blocks); `gpt`: the GPT-2/GPT-3 decoder."""
    layers: int
    """Number of Transformer layers. PanGu-α counts its query layer, as the paper does (2.6B: 31 blocks + 1 query)."""
    hidden: int
    """Width of the residual stream."""
    heads: int
    """Number of attention heads; must divide `hidden`."""
    vocab: int
    """Number of rows of the word embedding."""
    sequence: int
    """Tokens in a training sample, and rows of the position (and query) table where there is one."""
    ffn: int | None
    """Width of the feed-forward layer; null means 4 x `hidden`, whatever the activation."""
    activation: Literal["gelu_tanh", "gelu", "fast_gelu", "swiglu"]
    """`gelu_tanh`: tanh approximation, as the released PanGu-α weights and GPT-2; `gelu`: the exact erf form;
    `fast_gelu`: x·sigmoid(1.702x); `swiglu` (Shazeer 2020): silu(gate)·up, two matrices of `ffn` columns each."""
    norm: Literal["layernorm", "rmsnorm"]
    """`layernorm` (Ba et al. 2016); `rmsnorm` (Zhang & Sennrich 2019): neither mean nor bias."""
    norm_placement: Literal["pre", "post"]
    """`pre`: x + sublayer(norm(x)), as GPT-2 and PanGu-α; `post`: norm(x + sublayer(x)), as Vaswani et al. 2017. The
    final norm stays either way."""
    biases: bool
    """Linear layers add a bias. A layer norm keeps its own either way."""
    tied_head: bool
    """The word embedding is the output matrix as well; false: the head has its own, `head.weight`."""
    kv_heads: int | None
    """Number of key and value heads, each serving `heads` / `kv_heads` neighbouring query heads (grouped-query
    attention, Ainslie et al. 2023); must divide `heads`. null: as many as `heads`."""
    positions: Literal["learned", "rope"]
    """`learned`: a table of position vectors; `rope` (Su et al. 2021): queries and keys turn by their positions and
    there is no such table. PanGu-α's query layer keeps its own table either way."""
    rope_base: float | None
    """With `rope`, pair i of a head turns by position x `rope_base`^(-2i / head size); null means 10000. Must be null
    with `learned`."""
    dropout: float
    """Probability of dropping an element of the embedding sum, the attention output and the feed-forward output."""
    attention_dropout: float
    """Probability of dropping an attention probability."""
    norm_eps: float
    """Epsilon inside the root of every norm."""
    init_std: float
    """Standard deviation of initial weights; outputs into the residual stream get `init_std` / sqrt(2 x `layers`)."""
    final_norm: Literal["before_query", "after_query"]
    """Where PanGu-α's final norm stands. `before_query`: as the released 2.6B and 13B compute it; `after_query`: as the
    pipelined MindSpore build (200B) does. GPT has no query layer and accepts only `before_query`."""
    attention: Literal["auto", "reference", "sdpa"]
    """Attention kernel. `reference`: explicit scores and fp32 softmax; `sdpa`: torch's scaled_dot_product_attention;
    `auto`: the faster of the two for the device and precision, named in the log."""

    @property
    def ffn_size(self) -> int:
        """Width of the feed-forward layer with the default filled in."""
        return self.ffn if self.ffn is not None else 4 * self.hidden

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @property
    def rotary_base(self) -> float:
        """Base of the rotary angles with the paper's default filled in."""
        return self.rope_base if self.rope_base is not None else 10000.0

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.head_size * (self.kv_heads if self.kv_heads is not None else self.heads)


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over devices."""

    tensor: int
    """Devices that share every matrix (tensor parallelism)."""
    pipeline: int
    """Stages that the layers are spread over (pipeline parallelism)."""
    data: int | None
    """Replicas that share the batch (data parallelism); null means all devices that remain."""
    sequence: bool
    """Sequence parallelism: the tensor-parallel devices also share norms, dropout and residuals, each with its part of
    the sequence."""
    zero: Literal[0, 1, 2, 3]
    """ZeRO stage: what is sharded over the data-parallel replicas. 0 nothing, 1 optimizer state, 2 also gradients,
    3 also parameters."""
    bucket_mib: float
    """Gradients are summed over replicas in buckets of about this size, each as soon as it is complete."""


@dataclass(frozen=True)
class BatchConfig:
    """How many sequences a step sees. Gradient accumulation = global_size / (micro_size x data-parallel size)."""

    global_size: int
    """Sequences per optimizer step, over all replicas."""
    micro_size: int
    """Sequences that one replica computes at a time."""


@dataclass(frozen=True)
class MemoryConfig:
    """What is recomputed instead of kept."""

    recompute: Literal["none", "selective", "full"] | int
    """`none`: keep all activations; `selective`: compute some parts of every layer again in backward; `full`: keep each
    layer's input only; a number: do so in that many layers, from the first on."""
    selective: tuple[Literal["attention", "activation"], ...]
    """The parts that `selective` computes again. `attention`: scores and probabilities, which are large and cheap
    (fused kernels keep none of them anyway); `activation`: the output of the feed-forward layer's non-linearity."""

    @property
    def recomputed_layers(self) -> int | None:
        """How many layers are computed again; None for all."""
        if isinstance(self.recompute, int):
            return self.recompute
        return None if self.recompute == "full" else 0

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """Parts of every layer that are computed again."""
        return self.selective if self.recompute == "selective" else ()


@dataclass(frozen=True)
class LossConfig:
    """The head and the loss."""

    chunk: int | None
    """Tokens of a micro-batch whose logits exist at a time; they are computed again in backward. null: all, kept."""


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scale, used by fp16 alone (Micikevicius et al. 2018, section 3.2)."""

    initial: float
    """First scale."""
    growth_interval: int
    """Steps without overflow after which the scale is doubled."""
    minimum: float
    """The scale is never halved below this; an overflow there stops the run."""


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Master weights, gradient accumulation, norms, softmax and loss are fp32 (fp64 in fp64) always."""

    compute: Literal["fp32", "bf16", "fp16", "fp64"]
    """Format of weights and activations in forward and backward. fp64 is for exact comparisons."""
    loss_scale: LossScaleConfig | None
    """Needed by fp16, null for every other format."""


@dataclass(frozen=True)
class AdamConfig:
    """AdamW (Loshchilov & Hutter 2019, Algorithm 2), by torch's own implementation."""

    name: Literal["adam"]
    """Selects the optimizer."""
    lr: float
    """Peak learning rate."""
    betas: tuple[float, float]
    """Decay of the first and second moment."""
    eps: float
    """Added to the root of the second moment."""
    weight_decay: float
    """Decoupled weight decay; biases and norms are excluded."""
    clip: float | None
    """Largest global gradient norm; null does not clip."""


@dataclass(frozen=True)
class LambConfig:
    """LAMB (You et al. 2020, Algorithm 2; Algorithm 1 in the PanGu-α training notes)."""

    name: Literal["lamb"]
    """Selects the optimizer."""
    lr: float
    """Peak learning rate."""
    betas: tuple[float, float]
    """Decay of the first and second moment."""
    eps: float
    """Keeps the update finite; see `eps_inside_root`."""
    eps_inside_root: bool
    """true: m / sqrt(v + eps), as the paper's first version; false: m / (sqrt(v) + eps), as most code."""
    weight_decay: float
    """Decay inside the layer-wise update; biases and norms are excluded unless `exclude_vectors` is false."""
    exclude_vectors: bool
    """true: biases and norms get neither decay nor a layer-wise ratio."""
    max_ratio: float | None
    """Largest layer-wise trust ratio (MindSpore clips at 10); null does not clip, as the algorithm says."""
    clip: float | None
    """Largest global gradient norm; null does not clip."""


@dataclass(frozen=True)
class LrScheduleConfig:
    """Learning rate as a pure function of the number of optimizer updates made so far."""

    shape: Literal["cosine", "linear", "constant", "wsd"]
    """Form after the warm-up. `wsd`: warm-up, stable, then a linear decay over the last `decay_steps`."""
    warmup_steps: int
    """Updates of linear warm-up: update i (from 0) uses peak x (i + 1) / warmup_steps, so the first is not wasted."""
    decay_steps: int | None
    """cosine and linear: update at which `min_lr` is reached, counted from update 0 (null: train.steps). wsd: length of
    the final decay (null: a tenth of train.steps). Not for `constant`."""
    decay_from: Literal["warmup", "start"]
    """Where the cosine or line begins: at the end of the warm-up, or at update 0 as in MindSpore's PanGu-α code."""
    min_lr: float
    """Floor that the decay ends on."""


@dataclass(frozen=True)
class PackingConfig:
    """How tokens become samples and masks. The rules are those of PanGu-α's data pipeline."""

    eod: int | None
    """Id that ends a document; null where the data has none."""
    pad: int | None
    """Id of padding. A position whose *input* is this id does not count in the loss; null where there is none."""
    reset_mask: bool
    """Tokens do not attend across the end of a document."""
    reset_positions: bool
    """Position ids restart at 0 after the end of a document."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Turns text into ids."""

    kind: Literal["sentencepiece", "pangu", "huggingface"]
    """`sentencepiece`: the model file as it is; `pangu`: jieba, then SentencePiece, as PanGu-α's corpus was made;
    `huggingface`: a local folder that transformers' AutoTokenizer loads."""
    path: str
    """The `.model` file, or the folder."""


@dataclass(frozen=True)
class StdlibData:
    """The sources and docstrings of the Python standard library: real text that is on every machine."""

    kind: Literal["stdlib"]
    """Selects the data source."""
    folder: str
    """Where the text, the SentencePiece model and the indexed files are cached. The model is trained with
    `model.vocab` pieces."""
    validation_fraction: float
    """Share of the documents held out, chosen by a hash of their names."""
    packing: PackingConfig
    """Documents, masks and padding."""


@dataclass(frozen=True)
class IndexedData:
    """Indexed token files (`PREFIX.bin` and `PREFIX.idx`, Megatron's format), as tools/preprocess_data.py writes."""

    kind: Literal["indexed"]
    """Selects the data source."""
    train: tuple[str, ...]
    """Prefixes, e.g. [/data/web, /data/books]."""
    weights: tuple[float, ...] | None
    """One for each prefix of `train`: samples are drawn in proportion to them. null: in proportion to their tokens."""
    validation: tuple[str, ...]
    """Prefixes of held-out data, read in proportion to their tokens; may be empty if `validation.every` is 0."""
    tokenizer: TokenizerConfig | None
    """Used to sample text from the model; null samples nothing."""
    packing: PackingConfig
    """Documents, masks and padding."""


@dataclass(frozen=True)
class SyntheticData:
    """Tokens drawn from a counter-based generator: for measuring speed, nothing can be learned from them."""

    kind: Literal["synthetic"]
    """Selects the data source."""
    packing: PackingConfig
    """Documents, masks and padding."""


@dataclass(frozen=True)
class TrainConfig:
    """The run itself."""

    steps: int
    """Optimizer steps of the whole run, those before a resume included."""
    seed: int
    """Initial weights, data order and dropout are functions of this number."""
    output: str
    """Run folder: resolved config, metrics, plots, checkpoints, summary."""
    device: Literal["auto", "cpu", "cuda"]
    """`auto`: the accelerator if there is one."""


@dataclass(frozen=True)
class ValidationConfig:
    """Perplexity on held-out data."""

    every: int
    """Steps between validations, which also happen at the end; 0 turns validation off."""
    sequences: int
    """Held-out sequences in one validation."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved and where a run begins."""

    every: int
    """Steps between checkpoints; the last step is always saved. 0 saves nothing at all."""
    keep: int
    """Newest checkpoints that are kept; 0 keeps all."""
    resume: str
    """`auto`: continue if the run folder holds a checkpoint; `none`: refuse a run folder that holds one; otherwise the
    path of a checkpoint folder to continue from."""


@dataclass(frozen=True)
class MetricsConfig:
    """Where the figures of a run go besides metrics.jsonl."""

    every: int
    """Steps between progress lines; every step is in metrics.jsonl."""
    tensorboard: bool
    """Write TensorBoard events into the run folder."""
    wandb: Literal["auto", "online", "offline", "off"]
    """Weights & Biases. `auto`: online if the machine is logged in, otherwise offline into the run folder."""
    wandb_project: str
    """Project name there."""


@dataclass(frozen=True)
class SampleConfig:
    """Text drawn from the model at the end of the run."""

    tokens: int
    """Number of tokens after each prompt; 0 samples nothing."""
    prompts: tuple[str, ...]
    """Beginnings to continue."""
    temperature: float
    """Softmax temperature; 0 takes the most probable token."""
    top_k: int
    """Sample among the k most probable tokens; 0 among all."""


@dataclass(frozen=True)
class RunConfig:
    """Everything that `pretrain.py` runs from."""

    model: ModelConfig
    """Architecture."""
    parallel: ParallelConfig
    """Layout over devices."""
    batch: BatchConfig
    """Batch sizes."""
    memory: MemoryConfig
    """Recompute."""
    loss: LossConfig
    """Head and loss."""
    precision: PrecisionConfig
    """Number formats."""
    optimizer: AdamConfig | LambConfig
    """Optimizer, chosen by its `name`."""
    lr_schedule: LrScheduleConfig
    """Learning rate over the run."""
    data: StdlibData | IndexedData | SyntheticData
    """Data source, chosen by its `kind`."""
    train: TrainConfig
    """Steps, seed, run folder, device."""
    validation: ValidationConfig
    """Held-out perplexity."""
    checkpoint: CheckpointConfig
    """Saving and resuming."""
    metrics: MetricsConfig
    """Trackers."""
    sample: SampleConfig
    """Text sampled at the end."""
    dry_run: bool
    """Check the configuration, print what each device would hold and do, and stop."""
