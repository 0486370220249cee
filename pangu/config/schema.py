"""The configuration of a run: frozen dataclasses, one docstring under every field.

Nothing here is changed after it is built, and this module imports only the standard library, so that a planner or a
test can make thousands of configurations without importing torch. `pangu.config.build` fills these classes from plain
dictionaries and `pangu.config.checks` finds contradictions between fields.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Literal

from pangu.config.bounds import Bounds, Count, ExitStatus, Filename, Length, Natural, NotNegative, Positive
from pangu.config.data import DataConfig
from pangu.config.model import ModelConfig
from pangu.config.optimizer import AdamConfig, LambConfig, LrScheduleConfig, PrecisionConfig


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over devices."""

    tensor: Length
    """Devices that share every matrix (tensor parallelism)."""
    pipeline: Annotated[int, Bounds(least=1, most=256)]
    """Stages that the layers are spread over (pipeline parallelism)."""
    virtual: Length
    """Chunks of layers on each stage (virtual stages), as many as `schedule` allows."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v"]
    """In which order a stage computes its micro-batches: `gpipe`, `1f1b`, `interleaved` and `breadth_first` (with
    `virtual` chunks per stage), `zb_h1` (weight gradients fill the bubble), `zb_v` (two chunks per stage in a V)."""
    layers: tuple[Count, ...] | None
    """Layers of each chunk, in model order; null: cut so that all take equal time, the head counted."""
    data: Length | None
    """Replicas that share the batch (data parallelism); null means all devices that remain."""
    context: Length
    """Devices that share every sequence through the whole model (context parallelism), each with a part of its
    beginning and one of its end; twice this number divides `model.sequence`."""
    context_kind: Literal["auto", "gather", "ring", "ulysses"]
    """How attention meets the tokens of other devices. `gather`: all keys and values come at once; `ring`: those of one
    device after the other, while attention to the last ones is computed; `ulysses`: each device gets all tokens for
    some of the heads, whose number (on a tensor-parallel device) `context` divides. `auto`: `ulysses` where it can and
    sends less than `gather`, otherwise `gather`."""
    sequence: bool
    """Sequence parallelism: the tensor-parallel devices also share norms, dropout and residuals, each with its part of
    the sequence."""
    overlap_chunks: Length
    """Parts along the sequence that products with shared matrices are cut into, so that the communication of one hides
    behind the product of another. 1: products are not cut."""
    zero: Literal[0, 1, 2, 3]
    """ZeRO stage: what is sharded over the replicas, `data` x `context`. 0 nothing, 1 optimizer state, 2 also
    gradients, 3 also parameters."""
    zero_group: Length | None
    """Replicas that share optimizer state, gradients and parameters among them, e.g. those of a node (hybrid sharding);
    a divisor of `data` x `context`. null: all replicas."""
    bucket_mib: Positive | None
    """Layers are joined to buckets of about this many MiB of fp32 gradients; a bucket is what is communicated at once.
    null: 25 with `zero=0`, otherwise one layer; with `zero` 0 and 1 at least 4 for each replica that gets a piece."""
    overlap: bool
    """Communication between replicas runs while layers compute; false: one after the other, with the same results."""
    timeout_s: Annotated[float, Bounds(above=0, most=1e9)]
    """Seconds that a process waits for a message of another one before the run ends with an error. Preparing data and
    saving may take longer, but have to get on: each part of a text, each file of a save (about 1 GiB), in this time."""
    allowed: tuple[dict[str, object], ...] | None
    """Layouts to choose from, for runs whose number of processes changes: keys of this group that replace the group's
    own, e.g. [{tensor: 4, pipeline: 2}, {tensor: 4}]. The first that goes with the number of processes is taken.
    [] or null: the group itself is the layout."""
    auto: bool
    """The planner chooses this group, `batch.micro_size`, `memory.recompute` and `memory.offload` for the devices of
    `cluster`, or for those that the run finds; what is given on the command line is kept."""

    # Younger than the first run folders, whose config.yaml lacks them.
    expert: Length = 1
    """Devices, neighbours of one stage, that share the experts of each layer (expert parallelism): each has as many of
    them, and tokens travel to their experts and back. A divisor of the replicas; with `expert_tensor=1` of the devices
    of a stage."""
    expert_tensor: Length | None = None
    """Tensor-parallel devices that share each expert. null: all `tensor` of them; 1: none, so that each device has
    whole experts and sends a part of the tokens to them."""

    def bucket_bytes(self, zero: int, replicas: int) -> float:
        """Return `bucket_mib` in bytes, or what null means for a ZeRO stage and so many replicas."""
        mib = usual_bucket_mib(zero, replicas) if self.bucket_mib is None else self.bucket_mib
        return 2**20 * mib


def usual_bucket_mib(zero: int, replicas: int) -> float:
    """MiB of a bucket for so many replicas: a million numbers each, as in Megatron-LM."""
    least = 0.0 if zero else 25.0
    return least if zero >= 2 else max(least, 4.0 * replicas)


@dataclass(frozen=True)
class BatchConfig:
    """How many sequences a step sees. Gradient accumulation = global_size / (micro_size x data-parallel size)."""

    global_size: Length
    """Sequences per optimizer step, over all replicas."""
    micro_size: Length
    """Sequences that one replica computes at a time."""


@dataclass(frozen=True)
class MemoryConfig:
    """What is recomputed or moved away instead of kept."""

    recompute: Literal["none", "selective", "full"] | Natural
    """`none`: keep all activations; `selective`: compute some parts of every layer again in backward; `full`: keep each
    layer's input only; a number: do so in that many layers, from the first on."""
    selective: tuple[Literal["attention", "activation", "norm"], ...]
    """The parts that `selective` computes again. `attention`: scores and probabilities, which are large and cheap
    (fused kernels keep none of them anyway); `activation`: the output of the feed-forward layer's non-linearity;
    `norm`: outputs of norms that are not the layer's own output (two a layer with `model.norm_placement=pre`, one with
    `post`). No matrix product of theirs is done again, and nothing is sent again."""
    offload: tuple[Literal["activations", "optimizer", "parameters"], ...]
    """What waits in host memory until it is needed. `activations`: what the layers save for backward; the copies run
    beside the computation, and the last layer keeps its own. Goes with every `recompute`: with `full`, only the
    layers' inputs are left to move. `optimizer`: master weights and moments; the update is computed there, with Adam
    unit by unit while others are copied. `parameters`: with `parallel.zero=3`, this rank's share of the weights."""

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

    chunk: Length | Literal["auto"] | None
    """Tokens of a micro-batch whose logits exist at a time: gradients are made of them at once, in forward. null: all.
    `auto`: all, half, a quarter or fewer, so that their logits take about what a layer keeps for backward: the fewer,
    the larger `model.vocab` is beside 17 times `model.hidden`, but at least 1,024."""


