"""What the loop says of its steps, and how far it is from it to the model."""

from __future__ import annotations

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.nn import functional as F

from pangu.topology import copy_stream
from pangu.training import loop
from pangu.training.step import Trainer
from tests.end_to_end.commands import metrics
from tests.spawn import repository
from tests.training.test_resume import train


def test_the_time_of_a_step_reaches_from_one_end_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of the test's: a step takes 1 s, then its figures take 2 s, as an update would that a device has not
    ended when the loss is known, and a comparison of replicas 100 s. Only what is no part of training is left out."""
    clock = 0.0

    def taking(seconds: float, what: Any) -> Any:
        def work(*given: Any) -> Any:
            nonlocal clock
            clock += seconds
            return what(*given)

        return work

    for module in (loop, copy_stream):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock))
    monkeypatch.setattr(Trainer, "forward_backward", taking(1, Trainer.forward_backward))
    monkeypatch.setattr(loop, "peak_memory_gib", taking(2, loop.peak_memory_gib))
    monkeypatch.setattr(loop, "find_replica_difference", taking(100, lambda trainer: None))
    train(tmp_path, 3, "train.check_replicas=2", "checkpoint.every=0")
    assert [line["step_time_s"] for line in metrics(tmp_path)] == [1, 3, 3]


@pytest.mark.parametrize("kind", ["gpt", "pangu"])
def test_few_calls_lead_from_a_step_to_the_first_product(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions of this package, the step of the loop and the one that multiplies among them; torch's own not."""
    paths: list[list[str]] = []
    product, package = F.linear, str(repository() / "pangu")

    def noting(*given: Any, **named: Any) -> Any:
        names = [frame.name for frame in traceback.extract_stack() if frame.filename.startswith(package)]
        if "_train_step" in names:
            paths.append(names[names.index("_train_step") :])
        return product(*given, **named)

    monkeypatch.setattr(F, "linear", noting)
    train(tmp_path, 1, f"model.kind={kind}", "checkpoint.every=0")
    assert paths[0][-1] == "column_parallel_matmul"
    assert len(paths[0]) <= 12, paths[0]
