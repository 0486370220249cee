"""Tensor and sequence parallelism do not change the maths of any variant of the architecture."""

from __future__ import annotations

import pytest

from tests.parallel.harness import compare, one_process
from tests.parallel.test_tensor_parallel import FP64, train
from tests.spawn import Pool

VARIANTS = [
    "model.norm=rmsnorm",
    "model.activation=fast_gelu",
    "model.activation=swiglu",
    "model.biases=false",
    "model.tied_head=false",
    "model.kv_heads=4",
    "model.positions=rope",
    "model.norm_placement=post",
    "model.window=5",
    "model.positions=alibi",
    "model.positions=relative model.relative_buckets=6 model.relative_distance=9",
    "model.residual_scores=true",
]
CARRIED = "model.positions=relative model.residual_scores=true"
"""What a layer takes beside the hidden states."""
TOGETHER = [
    " ".join([*VARIANTS, "memory.recompute=full", "loss.chunk=5"]),
    f"{CARRIED} memory.recompute=selective",
    f"{CARRIED} memory.recompute=1",
]


@pytest.mark.parametrize("variant", [*VARIANTS, *TOGETHER])
@pytest.mark.parametrize("kind", ["pangu", "gpt"])
def test_every_variant_gives_the_same_run_in_float64(pool: Pool, kind: str, variant: str) -> None:
    """3 steps; initial weights bit for bit, the rest to 1e-12 relative, as for the standard architecture. All of
    them at once have the loss in chunks (the later activation and positions win); one process recomputes nothing."""
    overrides = (*FP64, *variant.split(), f"model.kind={kind}")
    kept = [key for key in overrides if not key.startswith("memory.recompute")]
    one = one_process(3, *kept)
    for sequence in (False, True):
        compare(pool.run(2, train, 2, sequence, 3, "reference", *overrides)[0], one, 1e-12)
