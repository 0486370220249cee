"""scripts/evaluate.py as its users start it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.evaluate import main
from tests.end_to_end.commands import metrics, on_ranks


def evaluate(folder: Path, *words: str) -> int | str | None:
    """The command's status, in this process."""
    try:
        return main([str(folder), "--data", f"{folder}/benchmarks", *words])
    except SystemExit as end:
        return end.code


def results(path: Path) -> dict[str, dict[str, Any]]:
    """Task -> its figures."""
    return {found["task"]: found for found in json.loads(path.read_text(encoding="utf-8"))["results"]}


def test_figures_beside_the_published_ones(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On one process, on two, and as they were at the end of training."""
    text = tmp_path / "corpus.txt"
    text.write_text("One document.\n\nAnother one, a little longer.\n", encoding="utf-8")
    words = ("--task", "afqmc", "lambada", "cmrc2018", "perplexity", "--input", str(text))
    output = tmp_path / "new" / "one.json"
    assert evaluate(folder, *words, "--output", str(output)) == 0
    one = results(output)
    row = next(line for line in capsys.readouterr().out.splitlines() if "afqmc" in line)
    assert [cell.strip() for cell in row.split("│")[1:-1]][1:4] == ["0", "3", "accuracy"]
    assert "59.29" in row
    assert "65.76" in row
    assert one["afqmc"]["published"] == {"PanGu-α 2.6B": {"accuracy": 59.29}, "PanGu-α 13B": {"accuracy": 65.76}}
    assert one["cmrc2018"]["measures"].keys() == {"exact_match", "f1"}
    assert one["perplexity"]["questions"] == 2
    assert one["perplexity"]["measures"].keys() == {"perplexity", "bits_per_byte"}
    for axis in ("data", "pipeline"):
        output = tmp_path / f"{axis}.json"
        layout = () if axis == "data" else (f"--{axis}", "2")
        data = ("--data", f"{folder}/benchmarks")
        done = on_ranks(2, "scripts/evaluate", folder, *data, *words, *layout, "--output", output)
        assert done.returncode == 0, done.stderr
        for task, found in results(output).items():
            # fp32
            assert found["measures"] == pytest.approx(one[task]["measures"], rel=1e-5), task
    trained = metrics(folder)[-1]["evaluation"]
    theirs = {
        f"{task}/{name}": figure for task in ("afqmc", "lambada") for name, figure in one[task]["measures"].items()
    }
    assert trained == pytest.approx(theirs, rel=1e-5)


def test_a_second_start_goes_on_and_another_setup_is_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, kept = tmp_path / "results.json", tmp_path / "results.json.answers.jsonl"
    words = ("--task", "afqmc", "--output", str(output))
    assert evaluate(folder, *words) == 0
    lines = kept.read_text(encoding="utf-8").splitlines()
    assert sorted(json.loads(line).get("id", "") for line in lines) == ["", "dev-0", "dev-1", "dev-2"]
    # a killed process left one answer, which is not asked again, and half of another
    answer = json.loads(lines[1]) | {"figures": {"accuracy": 5.0}}
    kept.write_text("\n".join([lines[0], json.dumps(answer), lines[2][:20]]), encoding="utf-8")
    assert evaluate(folder, *words) == 0
    again = kept.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in again] == [json.loads(lines[0]), answer, *map(json.loads, lines[2:])]
    others = sum(json.loads(line)["figures"]["accuracy"] for line in lines[2:])
    assert results(output)["afqmc"]["measures"]["accuracy"] == pytest.approx(100 * (5 + others) / 3)
    assert evaluate(folder, *words, "--shots", "2") == 2
    message = "results.json.answers.jsonl has answers for other options (shots: 0 in the file, 2 now)"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--task", "afqcm"), "task afqcm: unknown task; use one of afqmc, cmnli"),
        (("--task", "chid", "--shots", "few"), "no train.json here"),
        (
            ("--task", "afqmc", "--template", "{label}{answer}"),
            "template '{label}{answer}': must contain {answer} once",
        ),
        (("--task", "perplexity"), "--task perplexity needs --input"),
        (("--task", "afqmc", "--shots", "some"), "--shots some: must be a number, or few"),
        (("--task", "afqmc", "--tensor", "2"), "needs a multiple of 2 processes, got 1"),
    ],
)
def test_mistakes_end_in_one_message(
    folder: Path, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate(folder, *words) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_texts_and_strides_without_a_perplexity(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty file, a stride that would leave tokens out; and the recipe of Hugging Face gives another figure."""
    empty, text = tmp_path / "empty.txt", tmp_path / "corpus.txt"
    empty.write_text("\n \n", encoding="utf-8")
    text.write_text("def f(x):\n    return x + 1\n" * 40, encoding="utf-8")
    words = ("--task", "perplexity", "--input")
    assert evaluate(folder, *words, str(text), str(empty)) == 2
    assert f"--input {empty}: has no text to compute the perplexity of" in capsys.readouterr().err
    assert evaluate(folder, *words, str(text), "--stride", "33") == 2
    assert "--stride 33: would skip tokens, as the window has model.sequence = 32" in capsys.readouterr().err
    found = []
    for recipe in ("own", "huggingface"):
        assert evaluate(folder, *words, str(text), "--recipe", recipe, "--output", f"{tmp_path}/{recipe}.json") == 0
        found.append(results(tmp_path / f"{recipe}.json")["perplexity"]["measures"])
    assert found[0]["perplexity"] == pytest.approx(found[1]["perplexity"], rel=0.1)
    assert found[0]["perplexity"] != found[1]["perplexity"]
    assert found[1].keys() == {"perplexity"}
