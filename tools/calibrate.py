"""Measures the machine that it runs on and writes a cluster file, from which plans are made: matrix
products over the shapes that the presets make, attention, operations bound by memory, the floor of starting a kernel,
collectives over sizes, and how much computing and communication slow each other. Takes less than five minutes.
--from corrects the cluster file of a profiled run instead, and measures nothing."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import socket
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.collectives.point_to_point import Channels
from pangu.collectives.reduce import start_all_gather, start_reduce_scatter
from pangu.common.commands import as_typed
from pangu.common.cores import available_cores
from pangu.common.errors import UserError, allocating, writing
from pangu.common.exit_status import exit_status
from pangu.common.files import NewFile
from pangu.config.build import build
from pangu.config.cluster import ClusterConfig, LinkConfig, MatmulConfig
from pangu.config.schema import RunConfig
from pangu.data.batch import make_batch
from pangu.layers.cpu import precisions
from pangu.metrics.devices import device_here
from pangu.planning.clusters import cluster_names, cluster_of_device, load_cluster
from pangu.planning.cost import collective_seconds, matmul_seconds, step_time
from pangu.planning.program import Plan, Program
from pangu.report.correction import ProfiledRun
from pangu.schedule.groups import Group
from pangu.schedule.spans import Collective, Matmul
from pangu.topology.launch import Launch, choose_device, is_first_process
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh, exchanges
from pangu.topology.recorder import AxisGroup
from pangu.training.autotune import choose
from pangu.training.step import Trainer

_EXAMPLE = """example:
  torchrun --nproc-per-node=8 tools/calibrate.py --output mine.yaml
  torchrun --nproc-per-node=2 tools/calibrate.py --output mine.yaml --quick
  python tools/calibrate.py --from runs/mine --output mine.yaml

