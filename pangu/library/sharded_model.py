"""Module on a mesh, with parameters, gradients and optimizer state sharded according to ZeRO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from pangu.collectives.reduce import all_reduce
from pangu.common.errors import UserError, shown
from pangu.config.build import build
from pangu.config.optimizer import AdamConfig, LambConfig
from pangu.library.optimizers import Groups, options_of, require_alone, watch
from pangu.library.regions import COPIES, Hook, Names, RegionHooks, nothing, regions_of
from pangu.library.requirements import (
    Offload,
    placed,
    require_agreement,
    require_no_tensor_hooks,
    storage_of,
)
from pangu.optim.build import make_optimizer
from pangu.pipeline.stages import shards_sums
from pangu.topology.mesh import Mesh
from pangu.zero.sharded import ShardedParameters
from pangu.zero.stage_parameters import StageParameters


class Update(NamedTuple):
    """Result of `ShardedModel.step`, equal on every rank; scalars on the device, fp64."""

    grad_norm: Tensor
    """Norm of the mean gradient before clipping; if it is not finite, the step changed nothing."""
    loss: Tensor
    """Mean over the replicas of the given losses."""


class ShardedModel:
    """Module on a mesh; `shard` creates one.

    The module computes as before, and `loss.backward()` leaves its gradients here: `parameter.grad` is None. Gradients
    are those of the mean over the replicas; under sequence parallelism a replica's loss is the sum of its ranks'
    losses, each of its slice of the sequence. Micro-batches accumulate.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        chunks: Mapping[int, str],
        regions: Names | None = None,
        reduces: bool | None = None,
        turns: bool = True,
        **storage: Any,
    ) -> None:
        """Shard the `chunks` (paths by index) of `model`; `turns`: backward begins with the last chunk.

        `reduces`: reduce gradients after each backward; None: the caller decides when. `storage`: as of `shard`.
        """
        dtype, bucket_bytes, offload, overlap, message = storage_of(model, mesh, **storage)
        self.model, self.mesh = model, mesh
        _require_unsharded(model)
        require_no_tensor_hooks(model)
        table = placed(model, mesh)
        require_agreement(model, table, mesh)
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        watch(names, self)
        parts = regions_of(model, chunks, regions)
        each = shards_sums(mesh.layout) if reduces is None else reduces
        stage = StageParameters.of(table, parts, mesh.layout, mesh.at, bucket_bytes, offload, each, overlap)
        self.parameters = ShardedParameters(model, stage, mesh, dtype, message)
        for first, *others in names.values():
            for name in others:
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(mesh.device)
        self._reduces_each, self._syncs, self._reduced, self._has_full_parameters = each, True, False, False
        self._scheduled = reduces is not None
        self._known_optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        self.is_stepping = False
        begins, ends = self._begin_backward, self._end_backward
        if self._scheduled:
            begins = ends = nothing
        self.hooks = RegionHooks(model, chunks, self.parameters, begins, ends, turns)
        model.register_state_dict_pre_hook(Hook(self._before_state))
        model.register_load_state_dict_pre_hook(Hook(_refuse_state))
        self.parameters.gradients.start_step()
        watch(self.main_parameters(), self)
        self._flats = {id(one): flat for flat in self.parameters.flat_parameters for one, _ in flat.parameters}

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled or copied."""
        raise UserError(COPIES)

    def lamb(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        eps_inside_root: bool = False,
        exclude_vectors: bool = True,
        max_ratio: float | None = None,
        moments: Literal["fp32", "bf16"] = "fp32",
        groups: Groups = (),
    ) -> torch.optim.Optimizer:
        """Return LAMB (You et al. 2020, Algorithm 2) with a trust ratio of every parameter, wherever its shards are.

        Args:
            lr: η.
            betas: β₁ and β₂.
            eps: ε.
            weight_decay: λ.
            eps_inside_root: Algorithm 1 of the first version.
            exclude_vectors: Neither decay nor ratio for parameters of one dimension.
            max_ratio: Largest ratio.
            moments: Format between steps; fp32 is that of the main parameters.
            groups: Parameters with other options, e.g. `[{"params": ["blocks.0.*"], "lr": 0.001}]`: names of
                parameters or patterns of names. A weight decay given here holds for parameters of one dimension
                too.

        Raises:
            UserError: A value is invalid, or a group names no parameter, or one twice.
        """
        values = {"lr": lr, "betas": list(betas), "eps": eps, "weight_decay": weight_decay, "moments": moments}
        only = {"eps_inside_root": eps_inside_root, "exclude_vectors": exclude_vectors, "max_ratio": max_ratio}
        return self._optimizer(build(LambConfig, {"name": "lamb", "clip": None, **values, **only}), groups)

    def adamw(
        self,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        moments: Literal["fp32", "bf16"] = "fp32",
        groups: Groups = (),
    ) -> torch.optim.Optimizer:
        """Return AdamW (Loshchilov & Hutter 2019, Algorithm 2), without decay for parameters of one dimension.

        The arguments are those of `lamb`.
        """
        values = {"lr": lr, "betas": list(betas), "eps": eps, "weight_decay": weight_decay, "moments": moments}
        return self._optimizer(build(AdamConfig, {"name": "adam", "clip": None, **values}), groups)

    def _optimizer(self, config: AdamConfig | LambConfig, groups: Groups) -> torch.optim.Optimizer:
        trained = [(shard.placement, shard.main) for shard in self.parameters.trained_shards]
        names = [name for flat in self.parameters.trained for name, _ in flat.tensors]
        optimizer = make_optimizer(config, trained, self.parameters.squares.over, options_of(groups, names, config))
        self._known_optimizers.add(optimizer)
        return optimizer

    def named_main_parameters(self) -> list[tuple[str, Tensor]]:
        """Return this rank's shards of the trained parameters with their names.

        Shards are flat, in fp32 (fp64 in fp64), for any elementwise optimizer. A rank has none of some parameters, of a
        tiny model perhaps none at all: `[{"params": sharded.main_parameters()}]`.
        """
        return [(shard.placement.name, shard.main) for shard in self.parameters.trained_shards]

    def main_parameters(self) -> list[Tensor]:
        """Return the tensors of `named_main_parameters`."""
        return [main for _, main in self.named_main_parameters()]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only: for all micro-batches of a step but the last.

        From ZeRO-2 on, where ranks have no memory for full gradients, they are reduced after each backward anyway.
        """
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """Gather all weights in the compute format: to read them, for `model.state_dict()`, not for steps.

        All ranks enter it.
        """
        uses = self.parameters.unsharder.uses
        self.parameters.unsharder.wait()
        for name in uses:
            self.hooks.begin(name, {})
        self._has_full_parameters = True
        try:
            yield
        finally:
            self._has_full_parameters = False
            for name in uses:
                self.hooks.end(name, {})

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None = None, loss: Tensor | None = None) -> Update:
        """Update the parameters with the gradients since the last step, and reset these; all ranks call this.

        Args:
            optimizer: That of `lamb` or `adamw`, or another one of `main_parameters`.
            clip: Largest norm of the gradient of all parameters together (Pascanu et al. 2013, Algorithm 1).
            loss: Loss of this rank, to be averaged.

        Returns:
            The update; it is skipped if its norm is not finite. There is no host sync, unless the optimizer is
            neither one of these two nor a fused one of torch.

        Raises:
            UserError: The optimizer has other tensors, `clip` is not above 0, a backward has failed, or the model
                has other parameters than `shard` gave it.
        """
        parameters, layout = self.parameters, self.mesh.layout
        self.hooks.require_ended()
        self._require_main_parameters(optimizer)
        self.require_same()
        if clip is not None and not clip > 0:
            raise UserError(f"clip = {clip}: must be above 0; use None for no clipping")
        if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise UserError(f"loss = {shown(loss)}: must be a tensor with one element")
        if not (self._reduced or self._reduces_each or self._scheduled):
            self._reduce()
        parameters.gradients.finish()
        if loss is not None:
            loss = loss.detach().double().reshape(())
            if layout.sequence:
                loss = all_reduce(loss.clone(), self.mesh.group("tensor"))
        norm, total = parameters.norm_and_loss(loss, ()) / layout.replicas
        self.hooks.hide_gradients(False)
        for shard in parameters.trained_shards:  # which `optimizer.zero_grad` takes away
            if shard.host_grad is None:
                shard.main.grad = shard.grad
        self.is_stepping = True
        try:
            divisor = torch.full_like(norm, layout.replicas)
            parameters.update(optimizer, norm, norm.isfinite().logical_not(), divisor, clip)
        finally:
            self.is_stepping = False
        self.hooks.guard()
        parameters.gradients.start_step()
        self._reduced = False
        return Update(norm, total)

    def require_same(self) -> None:
        """Raise UserError if parameters were replaced, converted or frozen after `shard`: they would not be trained."""
        for name, parameter in self.model.named_parameters():
            flat = self._flats.get(id(parameter))
            change = ""
            if flat is None or parameter.untyped_storage().data_ptr() != flat.weights.untyped_storage().data_ptr():
                change = "was added to the model, or converted,"
            elif parameter.requires_grad != flat.trained:
                change = f"was {'frozen' if flat.trained else 'unfrozen'}"
            if change:
                raise UserError(f"{name}: {change} after `shard`, which has no effect; change the model before")

    def _require_main_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise UserError for an optimizer of anything but main parameters, which would change nothing."""
        if optimizer in self._known_optimizers:
            return
        trained = set(self.main_parameters())
        if any(tensor not in trained for group in optimizer.param_groups for tensor in group["params"]):
            raise UserError(
                "step: the optimizer's tensors are not this model's main parameters; use `sharded.lamb(...)`, "
                "`sharded.adamw(...)` or an optimizer of `sharded.main_parameters()`"
            )
        require_alone(optimizer)
        self._known_optimizers.add(optimizer)

    def _begin_backward(self) -> None:
        if self._reduced and not self._reduces_each:
            raise UserError(
                "a second backward in one step, after the gradients were summed over the replicas: "
                "use `with sharded.no_sync():` for all micro-batches but the last"
            )
        if self._syncs or self._reduces_each:
            self.parameters.gradients.expect(0)

    def _end_backward(self) -> None:
        if self._syncs or self._reduces_each:
            self._reduce()

    def _reduce(self) -> None:
        for chunk in self.parameters.gradients.flat_parameters:
            if chunk >= 0:
                self.parameters.gradients.reduce(chunk)
        self._reduced = True
        self.hooks.hide_gradients(True)

    def _before_state(self, *_: Any) -> None:
        self.parameters.unsharder.wait()
        if self.mesh.layout.zero == 3 and self.parameters.unshards and not self._has_full_parameters:
            raise UserError(
                "state_dict: the weights are sharded; use `pangu.save`, which does not gather them, or `with "
                "sharded.full_parameters():` on all ranks, which does"
            )


def shard(
    model: nn.Module,
    mesh: Mesh,
    *,
    regions: Sequence[str] | None = None,
    dtype: torch.dtype | None = None,
    bucket_mib: float | None = None,
    offload: Sequence[Offload] = (),
    overlap: bool = True,
    message: torch.dtype | None = None,
) -> ShardedModel:
    """Shard a module's parameters, gradients and optimizer state over the ranks of a mesh, in place (ZeRO).

    See Rajbhandari et al. 2020, section 5; `mesh.layout.zero` is the stage. Parameters keep their names and are
    replaced by others, on `mesh.device`; buffers move there and stay replicated. The module may hold tied and frozen
    parameters and layers of `column_parallel` and `row_parallel`. It keeps its initial values: build it with one seed
    on all ranks.

    Args:
        model: Module on any device, complete on every rank but for the parallel layers.
        mesh: Mesh of `connect`.
        regions: Names of submodules, in the order of forward, that ZeRO-3 unshards one after the other; None: those
            of `model.zero_regions()`, if there is that method, otherwise the children, of which lists of layers are
            taken apart. A region must not change its input in place.
        dtype: Compute format of all parameters; main parameters are fp32 (fp64 for fp64). None: unchanged.
        bucket_mib: MiB of fp32 gradients per message, about; None: 25 without ZeRO, otherwise a region's.
        offload: States in host memory.
        overlap: Overlap communication with computation.
        message: Format of the gradient reduction over replicas; None: that of the main parameters.

    Raises:
        UserError: Ranks disagree about values, parameters are not floating-point, of several formats without
            `dtype`, or without values, `regions` are not separate submodules, or a part is sharded already.
    """
    storage: dict[str, Any] = {"dtype": dtype, "bucket_mib": bucket_mib, "offload": offload, "overlap": overlap}
    chosen = None if regions is None else {0: regions}
    return ShardedModel(model, mesh, {0: ""}, chosen, message=message, **storage)


def _require_unsharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(isinstance(hook.hook, Hook) for hook in module._load_state_dict_pre_hooks.values()):
            raise UserError(f"{name or type(model).__name__}: is already sharded; `shard` the full model once")


def _refuse_state(*_: Any) -> None:
    raise UserError(
        "load_state_dict: weights loaded after `shard` are lost at the next step; load them before, or use `pangu.load`"
    )
