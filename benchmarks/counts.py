"""What a layer costs an accelerator beside its products, counted without one: ours beside a plain GPT, transformers and
megatron-core.

    python -m benchmarks.counts --output benchmarks/results/counts.json

Forward and backward of a micro-batch run on fake tensors (`pangu.dryrun`), with one layer more and less: launches, and
the bytes of operations that are no products, for each token. Of a whole step, reads from device to host and copies that
block. megatron-core is counted if it can be imported (see `benchmarks.tensor_parallel`).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pangu.dryrun.device import FakeDevice, load_device

if TYPE_CHECKING:
    from torch import nn

    from pangu.dryrun.audit import Audit
    from pangu.dryrun.run import RankReport

PRESETS = ("pangu_350m", "pangu_2_6b", "pangu_200b")
PLAIN = ("model.dropout=0", "model.attention_dropout=0", "memory.recompute=none", "data.packing.reset_mask=false")
"""What the peers' models are without."""
ROWS = {"pangu_350m": 8, "pangu_2_6b": 2, "pangu_200b": 1}
"""Sequences of a micro-batch."""
LAYERS = (2, 3)
MICRO = 2
"""Micro-batches: the gradients of the second are added to the first's."""


def values_of(preset: str, *words: str) -> dict[str, Any]:
    """A preset's configuration on one replica and stage, as plain dictionaries."""
    from benchmarks.trainer import composed

    rows = ROWS[preset]
    fixed = [f"+config={preset}", "data=synthetic", f"batch.global_size={MICRO * rows}", f"batch.micro_size={rows}"]
    fixed += ["parallel.pipeline=1", "parallel.virtual_stages=1", "parallel.schedule=1f1b", "parallel.data=1"]
    return composed(*fixed, *words, "dry_run=true")


def of_pangu(fake: FakeDevice, preset: str, *words: str) -> dict[str, float]:
    """Counts of our trainer."""
    import torch

    from pangu.dryrun.run import dry_run
    from pangu.pipeline.layouts import choose_layout

    device, reports = torch.device("cuda", 0), []
    for layers in LAYERS:
        chosen = choose_layout(values_of(preset, *words, f"model.layers={layers}"), 1)
        reports.append(dry_run(chosen, 0, device, fake, whole=True))
    fewer, more = reports
    tokens = MICRO * ROWS[preset] * chosen.config.model.sequence
    return {
        "launches": (_launches(more) - _launches(fewer)) / MICRO,
        "bytes_of_a_token": (_moved(more) - _moved(fewer)) / tokens,
        "host_syncs": sum(more.host_syncs.values()),
        "blocking_copies": sum(more.blocking_copies.values()),
    }


def _launches(report: RankReport) -> int:
    return report.launches - report.update["launches"]


def _moved(report: RankReport) -> int:
    return report.memory_bound_bytes - report.update["memory_bound_bytes"]


def of_peer(fake: FakeDevice, preset: str, make: Callable[[Mapping[str, int]], nn.Module]) -> dict[str, float]:
    """Counts of a peer's model (tokens, labels -> loss) in the usual loop, one micro-batch."""
    numbers, sums = values_of(preset)["model"], []
    for layers in LAYERS:
        shape = {**{key: numbers[key] for key in ("hidden", "heads", "sequence", "vocab")}, "layers": layers}
        with watched(fake) as audit:
            model = make(shape)
            for _ in range(MICRO):
                step(model, ROWS[preset], shape["sequence"])
        sums.append(audit.counts)
    fewer, more = sums
    tokens = MICRO * ROWS[preset] * numbers["sequence"]
    return {
        "launches": (more["launches",] - fewer["launches",]) / MICRO,
        "bytes_of_a_token": (more["memory_bound_bytes",] - fewer["memory_bound_bytes",]) / tokens,
    }


@contextmanager
def watched(fake: FakeDevice) -> Iterator[Audit]:
    """An audit of what is done to fake tensors within the block."""
    import torch

    from pangu.dryrun.audit import Audit
    from pangu.dryrun.run import on_fake_tensors

    torch.cuda.is_bf16_supported = lambda *_: True  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0
    with on_fake_tensors(0, 2), Audit(torch.device("cuda", 0), {}, fake) as audit:
        yield audit


def step(model: nn.Module, rows: int, length: int) -> None:
    """Forward and backward of a micro-batch, in bf16 as the model wants it."""
    import torch

    tokens = torch.zeros(rows, length, dtype=torch.int64, device="cuda")
    autocast = next(model.parameters()).dtype == torch.float32
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loss = model(tokens, tokens)
    loss.backward()


def plain(shape: Mapping[str, int]) -> nn.Module:
    """A GPT as a tutorial writes it, under autocast."""
    import torch

    from benchmarks.models import PlainGPT

    with torch.device("cuda"):
        return PlainGPT(shape["vocab"], shape)


def transformers(shape: Mapping[str, int]) -> nn.Module:
    """GPT-2 of that library, under autocast."""
    import torch

    from benchmarks.train_step import TransformersGPT2

    with torch.device("cuda"):
        return TransformersGPT2(shape["vocab"], shape)


def megatron(shape: Mapping[str, int]) -> nn.Module:
    """The plain model on megatron-core's layers: bf16 weights."""
    import torch

    from benchmarks.tensor_parallel import MegatronGPT, megatron_config

    with torch.device("cuda"):
        return MegatronGPT(shape["vocab"], megatron_config("bf16", 1, False, shape), shape["sequence"])


def count(fake: FakeDevice) -> Iterator[dict[str, Any]]:
    """All rows."""
    peers = {"plain": plain, "transformers": transformers}
    if importlib.util.find_spec("megatron") is not None:
        peers["megatron-core"] = megatron
    for preset in PRESETS:
        tensor = "parallel.tensor=8" if preset == "pangu_200b" else "parallel.tensor=1"
        yield {"preset": preset, "of": "as it is", **of_pangu(fake, preset, tensor)}
        alone = ("parallel.tensor=1", "parallel.sequence=false", *PLAIN)
        yield {"preset": preset, "of": "plain, one device", **of_pangu(fake, preset, *alone)}
        for name, make in peers.items():
            yield {"preset": preset, "of": name, **of_peer(fake, preset, make)}


def main() -> None:
    """Count and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    fake = load_device()  # before torch
    if isinstance(fake, str):
        sys.exit(f"benchmarks.counts: {fake}")
    from benchmarks.side_by_side import machine

    rows = []
    for row in count(fake):
        print(json.dumps(row), flush=True)
        rows.append(row)
    if arguments.output:
        result = {"machine": machine(), "micro_batch": ROWS, "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
