"""Trainer of a rank, and one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from pangu.checkpoint.files import Slice
from pangu.checkpoint.writing import state_of
from pangu.collectives.reduce import all_reduce, largest
from pangu.config.optimizer import MuonConfig
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch, with_mtp_targets
from pangu.layers.apex import UPDATES, USES
from pangu.layers.builder import DTYPES, Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.fp8 import Fp8Scales
from pangu.layers.fp8_blocks import BLOCKS
from pangu.layers.kernel_choice import kernels_of
from pangu.layers.largest_logits import LargestLogits
from pangu.layers.weight_gradient_store import WeightGradientStore
from pangu.models.compiled import CompiledBlocks
from pangu.models.groups import group_options
from pangu.models.language_model import Options, build_model
from pangu.models.parameters import logical_shapes
from pangu.optim.build import make_optimizer
from pangu.optim.lamb import Lamb
from pangu.optim.loss_scale import LossScale
from pangu.optim.lr_schedule import learning_rate, weight_decay
from pangu.optim.moments import MOMENTS
from pangu.optim.qk_clip import QkClip
from pangu.pipeline.runner import Runner
from pangu.pipeline.stages import Stages, one_micro_batch, plan_stages
from pangu.topology.copy_stream import DeviceEvent, host_memory
from pangu.topology.mesh import Mesh
from pangu.training.autotune import Choices
from pangu.training.step_check import StepCheck
from pangu.zero.gradients import Norms, fuses_gradient_accumulation
from pangu.zero.muon_exchange import MuonExchange
from pangu.zero.sharded import Owned, ShardedParameters
from pangu.zero.stage_parameters import FlatSpec
from pangu.zero.weight_gradients import GradientAccumulator
from pangu.zero.weight_sums import NUMBERS

SUMMING = "adding up loss and norm"
"""Activity of a rank that has its reduced gradients and waits for the sums of all ranks."""


@dataclass(frozen=True)
class StepResult:
    """Result of one step, equal on every rank."""

    loss: float
    """Mean over the global batch's target tokens."""
    grad_norm: float
    """Gradient norm before clipping; not finite if the step was skipped."""
    lr: float
    loss_scale: float
    flags: tuple[bool, ...] = ()
    """Flags that any rank raised."""
    norms: Norms = field(default_factory=list)
    """Norms of this rank's gradients before reduction, on the device, if the step was skipped."""
    experts: dict[str, float] | None = None
    """Load statistics of the experts, if there are any."""
    mtp_loss: float | None = None
    """Mean over the modules of multi-token prediction of their mean losses, without their factor."""
    max_attention_logit: float | None = None
    """Largest attention logit of all heads, with QK-clip."""
    weight_sums: Tensor | None = None
    """Sums of this rank's weights (`WeightSums.rows`), on the device, if copies on several ranks differ."""

    @property
    def skipped(self) -> bool:
        """True if the weights did not change."""
        return not math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class PendingResult:
    """Result of a step, in flight to the host."""

    numbers: Tensor
    """Loss, norm, loss scale, loss of multi-token prediction, number of ranks that raised each flag, comparison of the
    weights, expert statistics and the largest attention logit: fp64, in host memory, valid after `end`."""
    lr: float
    norms: Norms
    end: DeviceEvent
    weight_sums: Tensor | None = None