Links between nodes are measured where the processes are on several (torchrun --nnodes); what is not measured is
borrowed from the file of --like and marked so.
"""
Name = TypeVar("Name", bound=Hashable)
_CLUSTERS = Path(__file__).resolve().parent.parent / "configs" / "cluster"
_HIDDEN = {False: (2048, 2560, 4096, 5120, 8192, 12288), True: (256, 512, 1024)}
_TOKENS = {False: (1024, 2048, 4096, 8192), True: (128, 256, 512, 1024)}
_RANKS = {False: (1, 4), True: (1, 2, 4)}
_SIZES = {False: (2**16, 2**20, 2**24, 2**27, 2**29), True: (2**12, 2**16, 2**18, 2**20, 2**22, 2**24)}
"""Bytes of messages; all by whether the device is the host."""
_LONG = 2**22
"""Bytes from which on a message is repeated less often."""
_STEPS = ((128, 1, 4), (128, 4, 1), (512, 1, 2), (512, 4, 1), (512, 1, 1), (128, 1, 1))
"""Steps that are timed on a host: hidden size, sequences of a micro-batch, micro-batches."""
_SIDE = 512
"""Of a square matrix whose product takes a host some milliseconds."""
_BEFORE = 256
"""Of a square matrix whose product it computes before a message."""
_TEXT = np.arange(4 * 129).reshape(4, 129)
"""int64 [sequences, length + 1]."""
_HEAD = "# Measured by tools/calibrate.py on "


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.yaml", help="cluster file to write")
    parser.add_argument(
        "--like",
        default="",
        metavar="NAME",
        help="cluster in configs/cluster/ that provides values which are not measured",
    )
    parser.add_argument("--quick", action="store_true", help="measure few shapes, once each, as a test")
    parser.add_argument(
        "--from",
        dest="run",
        type=Path,
        metavar="RUN",
        help="correct the cluster of a finished run (cluster=NAME profile=true) by its profile, and measure nothing",
    )
    options = parser.parse_args(arguments)
    if options.run is not None and (options.quick or options.like):
        parser.error("--from measures nothing: --quick and --like go without it")
    return options


class Clock:
    """Times what a device does."""

    def __init__(self, device: torch.device, quick: bool, processes: int = 1) -> None:
        self.device = device
        self.on_host = device.type == "cpu"
        self.crowding = max(1.0, processes * torch.get_num_threads() / available_cores()) if self.on_host else 1.0
        """Factor by which processes that compute at a time share the cores of a host."""
        self._least = 0.002 if quick else 0.02
        self._rounds = 1 if quick else 5

    def seconds(self, action: Callable[[], object]) -> float:
        """Median time of an action."""
        return self.in_turns({"": self.computing(action)})[""]

    def in_turns(self, samples: Mapping[Name, Callable[[], float]], often: int = 1) -> dict[Name, float]:
        """Median of each sample, `often` times the usual number of rounds. All take turns: what disturbs the machine
        disturbs all of them."""
        rounds = [{name: sample() for name, sample in samples.items()} for _ in range(1 + often * self._rounds)]
        return {name: median(one[name] for one in rounds[1:]) for name in samples}

    def computing(self, action: Callable[[], object]) -> Callable[[], float]:
        """A sample of an action's time. On a host with one thread it is the processor's, which other processes change
        least, as often as processes share a core."""
        alone = self.on_host and torch.get_num_threads() == 1
        read, repeats = time.process_time if alone else time.perf_counter, 0

        def sample() -> float:
            nonlocal repeats
            if not repeats:
                self._timed(action, 1, read)
                repeats = max(1, int(self._least / max(self._timed(action, 1, read), 1e-7)))
            return self._timed(action, repeats, read) * (self.crowding if alone else 1.0)

        return sample

    def working(self, action: Callable[[], object], often: int) -> Callable[[], float]:
        """A sample of the processor's time of what all processes do as `often`, as processes share the cores."""
        return lambda: self._timed(action, often, time.process_time) * self.crowding

    def meeting(
        self, action: Callable[[], object], often: int, before: Callable[[], object] | None = None
    ) -> Callable[[], float]:
        """A sample of the time of what all processes do as `often`; of what it takes after another action."""

        def both() -> None:
            if before is not None:
                before()
            action()

        def sample() -> float:
            less = 0.0 if before is None else self._timed(before, often, time.perf_counter)
            return self._timed(both, often, time.perf_counter) - less

        return sample

    def _timed(self, action: Callable[[], object], repeats: int, read: Callable[[], float]) -> float:
        self._wait()
        begin = read()
        for _ in range(repeats):
            action()
        self._wait()
        return (read() - begin) / repeats

    def _wait(self) -> None:
        if not self.on_host:
            torch.accelerator.synchronize()


def shapes_of(on_host: bool, quick: bool) -> list[Matmul]:
    """Products of layers: forward, and of the gradients of inputs and weights, on 1 to 8 tensor-parallel ranks."""
    shapes = []
    for hidden in _HIDDEN[on_host][: 1 if quick else None]:
        for tokens in _TOKENS[on_host][: 2 if quick else None]:
            for ranks in (1,) if quick else _RANKS[on_host]:
                for depth, columns in ((hidden, 3 * hidden // ranks), (4 * hidden // ranks, hidden)):
                    shapes += [
                        Matmul(tokens, columns, depth),
                        Matmul(tokens, depth, columns),
                        Matmul(depth, columns, tokens),
                    ]
    return list(dict.fromkeys(shapes))


def measure_matmuls(clock: Clock, base: MatmulConfig, dtype: torch.dtype, quick: bool) -> MatmulConfig:
    """Rates of products, and the figures of the model fitted to them."""
    shapes = shapes_of(clock.on_host, quick)
    pool = torch.randn(2**24, device=clock.device).to(dtype)  # more than a cache holds
    taken = clock.in_turns({shape: clock.computing(product(shape, pool)) for shape in shapes})
    rates = [shape.flops / taken[shape] for shape in shapes]
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
        tflops_fp8=None if clock.on_host else base.tflops_fp8,
        efficiency=1 / constant,
        depth=max(0.0, float(depth) / constant),
        waves=max(0.0, float(waves) / constant),
        units=units,
        attention=measure_attention(clock, peak, dtype, quick),
        measured=measured,
    )


def product(shape: Matmul, pool: Tensor) -> Callable[[], object]:
    """A product of the next numbers of a pool each time: in a step its operands have not just been used."""
    sizes = shape.rows * shape.depth, shape.depth * shape.columns
    starts = itertools.cycle(range(0, max(1, len(pool) - sum(sizes)), sum(sizes)))

    def once() -> Tensor:
        left, right = pool.narrow(0, next(starts), sum(sizes)).split(sizes)
        return left.view(shape.rows, shape.depth) @ right.view(shape.depth, shape.columns)

    return once


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
    clock: Clock, groups: Mapping[int, dist.ProcessGroup | None], base: ClusterConfig, quick: bool
) -> LinkConfig:
    """Times of collectives of groups by their size, and latency and bandwidth of the largest group: least squares over
    sizes and kinds of collectives, on relative errors."""
    samples: dict[tuple[str, int, int], Callable[[], float]] = {}
    for count in _SIZES[clock.on_host][1 if quick else 0 :: 2 if quick else 1]:
        for size, group in groups.items():
            samples |= _collectives(clock, count, size, group or dist.group.WORLD)
    times = {which: max(1e-6, taken) for which, taken in clock.in_turns(samples, often=2).items()}
    rows = [
        [term / taken for term in collective_terms(kind, nbytes, size, base)]
        for (kind, size, nbytes), taken in times.items()
        if size == max(groups)
    ]
    measured = tuple((*which, round(1e6 * taken, 1)) for which, taken in times.items())
    return LinkConfig(*latency_and_bandwidth(np.array(rows)), measured)


