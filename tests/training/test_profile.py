"""Where a recorded step's time goes: the parts add up, and each is what it says."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from pangu.collectives.context import _start_shift
from pangu.collectives.exchange import start_exchange
from pangu.collectives.reduce import all_reduce, start_all_gather, start_all_reduce, start_reduce_scatter
from pangu.data.loader import Loader
from pangu.pipeline.runner import Runner
from pangu.planning.cost import StepTime
from pangu.schedule.actions import Action, Kind
from pangu.topology import copy_stream
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.recorder import ActiveRecording, AxisGroup, RecordedSpan, Recorder, Recording
from pangu.training import loop
from pangu.training.loop import Loop
from pangu.training.profile import PARTS, Profile, RankProfile, breakdown, events_of
from pangu.training.saving import Saver
from pangu.training.step import Trainer
from tests.end_to_end.commands import metrics
from tests.pace import at_some_pace
from tests.parallel.harness import OVERRIDES, small_trainer
from tests.spawn import Pool
from tests.threads import Ranks
from tests.training.test_resume import train

FORWARD, BACKWARD = Action(Kind.FORWARD, 1, 0), Action(Kind.BACKWARD, 1, 0)
RECEIVE, SEND = Action(Kind.RECV_ACTIVATION, 1, 0, 0), Action(Kind.SEND_GRADIENT, 1, 0, 0)
BY_HAND = Recording(
    [
        RecordedSpan("logging", None, None, 0, 20),
        RecordedSpan("loading", 0, None, 1, 2),
        RecordedSpan("update", 0, None, 2, 17),
        RecordedSpan(RECEIVE, 2, None, 2, 2.25),
        RecordedSpan(FORWARD, 2, None, 3, 10),
        RecordedSpan(RECEIVE, 4, None, 3, 6),  # sent at 5
        RecordedSpan("tensor", 4, 0, 7, 8),  # the last rank came at 7.5
        RecordedSpan(BACKWARD, 2, None, 10, 14),
        RecordedSpan("data", 7, 0, 13, 13.5),  # all had come at 11
        RecordedSpan("gather", 7, None, 12, 12.5),  # begun in the step before
        RecordedSpan(SEND, 2, None, 14, 14.5),
        RecordedSpan("world", 2, 0, 15, 16),
        RecordedSpan("interlude", 0, None, 18, 19),
        RecordedSpan(Action(Kind.FORWARD, 1, 0), 12, None, 18.25, 18.75),
    ],
    {"tensor": [(7.0, 8.0)], "data": [(10.5, 12.75)], "world": [(15.0, 16.0)]},
)


def test_every_moment_is_a_part_of_the_step() -> None:
    came = {"tensor": [7.5], "data": [11.0], "world": [15.75]}
    rank = breakdown(BY_HAND, came, {(Kind.RECV_ACTIVATION, 1, 0): 5.0})
    assert rank.parts == {
        "compute": 3 + 3,
        "tensor": 0.5,
        "pipeline": 0.25 + 1 + 0.5,
        "bubble": 2 + 0.5 + 0.75,
        "data": 0.5 + 0.5,
        "update": 2.25 + 0.25,
        "expert": 0.0,
        "host": 0.0,
        "loading": 1,
        "logging": 1 + 3 - 1,
    }
    assert sum(rank.parts.values()) == 20 - 1
    assert rank.exposed == {"pipeline": 1.75, "tensor": 0.5, "data": 0.5, "gather": 0.5, "world": 0.25}
    assert rank.hidden == {"tensor": 0.0, "data": 12.75 - 11, "world": 0.0}


def test_an_action_begins_when_its_message_is_there() -> None:
    times = {event.action: (event.start, event.stop) for event in events_of(1, BY_HAND.spans)}
    assert times == {RECEIVE: (2, 2.25), FORWARD: (6, 10), BACKWARD: (10, 14), SEND: (14, 14.5)}


def test_parts_have_the_names_of_a_forecast() -> None:
    assert (*(field.name for field in fields(StepTime)), "loading", "logging") == PARTS


@pytest.mark.parametrize("every", [3, 4])
def test_parts_are_the_time_that_the_metrics_have(every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on only where work is done; what is no part of a step counts in neither."""
    now = [0.0]

    def takes(seconds: int, owner: type, name: str) -> None:
        function = getattr(owner, name)

        def work(*arguments: Any) -> Any:
            now[0] += seconds
            return function(*arguments)

        monkeypatch.setattr(owner, name, work)

    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr(copy_stream, "time", clock)
    monkeypatch.setattr(loop, "time", clock)
    takes(1, Loader, "micro_batches")
    takes(4, Runner, "_forward")
    takes(8, Runner, "_backward")
    takes(2, Trainer, "update")
    takes(3, Loop, "_make_record")
    takes(200, Saver, "save")
    takes(400, Profile, "write_trace")
    monkeypatch.setattr("pangu.training.loop.PROFILED", 3)
    train(tmp_path, 5, "profile=true", f"checkpoint.every={every}")
    parts = json.loads((tmp_path / "summary.json").read_text())["profile"]["terms_s"]
    times = [line["step_time_s"] for line in metrics(tmp_path)]
    assert parts == {**dict.fromkeys(PARTS, 0.0), "compute": 2 * 12, "update": 2, "loading": 1, "logging": 3}
    assert times == [1 + 2 * 12 + 2] + 4 * [1 + 2 * 12 + 2 + 3]


