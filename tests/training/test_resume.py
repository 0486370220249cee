"""A run begins from the newest intact checkpoint, or says why not."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pangu.checkpoint.files import amend, checksum
from pangu.checkpoint.index import read_index
from pangu.checkpoint.reading import read_tensor
from pangu.common.errors import UserError
from pangu.training import run as run_module
from pangu.training.process import only_run
from pangu.training.run import run
from tests.configs import composed
from tests.end_to_end.commands import SAME_ATTENTION, SAME_PRODUCTS, SMALL, metrics

SCHEDULE = ("lr_schedule.warmup_steps=1", "lr_schedule.decay_steps=9")
WORDS = ("data=synthetic", "model.vocab=64", "validation.every=0", "train.device=cpu")
QUIET = (*SMALL, SAME_ATTENTION, *SCHEDULE, *WORDS)


def train(output: Path, steps: int, *overrides: str) -> list[float]:
    """Run up to `steps`, a checkpoint after each; the losses of the run folder."""
    words = (*QUIET, f"train.steps={steps}", f"train.output={output}", "checkpoint.every=1", "checkpoint.keep=0")
    products = () if any(word.startswith("precision=") for word in overrides) else (SAME_PRODUCTS,)
    run(composed(*words, *products, *overrides))
    return [line["loss"] for line in metrics(output)]


def first_file(checkpoint: Path) -> Path:
    return min(checkpoint.glob("*.safetensors"))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def age(index: Path) -> None:
    index.write_text(json.dumps({**json.loads(index.read_text()), "version": 1}))


@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_a_path_without_a_checkpoint_is_refused_before_data_is_prepared(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(run_module, "_sources")
    with pytest.raises(UserError, match="nowhere: no checkpoint here"):
        train(tmp_path, 2, f"checkpoint.{key}=nowhere")


DAMAGE: list[tuple[Callable[[Path], Any], str]] = [
    (lambda path: truncate(first_file(path)), "tensors-00000-00000.safetensors: damaged: "),
    (lambda path: flip(first_file(path)), "tensors-00000-00000.safetensors: damaged: checksum"),
    (lambda path: first_file(path).unlink(), "tensors-00000-00000.safetensors: cannot be read (No such file"),
    (lambda path: (path / "index.json").unlink(), "step-00000003: no checkpoint here (index.json is missing)"),
    (lambda path: truncate(path / "index.json"), "index.json: is not JSON"),
    (lambda path: age(path / "index.json"), "step-00000003: format version 1; this version of pangu reads"),
]


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with three checkpoints."""
    output = tmp_path_factory.mktemp("three_steps")
    train(output, 3)
    return output


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of four steps."""
    return train(tmp_path_factory.mktemp("unbroken"), 4)


@pytest.mark.parametrize(("damage", "says"), DAMAGE)
def test_the_newest_intact_checkpoint_is_used(
    damage: Callable[[Path], Any],
    says: str,
    three_steps: Path,
    unbroken: list[float],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints" / "step-00000003"
    damage(newest)
    with pytest.raises(UserError, match="step-00000003"):  # asked for by name, it is refused
        train(tmp_path, 4, f"checkpoint.resume={newest}")
    capsys.readouterr()
    assert train(tmp_path, 4) == unbroken
    log = capsys.readouterr().err
    assert "skipping a checkpoint: " in log
    assert says in log
    assert "step-00000002 (step 2)" in log
    assert (newest.with_name("step-00000003.aside")).is_dir()


def test_a_run_folder_with_nothing_but_damage_is_refused(tmp_path: Path) -> None:
    train(tmp_path, 2)
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        flip(first_file(checkpoint))
    with pytest.raises(UserError, match=r"(?s)every checkpoint here is damaged.*step-00000002.*step-00000001"):
        train(tmp_path, 3)
    assert len(metrics(tmp_path)) == 2


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(three_steps: Path, tmp_path: Path) -> None:
    """It is not damaged: nothing is renamed, and no other output is advised."""
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    index = tmp_path / "checkpoints" / "step-00000003" / "index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "version": 4}))
    with pytest.raises(UserError, match="step-00000003: format version 4 is newer than this pangu supports") as raised:
        train(tmp_path, 4)
    assert "train.output" not in str(raised.value)
    assert index.is_file()


@pytest.mark.parametrize("key", ["hidden", "heads"])
def test_null_that_somebody_wrote_into_an_index_is_a_difference(key: str, three_steps: Path, tmp_path: Path) -> None:
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints" / "step-00000003"
    index = read_index(newest)
    amend(newest, {**index, "identity": {**index["identity"], f"model.{key}": None}})
    with pytest.raises(UserError, match=rf"model.{key} = \d+: the checkpoint has None"):
        train(tmp_path, 4)


def test_an_earlier_checkpoint_may_be_continued_and_becomes_the_newest(tmp_path: Path) -> None:
    losses = train(tmp_path, 3)
    first = tmp_path / "checkpoints" / "step-00000001"
    assert train(tmp_path, 2, f"checkpoint.resume={first}") == losses[:2]
    assert train(tmp_path, 3) == losses


def test_fp8_goes_on_bit_for_bit_and_begins_after_any_checkpoint(unbroken: list[float], tmp_path: Path) -> None:
    """Where a checkpoint has no history, the first step is one in the compute format."""
    losses = train(tmp_path / "whole", 4, "precision.matmul=fp8")
    first = tmp_path / "whole" / "checkpoints" / "step-00000001"
    assert train(tmp_path / "parts", 4, "precision.matmul=fp8", f"checkpoint.resume={first}") == losses[1:]
    assert losses[0] == unbroken[0]
    assert losses[1] != unbroken[1]
    amend(first, {**read_index(first), "fp8": None})
    later = train(tmp_path / "later", 3, "precision.matmul=fp8", f"checkpoint.resume={first}")
    assert later[0] == unbroken[1]
    assert later[1] != unbroken[2]


def test_two_runs_in_one_folder_are_refused_until_the_first_ends(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from pangu.training.process import only_run\n"
        f"with only_run(Path({str(tmp_path)!r})): print('held', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=rf"another run uses this folder \(.*, process {holder.pid}\)"):
            train(tmp_path, 1)
        holder.kill()
    with only_run(tmp_path):
        pass
    assert (tmp_path / "run.lock").read_text() == ""
    assert len(train(tmp_path, 1)) == 1


def test_a_new_run_begins_with_the_weights_of_another(
    three_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = three_steps / "checkpoints" / "step-00000003"
    words = ("checkpoint.init_from=" + str(checkpoint), "optimizer=lamb", "model.dropout=0.5", "optimizer.lr=1e-12")
    losses = train(tmp_path / "tuned", 2, *words, "lr_schedule.min_lr=0", "train.seed=7")
    assert "model.dropout = 0.5: the weights of" in capsys.readouterr().err
    index = read_index(tmp_path / "tuned/checkpoints/step-00000001")
    assert (index["step"], index["samples"]) == (1, 4)
    source = read_index(checkpoint)
    for name in (name for name in source["tensors"] if name.startswith("weight/")):
        after = read_tensor(tmp_path / "tuned/checkpoints/step-00000001", index, name)
        torch.testing.assert_close(after, read_tensor(checkpoint, source, name), rtol=0, atol=1e-8)
    # once it has a checkpoint of its own, the same command continues it
    assert train(tmp_path / "tuned", 3, *words, "lr_schedule.min_lr=0", "train.seed=7")[:2] == losses


def test_weights_that_do_not_fit_are_all_named(three_steps: Path, tmp_path: Path) -> None:
    checkpoint = three_steps / "checkpoints" / "step-00000003"
    with pytest.raises(UserError) as caught:
        train(tmp_path, 1, f"checkpoint.init_from={checkpoint}", "model.hidden=48", "model.layers=3")
    said = str(caught.value)
    assert re.search(r"weight/.*embedding.*: \[64, 32\] in the checkpoint, \[64, 48\] in the model", said)
    assert "weight/layers.1.mlp" in said
    assert "not in the checkpoint" in said
    with pytest.raises(UserError, match=r"weight/.*: not in the model"):
        train(tmp_path, 1, f"checkpoint.init_from={checkpoint}", "model.kind=gpt")


STATES = [(name, moments) for name in ("adam", "lamb") for moments in ("fp32", "bf16")]


def optimizer_words(name: str, moments: str) -> tuple[str, ...]:
    return (f"optimizer={name}", f"optimizer.moments={moments}", "optimizer.betas=[0.9,0.95]")


@pytest.fixture(scope="module")
def with_each_optimizer(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Run folders with a checkpoint of two steps."""
    folders = {state: tmp_path_factory.mktemp("-".join(state)) for state in STATES}
    for state, folder in folders.items():
        train(folder, 2, *optimizer_words(*state))
    return folders


