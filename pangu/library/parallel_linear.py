"""Tensor-parallel linear layers for a user's model."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor, nn

from pangu.collectives.regions import TensorRegion
from pangu.common.errors import UserError
from pangu.layers.builder import Builder
from pangu.layers.linear import ColumnParallelLinear, RowParallelLinear
from pangu.library.requirements import require_no_tensor_hooks
from pangu.topology.mesh import Mesh
from pangu.topology.placement import Placement, PlacementTable

L = TypeVar("L", ColumnParallelLinear, RowParallelLinear)


def column_parallel(linear: nn.Linear, mesh: Mesh) -> ColumnParallelLinear:
    """Return this rank's outputs of a linear layer (Shoeybi et al. 2019, section 3), with its values.

    The layer takes [sequence (/ ranks with sequence parallelism), ..., inputs] and returns [sequence, ..., outputs /
    ranks]; `row_parallel` takes that. Raises UserError unless it is an nn.Linear and the ranks divide the outputs.
    """
    return _shared(linear, mesh, ColumnParallelLinear)


def row_parallel(linear: nn.Linear, mesh: Mesh) -> RowParallelLinear:
    """Return this rank's inputs of a linear layer (Shoeybi et al. 2019, section 3), with its values.

    The layer sums the partial products of the ranks, then adds the bias. It takes [sequence, ..., inputs / ranks] and
    returns [sequence (/ ranks with sequence parallelism: Korthikanti et al. 2022, section 4.2), ..., outputs]. Raises
    UserError unless it is an nn.Linear and the ranks divide the inputs.
    """
    return _shared(linear, mesh, RowParallelLinear)


def local_sequence(x: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's slice [sequence / ranks, ...] of `x` with sequence parallelism, otherwise `x`.

    Raise UserError if the ranks cannot divide the sequence.
    """
    region = TensorRegion.of(mesh)
    if region.slices_sequence and len(x) % region.size:
        raise UserError(f"sequence length = {len(x)}: must be a multiple of the {region.size} tensor-parallel ranks")
    return region.local_sequence(x)


def _shared(linear: nn.Linear, mesh: Mesh, kind: type[L]) -> L:
    if not isinstance(linear, nn.Linear):
        raise UserError(f"{type(linear).__name__}: only an nn.Linear can be split over tensor-parallel ranks")
    require_no_tensor_hooks(linear)
    dim = 0 if kind is ColumnParallelLinear else 1
    region, shape = TensorRegion.of(mesh), tuple(linear.weight.shape)
    if shape[dim] % region.size:
        what = ("out_features", "in_features")[dim]
        raise UserError(f"{what} = {shape[dim]}: must be a multiple of the {region.size} tensor-parallel ranks")
    table, parameters = PlacementTable(), dict(linear.named_parameters())
    cuts = {"weight": dim, "bias": None if dim else 0}
    for name, parameter in parameters.items():
        table.place(f"linear.{name}", [Placement(name, tuple(parameter.shape), cut_dim=cuts[name])], region)
    build = Builder(table, region=region)
    layer = kind(build, "linear")
    for name, parameter in parameters.items():
        (placement,) = table.stored_in(f"linear.{name}")
        part, cut = parameter.detach(), placement.cut_dim
        part = part if cut is None else part.narrow(cut, placement.start, placement.stop - placement.start)
        setattr(layer, name, nn.Parameter(part.clone(), requires_grad=parameter.requires_grad))
    return layer
