"""The layout does not change the maths: every pair of options, in some layout, equals one process.

The cases are covering arrays (`tests/covering.py`). In float64 all numbers of a run are compared to 1e-12: initial
weights bit for bit, losses, norms, every gradient of every step, the weights, the held-out loss, the logits of cached
generation. In narrow formats losses and norms are compared to a few roundings.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import pytest

from pangu.topology.layout import Layout
from tests.covering import Case, Cover
from tests.parallel.harness import OVERRIDES, compare, one_process, train_layout
from tests.threads import Ranks

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "breadth_first": 2, "zb_h1": 1, "zb_v": 2}
"""Schedule -> chunks per stage."""
VARIANTS = {
    "standard": "",
    "rmsnorm": "model.norm=rmsnorm",
    "fast_gelu": "model.activation=fast_gelu",
    "swiglu": "model.activation=swiglu",
    "no_biases": "model.biases=false",
    "untied": "model.tied_head=false",
    "kv_heads": "model.kv_heads=4",
    "rope": "model.positions=rope",
    "post_norm": "model.norm_placement=post",
    "window": "model.window=5",
    "alibi": "model.positions=alibi",
    "relative": "model.positions=relative model.relative_buckets=6 model.relative_distance=9",
    "residual_scores": "model.residual_scores=true",
    "carried": "model.positions=relative model.residual_scores=true",
    "llama": "model.norm=rmsnorm model.activation=swiglu model.biases=false model.positions=rope model.kv_heads=4 "
    "model.tied_head=false",
}
FROZEN = {
    "nothing": (),
    "bottom": ("embedding.*", "layers.0.*"),  # backward has nothing to do here
    "scattered": ("layers.1.*", "layers.0.mlp.*.bias", "final_norm.*"),
}
RECOMPUTE = {
    "none": "",
    "full": "memory.recompute=full",
    "one_layer": "memory.recompute=1",
    "selective": "memory.recompute=selective",
    "attention": "memory.recompute=selective memory.selective=[attention]",
    "activation": "memory.recompute=selective memory.selective=[activation]",
    "norm": "memory.recompute=selective memory.selective=[norm]",
}
FACTORS: dict[str, tuple[str, ...]] = {
    "variant": tuple(VARIANTS),
    "schedule": tuple(CHUNKS),
    "recompute": tuple(RECOMPUTE),
    "tensor": ("1", "2", "3", "4"),
    "sequence": ("false", "true"),
    "overlap_chunks": ("1", "3"),
    "pipeline": ("1", "2", "3", "4"),
    "cut": ("even", "uneven"),
    "data": ("1", "2", "4"),
    "zero": ("0", "1", "2", "3"),
    "zero_group": ("null", "2"),
    "overlap": ("true", "false"),
    "micro_batches": ("1", "2", "3", "5"),
    "micro_size": ("1", "2"),
    "offload": ("", "activations", "optimizer", "parameters", "activations,optimizer,parameters"),
    "chunk": ("null", "5", "1000"),
    "frozen": tuple(FROZEN),
    "optimizer": ("adam", "lamb"),
    "kind": ("pangu", "gpt"),
}
PRECISIONS = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
"""Format -> unit roundoff."""


def among(name: str, *values: str, then: str, needs: tuple[str, ...]) -> object:
    """A rule: where `name` is one of the values, `then` must be one of `needs`."""
    return lambda case: name not in case or case[name] not in values or then not in case or case[then] in needs


def devices(case: Mapping[str, str]) -> int:
    """Processes of a case, as far as it is decided."""
    return int(case.get("tensor", 1)) * int(case.get("pipeline", 1)) * int(case.get("data", 1))


SHARDED, SEVERAL = ("1", "2", "3"), ("2", "4")
RULES = (
    lambda case: devices(case) <= 8,
    among("sequence", "true", then="tensor", needs=SEVERAL),  # 3 does not divide the 16 positions
    among("overlap_chunks", "3", then="tensor", needs=("2", "3", "4")),
    among("schedule", "interleaved", "breadth_first", "zb_h1", "zb_v", then="pipeline", needs=("2", "3", "4")),
    among("cut", "uneven", then="pipeline", needs=("2", "3", "4")),
    among("zero", *SHARDED, then="data", needs=SEVERAL),
    among("zero_group", "2", then="data", needs=("4",)),
    among("zero_group", "2", then="zero", needs=SHARDED),
    among("offload", "parameters", "activations,optimizer,parameters", then="zero", needs=("3",)),
    among("variant", "kv_heads", "llama", then="tensor", needs=("1", "2", "4")),  # 3 does not divide 4 heads
    # together they leave nothing to train but a bias or two in the first stage, which other cases have
)
IMPOSSIBLE = {
    # what no case can have, beside what one rule says by itself: the same through a third option
    frozenset({("zero", zero), ("data", "1")})
    for zero in SHARDED
}


def layout_of(case: Case) -> Layout:
    return Layout(
        tensor=int(case["tensor"]),
        pipeline=int(case["pipeline"]),
        data=int(case["data"]),
        zero=int(case["zero"]),
        sequence=case["sequence"] == "true",
        virtual=CHUNKS[case["schedule"]],
        zero_group=0 if case["zero_group"] == "null" else 2,
    )


def keys_of(case: Case) -> tuple[list[str], list[str]]:
    """What one process is told too, and what only the layout is told."""
    layout = layout_of(case)
    chunks = layout.pipeline * layout.virtual
    layers = max(3, chunks + 1)
    sequences = layout.data * int(case["micro_batches"]) * int(case["micro_size"])
    model = [
        *OVERRIDES,
        "model.hidden=48",
        "model.heads=12",
        "model.ffn=96",
        f"model.kind={case['kind']}",
        f"model.layers={layers}",
        f"batch.global_size={sequences}",
        f"batch.micro_size={case['micro_size']}",
        f"optimizer={case['optimizer']}",
        f"train.frozen=[{','.join(FROZEN[case['frozen']])}]",
        *VARIANTS[case["variant"]].split(),
    ]
    own = [
        f"parallel.schedule={case['schedule']}",
        f"parallel.overlap={case['overlap']}",
        f"parallel.overlap_chunks={case['overlap_chunks']}",
        f"memory.offload=[{case['offload']}]",
        f"loss.chunk={case['chunk']}",
        *RECOMPUTE[case["recompute"]].split(),
    ]
    if case["cut"] == "uneven":
        own.append(f"parallel.layers=[{','.join(['1'] * (chunks - 2) + [str(layers - chunks + 1), '1'])}]")
    return model, own


COVER = Cover(FACTORS, lambda case: all(rule(case) for rule in RULES), cost=devices)


def name_of(case: Case) -> str:
    """Values that differ from the first of their option."""
    return " ".join(f"{name}={case[name]}" for name, values in FACTORS.items() if case[name] != values[0]) or "standard"


@pytest.mark.parametrize("case", COVER.cases, ids=name_of)
def test_every_pair_of_options_gives_the_same_run_in_float64(ranks: Ranks, case: Case) -> None:
    """1e-12 relative: sums of at most 96 products in another order, 1.1e-16 each."""
    layout, (model, own) = layout_of(case), keys_of(case)
    one = one_process(2, *model, "precision=fp64")
    patterns = FROZEN[case["frozen"]]
    frozen = {name for name in one["first"] if any(fnmatchcase(name, pattern) for pattern in patterns)}
    assert bool(frozen) == bool(patterns)
    ours = ranks.run(layout.world, train_layout, layout, 2, *model, "precision=fp64", *own)
    compare(ours[0], one, 1e-12, frozen)
