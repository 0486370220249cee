"""What a stage of a pipeline keeps, and what it says when another one is stuck or gone."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from pangu.collectives import agreement
from pangu.collectives.agreement import report_unresponsive_ranks
from pangu.common.errors import LocalError
from pangu.pipeline.runner import Runner, StageError, _key
from pangu.schedule.actions import CONTENTS, Action
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from tests.pace import at_some_pace
from tests.parallel.cases import CHUNKS
from tests.parallel.harness import small_trainer
from tests.parallel.test_pipeline import MODEL
from tests.schedule.formulas import peak_live
from tests.spawn import Pool, WorkerError
from tests.threads import Ranks, replaced_here


def most_alive(rank: int, world: int, layout: Layout, *overrides: str) -> int:
    """Most activations of a chunk and a micro-batch that this stage holds in a step, those included whose weight
    gradients are to come."""
    trainer, batches = small_trainer(layout, *MODEL, *overrides)
    free_sent, alive = Runner._free_sent, [0]

    def counted(self: Runner) -> None:  # after every action
        free_sent(self)
        alive.append(len(self._live.keys() | (set() if self.store is None else self.store._stored.keys())))

    with replaced_here(Runner, _free_sent=counted):
        trainer.train_step(batches)
    assert alive[-1] == 0
    return max(alive)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 5), (4, 3), (4, 6)])
@pytest.mark.parametrize("schedule", CHUNKS)
def test_a_stage_holds_what_the_formula_says(ranks: Ranks, schedule: str, stages: int, micro_batches: int) -> None:
    virtual_stages = CHUNKS[schedule]
    overrides = (f"parallel.schedule={schedule}", f"batch.global_size={micro_batches}", "model.layers=8")
    alive = ranks.run(stages, most_alive, Layout(pipeline=stages, virtual_stages=virtual_stages), *overrides)
    assert tuple(alive) == peak_live(schedule, stages, virtual_stages, micro_batches)


def outputs_at_backward(rank: int, world: int, layout: Layout, *overrides: str) -> list[bool]:
    """Of every backward whose chunk's output was sent: is the output's memory free by then?"""
    trainer, batches = small_trainer(layout, *MODEL, *overrides)
    sent: dict[tuple[str, int, int], list[StorageWeakRef]] = {}
    free: list[bool] = []
    send, take = Runner._send, Runner._take

    def recorded(self: Runner, action: Action) -> None:
        key = CONTENTS[action.kind], *_key(action)
        sent[key] = [StorageWeakRef(tensor.untyped_storage()) for tensor in self._made[key]]
        send(self, action)

    def looked(self: Runner, kind: str, chunk: int, neighbour: int, micro: int) -> Sequence[Tensor]:
        tensors = take(self, kind, chunk, neighbour, micro)
        if kind == "gradient":
            free.extend(ref.expired() for ref in sent.get(("activation", chunk, micro), []))
        return tensors

    with replaced_here(Runner, _send=recorded, _take=looked):
        trainer.train_step(batches)
    assert all(ref.expired() for refs in sent.values() for ref in refs)
    return free


@pytest.mark.parametrize("schedule", CHUNKS)
def test_what_is_sent_is_freed_before_its_backward(ranks: Ranks, schedule: str) -> None:
    virtual_stages = CHUNKS[schedule]
    overrides = (f"parallel.schedule={schedule}", "batch.global_size=4", "model.layers=8", "model.residual_scores=true")
    free = ranks.run(2, outputs_at_backward, Layout(pipeline=2, virtual_stages=virtual_stages), *overrides)
    # two tensors for each micro-batch and each chunk but the last, or the one that hands over within its stage
    assert sum(map(len, free)) == 2 * 4 * (2 if schedule == "zb_v" else 2 * virtual_stages - 1)
    assert all(map(all, free))


def without(rank: int, world: int, lost: int, dies: bool, limit_s: float) -> tuple[str, float]:
    """What this stage says in a step in which stage `lost` is stuck or dies before its second forward, and when."""
    keys = ("model.layers=4", "batch.global_size=4")
    small_trainer(Layout(pipeline=world), *MODEL, *keys)  # what the first trainer of a process imports takes long
    trainer, batches = small_trainer(Layout(pipeline=world), *MODEL, *keys, f"parallel.timeout_s={limit_s}")
    trainer.train_step(batches)
    began = time.perf_counter()
    forward = Runner._forward

    def perhaps(self: Runner, action: Action, *more: Any) -> None:
        if rank == lost and action.micro == 1:
            if dies:
                os._exit(1)
            time.sleep(3 * limit_s)
        forward(self, action, *more)

    with replaced_here(Runner, _forward=perhaps):
        try:
            trainer.train_step(batches)
        except StageError as error:
            if dies:
                raise
            return str(error), time.perf_counter() - began
    return "nothing", 0.0


@at_some_pace
def test_the_others_say_in_time_what_a_stuck_stage_did_not_send(pool: Pool, pace: float) -> None:
    limit_s = 3.0 * pace
    answers = pool.run(4, without, 2, False, limit_s)
    for stage in (0, 1, 3):
        message, seconds = answers[stage]
        assert re.match(missing(stage), message), message
        assert limit_s - 0.5 < seconds < 2 * limit_s


def test_the_others_say_at_once_what_a_dead_stage_did_not_send(pool: Pool) -> None:
    began, limit_s = time.perf_counter(), 300.0
    with pytest.raises(WorkerError) as told:
        pool.run(4, without, 2, True, limit_s)
    assert "rank 2:\ndied" in str(told.value)
    for stage in (0, 1, 3):
        assert re.search(f"StageError: {missing(stage)}", str(told.value)), told.value
    assert time.perf_counter() - began < limit_s


def missing(stage: int) -> str:
    """The message that a stage of four lacks when stage 2 stops before its second forward."""
    message = "RECV_ACTIVATION" if stage == 3 else "RECV_GRADIENT"
    peer = 2 if stage == 3 else stage + 1
    micro = {0: 0, 1: 0, 3: 1}[stage]
    action = f"{message} of chunk {stage}, micro-batch {micro}, peer stage {peer}"
    return f"rank {stage}, stage {stage}, step 2: {action}: the peer did not respond"


def alone(rank: int, world: int, pace: float) -> str:
    """What this rank says if the others do not come to the sum of losses."""
    trainer, batches = small_trainer(Layout(data=world), *MODEL, f"parallel.timeout_s={pace}")
    if rank == 0:
        with (
            patch.object(agreement, "SILENCE_SECONDS", 0.2 * pace),
            pytest.raises(LocalError) as told,
            report_unresponsive_ranks(trainer.mesh, lambda: f"step 1, {trainer.doing}"),
        ):
            trainer.train_step(batches)
        return str(told.value)
    time.sleep(2.0 * pace)
    return ""


@at_some_pace
def test_a_collective_without_the_others_ends_in_time(pool: Pool, pace: float) -> None:
    says = pool.run(2, alone, pace)[0]
    assert says.startswith(
        "rank 0, step 1, counting target tokens: rank 1 did not respond within parallel.timeout_s, or exited"
    )


def test_other_errors_keep_their_traceback() -> None:
    with (
        pytest.raises(RuntimeError, match="shapes"),
        report_unresponsive_ranks(Mesh(Layout(), 0, torch.device("cpu")), lambda: "step 1"),
    ):
        raise RuntimeError("shapes do not fit")
