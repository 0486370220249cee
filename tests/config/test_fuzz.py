"""Random configurations end in a plan or in one message: no traceback, no hang."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pangu.common.errors import ConfigError, UserError
from pangu.pipeline.layouts import choose_layout
from pangu.training.command import compose
from pangu.training.run import run
from tests.config.fuzz import small_words, words
from tests.pace import processor_time_below
from tests.spawn import Pool, repository


def dry_run(line: Sequence[str]) -> str:
    """What `pretrain.py LINE dry_run=true` says: nothing, or its one message."""
    try:
        run(compose(repository() / "configs", [*line, "dry_run=true"]))
    except UserError as error:
        return str(error)
    return ""


def check(seed: int) -> str:
    """Do it with random words. Any other error than a UserError is a failure."""
    line = words(random.Random(seed))
    try:
        with processor_time_below(5.0):
            said = dry_run(line)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {' '.join(line)}") from error
    assert "object at 0x" not in said
    assert "None" not in said, f"seed {seed}: {said}"
    return said


def test_40_random_configurations_end_in_a_plan_or_one_message() -> None:
    messages = [check(seed) for seed in range(40)]
    assert 4 < messages.count("") < 36


@pytest.mark.long
@pytest.mark.parametrize("first", range(0, 1500, 100))
def test_1500_random_configurations_end_in_a_plan_or_one_message(first: int) -> None:
    for seed in range(first, first + 100):
        check(seed)


def accepted(first: int, output: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Random seeds with a number of processes and a configuration that passes all checks on them."""
    for seed in range(first, first + 10_000):
        line = [*small_words(random.Random(seed)), f"train.output={output}/{seed}"]
        world = random.Random(-seed).choice((1, 2, 4))
        try:
            values = compose(repository() / "configs", line)
            choose_layout(values, world)
        except ConfigError:
            continue
        yield seed, world, values


def train(rank: int, world: int, values: dict[str, Any]) -> str:
    """`pretrain.py` as one of several processes; what it says against the configuration."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    try:
        run(values)
    except UserError as error:
        return str(error)
    return ""


def trained(count: int, pool: Pool, output: Path) -> None:
    """Train a step of so many accepted configurations. A few are refused when the device is known, with a message."""
    done = 0
    for seed, world, values in accepted(0, output):
        try:
            said = pool.run(world, train, values)
        except AssertionError as error:
            raise AssertionError(f"seed {seed} on {world} processes: {values}") from error
        assert len(set(said)) == 1, (seed, said)
        # kernels for GPUs; patterns that fit no tensor
        assert said[0] == "" or any(key in said[0] for key in ("model.attention", "train.frozen")), (seed, said)
        done += said[0] == ""
        if done == count:
            return


def test_2_accepted_configurations_train_a_step(pool: Pool, tmp_path: Path) -> None:
    trained(2, pool, tmp_path)


@pytest.mark.long
def test_100_accepted_configurations_train_a_step(pool: Pool, tmp_path: Path) -> None:
    trained(100, pool, tmp_path)