@pytest.mark.parametrize("after", STATES, ids="-".join)
@pytest.mark.parametrize("before", STATES, ids="-".join)
def test_the_state_of_another_optimizer_is_refused(
    before: tuple[str, str],
    after: tuple[str, str],
    with_each_optimizer: dict[tuple[str, str], Path],
    tmp_path: Path,
) -> None:
    """Moments of the same one are taken in either format."""
    shutil.copytree(with_each_optimizer[before], tmp_path, dirs_exist_ok=True)
    if before[0] == after[0]:
        assert len(train(tmp_path, 3, *optimizer_words(*after))) == 3
        return
    with pytest.raises(
        UserError, match=rf"belongs to a different run; .*\n  optimizer\.name = {after[0]}: the checkpoint "
    ):
        train(tmp_path, 3, *optimizer_words(*after))


def test_a_loss_scale_is_taken_from_a_run_that_had_one(
    three_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    fp16 = ("precision=fp16", "precision.loss_scale.initial=256")
    train(tmp_path, 4, *fp16)
    assert "loss scale   256 (precision.loss_scale.initial, as the checkpoint has none)" in capsys.readouterr().err
    assert read_index(tmp_path / "checkpoints/step-00000004")["loss_scale"] == {"scale": 256.0, "clean_steps": 1}
    train(tmp_path, 5, *fp16, "precision.loss_scale.initial=1024")
    assert "loss scale   256 (from the checkpoint)" in capsys.readouterr().err
    assert read_index(tmp_path / "checkpoints/step-00000005")["loss_scale"] == {"scale": 256.0, "clean_steps": 2}


@pytest.mark.parametrize("optimizer", ["adam", "lamb"])
def test_what_was_frozen_begins_with_moments_of_zero(
    optimizer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its first update is that of a first step, with its bias correction, also when the run is resumed in between."""
    words = (
        f"optimizer={optimizer}",
        "optimizer.eps=1e-15",
        "lr_schedule.shape=constant",
        "lr_schedule.decay_steps=null",
    )
    frozen = ("train.frozen=['layers.0.*']",)
    train(tmp_path, 3, *words, *frozen)
    losses = train(tmp_path, 6, *words)
    said = capsys.readouterr().err
    assert re.search(
        r"train\.frozen: \d+ tensors \(layers\.0\..*, \.\.\.\) are trained from here on, with moments", said
    )
    path = tmp_path / "checkpoints/step-00000004"
    index = read_index(path)
    since = index["moments_since"]
    assert set(since.values()) == {3}
    assert all(name.startswith("layers.0.") for name in since)
    earlier = path.with_name("step-00000003")
    before = read_index(earlier)
    assert not any(f"exp_avg/{name}" in before["tensors"] for name in since)
    moved = [
        (read_tensor(path, index, f"weight/{name}") - read_tensor(earlier, before, f"weight/{name}")).abs().max()
        for name in since
        if name.endswith(".bias")
    ]
    # without bias correction the first step is not the rate, but (1 - beta1) / sqrt(1 - beta2) of it
    assert float(max(moved)) == pytest.approx(metrics(tmp_path)[3]["lr"], rel=0.05)
    resumed = tmp_path / "resumed"
    assert train(resumed, 6, *words, f"checkpoint.resume={path}") == losses[4:]


def test_a_list_of_layers_that_stays_is_no_change(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("model.window=8", "model.full_layers=[1]")
    for steps in (1, 2):
        train(tmp_path, steps, *words)
    assert "from here on" not in capsys.readouterr().err
    train(tmp_path, 3, "model.window=8", "model.full_layers=[0,1]")
    assert "model.full_layers = [0, 1] from here on" in capsys.readouterr().err


def test_what_does_not_change_the_tensors_may_change_within_a_run(
    three_steps: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dropout and the like, with the optimizer's state; what changes is said."""
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    losses = train(tmp_path, 4, "model.dropout=0.3", "model.init_std=0.5")
    said = capsys.readouterr().err
    path = tmp_path / "checkpoints/step-00000003"
    assert f"model.dropout = 0.3 from here on: {path} was trained with 0.0" in said
    assert "model.init_std = 0.5 from here on" in said
    assert len(losses) == 4
    for word in ("model.heads=2", "model.activation=gelu", "model.hidden=64", "model.sequence=64", "train.seed=5"):
        key, _, value = word.partition("=")
        with pytest.raises(
            UserError, match=rf"belongs to a different run; (.|\n)*  {key} = {value}: the checkpoint has"
        ):
            train(tmp_path, 5, word)


def test_a_key_younger_than_the_checkpoint_had_its_default(three_steps: Path, tmp_path: Path) -> None:
    """Its index lacks the key, and the tensors may fit: another value is another function all the same."""
    shutil.copytree(three_steps, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints/step-00000003/index.json"
    index = json.loads(path.read_text())
    for key in ("qk_norm", "partial_rotary_factor", "embedding_norm"):
        del index["identity"][f"model.{key}"]
    del index["identity"]["model.router"]["learned_scale"], index["checksum"]
    path.write_text(json.dumps({**index, "checksum": checksum(index)}))
    with pytest.raises(UserError, match=r"  model\.partial_rotary_factor = 0\.5: the checkpoint has 1\.0"):
        train(tmp_path, 4, "model.positions=rope", "model.partial_rotary_factor=0.5")
    assert len(train(tmp_path, 4)) == 4


def test_balance_weights_may_change_within_a_run(tmp_path: Path) -> None:
    experts = ("model.layers=3", "model.experts=4")
    train(tmp_path, 1, *experts)
    changed = ("model.router.balance_weight=0.5", "model.router.z_loss=0.1", "model.expert_capacity=2")
    assert len(train(tmp_path, 2, *experts, *changed)) == 2
    with pytest.raises(UserError, match="belongs to a different run"):
        train(tmp_path, 3, *experts, "model.router.score=sigmoid")


def test_a_context_is_extended_with_the_state_of_the_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rotary positions have no table. The place in the data and the tokens go on, counted in longer samples."""
    rope = ("model.kind=gpt", "model.positions=rope")
    train(tmp_path, 4, *rope)
    longer = ("model.sequence=64", "model.rope_base=50000", "faults.spike=1e9", "faults.action=rollback")
    assert len(train(tmp_path, 6, *rope, *longer)) == 6
    assert "model.sequence = 64 from here on: " in capsys.readouterr().err
    assert [line["tokens"] for line in metrics(tmp_path)] == [128, 256, 384, 512, 768, 1024]
    assert read_index(tmp_path / "checkpoints/step-00000006")["samples"] == 8 + 2 * 4
    with pytest.raises(UserError, match=r"model.positions = learned: the checkpoint has rope"):
        train(tmp_path, 7, "model.kind=gpt", "model.positions=learned", "model.sequence=64")
