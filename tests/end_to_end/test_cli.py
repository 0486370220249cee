"""The command `pangu`: every program under one name."""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

import pangu
from pangu import __version__
from pangu.cli import FLAGS, complete, completions, file_of, launched, main
from pangu.common.commands import PROGRAMS, as_typed
from pangu.common.errors import PrintableFormatter
from pangu.config.build import build
from pangu.config.help import START
from pangu.config.schema import RunConfig
from pangu.training.command import compose
from tests.configs import config
from tests.spawn import repository
from tools.inspect_data import main as inspect_data

FAILING = (
    *(
        "train x",
        "plan x",
        "data none",
        "inspect none",
        "report none",
        "calibrate --output none",
        "launch none",
    ),
    *("generate none --prompt a", "evaluate none --task afqmc --data none", "translate --from megatron none", "tran x"),
    *("prepare --input none --output none --tokenizer bytes", "tokenizer --input none --output none --vocab-size 99"),
    "convert --from pangu --to huggingface --input none --output none",
)
"""Command lines that are refused after their options were read; the command `tran` does not exist."""
HELP = str(pangu.__doc__).partition("\n")[0]


def test_every_program_of_a_checkout_has_a_command() -> None:
    files = {path.resolve() for folder in ("tools", "scripts") for path in (repository() / folder).glob("*.py")}
    assert {file_of(command) for command in PROGRAMS} == {*files, repository() / "pangu" / "pretrain.py"}


def test_messages_name_the_commands_of_an_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"{START}\nsee /home/me/tools/plan.py; written by tools/preprocess_data.py"
    monkeypatch.setattr(sys, "argv", [str(repository() / "pretrain.py")])
    assert as_typed(text) == text
    for started in ("pangu train", str(repository() / "pangu/pretrain.py")):
        monkeypatch.setattr(sys, "argv", [started])
        said = as_typed(text)
        assert "\n  pangu launch --nproc-per-node=2 train +config=quickstart\n" in said
        assert "\n  pangu train --help\n" in said
        assert said.endswith("see /home/me/tools/plan.py; written by pangu prepare")
        assert "pretrain.py" not in said


def test_a_recipe_needs_no_plus() -> None:
    assert config("+config=gpt2_124m") == build(RunConfig, compose(repository() / "configs", ["config=gpt2_124m"]))


@pytest.mark.parametrize(
    ("line", "word", "found"),
    [
        ("pangu tr", "tr", ["train", "translate"]),
        ("pangu launch --nproc-per-node=2 gen", "gen", ["generate"]),
        ("pangu train +config=pangu_1", "pangu_1", ["pangu_13b"]),
        ("pangu train +config=pangu_1", "+config=pangu_1", ["+config=pangu_13b"]),
        ("pangu plan optimizer.weight_d", "optimizer.weight_d", ["optimizer.weight_decay="]),
        ("pangu launch --nproc-per-node=2 train optimizer=l", "l", ["lamb"]),
        ("pangu generate --pro", "--pro", ["--prompt", "--prompts"]),
        ("pangu train --h", "--h", ["--help"]),
        ("pangu convert runs/x", "runs/x", []),
    ],
)
def test_a_shell_completes_what_it_replaces(
    line: str, word: str, found: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    complete(line, word)
    assert capsys.readouterr().out.split() == found


@pytest.mark.parametrize("command", [command for command in PROGRAMS if command not in ("train", "launch")])
def test_a_shell_completes_the_options_of_a_program(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that its parser has, but negations."""
    parsers: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        parsers.append(parser)
        parser.exit()

    for reads in ("parse_args", "parse_known_args", "parse_intermixed_args"):
        monkeypatch.setattr(argparse.ArgumentParser, reads, keep)
    with pytest.raises(SystemExit):
        import_module(PROGRAMS[command][0].replace("/", ".")).parse([])
    options = {name for action in parsers[0]._actions for name in action.option_strings if name.startswith("--")}
    options = {name for name in options if name.replace("--no-", "--") not in options - {name}}
    found = set(completions(f"pangu {command} --"))
    assert options <= found
    assert found - options <= {"--whole-files"}  # of a function that evaluate calls for other options
    assert len(options) > 1


@pytest.mark.parametrize("given", [["pangu", "mu", "="], []])
def test_zsh_gives_no_words(
    given: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its `bashcompinit` (5.9) evaluates the command as it is, and replaces whole words."""
    monkeypatch.setenv("COMP_LINE", "pangu train optimizer=mu")
    monkeypatch.setattr(sys, "argv", ["pangu", "complete", *given])
    main()
    assert capsys.readouterr().out == ("muon\n" if given else "optimizer=muon\n")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--nproc-per-node=2", "train", "+config=quickstart"],
            ["--nproc-per-node=2", "-m", "pangu", "train", "+config=quickstart"],
        ),
        (["--nnodes", "2", "generate", "runs/x"], ["--nnodes", "2", "-m", "pangu", "generate", "runs/x"]),
        (["--nproc-per-node=2", "./train", "x"], ["--nproc-per-node=2", "./train", "x"]),
        (
            ["--log-dir", "data", "-r3", "--standalone", "train"],
            ["--log-dir", "data", "-r3", "--standalone", "-m", "pangu", "train"],
        ),
        (["--log-dir=data", "own.py", "train"], ["--log-dir=data", "own.py", "train"]),
        (["--nnodes", "2"], ["--nnodes", "2"]),
    ],
)
def test_a_launcher_starts_commands_and_files(words: list[str], expected: list[str]) -> None:
    """The first word that is no option of torchrun, nor the value of one, is the program."""
    assert launched(words) == expected


