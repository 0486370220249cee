"""Measures the machine that it runs on and writes a file of configs/cluster/, from which plans are made: matrix
products over the shapes that the presets make, attention, operations bound by memory, the floor of starting a kernel,
collectives over sizes, and how much computing and communication slow each other. Takes less than five minutes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pangu.config.cluster import ClusterConfig, LinkConfig, MatmulConfig
from pangu.config.errors import UserError, writing
from pangu.config.exit_status import exit_status
from pangu.config.files import NewFile
from pangu.planning.auto import cluster_of_device, device_here
from pangu.planning.cluster import cluster_names, load_cluster
from pangu.planning.cost import Group, collective_seconds, matmul_seconds
from pangu.planning.workload import Collective, Matmul
from pangu.topology.launch import Launch, choose_device

_EXAMPLE = """example:
  torchrun --nproc-per-node=8 tools/calibrate.py --output configs/cluster/mine.yaml
  torchrun --nproc-per-node=2 tools/calibrate.py --output mine.yaml --quick

Links between nodes are measured where the processes are on several (torchrun --nnodes); what is not measured is
borrowed from the file of --like and marked so.
"""
_CLUSTERS = Path(__file__).resolve().parent.parent / "configs" / "cluster"
_HIDDEN = {False: (2048, 2560, 4096, 5120, 8192, 12288), True: (256, 512, 1024)}
_TOKENS = {False: (1024, 2048, 4096, 8192), True: (128, 512, 1024)}
_SIZES = {False: (2**16, 2**20, 2**24, 2**27, 2**29), True: (2**16, 2**18, 2**20, 2**22, 2**24)}
"""Bytes of messages; all by whether the device is the host."""
_HEAD = "# Measured by tools/calibrate.py on "


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.yaml", help="the cluster's file")
    parser.add_argument("--like", default="", metavar="NAME", help="file of configs/cluster/ to borrow from")
    parser.add_argument("--quick", action="store_true", help="few shapes, once each: to see that it works")
    return parser.parse_args(arguments)


class Clock:
    """Times what a device does."""

    def __init__(self, device: torch.device, quick: bool) -> None:
        self.device = device
        self.on_host = device.type == "cpu"
        self._least = 0.002 if quick else 0.02
        self._rounds = 1 if quick else 5

    def seconds(self, action: Callable[[], object], alike: bool = False) -> float:
        """Median time of an action. `alike`: all processes repeat it as often, as those that communicate must."""
        self._timed(action, 1)
        repeats = 3 if alike else max(1, int(self._least / max(self._timed(action, 1), 1e-7)))
        return median(self._timed(action, repeats) for _ in range(self._rounds))

    def _timed(self, action: Callable[[], object], repeats: int) -> float:
        self._wait()
        begin = time.perf_counter()
        for _ in range(repeats):
            action()
        self._wait()
        return (time.perf_counter() - begin) / repeats

    def _wait(self) -> None:
        if not self.on_host:
            torch.accelerator.synchronize()


def shapes_of(on_host: bool, quick: bool) -> list[Matmul]:
    """Products of layers: forward, and of the gradients of inputs and weights, on 1 to 8 tensor-parallel ranks."""
    found = []
    for hidden in _HIDDEN[on_host][: 1 if quick else None]:
        for tokens in _TOKENS[on_host][: 2 if quick else None]:
            for ranks in (1,) if quick else (1, 4):
                for depth, columns in ((hidden, 3 * hidden // ranks), (4 * hidden // ranks, hidden)):
                    found += [
                        Matmul(tokens, columns, depth),
                        Matmul(tokens, depth, columns),
                        Matmul(depth, columns, tokens),
                    ]
    return list(dict.fromkeys(found))


def measure_matmuls(clock: Clock, base: MatmulConfig, dtype: torch.dtype, quick: bool) -> MatmulConfig:
    """Rates of products, and the figures of the model fitted to them."""
    shapes, rates = shapes_of(clock.on_host, quick), []
    for shape in shapes:
        left = torch.randn(shape.rows, shape.depth, device=clock.device, dtype=dtype)
        right = torch.randn(shape.depth, shape.columns, device=clock.device, dtype=dtype)
        rates.append(shape.flops / clock.seconds(lambda left=left, right=right: left @ right))  # type: ignore[misc]
    # a host has no printed peak: its best product is
    peak = max(rates) / 1e12 if clock.on_host else max(base.tflops, max(rates) / 1e12)
    units = torch.get_num_threads() if clock.on_host else base.units
    losses = []
    for shape, rate in zip(shapes, rates, strict=True):
        tiles = max(1, -(-shape.rows // 128)) * max(1, -(-shape.columns // 128))
        losses.append((peak * 1e12 / rate, 1.0, 1.0 / shape.depth, units / tiles))
    table = np.array(losses)
    weights = 1 / table[:, :1]
    # time over ideal = (1 + depth/k + waves x units/tiles) / efficiency
    constant, depth, waves = np.linalg.lstsq(table[:, 1:] * weights, np.ones(len(table)), rcond=None)[0]
    constant = max(float(constant), 1.0)
    measured = tuple(
        (float(shape.rows), float(shape.columns), float(shape.depth), max(1e-4, round(rate / peak / 1e12, 4)))
        for shape, rate in zip(shapes, rates, strict=True)
    )
    return replace(
        base,
        tflops=peak,
        tflops_fp32=peak if dtype == torch.float32 else base.tflops_fp32,
        efficiency=1 / constant,
        depth=max(0.0, float(depth) / constant),
        waves=max(0.0, float(waves) / constant),
        units=units,
        attention=measure_attention(clock, peak, dtype, quick),
        measured=measured,
    )


def measure_attention(clock: Clock, peak: float, dtype: torch.dtype, quick: bool) -> float:
    """Share of the peak that causal attention reaches, forward and backward."""
    length = 256 if quick or clock.on_host else 4096
    heads, size = (4, 64) if clock.on_host else (16, 128)
    qkv = [torch.randn(1, heads, length, size, device=clock.device, dtype=dtype, requires_grad=True) for _ in range(3)]

    def step() -> None:
        query, key, value = qkv
        scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    flops = 3.5 * 2 * 2 * length * length * size * heads / 2
    return min(1.0, flops / clock.seconds(step) / peak / 1e12)


def measure_memory(clock: Clock) -> float:
    """Bytes a second of an addition of tensors that no cache holds."""
    numbers = 2**24 if clock.on_host else 2**28
    a, b, c = (torch.zeros(numbers, device=clock.device) for _ in range(3))
    return 12.0 * numbers / clock.seconds(lambda: torch.add(a, b, out=c))


def measure_launch(clock: Clock) -> float:
    """Seconds of a kernel with nothing to do."""
    tiny = torch.zeros(8, device=clock.device)

    def chain() -> None:
        for _ in range(100):
            tiny.add_(1.0)

    return clock.seconds(chain) / 100


def measure_link(
    clock: Clock, group: dist.ProcessGroup | None, size: int, base: ClusterConfig, quick: bool
) -> LinkConfig:
    """Latency and bandwidth of a group: least squares over sizes and kinds of collectives, on relative errors."""
    rows, seconds = [], []
    for count in _SIZES[clock.on_host][: 3 if quick else None]:
        buffer = torch.zeros(count // 4 // size * size, device=clock.device)
        for kind, action in actions_of(buffer, group, size):
            taken = clock.seconds(action, alike=True)
            per_latency, per_byte = collective_terms(kind, buffer.nbytes, size, base)
            rows.append((per_latency / taken, per_byte / taken))
            seconds.append(1.0)
    latency, inverse = np.linalg.lstsq(np.array(rows), np.array(seconds), rcond=None)[0]
    return LinkConfig(max(0.1, float(latency)), 1 / max(1e-6, float(inverse)))


def collective_terms(kind: str, nbytes: int, size: int, base: ClusterConfig) -> tuple[float, float]:
    """Seconds of a collective for each microsecond of latency, and for each nanosecond of a byte."""
    cluster = replace(base, inside=LinkConfig(1.0, 1.0))
    alone = collective_seconds(Collective(kind, "tensor", 0.0), Group(size, size), cluster)  # type: ignore[arg-type]
    whole = collective_seconds(Collective(kind, "tensor", nbytes), Group(size, size), cluster)  # type: ignore[arg-type]
    return alone, whole - alone


def actions_of(buffer: Tensor, group: dist.ProcessGroup | None, size: int) -> list[tuple[str, Callable[[], object]]]:
    """The collectives of layers and replicas on a buffer."""
    # their names before torch 2.13 come second
    shard = torch.zeros_like(buffer[: buffer.numel() // size])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return [
        ("all_reduce", lambda: dist.all_reduce(buffer, group=group)),
        ("all_gather", lambda: gather(buffer, shard, group=group)),
        ("reduce_scatter", lambda: scatter(shard, buffer, group=group)),
    ]


def measure_overlap(clock: Clock, dtype: torch.dtype) -> float:
    """Factor by which a product and an all-reduce slow each other."""
    side = 512 if clock.on_host else 8192
    matrix = torch.randn(side, side, device=clock.device, dtype=dtype)
    buffer = torch.zeros(2**20 if clock.on_host else 2**26, device=clock.device)

    def both() -> None:
        work = dist.all_reduce(buffer, async_op=True)
        matrix @ matrix
        assert work is not None
        work.wait()

    product = clock.seconds(lambda: matrix @ matrix, alike=True)
    reduction = clock.seconds(lambda: dist.all_reduce(buffer), alike=True)
    together = clock.seconds(both, alike=True)
    # max + (overlap - 1) x min: see cost.beside
    return 1 + min(1.0, max(0.0, together - max(product, reduction)) / min(product, reduction))


def calibrate(options: argparse.Namespace) -> None:
    """Measure, and let the first process write the file. Raises UserError."""
    launch = Launch.from_environment()
    device = choose_device("auto", launch)
    base = _borrowed(options.like, launch)
    new = _begin(options.output) if launch.rank == 0 else None
    try:
        if launch.world > 1:
            dist.init_process_group(dist.get_default_backend_for_device(device))
        cluster, notes = _measure(Clock(device, options.quick), base, launch, options.quick)
        if new is not None:
            _write(options.output, new, replace(cluster, name=options.output.stem), notes)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if new is not None:
            new.discard()


def _begin(path: Path) -> NewFile:
    """The file before anything is measured, which takes minutes. Raises UserError if there cannot be one."""
    if path.suffix != ".yaml" or path.stem.startswith("."):
        raise UserError(f"--output {path}: cluster=NAME asks for a file NAME.yaml; mine.yaml works")
    with writing(path):
        if path.exists() and not path.read_bytes().startswith(_HEAD.encode()):
            raise UserError(f"--output {path}: this tool has not made the file that is there; another name works")
        return NewFile(path)


def _borrowed(like: str, launch: Launch) -> ClusterConfig:
    """What is not measured: of the file that is named, or that is for such a device. Raises UserError."""
    names, device = cluster_names(_CLUSTERS, whole=True), device_here(launch)
    if like and like not in names:
        raise UserError(f"--like {like}: there is no such file; {', '.join(names)} work")
    found = None if device is None else cluster_of_device(device.name, names)
    base = load_cluster(_CLUSTERS / f"{like or found or 'a100'}.yaml")
    gib = base.memory.gib if device is None else device.total_memory / 2**30
    return replace(base, memory=replace(base.memory, gib=gib))


def _measure(clock: Clock, base: ClusterConfig, launch: Launch, quick: bool) -> tuple[ClusterConfig, list[str]]:
    """The cluster's figures, and what was borrowed."""
    on_host, world, node = clock.on_host, launch.world, launch.local_world
    dtype = torch.float32 if on_host else torch.bfloat16
    matmul = measure_matmuls(clock, base.matmul, dtype, quick)
    bandwidth = measure_memory(clock) / 1e9
    memory = replace(base.memory, gb_s=max(base.memory.gb_s, bandwidth))
    if on_host:
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / node
        memory = replace(memory, gb_s=bandwidth, gib=gib, context_gib=0.2, workspace_gib=0.0, communicator_gib=0.0)
    memory = replace(memory, efficiency=min(1.0, bandwidth / memory.gb_s))
    borrowed = ["price", "step_us", "message_us", "host_gb_s", "memory.fragmentation", "matmul.alignment"]
    inside, between, overlap = base.inside, base.between, base.overlap
    if world > 1:
        inside = measure_link(clock, _neighbours(node, world), node, base, quick) if node > 1 else inside
        overlap = measure_overlap(clock, dtype)
    else:
        borrowed += ["inside", "overlap"]
    if world > node:
        whole = measure_link(clock, None, world, base, quick)
        between = LinkConfig(whole.latency_us, whole.gb_s * node / base.nics)
    else:
        borrowed.append("between")
    launch_us = measure_launch(clock) * 1e6
    return replace(
        base,
        devices=world,
        node=node,
        matmul=matmul,
        memory=memory,
        inside=inside,
        between=between,
        overlap=overlap,
        launch_us=launch_us,
        step_us=1000.0 if on_host else base.step_us,
    ), borrowed


