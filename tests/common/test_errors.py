"""What a command says of what the user can mend."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from pangu.common.errors import LostError, UserError, reading
from pangu.common.exit_status import RETRYABLE, exit_status
from pangu.report.clusters import load_cluster
from pangu.report.runs import open_run
from pangu.training.command import refuse_long_integers
from tests.end_to_end.commands import called

LONG = "a" * 300
"""Longer than a file system's names."""


def test_statuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/tool.py"])

    def wrong() -> None:
        raise UserError("no \x1b[31mred")

    def lost() -> None:
        raise LostError("rank 1 is gone")

    assert exit_status(lambda: None) == 0
    assert exit_status(lost, is_first=lambda: False) == RETRYABLE == 143
    assert capsys.readouterr().err == "tool.py: error: rank 1 is gone\n"
    assert exit_status(wrong) == 2
    assert capsys.readouterr().err == "tool.py: error: no \\x1b[31mred\n"
    with pytest.raises(OSError, match="a fault of the program"):
        exit_status(lambda: (_ for _ in ()).throw(OSError("a fault of the program")))


def test_torchruns_report_ends_with_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> None:
        raise UserError("model.heads = 7: must divide")

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    assert exit_status(wrong) == 2
    report = str(ChildFailedError("pretrain.py", {0: ProcessFailure(0, 1, 2, str(path))}))
    assert "traceback : model.heads = 7: must divide\n" in report


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tools/inspect_checkpoint", [LONG]),
        ("tools/preprocess_data", ["--input", LONG, "--output", "x", "--tokenizer-path", "x"]),
        ("tools/convert_checkpoint", ["--from", "pangu", "--to", "huggingface", "--output", "x", "--input", LONG]),
        ("pretrain", ["data=synthetic", "validation.every=0", "sample.tokens=0", f"checkpoint.resume={LONG}"]),
        ("pretrain", ["data=indexed", "validation.every=0", "sample.tokens=0", f"data.train=[{LONG}]"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_path_that_cannot_be_is_one_message(
    name: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = called(name, *words)
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "a" * 60 in last
    assert last.endswith("File name too long")


def test_long_integers_are_told_in_words(tmp_path: Path) -> None:
    """Python reads 4,300 digits; what it says of more is for programmers."""
    cluster = tmp_path / "c.yaml"
    cluster.write_text(f"name: {'9' * 5000}\n")
    with pytest.raises(UserError, match=r"c\.yaml: cannot be read as a cluster"):
        load_cluster(cluster)
    with (
        pytest.raises(UserError, match=r"is no TOML \(an integer with more than 4,300 digits\)"),
        reading("x", ValueError, rule="is no TOML"),
    ):
        tomllib.loads(f"a = {'9' * 5000}")
    with pytest.raises(UserError, match=r"train\.steps=9+\.\.\.: has an integer of more than 4,300 digits"):
        refuse_long_integers(["train.lr=1", "train.steps=" + "9" * 4301])


def test_references_in_yaml_stand_for_a_bounded_number_of_values(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}", *[f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}, z: *a{n - 1}}}" for n in range(1, 30)]]
    for name in ("config.yaml", "c.yaml"):
        (tmp_path / name).write_text("\n".join(lines))
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match=r"expand to more than 100,000 values"):
        load_cluster(tmp_path / "c.yaml")
    with pytest.raises(UserError, match=r"more than 10,000 settings"):
        open_run(tmp_path, "run")
