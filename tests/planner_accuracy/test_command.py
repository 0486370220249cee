"""python -m benchmarks.planner_accuracy: a small table of published rows, and the whole one where it is at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner_accuracy.__main__ import main
from benchmarks.planner_accuracy.accuracy import Prediction, summarise
from benchmarks.planner_accuracy.measurements import read_rows
from pangu.common.files import read_json
from tests.spawn import repository

TABLE = repository().parent / "shared" / "reference" / "tables" / "measurements.csv"
EXCERPT = (Path(__file__).parent / "measurements.csv").read_text(encoding="utf-8")
"""Rows of Narayanan et al. 2021, table 1, and of vTrain's data of several nodes."""
HEADER = EXCERPT.splitlines()[0]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """The excerpt as a file."""
    path = tmp_path / "rows.csv"
    path.write_text(EXCERPT, encoding="utf-8")
    return path


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, dict[str, dict[str, float]]]:
    """What --json prints."""
    assert main([*map(str, arguments), "--json"]) == 0
    loaded: dict[str, dict[str, dict[str, float]]] = json.loads(capsys.readouterr().out)
    return loaded


def test_unseen_sources_are_predicted_by_the_shipped_coefficients(
    table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = report(capsys, "--table", table)["sources"]
    assert set(sources) == {"SC21", "vTrain"}
    assert sources["SC21"]["rows"] == 3
    assert sources["SC21"]["time_mean_error"] <= 0.05
    assert sources["vTrain"]["rows"] == 3
    assert sources["vTrain"]["time_worst_error"] <= 0.1
    assert sources["vTrain"]["tau"] == 1.0
    assert sources["vTrain"]["pick_slowdown"] == 0.0
    assert sources["vTrain"]["out_of_memory_rows"] == 1


@pytest.mark.parametrize(
    ("paper", "rows", "mean", "worst"),
    [
        ("table 1", 6, 0.04, 0.08),
        ("table 2", 6, 0.04, 0.06),
        ("Korthikanti", 8, 0.04, 0.08),
        ("MT-NLG", 2, 0.11, 0.12),
        ("before MegaScale", 8, 0.08, 0.12),
        (": MegaScale", 8, 0.06, 0.1),
        ("Llama 3", 3, 0.1, 0.12),
    ],
)
def test_papers_that_nothing_was_fitted_to(
    paper: str, rows: int, mean: float, worst: float, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = report(capsys, "--table", Path(__file__).parent / "unseen.csv")["sources"]
    found = next(numbers for name, numbers in sources.items() if paper in name)
    assert found["rows"] == rows
    assert found["time_mean_error"] <= mean
    assert found["time_worst_error"] <= worst


def test_fitted_sources_are_cross_validated_and_predict_the_others(
    table: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = tmp_path / "fit.json"
    sources = report(capsys, "--table", table, "--fit", "--write", written)["sources"]
    assert 0 < sources["SC21"]["time_mean_error"] <= 0.1
    assert 0 < sources["vTrain"]["time_mean_error"] <= 0.15
    assert " --fit --write fit.json" in read_json(written)["made_by"]
    monkeypatch.setattr("benchmarks.planner_accuracy.__main__._SHIPPED", written)
    again = report(capsys, "--table", table)["sources"]
    assert all(again[name]["time_mean_error"] < sources[name]["time_mean_error"] for name in ("SC21", "vTrain"))


def test_held_out_sources_are_predicted_by_all_others(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = report(capsys, "--table", table, "--held-out")
    alone = report(capsys, "--table", table, "--fit")
    assert told["sources"]["SC21"] == alone["sources"]["SC21"]
    assert told["sources"]["vTrain"] != alone["sources"]["vTrain"]
    assert told["kinds"]["all A100 bf16"] == told["all"]


def test_a_table_of_a_spreadsheet_begins_with_a_mark(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the order of bytes; so it does in Excel's."""
    plain = report(capsys, "--table", table)
    table.write_text(EXCERPT, encoding="utf-8-sig")
    assert report(capsys, "--table", table) == plain


def test_the_table_names_all_sources(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table", str(table)]) == 0
    head, rule, *lines = (line for line in capsys.readouterr().out.splitlines() if line.startswith("|"))
    assert {line.count("|") for line in (head, rule, *lines)} == {10}
    assert [line.split("|")[1].strip() for line in lines] == ["SC21", "vTrain", "all"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("", "no row can be used"),
        ("a,b\n1,2\n", "1 because there is no column layers"),
        (HEADER, "no row can be used"),
        (HEADER.replace("params_b", "layers") + "\n", "there are 2 columns layers"),
        (
            HEADER + "\nx,,,48,8192,64,,,51200,2048,,A100,8,8,8,1,,1,,,,,,8,1e-308,,,,,",
            "step_time_s is not above 0, or beyond",
        ),
        (HEADER + "\nx,,,48,8192,64,,,51200,2048,,Abacus,8,8,8,1,,1,,,,,,8,1.0,,,,,", "no file of configs/cluster"),
        (HEADER + "\nx,,,many,8192,64,,,51200,2048,,A100,8,8,8,1,,1,,,,,,8,1.0,,,,,", "layers is no number"),
        (HEADER + '\n"x', "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_hostile_tables_end_in_one_message(
    content: str | bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert main(["--table", str(path)]) != 0
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("x,,,48,8192,63,,,51200,2048,,A100,8,8,8,1,,1,,,,,,8,1.0,,,,,", "hidden is no multiple of heads"),
        ("x,,,48,8192,64,,,51200,2048,,A100,8,8,8,1,,2,,,,,,8,1.0,,,,,", "is not the number of devices"),
        ("x,,,4,8192,64,,,51200,2048,,A100,8,8,1,8,,1,,,,,,8,1.0,,,,,", "more stages than layers"),
        ("x,,,48,8192,64,,,51200,2048,,A100,8,8,8,1,,1,,,,,,-8,1.0,,,,,", "global_batch is not above 0"),
        ("x,,,48,8192,64,,,51200,2048,,A100,8.5,8,8,1,,1,,,,,,8,1.0,,,,,", "gpus is no whole number"),
        ("x,,,48,8192,64,,4,51200,2048,,A100,8,8,8,1,,1,,,,,,8,1.0,,,,,", "tp does not divide the model"),
        ("x,,,48,8192,64,,,51200,2048,,A100,8,8,1,8,0.5,1,,,,,,8,1.0,,,,,", "vpp is no whole number"),
        ("x", "layers is empty"),
    ],
)
def test_rows_that_make_no_sense_are_counted(row: str, reason: str, table: Path) -> None:
    table.write_text(f"{EXCERPT}{row}\n", encoding="utf-8")
    rows, skipped = read_rows(table)
    assert len(rows) == 7
    assert sum(skipped.values()) == 1
    assert reason in next(iter(skipped))


def test_schedules_that_are_not_known_count_as_1f1b(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = "x,schedule ZB-V,,48,8192,64,,,51200,2048,,A100,8,8,1,8,,1,,-1,,,1,8,1.0,,,,,"
    table.write_text(f"{EXCERPT}{row}\n", encoding="utf-8")
    assert report(capsys, "--table", table)["sources"]["x"]["rows"] == 1


def test_only_what_is_fitted_can_be_written(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--table", str(table), "--write", "x.json"]) != 0
    assert "--write needs --fit" in capsys.readouterr().err


def test_sweeps_that_are_predicted_alike_have_no_order(table: Path) -> None:
    one = read_rows(table)[0][0]

    def tau(*predicted: float) -> float | None:
        rows = (one._replace(seconds=float(place)) for place in range(1, 5))
        return summarise([Prediction(*pair, 1.0) for pair in zip(rows, predicted, strict=True)])["tau"]

    assert (tau(1, 2, 3, 4), tau(4, 3, 2, 1)) == (1, -1)
    assert tau(1, 2, 4, 3) == pytest.approx(4 / 6)
    assert tau(1, 1, 1, 1) is None


@pytest.mark.skipif(not TABLE.exists(), reason="the table of measurements is not here")
def test_the_shipped_coefficients_reach_their_targets(capsys: pytest.CaptureFixture[str]) -> None:
    told = report(capsys, "--table", TABLE)
    sources, devices = told["sources"], told["devices"]
    assert sources["arXiv:2104.04473 (Megatron SC21)"]["time_worst_error"] <= 0.05
    assert sources["arXiv:2210.02414 (GLM-130B)"]["time_worst_error"] <= 0.08
    nanotron = next(numbers for name, numbers in sources.items() if "nanotron" in name)
    assert nanotron["time_mean_error"] <= 0.25
    assert nanotron["time_median_error"] <= 0.1
    assert nanotron["memory_mean_error"] <= 0.13
    assert nanotron["tau"] >= 0.7
    assert devices["NVIDIA/dgxc-benchmarking v25.04.02 (MIT), H100-80G bf16"]["time_mean_error"] <= 0.02
    assert devices["VIA-Research/vTrain data/ (MIT), A100 bf16"]["time_mean_error"] <= 0.03
    assert devices["VIA-Research/vTrain data/ (MIT), A100 bf16"]["tau"] >= 0.95
    assert devices["VIA-Research/vTrain data/ (MIT), A100 bf16"]["pick_slowdown"] <= 0.02
