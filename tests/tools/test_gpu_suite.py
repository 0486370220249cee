"""scripts/gpu_suite.sh, as far as a machine without an accelerator can show: it runs without what its own lacks."""

from __future__ import annotations

import io
import json
import math
import random
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu_suite import __main__ as suite
from benchmarks.gpu_suite import report
from benchmarks.gpu_suite.setting import PRESETS, QUIET, Setting, preset, require_near
from benchmarks.gpu_suite.staged import StagedGroup
from benchmarks.gpu_suite.trace import Interval, busiest, gaps
from pangu.report.clusters import load_cluster
from tests.configs import composed
from tests.end_to_end.commands import command
from tests.spawn import Pool, repository

WITHOUT = """
import importlib, sys
from importlib.machinery import PathFinder

MISSING = {"hydra", "omegaconf", "antlr4", "jieba", "datasets", "wandb"}
MISSING |= {"hypothesis", "xdist", "tensorboard", "matplotlib"}

find_spec = PathFinder.find_spec
hidden = lambda name, *rest: None if name.partition(".")[0] in MISSING else find_spec(name, *rest)
PathFinder.find_spec = staticmethod(hidden)
from benchmarks.gpu_suite.__main__ import PARTS, main

for part in PARTS:
    importlib.import_module(f"benchmarks.gpu_suite.{part.name}")
import tests.conftest, tests.gpu.test_training

folder = sys.argv[1]
for part in ("memory", "axes"):
    assert main(["--device", "cpu", "--output", folder, "--part", part]) == 0
assert not MISSING & set(sys.modules), MISSING & set(sys.modules)
"""


@pytest.mark.parametrize("name", PRESETS)
def test_resolved_configurations_are_what_the_recipes_compose(name: str) -> None:
    assert preset(name) == composed(*PRESETS[name], *QUIET), "python -m benchmarks.gpu_suite --compose writes them anew"


def test_parts_run_without_the_packages_that_its_machine_lacks(tmp_path: Path) -> None:
    done = command("-c", WITHOUT, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for name in ("memory", "axes"):
        document = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
        assert document["device"]["type"] == "cpu"
        assert document["versions"]["torch"] == torch.__version__
        assert all(values["model"]["kind"] for values in document["configurations"].values())
        assert not [row for row in document["rows"] if "error" in row]
    rows = {row["row"]: row for row in document["rows"]}
    assert rows["steps, ZeRO-3"]["collectives of a step"]["all_reduce"] > 0


@pytest.mark.long
def test_the_whole_suite_runs_on_a_cpu(tmp_path: Path) -> None:
    assert suite.main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    speed = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))
    assert not [row for row in speed["rows"] if "cannot" in row]


def test_a_part_that_is_ended_or_comes_too_late_does_not_stop_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "PARTS", (suite.Part("memory", 0), suite.Part("trace", 0)))
    output = ["--device", "cpu", "--output", str(tmp_path)]
    assert suite.main(output) == 1
    assert capsys.readouterr().out.count("was ended after its limit of 0 s") == 2
    assert "was ended" in json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["status"]
    assert suite.main([*output, "--limit", "1"]) == 1
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    assert [part["status"] for part in summary.values()] == ["was left out: 1 s are over"] * 2


