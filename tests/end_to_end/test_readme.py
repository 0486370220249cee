"""The commands of the READMEs are commands that work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.configs import RECIPES, config
from tests.end_to_end.commands import command
from tests.spawn import repository

READMES = [repository() / "README.md", repository() / "README.zh.md"]


def commands(readme: Path) -> list[list[str]]:
    """The words of each indented command, continued lines joined."""
    text = readme.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^ {4}((?:python|torchrun|pip) .*)$", text, re.MULTILINE)
    return [shlex.split(line) for line in lines]


def test_both_languages_show_the_same_commands() -> None:
    assert commands(READMES[0]) == commands(READMES[1])
    assert len(commands(READMES[0])) >= 9


def test_the_two_commands_of_the_contract_stand_there() -> None:
    text = READMES[0].read_text(encoding="utf-8")
    assert "\n    pip install -e . && torchrun --nproc-per-node=2 pretrain.py +config=quickstart\n" in text
    assert '\n    pip install -e ".[test]" && pytest\n' in text


def test_both_warn_of_open_ports() -> None:
    for readme, words in zip(READMES, ("closed network", "封闭网络"), strict=True):
        (warning,) = [text for text in readme.read_text(encoding="utf-8").split("\n\n") if words in text]
        assert "`MASTER_PORT`" in warning


@pytest.mark.parametrize("words", commands(READMES[0]), ids=" ".join)
def test_every_pretrain_command_composes(words: list[str]) -> None:
    if "pretrain.py" in words:
        overrides = [word for word in words[words.index("pretrain.py") + 1 :] if not word.startswith("--")]
        config(*(word for word in overrides if word != "job"))


def test_every_preset_is_in_the_table() -> None:
    for readme in READMES:
        text = readme.read_text(encoding="utf-8")
        assert all(f"| `{recipe}` |" in text for recipe in RECIPES)


def test_own_text_from_tokenizer_to_training(tmp_path: Path) -> None:
    """The README's way to train on text of one's own, on a small scale."""
    documents = [f"第{i}篇文档。今天天气很好，我们去公园散步。\nA line of English, number {i}." for i in range(300)]
    text = tmp_path / "corpus.txt"
    text.write_text("\n\n".join(documents), encoding="utf-8")
    steps = [
        f"tools/train_tokenizer.py --input {text} --output {tmp_path}/tokenizer --vocab-size 300 --jieba",
        f"tools/preprocess_data.py --input {text} --output {tmp_path}/corpus --holdout 0.1 "
        f"--tokenizer pangu --tokenizer-path {tmp_path}/tokenizer.model",
        "pretrain.py +config=pangu_350m model=pangu_quickstart model.vocab=300 model.sequence=32 batch.global_size=8 "
        f"data.train=[{tmp_path}/corpus] data.validation=[{tmp_path}/corpus-validation] train.steps=3 "
        f"validation.every=3 metrics.wandb=off train.output={tmp_path}/run "
        f"lr_schedule.warmup_steps=1 "
        f'data.tokenizer={{kind:pangu,path:{tmp_path}/tokenizer.model}} sample.tokens=5 sample.prompts=["今天"]',
    ]
    for step in steps:
        done = command(*step.split())
        assert done.returncode == 0, done.stderr
    assert "sampled: '今天" in done.stderr
    assert "held-out loss" in done.stderr
