"""The trainer of a rank, and one optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pangu.collectives.reduce import gather_objects, sum_of
from pangu.collectives.regions import TensorRegion
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch
from pangu.layers.builder import DTYPES, Builder
from pangu.layers.dropout import DropoutKeys
from pangu.layers.kernels import attention_kernels
from pangu.models.language_model import Options, build_model
from pangu.optim.build import make_optimizer
from pangu.optim.loss_scale import LossScale
from pangu.optim.lr_schedule import learning_rate
from pangu.pipeline.runner import ParameterHooks, Runner
from pangu.pipeline.stages import Stages, plan_stages
from pangu.topology.mesh import Algorithms, Mesh
from pangu.topology.placement import Placement
from pangu.zero.flat_parameter import Shard
from pangu.zero.norms import clip_factor
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
    not_finite: tuple[tuple[str, ...], ...] = ()
    """If the step was skipped: of every rank, the tensors whose gradient was not finite before it was reduced."""

    @property
    def skipped(self) -> bool:
        """Whether the weights are as they were."""
        return not math.isfinite(self.grad_norm)


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
        self.optimizer = make_optimizer(config.optimizer, trained, self._sum_over_ranks)
        self.loss_scale = LossScale(config.precision.loss_scale)
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

    def _sum_over_ranks(self, placements: Sequence[Placement]) -> Callable[[Tensor], Tensor]:
        """What adds up squares of tensors, one for each placement, over the ranks that hold the other slices."""
        squares_of, device = self.parameters.squares, self.mesh.device
        return lambda squares: squares_of.same(placements, squares.to(device)).to(squares.device)

    @property
    def shards(self) -> list[Shard]:
        """What this rank keeps: shards of logical tensors, frozen ones included."""
        return self.parameters.shards

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Forward and backward over this rank's micro-batches, one reduction, one update.

        The loss of every token is divided by the number of target tokens of the *global* batch, so that neither the
        micro-batch size nor the number of replicas changes the gradient, however uneven the loss masks are.
        """
        group = self.mesh.group("data")
        self.doing = "counting target tokens"
        batches = [batch.to(self.mesh.device) for batch in micro_batches]
        targets = sum_of(sum(float(batch.weights.sum()) for batch in micro_batches), group, self.mesh.device)
        per_token = 1.0 / max(targets, 1.0)
        keys = [DropoutKeys(self.config.train.seed, self.step, batch.samples) for batch in batches]
        self.parameters.gradients.start_step()
        self.doing = "forward and backward"
        self.runner.name = f"rank {self.mesh.rank}, stage {self.mesh.at.pipeline}, step {self.step + 1}"
        scale = per_token * self.loss_scale.scale
        losses = self.runner.run(self.stages.schedule, batches, self.model.loss_of, keys, scale)
        self.doing = "adding up gradients"
        self.parameters.gradients.finish()
        self.doing = "adding up loss and norm"
        norm, loss = self.parameters.norm_and_loss(torch.stack(losses).double().sum() if losses else None)
        self.doing = "updating weights"
        return self._update(loss * per_token, norm / self.loss_scale.scale)

    def trust_ratios(self) -> dict[str, float]:
        """LAMB's ratio of each tensor in the last update, of all ranks on all ranks; none with Adam."""
        ratios = getattr(self.optimizer, "ratios", {})
        of_rank = {p.placement.name: float(ratios[p.main]) for p in self.shards if p.main in ratios}
        of_ranks = gather_objects(of_rank, self.mesh.group("world"))
        return {name: ratio for part in of_ranks for name, ratio in part.items()}

    def _update(self, loss: float, norm: float) -> StepResult:
        """Unscale, clip, step, then adjust the scale; skip the step if the gradient's norm is not finite."""
        scale = self.loss_scale.scale
        rate = learning_rate(
            self.config.lr_schedule, self.config.optimizer.lr, self.config.train.steps, self.step - self.skipped
        )
        skipped = not math.isfinite(norm)
        if not skipped:
            factor = clip_factor(norm, self.config.optimizer.clip) / scale
            if factor != 1.0:
                self.parameters.scale_gradients(factor)
            for param_group in self.optimizer.param_groups:
                param_group["lr"] = rate
            # LAMB meets the other ranks in its step
            self.parameters.update(self.optimizer.step, one_by_one=self.config.optimizer.name == "adam")
        self.loss_scale.update(overflow=skipped)
        self.step += 1
        self.skipped += skipped
        not_finite = gather_objects(self.parameters.gradients.not_finite(), self.mesh.group("world")) if skipped else ()
        return StepResult(loss, norm, rate, scale, tuple(map(tuple, not_finite)))
