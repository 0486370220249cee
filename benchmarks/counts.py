"""Cost of a layer on an accelerator apart from its matmuls, counted without one: ours, a plain GPT, transformers and
megatron-core.

    python -m benchmarks.counts --output benchmarks/results/counts.json

Forward and backward of a micro-batch run on fake tensors (`pangu.dryrun`), with one layer more and less: launches, and
the bytes of operations that are no products, for each token; and what the host does for it: operators that torch
dispatches, and Python functions that are called outside of them. Of a whole step, reads from device to host and copies
that block. megatron-core is counted if it can be imported (see `benchmarks.tensor_parallel`).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pangu.dryrun.device import FakeDevice, load_device

if TYPE_CHECKING:
    from torch import nn

    from pangu.dryrun.audit import Audit

PRESETS = ("pangu_350m", "pangu_2_6b", "pangu_200b")
PLAIN = ("model.dropout=0", "model.attention_dropout=0", "memory.recompute=none", "data.packing.reset_mask=false")
"""Keys that switch off what the peers' models lack."""
ROWS = {"pangu_350m": 8, "pangu_2_6b": 2, "pangu_200b": 1}
"""Sequences of a micro-batch."""
LAYERS = (2, 3)
MICRO = 2
"""Micro-batches: the gradients of the second are added to the first's."""
STEPS = 3
"""Number of steps, of which the last one is counted: the first ones create the buffers that it uses."""


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

    from pangu.dryrun.run import audited, carry_out, micro_batches, on_fake_tensors
    from pangu.pipeline.layouts import choose_layout

    place, sums = (torch.device("cuda", 0), fake), []
    for layers in LAYERS:
        chosen = choose_layout(values_of(preset, *words, f"model.layers={layers}"), 1)
        config, layout, _ = chosen
        with on_fake_tensors(0, layout.world), audited(chosen, *place) as (audit, trainer):
            for _ in range(STEPS):
                audit.by_action.clear()
                audit.enter(None)
                with uncollected():
                    carry_out(audit, trainer, micro_batches(config, layout))
            update = audit.by_action.pop(None)
            sums.append(sum(audit.by_action.values(), Counter()))
    waits = update + sums[-1]
    return {
        **of_layer(*sums, tokens=ROWS[preset] * config.model.sequence),
        **{kind: sum(waits[key] for key in waits if key[0] == kind) for kind in ("host_syncs", "blocking_copies")},
    }


def of_layer(fewer: Counter[Any], more: Counter[Any], tokens: int) -> dict[str, float]:
    """Return what one more layer adds for a micro-batch of `tokens`."""
    of = {name: (more[name,] - fewer[name,]) / MICRO for name in ("launches", "operators", "python_calls")}
    return {**of, "bytes_of_a_token": (more["memory_bound_bytes",] - fewer["memory_bound_bytes",]) / MICRO / tokens}


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage within the block: that calls what was registered for objects that go."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def of_peer(fake: FakeDevice, preset: str, make: Callable[[Mapping[str, int]], nn.Module]) -> dict[str, float]:
    """Counts of a peer's model (tokens, labels -> loss) in the usual loop, one micro-batch."""
    numbers, sums = values_of(preset)["model"], []
    for layers in LAYERS:
        shape = {**{key: numbers[key] for key in ("hidden", "heads", "sequence", "vocab")}, "layers": layers}
        with watched(fake) as audit:
            model = make(shape)
            for _ in range(STEPS):
                model.zero_grad()
                audit.counts.clear()
                with uncollected(), audit.counting_calls():
                    for _ in range(MICRO):
                        step(model, ROWS[preset], shape["sequence"])
        sums.append(audit.counts)
    return of_layer(*sums, tokens=ROWS[preset] * numbers["sequence"])


@contextmanager
def watched(fake: FakeDevice) -> Iterator[Audit]:
    """An audit of what is done to fake tensors within the block."""
    import torch

    from pangu.dryrun.audit import Audit
    from pangu.dryrun.run import on_fake_tensors

    torch.cuda.is_bf16_supported = lambda *_: True
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
