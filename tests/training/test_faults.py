"""Steps that go wrong: what counts as a fault, and what follows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch

from pangu.checkpoint.index import find_damage, read_index
from pangu.checkpoint.status import read_status
from pangu.common.errors import LostError, UserError
from pangu.config.build import build
from pangu.config.faults import FaultsConfig
from pangu.config.schema import RunConfig
from pangu.data.loader import Loader
from pangu.data.sources import open_sources
from pangu.schedule.schedule import make_schedule
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training import device_checks
from pangu.training.device_checks import Stragglers, above_median
from pangu.training.faults import Goodput, SpikeDetector, culprits
from pangu.training.process import Heartbeat
from pangu.training.step import PendingResult, StepResult, Trainer
from tests.configs import composed, config
from tests.end_to_end.commands import metrics
from tests.training.test_resume import QUIET, train

ROLLBACK = (
    *("precision=fp64", "checkpoint.every=2", "faults.action=rollback", "faults.spike=1e9", "faults.skip_after=2"),
    "faults.proven_after=1",
)
forward_backward, update = Trainer.forward_backward, Trainer.update


def watch(**changes: Any) -> SpikeDetector:
    return SpikeDetector(replace(FaultsConfig("stop", 3.0, 4, 2, 1, 3, 0, 1.5), **changes))


def result(loss: float, norm: float = 1.0) -> StepResult:
    return StepResult(loss, norm, 0.1, 1.0)


def test_a_loss_is_judged_by_those_of_the_steps_before() -> None:
    """Of 1, 2, 1, 2 the mean is 1.5 and the deviation 0.577: the limit is 3.23."""
    judge = watch()
    assert [judge.fault(result(loss)) for loss in (9.0, 1.0, 2.0, 1.0, 2.0)] == [None] * 5
    limit = 1.5 + 3 * math.sqrt(1 / 3)
    assert judge.fault(result(limit + 1e-9)) is not None
    judge = watch()
    assert [judge.fault(result(loss)) for loss in (1.0, 2.0, 1.0, 2.0, limit - 1e-9)] == [None] * 5
    assert watch().fault(result(math.nan)) == "the loss is nan (faults.spike)"
    assert watch(spike=None).fault(result(math.inf)) is None


def test_skipped_steps_count_while_they_follow_each_other() -> None:
    judge, bad = watch(), result(1.0, math.nan)
    assert [judge.fault(step) for step in (bad, bad, result(1.0), bad, bad)] == [None] * 5
    assert "skipped steps in a row: 3 (faults.max_skipped = 2)" in str(judge.fault(bad))


def test_a_resumed_run_judges_as_the_unbroken_one() -> None:
    steps = [result(1 + 0.1 * (i % 3), math.inf if i % 4 else 1.0) for i in range(9)] + [result(2.0), result(1.0)]
    whole, first = watch(), watch()
    for step in steps[:6]:
        whole.fault(step)
        first.fault(step)
    second = watch()
    second.restore(json.loads(json.dumps(first.state())))
    verdicts = [whole.fault(step) for step in steps[6:]]
    assert [second.fault(step) for step in steps[6:]] == verdicts
    assert {verdict is None for verdict in verdicts} == {True, False}


def poisoned(samples: Sequence[int], monkeypatch: pytest.MonkeyPatch, dies_at: int | None = None) -> list[int]:
    """Give a loss of NaN to batches that hold one of `samples`, and end the process, as a kill would, when the batch of
    sample `dies_at` comes; a list that fills with the first sample of each step."""
    seen: list[int] = []
    bad: set[int] = set()

    def compute(trainer: Trainer, batches: Any) -> None:
        indices = [index for batch in batches for index in batch.samples]
        if dies_at in indices:
            raise KeyboardInterrupt
        seen.append(indices[0])
        bad.update([indices[0]] if set(indices) & set(samples) else [])
        forward_backward(trainer, batches)

    def change(trainer: Trainer, flags: Any = ()) -> PendingResult:
        pending = update(trainer, flags)
        if seen[-1] in bad:
            pending.numbers[0] = math.nan
        return pending

    monkeypatch.setattr(Trainer, "forward_backward", compute)
    monkeypatch.setattr(Trainer, "update", change)
    return seen


def by_hand(positions: Sequence[int]) -> list[float]:
    """Losses of a run whose steps read the batches that begin with these samples."""
    config = build(RunConfig, composed(*QUIET, "train.steps=8", "precision=fp64"))
    trainer = Trainer(config, Mesh(Layout(), 0, torch.device("cpu")))
    sources = open_sources(config.data, config.model, config.train.seed)
    with Loader(sources.train, config.data.packing, config.batch.global_size, config.batch.micro_size, 0, 1) as loader:
        return [trainer.train_step(loader.micro_batches(position)).loss for position in positions]


@pytest.fixture(scope="module")
def expected() -> list[float]:
    """8 steps of 4 samples without the samples from 16, where the checkpoint of step 4 is, to 32: the fault lies in the
    batch from 20 on, and two batches behind it are left out too."""
    return by_hand([0, 4, 8, 12, 32, 36, 40, 44])


def test_a_run_goes_back_and_leaves_the_batches_out(
    expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = poisoned([21], monkeypatch)
    assert train(tmp_path, 8, *ROLLBACK) == expected
    assert seen == [0, 4, 8, 12, 16, 20, 32, 36, 40, 44]
    assert [line.get("rollbacks") for line in metrics(tmp_path)] == [None] * 4 + [1] * 4
    assert [line["tokens"] for line in metrics(tmp_path)] == [step * 4 * 32 for step in range(1, 9)]
    assert json.loads((tmp_path / "summary.json").read_text())["tokens"] == 8 * 4 * 32
    said = capsys.readouterr().err
    proven = f"{tmp_path}/checkpoints/step-00000004, 2 steps before, is proven"
    assert f"step 6: the loss is nan (faults.spike): rolling back; {proven}" in said
    assert f"rolled back to {tmp_path}/checkpoints/step-00000004: continuing after step 4 with sample 32" in said
    told = read_index(tmp_path / "checkpoints/step-00000008")
    assert told["samples"] == 48
    assert told["watch"]["left_out"] == 16
    event = {"step": 6, "fault": "the loss is nan (faults.spike)", "back_to": 4, "left_out": [16, 32]}
    assert told["watch"]["rollbacks"] == [event]


@pytest.mark.parametrize(("profiled", "every"), [(6, 2), (7, 4)])
def test_a_step_that_is_taken_back_is_not_profiled(
    profiled: int,
    every: int,
    expected: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Neither the step with the fault nor the one that had begun when it was heard of."""
    monkeypatch.setattr("pangu.training.loop.PROFILED", profiled)
    poisoned([21], monkeypatch)
    assert train(tmp_path, 8, *ROLLBACK, f"checkpoint.every={every}", "profile=true") == expected
    said = capsys.readouterr().err
    assert said.count("profiled     step") == said.count(f"profiled     step {profiled} on 1 ranks") == 1
    profile = json.loads((tmp_path / "summary.json").read_text())["profile"]
    assert profile["step"] == profiled
    assert profile["terms_s"]["update"] > 0