@dataclass(frozen=True)
class TrainConfig:
    """The run itself."""

    steps: Count
    """Optimizer steps of the whole run, those before a resume included."""
    seed: Natural
    """Initial weights, data order and dropout are functions of this number."""
    output: Filename
    """Run folder: resolved config, metrics, plots, checkpoints, summary."""
    stop_after: Positive | str | None
    """Save and stop before so much time has passed since the start: seconds, or e.g. `1h30m`. The last step ends before
    it; writing the checkpoint comes on top. null: no limit."""
    stop_status: ExitStatus
    """Exit status of a run that has saved and stopped before its last step, because of a signal or `stop_after`. A
    scheduler that starts what has failed once more, as Kubernetes does, needs one that is not 0: 143."""
    check_replicas: Natural
    """Steps between checks that all copies of weights, as they compute, and of moments are the same, bit for bit; the
    run ends if they differ, and checkpoints since the last check are condemned. 0: no checks."""
    check_step: bool
    """Compare every operation of a step, as it happens, with the list that `pangu/pipeline/expand.py` makes, and end
    the run at the first difference. Use it after a change to sharding, or with a new schedule."""
    device: Literal["auto", "cpu", "cuda", "npu"]
    """`auto`: the accelerator if there is one. `npu`: Huawei's Ascend, by its plug-in torch_npu."""
    deterministic: bool
    """The same command gives the same bits again on the same devices and libraries; GPUs take longer."""
    frozen: tuple[str, ...]
    """Patterns (`layers.0.*`, `*.bias`) of names of tensors that are not trained: they have no gradient, no optimizer
    state and no decay, and are kept in the compute format only."""
    threads: Count | None = None
    """CPU threads of each process. null: the `OMP_NUM_THREADS` that you have set, otherwise this process's share of the
    cores that it may use and that its container grants. Threads that wait for one another take processor time too."""

    @property
    def stop_after_s(self) -> float | None:
        """`stop_after` in seconds. Raises ValueError if it is no time, OverflowError if it is beyond all floats."""
        if not isinstance(self.stop_after, str):
            return self.stop_after
        parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", self.stop_after)
        if not self.stop_after or parts is None:
            raise ValueError(self.stop_after)
        return float(sum(int(part or 0) * unit for part, unit in zip(parts.groups(), (3600, 60, 1), strict=True)))


