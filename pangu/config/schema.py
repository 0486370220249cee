"""Configuration of a run: frozen dataclasses, one docstring under every field.

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
from pangu.config.checkpoint import CheckpointConfig
from pangu.config.data import DataConfig
from pangu.config.faults import FaultsConfig
from pangu.config.model import ModelConfig
from pangu.config.optimizer import (
    LrScheduleConfig,
    OptimizerConfig,
    ParameterGroup,
    PrecisionConfig,
    WeightDecayScheduleConfig,
)


@dataclass(frozen=True)
class ParallelConfig:
    """Layout of the model over devices."""

    tensor: Length
    """Tensor-parallel size: number of devices that split each matrix; a divisor or a multiple of `model.kv_heads`."""
    pipeline: Annotated[int, Bounds(least=1, most=256)]
    """Pipeline-parallel size: number of stages that the layers are divided into."""
    virtual_stages: Length
    """Number of layer chunks per pipeline stage; the values that work depend on `schedule`."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "breadth_first", "zb_h1", "zb_v"]
    """Pipeline schedule: `gpipe`, `1f1b`, `interleaved` and `breadth_first` (several chunks per stage), `zb_h1` (weight
    gradients fill the bubble), `zb_v` (two chunks per stage in a V)."""
    layers: tuple[Count, ...] | None
    """Number of layers in each chunk, in model order; null: balanced so that all take equal time, head included."""
    data: Length | None
    """Data-parallel size: number of replicas that split the batch; null means all remaining devices."""
    context: Length
    """Context-parallel size: number of devices that split each sequence, each holding one slice of its first and one of
    its second half; twice this number must divide `model.sequence`."""
    context_kind: Literal["auto", "gather", "ring", "ulysses"]
    """Communication of context-parallel attention. `gather`: all-gather keys and values; `ring`: receive them from one
    device after another, overlapped with attention to the previous ones; `ulysses`: an all-to-all gives each device all
    tokens of some heads, whose number (per tensor-parallel device) `context` must divide. `auto`: `ulysses` where it is
    possible and sends less than `gather`, otherwise `gather`."""
    sequence: bool
    """Sequence parallelism: tensor-parallel devices also split norms, dropout and residuals along the sequence."""
    overlap_chunks: Length
    """Number of chunks a tensor-parallel matmul is split into along the sequence, so that communication overlaps
    computation. 1: no split."""
    zero: Literal[0, 1, 2, 3]
    """ZeRO stage: states sharded over the replicas (`data` x `context`). 0: none, 1: optimizer state, 2: also
    gradients, 3: also parameters."""
    zero_group: Length | None
    """Replicas that shard states among themselves, e.g. those of a node (hybrid sharding); a divisor of `data` x
    `context`. null: all replicas."""
    bucket_mib: Positive | None
    """Bucket size: layers are grouped into buckets of about this many MiB of fp32 gradients, each communicated at once.
    null: 25 with `zero=0`, otherwise one layer; with `zero` 0 and 1 at least 4 for each replica that gets a shard."""
    overlap: bool
    """Overlap communication between replicas with computation; false: one after the other, with the same results."""
    timeout_s: Annotated[float, Bounds(above=0, most=1e9)]
    """Timeout for a message from another process, seconds; the run then ends with an error. Preparing data and saving
    may take longer, but must make progress in this time: a part of a text, a file of a save (about 1 GiB)."""
    layouts: tuple[dict[str, object], ...] | None
    """Layouts to choose from, for runs whose number of processes changes: keys of this group that replace the group's
    own, e.g. [{tensor: 4, pipeline: 2}, {tensor: 4}]. The first that fits the number of processes is used. [] or null:
    the group itself is the layout."""
    auto: bool
    """Let the planner choose this group, `batch.micro_size`, `memory.recompute` and `memory.offload` for the devices of
    `cluster`, or for those that the run finds; command-line overrides always win."""

    # Younger than the first run folders, whose config.yaml lacks them.
    expert: Length = 1
    """Expert-parallel size: number of neighboring devices of a stage that divide the experts of each layer; tokens
    travel to their experts and back (all-to-all). Divides the replicas; with `expert_tensor=1` a stage's devices."""
    expert_tensor: Length | None = None
    """Tensor-parallel devices that split each expert. null: all `tensor` of them; 1: none, so that each device holds
    full experts and sends them a part of the tokens."""
    fixed_exchange: bool = False
    """In training, always exchange as many rows between devices that divide experts as the router could choose at most,
    so that the host never waits for the actual number. It costs memory and traffic where that is more than an even
    share; where it is not, e.g. with `model.router.selection=each_group`, sizes are always fixed."""
    two_batch_overlap: bool = False
    """In training, alternate between the two halves of a micro-batch: attention and experts of one half hide the token
    exchange of the other. It needs `expert` and `batch.micro_size` greater than 1."""
    expert_imbalance: Annotated[float, Bounds(least=1)] = 1.0
    """Tokens of the busiest of the devices that divide experts, relative to the mean, that plans and dry runs assume:
    they describe that device, for which the others wait. 1: even loads. `model.expert_capacity` limits it, and it has
    no effect where `expert` is 1 or sizes are fixed. Training does not read it."""

    context_ulysses: Length = 1
    """Neighboring devices within `context` that exchange heads (`ulysses`) where `context_kind=ring`: blocks of this
    many devices form the ring (USP, arXiv 2405.07719). Divides `context` and the heads of a tensor-parallel device."""

    def bucket_bytes(self, zero: int, replicas: int) -> float:
        """Return `bucket_mib` in bytes, with null resolved for a ZeRO stage and a number of replicas."""
        mib = usual_bucket_mib(zero, replicas) if self.bucket_mib is None else self.bucket_mib
        return 2**20 * mib


