"""Ranks are killed; spares take their places, and all other processes stay. Halves of the ranks have nodes of their
own, as far as memory goes, and so has the spare."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from pkgutil import resolve_name

import pytest

from pangu.common.exit_status import USER_ERROR
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.topology.membership import Membership
from scripts.launch import main
from tests.end_to_end.commands import (
    SAME_ATTENTION,
    SAME_PRODUCTS,
    SMALL,
    VARIABLES,
    call_and_exit,
    metrics,
    wait_until,
)
from tests.end_to_end.dying import CONNECTING, DEAF, KEEPING, KILL, SCRIPT
from tests.spawn import repository, run_ranks

DIES_AFTER, STEPS = 4, 12
SPARES = 2
"""Node of the spares, as in `dying`."""
LAYOUTS = {
    "zero 1": (2, ("parallel.zero=1",)),
    "zero 3": (2, ("parallel.zero=3",)),
    "tensor 2 x data 2": (4, ("parallel.tensor=2", "parallel.zero=1")),
    "pipeline 2 x data 2": (4, ("parallel.pipeline=2", "parallel.zero=2")),
}
MORE_LAYOUTS = LAYOUTS | {
    "zero 0": (2, ("parallel.zero=0",)),
    "zero 2 in long messages": (2, ("parallel.zero=2", "model.hidden=768", "model.heads=12")),
    "zero 2 with LAMB": (2, ("parallel.zero=2", "optimizer=lamb")),
    "zero 1 with Muon": (2, ("parallel.zero=1", "optimizer=muon")),
    "data 4": (4, ("parallel.zero=3",)),
    "data 4 in fp64": (4, ("parallel.zero=2", "precision=fp64", "precision.fp32_matmul=auto")),
    "context 2 x data 2": (4, ("parallel.context=2", "parallel.zero=2")),
    "tensor 2 x pipeline 2": (4, ("parallel.tensor=2", "parallel.pipeline=2", "parallel.sequence=true")),
    "zero 1 in groups": (4, ("parallel.zero=1", "parallel.zero_group=2")),
    "zero 3 in groups": (4, ("parallel.zero=3", "parallel.zero_group=2")),
    "tensor 2 x data 2 with zero 0": (4, ("parallel.tensor=2", "parallel.zero=0")),
    "pipeline 2 x data 2 with zero 0": (4, ("parallel.pipeline=2", "parallel.zero=0")),
    "zero 0 in fp64": (4, ("parallel.zero=0", "precision=fp64", "precision.fp32_matmul=auto")),
    "zero 0 with Muon": (2, ("parallel.zero=0", "optimizer=muon")),
    "zero 0 with LAMB": (2, ("parallel.zero=0", "optimizer=lamb")),
    "zero 0 with experts": (2, ("parallel.zero=0", "model.experts=4", "model.router.balance=bias")),
    "zero 0 in fp8": (2, ("parallel.zero=0", "precision.matmul=fp8")),
}
HELD = (
    *("zero 0", "zero 1 in groups", "zero 3 in groups", "tensor 2 x data 2 with zero 0"),
    *("pipeline 2 x data 2 with zero 0", "zero 0 in fp64"),
)
"""Layouts in which other ranks hold all that one does; no update needs more of others than norm and loss."""
ON_DISK = "checkpoint.memory_every=0"
POINTS = {
    "before the forward pass": "training.step:Trainer.forward_backward",
    "in a reduction": "zero.gradients:GradientSum._start",
    "after the reductions": "zero.gradients:GradientSum.finish",
    "at the norm": "zero.sharded:norm_and_loss",
    "in the update": "training.step:Trainer.update",
    "in a gather": "zero.unshard:Unsharder._gather",
    "in a validation": "training.validation:Validation.figures",
    "in a save": "checkpoint.writing:write_own",
    "in a copy": "training.memory_checkpoints:write_own",
    "in a copy to the buddy": "training.memory_checkpoints:exchange_bytes",
    "before a copy is whole": "training.memory_checkpoints:commit",
}


def words(folder: Path, layout: str) -> list[str]:
    """Words of a run that copies its state after each step, and also validates and saves."""
    if not (folder.parent / "corpus.idx").exists():
        with IndexedWriter(folder.parent / "corpus", 256) as writer:
            for path in sorted(Path(json.__file__).parent.glob("*.py")):  # not a commit's text: a series takes hours
                writer.add(list(path.read_bytes()))
    corpus = folder.parent / "corpus"
    keys = ("data=indexed", f"data.train=[{corpus}]", f"data.validation=[{corpus}]", "model.vocab=256")
    keys += (
        "batch.micro_size=1",
        "validation.every=2",
        "validation.sequences=4",
        "lr_schedule.warmup_steps=1",
        f"train.steps={STEPS}",
    )
    keys += ("checkpoint.memory_every=1", "checkpoint.every=6", *MORE_LAYOUTS[layout][1], f"train.output={folder}")
    return [*SMALL, SAME_ATTENTION, SAME_PRODUCTS, *keys]


def prepare(folder: Path, kills: Sequence[tuple[str, int, int]] = (), action: str = KILL) -> Path:
    """Write the script of a run in which the ranks of `kills` (point, rank, step) die one after the other."""
    folder.mkdir()
    (folder / "kills").write_text(json.dumps([(POINTS.get(point, point), *rest) for point, *rest in kills]))
    script = folder / "dying.py"
    script.write_text(SCRIPT.replace("ACTION", action), encoding="utf-8")
    return script


def environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in VARIABLES} | {"OMP_NUM_THREADS": "1"}


def launched(script: Path, world: int, spares: int, arguments: Sequence[str], status: int = 0) -> str:
    """Carry out a script on a number of ranks, with spares, and return what is said."""
    line = [sys.executable, "scripts/launch.py", f"--nproc-per-node={world}", f"--spares={spares}", str(script)]
    done = subprocess.run(
        [*line, *arguments],
        cwd=repository(),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stderr


def start(
    folder: Path, layout: str, *kills: tuple[str, int, int], action: str = KILL, status: int = 0, key: str = ""
) -> tuple[str, list[list[list[int]]]]:
    """Kill ranks, with a spare for each; return what is said, and rank, process and step of all ranks per epoch."""
    script, world = prepare(folder, kills, action), MORE_LAYOUTS[layout][0]
    said = launched(script, world, len(kills), [*words(folder / "run", layout), *filter(None, [key])], status)
    return said, epochs(folder, world)


def epochs(folder: Path, *worlds: int) -> list[list[list[int]]]:
    """Rank, process and first step of each rank in each epoch; the last one of `worlds` repeats."""
    lines = [[int(word) for word in line.split()] for line in (folder / "processes").read_text().splitlines()]
    found = []
    while lines:
        world = worlds[min(len(found), len(worlds) - 1)]
        found.append(sorted(lines[:world]))
        lines = lines[world:]
    assert all([rank for rank, *_ in ranks] == list(range(len(ranks))) for ranks in found), found
    return found


@cache
def unbroken(folder: Path, layout: str) -> list[tuple[float, float]]:
    """Loss and norm of each step of a run that nobody disturbs."""
    assert run_ranks(MORE_LAYOUTS[layout][0], call_and_exit, "pretrain", *words(folder, layout)).returncode == 0
    return figures(folder)


def figures(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in metrics(folder)]


def whole(factory: pytest.TempPathFactory, layout: str) -> list[tuple[float, float]]:
    """Figures of the unbroken run, which the cases of a layout share."""
    shared = factory.getbasetemp() / layout.replace(" ", "-")
    shared.mkdir(exist_ok=True)
    return unbroken(shared, layout)


def cases() -> list[object]:
    every = [
        (layout, point, dies, None)
        for layout, (world, _) in LAYOUTS.items()
        for point in POINTS
        for dies in (0, world - 1)
        if (point, dies > 0) != ("before a copy is whole", True)  # the first rank of a node commits
        and (point != "in a gather" or layout == "zero 3")
    ]
    few = ("tensor 2 x data 2", "at the norm", 3, None)  # rank 0 exchanges nothing with rank 3
    twice = [(*few[:3], (CONNECTING, rank, groups)) for rank, groups in ((2, 0), (1, 4))]
    return [few, *(pytest.param(*case, marks=pytest.mark.long) for case in (*twice, *every) if case != few)]


def test_every_point_at_which_a_rank_is_killed_is_there() -> None:
    for module, _, names in (place.partition(":") for place in POINTS.values()):
        assert callable(attrgetter(names)(import_module(f"pangu.{module}")))


def check(
    folder: Path, layout: str, kills: Sequence[tuple[str, int, int]], expected: object, key: str = ""
) -> list[int]:
    """Kill ranks; return how many steps were repeated after each, unless it died while groups were made."""
    said, ranks = start(folder, layout, *kills, key=key)
    losses = [number for number, (point, *_) in enumerate(kills) if point != CONNECTING]
    assert len(ranks) == len(losses) + 1, said
    repeated = []
    for number, end, before, after in zip(losses, [*losses[1:], len(kills)], ranks, ranks[1:], strict=False):
        stayed = [old[1] == new[1] for old, new in zip(before, after, strict=True)]
        dead = {rank for _, rank, _ in kills[number:end]}
        assert stayed == [rank not in dead for rank in range(len(before))], said
        # a rank that dies with the sums of a step has not made it yet, but those that are left have
        repeated.append(max(0, int((folder / f"killed-{number}").read_text()) - after[0][2]))
        assert repeated[-1] <= (0 if key else 1), said
    assert figures(folder / "run") == expected
    assert "/memory/" in said.partition("continuing from")[2].partition("\n")[0], "the disk is read"
    return repeated


def test_each_point_is_a_function() -> None:
    assert all(callable(resolve_name(f"pangu.{point}")) for point in POINTS.values())


@pytest.mark.parametrize(("layout", "point", "dies", "then"), cases())
def test_a_spare_takes_the_rank_of_a_killed_process(
    layout: str, point: str, dies: int, then: tuple[str, int, int] | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    kills = [(point, dies, DIES_AFTER), *([then] if then else [])]
    check(tmp_path_factory.mktemp("broken") / "of", layout, kills, whole(tmp_path_factory, layout))


def held_cases() -> list[object]:
    """Each point with each layout, but for points that only copies have."""
    every = [
        (layout, point, dies)
        for layout in HELD
        for point in POINTS
        for dies in (0, MORE_LAYOUTS[layout][0] - 1)
        if "copy" not in point and (point != "in a gather" or "zero 3" in layout)
    ]
    return [pytest.param(*case, marks=pytest.mark.long) for case in every]


@pytest.mark.parametrize(("layout", "point", "dies"), held_cases())
def test_no_step_is_repeated_without_copies_where_others_hold_what_is_lost(
    layout: str, point: str, dies: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, kills = tmp_path_factory.mktemp("held") / "of", [(point, dies, DIES_AFTER)]
    check(folder, layout, kills, whole(tmp_path_factory, layout), ON_DISK)


@pytest.mark.parametrize("hears", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_rank_without_the_sums_of_a_step_finishes_it_with_those_of_another(
    hears: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Rank 1 is killed, and only rank 3 has its shards; ranks 0 and 2 have made step 5, rank 3 has not."""
    layout, folder = "zero 1 in groups", tmp_path_factory.mktemp("deaf") / "of"
    script = prepare(folder, [("at the norm", 1, DIES_AFTER)])
    (folder / DEAF).write_text("" if hears else "3")
    said = launched(script, 4, 1, [*words(folder / "run", layout), ON_DISK])
    assert {step for *_, step in epochs(folder, 4)[1]} == {DIES_AFTER + 1}, said
    assert f"the surviving ranks hold the complete state of step {DIES_AFTER + 1}" in said
    assert figures(folder / "run") == whole(tmp_path_factory, layout)