def profiled(rank: int, world: int, layout: Layout) -> tuple[Profile, float]:
    """A profiled step, and its time on this rank."""
    trainer, batches = small_trainer(layout, *OVERRIDES, "batch.micro_size=1")
    recorder = trainer.mesh.recorder
    recorder.watches = True
    trainer.train_step(batches)
    Profile.begin(trainer.mesh)
    with recorder.span("update"):
        trainer.train_step(batches)
    profile = Profile.of(trainer, recorder.stop())
    own = profile.ranks[rank].recording
    assert own is not None
    return profile, own.spans[0].stop


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        (Layout(), ""),
        (Layout(data=2, zero=1), "gather replicas shard world"),
        (Layout(data=2, zero=3), "gather replicas shard world"),
        (Layout(tensor=2, sequence=True), "tensor world"),
        (Layout(pipeline=2, data=2), "pipeline replicas ends world"),
    ],
    ids=str,
)
def test_parts_add_up_to_the_step(ranks: Ranks, layout: Layout, axes: str, tmp_path: Path) -> None:
    answers = ranks.run(layout.world, profiled, layout)
    profile = answers[0][0]
    for rank, (own, seconds) in zip(profile.ranks, answers, strict=True):
        assert sum(rank.parts.values()) == pytest.approx(seconds, rel=1e-9)
        assert min(rank.parts.values()) > -1e-9
        assert rank.parts["compute"] > 0
        assert rank.exposed.keys() == set(axes.split())
        assert [other.parts for other in own.ranks] == [other.parts for other in profile.ranks]
    assert {event.stage for event in profile.timeline.events} == set(range(layout.pipeline))
    profile.write_trace(tmp_path / "plots" / "profile.json")
    records = json.loads((tmp_path / "plots" / "profile.json").read_text())["traceEvents"]
    assert {record["pid"] for record in records} == set(range(layout.world))
    spans = [sum(record["ph"] == "X" and record["pid"] == rank for record in records) for rank in range(layout.world)]
    assert spans == [len(rank.recording.spans) for rank in profile.ranks if rank.recording is not None]
    begun, ended = ({record["id"]: record["ts"] for record in records if record["ph"] == phase} for phase in "be")
    assert begun.keys() == ended.keys()
    assert all(ended[one] >= begun[one] for one in begun)