def test_a_part_ends_with_the_suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is in the archive all the same, and nothing that an earlier suite left there."""
    for name in ("summary.json", "trace.json", "trace.log"):
        (tmp_path / name).write_text("of an earlier suite", encoding="utf-8")
    monkeypatch.setattr(suite, "PARTS", (suite.Part("memory", 60), suite.Part("trace", 60)))
    handler, started = signal.getsignal(signal.SIGTERM), []
    poll = subprocess.Popen.poll

    def told_to_end(process: subprocess.Popen[bytes]) -> int | None:
        if process not in started:
            started.append(process)
            signal.raise_signal(signal.SIGTERM)
        return poll(process)

    monkeypatch.setattr(subprocess.Popen, "poll", told_to_end)
    try:
        with pytest.raises(SystemExit, match="143"):
            suite.main(["--device", "cpu", "--output", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert started[0].returncode == -signal.SIGKILL
    assert len(started) == 1
    with tarfile.open(tmp_path / "suite.tar.gz") as archive:
        assert archive.getnames() == ["memory.json", "memory.log", "summary.json"]
        summary, document = (
            json.load(archive.extractfile(f"{name}.json") or io.BytesIO()) for name in ("summary", "memory")
        )
    assert summary["memory"]["status"] == document["status"] == "was ended with the suite"
    assert summary["trace"] == {"status": "was left out: the suite was stopped", "seconds": 0.0}


def test_an_archive_that_is_being_written_outlives_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "PARTS", (suite.Part("memory", 0), suite.Part("trace", 60)))
    handler, write = signal.getsignal(signal.SIGTERM), suite.write_atomically

    def told_to_end(path: Path, content: bytes, *, sync: bool = True) -> None:
        if path.name == "suite.tar.gz":
            signal.raise_signal(signal.SIGTERM)
        write(path, content, sync=sync)

    monkeypatch.setattr(suite, "write_atomically", told_to_end)
    try:
        with pytest.raises(SystemExit, match="143"):
            suite.main(["--device", "cpu", "--output", str(tmp_path)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    with tarfile.open(tmp_path / "suite.tar.gz") as archive:
        assert archive.getnames() == ["memory.json", "memory.log", "summary.json"]


def test_an_error_is_a_figure_and_the_next_row_is_measured(tmp_path: Path) -> None:
    setting = Setting(torch.device("cpu"), tmp_path, "example")
    setting.begin("example")
    with setting.row("first") as figures:
        figures["loss"] = math.nan
        require_near([math.nan], [1.0], 0.1)
    with setting.row("second") as figures:
        require_near([1.05], [1.0], 0.1)
    (tmp_path / "example.log").write_text("before\nlast line\n", encoding="utf-8")
    running = suite.Running(suite.Part("example", 60), subprocess.Popen(["true"]), time.monotonic(), 60)
    running.process.wait()
    result = running.result(running.status() or "runs", tmp_path)
    assert result["status"] == "finished, with errors in first"
    document = json.loads(setting.path.read_text(encoding="utf-8"))
    assert document.items() >= result.items()
    assert document["log_tail"] == ["before", "last line"]
    assert all(row["during"]["wall_seconds"] >= 0 <= row["during"]["process_seconds"] for row in document["rows"])
    first, second = ({key: value for key, value in row.items() if key != "during"} for row in document["rows"])
    assert first["loss"] is None
    assert first["error"].startswith("ValueError: [nan] are up to nan from [1.0]")
    assert second == {"row": "second"}


def test_rounds_hold_each_part_once_and_fit_their_calls() -> None:
    names = [part.name for part in suite.PARTS]
    assert len(set(names)) == len(names)
    for number, parts in enumerate(suite.ROUNDS, 1):
        assert suite.command_line(["--round", str(number)]).parts == [part.name for part in parts]
        assert suite.command_line(["--round", str(number)]).limit <= 540
        alone = sum(part.limit_s for part in parts if part.alone)
        assert alone + max((part.limit_s for part in parts if not part.alone), default=0) <= 540
    assert suite.command_line([]).parts == names
    with pytest.raises(SystemExit):
        suite.command_line(["--round", "1", "--parts", "speed"])


def test_an_archive_leaves_out_traces_that_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite, "ARCHIVE_BYTES", 20_000)
    (tmp_path / "speed.json").write_text("{}", encoding="utf-8")
    (tmp_path / "speed.log").write_bytes(b"a" * 2 * suite.LOG_BYTES + b"end")
    for name, count in (("small", 1_000), ("large", 30_000)):
        (tmp_path / f"trace-{name}.json.gz").write_bytes(random.Random(0).randbytes(count))
    suite.pack(tmp_path)
    assert "trace-large.json.gz has no room" in capsys.readouterr().out
    assert (tmp_path / "suite.tar.gz").stat().st_size < 20_000
    with tarfile.open(tmp_path / "suite.tar.gz") as archive:
        assert archive.getnames() == ["speed.json", "speed.log", "trace-small.json.gz"]
        log = archive.extractfile("speed.log")
        assert log is not None
        assert log.read() == b"a" * (suite.LOG_BYTES - 3) + b"end"


def test_a_report_makes_tables_and_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the files of the first GPU, with rates of made-up products, memory and attention beside them."""
    for name in ("forecast", "speed", "host"):
        shutil.copy(repository() / "benchmarks" / "results" / "gpu_h200" / f"{name}.json", tmp_path)
    device = json.loads((tmp_path / "speed.json").read_text(encoding="utf-8"))["device"]
    made = {
        "matmuls": [{"row": "pangu_350m, bfloat16, up forward", "shape": [8192, 4096, 1024], "of_bf16_peak": 0.5}],
        "memory": [{"row": "starting a kernel", "microseconds": 7.0}, {"row": "addition, no cache", "gb_s": 3000.0}],
        "attention": [{"row": "pangu_2_6b, causal, torch cudnn", "tflops": 500.0}],
    }
    for name, rows in made.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"device": device, "rows": rows}), encoding="utf-8")
    assert suite.main(["--report", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "| pangu_350m, pangu | 107.7 | 36.3% |" in told
    cluster = load_cluster(tmp_path / "calibrated.yaml")
    assert cluster.matmul.measured == ((8192, 4096, 1024, 0.5),)
    assert (cluster.launch_us, cluster.matmul.tflops) == (7.0, 989.0)
    assert cluster.memory.efficiency == pytest.approx(3000 / cluster.memory.gb_s)
    shipped = load_cluster(repository() / "configs" / "cluster" / "h200.yaml")
    slower = 162.5 / 107.7  # the host of these rows against that of the shipped rates
    assert cluster.operator_us == pytest.approx(shipped.operator_us * slower, rel=0.01)
    assert cluster.call_us == pytest.approx(shipped.call_us * slower, rel=0.01)


def test_rates_of_a_host_are_found_from_its_steps() -> None:
    counts = ((5000, 4000), (7000, 20000), (9000, 80000))
    rows = [
        {"operators": operators, "python_calls": calls, "milliseconds": 1e-3 * (12 * operators + 1.5 * calls)}
        for operators, calls in counts
    ]
    assert report.host_rates(rows) == pytest.approx((12, 1.5))
    assert report.host_rates(rows[:2]) is None


STEPS_OF_A_HOST = """
import json
import torch
from benchmarks.gpu_suite.host import host_counts

x = torch.ones(3, requires_grad=True)

def step():
    for _ in range(4):
        (x * 2).sum()

print(json.dumps([host_counts(step), host_counts(step)]))
"""


def test_what_a_host_does_in_a_step_is_counted() -> None:
    """In a process that has compiled nothing: elsewhere a profiler may hang in CPython 3.11."""
    done = command("-c", f"exec(compile({STEPS_OF_A_HOST!r}, 'a file', 'exec'))", timeout=60)
    assert json.loads(done.stdout) == [{"operators": 8, "python_calls": 1}] * 2, done.stderr


def test_gaps_are_the_times_in_which_nothing_runs() -> None:
    intervals = [Interval(0, 4, "a"), Interval(1, 2, "b"), Interval(5, 6, "c"), Interval(9, 12, "a")]
    assert gaps(reversed(intervals)) == [
        {"microseconds": 3, "after": "c", "before": "a"},
        {"microseconds": 1, "after": "a", "before": "c"},
    ]
    assert busiest(intervals)[0] == {"name": "a", "microseconds": 7, "calls": 2}


def messages(rank: int, world: int) -> None:
    """What a group staged through the host gives equals what gloo gives."""
    store = dist.PrefixStore("staged", dist.distributed_c10d._get_default_store())
    group = StagedGroup(store, rank, world, dist.distributed_c10d.default_pg_timeout)
    own = torch.arange(4.0) + 10 * rank
    reduced = own.clone()
    group.allreduce([reduced], dist.AllreduceOptions()).wait()
    assert reduced.tolist() == [10, 12, 14, 16]
    gathered = torch.empty(8)
    group.all_gather_single(gathered, own).wait()
    assert gathered.tolist() == [0, 1, 2, 3, 10, 11, 12, 13]
    part = torch.empty(2)
    group.reduce_scatter_single(part, own, dist.ReduceScatterOptions()).wait()
    assert part.tolist() == [[10, 12], [14, 16]][rank]
    exchanged = torch.empty(4)
    group.all_to_all_single(exchanged, own, [], []).wait()
    assert exchanged.tolist() == [[0, 1, 10, 11], [2, 3, 12, 13]][rank]
    if rank == 0:
        group.send([own], 1).wait()
    else:
        work = group.recv([exchanged], 0)
        assert work.wait()
        assert work.wait()
        assert exchanged.tolist() == [0, 1, 2, 3]


def test_messages_through_the_host(pool: Pool) -> None:
    pool.run(2, messages)
