"""What a step costs a device beside its products: counts that a change may only lower.

A line that grows is refused, unless budgets.json has the new number and says why under `reasons`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dryrun.conftest import SharedWorker
from tests.dryrun.layouts import values
from tests.end_to_end.commands import command

FILE = Path(__file__).with_name("budgets.json")
SHAPE = (
    "model.hidden=1024",
    "model.heads=16",
    "model.sequence=1024",
    "model.vocab=40960",
    "precision=bf16",
    "batch.global_size=1",
    "parallel.bucket_mib=1",
)
"""Small layers would be counted as well, and take no less time on tensors without memory."""
LAYOUTS = {
    "one device": "",
    "recompute full": "memory.recompute=full",
    "dropout": "model.dropout=0.1",
    "tensor 8, sequence": "parallel.tensor=8 parallel.sequence=true",
    "tensor 8": "parallel.tensor=8",
    "data 8, ZeRO-3": "parallel.data=8 parallel.zero=3 batch.global_size=8",
    "LAMB, data 8, ZeRO-1": "optimizer=lamb parallel.data=8 parallel.zero=1 batch.global_size=8",
    "fp8": "precision.matmul=fp8",
    "experts, 8 devices": "model.kind=gpt model.experts=16 model.expert_ffn=512 model.experts_per_token=8 "
    "model.router.selection=each_group model.router.groups=8 parallel.data=8 parallel.expert=8 batch.global_size=8",
    "documents": "data.packing.reset_mask=true data.packing.eod=3",
    "documents, dropout": "data.packing.reset_mask=true data.packing.eod=3 model.dropout=0.1 "
    "model.attention_dropout=0.1",
}


def counted(process: SharedWorker, layout: str) -> dict[str, int]:
    """The counts of a step of one micro-batch: what one more layer adds, what there is without any, and waits."""
    fewer, more = (process.report(values(layout, *SHAPE, f"model.layers={n}"), 0, whole=True) for n in (2, 3))
    kinds = {"launches": "launches", "memory-bound bytes": "memory_bound_bytes"}
    return {
        **{f"{name} of a layer": more[kind] - fewer[kind] for name, kind in kinds.items()},
        **{f"{name} beside layers": 3 * fewer[kind] - 2 * more[kind] for name, kind in kinds.items()},
        "host syncs": sum(more["host_syncs"].values()),
        "blocking copies": sum(more["blocking_copies"].values()),
    }


def test_nothing_costs_more_than_it_did(process: SharedWorker) -> None:
    budgets: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    measured = {name: counted(process, layout) for name, layout in LAYOUTS.items()}
    problems = [
        f"{name}: {what} {'grew' if value > budget else 'fell'} from {budget:,} to {value:,}"
        for name, counts in measured.items()
        for what, value in counts.items()
        if value != (budget := budgets["counts"][name][what])
    ]
    advice = f"; in {FILE.name} write the new number, and under `reasons` why a count had to grow"
    assert not problems, "; ".join(problems) + advice
    assert set(budgets["counts"]) == set(LAYOUTS)


def excess(printed: str) -> dict[str, dict[str, int]]:
    """Generated kernels above their bounds, or below by more than the one by which versions of torch differ."""
    found = {row.pop("layer"): row for row in map(json.loads, printed.splitlines())}
    bounds = json.loads(FILE.read_text(encoding="utf-8"))["compiled"]
    assert found.keys() == bounds.keys()
    over = {name: {key: found[name][key] - bound for key, bound in bounds[name].items()} for name in bounds}
    return {name: by_pass for name, by_pass in over.items() if not all(-1 <= n <= 0 for n in by_pass.values())}


def test_inductor_generates_no_more_kernels_for_a_layer_than_it_did() -> None:
    pytest.importorskip("triton")
    done = command("-m", "benchmarks.inductor_kernels")
    assert done.returncode == 0, done.stderr
    assert not excess(done.stdout), f"see {FILE.name}"
