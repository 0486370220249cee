"""Shared parts of commands that load a model: arguments, and the processes that the model is distributed over."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pangu.common.errors import UserError, allocating
from pangu.layers.builder import DTYPES
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the model, and for how it is computed."""
    parser.add_argument(
        "model",
        type=Path,
        help="run folder (its newest checkpoint is used), checkpoint folder, or folder of a Hugging Face model",
    )
    parser.add_argument("--rows", type=int, default=8, help="number of texts computed at a time (8)")
    parser.add_argument("--tensor", type=int, default=1, help="devices that split every matrix, with torchrun (1)")
    parser.add_argument("--pipeline", type=int, default=1, help="devices that split the layers, with torchrun (1)")
    parser.add_argument("--precision", choices=list(DTYPES), help="compute format (that of the run)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "npu"], default="auto", help="(auto)")


def require_positive(parser: argparse.ArgumentParser, options: argparse.Namespace, *names: str) -> None:
    """End with a message unless the named arguments and those of the model are at least 1, or were not given."""
    for name in ("rows", "tensor", "pipeline", *names):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: must be at least 1")


@contextmanager
def connected(tensor: int, pipeline: int, device: str, launch: Launch, *, replicas: bool) -> Iterator[Mesh]:
    """Connect all processes of the command in the requested layout.

    `replicas`: surplus processes hold copies of the model, which share the work. Raises UserError if the number of
    processes does not fit the layout.
    """
    shared = tensor * pipeline
    if launch.world % shared or (launch.world > shared and not replicas):
        multiple = "a multiple of " if replicas else ""
        raise UserError(
            f"tensor = {tensor}, pipeline = {pipeline}: needs {multiple}{shared} processes, got "
            f"{launch.world}; start it with torchrun --nproc-per-node={shared}"
        )
    layout = Layout(tensor, pipeline, launch.world // shared)
    place = f"rank {launch.rank} on {socket.gethostname()}"
    with allocating(lambda: place, "try a smaller --rows, or more devices with --tensor or --pipeline"):
        mesh = Mesh.connect(layout, choose_device(device, launch), attempt=launch.attempt)
        try:
            yield mesh
        finally:
            mesh.close()
