"""One optimizer step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pangu.collectives.reduce import all_reduce, sum_of
from pangu.config.schema import RunConfig
from pangu.data.batch import Batch
from pangu.layers.dropout import DropoutKeys
from pangu.models.language_model import LanguageModel
from pangu.optim.build import make_optimizer
from pangu.optim.clip import clip_factor
from pangu.optim.loss_scale import LossScale
from pangu.optim.lr_schedule import learning_rate
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement, PlacementTable
from pangu.zero.gradients import GradientSum
from pangu.zero.norms import global_norm, squares_over_ranks
from pangu.zero.units import Piece, Unit, group_parameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True)
class StepResult:
    """What one step did, the same on every rank."""

    loss: float
    """Mean over the global batch's target tokens."""
    grad_norm: float
    """Before clipping; not finite if the step was skipped."""
    lr: float
    loss_scale: float
    skipped: bool


class Trainer:
    """Model, gradient buffers and optimizer of this rank, and the step that joins them."""

    def __init__(self, config: RunConfig, mesh: Mesh, model: LanguageModel, table: PlacementTable) -> None:
        """
        Args:
            config: the run.
            mesh: live groups and device.
            model: on the meta device; gets its storage and first values here.
            table: its logical tensors.
        """
        self.config = config
        self.mesh = mesh
        self.model = model
        dtype = DTYPES[config.precision.compute]
        groups = group_parameters(model, config.parallel.bucket_mib * 2**20)
        self.units = [Unit(model, names, table, config.train.seed, dtype, mesh.device) for names in groups]
        self.gradients = GradientSum(self.units, mesh.group("data"), mesh.group("tensor"))

        def over_ranks(placements: Sequence[Placement]) -> Callable[[Tensor], Tensor]:
            return squares_over_ranks(placements, mesh.group("tensor"), mesh.device)

        self.squares_over_ranks = over_ranks([piece.placement for piece in self.pieces])
        owned = [(piece.placement, piece.master) for piece in self.pieces]
        self.optimizer = make_optimizer(config.optimizer, owned, over_ranks)
        self.loss_scale = LossScale(config.precision.loss_scale)
        self.step = 0
        """Steps made, skipped ones included."""
        self.skipped = 0

    @property
    def pieces(self) -> list[Piece]:
        """All logical tensors."""
        return [piece for unit in self.units for piece in unit.pieces]

    def train_step(self, micro_batches: Sequence[Batch]) -> StepResult:
        """Forward and backward over this rank's micro-batches, one reduction, one update.

        The loss of every token is divided by the number of target tokens of the *global* batch, so that neither the
        micro-batch size nor the number of replicas changes the gradient, however uneven the loss masks are.
        """
        group = self.mesh.group("data")
        batches = [batch.to(self.mesh.device) for batch in micro_batches]
        targets = sum_of(sum(float(batch.weights.sum()) for batch in micro_batches), group, self.mesh.device)
        per_token = 1.0 / max(targets, 1.0)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        self.gradients.start_step()
        for index, batch in enumerate(batches):
            if index == len(batches) - 1:
                self.gradients.start_last_micro_batch()
            keys = DropoutKeys(self.config.train.seed, self.step, batch.samples)
            loss = self.model.loss(batch, keys)
            (loss * (per_token * self.loss_scale.scale)).backward()
            total += loss.detach()
        self.gradients.finish()
        loss_sum = float(all_reduce(total, group))
        return self._update(loss_sum * per_token)

    def _update(self, loss: float) -> StepResult:
        """Unscale, clip, step, then adjust the scale; skip the step if the gradient is not finite."""
        scale = self.loss_scale.scale
        gradients = [piece.master.grad for piece in self.pieces if piece.master.grad is not None]
        norm = float(global_norm(gradients, self.squares_over_ranks)) / scale
        rate = learning_rate(
            self.config.lr_schedule, self.config.optimizer.lr, self.config.train.steps, self.step - self.skipped
        )
        skipped = not math.isfinite(norm)
        if not skipped:
            factor = clip_factor(norm, self.config.optimizer.clip) / scale
            if factor != 1.0:
                torch._foreach_mul_([unit.grad for unit in self.units], factor)
            for param_group in self.optimizer.param_groups:
                param_group["lr"] = rate
            self.optimizer.step()
            for unit in self.units:
                unit.publish()
        self.loss_scale.update(overflow=skipped)
        self.step += 1
        self.skipped += skipped
        return StepResult(loss, norm, rate, scale, skipped)
