"""Four processes that share one device, against one: losses and the norm of the gradient, ZeRO-3, tensor and sequence
parallelism, and a zero-bubble pipeline. Messages pass through the host (see `staged`)."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu_suite import staged
from benchmarks.gpu_suite.setting import Setting, batches_of, make_trainer, require_near
from pangu.metrics.devices import peak_memory_gib

RANKS = 4
STEPS = 3
CHANGES = {
    **{"model.layers": 4, "model.attention": "sdpa", "precision.compute": "fp32"},
    **{"batch.micro_size": 1, "batch.global_size": 8},
}
ON_DEVICE = {"model.hidden": 512, "model.vocab": 8192}
"""Messages through the host take longer than all else."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 4, ZeRO-3": {"parallel.zero": 3},
    "data 4, ZeRO-2, hybrid": {"parallel.zero": 2, "parallel.zero_group": 2},
    "tensor 2, sequence, data 2": {"parallel.tensor": 2, "parallel.sequence": True, "parallel.zero": 1},
    "tensor 4, sequence": {"parallel.tensor": 4, "parallel.sequence": True},
    "pipeline 2, zero bubble, data 2": {"parallel.pipeline": 2, "parallel.schedule": "zb_h1"},
    "pipeline 2, zero-bubble V, tensor 2": {
        **{"parallel.pipeline": 2, "parallel.virtual_stages": 2, "parallel.schedule": "zb_v"},
        **{"parallel.tensor": 2, "parallel.sequence": True},
    },
}
TOLERANCE = 1e-4
"""Error of losses after two updates in fp32, and relative error of the first norm."""


def train(values: Mapping[str, Any], device: torch.device, world: int) -> dict[str, Any]:
    """Losses and norms of the first steps, and what they took."""
    trainer = make_trainer(values, device, world)
    config, mesh = trainer.config, trainer.mesh
    results, seconds = [], []
    for step in range(STEPS):
        batches = batches_of(config, mesh.at.data, mesh.layout.data, step)
        began = time.perf_counter()
        results.append(trainer.train_step(batches))
        seconds.append(time.perf_counter() - began)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "seconds": seconds,
        "peak_gib": peak_memory_gib(device),
    }


def rank_of(rank: int, folder: str, layouts: Mapping[str, Mapping[str, Any]], kind: str) -> None:
    """One rank: all layouts, one after another; rank 0 writes what each gave as soon as it has."""
    torch.set_num_threads(1)
    device = torch.device(kind, 0) if kind != "cpu" else torch.device(kind)
    if kind != "cpu":
        torch.accelerator.set_device_index(0)
        torch.get_device_module(device).set_per_process_memory_fraction(1 / (RANKS + 1), device)
    staged.register()
    for number, (name, values) in enumerate(layouts.items()):
        store = dist.FileStore(f"{folder}/store-{number}", RANKS)
        dist.init_process_group(staged.BACKEND, store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=60))
        try:
            found: dict[str, Any] = train(values, device, RANKS)
        except Exception as error:
            found = {"error": f"rank {rank}: {type(error).__name__}: {error}"}
        finally:
            dist.destroy_process_group()
        if rank == 0 or "error" in found:
            partial = Path(folder) / f"{rank}.partial"
            partial.write_text(json.dumps(found), encoding="utf-8")
            partial.rename(Path(folder) / f"{number}-{rank}.json")
        if "error" in found:
            raise RuntimeError(f"{name}: {found['error']}")


def measure(setting: Setting) -> None:
    """A row for one process and for each layout, compared with it."""
    common = {**CHANGES, **({} if setting.on_host else ON_DEVICE)}
    with setting.row("one process") as figures:
        figures |= train(setting.values("pangu_350m", common), setting.device, 1)
    setting.release()
    values = {name: setting.values("pangu_350m", {**common, **changes}) for name, changes in LAYOUTS.items()}
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, values, setting.device.type)
        processes = [context.Process(target=rank_of, args=(rank, *arguments), daemon=True) for rank in range(RANKS)]
        for process in processes:
            process.start()
        for number, name in enumerate(LAYOUTS):
            with setting.row(name) as row:
                row |= _result(Path(folder), number, processes)
                compare(row, figures)
        for process in processes:
            process.kill()
            process.join()


def _result(folder: Path, number: int, processes: list[Any]) -> dict[str, Any]:
    """Return what the ranks wrote about a layout. Raises RuntimeError if one has failed."""
    while not (paths := sorted(folder.glob(f"{number}-*.json"))):
        if not any(process.is_alive() for process in processes):
            raise RuntimeError(f"the ranks ended with {[process.exitcode for process in processes]}")
        time.sleep(0.05)
    return json.loads(paths[-1].read_text(encoding="utf-8"))


def compare(row: Mapping[str, Any], alone: Mapping[str, Any]) -> None:
    """Raises ValueError if a layout does not compute what one process does."""
    if "error" in row:
        raise RuntimeError(row["error"])
    require_near(row["losses"], alone["losses"], TOLERANCE)
    require_near([row["norms"][0] / alone["norms"][0]], [1.0], TOLERANCE)
