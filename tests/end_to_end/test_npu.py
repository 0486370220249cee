"""`train.device=npu`, by the commands, on a stand-in for the device (`tests/stand_in_device.py`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from pangu.metrics import timing
from pangu.training import autotune
from scripts.generate import main as generate
from tests import stand_in_device
from tests.end_to_end.commands import SAME_ATTENTION, SAME_PRODUCTS, SMALL, call_and_exit, called, metrics, pretrain
from tests.spawn import Program, repository, run_ranks

pytestmark = pytest.mark.skipif(stand_in_device.missing() is not None, reason=str(stand_in_device.missing()))

SYNTHETIC = (*SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", SAME_ATTENTION)
WORDS = (
    *(*SYNTHETIC, "model.layers=4", "model.dropout=0.1", "batch.micro_size=1", "optimizer.lr=0.001"),
    *("lr_schedule.warmup_steps=1", "lr_schedule.decay_steps=9", "checkpoint.every=2", "checkpoint.keep=0"),
    "train.steps=4",
)
LAYOUTS = {
    "tensor": ("parallel.tensor=2", "parallel.sequence=true", "memory.recompute=selective"),
    "pipeline": ("parallel.pipeline=2", "parallel.schedule=zb_h1", "memory.offload=[optimizer]"),
    "zero": ("parallel.zero=3", "memory.offload=[activations]"),
}
"""Of two processes."""


def _on_devices(visible: str | None, name: str, *words: str) -> None:
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = visible or os.environ["LOCAL_RANK"]
    stand_in_device.install()
    timing.BUSY_BYTES, autotune.LARGEST_TRIAL = 2**20, 2**20  # it computes no faster than a CPU
    call_and_exit(name, *words)


def on_npu(world: int, name: str, *words: object, visible: str | None = None) -> Program:
    """`NAME.py WORDS` on as many processes, each with an `npu` of its own unless one is `visible` to all."""
    return run_ranks(world, _on_devices, visible, name, *map(str, words))


def trained(output: Path, world: int, *words: str) -> list[dict[str, Any]]:
    """The steps of a run on `npu`."""
    done = on_npu(world, "pretrain", *WORDS, *words, "train.device=npu", f"train.output={output}")
    assert done.returncode == 0, done.stderr
    return metrics(output)


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The steps of a run on the CPU."""
    output = tmp_path_factory.mktemp("cpu")
    done = pretrain(output, *WORDS, SAME_PRODUCTS, "train.device=cpu")
    assert done.returncode == 0, done.stderr
    return metrics(output)


