"""Replicas of slow ranks compute fewer micro-batches, and the steps stay the same."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from pangu.config.stages import num_samples
from pangu.data.loader import Loader
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.device_checks import DeviceChecks
from pangu.training.process import Heartbeat
from pangu.training.stages import BatchStages
from pangu.training.step import Trainer
from tests.configs import tiny
from tests.parallel.harness import OVERRIDES, parallel_keys, samples_of, whole
from tests.threads import Ranks

STEPS = 4
MODEL = (
    *(
        *OVERRIDES,
        "precision=fp64",
        "model.layers=4",
        "model.dropout=0.1",
        "batch.global_size=16",
        "batch.micro_size=1",
    ),
    *("train.check_step=true", f"train.steps={STEPS}", "batch.stages=[{until:3,global_size:8}]"),
    *("train.deterministic=true", "faults.recheck=8"),
)
LAYOUTS: dict[str, tuple[Layout, tuple[str, ...], list[tuple[int, ...]]]] = {
    "beside tensor": (Layout(2, 1, 2, 1, sequence=True), (), [(6, 2), (12, 4)]),
    "three replicas": (Layout(data=3, zero=1), ("optimizer=lamb",), [(2, 4, 2), (4, 8, 4)]),
    "interleaved": (Layout(1, 2, 2, 0, virtual_stages=2), ("parallel.schedule=interleaved",), [(6, 2), (12, 4)]),
    "zero bubbles": (Layout(1, 2, 2, 1), ("parallel.schedule=zb_h1",), [(6, 2), (12, 4)]),
    "experts": (Layout(data=2, zero=1), ("model.experts=4",), [(6, 2), (12, 4)]),
    "gathering each time": (Layout(data=2, zero=3), (), [(4, 4), (8, 8)]),
    "reducing each time": (Layout(data=2, zero=2), (), [(4, 4), (8, 8)]),
    "exchanging tokens": (Layout(data=4, zero=1, expert=2), ("model.experts=4",), [(2,) * 4, (4,) * 4]),
    "keeping more": (Layout(1, 2, 2, 0), ("parallel.schedule=gpipe",), [(4, 4), (8, 8)]),
}
"""Layout, other keys, and the replicas' shares in the last two steps."""
IN_CI = "beside tensor", "three replicas", "interleaved", "gathering each time"


def run(rank: int, world: int, layout: Layout, slowness: dict[int, float], *overrides: str) -> Any:
    """Results, weights, this rank's numbers of counted micro-batches, and a verdict on the last step."""
    config = tiny(*MODEL, *overrides, *parallel_keys(layout))
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu"), config.parallel.timeout_s))
    stages, checks, figures, counts = BatchStages(config), DeviceChecks(trainer, Heartbeat(None)), [], []
    sizes = config.batch.global_size, config.batch.micro_size, trainer.mesh.at.data, layout.data
    with Loader(
        samples_of(config.data.packing), config.data.packing, *sizes, stage_at=stages.loader_stage_at
    ) as loader:
        for step in range(STEPS):
            stages.enter(trainer)
            batches = loader.micro_batches(num_samples(config, step), step)
            trainer.forward_backward(batches)
            if step == 0 and slowness:
                stages.share(trainer, slowness)
            result = trainer.read(trainer.update())
            figures += [result.loss, result.grad_norm]
            counts.append(sum(bool(batch.weights.any()) for batch in batches))
    checks.computed = batches, trainer.config
    verdict = checks.diagnose("spike", result) if layout.data > 1 else None
    return figures, whole(trainer, of_gradients=False), counts, verdict


@cache
def one_process(*overrides: str) -> Any:
    return run(0, 1, Layout(), {}, *overrides)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.long) for name in LAYOUTS]
)
def test_fewer_micro_batches_on_slow_replicas_change_no_step(ranks: Ranks, name: str) -> None:
    """The last rank takes three times as long; of three replicas the first and the last one take twice as long.

    Weights are compared as in `test_batch_stages`."""
    layout, own, expected = LAYOUTS[name]
    slowness = {layout.world - 1: 3.0} if layout.data != 3 else {0: 2.0, 2: 2.0}
    figures, weights, _, _ = one_process(*(word for word in own if word.startswith(("optimizer", "model"))))
    for rank, (other, held, counts, verdict) in enumerate(ranks.run(layout.world, run, layout, slowness, *own)):
        assert other == pytest.approx(figures, rel=1e-12)
        for tensor, one in weights.items():
            torch.testing.assert_close(held[tensor], one, rtol=1e-8, atol=1e-10, msg=tensor)
        replica = layout.coordinates(rank).data
        assert counts[2:] == [shares[replica] for shares in expected]
        assert verdict == ("spike; recomputed on all replicas with the same bits", None)