@dataclass(frozen=True)
class ValidationConfig:
    """Perplexity on held-out data."""

    every: Natural
    """Steps between validations, which also happen at the end; 0 turns validation off."""
    sequences: Count
    """Held-out sequences in one validation, and as many of each source of held-out data, if there are several."""


TaskName = Literal[
    "afqmc",
    "cmnli",
    "ocnli",
    "tnews",
    "iflytek",
    "csl",
    "cluewsc2020",
    "chid",
    "cmrc2019",
    "c3",
    "cmrc2018",
    "drcd",
    "dureader",
    "webqa",
    "pd",
    "cft",
    "cmrc2017",
    "wplc",
    "lambada",
    "wikitext",
]
"""The tasks of `evaluation.tasks.catalogue`."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Benchmarks during training; the same tasks as those of scripts/evaluate.py."""

    every: Natural
    """Steps between evaluations, which also happen at the end; 0: none."""
    tasks: tuple[TaskName, ...]
    """Names of tasks, e.g. [afqmc, lambada]."""
    data: Filename | None
    """Folder with one folder of the benchmark's own files for each task, e.g. DATA/afqmc/dev.json."""
    shots: Natural
    """Examples before each question."""
    limit: Count | None
    """Questions of each task, the same ones every time; null: all."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved and where a run begins."""

    every: Natural
    """Steps between checkpoints; the last step is always saved. 0 saves nothing at all."""
    asynchronous: bool
    """Training goes on while a copy of the state is written, which takes as much host memory; an accelerator makes the
    copy beside the next step, too. false: training waits until the checkpoint is written."""
    keep: Natural
    """Newest checkpoints that are kept; 0 keeps all."""
    keep_every: Natural
    """Checkpoints at multiples of so many steps are kept for ever besides; 0: none."""
    resume: Filename
    """`auto`: continue if the run folder holds a checkpoint; `none`: refuse a run folder that holds one; otherwise the
    path of a checkpoint folder to continue from."""
    init_from: Filename | None
    """Path of a checkpoint folder: a new run begins with its weights, and with nothing else of it (fine-tuning). A run
    folder that holds a checkpoint is continued as `resume` says. null: random first weights."""
    # younger than the first run folders, whose config.yaml lacks them
    upcycle: bool = False
    """The checkpoint of `init_from` is of the same model without experts: each expert begins as a copy of the dense
    feed-forward layer in its place (Komatsuzaki et al. 2022), and the router as in a new run. The first logits are
    those of the dense model, as the weights of a token's experts add up to 1."""
    max_failed_saves: Natural = 3
    """More saves in a row than this that fail end the run."""


@dataclass(frozen=True)
class FaultsConfig:
    """Loss spikes, gradients that are not finite, slow ranks. A step with such a gradient is skipped in any case."""

    action: Literal["warn", "stop", "rollback"]
    """What follows a spike or too many skipped steps. `warn`: a line in the log; `stop`: the run ends with an error;
    `rollback`: it continues from the newest proven checkpoint, without the batches that led to the fault (Chowdhery et
    al. 2022, section 5.1), or from the seed if there is no checkpoint yet."""
    spike: Positive | None
    """A loss is a spike if it is so many standard deviations above the mean of the steps before it, or not finite.
    null: spikes are not looked for."""
    spike_window: Annotated[int, Bounds(least=2, most=2**31 - 1)]
    """Steps that the mean and the deviation are taken over; no loss is a spike before there are as many."""
    max_skipped: Natural
    """More skipped steps in a row than this are a fault."""
    skip_after: Natural
    """Batches behind the one at fault that a rollback leaves out too."""
    max_rollbacks: Count
    """The run ends with an error at a fault that comes after so many rollbacks."""
    slow_every: Natural
    """Steps between comparisons of how long the ranks compute; 0: none."""
    slow_factor: Annotated[float, Bounds(above=1)]
    """A rank is named if it computes longer than the median by this factor, beyond what its layers ask for. Time in
    which a stage waits does not count; ranks that share matrices, or weights under ZeRO-3, are slow together."""
    proven_after: Count = 50
    """Good steps after which a checkpoint is proven. A fault before that, or a second one after it, condemns the
    checkpoint, and no run continues from it unasked. The last proven one is kept whatever `checkpoint.keep` says."""