def assert_alike(found: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    """1e-5: sums in fp32 in another order, over a few steps."""
    assert [step["step"] for step in found] == [step["step"] for step in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for name in ("loss", "grad_norm", "lr", "skipped"):
            assert mine[name] == (theirs[name] and pytest.approx(theirs[name], rel=tolerance)), (mine["step"], name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_give_the_losses_of_a_cpu(layout: str, on_cpu: list[dict[str, Any]], tmp_path: Path) -> None:
    """With gradients that are clipped, and a checkpoint from which a CPU goes on."""
    output = tmp_path / "run"
    steps = trained(output, 2, *LAYOUTS[layout], SAME_PRODUCTS)
    assert_alike(steps, on_cpu)
    assert max(step["grad_norm"] for step in steps) > 1
    nodes = json.loads((output / "nodes.json").read_text())
    assert [node["device"] for node in nodes] == [f"npu:0, {stand_in_device.NAME}"] * 2
    if layout == "zero":
        words = (SAME_PRODUCTS, "train.device=cpu", f"checkpoint.resume={output}/checkpoints/step-00000002")
        done = pretrain(tmp_path / "on cpu", *WORDS, *words)
        assert done.returncode == 0, done.stderr
        assert_alike(metrics(tmp_path / "on cpu"), steps[2:])


def test_steps_that_overflow_are_skipped_and_a_resumed_run_repeats_every_bit(tmp_path: Path) -> None:
    """As on a CPU: torch_npu's fused AdamW would make them, with gradients that nobody divides by the loss scale."""
    words, npu = ("precision=fp16", "precision.loss_scale.initial=1048576"), tmp_path / "npu"
    steps = trained(npu, 1, *words)
    done = pretrain(tmp_path / "cpu", *WORDS, *words, "train.device=cpu", "checkpoint.every=0")
    assert done.returncode == 0, done.stderr
    assert_alike(steps, metrics(tmp_path / "cpu"), 5e-3)  # ten roundings in fp16
    assert 0 < steps[-1]["skipped"] < len(steps)
    assert steps[-1]["mfu"] > 0  # of the peak that the device is known for by its name
    again = tmp_path / "again"
    assert_alike(trained(again, 1, *words, f"checkpoint.resume={npu}/checkpoints/step-00000002"), steps[2:], 0)
    first, second = (json.loads(next(path.glob("checkpoints/*4/index.json")).read_text()) for path in (npu, again))
    assert first["files"] == second["files"]


def test_a_trained_model_says_the_same(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (folder, "--prompt", "def ", "--prompt", "import", "--max-tokens", "6", "--temperature", "0", "--device")
    assert generate([*map(str, asked), "cpu"]) == 0
    done = on_npu(1, "scripts/generate", *asked, "npu")
    assert done.returncode == 0, done.stderr
    assert done.stdout == capsys.readouterr().out
    words, output = ("--data", folder / "benchmarks", "--task", "lambada", "--limit", "2"), tmp_path / "npu.json"
    done = on_npu(2, "scripts/evaluate", folder, *words, "--device", "npu", "--tensor", "2", "--output", output)
    assert done.returncode == 0, done.stderr
    done = called("scripts/evaluate", folder, *words, "--device", "cpu", "--output", tmp_path / "cpu.json")
    assert done.returncode == 0, done.stderr
    npu, cpu = (json.loads((tmp_path / f"{name}.json").read_text())["results"][0] for name in ("npu", "cpu"))
    assert npu["measures"] == pytest.approx(cpu["measures"], rel=1e-5)


REFUSED = {
    "precision=bf16": "precision = bf16: Ascend910B3 does not support matmuls in bf16; use fp32 or fp16",
    "precision=fp64": "precision = fp64: Ascend910B3 does not support matmuls in fp64; use fp32 or fp16",
    "precision=fp8": "precision = bf16: Ascend910B3 does not support matmuls in bf16",
    "model.attention=flex model.heads=2": "model.attention = flex: needs a device of type cuda, got npu",
    "compile=true": "compile = true: torch has no Triton for npu here; set compile=false",
    "train.device=cuda": "train.device = cuda: this machine has no cuda device; set train.device=cpu or npu",
    "train.device=xpu": "train.device = 'xpu': must be auto, cpu, cuda or npu",
}


def _refusals(folder: str) -> None:
    """What each of `REFUSED` says on a device without bf16."""
    stand_in_device.install()
    stand_in_device.Module.is_bf16_supported = lambda self: False
    said = {}
    for words in REFUSED:
        output = ("train.steps=1", f"train.output={folder}/run")
        done = called("pretrain", *SYNTHETIC, "train.device=npu", *output, *words.split())
        said[words] = done.returncode, done.stderr
    Path(folder, "said.json").write_text(json.dumps(said))


def test_what_the_device_cannot_do_is_one_message(tmp_path: Path) -> None:
    done = run_ranks(1, _refusals, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for word, (status, said) in json.loads((tmp_path / "said.json").read_text()).items():
        assert status == 2, (word, said)
        assert REFUSED[word] in said, (word, said)
        assert "Traceback" not in said


def test_two_ranks_on_one_device_are_named(tmp_path: Path) -> None:
    """Which each of them sees as its first, and which has no uuid."""
    done = on_npu(2, "pretrain", *SYNTHETIC, f"train.output={tmp_path}/run", visible="5")
    assert 2 in done.statuses  # the other one may lose the first one's store before it has spoken
    assert "share one device" in done.stderr
    assert "npu 5), and each process needs its own" in done.stderr
    assert "make another device visible to each (ASCEND_RT_VISIBLE_DEVICES)" in done.stderr


def _tests_of_an_accelerator(chosen: str) -> None:
    words = ["-p", "tests.stand_in_device", "-p", "no:cacheprovider", "-n", "0", "-k", f"not dry_run and ({chosen})"]
    names = ("test_training.py", "test_initial.py", "test_dropout.py", "test_loss.py")
    raise SystemExit(pytest.main([*words, *(str(repository() / "tests" / "gpu" / name) for name in names)]))


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        ("(fp32 and lamb and full and activations) or bands or mask_is or losses or rows", 8),
        pytest.param("test_", 22, marks=pytest.mark.long),
    ],
    ids=["some", "all"],
)
def test_the_tests_of_an_accelerator_pass_on_it(chosen: str, count: int) -> None:
    done = run_ranks(1, _tests_of_an_accelerator, chosen)
    assert done.returncode == 0, done.stdout
    assert f"{count} passed" in done.stdout
