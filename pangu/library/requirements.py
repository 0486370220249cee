"""Requirements of `shard` on a module, and the placements of its parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pangu.checkpoint.safetensors_file import bytes_of
from pangu.collectives.reduce import gather_objects
from pangu.common.errors import UserError, shown
from pangu.config.schema import usual_bucket_mib
from pangu.layers.linear import ParallelLinear
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement, PlacementTable, TensorRank

Offload = Literal["optimizer", "parameters"]


def storage_of(
    model: nn.Module,
    mesh: Mesh,
    dtype: torch.dtype | None = None,
    bucket_mib: float | None = None,
    offload: Sequence[Offload] = (),
    overlap: bool = True,
    message: torch.dtype | None = None,
) -> tuple[torch.dtype, float, tuple[str, ...], bool, torch.dtype | None]:
    """Return dtype, bytes per bucket, offload, overlap and message. Arguments and errors are those of `shard`."""
    if not isinstance(mesh, Mesh):
        raise UserError(f"mesh = {shown(mesh)}: must be a mesh, as `pangu.connect` returns it")
    formats: dict[torch.dtype, str] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_meta or is_lazy(parameter):  # shards are cut from values
            raise UserError(
                f"{name}: has no values yet; build the module on a real device, and run lazy modules on a batch"
            )
        if not parameter.is_floating_point():
            raise UserError(f"{name}: is {parameter.dtype}; parameters must be floating-point; use buffers for others")
        formats.setdefault(parameter.dtype, name)
    if dtype is None and len(formats) > 1:  # a flat parameter has one dtype
        listed = ", ".join(f"{name} is {kind}" for kind, name in formats.items())
        raise UserError(f"parameters of several dtypes: {listed}; set one for all, e.g. dtype=torch.bfloat16")
    if unknown := {offload} if isinstance(offload, str) else set(offload) - {"optimizer", "parameters"}:
        raise UserError(f"offload = {sorted(unknown)}: use 'optimizer' and 'parameters' in a list")
    for name, kind in (("dtype", dtype), ("message", message)):
        if kind is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point and kind.itemsize > 1):
            raise UserError(f"{name} = {kind}: must be a floating-point dtype of at least 16 bits; use torch.bfloat16")
    layout, kind = mesh.layout, dtype or next(iter(formats), torch.float32)
    # frozen parameters have no gradients that could vanish
    half = {"dtype": kind if any(p.requires_grad for p in model.parameters()) else None, "message": message}
    for name in (name for name, each in half.items() if each == torch.float16):
        raise UserError(
            f"{name} = torch.float16: small gradients underflow in it without a loss scale, which "
            f"only pretrain.py has; use {name}=torch.bfloat16"
        )
    if bucket_mib is not None and not bucket_mib > 0:
        raise UserError(f"bucket_mib = {bucket_mib}: must be above 0")
    mib = usual_bucket_mib(layout.zero, layout.replicas) if bucket_mib is None else bucket_mib
    return kind, 2**20 * mib, tuple(offload), overlap, message


def require_no_tensor_hooks(model: nn.Module) -> None:
    """Raise UserError if a parameter has a hook, which would be lost with the tensor that is replaced."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UserError(
                f"{name}: has a hook, which is lost when the parameter is replaced; register the hook on the new "
                "parameter afterwards"
            )


def placed(model: nn.Module, mesh: Mesh) -> PlacementTable:
    """Return the parameters of a model as logical tensors of the same names; those of parallel layers are cut."""
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


def require_agreement(model: nn.Module, table: PlacementTable, mesh: Mesh) -> None:
    """Raise UserError on all ranks unless ranks that hold the same tensors hold the same values."""
    if mesh.layout.world == 1:
        return
    at, values = mesh.at, {**dict(model.named_parameters()), **dict(model.named_buffers())}
    cut = {placement.name for placement in table if placement.cut_dim is not None}
    # tensor-parallel ranks hold different slices of what is cut, and copies of the rest
    local_digests = {name: (at.tensor if name in cut else 0, _digest(tensor)) for name, tensor in values.items()}
    holders: dict[tuple[int, int, str], tuple[int, str]] = {}
    for rank, (stage, digests) in enumerate(gather_objects((at.pipeline, local_digests), mesh.group("world"))):
        names = ", ".join(digests)
        for name, (tensor, digest) in {"": (0, names), **digests}.items():  # names and order must agree first
            first, expected = holders.setdefault((stage, tensor, name), (rank, digest))
            if expected != digest:
                what = f"{name}: its initial values differ" if name else "parameters and buffers differ"
                raise UserError(
                    f"{what} between ranks {first} and {rank}; build the same module on every rank, with the same "
                    "torch.manual_seed or from the same file"
                )


def _digest(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {hashlib.sha256(bytes_of(tensor)).hexdigest()}"