class Trainer:
    """Trainer of this rank's part of the model: gradient buffers, optimizer, and the step that joins them."""

    loss_limit: float | None = None
    """Largest loss with which the next update changes weights, so that a spike can be computed again; None: any."""
    is_whole = True
    """False while an update changes weights and moments, which then belong to no step."""
    sums: Tensor | None = None
    """Norm, loss and further sums over all ranks with which the last update was made; None: not known."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, stages: Stages | None = None, choices: Choices | None = None
    ) -> None:
        """Build this rank's chunks of the model with initial weights, and a new optimizer.

        `choices`: of autotuning; None: the preferred ones. Raises ConfigError if the pipeline's schedule or the
        attention kernel does not support the configuration.
        """
        self.config = config
        self._has_mtp = config.model.mtp_layers > 0
        self.stages = stages or plan_stages(config, mesh.layout)
        self.choices = None if choices is None else asdict(choices)
        """Resolved choices of `auto`, as saved in checkpoints."""
        kernel = kernels_of(config, mesh.device)[0] if choices is None else choices.attention
        chosen = {use: getattr(choices, use, "torch") for use in USES}
        mesh.recorder.watches = config.profile or config.faults.straggler_every > 0
        self.mesh = mesh
        self.step = 0
        """Steps made, skipped ones included."""
        self.skipped = 0
        """Skipped steps, among those whose result was read."""
        self.moments_since: dict[str, int] = {}
        """Updates made before the moments of tensors that were frozen at first began."""
        self.copied = DeviceEvent(mesh.device)
        """Completion of the last save's copy of what updates change."""
        self.doing = "starting"
        """Current activity of this rank, for messages."""
        schedule, chunks = self.stages.schedule, self.stages.of(mesh.at.pipeline)
        store, self.scales = WeightGradientStore(), None
        layers_store = store if schedule.splits_backward or fuses_gradient_accumulation(mesh.device) else None
        if config.precision.matmul == "fp8":
            self.scales = Fp8Scales(logical_shapes(config.model), mesh.device)
        scales = BLOCKS.get(config.precision.matmul, self.scales)
        self.logits = LargestLogits.of_run(config, mesh.device)
        build = Builder.on(mesh, config, store=store, layers_store=layers_store, scales=scales, norm=chosen["norm"])
        build = replace(build, logits=self.logits)
        options, frozen = Options.of(config, kernel, schedule.turns), config.train.frozen
        self.model, _ = build_model(config.model, options, build, list(chunks.values()), frozen)
        self.balance = self.model.balance_on(mesh.device)
        self.parameters = ShardedParameters.of_run(self.model, chunks, mesh, config, schedule.reduce_each)
        self.parameters.norms = UPDATES[chosen["optimizer"]].norms
        store.sums = GradientAccumulator(self.parameters.gradients, self.model, chosen["weight_gradient"] == "apex")
        if self.scales is not None:
            for flat in self.parameters.flat_parameters:
                flat.stale = self.scales.keep(flat.casts_by_name)
        if config.compile is True or (choices is not None and choices.compile == "true"):
            self.model.compute = CompiledBlocks(self.model, config, kernel, schedule.splits_backward)
        trained = [(shard.placement, shard.main) for shard in self.parameters.trained_shards]
        over_ranks, orthogonalizer = self.parameters.squares.over, None
        if isinstance(config.optimizer, MuonConfig):
            compute, stage = config.precision.compute, self.parameters.stage
            orthogonalizer = MuonExchange(stage, mesh, compute, config.optimizer, self._publish).orthogonalizer
        groups = group_options(config.parameter_groups, [placement.name for placement, _ in trained])
        kernels = chosen["optimizer"]
        self.optimizer = make_optimizer(config.optimizer, trained, over_ranks, groups, kernels, orthogonalizer)
        self.clip = QkClip.of_run(config, self.parameters.rectangles())
        self.loss_scale = LossScale(config.precision.loss_scale, mesh.device)
        dtype = DTYPES[config.precision.compute]
        self.runner = Runner.on(mesh, self.model, chunks, schedule, dtype, store=store, parameters=self.parameters)
        self.check = StepCheck(self) if config.train.check_step else None

    def _publish(self, flats: Sequence[FlatSpec]) -> None:
        if self.clip is not None:
            self.clip.scale(
                {placement.name for flat in flats for placement, _ in flat.tensor_ranges(self.parameters.stage.table)}
            )
        self.parameters.publish_updated(flats)

    def state(self, every_kind: bool = False, owned: Owned = False) -> Iterator[tuple[str, Slice]]:
        """Yield this rank's rectangles as `KIND/NAME`: weights and, after the first update, the optimizer's moments."""
        kinds = ("weight", *MOMENTS) if every_kind or self.step > self.skipped else ("weight",)
        return state_of(self.parameters, self.optimizer, kinds, owned)

    def start_over(self) -> None:
        """Return to the state before the first step: initial weights of the seed, and a new optimizer."""
        self.restart_optimizer(0, 0, {})
        self.parameters.fill(self.config.train.seed)
        self.loss_scale = LossScale(self.config.precision.loss_scale, self.mesh.device)
        if self.scales is not None:
            self.scales.reset()
        if self.balance is not None:
            self.balance.reset()

    def restart_optimizer(self, step: int, skipped: int, moments_since: Mapping[str, int]) -> None:
        """Set the step counts and zero the moments.

        Bias correction counts from `moments_since`, see the attribute, and without the `skipped` steps.
        """
        self.is_whole, self.sums = False, None
        self.parameters.unsharder.wait()  # what the last update still sends would arrive in restored weights
        if self.check is not None:
            self.check.drop()  # a run goes back when it has computed the gradients of the next step
        self.step, self.skipped, self.moments_since = step, skipped, dict(moments_since)
        for shard in self.parameters.trained_shards:
            state = self.optimizer.state[shard.main]
            made = step - skipped - self.moments_since.get(shard.placement.name, 0)
            state["step"] = torch.full_like(state["step"], made)
            for moment in {*MOMENTS} & state.keys():
                state[moment].zero_()
        if isinstance(self.optimizer, Lamb):
            self.optimizer.share_steps()

    def enter_stage(self, config: RunConfig, micro_batches: int | None = None) -> None:
        """Prepare for steps with the batch and sequence length of a stage of the configuration.

        `micro_batches`: of this replica; None: as many as each has if all have equal numbers.
        """
        self.config = config
        # the layers stay where they are, however their costs change
        self.stages = replace(self.stages, schedule=plan_stages(config, self.mesh.layout, micro_batches).schedule)
        if self.check is not None:
            self.check.follow(self.stages.schedule)

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Run one step and wait for its result."""
        self.forward_backward(micro_batches)
        return self.read(self.update())

    def forward_backward(self, micro_batches: Sequence[Batch]) -> None:
        """Run forward and backward over this rank's micro-batches, and sum the gradients over the replicas.

        The loss of every token is divided by the number of target tokens of the *global* batch, so that neither the
        micro-batch size nor the number of replicas changes the gradient, however uneven the loss masks are.
        """
        if self.check is not None:
            self.check.begin()
        self.doing = "counting target tokens"
        if self._has_mtp:
            eod = self.config.data.packing.eod
            micro_batches = [with_mtp_targets(batch, self.config.model.mtp_layers, eod) for batch in micro_batches]
        batches = [batch.cut(self.model.context).to(self.mesh.device) for batch in micro_batches]
        batches = self._count_targets(batches)
        scale = (self._per_token * self.loss_scale.scale).to(self.parameters.squares.dtype)
        # masks are a function of (seed, step, sample): no generator has a state to save
        keys = [DropoutKeys(self.config.train.seed, self.step, batch.samples) for batch in batches]
        self.parameters.gradients.start_step()
        sums = self.parameters.unsharder.sums if self.parameters.gradients.digests is None else None
        if sums is not None:
            sums.start_step()
        if self.balance is not None:
            self.balance.start_step(self.loss_scale.scale, self.config.batch.global_size)
        if self.logits is not None:
            self.logits.values.fill_(-math.inf)
        self.doing = "forward and backward"
        self.runner.name = f"{self.mesh.name}, stage {self.mesh.at.pipeline}, step {self.step + 1}"
        loss_of = partial(self.model.loss_of, scale=scale)
        try:
            losses = self.runner.run(self.stages.schedule, batches, loss_of, keys, scale)
        except BaseException:
            if self.check is not None:
                self.check.stop()
            if self.runner.store is not None:
                self.runner.store.clear()
            if self.scales is not None:
                self.scales.forget_step()
            raise
        self.doing = "adding up gradients"
        if sums is not None:
            sums.add_rest()
        # the last reductions have overlapped the backward pass and these sums until here
        self.parameters.gradients.finish()
        self._loss = torch.stack(losses).double().sum(0) if losses else None
        if self._has_mtp and self._loss is not None:
            self._loss = torch.stack([self._loss[0], self._loss[1:].sum()])

    def local_norms(self) -> Norms:
        """Return the norms of this rank's unreduced gradients, and its part of the loss if it computes one."""
        norms = self.parameters.gradients.norms
        return norms if self._loss is None else [*norms, ([("loss", slice(1))], [self._loss.sum()])]

    def digest(self, batch: Batch) -> int:
        """Return a sum over the bits of the loss and of this rank's gradients of one micro-batch.

        It is computed apart from the steps; all ranks call this together, between two steps.
        """
        stages, check, gradients = self.stages, self.check, self.parameters.gradients
        schedule = one_micro_batch(stages.schedule)
        if check is not None:
            check.drop()
        self.stages, self.check, gradients.digests = replace(stages, schedule=schedule), None, []
        try:
            self.forward_backward([batch] * schedule.micro_batches)
            sums = gradients.digests if self._loss is None else [self._loss.view(torch.int64).sum(), *gradients.digests]
            # odd factors: a flipped bit changes the result, and equal changes of two sums do not cancel
            return int(sum((2 * place + 1) * one for place, one in enumerate(sums)))
        finally:
            self.stages, self.check, gradients.digests = stages, check, None
            if self.scales is not None:
                self.scales.forget_step()  # the magnitudes of this micro-batch are not those of a step

    def _count_targets(self, batches: list[Batch]) -> list[Batch]:
        """Set the divisor of the loss, and return the batches with the loss weights of multi-token prediction."""
        # the divisors are known before the backward pass, so that gradients are plain sums over micro-batches and ranks
        num_targets = torch.stack([batch.weights for batch in batches]).sum(dtype=torch.float64)
        if self._has_mtp:
            ahead = torch.stack([batch.mtp_weights for batch in batches if batch.mtp_weights is not None])
            num_targets = torch.cat([num_targets[None], ahead.sum((0, 1, 3), dtype=torch.float64)])
        per_token = 1.0 / all_reduce(num_targets, self.mesh.group("replicas")).clamp(min=1.0)
        if not self._has_mtp:
            self._per_token = per_token
            return batches
        self._per_token, factor = per_token[0], self.config.loss.mtp_weight / self.config.model.mtp_layers
        # a module's mean is over its own targets
        weights = (factor * per_token[1:] / per_token[0]).to(self.parameters.squares.dtype)[:, None]
        return [replace(batch, mtp_weights=one * weights) for batch, one in zip(batches, ahead, strict=True)]

    @property
    def result_fields(self) -> list[bool]:
        """Flags for the optional numbers in `PendingResult.numbers`, which depend on the configuration."""
        optional = self.balance, self.logits, self.parameters.unsharder.sums
        return [self._has_mtp, *(one is not None for one in optional)]

    @property
    def can_finish_alone(self) -> bool:
        """True if this rank has its gradients of the next step, and needs only `sums` of other ranks for the update."""
        needs_others = (self.scales, self.balance, self.clip) != (None,) * 3 or self.config.optimizer.name != "adam"
        return self.doing == SUMMING and not needs_others

    def update(self, flags: Sequence[bool] = (), sums: Tensor | None = None) -> PendingResult:
        """Unscale, clip, update the weights, then adjust the scale; a step with a non-finite gradient norm is skipped.

        All of that is decided on the device, without a host sync. The result of the previous step must have been read:
        the learning rate depends on the number of skipped steps. `flags` are raised for all ranks to see. `sums`: those
        that another rank received, if this rank failed in that collective; see `can_finish_alone`.
        """
        optimizer, old_scale = self.config.optimizer, self.loss_scale.scale
        self.doing = SUMMING
        compared, weight_sums, comparison = self.parameters.unsharder.sums, sums, None
        if sums is None:
            if compared is not None:
                weight_sums, comparison = compared.finish_step()
            # one collective for the norm, the loss and the flags of all ranks, and for the comparison of their weights
            sums = self.parameters.norm_and_loss(self._loss, flags, 1 + self._has_mtp, comparison)
            if self._has_mtp:
                sums[2] *= self._per_token / self.config.loss.mtp_weight
        if self.scales is not None:
            self.scales.start_update(self.mesh.group("world"))
        self.doing = "updating weights"
        norm, loss = sums[0] / old_scale, sums[1] * self._per_token
        norms = self.parameters.gradients.norms
        if self.loss_limit is not None:
            norm, norms = norm.where(loss <= self.loss_limit, math.inf), self.local_norms()
        overflow = norm.isfinite().logical_not()
        numbers = torch.cat([torch.stack([loss, norm, old_scale]), sums[2:]])
        if self.balance is not None:
            numbers = torch.cat([numbers, self.balance.finish_step(self.mesh.group("world"), overflow)])
            self.is_whole = False
        if self.logits is not None and self.clip is not None:
            self.clip.decide(largest(self.logits.values, self.mesh.group("world")), overflow)
            numbers = torch.cat([numbers, self.logits.values.amax().double().view(1)])
        # the host reads them while the next step computes
        on_host = host_memory(len(numbers), numbers.dtype, numbers.device).copy_(numbers, non_blocking=True)
        total, update = self.config.train.steps, self.step - self.skipped
        rate = learning_rate(self.config.lr_schedule, optimizer.lr, total, update)
        decay = weight_decay(self.config.weight_decay_schedule, optimizer.weight_decay, total, update)
        for group in self.optimizer.param_groups:
            group["lr"], group["weight_decay"] = rate * group["lr_multiplier"], decay * group["decay_multiplier"]
        # a save copies the weights that are about to change
        self.copied.wait()
        self.is_whole = False
        self.parameters.update(self.optimizer, norm, overflow, old_scale, optimizer.clip)
        if self.check is not None:
            self.check.end()
        self.loss_scale.update(overflow)
        if self.scales is not None:
            self.scales.finish_update(self.step)
        self.step += 1
        self.is_whole, self.sums = True, sums
        end = DeviceEvent(self.mesh.device)
        return PendingResult(on_host, rate, norms, end, None if compared is None else weight_sums)

    def read(self, pending: PendingResult) -> StepResult:
        """Wait for the result of the last update. Raises UserError if it overflowed with the smallest loss scale."""
        pending.end.synchronize()
        loss, norm, scale, *flags = pending.numbers.tolist()
        experts, logit = None, flags.pop() if self.logits is not None else None
        if self.balance is not None:
            flags, experts = self.balance.split(flags)
        mtp_loss = flags.pop(0) if self._has_mtp else None
        weight_sums = None
        if pending.weight_sums is not None:
            flags, comparison = flags[:-NUMBERS], flags[-NUMBERS:]
            weight_sums = pending.weight_sums if any(comparison) else None
        raised = tuple(map(bool, flags))
        result = StepResult(loss, norm, pending.lr, scale, raised, [], experts, mtp_loss, logit, weight_sums)
        if not result.skipped:
            return result
        self.skipped += 1
        if self.loss_limit is None or not loss > self.loss_limit:
            self.loss_scale.require_room(scale)
        return replace(result, norms=pending.norms)
