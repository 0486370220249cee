"""Cases that compare a plan with a dry run: all keys of `parallel`, `memory`, `loss`, `precision` and `optimizer`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from pangu.pipeline.layouts import Chosen, choose_layout
from tests.configs import composed
from tests.covering import Case, Cover, with_every_value
from tests.parallel import cases
from tests.parallel.cases import devices, keys_of, layout_of

LEFT_OUT = (
    *("groups", "stages"),  # test_plans has a plan of the former, test_stages of the latter
    "rates",  # no memory, time or bytes depend on them
    *("exchange", "products"),  # a dry run sends nothing, and its device always adds in the product
    *(
        "full_layers",
        "attention_sinks",
        "biased",
        "clamped_swiglu",
        "muon",
        "muon_heads",
        "muon_clip",
        "context_ulysses",
    ),  # test_plans has plans of these
)
FACTORS = {
    name: tuple(value for value in values if value not in LEFT_OUT)
    for name, values in cases.FACTORS.items()
    if name not in LEFT_OUT
} | {
    "loss_chunk": ("null", "auto", "40", "1000"),
    "micro_batches": ("1", "2", "3", "4", "9"),
    "head_dim": ("null", "24"),
    "kv_heads": ("null", "4"),  # test_plans has plans of ranks that share a key head
    "vocab": ("101", "2304"),  # a table that is far smaller than a layer, and one that is as large
    "precision": ("bf16", "fp32", "fp16"),
    "reduce": ("fp32", "bf16"),
    "moments": ("fp32", "bf16"),
    "bucket": ("null", "0.5", "20"),
}


def aligned(case: Mapping[str, str]) -> bool:
    """Whether fp8 can multiply by what a rank has of the queries: 72 columns are no multiple of 16."""
    return not {("matmul", "fp8"), ("head_dim", "24"), ("tensor", "4")} <= case.items()


def fits(case: Mapping[str, str]) -> bool:
    """Whether nothing speaks against the values given so far."""
    return cases.fits(case) and aligned(case)


FITS: dict[str, Any] = cases.FITS | {
    "rule": fits,
    "more": (partial(cases.fits, rules=(*cases.WIDE, aligned)), (*cases.LOOKS_AT, "matmul", "head_dim")),
}
SIZES = (
    *("model.hidden=192", "model.ffn=768", "model.sequence=128", "model.expert_ffn=96"),
    *("validation.every=0", "metrics.tensorboard=false", "metrics.wandb=off"),
)
LONG, SHORT = 200, 24
"""Cases of the long form, and of every run of the tests."""


def chosen_of(case: Case) -> tuple[dict[str, Any], Chosen]:
    """The composed configuration of a case, and its layout."""
    layout, (model, own) = layout_of(case), keys_of({"verified": "false", **case})
    words = [word for word in SIZES if case["experts"] != "null" or "expert" not in word]
    keys = [
        *("model=pangu_quickstart", "data=synthetic", *model, *words, *own),
        *(
            f"parallel.{name}={getattr(layout, name)}"
            for name in ("tensor", "pipeline", "virtual_stages", "data", "context")
        ),
        f"parallel.zero={layout.zero}",
        f"parallel.zero_group={case['zero_group']}",
        f"parallel.sequence={case['sequence']}",
        f"parallel.expert={case['expert']}",
        f"parallel.expert_tensor={case['expert_tensor']}",
        f"precision={'fp8' if case['matmul'] == 'fp8' else case['precision']}",
        f"precision.reduce={case['reduce']}",
        f"optimizer.moments={case['moments']}",
        "optimizer.betas=[0.9,0.95]",
        f"parallel.bucket_mib={case['bucket']}",
    ]
    values = {**composed(*keys), "dry_run": True}
    return values, choose_layout(values, 1)


def drawn(chance: random.Random) -> Case:
    """Values that go together."""
    while True:
        case: Case = {}
        for name in chance.sample(list(FACTORS), len(FACTORS)):
            values = [value for value in FACTORS[name] if fits({**case, name: value})]
            if values:
                case[name] = chance.choice(values)
        if len(case) == len(FACTORS) and devices(case) > 1:
            return {name: case[name] for name in FACTORS}


def all_cases() -> Iterator[Case]:
    """A covering array, its fewest cases with every value first, then cases drawn at random."""
    cover = Cover(FACTORS, **FITS).cases
    first = with_every_value(cover)
    yield from first
    yield from (case for case in cover if case not in first)
    chance = random.Random(0)
    while True:
        yield drawn(chance)
