"""Units: consecutive modules whose parameters, gradients and master weights each lie in one flat buffer.

A unit is what is communicated at once. Its table of logical tensors serves optimizer, clipping, LAMB and checkpoints
alike (DESIGN, idea 4). At stage 0, the only one so far, every replica holds every unit whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pangu.layers.initial import fill, logical_view, replace_parameter
from pangu.topology.placement import Placement, PlacementTable


@dataclass(frozen=True)
class Piece:
    """One logical tensor as the optimizer sees it."""

    placement: Placement
    master: Tensor
    """Weights in fp32 (fp64 in fp64) of the slice that this rank holds; `master.grad` is the accumulated gradient."""


class Unit:
    """The flat buffers of some parameters."""

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        table: PlacementTable,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate the buffers, fill them with the first values and make the parameters of `model` views of them.

        Args:
            model: built on the meta device.
            names: its parameters that belong to this unit.
            table: their logical tensors.
            seed: of the first values.
            dtype: format that forward and backward compute in.
            device: where the buffers lie.
        """
        stored = [(name, model.get_parameter(name).shape) for name in names]
        numel = sum(shape.numel() for _, shape in stored)
        wide = torch.promote_types(dtype, torch.float32)
        self.master = torch.zeros(numel, dtype=wide, device=device)  # padding of uneven shares stays 0
        self.grad = torch.zeros(numel, dtype=wide, device=device)
        self.weights = self.master if dtype == wide else torch.empty(numel, dtype=dtype, device=device)
        self.pieces: list[Piece] = []
        self.parameters: list[tuple[nn.Parameter, Tensor]] = []
        """Each parameter of the model with the part of `grad` that its gradient is added to."""

        offset = 0
        for name, shape in stored:
            span = slice(offset, offset + shape.numel())
            offset = span.stop
            for placement in table.stored_in(name):
                master = logical_view(self.master[span], placement)
                fill(master, placement, seed)
                master.grad = logical_view(self.grad[span], placement)
                self.pieces.append(Piece(placement, master))
            parameter = replace_parameter(model, name, self.weights[span].view(shape))
            self.parameters.append((parameter, self.grad[span].view(shape)))
        self.publish()

    def publish(self) -> None:
        """Round the master weights into the weights that the model computes with."""
        if self.weights is not self.master:
            self.weights.copy_(self.master)


def group_parameters(model: nn.Module, bucket_bytes: float) -> list[list[str]]:
    """Names of the parameters of each unit, units in the order of the forward pass.

    Parameters of one layer stay together; layers are joined until their fp32 gradients fill `bucket_bytes`.
    """
    units: list[list[str]] = []
    last_module, size = "", 0.0
    for name, parameter in model.named_parameters():
        first, _, rest = name.partition(".")
        module = f"{first}.{rest.partition('.')[0]}" if first == "layers" else first
        if not units or (module != last_module and size >= bucket_bytes):
            units.append([])
            size = 0.0
        units[-1].append(name)
        last_module, size = module, size + 4.0 * parameter.numel()
    return units
