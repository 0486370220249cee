"""The parameters of this rank's chunks of a model: flat, unsharded for use, with their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from pangu.config.schema import RunConfig
from pangu.layers.builder import DTYPES
from pangu.models.language_model import LanguageModel
from pangu.models.parameters import ModelPart, parameters_by_module
from pangu.topology.copy_stream import CopyStream, host_memory
from pangu.topology.mesh import Mesh
from pangu.topology.placement import PlacementTable
from pangu.zero.flat_parameter import FlatParameter, Shard
from pangu.zero.gradients import GradientSum
from pangu.zero.grouping import Sharding, divide, trained_modules
from pangu.zero.norms import Squares, counts, norm_and_loss
from pangu.zero.unshard import Unsharder


class ShardedParameters:
    def __init__(
        self,
        model: LanguageModel,
        table: PlacementTable,
        chunks: Mapping[int, ModelPart],
        mesh: Mesh,
        config: RunConfig,
        reduce_each: bool,
    ) -> None:
        """`model`, on the meta device, gets its storage and initial values; `chunks`: the parts that it consists of.
        `reduce_each`: gradients are reduced after every micro-batch (ZeRO-2 and 3) rather than once per step."""
        overlap, dtype = config.parallel.overlap, DTYPES[config.precision.compute]
        kinds = (False, True) if mesh.layout.splits_experts else (False,)
        shardings = {apart: Sharding.of(mesh.layout, mesh.at, config.memory.offload, apart) for apart in kinds}
        uses = {chunk: parameters_by_module(model.config, table, part) for chunk, part in chunks.items()}
        trained_of: dict[int, list[FlatParameter]] = {}

        def make(chunk: int, names: list[str]) -> FlatParameter:
            sharding = shardings[table.is_expert(names[0])]
            flat = FlatParameter(model, names, table, config.train.seed, dtype, mesh.device, sharding)
            if flat.trained:
                # a sum that lies where the gradients of the next micro-batch are added is not sent before the last
                late = reduce_each and sharding.size == 1
                trained_of.setdefault(-1 if late else chunk, []).append(flat)
            return flat

        self.flat_parameters, flats_of = divide(table, uses, config.parallel.bucket_bytes(mesh.layout.replicas), make)
        self.trained = [flat for flat in self.flat_parameters if flat.trained]
        self.offload, self._mesh = shardings[False].offload, mesh
        message = torch.bfloat16 if config.precision.reduce == "bf16" else None
        self.gradients = GradientSum(trained_of, mesh, reduce_each, overlap, message)
        # without offload there are no copies, and a CPU has no stream for them
        self._stream = CopyStream(mesh.device if self.offload else torch.device("cpu"))
        self.unsharder = Unsharder(flats_of, trained_modules(table, uses), mesh, self._stream, overlap)
        if self.offload or any(flat.sharding.size > 1 for flat in self.flat_parameters):
            model.hooks = self.unsharder
        self.publish()
        self.squares = Squares(list(table), mesh, torch.promote_types(dtype, torch.float32))
        self._counted = [
            shard.grad
            for shard in self.trained_shards
            if shard.grad is not None and counts(shard.placement, mesh.layout, mesh.at)
        ]

    @property
    def shards(self) -> list[Shard]:
        """All shards of this rank, frozen tensors included."""
        return [shard for flat in self.flat_parameters for shard in flat.shards]

    @property
    def trained_shards(self) -> list[Shard]:
        return [shard for flat in self.trained for shard in flat.shards]

    def publish(self) -> None:
        """After main parameters were changed from outside: update all weights and wait for them."""
        self.unsharder.publish(self.flat_parameters)
        self.unsharder.wait()

    def update(self, optimizer: torch.optim.Optimizer, found_inf: Tensor, grad_scale: Tensor, one_by_one: bool) -> None:
        """Let an optimizer change the main parameters, and bring the weights up to date. `found_inf`: 1 if it is to do
        nothing, otherwise 0; `grad_scale`: it divides the gradients by that; both on the device, as GradScaler gives
        them to torch's fused optimizers. `one_by_one`: it may run for each flat parameter, otherwise once, when all
        gradients have arrived. With the optimizer's state on the host, gradients arrive and weights leave while other
        flat parameters are updated, and the host waits for the gradients."""
        groups = [[flat] for flat in self.trained] if one_by_one else [self.trained]
        optimizer.found_inf, optimizer.grad_scale = found_inf, grad_scale  # type: ignore[attr-defined]
        if "optimizer" not in self.offload:
            optimizer.step()
            self.unsharder.publish(self.trained)
            return
        decided = host_memory(2, found_inf.dtype, found_inf.device)
        with self._stream.after_computation():
            decided.copy_(torch.stack([found_inf, grad_scale]), non_blocking=True)
        optimizer.found_inf, optimizer.grad_scale = decided.unbind()  # type: ignore[attr-defined]
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
        return norm_and_loss(self._counted, loss, flags, self._mesh)