def test_torchruns_options_without_a_value_are_known() -> None:
    actions = get_args_parser()._actions
    assert {name for action in actions if action.nargs == 0 for name in action.option_strings} <= FLAGS


@pytest.mark.parametrize("command", [command for command in PROGRAMS if command not in ("train", "launch")])
def test_help_names_commands_instead_of_files(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pangu", command, "--help"])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(SystemExit, match="0"):
        main()
    said = capsys.readouterr().out
    assert said.startswith(f"usage: pangu {command} ")
    assert not re.search(r"pretrain\.py|(tools|scripts)/\w+\.py", said)


@pytest.mark.parametrize("words", [["--help"], ["--nproc-per-node=2", "-h"], ["--nproc-per-node", "2", "--help"]])
def test_the_launchers_help_is_its_own(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pangu", "launch", *words])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(SystemExit, match="0"):
        main()
    said = capsys.readouterr().out
    assert said.startswith("usage: pangu launch [OPTION ...] PROGRAM ")
    assert "\n  pangu launch --nproc-per-node=8 train +config=" in said
    assert "\nPROGRAM: train, plan, prepare, " in said
    assert "\n  --spares=N " in said
    assert "`torchrun --help`" in said
    assert len(said.splitlines()) < 30
    assert not re.search(r"pretrain\.py|(tools|scripts)/\w+\.py", said)


def test_the_launcher_refuses_options_with_one_line_of_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    for words, rule in {
        ("--nproc-per-node=2",): "the following arguments are required: training_script",
        ("--nproc-per-node", "2", "--spares", "x", "train"): "argument --spares: x: must be a number of processes",
    }.items():
        monkeypatch.setattr(sys, "argv", ["pangu", "launch", *words])
        with pytest.raises(SystemExit, match="2"):
            main()
        usage, error = capsys.readouterr().err.splitlines()
        assert usage == "usage: pangu launch [OPTION ...] PROGRAM [ARGUMENT ...]"
        assert error.startswith(f"pangu launch: error: {rule}")


@pytest.mark.parametrize(
    ("words", "near"),
    [(("--nproc-per-node=2", "trian", "train.steps=2"), "use train, or"), (("own.py",), "use train, plan, prepare, ")],
)
def test_the_launcher_names_a_program_that_does_not_exist_once(
    words: tuple[str, ...], near: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pangu", "launch", *words])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(SystemExit, match="2"):
        main()
    (said,) = capfd.readouterr().err.splitlines()
    assert said.startswith(f"pangu launch: error: {words[min(1, len(words) - 1)]}: no such program: {near}")
    assert said.endswith(", or the path of a Python file")


def test_translations_and_logs_name_commands_instead_of_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257"
    batch = "--micro-batch-size 4 --global-batch-size 64 --lr 6e-4 --train-iters 1000 --split 99,1,0"
    monkeypatch.setattr(sys, "argv", ["pangu", "translate", *f"--from megatron {sizes} {batch}".split()])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert (
        "--split 99,1,0: held-out text is in separate files; use --holdout of pangu prepare" in capsys.readouterr().out
    )
    record = logging.LogRecord("pangu", logging.INFO, "", 0, "without scripts/launch.py --spares", (), None)
    assert PrintableFormatter("%(message)s").format(record) == "without pangu launch --spares"


@pytest.mark.parametrize("line", FAILING)
def test_a_message_starts_as_those_of_argparse(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {"tran", *PROGRAMS} == {line.partition(" ")[0] for line in FAILING}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pangu", *line.split()])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    with pytest.raises(SystemExit, match="2"):
        main()
    command = line.partition(" ")[0] if "tran" not in line.split() else ""
    assert capsys.readouterr().err.startswith(f"pangu {command}".strip() + ": error: ")


def test_the_message_of_a_file_starts_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/inspect_data.py"])
    assert inspect_data([str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("inspect_data.py: error: ")


@pytest.mark.parametrize(("words", "answer"), [(["--version", "x"], __version__), (["--help", "train"], HELP)])
def test_further_words_change_no_answer(
    words: list[str], answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pangu", *words])
    main()
    assert capsys.readouterr().out.startswith(answer)


@pytest.mark.parametrize("point", ["8", "x", "-1", "", "9" * 5000])
def test_a_shell_may_give_any_place(
    point: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", "pangu tr")
    monkeypatch.setenv("COMP_POINT", point)
    monkeypatch.setattr(sys, "argv", ["pangu", "complete", "pangu", "tr", "pangu"])
    main()
    assert capsys.readouterr().out.split() == ["train", "translate"]


@pytest.mark.parametrize("words", [["pretrain.py"], ["tools/plan.py", "--help"], ["-c", "import pangu_train"]])
def test_another_package_named_pangu_is_named(tmp_path: Path, words: list[str]) -> None:
    """The last is how pip's script of the command `pangu` begins."""
    (tmp_path / "pangu.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{repository()}"}
    line = [sys.executable, "-P", *words]
    done = subprocess.run(line, cwd=repository(), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"{Path(words[0]).name}: error: {tmp_path}/pangu.py is another package named pangu: uninstall it "
    )
    assert done.stderr.count("\n") == 1