@dataclass(frozen=True)
class MetricsConfig:
    """Where the figures of a run go besides metrics.jsonl."""

    every: Count
    """Steps between progress lines; every step is in metrics.jsonl."""
    tensorboard: bool
    """Write TensorBoard events into the run folder."""
    wandb: Literal["auto", "online", "offline", "off"]
    """Weights & Biases. `auto`: online if the machine is logged in, otherwise offline into the run folder."""
    wandb_project: Filename
    """Project name there."""
    trust_ratios: bool
    """Write LAMB's ratio of every tensor into metrics.jsonl and the trackers, each step."""


@dataclass(frozen=True)
class SampleConfig:
    """Text drawn from the model at the end of the run."""

    tokens: Natural
    """Number of tokens after each prompt, as far as `model.sequence` has room for both; 0 samples nothing."""
    prompts: tuple[str, ...]
    """Beginnings to continue."""
    temperature: NotNegative
    """Softmax temperature; 0 takes the most probable token."""
    top_k: Natural
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
    """Recompute and offload."""
    loss: LossConfig
    """Head and loss."""
    precision: PrecisionConfig
    """Number formats."""
    optimizer: AdamConfig | LambConfig
    """Optimizer, chosen by its `name`."""
    lr_schedule: LrScheduleConfig
    """Learning rate over the run."""
    data: DataConfig
    """Data source, chosen by its `kind`."""
    train: TrainConfig
    """Steps, seed, run folder, device."""
    validation: ValidationConfig
    """Held-out perplexity."""
    evaluate: EvaluateConfig
    """Benchmarks during training."""
    checkpoint: CheckpointConfig
    """Saving and resuming."""
    faults: FaultsConfig
    """Steps that go wrong."""
    metrics: MetricsConfig
    """Trackers."""
    sample: SampleConfig
    """Text sampled at the end."""
    compile: bool | Literal["auto"]
    """torch.compile makes one code of all layers of a kind for training, which takes minutes the first time. It needs
    Triton or, on a CPU, a C++ compiler; results differ in rounding. `auto`: a layer is timed at start, both ways."""
    profile: bool
    """Record the tenth step (the last one, if there are fewer): where its time goes on each rank, in the log, in
    summary.json and plots/profile.png; plots/profile.json, a trace that ui.perfetto.dev opens;
    plots/pipeline_measured.svg and .png."""
    dry_run: bool | Literal["all"]
    """Check the configuration, carry out a step of the fullest device without devices, print what it would hold and do,
    and stop. `all`: of each distinct role of a rank."""
    cluster: dict[str, object] | None = None
    """Devices that a plan is made for, see `config.cluster`; null: nothing is said of time."""

    @property
    def loss_chunk(self) -> int | None:
        """Tokens whose logits exist at a time; None: those of the whole micro-batch."""
        if self.loss.chunk != "auto":
            return self.loss.chunk
        # 2 bytes of each logit, 34 of each hidden unit (Korthikanti et al. 2022, table 2), and both twice in fp32. Of a
        # power of two chunks, which divide the tokens of a sequence, each is of one shape. For each the sum of the
        # matrix's gradient is read and written, for which a device waits if it has fewer than 1,024 tokens
        times_larger = self.model.vocab / (17 * self.model.hidden)
        of_sequence = self.model.sequence // self.parallel.context
        tokens = of_sequence * self.batch.micro_size
        halvings = min(round(math.log2(times_larger)), (tokens // 1024).bit_length() - 1)
        num_chunks = math.gcd(of_sequence, 2 ** max(0, halvings))
        return None if num_chunks == 1 else tokens // num_chunks