def one_is_late(rank: int, world: int, late_s: float) -> tuple[RankProfile, ...]:
    """Rank 1 comes `late_s` seconds late to one collective; both work while another one is under way."""
    mesh = Mesh.connect(Layout(data=2), torch.device("cpu"))
    mesh.recorder.watches = True
    group, values = mesh.group("replicas"), torch.ones(1000)
    recordings = []
    for works_before, works_beside in ((late_s * rank, 0.0), (0.0, late_s)):
        Profile.begin(mesh)
        time.sleep(works_before)
        work = start_all_reduce(values, group)
        time.sleep(works_beside)
        work.wait()
        recordings.append(mesh.recorder.stop())
    all_reduce(values, group)
    late = [recordings[0].messages["replicas"][0][0], recordings[1].messages["replicas"][0][0]]
    dist.all_reduce(last := torch.tensor(late, dtype=torch.float64), dist.ReduceOp.MAX)
    return tuple(breakdown(one, {"replicas": [came]}, {}) for one, came in zip(recordings, last.tolist(), strict=True))


@at_some_pace
def test_waiting_for_a_late_rank_is_no_communication_and_hidden_communication_is_not_exposed(
    pool: Pool, pace: float
) -> None:
    late_s = 0.3 * pace
    (waiting, beside), (late, beside_too) = pool.run(2, one_is_late, late_s)
    assert waiting.parts["bubble"] > 0.9 * late_s > late.parts["bubble"]
    assert waiting.parts["data"] < 0.9 * late_s
    assert late.parts["logging"] >= late_s
    # what it took, not how long it was left alone; the clocks of the two begin a little apart, and the last one to come
    # counts by its own
    assert 0 < max(each.hidden["replicas"] for each in (beside, beside_too)) < 0.9 * late_s


STARTS: dict[str, Callable[[torch.Tensor, AxisGroup], Any]] = {
    "all-reduce": start_all_reduce,
    "all-gather": lambda read, group: start_all_gather(torch.empty(8), read, group),
    "reduce-scatter": lambda read, group: start_reduce_scatter(torch.empty(2), read, group),
    "exchange of rows": lambda read, group: start_exchange(torch.empty(4), read, [4], [4], group),
    "round the ring": lambda read, group: _start_shift(torch.empty(4), read, 1, group),
}


@pytest.mark.parametrize("name", STARTS)
def test_what_a_recorded_collective_reads_stays_until_it_is_waited_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's work lets go of its tensors when any stream waits for it, and a recording's does at once. Memory that
    nobody holds then is given to the computation beside the collective. Replaced are NCCL and the device."""

    def sends(*tensors: Any, **_: Any) -> Any:
        stash = list(tensors)
        return SimpleNamespace(wait=stash.clear)

    for function in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"):
        monkeypatch.setattr(dist, function, sends)
    for function in ("all_gather_single", "reduce_scatter_single"):
        monkeypatch.setattr(dist, function, sends, raising=False)
    for function in ("get_rank", "get_world_size"):
        monkeypatch.setattr(dist, function, lambda group: 0 if group is None else 1)
    monkeypatch.setattr(torch.accelerator, "current_stream", Mock())
    monkeypatch.setattr(torch, "Stream", lambda device: nullcontext())
    monkeypatch.setattr("pangu.topology.recorder.DeviceEvent", Mock())
    recorder = Recorder(watches=True)
    recorder.active = ActiveRecording("update", torch.device("cuda", 0))
    monkeypatch.setattr(ActiveRecording, "is_on_side_stream", False)
    read = torch.zeros(4)
    storage = weakref.ref(read)
    handle = STARTS[name](read, AxisGroup(Mock(), "tensor", recorder))
    del read
    assert storage() is not None, "its memory may be written while the collective reads it"
    handle.wait()
    del handle
    assert storage() is None or name == "all-reduce", "it is held for longer than it is read"
