"""The parameters of this rank's chunks of a model: their units, the sums of their gradients, their gathered weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pangu.layers.offload import CopyStream
from pangu.models.language_model import LanguageModel
from pangu.models.parameters import ModelPart, regions
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from pangu.zero.flat_parameter import FlatParameter, Shard
from pangu.zero.gradients import GradientSum, Groups
from pangu.zero.grouping import Sharding, divide, trained_regions
from pangu.zero.norms import Squares, counts, norm_and_loss
from pangu.zero.unshard import Unsharder


@dataclass(frozen=True)
class Policy:
    """How parameters are kept and communicated; none of it changes what is computed."""

    seed: int
    """Of the first values."""
    dtype: torch.dtype
    """Format that forward and backward compute in."""
    bucket_bytes: float
    """Layers are joined to units of about so many bytes of fp32 gradients."""
    overlap: bool = True
    """Communicate while layers compute."""
    reduce_each: bool = False
    """The schedule reduces gradients after every micro-batch (ZeRO-2 and 3) rather than once per step."""
    offload: tuple[str, ...] = ()
    """What lies in host memory: `optimizer`, `parameters`."""
    message: torch.dtype | None = None
    """Format in which gradients are added up over replicas; None: that of their sums."""
    frozen: Collection[str] = ()
    """Parameters of the model that are not trained."""


class ShardedParameters:
    """All that one rank keeps of its chunks' parameters."""

    def __init__(
        self, model: LanguageModel, table: PlacementTable, chunks: Mapping[int, ModelPart], mesh: Mesh, policy: Policy
    ) -> None:
        """
        Args:
            model: on the meta device; gets its storage and first values here.
            table: its logical tensors.
            chunks: the parts that it was built of, by chunk.
            mesh: who shares what.
            policy: how.
        """
        sharding = Sharding.of(mesh.layout, mesh.at.data, policy.offload)
        self.groups = Groups.of(mesh)
        uses = {chunk: regions(model.config, table, part) for chunk, part in chunks.items()}
        trained_of: dict[int, list[FlatParameter]] = {}

        def make(chunk: int, names: list[str], trained: bool) -> FlatParameter:
            unit = FlatParameter(model, names, table, policy.seed, policy.dtype, mesh.device, sharding, trained)
            if trained:
                trained_of.setdefault(chunk, []).append(unit)
            return unit

        self.units, used = divide(table, uses, policy.bucket_bytes, policy.frozen, make)
        self.trained = [unit for unit in self.units if unit.trained]
        self.gradients = GradientSum(trained_of, self.groups, policy.reduce_each, policy.overlap, policy.message)
        # nothing is copied to a CPU's own memory beside what it computes
        self._lane = CopyStream(mesh.device if sharding.offload else torch.device("cpu"))
        self.offload = sharding.offload
        self.unsharder = Unsharder(
            {name: units for of_chunk in used.values() for name, units in of_chunk.items()},
            {chunk: list(names) for chunk, names in uses.items()},
            mesh.group("gather"),
            trained_regions(uses, policy.frozen),
            self._lane,
            policy.overlap,
            mesh.algorithms,
        )
        if sharding.size > 1 or self.offload:
            model.gate = self.unsharder
        self.publish()
        wide = torch.promote_types(policy.dtype, torch.float32)
        self.squares = Squares(list(table), self.groups, mesh.device, wide)
        self._mesh = mesh
        self._counted = [
            shard.grad
            for shard in self.trained_shards
            if shard.grad is not None and counts(shard.placement, mesh.layout, mesh.at)
        ]

    @property
    def shards(self) -> list[Shard]:
        """What this rank keeps, frozen tensors included."""
        return [shard for unit in self.units for shard in unit.shards]

    @property
    def trained_shards(self) -> list[Shard]:
        """What this rank updates."""
        return [shard for unit in self.trained for shard in unit.shards]

    def publish(self) -> None:
        """After main parameters were changed from outside: bring all weights up to date, and wait until they are."""
        self.unsharder.publish(self.units)
        self.unsharder.wait()

    def update(self, step: Callable[[], object], by_unit: bool) -> None:
        """Let an optimizer change the main parameters of what is trained, and bring the weights up to date.

        Where the optimizer's state is on the host, gradients of a unit arrive and weights leave while others are
        updated.

        Args:
            step: updates every tensor that has a gradient.
            by_unit: it may be called for each unit; otherwise once, when all gradients have arrived.
        """
        groups = [[unit] for unit in self.trained] if by_unit else [self.trained]
        if "optimizer" not in self.offload:
            step()
            self.unsharder.publish(self.trained)
            return
        arrivals = []
        for units in groups:
            with self._lane.after_computation():
                for unit in units:
                    assert unit.host_grad is not None
                    unit.host_grad.copy_(unit.grad, non_blocking=True)
            arrivals.append(self._lane.mark())
        for units, arrival in zip(groups, arrivals, strict=True):
            if arrival is not None:
                arrival.synchronize()
            for unit in units:
                unit.lend_gradients(True)
            step()
            for unit in units:
                unit.lend_gradients(False)
            self.unsharder.publish(units)

    def norm_and_loss(self, loss: Tensor | None) -> tuple[float, float]:
        """See `norms.norm_and_loss`: of the whole model's gradient, and of all replicas."""
        return norm_and_loss(self._counted, loss, self._mesh)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        for unit in self.trained:
            unit.grad.mul_(factor)
