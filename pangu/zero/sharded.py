"""Parameters of a rank's part of a model: flat, sharded, unsharded for use, with their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import filterfalse

import torch
from torch import Tensor, nn

from pangu.config.schema import RunConfig
from pangu.layers.apex import Norms
from pangu.layers.builder import DTYPES
from pangu.models.language_model import LanguageModel
from pangu.models.parameters import ModelPart
from pangu.optim.lamb import Lamb
from pangu.optim.moments import updates_at_once
from pangu.topology.copy_stream import CopyStream, host_memory
from pangu.topology.mesh import Mesh
from pangu.zero.flat_parameter import FlatParameter, Shard
from pangu.zero.gradients import GradientSum
from pangu.zero.norms import Squares, counts, counts_among, norm_and_loss
from pangu.zero.stage_parameters import FlatSpec, StageParameters
from pangu.zero.unshard import Unsharder
from pangu.zero.weight_sums import WeightSums

Owned = bool | Set[int]
"""Shards of a rank: those that count among all ranks (True) or among some of them, or all that it holds (False)."""


class ShardedParameters:
    """Flat parameters of a rank with their gradients, unsharding and optimizer update."""

    def __init__(
        self,
        model: nn.Module,
        stage: StageParameters,
        mesh: Mesh,
        dtype: torch.dtype,
        message: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        """Allocate and initialize the parameters of a stage.

        Args:
            model: Module whose parameters become views of the flat ones; its modules call `unsharder` around their use.
            stage: Grouping of the parameters.
            mesh: Mesh whose replicas share them.
            dtype: Compute dtype.
            message: Dtype of gradient reductions; None: that of the gradient sums.
            seed: Seed of the initial values; None: keep those of the model.
        """
        self.stage, self.offload, self._mesh = stage, stage.offload, mesh
        self.flat_parameters = [
            FlatParameter(model, numbers, stage.table, seed, dtype, mesh.device) for numbers in stage.flats
        ]
        self.trained = [flat for flat in self.flat_parameters if flat.trained]
        self.gradients = GradientSum(stage, self.flat_parameters, mesh, message)
        # without offload there are no copies, and so no need for a stream
        self._stream = CopyStream(mesh.device if self.offload else torch.device("cpu"))
        self.unsharder = Unsharder(stage, self.flat_parameters, mesh, self._stream)
        self.unshards = bool(self.offload) or any(flat.sharding.size > 1 for flat in self.flat_parameters)
        """True if `unsharder` has anything to do."""
        self._published: set[FlatParameter] = set()
        """Flat parameters that `publish_updated` has published in this update."""
        self.publish()
        self.squares = Squares(list(stage.table), mesh, torch.promote_types(dtype, torch.float32))
        self.norms: Norms = torch._foreach_norm
        self._counted = [one.grad for one in self.trained_shards if one.grad is not None and self.counts(one)]

    @classmethod
    def of_run(
        cls, model: LanguageModel, chunks: Mapping[int, ModelPart], mesh: Mesh, config: RunConfig, reduce_each: bool
    ) -> ShardedParameters:
        """Return the parameters of `model`, which is on the meta device and consists of the parts `chunks`."""
        stage = StageParameters.of_run(config, mesh.layout, mesh.at, chunks, reduce_each)
        message = torch.bfloat16 if config.precision.reduce == "bf16" else None
        parameters = cls(model, stage, mesh, DTYPES[config.precision.compute], message, config.train.seed)
        if parameters.unshards:
            model.hooks = parameters.unsharder
        if config.faults.verify_weights:
            sums = WeightSums(parameters.flat_parameters, stage.table, parameters.unsharder, mesh)
            parameters.unsharder.sums = sums
        return parameters

    @property
    def shards(self) -> list[Shard]:
        """All shards of this rank, frozen tensors included."""
        return [shard for flat in self.flat_parameters for shard in flat.shards]

    @property
    def trained_shards(self) -> list[Shard]:
        """Shards of this rank's trained tensors."""
        return [shard for flat in self.trained for shard in flat.shards]

    def rectangles(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yield views of the trained main parameters: name of the tensor, rectangle, and its first row or element."""
        for shard in self.trained_shards:
            for values, first in shard.rectangles(shard.main):
                yield shard.placement.name, values, first[0]

    def counts(self, shard: Shard, owned: Owned = True) -> bool:
        """Return whether this rank's copy of a shard is the one that counts in norms and is saved."""
        if not isinstance(owned, bool):
            return counts_among(shard.placement, self._mesh.layout, self._mesh.rank, owned)
        return counts(shard.placement, self._mesh.layout, self._mesh.at)

    def fill(self, seed: int) -> None:
        """Reset all weights, frozen ones included, to their initial values."""
        for flat in self.flat_parameters:
            flat.fill(seed)
        self.publish()

    def publish(self) -> None:
        """Update all weights after an outside change of the main parameters, and wait for them."""
        self.unsharder.publish(self.flat_parameters)
        self.unsharder.wait()

    def publish_updated(self, flats: Iterable[FlatSpec]) -> None:
        """Start to publish weights while an optimizer still updates others."""
        updated = [self.flat_parameters[flat.index] for flat in flats]
        self.unsharder.publish(updated)
        self._published.update(updated)

    def update(
        self, optimizer: torch.optim.Optimizer, norm: Tensor, overflow: Tensor, divisor: Tensor, clip: float | None
    ) -> None:
        """Divide the gradients, clip them by their `norm`, update the main parameters, and publish the weights.

        Nothing changes at an `overflow` of the norm. LAMB and fused optimizers decide that on the device, others need a
        host sync. If the optimizer state is on the host, the host waits for the gradients; an optimizer that updates
        each element alone then runs for each flat parameter, so that transfers overlap other updates.
        """
        if clip is not None:  # Pascanu et al. 2013, Algorithm 1
            divisor = divisor * ((norm + 1e-6) / clip).clamp(min=1.0)
        at_once = all(updates_at_once(flat.main.device) for flat in self.trained)
        on_device = isinstance(optimizer, Lamb) or (at_once and getattr(optimizer, "_step_supports_amp_scaling", False))
        if not on_device and overflow:
            return
        if not on_device or self.squares.dtype == torch.float64:
            # fused optimizers take an fp32 divisor, which would round every fp64 gradient
            for flat in self.trained:
                flat.grad.div_(divisor)
            divisor = torch.ones_like(divisor)
        scaling = overflow.float(), divisor.float()
        if on_device:
            # the fused kernels decide on the device whether the step is skipped
            optimizer.found_inf, optimizer.grad_scale = scaling  # type: ignore[attr-defined]
        self._published.clear()
        if "optimizer" not in self.offload:
            optimizer.step()
            self.unsharder.publish(filterfalse(self._published.__contains__, self.trained))
            return
        if on_device:
            decided = host_memory(2, scaling[0].dtype, scaling[0].device)
            with self._stream.after_computation():
                decided.copy_(torch.stack([*scaling]), non_blocking=True)
            optimizer.found_inf, optimizer.grad_scale = decided.unbind()  # type: ignore[attr-defined]
        one_by_one = on_device and not any(
            group.get("adapt") or group.get("matrices") for group in optimizer.param_groups
        )
        groups = [[flat] for flat in self.trained] if one_by_one else [self.trained]
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
                # the host works on the gradients itself, the only host sync of a step
                arrival.synchronize()
            for flat in flats:
                flat.lend_gradients(True)
            optimizer.step()
            for flat in flats:
                flat.lend_gradients(False)
            self.unsharder.publish(filterfalse(self._published.__contains__, flats))

    def norm_and_loss(
        self, loss: Tensor | None, flags: Sequence[bool], losses: int = 1, more: Tensor | None = None
    ) -> Tensor:
        """Return gradient norm, summed loss and flag counts as in `norms.norm_and_loss`."""
        return norm_and_loss(self._counted, loss, flags, self._mesh, self.norms, losses, more)
