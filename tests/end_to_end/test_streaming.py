"""Runs on text that nobody has prepared."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.end_to_end.commands import SAME_ATTENTION, SMALL, metrics, pretrain


def words(folder: Path) -> list[str]:
    """A run on text of less than two epochs, held-out documents included."""
    folder.mkdir()
    for name in "ab":
        lines = [json.dumps({"text": f"{name} is {i}, " * (3 + i % 9)}) for i in range(80)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return [
        *SMALL,
        SAME_ATTENTION,
        "data=stream",
        f"data.train=[{folder}/a.jsonl,{folder}/b.jsonl]",
        "data.weights=[2,1]",
        "data.tokenizer={kind: bytes}",
        "data.packing={eod: 256, reset_mask: true, reset_positions: true}",
        "data.shuffle=2000",
        "data.holdout=0.1",
        "validation.every=3",
        "validation.sequences=5",
        "model.vocab=300",
        "batch.global_size=24",
        "precision=fp64",
        "lr_schedule.warmup_steps=1",
        "lr_schedule.decay_steps=6",
    ]


@pytest.mark.slow
def test_a_streamed_run_goes_on_exactly_under_another_layout(tmp_path: Path) -> None:
    """Begun on two replicas and finished on one process: the unbroken run's losses to 1e-11 in fp64."""
    run = words(tmp_path / "text")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert pretrain(whole, *run, "train.steps=6").returncode == 0
    for steps, processes in ((2, 2), (6, 0)):
        done = pretrain(broken, *run, f"train.steps={steps}", f"batch.micro_size={processes or 4}", processes=processes)
        assert done.returncode == 0, done.stderr
    lines = [metrics(folder) for folder in (whole, broken)]
    assert len(lines[0]) == len(lines[1]) == 6
    assert [line["step"] for line in lines[0] if "validation_loss" in line] == [3, 6]
    for expected, line in zip(*lines, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-11)
        if "validation_loss" in expected:
            assert line["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-11)
            assert set(line["validation_sources"]) == {"a.jsonl", "b.jsonl"}
    assert all(line["data_wait_s"] >= 0 for line in lines[1])
    index = json.loads((broken / "checkpoints/step-00000002/index.json").read_text())
    assert index["samples"] == 48 >= index["position"]["samples"] > 24
    with (tmp_path / "text" / "b.jsonl").open("a") as file:
        file.write('\n{"text": "b"}')
    done = pretrain(broken, *run, "train.steps=8")
    assert done.returncode == 2
    assert "the data differs from that of the checkpoint" in done.stderr
    assert re.search(r"data\.train: b\.jsonl of \d+ bytes, but the checkpoint has b\.jsonl of \d+", done.stderr)