def latency_and_bandwidth(table: np.ndarray) -> tuple[float, float]:
    """Return microseconds and GB/s from rows of `collective_terms` over the measured seconds.

    Bytes take at least half the time of the message with the highest rate: on a busy machine large messages may seem to
    take no longer than small ones, and the bandwidth would be infinite.
    """
    latency, inverse = np.linalg.lstsq(table, np.ones(len(table)), rcond=None)[0]
    return max(0.1, float(latency)), float(1 / max(inverse, 0.5 / table[:, 1].max()))


def _collectives(
    clock: Clock, nbytes: int, size: int, group: dist.ProcessGroup | None
) -> dict[tuple[str, int, int], Callable[[], float]]:
    """Samples by kind, ranks and bytes. On a host a collective begins after some computing, as in a step:
    processes that share cores do not all come at once."""
    buffer = torch.zeros(nbytes // 4 // size * size, device=clock.device)
    matrix = torch.randn(_BEFORE, _BEFORE)
    before = (lambda: matrix @ matrix) if clock.on_host else None
    return {
        (kind, size, buffer.nbytes): clock.meeting(action, 3 if nbytes >= _LONG else 10, before)
        for kind, action in actions_of(buffer, group, size).items()
    }


def collective_terms(kind: str, nbytes: int, size: int, base: ClusterConfig) -> tuple[float, float]:
    """Seconds of a collective for each microsecond of latency, and for each nanosecond of a byte."""
    cluster = replace(base, inside=LinkConfig(1.0, 1.0))
    alone = collective_seconds(Collective(kind, "tensor", 0.0), Group(size, size), cluster)  # type: ignore[arg-type]
    whole = collective_seconds(Collective(kind, "tensor", nbytes), Group(size, size), cluster)  # type: ignore[arg-type]
    return alone, whole - alone


def actions_of(buffer: Tensor, group: Any, size: int) -> dict[str, Callable[[], object]]:
    """The collectives of layers and replicas on a buffer."""
    shard = torch.zeros_like(buffer[: buffer.numel() // size])
    along = AxisGroup(group, "replicas", exchanges=exchanges(buffer.device))
    return {
        "all_reduce": lambda: dist.all_reduce(buffer, group=group),
        "all_gather": lambda: start_all_gather(buffer, shard, along).wait(),
        "reduce_scatter": lambda: start_reduce_scatter(shard, buffer, along).wait(),
    }


def measure_messages(clock: Clock, world: int, quick: bool) -> list[tuple[str, int, int, float]]:
    """Messages between pipeline stages, each of the even ranks and the next one: half the time there and back, and on
    a host half of the processor's, all threads together, for one sent and one received."""
    mesh = Mesh.connect(Layout(pipeline=world), clock.device)
    evens = range(0, world - 1, 2)
    ways = [("activation", rank, rank + 1) for rank in evens] + [("gradient", rank + 1, rank) for rank in evens]
    channels, rank = Channels(mesh, ways), dist.get_rank()

    def there_and_back(tensor: Tensor) -> None:
        if rank % 2:
            channels.receive("activation", [tuple(tensor.shape)], tensor.dtype, rank - 1).wait()
            channels.send("gradient", [tensor], rank - 1)
        elif rank + 1 < world:
            channels.send("activation", [tensor], rank + 1)
            channels.receive("gradient", [tuple(tensor.shape)], tensor.dtype, rank + 1).wait()

    samples: dict[tuple[str, int], Callable[[], float]] = {}
    for nbytes in _SIZES[clock.on_host][1 if quick else 0 :: 2 if quick else 1]:
        action = partial(there_and_back, torch.zeros(nbytes // 4, device=clock.device))
        samples["send", nbytes] = clock.meeting(action, 5)
        if clock.on_host:
            samples["message", nbytes] = clock.working(action, 5)
    taken = clock.in_turns(samples, often=2)
    return [(kind, 2, nbytes, round(1e6 * seconds / 2, 1)) for (kind, nbytes), seconds in taken.items()]


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

    actions: dict[str, Callable[[], object]] = {
        "product": lambda: matrix @ matrix,
        "reduction": lambda: dist.all_reduce(buffer),
        "both": both,
    }
    taken = clock.in_turns({name: clock.meeting(action, 3) for name, action in actions.items()}, often=2)
    product, reduction, together = taken.values()
    # max + (overlap - 1) x min: see cost.beside
    return 1 + min(1.0, max(0.0, together - max(product, reduction)) / min(product, reduction))


def measure_steps(clock: Clock, cluster: ClusterConfig) -> ClusterConfig:
    """Return the cluster with figures of a host from steps of the trainer on one process: seconds to start a kernel,
    bytes per second of those that are no matmuls, and the rest of a step. Least squares on relative errors, as no queue
    keeps a host's kernels apart."""
    units = [{"launch_us": 1.0}, {"gb_s": 1.0}, {"step_us": 1.0}]
    configs = {step: _configuration(*step) for step in _STEPS}
    samples = {step: clock.computing(_step(config, clock.device)) for step, config in configs.items()}
    rows, rest = [], []
    for (_, size, number), taken in clock.in_turns(samples).items():
        config = configs[_, size, number]
        plan = Plan(1, 1, 1, 1, 1, 0, False, "none", size, number, "1f1b", layers=(config.model.layers,))
        ledger = Program(config).describe(plan)
        without, *terms = (step_time(ledger, plan, _with(cluster, **one)).total for one in [{}, *units])
        rows.append([(term - without) / taken for term in terms])
        rest.append(1 - without / taken)
    table, wanted = np.array(rows), np.array(rest)
    launch_us, s_per_gb, step_us = map(float, _least_squares(table, wanted))
    return _with(cluster, launch_us, 1 / max(1e-6, s_per_gb), step_us)


def _step(config: RunConfig, device: torch.device) -> Callable[[], object]:
    """A step of the trainer on one process."""
    mesh, rows = Mesh.connect(Layout(), device), config.batch.micro_size
    trainer = Trainer(config, mesh, choices=choose(config, mesh))
    batch = make_batch(_TEXT[:rows], range(rows), config.data.packing)
    return lambda: trainer.train_step([batch] * config.batch.accumulation(1))


def _least_squares(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Without negative numbers: the best of the solutions in which some of them are zero."""
    best, error = np.zeros(table.shape[1]), np.inf
    for columns in itertools.product((False, True), repeat=table.shape[1]):
        solution = np.zeros(table.shape[1])
        solution[list(columns)] = np.linalg.lstsq(table[:, columns], wanted, rcond=None)[0]
        off = float(np.sum((table @ solution - wanted) ** 2))
        if (solution >= 0).all() and off < error:
            best, error = solution, off
    return best


def _with(cluster: ClusterConfig, launch_us: float = 0.0, gb_s: float = 1e12, step_us: float = 0.0) -> ClusterConfig:
    memory = replace(cluster.memory, gb_s=gb_s, efficiency=1.0)
    return replace(cluster, memory=memory, launch_us=launch_us, step_us=step_us, queued=False)


def _configuration(hidden: int, size: int, number: int) -> RunConfig:
    """A small model and batch."""
    from hydra import compose, initialize_config_dir  # noqa: PLC0415 - optional package
    from omegaconf import OmegaConf  # noqa: PLC0415 - optional package

    with initialize_config_dir(str(_CLUSTERS.parent), version_base="1.3"):
        model = {"layers": 2, "hidden": hidden, "heads": hidden // 64, "sequence": _TEXT.shape[1] - 1, "vocab": 1024}
        fixed = [f"model.{key}={value}" for key, value in {**model, "dropout": 0, "attention_dropout": 0}.items()]
        fixed += ["model=gpt2_124m", "model.attention=sdpa", "data=synthetic", "precision=fp32"]
        composed = compose("base", [*fixed, f"batch.micro_size={size}", f"batch.global_size={size * number}"])
    return build(RunConfig, OmegaConf.to_container(composed, resolve=True))  # type: ignore[arg-type]


def calibrate(options: argparse.Namespace) -> None:
    """Measure, and let the first process write the file. Raises UserError."""
    launch = Launch.from_environment()
    device = choose_device("auto", launch)
    base = _borrowed(options.like, launch)
    new = _begin(options.output) if launch.rank == 0 else None
    try:
        if launch.world > 1:
            dist.init_process_group(dist.get_default_backend_for_device(device))
        where = f"rank {launch.rank} on {socket.gethostname()} ({device})"
        with allocating(lambda: where, "end other programs that use this memory, then measure again"):
            cluster, notes = _measure(Clock(device, options.quick, launch.local_world), base, launch, options.quick)
        if new is not None:
            _write(options.output, new, replace(cluster, name=options.output.stem), notes)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if new is not None:
            new.close()


def correct(folder: Path, output: Path) -> None:
    """Write the corrected cluster file of a profiled run, and print the parts of its step. Raises UserError."""
    new = _begin(output)
    try:
        profiled = ProfiledRun.read(folder)
        cluster = replace(profiled.corrected(), name=output.stem)
        rows = profiled.rows(cluster)
        source = f"the run {folder.resolve().name!r}, {time.strftime('%Y-%m-%d')}"
        head = f"{_HEAD}{source}: figures of {profiled.cluster.name}, corrected.\n"
        with writing(output):
            new.file.write((head + yaml.safe_dump(asdict(cluster), sort_keys=False)).encode())
            new.finish()
            new.publish()
    finally:
        new.close()
    print(f"{'seconds':<12}{'forecast':>12}{'measured':>12}{'ratio':>8}{'corrected':>12}")
    for part, forecast, measured, corrected in rows:
        ratio = f"{measured / forecast:.2f}" if forecast else "-"
        print(f"{part:<12}{forecast:>12.4g}{measured:>12.4g}{ratio:>8}{corrected:>12.4g}")
    print(advice(output))


def advice(output: Path) -> str:
    """Return how to use a cluster file that was written."""
    return f"{output}: to plan and forecast with it, set {shlex.quote(f'cluster={output}')}"


def _begin(path: Path) -> NewFile:
    """The file before anything is measured, which takes minutes. Raises UserError if there cannot be one."""
    if path.suffix != ".yaml" or path.stem.startswith("."):
        raise UserError(f"--output {path}: must be a file NAME.yaml, for cluster=NAME.yaml; use e.g. mine.yaml")
    with writing(path):
        if path.exists() and not path.read_bytes().startswith(_HEAD.encode()):
            raise UserError(f"--output {path}: exists and was not written by this tool; use another name")
        return NewFile(path)


def _borrowed(like: str, launch: Launch) -> ClusterConfig:
    """Return the figures that are not measured, of the file `like` or of the device's. Raises UserError."""
    names, device = cluster_names(_CLUSTERS, whole=True), device_here(launch)
    if like and like not in names:
        raise UserError(f"--like {like}: no such file; use one of {', '.join(names)}")
    named = None if device is None else cluster_of_device(device.name, names)
    base = load_cluster(_CLUSTERS / f"{like or named or 'a100'}.yaml")
    gib = base.memory.gib if device is None else device.total_memory / 2**30
    return replace(base, memory=replace(base.memory, gib=gib))


def _measure(clock: Clock, base: ClusterConfig, launch: Launch, quick: bool) -> tuple[ClusterConfig, list[str]]:
    """The cluster's figures, and what was borrowed."""
    on_host, world, node = clock.on_host, launch.world, launch.local_world
    dtype = torch.float32 if on_host else torch.bfloat16
    if on_host:
        torch.set_float32_matmul_precision(precisions("auto", "fp32", clock.device)[-1])
    matmul = measure_matmuls(clock, base.matmul, dtype, quick)
    bandwidth = measure_memory(clock) / 1e9
    memory = replace(base.memory, gb_s=max(base.memory.gb_s, bandwidth))
    if on_host:
        gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30 / node
        memory = replace(memory, gb_s=bandwidth, gib=gib, context_gib=0.2, workspace_gib=0.0, communicator_gib=0.0)
    memory = replace(memory, efficiency=min(1.0, bandwidth / memory.gb_s))
    borrowed = ["price", "host_gb_s", "memory.fragmentation", "matmul.alignment"]
    borrowed += [] if on_host else ["host_memory_gb_s", "operator_us", "call_us"]
    borrowed += [] if on_host and not quick else ["step_us", "message_us"]
    inside, between, overlap = base.inside, base.between, base.overlap
    if world > 1:
        if node > 1:
            groups = {size: _neighbours(size, world) for size in range(2, node + 1) if node % size == 0}
            inside = measure_link(clock, groups, base, quick)
            inside = replace(inside, measured=(*inside.measured, *measure_messages(clock, world, quick)))
        overlap = measure_overlap(clock, dtype)
    else:
        borrowed += ["inside", "overlap"]
    if world > node:
        whole = measure_link(clock, {world: None}, base, quick)
        between = LinkConfig(whole.latency_us, whole.gb_s * node / base.nics)
    else:
        borrowed.append("between")
    launch_us = measure_launch(clock) * 1e6
    cluster = replace(
        base,
        devices=world,
        node=node,
        matmul=matmul,
        memory=memory,
        inside=inside,
        between=between,
        overlap=overlap,
        launch_us=launch_us,
        # a host's launches hold all of its time
        operator_us=0.0 if on_host else base.operator_us,
        call_us=0.0 if on_host else base.call_us,
        host_memory_gb_s=bandwidth if on_host else base.host_memory_gb_s,
        step_us=1000.0 if on_host else base.step_us,
    )
    if on_host and not quick:
        cluster = measure_steps(clock, cluster)
        cluster = replace(cluster, message_us=0.0, alone=clock.crowding)
    return cluster, borrowed


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
        new.file.write((head + yaml.safe_dump(asdict(cluster), sort_keys=False)).encode())
        new.finish()
        new.publish()
    print(
        f"{path}: {len(errors)} products at up to {cluster.matmul.tflops:.3g} TFLOP/s (the model without the table is "
        f"{median(errors):.1%} off), memory {cluster.memory.gb_s * cluster.memory.efficiency:.3g} GB/s, kernels "
        f"{cluster.launch_us:.3g} us, links {cluster.inside.latency_us:.3g} us + {cluster.inside.gb_s:.3g} GB/s; "
        f"borrowed: {', '.join(borrowed)}"
    )
    print(advice(path))


def run(options: argparse.Namespace) -> None:
    """Measure this machine, or correct the cluster of a run."""
    if options.run is None:
        calibrate(options)
    elif is_first_process():  # others would write the same file
        correct(options.run, options.output)


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: run(parse(arguments)), is_first_process)


if __name__ == "__main__":
    sys.exit(main())
