"""Probe: torch's fused all-gather-matmul and matmul-reduce-scatter over symmetric memory, against chunks of ours.

It needs two GPUs of a node at least, and says so where there is one. On a CPU two processes take the same way by gloo,
where symmetric memory cannot be: it is to be seen that the rest works.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # its operators
from torch import Tensor

from benchmarks.gpu_suite.setting import Setting
from pangu.collectives.regions import TensorRegion
from pangu.config.build import build
from pangu.config.schema import RunConfig
from pangu.layers.tensor_parallel_matmul import column_parallel_matmul, row_parallel_matmul
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh

MOST_RANKS = 8
CHUNKS = (1, 2, 4)
PRESETS = ("pangu_2_6b", "pangu_200b")
TIMED_S = 0.3
LIMIT_S = 60
Action = Callable[[], Tensor]


def ways(x: Tensor, columns: Tensor, rows: Tensor, region: TensorRegion) -> dict[str, Action]:
    """Name -> a product: x [sequence / ranks, inputs], columns [outputs / ranks, inputs], rows [inputs, outputs /
    ranks]. The products that are scattered take what those that gather make."""
    assert region.group is not None
    name, fused = region.group.process_group.group_name, torch.ops.symm_mem
    middle = column_parallel_matmul(x, columns, None, region, None)
    found: dict[str, Action] = {}
    for chunks in CHUNKS:
        part = replace(region, chunks=chunks)
        found[f"gather, {chunks} chunks"] = lambda at=part: column_parallel_matmul(x, columns, None, at, None)
        found[f"scatter, {chunks} chunks"] = lambda at=part: row_parallel_matmul(middle, rows, None, at, None)
    found["gather, fused"] = lambda: fused.fused_all_gather_matmul(x, [columns.t()], 0, name)[1][0]
    found["scatter, fused"] = lambda: fused.fused_matmul_reduce_scatter(middle, rows.t(), "sum", 0, name)
    return found


def timed(action: Action, expected: Tensor | None, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Microseconds of an action, and how far its result is from what is expected; and the result."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize()

    result = action()
    wait()
    began, count = time.perf_counter(), 0
    action()
    wait()
    once = torch.tensor(time.perf_counter() - began, device=device)
    dist.all_reduce(once, dist.ReduceOp.MAX)  # all ranks make as many
    count = max(2, min(200, int(TIMED_S / float(once))))
    began = time.perf_counter()
    for _ in range(count):
        action()
    wait()
    figures: dict[str, Any] = {"microseconds": 1e6 * (time.perf_counter() - began) / count}
    if expected is not None:
        figures["off by"] = float((result.float() - expected.float()).norm() / expected.float().norm())
    return figures, result


def rank_of(rank: int, world: int, folder: str, kind: str, values: dict[str, dict[str, Any]]) -> None:
    """One rank: all presets; rank 0 writes a file of its figures."""
    device = torch.device(kind, rank) if kind != "cpu" else torch.device(kind)
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    store = dist.FileStore(f"{folder}/store", world)
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT_S))
    mesh = Mesh.connect(Layout(tensor=world, sequence=True), device, LIMIT_S)
    region, rows = TensorRegion.of(mesh), {}
    for name, of_preset in values.items():
        model = build(RunConfig, of_preset).model
        source, width = torch.Generator(device).manual_seed(rank), 4 * model.hidden // world
        shapes = (model.sequence // world, model.hidden), (width, model.hidden), (model.hidden, width)
        x, columns, wide = (torch.randn(shape, generator=source, device=device).bfloat16() for shape in shapes)
        plain: dict[str, Tensor] = {}
        with torch.no_grad():
            for which, action in ways(x, columns, wide, region).items():
                kind_of = which.partition(",")[0]
                try:
                    figures, result = timed(action, plain.get(kind_of), device)
                    plain.setdefault(kind_of, result)
                except Exception as error:
                    figures = {"cannot": f"{type(error).__name__}: {error}"[:500]}
                rows[f"{name}, {which}"] = figures
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure(setting: Setting) -> None:
    """A row for each product and way."""
    count = 2 if setting.on_host else torch.accelerator.device_count()
    if count < 2:
        setting.add("fused products", cannot=f"symmetric memory needs 2 GPUs of a node at least, and there is {count}")
        return
    world = min(MOST_RANKS, 2 ** (count.bit_length() - 1))
    values = {name: setting.values(name) for name in PRESETS[: 1 if setting.on_host else None]}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, folder, setting.device.type, values)
        ranks = [context.Process(target=rank_of, args=(rank, *arguments), daemon=True) for rank in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(2 * LIMIT_S)
            process.kill()
        path = Path(folder, "rows.json")
        if not path.exists():
            raise RuntimeError(f"the ranks ended with {[process.exitcode for process in ranks]}")
        for row, figures in json.loads(path.read_text(encoding="utf-8")).items():
            setting.add(row, ranks=world, **figures)
