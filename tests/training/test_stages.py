"""Batches and sequences that grow within a run: what a step reads, and runs that are interrupted at the borders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from pangu.checkpoint.index import read_index
from pangu.checkpoint.reading import read_tensor
from pangu.common.errors import ConfigError, UserError
from pangu.config.checks import check
from pangu.config.stages import num_samples
from pangu.pipeline.layouts import choose_layout
from tests.configs import composed, config
from tests.end_to_end.commands import metrics
from tests.training.test_resume import train

STAGES = "batch.stages=[{until:2,global_size:4,sequence:8},{until:3,global_size:4},{until:5,sequence:16}]"
WORDS = ("model.sequence=32", "batch.global_size=8", "batch.micro_size=2", "model.dropout=0.1", STAGES)
WORDS = (*WORDS, "precision=fp16", "precision.loss_scale.initial=256", "precision.loss_scale.hysteresis=2")


def weights(output: Path, step: int) -> dict[str, torch.Tensor]:
    folder = output / f"checkpoints/step-{step:08}"
    index = read_index(folder)
    return {name: read_tensor(folder, index, name) for name in index["tensors"]}


def test_a_run_that_is_interrupted_at_every_border_gives_the_same_bits(tmp_path: Path) -> None:
    """Interrupted after steps 2, 3 and 5, where stages end, and within one, after step 4."""
    unbroken = train(tmp_path / "unbroken", 6, *WORDS)
    for steps in (2, 3, 4, 5, 6):
        train(tmp_path / "broken", steps, *WORDS)
    assert [line["loss"] for line in metrics(tmp_path / "broken")] == unbroken
    assert [line["tokens"] for line in metrics(tmp_path / "broken")] == [32, 64, 192, 320, 448, 704]
    mine, theirs = weights(tmp_path / "unbroken", 6), weights(tmp_path / "broken", 6)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(one, theirs[name]) for name, one in mine.items())
    assert read_index(tmp_path / "broken/checkpoints/step-00000006")["samples"] == 22


def test_the_log_and_the_plan_of_a_run_name_the_stages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 4, *WORDS)
    log = capsys.readouterr().err
    assert "stages       steps 1 to 2: 4 sequences of 8 tokens; step 3: 4 sequences of 32 tokens; step 4: 8" in log
    assert "\nstage        1 of 4, steps 1 to 2: 4 sequences of 8 tokens\n" in log
    assert "\nstage        3 of 4, step 4: 8 sequences of 16 tokens\n" in log
    assert "stage        4 of 4" not in log


@pytest.mark.parametrize(("skipped", "sample"), [(0, 6), (1, 10), (3, 22)])
def test_a_rollback_returns_to_the_stage_of_its_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], skipped: int, sample: int
) -> None:
    """The spike of step 3 is in stage 2, and the run goes back to a checkpoint of stage 1.

    Steps take 1, 1, 4, 4, 4 and 8 samples; the batches of the next `skipped` steps are left out, too.
    """
    faults = ("faults.action=rollback", "faults.spike=0.01", "faults.spike_window=2", "faults.max_rollbacks=1")
    words = (
        f"faults.skip_after={skipped}",
        "optimizer.lr=10",
        "lr_schedule.warmup_steps=3",
        "lr_schedule.decay_steps=9",
    )
    stages = "batch.stages=[{until:2,global_size:4,sequence:8},{until:5,sequence:16}]"
    with pytest.raises(UserError, match=r"faults\.max_rollbacks = 1 is reached"):
        train(tmp_path, 6, *WORDS[:3], *faults, *words, stages)
    log = capsys.readouterr().err
    numbers = re.findall(r"^stage +(\d) of 3|^(rolled back)", log, re.MULTILINE)
    assert ["".join(one) for one in numbers] == ["1", "2", "rolled back", "1", "2"]
    assert f"continuing after step 1 with sample {sample}" in log


def test_samples_of_a_number_of_steps() -> None:
    run = config(*WORDS, "data=synthetic", "validation.every=0")
    assert [num_samples(run, steps) for steps in (0, 1, 2, 3, 4, 5, 6, 10)] == [0, 1, 2, 6, 10, 14, 22, 54]


WRONG = {
    "[{until:5},{until:5}]": "batch.stages[1].until = 5: must be above 5, where the previous stage ends; list stages",
    "[{until:5,global_size:32}]": "batch.stages[0].global_size = 32: must not exceed batch.global_size = 16",
    "[{until:5,sequence:100}]": "batch.stages[0].sequence = 100: must divide model.sequence = 256, whose samples are "
    "cut; nearest valid values: 32, 64, 128",
    "[{until:5,global_size:4,sequence:32}]": "batch.stages[0].global_size = 4: must be a multiple of model.sequence / "
    "sequence = 8, so that a step takes whole samples; nearest valid values: 8",
    "[{until:5,global_size:8},{until:9,global_size:6}]": "batch.stages[1]: batch.global_size = 6: must be a multiple "
    "of batch.micro_size x data-parallel size = 4 x 1 = 4",
    "[{until:5,global_size:0}]": "batch.stages[0].global_size = 0: must be at least 1",
    "[3]": "batch.stages[0] = 3: must be a group of keys",
    "3": "batch.stages = 3: must be a list of groups of keys",
    "[{until:5,length:8}]": "batch.stages[0].length = 8: unknown key",
}


@pytest.mark.parametrize("stages", WRONG)
def test_a_problem_names_its_stage(stages: str) -> None:
    words = ("data=synthetic", "validation.every=0", "model.sequence=256", f"batch.stages={stages}")
    with pytest.raises(ConfigError) as caught:
        choose_layout(composed(*words), 1)
    assert WRONG[stages] in str(caught.value)


def test_packed_documents_are_not_cut() -> None:
    words = ("data.packing.method=best_fit", "batch.stages=[{until:5,sequence:64}]")
    with pytest.raises(ConfigError, match=r"batch\.stages\[0\]\.sequence = 64: would cut packed documents; use null"):
        check(config(*words), 1)
