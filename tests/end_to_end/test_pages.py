"""The commands of the README and of the pages of docs are commands that work, in both languages."""

from __future__ import annotations

import doctest
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from contextlib import chdir, nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
from filelock import FileLock

import pangu
from docs.line_breaks import join_lines
from pangu.common.commands import PROGRAMS
from pangu.common.errors import ConfigError
from pangu.config.help import show_help
from pangu.config.layout_checks import layout_problems
from pangu.data.stdlib import StdlibPaths
from pangu.interop.formats.fields import load_table
from pangu.interop.formats.huggingface_config import kinds
from pangu.interop.formats.megatron_names import table as megatron_table
from pangu.interop.formats.stored import inexpressible
from pangu.models.size import num_parameters
from pangu.schedule.orders import SCHEDULES
from pangu.training.process import Heartbeat, save_nodes
from tests.configs import RECIPES, config
from tests.dryrun.conftest import commands_share_it, process  # noqa: F401
from tests.end_to_end.commands import called, metrics, on_ranks
from tests.end_to_end.commands import command as python
from tests.end_to_end.pages import (
    NOT_RUN,
    PAGES,
    Command,
    cheap,
    chinese,
    commands,
    is_run,
    run_python_block,
    shell_lines,
    shown,
    two_steps,
)
from tests.interop.test_formats import given, weights
from tests.interop.test_formats_transformers import write_openpangu
from tests.schedule.pictures import draw_schedule
from tests.schedule.test_draw import texts
from tests.spawn import repository

README, DOCS = PAGES[0], {page.stem: page for page in PAGES[1:]}
FILES = {command: file for command, (file, _) in PROGRAMS.items()}
ENGLISH_ONLY = {"reference"}
WITH_PROSE = [page for page in PAGES if page.stem not in ENGLISH_ONLY]
PREPARING = ("tools/train_tokenizer.py", "tools/preprocess_data.py")
PREPARED = [words for words in commands(DOCS["getting-started"]) if words[1] in PREPARING]
"""What is carried out once for all pages."""
EXAMPLES = [f"examples/{path.stem}" for path in (repository() / "examples").glob("*.py")]
EACH = list(dict.fromkeys(tuple(words) for page in PAGES for words in commands(page)))


@pytest.mark.parametrize("page", WITH_PROSE, ids=lambda page: page.stem)
def test_both_languages_show_the_same_commands(page: Path) -> None:
    """So those of both are carried out."""
    english, other = ([" ".join(each) for each in commands(one)] + shell_lines(one) for one in (page, chinese(page)))
    assert sorted(other) == sorted(english)


@pytest.mark.parametrize("page", WITH_PROSE, ids=lambda page: page.stem)
def test_both_languages_have_the_same_sections_and_figures_in_tables(page: Path) -> None:
    """Figures are numbers with a point, a comma or a unit; what is counted in millions is written otherwise there."""
    texts = [one.read_text(encoding="utf-8") for one in (page, chinese(page))]
    english, other = (re.findall(r"^(?:#+ |\|)", text, re.MULTILINE) for text in texts)
    assert english == other
    texts = [re.sub(r"[\d.,]+ (?:[bm]illion|[万亿])", "", text) for text in texts]
    figure = r"\d[\d,]*\.\d+|\d+(?:,\d{3})+|\d+(?= (?:%|GiB))"
    rows = (re.findall(r"^\|.*", text, re.MULTILINE) for text in texts)
    english, other = ([sorted(re.findall(figure, row)) for row in found] for found in rows)
    assert english == other


ONE_MEANING = {"动量": "momentum", "一阶矩": "moments", "二阶矩": "moment"}
"""Words of Chinese pages, and those that the English page then has."""
SYNONYMS = r"词元|令牌|词汇表|归约|聚合|汇聚|通讯|梯度累积|重算|空泡|热身|下放|矩阵乘积|[\u4e00-\u9fff] ?kernel"
"""Words for which the glossary has another one."""