def _neighbours(node: int, world: int) -> dist.ProcessGroup | None:
    """The processes of this node."""
    if node == world:
        return None
    groups = [dist.new_group(list(range(first, first + node))) for first in range(0, world, node)]
    return groups[dist.get_rank() // node]


def _write(path: Path, new: NewFile, cluster: ClusterConfig, borrowed: Sequence[str]) -> None:
    """Write the file, and say how well the model follows the products that were timed."""
    plain = replace(cluster, matmul=replace(cluster.matmul, measured=()))
    errors = []
    for rows, columns, depth, share in cluster.matmul.measured:
        shape = Matmul(int(rows), int(columns), int(depth))
        errors.append(abs(matmul_seconds(shape, plain) * share * cluster.matmul.tflops * 1e12 / shape.flops - 1))
    head = (
        f"{_HEAD}{os.uname().nodename}, {time.strftime('%Y-%m-%d')}, torch "
        f"{torch.__version__}.\n# Borrowed, not measured: {', '.join(borrowed)}.\n"
    )
    with writing(path):
        new.file.write((head + OmegaConf.to_yaml(OmegaConf.create(asdict(cluster)))).encode())
        new.finish()
        new.publish()
    print(
        f"{path}: {len(errors)} products at up to {cluster.matmul.tflops:.3g} TFLOP/s (the model without the table is "
        f"{median(errors):.1%} off), memory {cluster.memory.gb_s * cluster.memory.efficiency:.3g} GB/s, kernels "
        f"{cluster.launch_us:.3g} us, links {cluster.inside.latency_us:.3g} us + {cluster.inside.gb_s:.3g} GB/s; "
        f"borrowed: {', '.join(borrowed)}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parse(arguments)
    first = os.environ.get("RANK", "0") == "0"
    return exit_status(lambda: calibrate(options), "\nerror", first)


if __name__ == "__main__":
    sys.exit(main())
