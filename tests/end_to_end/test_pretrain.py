"""The command that users type, on small models."""

from __future__ import annotations

import json
import math
import socket
from pathlib import Path

import pytest

from tests.end_to_end.commands import SAME_ATTENTION, SMALL, called, command, metrics, pretrain
from tests.spawn import repository

SYNTHETIC = (
    *SMALL,
    SAME_ATTENTION,
    "data=synthetic",
    "model.vocab=128",
    "validation.every=0",
    "lr_schedule.warmup_steps=1",
)


@pytest.mark.slow
def test_quickstart_on_two_processes_from_nothing_to_a_sample(tmp_path: Path) -> None:
    """A short run of the real recipe: data made, loss falls, validation, checkpoint, plot, sample, closing words."""
    words = [
        "+config=quickstart",
        "lr_schedule.warmup_steps=5",
        "train.steps=20",
        "model.layers=2",
        "model.hidden=64",
        "model.heads=4",
        "model.vocab=1024",
        "metrics.every=5",
    ]
    done = command("pretrain.py", *words, f"train.output={tmp_path}", processes=2)
    assert done.returncode == 0, done.stderr
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert lines[0]["loss"] == pytest.approx(math.log(1024), abs=0.3)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[-1]["validation_loss"] < math.log(1024)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["validation_perplexity"] == pytest.approx(math.exp(lines[-1]["validation_loss"]))
    assert summary["tokens"] == lines[-1]["tokens"]
    assert len(summary["samples"]) == 3
    assert (tmp_path / "plots" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "checkpoints" / "step-00000020" / "index.json").is_file()
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert list((tmp_path / "wandb").glob("offline-run-*"))
    assert (tmp_path / "config.yaml").read_text().startswith("model:")
    rows = json.loads((tmp_path / "nodes.json").read_text())
    assert [(row["rank"], row["local_rank"], row["data"], row["host"]) for row in rows] == [
        (rank, rank, rank, socket.gethostname()) for rank in range(2)
    ]
    for expected in (
        "step 10/20",
        "perplexity",
        "sampled:\n    ",
        "run folder",
        "tensorboard --logdir",
        "train.steps=40",
        "scripts/generate.py",
    ):
        assert expected in done.stdout + done.stderr, expected

    again = pretrain(tmp_path, *words, "train.steps=22", processes=2)
    assert again.returncode == 0, again.stderr
    assert "continuing from" in again.stderr
    assert "Training a tokenizer" not in again.stderr
    assert [line["step"] for line in metrics(tmp_path)] == list(range(1, 23))


@pytest.mark.parametrize("optimizer", ["adam", "lamb", "muon"])
def test_a_resumed_run_equals_an_unbroken_one_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    words = [*SYNTHETIC, f"optimizer={optimizer}", "model.dropout=0.1", "precision=bf16", "lr_schedule.decay_steps=8"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for output, steps in ((whole, 8), (broken, 3), (broken, 8)):
        done = pretrain(output, *words, f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
    figures = [
        [(m["step"], m["loss"], m["grad_norm"], m["lr"], m["tokens"]) for m in metrics(run)] for run in (whole, broken)
    ]
    assert figures[0] == figures[1]
    weights = [
        json.loads((run / "checkpoints/step-00000008/index.json").read_text())["files"] for run in (whole, broken)
    ]
    assert weights[0] == weights[1]  # checksums


def test_a_run_may_continue_with_another_batch_size_and_sees_every_sample_once(tmp_path: Path) -> None:
    for steps, size in ((2, 4), (4, 8)):
        done = pretrain(tmp_path, *SYNTHETIC, f"train.steps={steps}", f"batch.global_size={size}")
        assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "checkpoints/step-00000004/index.json").read_text())
    assert index["samples"] == 2 * 4 + 2 * 8
    assert metrics(tmp_path)[-1]["tokens"] == index["samples"] * 32


