"""What a step does is what its list says, operation by operation (`train.check_step`).

The covering array of `test_layouts.py` compares both in every case. Here are buckets of several sizes, and what a
difference is.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from pangu.common.errors import LocalError
from pangu.topology.layout import Layout
from pangu.zero.gradients import GradientSum
from pangu.zero.muon_schedule import matrix_rounds
from pangu.zero.unshard import Unsharder
from tests.parallel.harness import OVERRIDES, small_trainer
from tests.threads import Ranks, replaced_here

LAYERS = ("model.layers=4", "batch.global_size=8", "batch.micro_size=2", "train.check_step=true")


def two_steps(rank: int, world: int, layout: Layout, *overrides: str) -> int:
    """Number of flat parameters, after two steps that were compared with their lists."""
    trainer, batches = small_trainer(layout, *overrides)
    for _ in range(2):
        trainer.train_step(batches)
    return len(trainer.parameters.flat_parameters)


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("frozen", ["", "layers.1.*"])
def test_buckets_of_all_sizes(ranks: Ranks, zero: int, frozen: str) -> None:
    """One flat parameter for each module, for some of them together, and for all that is trained."""
    words = (*OVERRIDES, *LAYERS, f"train.frozen=[{frozen}]")
    sizes = [
        ranks.run(2, two_steps, Layout(data=2, zero=zero), *words, f"parallel.bucket_mib={mib}")[0]
        for mib in (0.001, 0.1, 100)
    ]
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize("layout", [Layout(data=2, zero=1), Layout(data=2, zero=3), Layout(tensor=2)], ids=str)
@pytest.mark.parametrize("offload", ["", "optimizer"])
def test_muon_publishes_weights_between_rounds(
    ranks: Ranks, layout: Layout, offload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the list, with QK-clip before: the weights that compute are the updated ones."""
    monkeypatch.setattr(matrix_rounds, "__defaults__", (5000,))
    words = ("optimizer=muon", "optimizer.qk_clip=0.02", f"memory.offload=[{offload}]")
    assert ranks.run(2, two_steps, layout, *OVERRIDES, *LAYERS, *words, "parallel.bucket_mib=0.001")[0] > 4


def reduced_late(rank: int, world: int, layout: Layout, what: str) -> str:
    """What the check says of a step whose gradients wait for the end of backward, or whose weights stay whole."""
    late = replaced_here(GradientSum, count=lambda *_: None)
    whole = replaced_here(Unsharder, end=lambda *_: None)
    with late if what == "reduced late" else whole, pytest.raises(LocalError) as error:
        two_steps(rank, world, layout, *OVERRIDES, *LAYERS)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "reduced late",
            r"is RESHARD flat parameter (\d+) .*, expected REDUCE flat parameter \1 ",
        ),
        ("not resharded", r"expected RESHARD flat parameter \d+ \("),
    ],
)
def test_the_first_difference_ends_the_run(ranks: Ranks, what: str, said: str) -> None:
    """It names the operation, its number and what should have been."""
    for message in ranks.run(2, reduced_late, Layout(data=2, zero=3), what):
        assert re.match(r"rank [01]: train.check_step: operation \d+ of the step is ", message)
        assert re.search(said, message), message


def test_a_step_that_fails_is_no_difference() -> None:
    """What follows in the same process is not compared, as its weights are where the step left them."""
    trainer, batches = small_trainer(Layout(), *OVERRIDES, *LAYERS)
    with replaced_here(type(trainer.model), loss_of=fail), pytest.raises(ZeroDivisionError):
        trainer.train_step(batches)
    trainer.parameters.publish()
    assert trainer.train_step(batches).loss > 0


def fail(*_: object, **__: object) -> None:
    """End a step."""
    raise ZeroDivisionError


@pytest.mark.parametrize("offload", ["", "optimizer"])
def test_a_reduction_that_cannot_begin_is_not_waited_for(ranks: Ranks, offload: str) -> None:
    """The sums that have begun are waited for, and no other."""
    assert ranks.run(2, failed_reduction, Layout(data=2, zero=3), offload) == [None] * 2


def failed_reduction(rank: int, world: int, layout: Layout, offload: str) -> None:
    """Let the second reduction of a step fail, and wait for all that are under way."""
    words = (*OVERRIDES, *LAYERS[:-1], f"memory.offload=[{offload}]")
    trainer, batches = small_trainer(layout, *words)
    start, begun = GradientSum._start, list[object]()

    def fail_second(gradients: GradientSum, flat: Any) -> Any:
        begun.append(flat)
        if len(begun) == 2:
            raise ConnectionError
        return start(gradients, flat)

    with replaced_here(GradientSum, _start=fail_second), pytest.raises(ConnectionError):
        trainer.train_step(batches)
    trainer.parameters.gradients.finish_all()


def test_frozen_weights_are_not_fetched_from_the_host() -> None:
    """Only trained ones have main parameters there; nothing is left on its way."""
    words = (*OVERRIDES, *LAYERS, "train.frozen=[layers.1.*]", "memory.offload=[optimizer]")
    trainer, batches = small_trainer(Layout(), *words)
    trainer.train_step(batches)
    unsharder = trainer.parameters.unsharder
    unsharder.wait()
    assert not unsharder._handles