def usual_bucket_mib(zero: int, replicas: int) -> float:
    """Return the default bucket size in MiB: a million elements per replica, as in Megatron-LM."""
    least = 0.0 if zero else 25.0
    return least if zero >= 2 else max(least, 4.0 * replicas)


@dataclass(frozen=True)
class BatchStage:
    """First steps of a run, with smaller batches or shorter sequences."""

    until: Count
    """Step of the run, counting skipped ones, after which the stage ends; it begins where the previous stage ends."""
    global_size: Length | None = None
    """Sequences per step; at most `batch.global_size`. null: `batch.global_size`."""
    sequence: Length | None = None
    """Tokens per sequence; a divisor of `model.sequence`, whose samples are cut into as many sequences. null:
    `model.sequence`."""


@dataclass(frozen=True)
class BatchConfig:
    """Sequences per step. Gradient accumulation = global_size / (micro_size x data-parallel size), rounded up."""

    global_size: Length
    """Sequences per optimizer step, over all replicas."""
    micro_size: Length
    """Sequences per micro-batch of one replica."""
    # younger than the first run folders
    stages: tuple[BatchStage, ...] = ()
    """Stages of growing batches and sequences, e.g. [{until: 100, global_size: 16, sequence: 512}]. After the last one,
    `global_size` and `model.sequence` hold. A step's tokens are a multiple of `model.sequence`."""

    def accumulation(self, replicas: int) -> int:
        """Return the number of micro-batches per replica and step."""
        return -(-self.global_size // (self.micro_size * replicas))


@dataclass(frozen=True)
class KernelsConfig:
    """Kernels that NVIDIA's apex has too; `auto`: the faster one, timed at the start where it is installed on a GPU."""

    norm: Literal["auto", "torch", "apex"] = "auto"
    """Layer norms and RMS norms."""
    weight_gradient: Literal["auto", "torch", "apex"] = "auto"
    """Matmuls that add gradients of weights in bf16 or fp16 to their sums in fp32."""
    optimizer: Literal["auto", "torch", "apex"] = "auto"
    """Update by AdamW or LAMB, and the norm of gradients."""


@dataclass(frozen=True)
class MemoryConfig:
    """Recomputation and offload of activations, optimizer state and parameters."""

    recompute: Literal["none", "selective", "full"] | Natural
    """Activation recomputation. `none`: keep all activations; `selective`: recompute parts of every layer in backward;
    `full`: keep each layer's input only; a number: do so in that many leading layers."""
    selective: tuple[Literal["attention", "activation", "norm"], ...]
    """Parts that `selective` recomputes. `attention`: scores and probabilities, which are large and cheap (fused
    kernels keep none of them anyway); `activation`: the output of the feed-forward layer's non-linearity; `norm`:
    outputs of norms that are not the layer's own output (two per layer with `model.norm_placement=pre`, one with
    `post`). No matmul and no communication is repeated."""
    offload: tuple[Literal["activations", "optimizer", "parameters"], ...]
    """States kept in host memory until they are needed. `activations`: tensors saved for backward; the copies overlap
    computation, and the last layer keeps its own. Works with every `recompute`: with `full`, only the layers' inputs
    are left to move. `optimizer`: master weights and moments; the update runs on the host, with Adam unit by unit while
    others are copied. `parameters`: with `parallel.zero=3`, this rank's shard of the weights."""

    @property
    def recomputed_layers(self) -> int | None:
        """Number of fully recomputed layers; None: all."""
        if isinstance(self.recompute, int):
            return self.recompute
        return None if self.recompute == "full" else 0

    @property
    def recomputed_parts(self) -> tuple[str, ...]:
        """Parts of every layer that are recomputed."""
        return self.selective if self.recompute == "selective" else ()


@dataclass(frozen=True)
class LossConfig:
    """Output head and loss."""

    chunk: Length | Literal["auto"] | None
    """Number of tokens of a micro-batch whose logits exist at a time; their gradients are computed in the forward pass.
    null: all. `auto`: all, half, a quarter or fewer, so that their logits take about as much memory as a layer saves
    for backward: the larger `model.vocab` is relative to 17 x `model.hidden`, the fewer, but at least 1,024."""
    # younger than the first run folders
    mtp_weight: Positive = 0.1
    """Factor of the loss of multi-token prediction, the mean over its `model.mtp_layers` modules. DeepSeek-V3: 0.3,
    later 0.1."""


@dataclass(frozen=True)
class TrainConfig:
    """Steps, seed, run folder and device of a run."""

    steps: Count
    """Optimizer steps of the full run, including those before a resume."""
    seed: Natural
    """Seed of initial weights, data order and dropout."""
    output: Filename
    """Run folder: resolved config, metrics, plots, checkpoints, summary."""
    stop_after: Positive | str | None
    """Time limit from the start: seconds, or e.g. `1h30m`. The run saves and stops: its last step ends before the
    limit, and writing the checkpoint takes additional time. null: no limit."""
    stop_status: ExitStatus
    """Exit status of a run that saved and stopped before its last step because of a signal or `stop_after`. A scheduler
    that restarts failed jobs, such as Kubernetes, needs a non-zero one: 143."""
    check_replicas: Natural
    """Steps between bitwise comparisons of all copies of compute weights and moments; the run ends if they differ, and
    checkpoints since the last comparison are condemned. 0: none."""
    check_step: bool
    """Compare every operation of a step with the list that `pangu/schedule/expand.py` makes, and end the run at the
    first difference. Use it after a change to sharding, or with a new schedule."""
    device: Literal["auto", "cpu", "cuda", "npu"]
    """Device type. `auto`: the accelerator if there is one. `npu`: Huawei's Ascend, with its plug-in torch_npu."""
    deterministic: bool
    """Bitwise reproducible results on the same devices with the same library versions; slower on GPUs."""
    frozen: tuple[str, ...]
    """Patterns (`layers.0.*`, `*.bias`) of the names of tensors that are not trained: they have no gradient, optimizer
    state or decay, and are kept in the compute format only."""
    threads: Count | None = None
    """CPU threads per process. null: your `OMP_NUM_THREADS`, otherwise this process's share of the cores that it may
    use and that its container grants. Threads use CPU time even while they wait for each other."""
    alert_command: tuple[str, ...] = ()
    """Program and its arguments, started without a shell on failures and at the end of the run, with a line of JSON on
    its standard input (`event`, `message`, `run`, ...). Training does not wait for it. []: none."""

    @property
    def stop_after_s(self) -> float | None:
        """`stop_after` in seconds. Raises ValueError if it is not a time, OverflowError if it exceeds all floats."""
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
    """Steps between validations; one also follows the last step. 0: none."""
    sequences: Count
    """Held-out sequences per validation, and per source of held-out data, if there are several."""


_Choice = Literal["afqmc", "cmnli", "ocnli", "tnews", "iflytek", "csl", "cluewsc2020", "chid", "cmrc2019", "c3"]
_Text = Literal["cmrc2018", "drcd", "dureader", "webqa", "pd", "cft", "cmrc2017", "wplc", "lambada", "wikitext"]
TaskName = Literal[_Choice, _Text]
"""Names of the tasks in `tasks.catalogue`."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Benchmarks during training, the tasks of scripts/evaluate.py."""

    every: Natural
    """Steps between evaluations; one also follows the last step. 0: none."""
    tasks: tuple[TaskName, ...]
    """Names of tasks, e.g. [afqmc, lambada]."""
    data: Filename | None
    """Folder with one folder of the benchmark's own files per task, e.g. DATA/afqmc/dev.json."""
    shots: Natural
    """Few-shot examples before each question."""
    limit: Count | None
    """Questions per task, the same ones every time; null: all."""


@dataclass(frozen=True)
class MetricsConfig:
    """Destinations of a run's metrics besides metrics.jsonl."""

    every: Count
    """Steps between progress lines; every step is in metrics.jsonl."""
    tensorboard: bool
    """Write TensorBoard events into the run folder."""
    wandb: Literal["auto", "online", "offline", "off"]
    """Weights & Biases. `auto`: online if the machine is logged in, otherwise offline into the run folder."""
    wandb_project: Filename
    """Project name in Weights & Biases and all `trackers`."""
    trust_ratios: bool
    """Write LAMB's trust ratio of every tensor into metrics.jsonl and the trackers, each step."""
    trackers: tuple[str, ...] = ()
    """Other trackers: mlflow, comet, aim, swanlab, or names that packages give as entry points of `pangu.trackers`."""
    run_name: Filename | None = None
    """Name of the run in wandb and trackers; null: they choose one."""
    run_group: Filename | None = None
    """Name of a group of runs in wandb and trackers."""
    run_tags: tuple[str, ...] = ()
    """Tags of the run in wandb and trackers."""
    prometheus_port: Annotated[int, Bounds(least=1, most=65535)] | None = None
    """Port on which the first process serves the latest metrics as text for Prometheus; null: none."""
    prometheus_host: Filename = "127.0.0.1"
    """Address on which they are served; 0.0.0.0: all addresses of the machine, for everyone who can reach them."""


@dataclass(frozen=True)
class SampleConfig:
    """Text drawn from the model at the end of the run."""

    tokens: Natural
    """Tokens to generate after each prompt, or as many as fit in `model.sequence`; 0: no samples."""
    prompts: tuple[str, ...]
    """Prompts to continue."""
    temperature: NotNegative
    """Softmax temperature; 0: always the most probable token."""
    top_k: Natural
    """Sample from the k most probable tokens; 0: from all."""


@dataclass(frozen=True)
class RunConfig:
    """Complete configuration of `pretrain.py`."""

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
    optimizer: OptimizerConfig
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
    """Detection of faults and reaction to them."""
    metrics: MetricsConfig
    """Trackers."""
    sample: SampleConfig
    """Text sampled at the end."""
    compile: bool | Literal["auto"]
    """Compile layers with torch.compile for training, which takes minutes the first time. It needs Triton or, on a CPU,
    a C++ compiler; results differ in rounding. Attention over split sequences and experts run between graphs. `auto`:
    time a layer both ways at the start."""
    profile: bool
    """Profile the tenth step (the last one, if there are fewer): time by category on each rank, in the log,
    summary.json and plots/profile.png; a trace for ui.perfetto.dev in plots/profile.json; plots/pipeline_measured.*."""
    dry_run: bool | Literal["all"]
    """Check the configuration, simulate a step of the rank with the highest peak memory without devices, print its
    memory and operations, and stop. `all`: each distinct role of a rank."""
    kernels: KernelsConfig = KernelsConfig()
    """Kernels of apex or torch."""
    weight_decay_schedule: WeightDecayScheduleConfig | None = None
    """Weight decay over the run; null: always `optimizer.weight_decay`."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """Tensors with a learning rate or weight decay of their own."""
    cluster: dict[str, object] | None = None
    """Cluster that plans are made for, see `config.cluster`; null: no time estimates."""

    @property
    def rows_at_once(self) -> tuple[int, ...]:
        """Sequences that a layer computes at once: those of a micro-batch, or of each half of one."""
        micro = self.batch.micro_size
        return (-(-micro // 2), micro // 2) if self.parallel.two_batch_overlap else (micro,)

    @property
    def loss_chunk(self) -> int | None:
        """Tokens whose logits exist at a time; None: those of the full micro-batch."""
        if self.loss.chunk != "auto":
            return self.loss.chunk
        # 2 bytes of each logit, 34 of each hidden unit (Korthikanti et al. 2022, table 2), and both twice in fp32. Of a
        # power of two chunks, which divide the tokens of a sequence, each is of one shape. For each the sum of the
        # matrix's gradient is read and written, for which a device waits if it has fewer than 1,024 tokens
        times_larger = self.model.vocab / (17 * self.model.hidden)
        local_sequence = self.model.sequence // self.parallel.context
        tokens = local_sequence * self.batch.micro_size
        halvings = min(round(math.log2(times_larger)), (tokens // 1024).bit_length() - 1)
        num_chunks = math.gcd(local_sequence, 2 ** max(0, halvings))
        return None if num_chunks == 1 else tokens // num_chunks
