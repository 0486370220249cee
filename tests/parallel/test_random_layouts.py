"""Any options together, of any layouts: begun in one, resumed in another."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pangu.config.checks import check
from pangu.config.stages import num_samples
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.resuming import load_checkpoint
from pangu.training.saving import Saver
from pangu.training.step import Trainer
from pangu.training.validation import trust_ratios
from tests.configs import tiny
from tests.covering import Case
from tests.parallel.cases import (
    FACTORS,
    WIDER,
    devices,
    fits,
    frozen_of,
    keys_of,
    layout_of,
    name_of,
    sequences,
    ways_of,
)
from tests.parallel.harness import compare, parallel_keys, train
from tests.parallel.test_any_to_any import CHECKPOINT
from tests.threads import Ranks

OF_THE_LAYOUT = tuple(FACTORS)[: tuple(FACTORS).index("dropout")]
MOST_SEQUENCES = 64


def drawn(chance: random.Random, **given: str) -> Case:
    """Values that go together, some of them given."""
    while True:
        case = dict(given)
        for name in chance.sample(list(WIDER), len(WIDER)):
            values = [value for value in WIDER[name] if fits({**case, name: value})]
            if name not in case and values:
                case[name] = chance.choice(values)
        if len(case) == len(WIDER) and devices(case) > 1:
            return {name: case[name] for name in WIDER}


def pair(number: int) -> tuple[Case, Case]:
    """Two layouts of a model, which has experts two times of three; every other time ranks share sequences in the first
    of them."""
    chance = random.Random(number)
    while True:
        given = {"experts": chance.choice(WIDER["experts"][1:]) if number % 3 else "null"}
        if number % 2:
            given["context"] = chance.choice(WIDER["context"][1:])
        before = drawn(chance, **given)
        same = {name: value for name, value in before.items() if name not in OF_THE_LAYOUT}
        after = drawn(chance, **same)
        if sequences(before, after) <= MOST_SEQUENCES:
            return before, after


def one_step(
    rank: int, world: int, layout: Layout, folder: Path, checkpoint: Path | None, *overrides: str
) -> dict[str, Any]:
    """The first step, which is saved in `folder`, or the second from a checkpoint of the first."""
    torch.manual_seed(rank)
    config = tiny(*overrides, *parallel_keys(layout), f"train.output={folder}", "checkpoint.asynchronous=false")
    assert check(config, world) == layout.data
    trainer = Trainer(config, Mesh.connect(layout, torch.device("cpu")))
    if checkpoint is not None:
        load_checkpoint(checkpoint, config, trainer)
    found = train(trainer, range(1) if checkpoint is None else range(1, 2))
    found["ratios"] = trust_ratios(trainer)
    if checkpoint is None:
        with Saver(config, trainer) as saver:
            saver.save(num_samples(config, 1), {})
    return found


@pytest.mark.long
@pytest.mark.parametrize("number", range(100))
def test_any_options_together_equal_one_process(ranks: Ranks, tmp_path: Path, number: int) -> None:
    """As the covering array, to 1e-12: initial weights and those that are resumed bit for bit, losses, norms, figures
    of experts, every gradient, LAMB's ratios, weights."""
    before, after = cases = pair(number)
    print(" | ".join(map(name_of, cases)))
    (model, own), (same, others) = keys_of(before, after), keys_of(after, before)
    alone, saved, left = (tmp_path / name for name in ("alone", "saved", "left"))
    exact = (*model, "precision=fp64")
    one = [one_step(0, 1, Layout(), alone, checkpoint, *exact) for checkpoint in (None, alone / CHECKPOINT)]
    with ways_of(before):
        first = ranks.run(devices(before), one_step, layout_of(before), saved, None, *exact, *own)[0]
    with ways_of(after):
        words = (layout_of(after), left, saved / CHECKPOINT, *same, "precision=fp64", *others)
        second = ranks.run(devices(after), one_step, *words)[0]
    assert all(torch.equal(second["first"][name], weight) for name, weight in first["weights"].items())
    frozen = frozen_of(before, first)
    for mine, reference in zip((first, {**second, "first": one[1]["first"]}), one, strict=True):
        compare(mine, reference, 1e-12, frozen)
        assert mine["ratios"] == pytest.approx(reference["ratios"], rel=1e-10)
