"""A checkpoint of any layout is continued under any other: all layouts of up to four ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pangu.topology.layout import Layout
from pangu.training.saving import load_checkpoint
from tests.parallel.harness import OVERRIDES, whole
from tests.parallel.test_zero_runs import save, train, trainer_of
from tests.threads import Ranks

MODEL = (
    *OVERRIDES,
    "precision=fp64",
    "model.layers=4",
    "model.hidden=16",
    "batch.global_size=12",
    "batch.micro_size=1",
)


def layouts() -> Iterator[Layout]:
    """Every one; what makes no difference (ZeRO with one replica, for example) is left at its default."""
    for tensor, pipeline, data in product((1, 2, 4), (1, 2, 3, 4), (1, 2, 3, 4)):
        if tensor * pipeline * data > 4:
            continue
        for virtual in (1, 2) if pipeline == 2 else (1,):
            for sequence in (False, True) if tensor > 1 else (False,):
                for zero in range(4) if data > 1 else (0,):
                    for group in (0, 2) if data == 4 and zero else (0,):
                        yield Layout(tensor, pipeline, data, zero, sequence, virtual, group)


LAYOUTS = tuple(layouts())


def values(before: Layout, after: Layout) -> set[Any]:
    """All pairs of a value of the first layout and one of the second, with the names of their axes."""
    return set(product(asdict(before).items(), asdict(after).items()))


@cache
def covering_sample() -> frozenset[tuple[Layout, Layout]]:
    """Every layout as the first and as the second of some pair, and every pair of values."""
    missing = set().union(*(values(*pair) for pair in product(LAYOUTS, LAYOUTS)))
    sample = set()
    for before in LAYOUTS:
        left = [after for after in LAYOUTS if after not in {taken for _, taken in sample}]
        after = max(left, key=lambda layout: len(values(before, layout) & missing))
        sample.add((before, after))
        missing -= values(before, after)
    while missing:
        pair = max(product(LAYOUTS, LAYOUTS), key=lambda pair: len(values(*pair) & missing))
        sample.add(pair)
        missing -= values(*pair)
    return frozenset(sample)


def optimizer_of(before: Layout) -> str:
    """Both take turns."""
    return ("adam", "lamb")[LAYOUTS.index(before) % 2]


def words(layout: Layout, optimizer: str) -> tuple[str, ...]:
    schedule = "interleaved" if layout.virtual > 1 else "1f1b"
    return (*MODEL, f"optimizer={optimizer}", f"parallel.schedule={schedule}")


@cache
def unbroken(optimizer: str) -> dict[str, Tensor]:
    """Weights after three steps on one process."""
    trainer = trainer_of(Layout(), *words(Layout(), optimizer))
    train(trainer, range(3))
    return whole(trainer, of_gradients=False)


def resume_each(
    rank: int,
    world: int,
    layout: Layout,
    optimizer: str,
    checkpoints: list[Path],
    aside: str,
    expected: dict[str, Tensor],
) -> list[float]:
    """Largest difference of any weight after the third step from each of some checkpoints."""
    trainer = trainer_of(layout, *words(layout, optimizer), f"train.output={aside}")
    differences = []
    for checkpoint in checkpoints:
        load_checkpoint(checkpoint, trainer.config, trainer)
        train(trainer, range(2, 3))
        weights = whole(trainer, of_gradients=False)
        assert weights.keys() == expected.keys()
        differences.append(max(float((weights[name] - weight).abs().max()) for name, weight in expected.items()))
    return differences


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Layout], Path]:
    """The checkpoint of two steps under a layout."""

    @cache
    def make(layout: Layout) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        ranks.run(layout.world, save, layout, str(folder), *words(layout, optimizer_of(layout)))
        return folder / "checkpoints" / "step-00000002"

    return make


@pytest.mark.slow
@pytest.mark.parametrize("after", LAYOUTS, ids=str)
def test_a_run_goes_on_under_another_layout(
    after: Layout, saved: Callable[[Layout], Path], ranks: Ranks, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """fp64: 1e-12 of weights of about 1. `--all-pairs` takes every layout before every other, not a sample of pairs."""
    every = request.config.getoption("--all-pairs")
    chosen = [before for before in LAYOUTS if every or (before, after) in covering_sample()]
    for optimizer in ("adam", "lamb"):
        before = [layout for layout in chosen if optimizer_of(layout) == optimizer]
        if before:
            job = (resume_each, after, optimizer, [saved(layout) for layout in before], str(tmp_path))
            found = ranks.run(after.world, *job, unbroken(optimizer))[0]
            wrong = {str(layout): off for layout, off in zip(before, found, strict=True) if not off <= 1e-12}
            assert not wrong
    assert chosen


def test_the_layouts_are_all() -> None:
    assert len(set(LAYOUTS)) == len(LAYOUTS) == 44
    assert {layout.world for layout in LAYOUTS} == {1, 2, 3, 4}
    assert len(covering_sample()) < 2 * len(LAYOUTS)