@pytest.mark.parametrize("dies_at", [32, 36, 40])
def test_a_run_that_is_killed_after_it_has_gone_back_leaves_the_same_batches_out(
    dies_at: int, expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before another checkpoint is written; the fault itself does not come again."""
    poisoned([21], monkeypatch, dies_at)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 8, *ROLLBACK)
    seen = poisoned([], monkeypatch)
    assert train(tmp_path, 8, *ROLLBACK) == expected
    assert seen[0] == 40 if dies_at == 40 else 32


def test_the_number_of_rollbacks_is_limited_over_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice a fault follows the checkpoint of step 4, and then one that of step 2."""
    words = (*ROLLBACK, "faults.max_rollbacks=2")
    seen = poisoned(range(20, 1000), monkeypatch)
    for _ in range(2):
        with pytest.raises(UserError, match=r"step 3: the loss is nan .*; faults.max_rollbacks = 2 is reached"):
            train(tmp_path, 8, *words)
    # 20 + 4 + 2 batches of 4 is 32, and 32 + 4 + 8 is 44; without a checkpoint due, the next batch has begun
    assert seen == [0, 4, 8, 12, 16, 20, 32, 36, 44, 48, 44, 48]
    assert read_index(tmp_path / "checkpoints/step-00000002")["watch"]["left_out"] == 44 - 8
    assert checkpoints(tmp_path) == ["step-00000002", "step-00000004.aside"]
    assert read_status(tmp_path / "checkpoints/step-00000004.aside").condemned


def wrong(steps: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let some steps, the first time that they are made, leave weights that are finite and far too large."""
    left = set(steps)

    def change(trainer: Trainer, flags: Any = ()) -> PendingResult:
        pending = update(trainer, flags)
        if trainer.step in left:
            left.remove(trainer.step)
            for shard in trainer.parameters.trained_shards:
                shard.main.mul_(50)
            trainer.parameters.publish()
        return pending

    monkeypatch.setattr(Trainer, "update", change)


WRONG = (
    *("faults.action=rollback", "faults.spike=50", "faults.spike_window=3", "faults.skip_after=0"),
    *("checkpoint.every=3", "faults.proven_after=2"),
)


@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize("keep", [0, 1, 2])
def test_a_run_goes_back_behind_a_wrong_update_that_was_saved(
    asynchronous: str, keep: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss shows it one step after the checkpoint. The one before is proven, and kept even where one is."""
    wrong([9], monkeypatch)
    losses = train(tmp_path, 14, *WRONG, f"checkpoint.asynchronous={asynchronous}", f"checkpoint.keep={keep}")
    assert len(losses) == 14
    assert max(losses) < 5
    folder = tmp_path / "checkpoints"
    assert f"{folder}/step-00000009, 1 steps before, is condemned" in capsys.readouterr().err
    assert str(read_status(folder / "step-00000009.aside")).startswith("condemned (step 10: the loss is ")
    assert str(read_status(folder / "step-00000012")) == "proven"
    (event,) = read_index(folder / "step-00000014")["watch"]["rollbacks"]
    assert (event["step"], event["back_to"], event["left_out"]) == (10, 6, [24, 40])


def test_a_wrong_update_condemns_one_checkpoint_after_the_other_until_one_is_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is proven. Once all are condemned, the run begins again from the seed, without what it read."""
    wrong([3, 4], monkeypatch)
    words = ("checkpoint.every=1", "faults.proven_after=9", "faults.spike=1e3", "faults.spike_window=2")
    losses = train(tmp_path, 5, *WRONG, *words, "precision=fp64")
    (event, *_) = read_index(tmp_path / "checkpoints/step-00000005")["watch"]["rollbacks"]
    assert len(losses) == 5
    assert max(losses) < 5
    assert event["back_to"] < event["step"] - 1


@pytest.mark.parametrize("every", [1, 3])
def test_a_wrong_update_that_shows_after_it_was_proven_is_left_behind_at_the_second_fault(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps later, whether checkpoints that are not proven lie between or not."""
    made: list[int] = []

    def change(trainer: Trainer, flags: Any = ()) -> PendingResult:
        pending = update(trainer, flags)
        made.append(trainer.step)
        if trainer.step == 9 and made.count(6) == 1:
            pending.numbers[0] = math.nan
        return pending

    monkeypatch.setattr(Trainer, "update", change)
    losses = train(tmp_path, 11, *ROLLBACK, f"checkpoint.every={every}", "faults.proven_after=2")
    assert len(losses) == 11
    events = read_index(tmp_path / "checkpoints/step-00000011")["watch"]["rollbacks"]
    assert [(event["step"], event["back_to"]) for event in events] == [(9, 6), (9, 6 - every)]


def test_a_run_that_continues_anothers_does_not_begin_again_from_the_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are worth more; nor is the other run's checkpoint amended."""
    train(tmp_path / "one", 4)
    poisoned([17], monkeypatch)
    checkpoint = tmp_path / "one/checkpoints/step-00000004"
    with pytest.raises(UserError, match=r"no checkpoint to go back to; .* checkpoint.resume = .*one/checkpoints"):
        train(tmp_path / "two", 8, *ROLLBACK, f"checkpoint.resume={checkpoint}")
    assert "step 5: the loss is nan" in capsys.readouterr().err
    assert read_index(checkpoint)["watch"]["rollbacks"] == []


@pytest.mark.parametrize("first", [1, 9])
def test_before_a_good_checkpoint_a_run_begins_again_from_the_seed(
    first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first checkpoint, of step 2, and right after it; also if the process is killed after that."""
    end = 4 * (first // 4 + 1 + 2)
    expected = by_hand([end + 4 * i for i in range(8)])
    seen = poisoned([first], monkeypatch, dies_at=end + 4)
    words = (*ROLLBACK, "faults.proven_after=9")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 8, *words)
    assert seen[-1] == end
    seen = poisoned([], monkeypatch)
    assert train(tmp_path, 8, *words) == expected
    assert seen[0] == end
    told = read_index(tmp_path / "checkpoints/step-00000008")
    assert (told["samples"], told["watch"]["left_out"]) == (end + 32, end)
    assert [event["back_to"] for event in told["watch"]["rollbacks"]] == [0]
    assert metrics(tmp_path)[-1]["tokens"] == 8 * 4 * 32


def test_marks_outlive_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault soon after a checkpoint counts against it, whoever made the steps before: two runs that stop at a fault
    pass over what led to it. Once nothing is left, only a rollback begins again unasked."""
    words = ("faults.spike=1e9", "checkpoint.every=2", "faults.proven_after=2")
    poisoned([], monkeypatch, dies_at=16)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 8, *words)
    poisoned(range(16, 20), monkeypatch)
    with pytest.raises(UserError, match="step-00000004, 1 steps before, is condemned"):
        train(tmp_path, 8, *words)
    assert read_status(tmp_path / "checkpoints/step-00000002").proven
    seen = poisoned(range(8, 20), monkeypatch)
    with pytest.raises(UserError, match="step-00000002, 1 steps before, is proven"):
        train(tmp_path, 8, *words)
    with pytest.raises(UserError, match="step-00000002, 1 steps before, is condemned"):
        train(tmp_path, 8, *words)
    assert set(seen) == {8, 12}
    with pytest.raises(UserError, match=r"every checkpoint here is damaged or condemned(.|\n)*-00000002: is condemned"):
        train(tmp_path, 8, *words)
    poisoned([], monkeypatch)
    condemned = tmp_path / "checkpoints/step-00000002"
    assert len(train(tmp_path, 4, *words, f"checkpoint.resume={condemned}")) == 4


def test_a_run_stops_or_goes_on_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned([9], monkeypatch)
    with pytest.raises(UserError, match=r"step 3: the loss is nan .*; set faults.action=rollback to continue"):
        train(tmp_path / "stop", 4, "faults.spike=5")
    losses = train(tmp_path / "warn", 4, "faults.spike=5", "faults.action=warn")
    assert [loss is None for loss in losses] == [False, False, True, False]
    assert "step 3: the loss is nan" in capsys.readouterr().err


def test_overflow_without_end_stops_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("precision=fp16", "precision.loss_scale.initial=1e30", "faults.max_skipped=2")
    with pytest.raises(UserError, match="step 3: skipped steps in a row: 3"):
        train(tmp_path, 8, *words)
    assert "step 1 is skipped: gradients are not finite: rank 0: " in capsys.readouterr().err
    assert checkpoints(tmp_path) == ["step-00000001", "step-00000002"], "an overflow does not spoil weights"


def spoiled(places: dict[int, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one element of the weights become NaN, or one of a moment infinite, after some steps, once each."""
    left = dict(places)

    def change(trainer: Trainer, flags: Any = ()) -> PendingResult:
        pending = update(trainer, flags)
        if kind := left.pop(trainer.step, None):
            shard = trainer.parameters.trained_shards[1]
            if kind == "weight":
                shard.main[3] = math.nan
            else:
                trainer.optimizer.state[shard.main][kind][3] = math.inf
        return pending

    monkeypatch.setattr(Trainer, "update", change)


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


SPOILED = (
    *("checkpoint.every=5", "checkpoint.keep=2", "faults.max_skipped=11", "faults.skip_after=0"),
    "faults.proven_after=1",
)


def test_a_run_whose_weights_or_moments_are_spoiled_goes_back_behind_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoiled({7: "weight", 12: "exp_avg_sq"}, monkeypatch)
    losses = train(tmp_path, 16, *SPOILED, "faults.action=rollback")
    assert len(losses) == 16
    assert None not in losses
    assert checkpoints(tmp_path) == ["step-00000015", "step-00000016"]
    newest = tmp_path / "checkpoints/step-00000016"
    told = read_index(newest)
    assert find_damage(newest, told) == []
    events = told["watch"]["rollbacks"]
    assert [(event["step"], event["back_to"]) for event in events] == [(10, 5), (15, 10)]
    for event, kind in zip(events, ("weight", "exp_avg_sq"), strict=True):
        assert f"no checkpoint is saved, because of non-finite values in rank 0: {kind}/" in event["fault"]


def test_a_spoiled_run_that_goes_on_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiled({7: "weight"}, monkeypatch)
    with pytest.raises(UserError, match="step 11: no checkpoint is saved, because of non-finite values in"):
        train(tmp_path, 11, *SPOILED, "faults.action=warn")
    assert checkpoints(tmp_path) == ["step-00000005"]


def test_culprits_in_words() -> None:
    mesh = Mesh(Layout(), 0, torch.device("cpu"), hosts=["x"] * 3 + ["y"] * 3)
    assert culprits(mesh, [[], ["b", "a"]]) == "gradients are not finite: rank 1 on x: b and 1 more"
    assert culprits(mesh, [["a"]] * 6).endswith("rank 3 on y: a; 2 more ranks")
    assert "their sum or its norm is not" in culprits(mesh, [[], []])
    assert culprits(mesh, [[], ["loss"]]) == "the loss is not finite, though all gradients are: rank 1 on x: loss"


def test_slow_ranks_are_those_far_above_the_median() -> None:
    assert above_median([1.0, 1.1, 0.9, 1.0, 1.6, 4.0], 1.5) == pytest.approx({4: 1.6, 5: 4.0})
    assert above_median([1.0, 2.0], 1.5) == {1: 2.0}
    assert above_median([1.0, 1.4], 1.5) == {}


def comparing(layout: Layout) -> MagicMock:
    """A trainer that compares the times of its ranks in the next step."""
    trainer = MagicMock(step=0)
    trainer.mesh.recorder.active, trainer.mesh.layout = None, layout
    trainer.stages.schedule = make_schedule("1f1b", 1, 1, 4)
    return trainer


@pytest.mark.parametrize(("has_spares", "slow"), [(True, [[], [], [1], [1]]), (False, [[]] * 4)])
def test_slow_ranks_are_those_for_which_there_are_spares_before_anything_is_saved(
    has_spares: bool, slow: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, trainer = [], comparing(Layout(data=2))
    monkeypatch.setenv(device_checks.MEMBER, "0@host:1")
    monkeypatch.setattr(device_checks, "find_stragglers", lambda *_: {1: 4.0})
    monkeypatch.setattr(
        device_checks, "replace_ranks", lambda *question, now: asked.append((*question, now)) or has_spares
    )
    stages = MagicMock()
    found = Stragglers(trainer, config("faults.stragglers=act", "faults.straggler_every=1").faults, stages)
    seen = []
    for _ in range(4):
        found.forward_backward([])
        seen.append(found.slow)
    assert seen == slow
    assert asked[2] == (trainer.mesh, [1], False)
    assert stages.share.mock_calls == [] if has_spares else [call(trainer, {1: 4.0})]


@pytest.mark.parametrize(
    ("looks", "times"),
    [
        ([{1: 2.0}, {}, {1: 9.0}, {1: 3.0}, *[{}] * 5], [{1: 3.0}, {}]),
        ([{}, {}, {1: 2.0}, {}, {1: 3.0}, {1: 4.0}], [{}, {1: 3.0}]),  # the last five begin with the second one
    ],
)
def test_shares_follow_the_ranks_that_are_slow_in_three_of_the_last_five_comparisons(
    looks: list[dict[int, float]], times: list[dict[int, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, stages, left = comparing(Layout(data=2)), MagicMock(), list(looks)
    monkeypatch.setattr(device_checks, "find_stragglers", lambda *_: left.pop(0))
    found = Stragglers(trainer, config("faults.stragglers=act", "faults.straggler_every=1").faults, stages)
    while left:
        found.forward_backward([])
    assert stages.share.mock_calls == [call(trainer, one) for one in times]


def test_without_spares_slow_ranks_are_only_named_where_replicas_meet_in_every_micro_batch(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, stages = config("faults.stragglers=act", "faults.straggler_every=1").faults, MagicMock()
    monkeypatch.setattr(device_checks, "find_stragglers", lambda *_: {1: 4.0})
    for zero, named in ((1, False), (3, True)):
        caplog.clear()
        found = Stragglers(comparing(Layout(data=2, zero=zero)), faults, stages)
        for _ in range(3):
            found.forward_backward([])
        assert ("slow ranks are only reported" in caplog.text) == named
    assert stages.share.call_count == 1


def test_a_heartbeat_that_cannot_be_written_does_not_hide_what_went_wrong(tmp_path: Path) -> None:
    """Or the run would end with the status of a mistake where the same command may succeed."""
    heartbeat, lost = Heartbeat(tmp_path / "removed"), LostError("rank 1 is gone")
    heartbeat.__exit__(LostError, lost, None)
    heartbeat.__exit__(None, None, None)


def test_a_heartbeat_says_what_a_run_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, str]] = []
    beat = Heartbeat.beat

    def noted(self: Heartbeat, step: int, doing: str) -> None:
        beat(self, step, doing)
        told.append((step, json.loads((tmp_path / "heartbeat.json").read_text())["doing"]))

    monkeypatch.setattr(Heartbeat, "beat", noted)
    train(tmp_path, 2, "checkpoint.every=2", "train.check_replicas=1")
    comparing = "comparing replicas"
    expected = [(0, "starting"), (0, "training"), (1, comparing), (1, "training"), (2, comparing), (2, "saving")]
    assert list(dict.fromkeys(told)) == [*expected, (2, "ended")]
    last = json.loads((tmp_path / "heartbeat.json").read_text())
    counts = {"failed_saves", "rollbacks", "skipped", "goodput"}
    assert last.keys() == {"step", "doing", "time", "host", "process"} | counts
    assert 0 < last["goodput"] < 1
    with pytest.raises(UserError):
        train(tmp_path, 3, "model.hidden=64")
    assert json.loads((tmp_path / "heartbeat.json").read_text()) == last, "a refused run is not the run of the folder"
    with pytest.raises(ValueError, match="fault"), Heartbeat(tmp_path):
        raise ValueError("fault")
    assert json.loads((tmp_path / "heartbeat.json").read_text())["doing"] == "failed"


def test_goodput_counts_neither_skipped_steps_nor_those_that_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pangu.training.faults.time.perf_counter", lambda: 110.0)
    goodput = Goodput(began=100.0)
    steps = [(5, False), (6, False), (7, True), (6, False), (4, False), (5, False)]
    assert [goodput.after(step, 1.0, is_skipped) for step, is_skipped in steps] == [0.1, 0.2, 0.2, 0.2, 0.1, 0.2]


def test_a_heartbeat_is_not_written_in_every_fast_step(tmp_path: Path) -> None:
    with Heartbeat(tmp_path) as heartbeat:
        for step in range(100):
            heartbeat.beat(step, "training")
        assert json.loads((tmp_path / "heartbeat.json").read_text())["step"] == 0
    assert json.loads((tmp_path / "heartbeat.json").read_text())["step"] == 99


def differing(steps: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let copies of the weights differ in these steps, once in each."""
    left, read = set(steps), Trainer.read

    def with_sums(trainer: Trainer, pending: PendingResult) -> StepResult:
        result = read(trainer, pending)
        if trainer.step not in left:
            return result
        left.discard(trainer.step)
        return replace(result, weight_sums=torch.zeros(0))

    monkeypatch.setattr(Trainer, "read", with_sums)
    monkeypatch.setattr(device_checks, "find_weight_difference", lambda trainer, sums: "layers.0: rank 3 on node7")


DIFFER = "weights differ (faults.verify_weights): layers.0: rank 3 on node7; check the device"


def test_weights_that_differ_end_a_run_that_continues_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of step 4 are what step 3 left, and may be in its checkpoint."""
    losses = train(tmp_path / "unbroken", 6)
    with monkeypatch.context() as patch:
        differing([4], patch)
        with pytest.raises(UserError) as raised:
            train(tmp_path / "run", 6)
    folder = tmp_path / "run/checkpoints"
    fix = f"start the same command again to continue from {folder}/step-00000002, which is older than the fault"
    assert str(raised.value) == f"step 4: {DIFFER}; {fix}"
    assert read_status(folder / "step-00000003").condemned
    assert train(tmp_path / "run", 6) == losses


def test_a_rollback_because_of_a_device_leaves_no_batch_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = train(tmp_path / "unbroken", 6)
    differing([4, 5], monkeypatch)
    assert train(tmp_path / "run", 6, "faults.action=rollback") == losses
    assert f"step 5: {DIFFER}: rolling back\n" in capsys.readouterr().err
    events = read_index(tmp_path / "run/checkpoints/step-00000006")["watch"]["rollbacks"]
    assert [(event["step"], event["back_to"], event["left_out"]) for event in events] == [
        (4, 2, [8, 8]),
        (5, 3, [12, 12]),
    ]
    differing([2, 3], monkeypatch)
    with pytest.raises(UserError, match=r"faults\.max_rollbacks = 1 is reached$"):
        train(tmp_path / "again", 6, "faults.action=rollback", "faults.max_rollbacks=1")


def test_a_warning_lets_a_run_with_different_weights_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    differing([2, 3, 4, 6], monkeypatch)
    assert len(train(tmp_path, 6, "faults.action=warn")) == 6
    written = capsys.readouterr().err
    assert [step for step in range(7) if f"step {step}: {DIFFER}" in written] == [2, 6]  # told once until it changes
