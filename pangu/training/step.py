"""The trainer of a rank, and one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pangu.collectives.reduce import gather_objects, start_all_reduce
from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch
from pangu.layers.builder import DTYPES, Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.kernels import attention_kernels
from pangu.metrics.timing import Moment
from pangu.models.language_model import Options, build_model
from pangu.optim.build import make_optimizer
from pangu.optim.loss_scale import LossScale
from pangu.optim.lr_schedule import learning_rate
from pangu.pipeline.runner import ParameterHooks, Runner
from pangu.pipeline.stages import Stages, plan_stages
from pangu.topology.copy_stream import host_memory
from pangu.topology.mesh import Algorithms, Mesh
from pangu.zero.flat_parameter import FlatParameter, Shard
from pangu.zero.norms import unscale_factor
from pangu.zero.sharded import ShardedParameters

if TYPE_CHECKING:
    from pangu.training.autotune import Choices


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Mean over the global batch's target tokens."""
    grad_norm: float
    """Before clipping; not finite if the step was skipped."""
    lr: float
    loss_scale: float
    flags: tuple[bool, ...] = ()
    """Those that any rank raised."""
    not_finite: tuple[tuple[str, ...], ...] = ()
    """If the step was skipped: of every rank, the tensors whose gradient was not finite before it was reduced."""

    @property
    def skipped(self) -> bool:
        """Whether the weights are as they were."""
        return not math.isfinite(self.grad_norm)


@dataclass(frozen=True)
class PendingResult:
    """The result of a step on its way to the host."""

    numbers: Tensor
    """fp64, in host memory: loss, norm, loss scale, how many ranks raised each flag. Not there before `end`."""
    lr: float
    norms: Sequence[tuple[FlatParameter, Sequence[Tensor]]]
    """Of `GradientSum`."""
    end: Moment
    """When the step is over."""


