"""One process with a process group of one rank on every axis of the mesh, by the device's own backend (NCCL), while
torch tells of every synchronization of host and device.

What the trainer sends there reaches NCCL itself, its streams and its waits, which nothing else shows on one device.
Layers of one rank send nothing: messages of tensor parallelism and of pipelines are seen in `ranks`."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.gpu_suite.setting import ROOT, Setting, batches_of, make_trainer, require_near
from pangu.collectives.reduce import (
    all_reduce,
    gather_objects,
    largest_of,
    start_all_gather,
    start_ordered_all_reduce,
    start_reduce_scatter,
)
from pangu.pipeline.layouts import choose_layout
from pangu.topology.backends import abort_groups
from pangu.topology.layout import GROUPS
from pangu.topology.mesh import Mesh

SENT = ("all_reduce", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
SENT += ("all_to_all_single", "all_gather", "all_gather_object", "broadcast", "isend", "irecv")
"""Functions of torch.distributed that are counted."""
CHANGES = {"model.layers": 4, "model.attention": "sdpa", "precision.compute": "fp32"}
"""So that there is one way to compute a step."""
TOLERANCE = 1e-4
"""Error of a loss after two updates in fp32: a device's kernels may add up in another order each time."""


@contextmanager
def mesh_with_groups(values: dict[str, Any], device: torch.device) -> Iterator[Mesh]:
    """A mesh of one process that has a group on every axis."""
    config, layout, _ = choose_layout(values, 1)
    backend = dist.get_default_backend_for_device(device)
    store, timeout = dist.HashStore(), timedelta(seconds=60)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    try:
        mesh = Mesh.connect(layout, device, config.parallel.timeout_s)
        groups = {"world": dist.group.WORLD, **{axis: mesh.new_group([0], axis) for axis in GROUPS}}
        yield replace(mesh, groups=groups)
    finally:
        dist.destroy_process_group()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Collectives that are begun in the block."""
    calls: Counter[str] = Counter()

    def counting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            calls[name] += 1
            return function(*arguments, **keywords)

        return call

    functions: dict[str, Any] = {name: counting(name, getattr(dist, name)) for name in SENT if hasattr(dist, name)}
    with patch.multiple(dist, **functions):
        yield calls


@contextmanager
def synchronizations(device: torch.device) -> Iterator[Counter[str]]:
    """Places where the host waits for the device in the block; none are told of on a CPU."""
    places: Counter[str] = Counter()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    for one in raised:
        if "synchroniz" in str(one.message):
            path = Path(one.filename)
            name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
            places[f"{name}:{one.lineno}"] += 1


def collectives(mesh: Mesh, axis: str) -> dict[str, Callable[[], object]]:
    """All that the package sends, over one axis."""
    group, device = mesh.group(axis), mesh.device
    whole, part = (torch.arange(1024.0, device=device) for _ in range(2))
    actions: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: all_reduce(whole, group),
        "maximum": lambda: largest_of([1.0, 2.0], mesh),
        "objects": lambda: gather_objects({"rank": 0}, group),
    }
    for way, along in (("own", replace(group, exchanges=False)), ("exchange", replace(group, exchanges=True))):
        actions |= {
            f"all-gather, {way}": lambda g=along: start_all_gather(whole, part, g).wait(),
            f"reduce-scatter, {way}": lambda g=along: start_reduce_scatter(part, whole, g).wait(),
            f"ordered all-reduce, {way}": lambda g=along: start_ordered_all_reduce(whole, g).wait(),
        }
    return actions


def measure(setting: Setting) -> None:
    """Every collective over every axis gives one rank what it gave; a step of every ZeRO stage equals one without
    groups, and its synchronizations are told; aborted groups fail."""
    device = setting.device
    with mesh_with_groups(setting.values("tiny"), device) as mesh:
        for axis in mesh.groups:
            with setting.row(f"collectives over {axis}") as figures:
                figures["backend"] = dist.get_backend(mesh.groups[axis])
                expected = torch.arange(1024.0, device=device)
                figures["done"] = []
                for name, action in collectives(mesh, axis).items():
                    action()
                    figures["done"].append(name)
                result = all_reduce(expected.clone(), mesh.group(axis))
                assert torch.equal(result, expected), "an all-reduce of one rank changed its tensor"
    for zero in range(4):
        with setting.row(f"steps, ZeRO-{zero}") as figures:
            figures |= steps(setting, setting.values("pangu_350m", {**CHANGES, "parallel.zero": zero}))
            require_near(figures["losses"], figures["losses of a mesh without groups"], TOLERANCE)
    with setting.row("abort") as figures, mesh_with_groups(setting.values("tiny"), device) as mesh:
        all_reduce(torch.zeros(1, device=device), mesh.group("world"))
        began = time.perf_counter()
        abort_groups()
        figures["seconds"] = time.perf_counter() - began
        try:
            all_reduce(torch.zeros(1, device=device), mesh.group("world"))
            figures["a collective afterwards"] = "works, as with any backend but NCCL"
        except dist.DistError as error:
            figures["a collective afterwards"] = f"{type(error).__name__}: {str(error)[:200]}"


def steps(setting: Setting, values: dict[str, Any]) -> dict[str, Any]:
    """Losses with and without groups, and what a step sends and waits for."""
    config = choose_layout(values, 1).config
    alone = make_trainer(values, setting.device)
    expected = [alone.train_step(batches_of(config, step=step)).loss for step in range(3)]
    del alone
    setting.release()
    with mesh_with_groups(values, setting.device) as mesh:
        trainer = make_trainer(values, setting.device, mesh=mesh)
        losses = [trainer.train_step(batches_of(config, step=step)).loss for step in range(2)]
        with counted() as calls, synchronizations(setting.device) as places:
            losses.append(trainer.train_step(batches_of(config, step=2)).loss)
    return {
        "losses": losses,
        "losses of a mesh without groups": expected,
        "collectives of a step": dict(calls),
        "synchronizations of a step": dict(places),
    }