@pytest.mark.parametrize("page", WITH_PROSE, ids=lambda page: page.stem)
def test_a_word_of_a_chinese_page_means_one_thing(page: Path) -> None:
    english, text = (one.read_text(encoding="utf-8") for one in (page, chinese(page)))
    prose = "\n".join(line for line in text.splitlines() if not line.startswith("    "))
    assert {word for word, meaning in ONE_MEANING.items() if word in text and meaning not in english} == set()
    assert re.findall(SYNONYMS, prose) == []


def test_a_command_is_carried_out_or_has_a_reason_and_names_files_that_exist() -> None:
    shell = [line for page in PAGES for line in shell_lines(page)]
    lines = [*shell, *map(" ".join, EACH)]
    assert [start for start in NOT_RUN if not any(line.startswith(start) for line in lines)] == []
    assert [words for words in EACH if Command.of(list(words)) is None and is_run(" ".join(words))] == []
    named = r"(?<![\w/])(?:scripts|tools|configs|docs|examples|tests)/[\w./*-]+\w"
    for line in (*shell, *NOT_RUN.values()):
        for path in re.findall(named, line):
            assert list(repository().glob(path)), line


def test_the_two_commands_of_the_contract_stand_there() -> None:
    text = README.read_text(encoding="utf-8")
    assert (
        "\n    pip install -e . && python scripts/launch.py --nproc-per-node=2 pretrain.py +config=quickstart\n" in text
    )
    assert '\n    pip install -e ".[test]" && pytest\n' in text


@pytest.mark.parametrize("page", [page for page in WITH_PROSE if page != README], ids=lambda page: page.stem)
def test_a_page_leads_to_its_other_language_and_has_a_line_to_it_on_the_first_page(page: Path) -> None:
    other = chinese(page)
    assert f"[中文]({other.name})" in page.read_text(encoding="utf-8")
    assert f"[English]({page.name})" in other.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*PAGES, *map(chinese, WITH_PROSE)], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", WITH_PROSE, ids=lambda page: page.stem)
def test_who_has_no_checkout_is_told_the_commands_of_a_page(page: Path) -> None:
    """Getting started has the table of all programs, to which every page with one leads."""
    ours = [words for words in commands(page) if "pretrain_gpt.py" not in words]  # Megatron's
    programs = {made.program for made in map(Command.of, ours) if made is not None}
    assert programs - {*FILES.values(), "benchmarks/planner_accuracy/__main__"} <= set(EXAMPLES)
    for one in (page, chinese(page)):
        text = one.read_text(encoding="utf-8")
        if page.stem == "getting-started":
            rows = re.findall(r"^\| `python (\S+)\.py` \| `pangu (\w+)` \|", text, re.MULTILINE)
            assert rows == [(file, command) for command, file in FILES.items()]
        elif programs & {*FILES.values()}:
            home = DOCS["getting-started"] if one == page else chinese(DOCS["getting-started"])
            assert f"{home.name}#{'without-a-checkout' if one == page else '不用源码目录'})" in text


def test_both_warn_of_open_ports() -> None:
    for page, words in ((DOCS["faults"], "closed network"), (chinese(DOCS["faults"]), "封闭网络")):
        (warning,) = [text for text in page.read_text(encoding="utf-8").split("\n\n") if words in text]
        assert "`MASTER_PORT`" in warning


def test_every_preset_is_in_the_table_with_its_number_of_parameters() -> None:
    numbers = {recipe: f"{num_parameters(config(f'+config={recipe}').model):,}" for recipe in RECIPES}
    for page in (DOCS["presets"], chinese(DOCS["presets"])):
        rows = re.findall(r"^\| `(\w+)` \|[^|]*\| ([\d,]+) \|", page.read_text(encoding="utf-8"), re.MULTILINE)
        assert dict(rows) == numbers


