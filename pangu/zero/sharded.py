"""Parameters of a rank's part of a model: flat, sharded, unsharded for use, with their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pangu.config.schema import RunConfig
from pangu.layers.builder import DTYPES
from pangu.models.language_model import LanguageModel
from pangu.models.parameters import ModelPart, parameters_by_module
from pangu.topology.copy_stream import CopyStream, host_memory
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from pangu.zero.flat_parameter import FlatParameter, Shard
from pangu.zero.gradients import GradientSum
from pangu.zero.grouping import Regions, Sharding, trained_modules
from pangu.zero.norms import Squares, counts, norm_and_loss
from pangu.zero.stage_parameters import group, regions_of
from pangu.zero.unshard import Unsharder


@dataclass(frozen=True)
class Storage:
    """Storage and communication options of parameters."""

    dtype: torch.dtype
    bucket_bytes: float
    """Approximate bytes of fp32 gradients per reduction."""
    seed: int | None = None
    """Seed of the initial values; None: keep those of the model."""
    offload: tuple[str, ...] = ()
    """Host-memory states, as in `memory.offload`."""
    overlap: bool = True
    message: torch.dtype | None = None
    """Dtype of gradient reductions; None: that of the gradient sums."""


class ShardedParameters:
    """Flat parameters of a rank with their gradients, unsharding and optimizer update."""

    def __init__(
        self, model: nn.Module, table: PlacementTable, regions: Regions, mesh: Mesh, storage: Storage, reduce_each: bool
    ) -> None:
        """Allocate and initialize the parameters of `table`; call `unsharder` around the modules of `regions`."""
        # With `reduce_each`, gradients are reduced after every micro-batch (ZeRO-2 and 3) instead of once per step.
        kinds = (False, True) if mesh.layout.splits_experts else (False,)
        shardings = {apart: Sharding.of(mesh.layout, mesh.at, storage.offload, apart) for apart in kinds}

        def make(_: int, names: list[str]) -> FlatParameter:
            sharding = shardings[table.is_expert(names[0])]
            return FlatParameter(model, names, table, storage.seed, storage.dtype, mesh.device, sharding)

        self.placements = {placement.name: placement for placement in table}
        self.flat_parameters, flats_of, reduced = group(table, regions, storage.bucket_bytes, reduce_each, make)
        self.trained = [flat for flat in self.flat_parameters if flat.trained]
        self.offload, self._mesh = shardings[False].offload, mesh
        self.gradients = GradientSum(reduced, mesh, reduce_each, storage.overlap, storage.message)
        # without offload there are no copies, and so no need for a stream
        self._stream = CopyStream(mesh.device if self.offload else torch.device("cpu"))
        trained = trained_modules(table, regions)
        self.unsharder = Unsharder(flats_of, regions, trained, mesh, self._stream, storage.overlap)
        self.unshards = bool(self.offload) or any(flat.sharding.size > 1 for flat in self.flat_parameters)
        """True if `unsharder` has anything to do."""
        self.publish()
        self.squares = Squares(list(table), mesh, torch.promote_types(storage.dtype, torch.float32))
        self._counted = [
            shard.grad
            for shard in self.trained_shards
            if shard.grad is not None and counts(shard.placement, mesh.layout, mesh.at)
        ]

    @classmethod
    def of_run(
        cls,
        model: LanguageModel,
        table: PlacementTable,
        chunks: Mapping[int, ModelPart],
        mesh: Mesh,
        config: RunConfig,
        reduce_each: bool,
    ) -> ShardedParameters:
        """Return the parameters of `model`, which is on the meta device and consists of the parts `chunks`."""
        uses = {chunk: parameters_by_module(model.config, table, part) for chunk, part in chunks.items()}
        storage = Storage(
            DTYPES[config.precision.compute],
            config.parallel.bucket_bytes(mesh.layout.zero, mesh.layout.replicas),
            config.train.seed,
            config.memory.offload,
            config.parallel.overlap,
            torch.bfloat16 if config.precision.reduce == "bf16" else None,
        )
        parameters = cls(model, table, regions_of(uses), mesh, storage, reduce_each)
        if parameters.unshards:
            model.hooks = parameters.unsharder
        return parameters

    @property
    def shards(self) -> list[Shard]:
        """All shards of this rank, frozen tensors included."""
        return [shard for flat in self.flat_parameters for shard in flat.shards]

    @property
    def trained_shards(self) -> list[Shard]:
        """Shards of this rank's trained tensors."""
        return [shard for flat in self.trained for shard in flat.shards]

    def fill(self, seed: int) -> None:
        """Reset all weights, frozen ones included, to their initial values."""
        for flat in self.flat_parameters:
            flat.fill(seed)
        self.publish()

    def publish(self) -> None:
        """Update all weights after an outside change of the main parameters, and wait for them."""
        self.unsharder.publish(self.flat_parameters)
        self.unsharder.wait()

    def update(self, optimizer: torch.optim.Optimizer, scaling: Sequence[Tensor], one_by_one: bool) -> None:
        """Let an optimizer update the main parameters, then publish the weights.

        `scaling` has the device scalars `found_inf` and `grad_scale` of torch's fused optimizers; empty: not supported.
        If the optimizer state is on the host, the host waits for the gradients; with `one_by_one` the optimizer runs
        for each flat parameter, so that transfers overlap other updates.
        """
        if scaling and self.squares.dtype == torch.float64:
            # fused optimizers take an fp32 divisor, which would round every fp64 gradient
            for flat in self.trained:
                flat.grad.div_(scaling[1])
            scaling = scaling[0], torch.ones_like(scaling[1])
        scaling = [value.float() for value in scaling]
        groups = [[flat] for flat in self.trained] if one_by_one else [self.trained]
        if scaling:
            optimizer.found_inf, optimizer.grad_scale = scaling  # type: ignore[attr-defined]
        if "optimizer" not in self.offload:
            optimizer.step()
            self.unsharder.publish(self.trained)
            return
        if scaling:
            decided = host_memory(2, scaling[0].dtype, scaling[0].device)
            with self._stream.after_computation():
                decided.copy_(torch.stack([*scaling]), non_blocking=True)
            optimizer.found_inf, optimizer.grad_scale = decided.unbind()  # type: ignore[attr-defined]
        # start all copies of gradients first, so that they overlap the updates of earlier flat parameters
        arrivals = []
        for flats in groups:
            with self._stream.after_computation():
                for flat in flats:
                    assert flat.host_grad is not None
                    flat.host_grad.copy_(flat.grad, non_blocking=True)
            arrivals.append(self._stream.record())
        for flats, arrival in zip(groups, arrivals, strict=True):
            if arrival is not None:
                arrival.synchronize()
            for flat in flats:
                flat.lend_gradients(True)
            optimizer.step()
            for flat in flats:
                flat.lend_gradients(False)
            self.unsharder.publish(flats)

    def norm_and_loss(self, loss: Tensor | None, flags: Sequence[bool]) -> Tensor:
        """Return gradient norm, summed loss and flag counts as in `norms.norm_and_loss`."""
        return norm_and_loss(self._counted, loss, flags, self._mesh)
