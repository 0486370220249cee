"""A mesh is a layout that runs: the layout, this process's place in it, its device and the live process groups."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from pangu.topology.layout import AXES, Coordinates, Layout


@dataclass(frozen=True)
class Mesh:
    """Made once per process and passed to constructors; there is no global state beside it."""

    layout: Layout
    rank: int
    device: torch.device
    groups: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    """Axis name -> the group of this rank along it; axes of size 1 have none. `world` is everybody."""

    @classmethod
    def connect(cls, layout: Layout, device: torch.device) -> Mesh:
        """Join the other processes of the run; a layout of one device needs no process group and makes none."""
        if layout.world == 1:
            return cls(layout, 0, device)
        if not dist.is_initialized():
            dist.init_process_group(dist.get_default_backend_for_device(device))
        shape = tuple(getattr(layout, axis) for axis in AXES)
        live = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
        groups = {axis: live.get_group(axis) for axis, size in zip(AXES, shape, strict=True) if size > 1}
        assert dist.group.WORLD is not None
        return cls(layout, dist.get_rank(), device, groups | {"world": dist.group.WORLD})

    @property
    def at(self) -> Coordinates:
        """This rank's coordinates."""
        return self.layout.coordinates(self.rank)

    @property
    def is_first(self) -> bool:
        """True on the one process that speaks and writes for all."""
        return self.rank == 0

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The process group of this rank along `axis`; None where the axis has size 1."""
        return self.groups.get(axis)

    def close(self) -> None:
        """Leave the process groups."""
        if self.groups:
            dist.destroy_process_group()