@pytest.mark.parametrize(
    ("layout", "point"),
    [
        ("zero 1", "before the forward pass"),
        *(
            pytest.param(layout, "at the norm", marks=pytest.mark.long)
            for layout in ("zero 3", "zero 0 with Muon", "zero 0 with LAMB", "zero 0 with experts", "zero 0 in fp8")
        ),
    ],
)
def test_the_newest_copy_is_used_where_what_is_left_is_not_whole(
    layout: str, point: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Copies of every third step. Updates with further sums over ranks may be made by none of those that are left."""
    folder = tmp_path_factory.mktemp("torn") / "of"
    script = prepare(folder, [(point, 1, DIES_AFTER)])
    said = launched(script, 2, 1, [*words(folder / "run", layout), "checkpoint.memory_every=3"])
    steps = {step for *_, step in epochs(folder, 2)[1]}
    assert steps <= ({3} if layout in LAYOUTS else {3, DIES_AFTER, DIES_AFTER + 1}), said
    if layout in LAYOUTS:
        assert "is incomplete: only rank 1 held part of it" in said
    assert figures(folder / "run") == whole(tmp_path_factory, layout)


@pytest.mark.long
def test_a_rank_that_is_lost_while_it_keeps_its_state_leaves_the_newest_copy(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Rank 0 writes for all replicas: it is the first that holds each shard."""
    layout, folder = "zero 0 in fp64", tmp_path_factory.mktemp("kept") / "of"
    script = prepare(folder, [("before the forward pass", 1, DIES_AFTER), (KEEPING, 0, DIES_AFTER)])
    said = launched(script, 4, 2, [*words(folder / "run", layout), "checkpoint.memory_every=3"])
    assert (folder / "killed-1").exists()
    assert {step for *_, step in epochs(folder, 4)[1]} == {3}, said
    assert "survivors: no surviving rank has kept its state" in said
    assert figures(folder / "run") == whole(tmp_path_factory, layout)


@pytest.mark.parametrize("key", [ON_DISK, "checkpoint.memory_every=2"])
@pytest.mark.parametrize("dies", [0, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.long
def test_without_a_spare_or_copies_no_step_is_repeated(
    dies: int, key: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """4 samples on 3 replicas, in fp64, from the state that all of them hold."""
    layout, folder = "zero 0 in fp64", tmp_path_factory.mktemp("dealt") / "of"
    script = prepare(folder, [("before the forward pass", dies, DIES_AFTER)])
    said = launched(script, 4, 0, [*words(folder / "run", layout), key])
    assert epochs(folder, 4, 3)[1][0][2] == DIES_AFTER, said
    for ours, theirs in zip(figures(folder / "run"), whole(tmp_path_factory, layout), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("dies", [3, pytest.param(0, marks=pytest.mark.long)])
def test_without_a_spare_the_samples_are_dealt_to_the_replicas_that_remain(
    dies: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """4 samples on 3 replicas, in fp64: sums are added in another order."""
    layout, folder = "data 4 in fp64", tmp_path_factory.mktemp("dealt") / "of"
    expected = whole(tmp_path_factory, layout)
    said = launched(prepare(folder, [("at the norm", dies, DIES_AFTER)]), 4, 0, words(folder / "run", layout))
    before, after = epochs(folder, 4, 3)
    assert sorted(process for _, process, _ in after) == sorted(process for rank, process, _ in before if rank != dies)
    assert [int((folder / "killed-0").read_text()) - step for _, _, step in after] in ([0] * 3, [1] * 3)
    assert "each replica computes at most 2 micro-batches of 1" in said
    for ours, theirs in zip(figures(folder / "run"), expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


def test_sigterm_while_a_spare_is_to_take_a_rank_saves_and_stops_the_run(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("told") / "of"
    script = prepare(folder, [("at the norm", 1, DIES_AFTER)])
    line = [sys.executable, "scripts/launch.py", "--nproc-per-node=2", "--spares=1", str(script)]
    with (
        (folder / "said").open("w+") as said,
        subprocess.Popen(
            [*line, *words(folder / "run", "zero 1")], cwd=repository(), env=environment(), stderr=said
        ) as launcher,
    ):
        try:
            wait_until(lambda: "continue from the newest state" in (folder / "said").read_text())
            launcher.terminate()
            assert launcher.wait(300) == 0, (folder / "said").read_text()
        finally:
            launcher.terminate()
    assert "(SIGTERM)" in (folder / "said").read_text()
    last = metrics(folder / "run")[-1]["step"]
    assert (folder / f"run/checkpoints/step-{last:08}").exists()


@pytest.mark.long
def test_a_series_of_kills(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    """`--all --kills=200 --seed=0`: points, ranks and layouts are drawn, and a run has up to three kills."""
    left, seed = (request.config.getoption(name) for name in ("--kills", "--seed"))
    chance, counts, seconds = random.Random(seed), Counter[int](), 0
    while left:
        layout = chance.choice(list(MORE_LAYOUTS))
        world, keys = MORE_LAYOUTS[layout]
        points = sorted(POINTS.keys() - ({"in a gather"} if "parallel.zero=3" not in keys else set()))
        kills, after, nodes = list[tuple[str, int, int]](), 3, [2 * rank // world for rank in range(world)]
        while len(kills) < min(3, left) and after < STEPS:
            point, rank = chance.choice(points), chance.randrange(world)
            # the first rank of a node commits
            kills.append((point, 0 if point == "before a copy is whole" else rank, after))
            # a save is every 6 steps; no buddy covers what a spare has taken over before it is copied again
            after = 3 + (after + -after % 6 if point == "in a save" else after)
            before, nodes[kills[-1][1]] = set(nodes), SPARES
            # two nodes at once would take all copies of a rank with them
            second = [one for one in range(world) if len(before - {*nodes[:one], *nodes[one + 1 :], SPARES}) <= 1]
            if chance.random() < 0.25 and len(kills) < left:
                kills.append((CONNECTING, chance.choice(second), chance.randrange(3)))
                nodes[kills[-1][1]] = SPARES
        print(f"seed {seed}, {layout}: {kills}", flush=True)
        counts.update(check(tmp_path_factory.mktemp("series") / "of", layout, kills, whole(tmp_path_factory, layout)))
        left, seconds = left - len(kills), seconds + sum(point == CONNECTING for point, *_ in kills)
        costs = ", ".join(f"{counts[steps]} cost {steps}" for steps in sorted({0, 1, 2, *counts}))
        print(f"seed {seed}: {counts.total()} kills, and {seconds} {CONNECTING}; repeated steps: {costs}", flush=True)


def test_the_message_of_one_rank_ends_the_run_while_its_copy_waits_for_another_rank(tmp_path: Path) -> None:
    action = "raise LocalError('no more room')"
    said, ranks = start(
        tmp_path / "of", "zero 1", ("before the forward pass", 1, DIES_AFTER), action=action, status=USER_ERROR
    )
    assert "error: no more room" in said
    assert len(ranks) == 1, "a spare has replaced the rank"


def test_spares_of_the_same_node_come_first_and_nodes_without_losses_lead_where_none_is_left() -> None:
    membership = Membership()
    membership.add(0, [0, 1, 2], count=2)
    membership.add(1, [3, 4, 5], count=2)
    assert membership.record() == [(0, 0), (1, 1), (3, 0), (4, 1)]
    assert membership.replace([4]) == {4: 5}
    assert membership.record() == [(0, 0), (1, 1), (3, 0), (5, 1)]
    assert membership.replace([5]) == {5: 2}
    assert membership.record() == [(0, 0), (1, 1), (3, 0), (2, 2)]
    assert membership.replace([0]) == {}
    assert [number for number, _ in membership.record()] == [3, 1, 2] or membership.ranks == [1, 2, 3]
    membership.add(1, [6, 7, 8])
    assert membership.replace([1]) == {1: 6}
    membership.grow()
    assert len(membership.ranks) == 4


def test_a_number_of_spares_that_is_none_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--spares=some", "--nproc-per-node=2", "pretrain.py"])
    assert ended.value.code == USER_ERROR
    assert "argument --spares: some: must be a number of processes on each node" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option", ["--spares=1 --max-restarts=3", "--spares=1 --nnodes=1:2", "--spares=1 --node-rank=1"]
)
def test_options_that_do_not_go_together_are_one_message(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*option.split(), "--nproc-per-node=2", "pretrain.py"]) == USER_ERROR
    assert option.split()[-1].partition("=")[0] in capsys.readouterr().err