def test_a_finished_run_says_so_and_what_came_out(tmp_path: Path) -> None:
    def started() -> str:
        done = pretrain(tmp_path, *SYNTHETIC, "train.steps=1")
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "are made" not in started()
    path = tmp_path / "summary.json"
    summary = json.loads(path.read_text())
    assert summary["loss"] > 0
    for figures, line in (
        ({"validation_loss": 1.5, "validation_perplexity": 4.48}, "\nheld-out loss 1.5000, perplexity 4.48\n"),
        ({"validation_loss": 1.5, "validation_perplexity": 4.48, "steps": 2}, ""),
        ({"validation_loss": "low", "validation_perplexity": 4.48}, ""),
    ):
        path.write_text(json.dumps(summary | figures))
        said = started()
        assert "all 1 steps of this run are done; set a larger train.steps to continue it" in said
        assert line in said
        assert ("held-out" in said) == bool(line)
        assert json.loads(path.read_text()) == summary | figures


def test_a_plan_of_the_largest_preset_takes_no_memory_and_no_data() -> None:
    """Steps of it without devices: tests/dryrun."""
    done = called("tools/plan", "+config=pangu_200b", "parallel.data=16")
    assert done.returncode == 0, done.stderr
    assert "206,861,008,896 parameters" in done.stdout
    assert "tensor 8 x pipeline 16 x data 16 = 2,048 devices" in done.stdout
    assert not (repository() / "runs" / "pangu_200b").exists()


def test_help_and_hydras_own_options_work() -> None:
    job = called("pretrain", "+config=quickstart", "model=gpt2_124m", "--cfg", "job")
    assert job.returncode == 0, job.stderr
    assert "kind: gpt" in job.stdout
    usage = called("pretrain", "--help")
    assert usage.returncode == 0, usage.stderr
    for expected in ("config       deepseek_v3_671b, gpt2_124m", "optimizer    adam, lamb, muon", "dry_run  "):
        assert expected in usage.stdout


def test_a_sweep_on_two_processes(tmp_path: Path) -> None:
    """Its runs follow one another in the same processes, whose launcher's store stays."""
    words = (*SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", "checkpoint.every=0", "train.device=cpu")
    words += (f"train.output={tmp_path}/${{optimizer.lr}}", "optimizer.lr=1e-3,2e-3", "parallel.timeout_s=300")
    done = command("pretrain.py", "--multirun", *words, "train.steps=2", f"hydra.sweep.dir={tmp_path}/h", processes=2)
    assert done.returncode == 0, done.stderr
    assert [len(metrics(tmp_path / name)) for name in ("0.001", "0.002")] == [2, 2]


@pytest.mark.slow
def test_layouts_continue_one_another(tmp_path: Path) -> None:
    """Saved on tensor 2 with sequence parallelism, continued on data 2, finished on one process: the unbroken run's
    losses to 1e-11 in fp64, samples of text included."""
    words = [*SYNTHETIC, "precision=fp64", "model.dropout=0.1", "lr_schedule.decay_steps=6", "optimizer=lamb"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert pretrain(whole, *words, "train.steps=6").returncode == 0
    parts = [
        (2, 2, ["parallel.tensor=2", "parallel.sequence=true"]),
        (4, 2, ["memory.recompute=full", "loss.chunk=7"]),
        (6, 0, ["memory.recompute=1"]),
    ]
    for steps, processes, layout in parts:
        done = pretrain(broken, *words, f"train.steps={steps}", *layout, processes=processes)
        assert done.returncode == 0, done.stderr
    figures = [[(line["loss"], line["grad_norm"]) for line in metrics(run)] for run in (whole, broken)]
    assert len(figures[0]) == len(figures[1]) == 6
    for (loss, norm), (expected_loss, expected_norm) in zip(*figures, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-11)
        assert norm == pytest.approx(expected_norm, rel=1e-10)
    last = json.loads((broken / "checkpoints/step-00000006/index.json").read_text())
    assert last["samples"] == 6 * 4
