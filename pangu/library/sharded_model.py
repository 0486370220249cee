"""Any module on a mesh: its parameters, gradients and optimizer state spread over the ranks as ZeRO says."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pangu.checkpoint.safetensors_file import bytes_of
from pangu.collectives.reduce import all_reduce, gather_objects
from pangu.config.build import build
from pangu.config.errors import UserError, shown
from pangu.config.optimizer import AdamConfig, LambConfig
from pangu.config.schema import usual_bucket_mib
from pangu.layers.linear import ParallelLinear
from pangu.library.regions import RegionHooks, regions_of
from pangu.optim.build import make_optimizer
from pangu.optim.lamb import Lamb
from pangu.optim.moments import updates_at_once
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement, PlacementTable, TensorRank
from pangu.zero.sharded import ShardedParameters, Storage

Offload = Literal["optimizer", "parameters"]


class Update(NamedTuple):
    """What `ShardedModel.step` did, the same on every rank; scalars on the device, fp64."""

    grad_norm: Tensor
    """Of the mean gradient, before clipping; if it is not finite, the step changed nothing."""
    loss: Tensor
    """Mean over the replicas of the losses that were given."""


class ShardedModel:
    """A module on a mesh; `shard` makes one.

    The module computes as before, and `loss.backward()` leaves its gradients here: `parameter.grad` is None. Gradients
    are those of the mean over the replicas; under sequence parallelism a replica's loss is the sum of its ranks'
    losses, each of its part of the sequence. Micro-batches add up.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        storage: Storage,
        chunks: Mapping[int, str],
        regions: Sequence[str] | None = None,
        reduces: bool | None = None,
        turns: bool = True,
    ) -> None:
        """`chunks`: numbers and paths of the modules of `model` that are computed. `reduces`: whether gradients are
        reduced after each backward; None: who computes says when. `turns`: backward begins with the last chunk."""
        self.model, self.mesh = model, mesh
        _require_unsharded(model)
        table = _placed(model, mesh)
        _require_agreement(model, table, mesh)
        names: dict[nn.Parameter, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).append(name)
        parts = regions_of(model, chunks, regions)
        each = mesh.layout.zero >= 2 and mesh.layout.shards > 1 if reduces is None else reduces
        self.parameters = ShardedParameters(model, table, parts, mesh, storage, each)
        for first, *others in names.values():
            for name in others:
                owner, _, leaf = name.rpartition(".")
                setattr(model.get_submodule(owner), leaf, model.get_parameter(first))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(mesh.device)
        self._reduces_each, self._syncs, self._reduced, self._is_whole = each, True, False, False
        self._scheduled = reduces is not None
        self._known_optimizer: torch.optim.Optimizer | None = None
        unsharder = self.parameters.unsharder if self.parameters.unshards else None
        begins, ends = self._begin_backward, self._end_backward
        if self._scheduled:
            begins = ends = _nothing
        self.hooks = RegionHooks(model, chunks, parts, unsharder, begins, ends, turns)
        model.register_state_dict_pre_hook(self._before_state)
        model.register_load_state_dict_pre_hook(_refuse_state)
        self.parameters.gradients.start_step()
        flats = self.parameters.flat_parameters
        self._flats = {id(parameter): flat for flat in flats for parameter, _ in flat.parameters}

    def lamb(
        self,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        eps_inside_root: bool = False,
        exclude_vectors: bool = True,
        max_ratio: float | None = None,
        moments: Literal["fp32", "bf16"] = "fp32",
    ) -> torch.optim.Optimizer:
        """LAMB (You et al. 2020, Algorithm 2) with a trust ratio of every parameter, wherever its shards are. `lr`,
        `betas`, `eps`, `weight_decay`: η, β, ε, λ. `eps_inside_root`: Algorithm 1 of the first version.
        `exclude_vectors`: neither decay nor ratio for parameters of one dimension. `max_ratio`: the largest ratio.
        `moments`: their format between steps; fp32 is that of the main parameters. Raises UserError for numbers that
        cannot be."""
        values = {"lr": lr, "betas": list(betas), "eps": eps, "weight_decay": weight_decay, "moments": moments}
        only = {"eps_inside_root": eps_inside_root, "exclude_vectors": exclude_vectors, "max_ratio": max_ratio}
        return self._optimizer(build(LambConfig, {"name": "lamb", "clip": None, **values, **only}))

    def adamw(
        self,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        moments: Literal["fp32", "bf16"] = "fp32",
    ) -> torch.optim.Optimizer:
        """AdamW (Loshchilov & Hutter 2019, Algorithm 2), without decay for parameters of one dimension; arguments as
        those of `lamb`."""
        values = {"lr": lr, "betas": list(betas), "eps": eps, "weight_decay": weight_decay, "moments": moments}
        return self._optimizer(build(AdamConfig, {"name": "adam", "clip": None, **values}))

    def _optimizer(self, config: AdamConfig | LambConfig) -> torch.optim.Optimizer:
        trained = [(shard.placement, shard.main) for shard in self.parameters.trained_shards]
        return make_optimizer(config, trained, self.parameters.squares.over)

    def main_parameters(self) -> list[Tensor]:
        """This rank's shards of the trained parameters, flat, in fp32 (fp64 in fp64), for any optimizer that treats
        each element alone. A rank of a tiny model may have none: `[{"params": sharded.main_parameters()}]`."""
        return [shard.main for shard in self.parameters.trained_shards]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within the block, backward only adds to this rank's gradients: for all micro-batches of a step but the last.
        From ZeRO-2 on, where no rank has room for whole gradients, they are reduced after each backward anyway."""
        self._syncs = False
        try:
            yield
        finally:
            self._syncs = True

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within the block, all weights are there, in the compute format: to look at them, for `model.state_dict()`.
        Not for steps. All ranks enter it."""
        uses = self.parameters.unsharder.uses
        self.parameters.unsharder.wait()
        for name in uses:
            self.hooks.begin(name, {})
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for name in uses:
                self.hooks.end(name, {})

    def step(self, optimizer: torch.optim.Optimizer, clip: float | None = None, loss: Tensor | None = None) -> Update:
        """Update the parameters with the gradients of the backwards since the last step, and forget these; all ranks
        call it. `optimizer`: that of `lamb` or `adamw`, or another one of `main_parameters`. `clip`: the largest norm
        of the gradient of all parameters together (Pascanu et al. 2013, Algorithm 1). `loss`: this rank's, to be
        averaged. A step whose norm is not finite is skipped. The host waits for nothing, unless the optimizer is
        neither one of these two nor a fused one of torch. Raises UserError for an optimizer of other tensors, and for a
        `clip` that is not above 0, after a backward that has failed, and if the model has other parameters than `shard`
        gave it."""
        parameters, layout = self.parameters, self.mesh.layout
        self.hooks.require_ended()
        self._require_main_parameters(optimizer)
        self.require_same()
        if clip is not None and not clip > 0:
            raise UserError(f"clip = {clip}: must be above 0; None does not clip")
        if loss is not None and not (isinstance(loss, Tensor) and loss.numel() == 1):
            raise UserError(f"loss = {shown(loss)}: must be a tensor of one number")
        if not (self._reduced or self._reduces_each or self._scheduled):
            self._reduce()
        parameters.gradients.finish()
        if loss is not None:
            loss = loss.detach().double().reshape(())
            if layout.sequence:
                loss = all_reduce(loss.clone(), self.mesh.group("tensor"))
        norm, total = parameters.norm_and_loss(loss, ()) / layout.replicas
        overflow = norm.isfinite().logical_not()
        divisor = torch.ones_like(norm) * layout.replicas
        if clip is not None:
            divisor = divisor * ((norm + 1e-6) / clip).clamp(min=1.0)
        for shard in parameters.trained_shards:  # which `optimizer.zero_grad` takes away
            if shard.host_grad is None:
                shard.main.grad = shard.grad
        scales = getattr(optimizer, "_step_supports_amp_scaling", False) and updates_at_once(norm.device)
        if isinstance(optimizer, Lamb) or scales:
            alone = not any(group.get("adapt") for group in optimizer.param_groups)
            parameters.update(optimizer, (overflow, divisor), one_by_one=alone)
        elif not overflow:
            for flat in parameters.trained:
                flat.grad.div_(divisor)
            parameters.update(optimizer, (), one_by_one=False)
        self.hooks.guard()
        parameters.gradients.start_step()
        self._reduced = False
        return Update(norm, total)

    def require_same(self) -> None:
        """Raises UserError if the model has other parameters, or parameters of other values or kinds, than `shard` has
        given it: they would not be trained."""
        for name, parameter in self.model.named_parameters():
            flat = self._flats.get(id(parameter))
            change = ""
            if flat is None or parameter.untyped_storage().data_ptr() != flat.weights.untyped_storage().data_ptr():
                change = "was put into the model, or converted,"
            elif parameter.requires_grad != flat.trained:
                change = f"was {'frozen' if flat.trained else 'unfrozen'}"
            if change:
                raise UserError(f"{name}: {change} after `shard`, which has no effect; change the model before")

    def _require_main_parameters(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of anything but main parameters would change nothing."""
        if optimizer is self._known_optimizer:
            return
        trained = set(self.main_parameters())
        if any(tensor not in trained for group in optimizer.param_groups for tensor in group["params"]):
            raise UserError(
                "step: the optimizer has other tensors than this model's main parameters; `sharded.lamb(...)`, "
                "`sharded.adamw(...)` or one of `sharded.main_parameters()` works"
            )
        self._known_optimizer = optimizer

    def _begin_backward(self) -> None:
        if self._reduced and not self._reduces_each:
            raise UserError(
                "a second backward in one step, after the gradients were summed over the replicas: "
                "`with sharded.no_sync():` is for all micro-batches but the last"
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

    def _before_state(self, *_: Any) -> None:
        self.parameters.unsharder.wait()
        if self.mesh.layout.zero == 3 and self.parameters.unshards and not self._is_whole:
            raise UserError(
                "state_dict: the weights are sharded; `pangu.save` writes them without gathering, and `with "
                "sharded.whole():` on all ranks gathers them first"
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
    """Spread a module's parameters, gradients and optimizer state over the ranks of a mesh, in place (ZeRO: Rajbhandari
    et al. 2020, section 5; `mesh.layout.zero` is the stage). Its parameters keep their names and are replaced by
    others, on `mesh.device`; buffers move there and stay whole. It may hold tied and frozen parameters and layers of
    `column_parallel` and `row_parallel`.

    The first values are those that the module has: build it with the same seed on every rank.

    Args:
        model: on any device, whole on every rank but for the parallel layers.
        regions: names of submodules, in the order of forward, that ZeRO-3 unshards one after the other for their
            forward and backward; None: what `model.zero_regions()` returns, if there is that method, otherwise the
            children, of which lists of layers are taken apart. A region must not change its input in place.
        dtype: compute format of all parameters; main parameters are fp32 beside it (fp64 in fp64). None: as they are.
        bucket_mib: MiB of fp32 gradients that are sent at once, about; None: 25 without ZeRO, otherwise a region's.
        offload: what lies in host memory.
        overlap: communication runs while modules compute.
        message: format in which gradients are summed over replicas; None: that of the main parameters.

    Raises UserError if ranks disagree about the values of a parameter or buffer, parameters are not floating or of
    several formats without `dtype`, or have no values yet, `regions` are not separate submodules, or a part of the
    model is sharded already.
    """
    return ShardedModel(
        model, mesh, storage_of(model, mesh, dtype, bucket_mib, offload, overlap, message), {0: ""}, regions
    )


def storage_of(
    model: nn.Module,
    mesh: Mesh,
    dtype: torch.dtype | None = None,
    bucket_mib: float | None = None,
    offload: Sequence[Offload] = (),
    overlap: bool = True,
    message: torch.dtype | None = None,
) -> Storage:
    """How the parameters of a module are stored. Arguments and errors are those of `shard`."""
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh = {shown(mesh)}: must be a mesh, as `pangu.connect` returns it")
    formats: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or is_lazy(parameter):
            raise UserError(
                f"{name}: has no values yet; build the module on a device, and let lazy modules see a batch"
            )
        if not parameter.is_floating_point():
            raise UserError(f"{name}: is {parameter.dtype}; parameters must be floating, others belong into buffers")
        formats.setdefault(parameter.dtype, name)
    if dtype is None and len(formats) > 1:
        listed = ", ".join(f"{name} is {kind}" for kind, name in formats.items())
        raise UserError(f"parameters of several formats: {listed}; dtype=torch.bfloat16, or another one, holds for all")
    if unknown := {offload} if isinstance(offload, str) else set(offload) - {"optimizer", "parameters"}:
        raise UserError(f"offload = {sorted(unknown)}: 'optimizer' and 'parameters' work, in a list")
    for name, kind in (("dtype", dtype), ("message", message)):
        if kind is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point and kind.itemsize > 1):
            raise UserError(f"{name} = {kind}: must be a floating format of at least 16 bits; torch.bfloat16 works")
    if bucket_mib is not None and not bucket_mib > 0:
        raise UserError(f"bucket_mib = {bucket_mib}: must be above 0")
    layout = mesh.layout
    mib = usual_bucket_mib(layout.zero, layout.replicas) if bucket_mib is None else bucket_mib
    return Storage(dtype or next(iter(formats), torch.float32), 2**20 * mib, None, tuple(offload), overlap, message)


def _require_unsharded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(hook.hook is _refuse_state for hook in module._load_state_dict_pre_hooks.values()):
            raise UserError(f"{name or type(model).__name__}: is sharded already; `shard` the whole model, once")


def _nothing() -> None:
    pass


def _refuse_state(*_: Any) -> None:
    raise UserError(
        "load_state_dict: what is loaded after `shard` is lost at the next step; load before, or `pangu.load`"
    )


def _placed(model: nn.Module, mesh: Mesh) -> PlacementTable:
    """The parameters of a model, each a logical tensor of its name; those of parallel layers are cut."""
    at, layout = mesh.at, mesh.layout
    table, rank = PlacementTable(), TensorRank(at.tensor, layout.tensor, layout.sequence)
    cut = {
        f"{path}.{name}" if path else name: placement
        for path, layer in model.named_modules()
        if isinstance(layer, ParallelLinear)
        for name, placement in layer.logical().items()
    }
    for name, parameter in model.named_parameters():
        shape, dim = cut.get(name, (tuple(parameter.shape) or (1,), None))
        table.place(name, [Placement(name, shape, cut_dim=dim, trained=parameter.requires_grad)], rank)
    return table


def _require_agreement(model: nn.Module, table: PlacementTable, mesh: Mesh) -> None:
    """Raise UserError on all ranks unless ranks that hold the same tensors hold the same values."""
    if mesh.layout.world == 1:
        return
    at, values = mesh.at, {**dict(model.named_parameters()), **dict(model.named_buffers())}
    cut = {placement.name for placement in table if placement.cut_dim is not None}
    local_digests = {name: (at.tensor if name in cut else 0, _digest(tensor)) for name, tensor in values.items()}
    holders: dict[tuple[int, int, str], tuple[int, str]] = {}
    for rank, (stage, digests) in enumerate(gather_objects((at.pipeline, local_digests), mesh.group("world"))):
        names = ", ".join(digests)
        for name, (tensor, digest) in {"": (0, names), **digests}.items():
            first, expected = holders.setdefault((stage, tensor, name), (rank, digest))
            if expected != digest:
                what = f"{name}: its first values differ" if name else "parameters and buffers differ"
                raise UserError(
                    f"{what} between ranks {first} and {rank}; build the module alike on every rank, with the same "
                    "torch.manual_seed or from the same file"
                )


def _digest(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {hashlib.sha256(bytes_of(tensor)).hexdigest()}"