class Trainer:
    """This rank's part of the model, its gradient buffers and optimizer, and the step that joins them."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, stages: Stages | None = None, choices: Choices | None = None
    ) -> None:
        """Build this rank's chunks of the model with their first values, and a fresh optimizer. `choices` of
        autotuning: None takes the preferred ones. Raises ConfigError if the pipeline's schedule or the attention kernel
        does not allow what is asked for."""
        self.config = config
        self.stages = stages or plan_stages(config, mesh.layout)
        self.choices = None if choices is None else asdict(choices)
        """What `auto` stood for, as checkpoints hold it."""
        if choices is None:
            kernel = attention_kernels(config.model, config.precision.compute, mesh.device)[0]
        else:
            kernel, mesh = choices.attention, replace(mesh, algorithms=Algorithms(choices.gather, choices.scatter))
        self.mesh = mesh
        self.step = 0
        """Steps made, skipped ones included."""
        self.skipped = 0
        """Those whose result was read."""
        self.doing = "starting"
        """What this rank is at, for messages."""
        schedule, chunks = self.stages.schedule, self.stages.of(mesh.at.pipeline)
        store = None
        if schedule.splits_backward:
            from pangu.layers.weight_gradient_store import WeightGradientStore

            store = WeightGradientStore()
        build = Builder(region=TensorRegion.of(mesh, config.parallel.overlap_chunks), store=store)
        options, frozen = Options.of(config, kernel), config.train.frozen
        self.model, table = build_model(config.model, options, build, list(chunks.values()), frozen)
        self.parameters = ShardedParameters(self.model, table, chunks, mesh, config, schedule.reduce_each)
        trained = [(shard.placement, shard.main) for shard in self.parameters.trained_shards]
        self.optimizer = make_optimizer(config.optimizer, trained, self.parameters.squares.over)
        self.loss_scale = LossScale(config.precision.loss_scale, mesh.device)
        unsharder, gradients = self.parameters.unsharder, self.parameters.gradients
        self.runner = Runner.on(
            mesh,
            self.model,
            chunks,
            schedule,
            dtype=DTYPES[config.precision.compute],
            region=TensorRegion.of(mesh),
            store=store,
            hooks=ParameterHooks(unsharder.unshard, unsharder.reshard, gradients.expect, gradients.reduce),
        )

    @property
    def shards(self) -> list[Shard]:
        """What this rank keeps: shards of logical tensors, frozen ones included."""
        return self.parameters.shards

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """One step, whose result is waited for."""
        self.forward_backward(micro_batches)
        return self.read(self.update())

    def forward_backward(self, micro_batches: Sequence[Batch]) -> None:
        """Forward and backward over this rank's micro-batches, and the sum of the gradients over the replicas.

        The loss of every token is divided by the number of target tokens of the *global* batch, so that neither the
        micro-batch size nor the number of replicas changes the gradient, however uneven the loss masks are.
        """
        batches = [batch.to(self.mesh.device) for batch in micro_batches]
        num_targets = torch.stack([batch.weights for batch in batches]).sum(dtype=torch.float64)
        counting, loss_scale = start_all_reduce(num_targets, self.mesh.group("data")), self.loss_scale.scale
        keys = [DropoutKeys(self.config.train.seed, self.step, batch.samples) for batch in batches]
        self.parameters.gradients.start_step()

        @cache  # the replicas need not have met before the first loss
        def per_token() -> Tensor:
            self.doing = "counting target tokens"
            counting.wait()
            self.doing = "forward and backward"
            return 1.0 / num_targets.clamp(min=1.0)

        @cache
        def scale() -> Tensor:
            return (per_token() * loss_scale).to(self.parameters.squares.dtype)

        self.doing = "forward and backward"
        self.runner.name = f"rank {self.mesh.rank}, stage {self.mesh.at.pipeline}, step {self.step + 1}"
        losses = self.runner.run(self.stages.schedule, batches, self.model.loss_of, keys, scale)
        self.doing = "adding up gradients"
        self.parameters.gradients.finish()
        self._per_token = per_token()
        self._loss = torch.stack(losses).double().sum() if losses else None

    def update(self, flags: Sequence[bool] = ()) -> PendingResult:
        """Unscale, clip, update the weights, then adjust the scale; a step whose gradient has a norm that is not finite
        is skipped. All of that is decided on the device, and the host does not wait for it. The result of the step
        before must have been read: the learning rate depends on the number of steps that were skipped. `flags` are
        raised for all ranks to see."""
        optimizer, old_scale = self.config.optimizer, self.loss_scale.scale
        self.doing = "adding up loss and norm"
        sums = self.parameters.norm_and_loss(self._loss, flags)
        self.doing = "updating weights"
        norm = sums[0] / old_scale
        numbers = torch.cat([torch.stack([sums[1] * self._per_token, norm, old_scale]), sums[2:]])
        on_host = host_memory(len(numbers), numbers.dtype, numbers.device).copy_(numbers, non_blocking=True)
        rate = learning_rate(self.config.lr_schedule, optimizer.lr, self.config.train.steps, self.step - self.skipped)
        for param_group in self.optimizer.param_groups:
            param_group["lr"] = rate
        overflow, factor = norm.isfinite().logical_not(), unscale_factor(norm, optimizer.clip, old_scale)
        # LAMB meets the other ranks in its step
        self.parameters.update(self.optimizer, overflow.float(), factor, one_by_one=optimizer.name == "adam")
        self.loss_scale.update(overflow)
        self.step += 1
        return PendingResult(on_host, rate, self.parameters.gradients.norms, Moment(self.mesh.device))

    def read(self, pending: PendingResult) -> StepResult:
        """Wait for the result of the last update. Raises UserError on all ranks, if it overflowed with the smallest
        loss scale."""
        pending.end.wait()
        loss, norm, scale, *flags = pending.numbers.tolist()
        result = StepResult(loss, norm, pending.lr, scale, tuple(map(bool, flags)))
        if not result.skipped:
            return result
        self.skipped += 1
        self.loss_scale.require_room(scale)
        names = self.parameters.gradients.not_finite(pending.norms)
        return replace(result, not_finite=tuple(map(tuple, gather_objects(names, self.mesh.group("world")))))

    def trust_ratios(self) -> dict[str, float]:
        """LAMB's ratio of each tensor in the last step, of all ranks on all ranks; none with Adam."""
        ratios = getattr(self.optimizer, "ratios", {})
        of_rank = {p.placement.name: float(ratios[p.main]) for p in self.shards if p.main in ratios}
        of_ranks = gather_objects(of_rank, self.mesh.group("world"))
        return {name: ratio for part in of_ranks for name, ratio in part.items()}
