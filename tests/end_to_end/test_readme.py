"""The commands of the READMEs and of docs are commands that work."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser as hydra_parser
from torch.distributed.run import get_args_parser

from pangu.config.help import show_help
from pangu.config.layout_checks import layout_problems
from pangu.training.process import Heartbeat
from tests.configs import RECIPES, config
from tests.end_to_end.commands import called, metrics
from tests.spawn import repository

READMES = [repository() / "README.md", repository() / "README.zh.md"]
DOCS = sorted((repository() / "docs").glob("*.md"))


def commands(readme: Path) -> list[list[str]]:
    """The words of each indented command, continued lines joined and comments left out."""
    text = readme.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ {4}((?:python|torchrun|pip) .*)$", text, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_both_languages_show_the_same_commands() -> None:
    assert commands(READMES[0]) == commands(READMES[1])
    assert len(commands(READMES[0])) >= 9


@pytest.mark.parametrize("chinese", [page for page in DOCS if page.name.endswith(".zh.md")], ids=lambda path: path.name)
def test_what_a_chinese_page_shows_stands_in_the_english_one(chinese: Path) -> None:
    english = commands(chinese.with_name(chinese.name.replace(".zh", "")))
    assert [words for words in commands(chinese) if words not in english] == []


def test_the_two_commands_of_the_contract_stand_there() -> None:
    text = READMES[0].read_text(encoding="utf-8")
    assert "\n    pip install -e . && torchrun --nproc-per-node=2 pretrain.py +config=quickstart\n" in text
    assert '\n    pip install -e ".[test]" && pytest\n' in text


def test_both_warn_of_open_ports() -> None:
    for readme, words in zip(READMES, ("closed network", "封闭网络"), strict=True):
        (warning,) = [text for text in readme.read_text(encoding="utf-8").split("\n\n") if words in text]
        assert "`MASTER_PORT`" in warning


def parsed(words: list[str], processes: int = 1) -> None:
    """Have a command read by the parser of what it names, and its layout checked. Raises or exits if it is refused."""
    if "&&" in words:
        place = words.index("&&")
        parsed(words[:place])
        parsed(words[place + 1 :])
    elif words[0] == "torchrun" or words[:2] == ["python", "scripts/launch.py"]:
        options = get_args_parser().parse_args(words[1 if words[0] == "torchrun" else 2 :])
        processes = int(options.nproc_per_node) * int(options.nnodes.split(":")[0])
        parsed(["python", options.training_script, *options.training_script_args], processes)
    elif words[:2] == ["python", "pretrain.py"] and "--help" in words:
        assert show_help(words[2:], repository() / "configs")
    elif words[:2] == ["python", "pretrain.py"]:
        options, overrides = hydra_parser().parse_known_args(words[2:])
        assert not layout_problems(config(*options.overrides, *overrides), processes)
    elif words[0] == "python" and words[1] != "-m":
        module = import_module(words[1].removesuffix(".py").replace("/", "."))
        module.parse(words[2:])
    elif words[:2] == ["python", "-m"]:
        assert find_spec(words[2]) is not None  # its arguments are lm-eval's
    else:
        extras = re.findall(r"\[(.*)\]", words[-1])
        known = tomllib.loads((repository() / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words in (["pytest"], ["pip", "install", "-e", words[-1]])
        assert all(extra in known for each in extras for extra in each.split(","))


ONE_OF_EACH = [[*words] for words in {tuple(words): 0 for page in (*READMES, *DOCS) for words in commands(page)}]


@pytest.mark.parametrize("words", ONE_OF_EACH, ids=" ".join)
def test_every_command_is_understood(words: list[str]) -> None:
    parsed(words)


@pytest.mark.parametrize(
    "wrong", ["python tools/plan.py --shard=1", "torchrun --nproc=2 scripts/generate.py --tensor 2"]
)
def test_a_command_that_is_not_understood_is_found(wrong: str) -> None:
    with pytest.raises(SystemExit):
        parsed(shlex.split(wrong))


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.name)
def test_the_heartbeats_that_are_shown_are_of_runs_that_hang(readme: Path, tmp_path: Path) -> None:
    for doing, minutes in (("training", 20), ("ended", 20), ("failed", 20), ("saving", 1)):
        folder = tmp_path / "runs" / f"{doing}_{minutes}"
        folder.mkdir(parents=True)
        with Heartbeat(folder) as heartbeat:
            heartbeat.beat(3, doing)
            before = (folder / "heartbeat.json").read_text()
        if doing not in ("ended", "failed"):
            (folder / "heartbeat.json").write_text(before)
        then = time.time() - 60 * minutes
        os.utime(folder / "heartbeat.json", (then, then))
    (line,) = re.findall(r"^ {4}(find .*)$", readme.read_text(encoding="utf-8"), re.MULTILINE)
    shown = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert shown == "runs/training_20/heartbeat.json\n"


def test_every_preset_is_in_the_table() -> None:
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        assert all(f"| `{recipe}` |" in text for recipe in RECIPES)


def test_own_text_from_tokenizer_to_training(tmp_path: Path) -> None:
    """The README's way to train on text of one's own and to go on, on a small scale."""
    documents = [f"第{i}篇文档。今天天气很好，我们去公园散步。\nA line of English, number {i}." for i in range(300)]
    text = tmp_path / "corpus.txt"
    text.write_text("\n\n".join(documents), encoding="utf-8")
    training = (
        "pretrain.py +config=pangu_350m model=pangu_quickstart model.vocab=300 model.sequence=32 batch.global_size=8 "
        f"data.train=[{tmp_path}/corpus] data.validation=[{tmp_path}/corpus-validation] validation.every=3 "
        f"metrics.wandb=off train.output={tmp_path}/run lr_schedule.warmup_steps=1 "
        f'data.tokenizer={{kind:pangu,path:{tmp_path}/tokenizer.model}} sample.tokens=5 sample.prompts=["今天"] '
    )
    steps = [
        f"tools/train_tokenizer.py --input {text} --output {tmp_path}/tokenizer --vocab-size 300 --jieba",
        f"tools/preprocess_data.py --input {text} --output {tmp_path}/corpus --holdout 0.1 "
        f"--tokenizer pangu --tokenizer-path {tmp_path}/tokenizer.model",
        f"tools/inspect_data.py {tmp_path}/corpus --verify --samples 1 --sequence 32",
        f"{training} train.steps=3",
        f"{training} train.steps=6",
    ]
    for step in steps:
        script, *words = step.split()
        done = called(script.removesuffix(".py"), *words)
        assert done.returncode == 0, done.stderr
    assert "sampled: '今天" in done.stderr
    assert "held-out loss" in done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert "(step 3)" in done.stderr