@pytest.mark.parametrize("page", [DOCS["families"], chinese(DOCS["families"])], ids=lambda page: page.name)
def test_every_family_leaves_as_the_page_says(page: Path) -> None:
    """The first type that can express a preset has the last column's class; Megatron has the model, or refuses it."""
    rows = re.findall(
        r"^\| [^|]+ \| (`[^|]+) \| [^|]+ \| ([^|]+) \| `(\w+)`", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(rows) == 12
    for presets, megatron, architecture in rows:
        for preset in re.findall(r"`(\w+)`", presets):
            model = config(f"+config={preset}").model
            first = next(kind for kind in kinds() if not inexpressible(model, kind))
            assert load_table("model_types")[first]["writes"]["architectures"] == [architecture], preset
            with nullcontext() if not megatron.startswith(("no", "不")) else pytest.raises(ConfigError):
                megatron_table(replace(model, layers=2), 1)


def understood(words: list[str]) -> None:
    """Have a command read by the parser of what it names, and its layout checked. Raises or exits if it is refused."""
    if "pretrain_gpt.py" in words:
        return  # Megatron's, translated by test_guides
    if words[0] == "pip" and words[-1] in (".", "dist/pangu_train-*.whl"):
        return  # tests/end_to_end/test_wheel.py
    if words[0] == "pip":
        extras = re.findall(r"\[(.*)\]", words[-1])
        known = tomllib.loads((repository() / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert words[:-1] == ["pip", "install", "-e"]
        assert all(extra in known for each in extras for extra in each.split(","))
        return
    command = Command.of(words)
    if command is None:
        assert words == ["pytest"] or find_spec(words[2]) is not None  # its arguments are lm-eval's
    elif command.trains:
        assert not layout_problems(config(*command.overrides), command.processes)
    elif command.program == "pretrain":
        assert "--cfg" in command.arguments or show_help(command.arguments, repository() / "configs")
    elif command.program.startswith("examples/"):
        assert not command.arguments
        assert (repository() / f"{command.program}.py").is_file()
    else:
        import_module(command.program.replace("/", ".")).parse(command.arguments)


@pytest.mark.parametrize("words", EACH, ids=" ".join)
def test_every_command_is_understood(words: tuple[str, ...]) -> None:
    understood(list(words))


@pytest.mark.parametrize(
    "wrong", ["python tools/plan.py --shard=1", "torchrun --nproc=2 scripts/generate.py --tensor 2"]
)
def test_a_command_that_is_not_understood_is_found(wrong: str) -> None:
    with pytest.raises(SystemExit):
        understood(shlex.split(wrong))


def carry_out(words: list[str]) -> None:
    """The cheap form of a command, in this process and the present folder."""
    command = Command.of(words)
    assert command is not None
    form = cheap(command)
    done = called(command.program, *form.words(command))
    assert done.returncode == 0, f"{' '.join(words)} {form.more}\n{done.stdout}\n{done.stderr}"


def carry_out_lines(lines: list[str]) -> None:
    """Lines for the shell as one script, in the present folder."""
    script = "\n".join(["set -eo pipefail", *lines]).replace("/tmp/", "")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", script], env=os.environ | {"PATH": path}, capture_output=True, check=False)
    assert done.returncode == 0, f"{script}\n{done.stderr.decode()}"


@pytest.fixture(scope="session")
def workplace(session_folder: Path, folder: Path, prepared: StdlibPaths) -> Path:
    """What the commands of pages ask for: the quickstart's run folder, text, and what the page that tells of text of
    one's own makes of it. Not to be changed."""
    place = session_folder / "workplace"
    with FileLock(place.with_suffix(".lock")):
        if not place.exists():
            place.mkdir()
            for name in ("quickstart", "pangu_2_6b", "hang"):
                shutil.copytree(folder, place / "runs" / name)
            (place / "runs/quickstart/benchmarks").rename(place / "benchmarks")
            (place / "runs/quickstart/data").symlink_to(prepared.folder)
            for name in ("hang", "quickstart"):
                (node,) = json.loads((folder / "nodes.json").read_text(encoding="utf-8"))
                save_nodes(place / "runs" / name, [node | {"rank": rank, "data": rank} for rank in range(4)])
            _write_text(place)
            with chdir(place):
                for words in PREPARED:
                    carry_out(words)
            _write_models(place)
            with chdir(place):
                run_python_block(DOCS["fine-tuning"])
            _write_downloads(place)
            for name in ("my/web", "my/books"):
                for path in (place / "my").glob("corpus.*"):
                    shutil.copy(path, (place / name).with_suffix(path.suffix))
    return place


def _write_text(place: Path) -> None:
    texts = [f"第{i}篇文档。今天天气很好，我们去公园散步。\nA line of English, number {i}." for i in range(300)]
    (place / "corpus").mkdir()
    (place / "corpus/corpus.txt").write_text("\n\n".join(texts), encoding="utf-8")
    (place / "corpus.txt").write_text("\n\n".join(texts[:3]), encoding="utf-8")
    (place / "texts.jsonl").write_text('{"text": "held out"}\n', encoding="utf-8")
    (place / "docs").mkdir()
    for name in ("evaluation.md", "evaluation.zh.md", "reference.md"):
        shutil.copy(repository() / "docs" / name, place / "docs")
    for number, text in enumerate(texts[:40]):  # --holdout chooses by a hash: two pages alone may all be on one side
        (place / "docs" / f"page{number}.md").write_text(text, encoding="utf-8")
    (place / "tools").symlink_to(repository() / "tools")
    shutil.copy(repository() / "tests/interop/launches/llama2_7b.sh", place / "train_7b.sh")
    (place / "prompts.jsonl").write_text('{"prompt": "def "}\n', encoding="utf-8")


def _write_models(place: Path) -> None:
    """Files of other programs."""
    transformers = pytest.importorskip("transformers")
    given("mindspore", place, weights())
    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 3, "max_position_embeddings": 24}
    mixtral = transformers.MixtralConfig(**sizes, **heads)
    transformers.MixtralForCausalLM(mixtral).save_pretrained(place / "Mixtral-8x7B-v0.1")
    qwen3 = transformers.Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=24)
    transformers.Qwen3ForCausalLM(qwen3).save_pretrained(place / "Qwen3-8B")


def _write_downloads(place: Path) -> None:
    """Small models in the place of published ones."""
    shutil.copytree(place / "tiny", place / "Qwen3-0.6B")
    write_openpangu(place / "openPangu-Embedded-1B", place / "my/tokenizer.model")


@pytest.mark.usefixtures("formulas", "commands_share_it")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_work(page: Path, workplace: Path, tmp_path: Path) -> None:
    """Lines for the shell, then the project's programs, one after another; a Chinese page has those of the English."""
    lines = list(filter(is_run, shell_lines(page)))
    mine = [words for words in commands(page) if is_run(" ".join(words)) and words not in PREPARED]
    if lines or mine:
        shutil.copytree(workplace, tmp_path, symlinks=True, dirs_exist_ok=True)
    with chdir(tmp_path):
        if lines:
            carry_out_lines(lines)
        for words in mine:
            carry_out(words)


@pytest.mark.parametrize("name", ["parallelism", "extending"])
def test_worked_examples_are_right(name: str) -> None:
    for page in (DOCS[name], chinese(DOCS[name])):
        with patch.dict(SCHEDULES), chdir(repository()):
            assert doctest.testfile(str(page), module_relative=False).failed == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures_are_what_is_drawn_today(name: str, tmp_path: Path) -> None:
    picture = repository() / "docs/pictures" / f"{name}.svg"
    assert texts(picture) == texts(draw_schedule(name, tmp_path))
    assert picture.stat().st_size < 150_000  # a pattern of dots alone takes more
    assert all(
        f"(pictures/{picture.name})" in page.read_text() for page in (DOCS["parallelism"], chinese(DOCS["parallelism"]))
    )


@pytest.mark.parametrize("page", [DOCS["faults"], chinese(DOCS["faults"])], ids=lambda path: path.name)
def test_the_heartbeats_that_are_shown_are_of_runs_that_hang(page: Path, tmp_path: Path) -> None:
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
    (line,) = [line for line in shown(page) if line.startswith("find ")]
    output = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False).stdout
    assert output == "runs/training_20/heartbeat.json\n"


