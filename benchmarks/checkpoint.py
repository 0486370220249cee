"""Saving and loading the state of a run: ours beside `torch.save` and torch.distributed.checkpoint, and what a save
costs training.

    python -m benchmarks.checkpoint --output benchmarks/results/checkpoint.json

The state is that of AdamW: weights and two moments in fp32. Every process saves its part, its share of ZeRO-1 with
several, and all peers wait until their files are on the disk; ours take and compare checksums too. What is loaded is in
the system's cache. Rates are in MiB/s of the whole state; `ratio` is that to `torch`'s next to it, the median over
repeats.

`stall` is the time that training stands still for a save, and `share` what a save costs altogether (`--between` steps
with a save at their beginning, less as many without), both in steps; `asynchronous` as in `checkpoint.asynchronous`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.side_by_side import SHAPE, fresh, machine, samples
from benchmarks.trainer import micro_batches, pangu_trainer
from pangu.checkpoint.index import find_damage, read_index
from pangu.collectives.reduce import gather_objects
from pangu.config.schema import RunConfig
from pangu.training.resuming import load_checkpoint
from pangu.training.saving import Saver
from pangu.training.step import Trainer

Peer = tuple[Callable[[Path], None], Callable[[Path], None]]
"""Save into a folder, load from it."""


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Return the state that this process saves, under names of its own."""
    rank, states = trainer.mesh.rank, trainer.optimizer.state
    state = {}
    for shard in trainer.parameters.shards:
        name = f"{rank}/{shard.placement.name}"
        moments = {kind: states[shard.main][kind] for kind in ("exp_avg", "exp_avg_sq")}
        state |= {f"{name}/{kind}": tensor for kind, tensor in {"weight": shard.main, **moments}.items()}
    return state


def torch_peer(trainer: Trainer) -> Peer:
    """A file for each process."""
    state, name = state_of(trainer), f"{trainer.mesh.rank}.pt"

    def save(folder: Path) -> None:
        with (folder / name).open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    def load(folder: Path) -> None:
        for key, tensor in torch.load(folder / name, weights_only=True).items():
            state[key].copy_(tensor)

    return save, load


def dcp_peer(trainer: Trainer) -> Peer:
    """torch.distributed.checkpoint, which waits for the disk by default."""
    state = state_of(trainer)
    return lambda folder: _silent(dcp.save, state, folder), lambda folder: _silent(dcp.load, state, folder)


