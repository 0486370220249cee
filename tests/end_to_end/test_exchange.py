"""Ranks whose devices are slow or compute wrongly are exchanged for spares."""

from __future__ import annotations

import pytest

from tests.end_to_end.commands import metrics
from tests.end_to_end.test_staying import STEPS, epochs, figures, launched, prepare, whole, words
from tests.pace import at_some_pace

LAYOUT = "zero 1"
CODE = """
BEGAN_AS = os.environ["RANK"]


def slow(original, *arguments):
    time.sleep(SECONDS * (BEGAN_AS == "1"))
    return original(*arguments)


def wrong(original, trainer, batch):
    digest = original(trainer, batch)
    if BEGAN_AS != "0" or trainer.step != 8 or (FOLDER / "erred").exists():
        return digest
    (FOLDER / "erred").touch()
    return digest ^ 1


if __name__ == "__main__":
    replace("pipeline.runner:Runner._forward", slow)
    replace("training.step:Trainer.digest", wrong)
"""
SLOW = """
if __name__ == "__main__":
    replace("training.device_checks:above_median", lambda *_: {1: 3.0})
"""
KEYS = (
    "train.deterministic=true",
    "faults.action=rollback",
    "faults.recheck=4",
    "faults.stragglers=act",
    "faults.straggler_every=1",
    "faults.straggler_factor=10",
)


@at_some_pace
def test_a_slow_rank_and_one_that_computes_wrongly_are_exchanged_and_the_other_process_stays(
    tmp_path_factory: pytest.TempPathFactory, pace: float
) -> None:
    """Rank 1 is slow from the beginning; rank 0 errs at the recheck before step 9, and step 3, saved for the exchange,
    is the newest checkpoint before the last recheck."""
    expected = whole(tmp_path_factory, LAYOUT)
    folder = tmp_path_factory.mktemp("exchange") / "of"
    script = prepare(folder)
    code = CODE.strip().replace("SECONDS", f"{0.4 * pace}")
    script.write_text(script.read_text().replace('if __name__ == "__main__":', code, 1), encoding="utf-8")
    said = launched(script, 2, 2, [*words(folder / "run", LAYOUT), *KEYS])
    assert "replacing rank 1 with spares" in said
    began, without_slow, without_both = epochs(folder, 2)
    assert [(rank, step) for rank, _, step in (*without_slow, *without_both)] == [(0, 3), (1, 3)] * 2, said
    processes = [[process for _, process, _ in ranks] for ranks in (began, without_slow, without_both)]
    assert [old == new for old, new in zip(processes[0], processes[1], strict=True)] == [True, False]
    assert [old == new for old, new in zip(processes[1], processes[2], strict=True)] == [False, True]
    assert processes[0][1] not in processes[2]
    assert [line["step"] for line in metrics(folder / "run")] == list(range(1, STEPS + 1))
    assert figures(folder / "run") == expected


def test_without_spares_the_replica_of_a_slow_rank_gets_fewer_micro_batches(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """It is slow in steps 1 to 3, and the batch of step 4 has been read by then. Steps differ by rounding in fp32;
    `tests/parallel/test_shares.py` compares them in fp64."""
    expected = whole(tmp_path_factory, LAYOUT)
    folder = tmp_path_factory.mktemp("shares") / "of"
    script = prepare(folder)
    script.write_text(script.read_text().replace('if __name__ == "__main__":', SLOW.strip(), 1), encoding="utf-8")
    said = launched(script, 2, 0, [*words(folder / "run", LAYOUT), *KEYS])
    assert said.count("from step 5 on, the replicas compute 3, 1 micro-batches") == said.count("from step ") == 1
    found = figures(folder / "run")
    assert found[:4] == expected[:4]
    assert found == [pytest.approx(one, rel=1e-5) for one in expected]