def test_own_text_from_tokenizer_to_training(workplace: Path, tmp_path: Path) -> None:
    """The page's way to train on text of one's own and to go on, on a small scale."""
    (words,) = [words for words in commands(DOCS["getting-started"]) if "+config=pangu_350m" in words]
    command = Command.of(words)
    assert command is not None
    small = (
        *(
            "model=pangu_quickstart",
            "model.vocab=300",
            "model.sequence=32",
            "batch.global_size=8",
            "validation.every=3",
        ),
        *("metrics.wandb=off", f"train.output={tmp_path}/run", "lr_schedule.warmup_steps=1"),
        *("data.tokenizer={kind:pangu,path:my/tokenizer.model}", "sample.tokens=5", 'sample.prompts=["今天"]'),
    )
    with chdir(workplace):
        for steps in (3, 6):
            done = called("pretrain", *command.arguments, *small, f"train.steps={steps}")
            assert done.returncode == 0, done.stderr
    assert "sampled:\n    今天" in done.stderr
    assert "held-out loss" in done.stderr
    assert [line["step"] for line in metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert "(step 3)" in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("words", [words for words in EACH if "+config=quickstart" in words], ids=" ".join)
def test_a_run_of_the_quickstart_trains_on_as_many_processes_as_it_says(
    words: tuple[str, ...], workplace: Path, tmp_path: Path
) -> None:
    command = Command.of(list(words))
    assert command is not None
    form = two_steps(command)
    if form is None or command.processes == 1:
        return  # test_the_commands_of_a_page_work
    shutil.copytree(workplace, tmp_path, symlinks=True, dirs_exist_ok=True)
    with chdir(tmp_path):
        done = on_ranks(command.processes, "pretrain", *form.words(command))
    assert done.returncode == 0, done.stderr


def test_the_site_is_built_strictly_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocs_static_i18n", "mkdocstrings"):
        pytest.importorskip(package, reason="the extra docs is not installed")
    done = python("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "zh/index.html", "parallelism/index.html", "zh/parallelism/index.html"):
        assert not re.findall(r'(?:src|rel="stylesheet" href)="?https?:', (tmp_path / page).read_text(encoding="utf-8"))
    assert "<td><code>model.window</code></td>" in (tmp_path / "reference/index.html").read_text(encoding="utf-8")
    assert not re.search(
        "[\u4e00-\u9fff]\n[\u4e00-\u9fff]", (tmp_path / "zh/faults/index.html").read_text(encoding="utf-8")
    )


@pytest.mark.parametrize(
    ("html", "joined"),
    [
        ("<p>保存并\n停止</p>", "<p>保存并停止</p>"),
        ("<p>保存，\n<code>x</code></p>", "<p>保存，<code>x</code></p>"),
        ("<p>GPU\n（没有）</p>", "<p>GPU（没有）</p>"),
        (
            "<p>用<strong>很多</strong>\n  <a href='x'>内存</a></p>",
            "<p>用<strong>很多</strong><a href='x'>内存</a></p>",
        ),
        ("<p>一\n二\n三</p>", "<p>一二三</p>"),
        ("<p>用\nGPU\n训练</p>", "<p>用\nGPU\n训练</p>"),
        ("<p>two\nwords</p>", "<p>two\nwords</p>"),
        ("<pre><code># 一\n二</code></pre>", "<pre><code># 一\n二</code></pre>"),
    ],
)
def test_lines_of_chinese_text_are_joined_without_a_space(html: str, joined: str) -> None:
    assert join_lines(html) == joined


def test_the_reference_has_every_public_name() -> None:
    text = DOCS["reference"].read_text(encoding="utf-8")
    homes = pangu._MODULE_OF  # type: ignore[attr-defined]
    assert [f"{home}.{name}" for name, home in homes.items() if f"::: {home}.{name}\n" not in text] == []


@pytest.mark.parametrize("name", sorted(DOCS))
def test_sentences_after_a_block_have_a_subject(name: str) -> None:
    """A block is not the subject of the sentence below it: `This command prints ...`, not `prints ...`."""
    text = DOCS[name].read_text(encoding="utf-8")
    assert re.findall(r"(?:\n    .+|\n```)\n\n(?!and |with |torchrun )([a-z]+ [a-z`\[].{,40})", text) == []