def _silent(function: Callable[..., Any], state: dict[str, Tensor], folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process
        function(state, checkpoint_id=folder)


def with_output(trainer: Trainer, folder: Path, asynchronous: bool) -> RunConfig:
    """The configuration of a run that saves into a folder."""
    config = trainer.config
    checkpoint = replace(config.checkpoint, asynchronous=asynchronous, keep=1)
    return replace(config, train=replace(config.train, output=str(folder)), checkpoint=checkpoint)


def pangu_peer(trainer: Trainer) -> Peer:
    """Ours, waiting for the writer; loading reads everything twice, because it takes the checksums first."""

    def save(folder: Path) -> None:
        with Saver(with_output(trainer, folder, False), trainer) as saver:
            saver.save(0, {})
            saver.finish()

    def load(folder: Path) -> None:
        (path,) = (folder / "checkpoints").glob("step-????????")
        damage = find_damage(path, read_index(path), trainer.mesh.rank, trainer.mesh.layout.world)
        if damage:
            raise RuntimeError(damage)
        load_checkpoint(path, with_output(trainer, folder, False), trainer)

    return save, load


def barrier() -> None:
    """Wait for the other processes, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def seconds(action: Callable[[], object]) -> float:
    """Until all processes have done it."""
    barrier()
    began = time.perf_counter()
    action()
    barrier()
    return time.perf_counter() - began


def measure(arguments: argparse.Namespace, scratch: str) -> dict[str, Any]:
    """All figures, in every process."""
    torch.set_num_threads(arguments.threads)
    world = dist.get_world_size() if dist.is_initialized() else 1
    batch = samples(arguments.vocab, arguments.batch * world)
    sizes = (f"batch.global_size={len(batch)}", f"batch.micro_size={arguments.batch}", "parallel.zero=1")
    trainer = pangu_trainer("fp32", arguments.vocab, *sizes)
    own = micro_batches(batch.chunk(world)[trainer.mesh.rank], arguments.batch)

    def step() -> None:
        trainer.train_step(own)

    step()
    rates = measure_rates(trainer, arguments.repeats, Path(scratch))
    return {"rates": rates, "stalls": measure_stalls(trainer, step, arguments, Path(scratch))}


def measure_rates(trainer: Trainer, repeats: int, scratch: Path) -> list[dict[str, Any]]:
    """A row for each peer."""
    own = sum(tensor.nbytes for tensor in state_of(trainer).values())
    mib = sum(gather_objects(own, trainer.mesh.group("world"))) / 2**20
    peers = {"torch": torch_peer(trainer), "dcp": dcp_peer(trainer), "pangu": pangu_peer(trainer)}
    rates: dict[str, list[list[float]]] = {peer: [[], []] for peer in peers}
    for repeat in range(repeats + 1):
        for peer, (save, load) in peers.items():
            folder = scratch / peer
            if trainer.mesh.is_first:
                folder.mkdir()
            measured = [mib / seconds(partial(action, folder)) for action in (save, load)]
            if trainer.mesh.is_first:
                shutil.rmtree(folder)
            if repeat:  # the first is a warm-up
                rates[peer][0].append(measured[0])
                rates[peer][1].append(measured[1])
    return [
        {"peer": peer, "mib": round(mib), **_rate("save", own[0], rates["torch"][0])}
        | _rate("load", own[1], rates["torch"][1])
        for peer, own in rates.items()
    ]


def _rate(name: str, own: list[float], base: list[float]) -> dict[str, float]:
    ratios = [a / b for a, b in zip(own, base, strict=True)]
    return {
        f"{name}_mib_per_s": round(statistics.median(own)),
        f"{name}_ratio": round(statistics.median(ratios), 3),
        f"{name}_smallest": round(min(ratios), 3),
        f"{name}_largest": round(max(ratios), 3),
    }


def measure_stalls(
    trainer: Trainer, step: Callable[[], None], arguments: argparse.Namespace, scratch: Path
) -> list[dict[str, Any]]:
    """A row for a save in the background and one for a save that training waits for."""
    modes = {name: with_output(trainer, scratch / name, name == "asynchronous") for name in ("asynchronous", "waiting")}
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in modes}
    with ExitStack() as open_ended:
        savers = {name: open_ended.enter_context(Saver(config, trainer)) for name, config in modes.items()}
        for _ in range(arguments.repeats):
            without = sum(seconds(step) for _ in range(arguments.between))
            for name, saver in savers.items():
                stall = seconds(partial(saver.save, 0, {}))
                steps = sum(seconds(step) for _ in range(arguments.between))
                saver.finish()
                one = without / arguments.between
                rows[name].append((stall / one, (stall + steps - without) / one))
    return [
        {
            "save": name,
            "between": arguments.between,
            "stall_steps": round(statistics.median(stall for stall, _ in own), 3),
            "share_steps": round(statistics.median(share for _, share in own), 3),
        }
        for name, own in rows.items()
    ]


def main(arguments: argparse.Namespace) -> None:
    """Measure with each number of processes, print the rows and write them."""
    results = []
    for processes in arguments.processes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
            found = fresh(processes, measure, arguments, scratch)[0]
        rows = [{"processes": processes, **row} for rows in found.values() for row in rows]
        for row in rows:
            print(json.dumps(row), flush=True)
        results += rows
    if arguments.output:
        result = {
            "command": " ".join(["python -m benchmarks.checkpoint", *sys.argv[1:]]),
            "shape": SHAPE,
            "configuration": {key: str(value) for key, value in vars(arguments).items()},
            "machine": machine(),
            "rows": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.modules["benchmarks.checkpoint"] = sys.modules["__main__"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=4, help="sequences of each process in a step")
    parser.add_argument("--between", type=int, default=10, help="steps between saves")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="of a process")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: the system's for scratch")
    parser.add_argument("--output", type=Path)
    main(parser.parse_args())
