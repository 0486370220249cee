"""The parameters of this rank's chunks of a model: their units, the sums of their gradients, their gathered weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pangu.models.language_model import LanguageModel, Part
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from pangu.zero.gradients import GradientSum, Groups
from pangu.zero.norms import Squares, global_norm
from pangu.zero.parameters import Weights
from pangu.zero.units import Piece, Sharding, Unit


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
    by_chunk: bool = False
    """The schedule runs all micro-batches through a chunk before it leaves it: gather a chunk's weights when the
    schedule says, and reduce its gradients once, rather than at each micro-batch."""
    split_backward: bool = False
    """Weight gradients come later than the backward of their micro-batch: reduce once."""


class ShardedParameters:
    """All that one rank keeps of its chunks' parameters."""

    def __init__(
        self, model: LanguageModel, table: PlacementTable, chunks: Mapping[int, Part], mesh: Mesh, policy: Policy
    ) -> None:
        """
        Args:
            model: on the meta device; gets its storage and first values here.
            table: its logical tensors.
            chunks: the parts that it was built of, by chunk.
            mesh: who shares what.
            policy: how.
        """
        layout = mesh.layout
        stage = layout.zero if layout.shards > 1 else 0
        sharding = Sharding(stage, mesh.at.data % layout.shards, layout.shards, layout.data)
        self.groups = Groups.of(mesh)
        self.by_chunk = policy.by_chunk
        regions = {chunk: model.regions(part) for chunk, part in chunks.items()}
        units: dict[int, list[Unit]] = {}
        unit_of: dict[str, Unit] = {}
        for chunk, names in _group(model, table, regions, policy.bucket_bytes):
            unit = Unit(model, names, table, policy.seed, policy.dtype, mesh.device, sharding)
            units.setdefault(chunk, []).append(unit)
            unit_of |= dict.fromkeys(names, unit)
        self.units = list(dict.fromkeys(unit_of.values()))
        once = policy.by_chunk or policy.split_backward
        self.gradients = GradientSum(
            units, self.groups, each_micro_batch=sharding.stage >= 2 and not once, overlap=policy.overlap
        )
        self.weights = Weights(
            {
                name: list(dict.fromkeys(unit_of[parameter] for parameter in parameters))
                for uses in regions.values()
                for name, parameters in uses.items()
            },
            {chunk: list(uses) for chunk, uses in regions.items()},
            self.groups.shard,
            policy.overlap,
        )
        if sharding.size > 1:
            model.gate = self.weights
            self.weights.publish()
        self.squares = Squares(list(table), self.groups, mesh.device)
        self._pipeline = mesh.group("pipeline")
        here = mesh.at.pipeline == 0
        self._counted = torch.tensor([here or placement.shared is None for placement in table], device=mesh.device)

    @property
    def pieces(self) -> list[Piece]:
        """What this rank updates."""
        return [piece for unit in self.units for piece in unit.pieces]

    def gather(self, chunk: int) -> None:
        """The schedule's GATHER."""
        if self.by_chunk:
            self.weights.hold(chunk)

    def release(self, chunk: int) -> None:
        """The schedule's RELEASE."""
        if self.by_chunk:
            self.weights.let_go(chunk)

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of the whole model's gradient, the same on every rank, a scalar."""
        return global_norm(self.pieces, self.squares, self._counted, self._pipeline)

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        torch._foreach_mul_([unit.grad for unit in self.units], factor)


def _group(
    model: LanguageModel, table: PlacementTable, regions: Mapping[int, Mapping[str, Sequence[str]]], bucket: float
) -> list[tuple[int, list[str]]]:
    """Chunk and parameters of each unit, in the order of the forward pass.

    Parameters of a region stay together, and neighbouring regions of a chunk are joined until they fill the bucket. A
    parameter that another stage has a copy of is a unit of its own, cut alike there; one that several chunks use
    belongs to none of them (-1).
    """
    users: dict[str, set[int]] = {}
    for chunk, uses in regions.items():
        for names in uses.values():
            for name in names:
                users.setdefault(name, set()).add(chunk)
    units: list[tuple[int, list[str]]] = []
    seen: set[str] = set()
    for chunk, uses in regions.items():
        size = bucket
        for region in uses.values():
            names = [name for name in region if name not in seen]
            seen |= set(names)
            alone = [n for n in names if len(users[n]) > 1 or any(p.shared for p in table.stored_in(n))]
            units += [(chunk if len(users[name]) == 1 else -1, [name]) for name in alone]
            together = [name for name in names if name not in alone]
            if together and (size >= bucket or units[-1][0] != chunk or alone):
                units.append((chunk, []))
                size = 0.0
            if together:
                units[-1][1].extend(together)
                size += sum(4.0 * model.get_parameter(name).numel() for name in together)
    return units
