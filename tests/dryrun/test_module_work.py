"""What a module does, from a dry run: against formulas, and against the step of a whole stage."""

from __future__ import annotations

import json

import pytest

from pangu.models.size import layer_flops
from pangu.planning.layouts import choose_layout
from pangu.planning.module_work import profile_modules
from tests.dryrun.layouts import SMALL, values
from tests.end_to_end.commands import called

pytestmark = pytest.mark.usefixtures("commands_share_it")
SHAPE = ("model.hidden=512", "model.heads=8", "model.sequence=256", "model.vocab=4096", "precision=bf16")
SEQUENCE = "parallel.tensor=2 parallel.sequence=true memory.recompute=full"


@pytest.mark.parametrize("layout", ["", SEQUENCE])
def test_a_layer_is_what_formulas_say(layout: str) -> None:
    """Activations to 0.1 % (the kernel keeps its random state as well), products and collectives exactly."""
    chosen = values(layout, *SHAPE)
    config = choose_layout(chosen, 1).config
    modules = profile_modules(chosen)
    layer, tensor = modules["layer"], config.parallel.tensor
    tokens = config.model.sequence * config.batch.micro_size
    # Korthikanti et al. 2022, table 2: 34, without the two masks of dropout; a fused kernel keeps no scores but their
    # sums, and norms keep two statistics
    kept = tokens * (32 * config.model.hidden + 4 * config.model.heads + 16) / tensor
    assert layer.saved_bytes == pytest.approx(kept, rel=1e-3)
    assert sum(matmul.flops for matmul in layer.forward.matmuls) * tensor == tokens * layer_flops(config.model)
    weights = [matmul for matmul in layer.forward.matmuls if not matmul.fused]
    assert sum(matmul.flops for matmul in layer.backward_weight.matmuls) == sum(matmul.flops for matmul in weights)
    sent = {one.kind: one.calls for one in layer.forward.collectives}
    assert sent == ({"all_gather": 2, "reduce_scatter": 2} if layout else {})
    assert all(one.bytes == 2 * tokens * config.model.hidden for one in layer.forward.collectives)
    assert modules["head"].saved_bytes > 2 * tokens * config.model.vocab / tensor
    assert ("recomputed" in modules) == bool(layout)
    if layout:
        again = modules["recomputed"]
        assert again.saved_bytes == 2 * tokens * config.model.hidden / tensor
        # the last product of a layer is not computed again
        assert len(again.recompute.matmuls) > 0
        assert again.recompute.launches < layer.forward.launches


def test_a_plan_gives_modules_as_data() -> None:
    done = called("tools/plan", *SMALL, "--modules")
    assert done.returncode == 0, done.stderr
    modules = json.loads(done.stdout)
    assert set(modules) == {"embedding", "layer", "head"}
    assert modules["layer"]["forward"]["launches"] > 0
