"""Creation of a mesh from the launcher's environment and the parallel sizes."""

from __future__ import annotations

from pangu.common.errors import UserError
from pangu.topology.launch import Launch, choose_device
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh


def connect(
    *,
    tensor: int = 1,
    pipeline: int = 1,
    zero: int = 0,
    zero_group: int | None = None,
    sequence: bool = False,
    device: str = "auto",
    timeout_s: float = 600.0,
) -> Mesh:
    """Join the processes that torchrun has started, each with its own device; plain `python` is one process.

    The processes beyond `tensor` x `pipeline` are replicas, `mesh.layout.replicas` of them; this one has index
    `mesh.replica`, and computes on `mesh.device`.

    Args:
        tensor: Tensor-parallel size: neighboring processes that split the matrices of `column_parallel` and
            `row_parallel`.
        pipeline: Number of stages.
        zero: ZeRO stage (Rajbhandari et al. 2020, section 5), sharded over the replicas: 0 nothing, 1 optimizer
            state, 2 also gradients, 3 also parameters.
        zero_group: Replicas that shard among themselves, e.g. those of a node; None: all.
        sequence: Sequence parallelism (Korthikanti et al. 2022, section 4.2): between the matrices each
            tensor-parallel process has its slice of dimension 0.
        device: `auto`, `cpu`, `cuda`, `npu` or another device type that torch knows.
        timeout_s: Timeout for a message from another process, seconds.

    Raises:
        UserError: The processes cannot form such a mesh or do not all arrive, or the machine lacks devices.
    """
    launch = Launch.from_environment()
    for name, value in (("tensor", tensor), ("pipeline", pipeline), ("zero_group", zero_group)):
        if value is not None and value < 1:
            raise UserError(f"{name} = {value}: must be at least 1")
    if not 0 < timeout_s <= 1e9:
        raise UserError(f"timeout_s = {timeout_s}: must be above 0 and at most 1e9")
    if zero not in (0, 1, 2, 3):
        raise UserError(f"zero = {zero}: must be 0, 1, 2 or 3")
    replicas, rest = divmod(launch.world, tensor * pipeline)
    if rest or not replicas:
        raise UserError(
            f"tensor = {tensor}, pipeline = {pipeline}: {launch.world} processes are not a multiple of "
            f"{tensor * pipeline}; use --nproc-per-node={tensor * pipeline * max(replicas, 1)}"
        )
    if zero_group is not None and replicas % zero_group:
        raise UserError(f"zero_group = {zero_group}: must divide the {replicas} replicas")
    layout = Layout(tensor, pipeline, replicas, zero, sequence, zero_group=zero_group or 0)
    return Mesh.connect(layout, choose_device(device, launch), timeout_s, launch.attempt)
