"""What the tutorials and guides show is what runs show."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from contextlib import chdir
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.model_kinds import KINDS
from benchmarks.optimizers import RATES
from pangu.config.layout_checks import layout_problems
from pangu.metrics.record import StepRecord
from pangu.metrics.writers import progress_line
from pangu.models.size import num_parameters
from pangu.prepare.stdlib import StdlibPaths
from tests.configs import config
from tests.end_to_end.commands import SMALL, called, metrics, pretrain
from tests.end_to_end.pages import Command, chinese, commands, run_python_block
from tests.spawn import repository

FIRST, MEMORY, CHOICES, GPT2, FINE_TUNING = (
    repository() / f"docs/{name}.md"
    for name in ("first-model", "out-of-memory", "hyperparameters", "gpt2-124m", "fine-tuning")
)


def rows_of_memory(page: Path) -> list[tuple[str, str, str]]:
    """Keys, GiB and seconds of the table of costs."""
    pattern = r"^\| `(parallel[^`]+)` \| ([\d.]+) \| ([\d.]+) \|"
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE)


def rows_of_gpus(page: Path) -> list[tuple[str, ...]]:
    """Device, seconds of a step, GiB, hours and dollars of each row."""
    pattern = r"^\| `(\w+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$"
    return re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE)


def by_output(page: Path) -> dict[str, list[str]]:
    """The overrides of a page's runs, by the name of their run folder."""
    found = {}
    for words in commands(page):
        command = Command.of(words)
        if command is not None and command.trains:
            given = dict(word.split("=", 1) for word in command.overrides)
            found[given.get("train.output", "").rpartition("/")[2]] = command.overrides
    return found


@pytest.mark.parametrize("page", [FIRST, chinese(FIRST)], ids=lambda page: page.name)
def test_every_field_of_a_line_of_progress_is_explained(page: Path) -> None:
    numbers = {field.name: 1 for field in fields(StepRecord)}
    record = StepRecord(**numbers | {"validation_sources": {}, "evaluation": {}})
    parts = str(progress_line(record, 10, 1.0)).split(" | ")
    rows = set(re.findall(r"^\| `([^`]+)` \|", page.read_text(encoding="utf-8"), re.MULTILINE))
    explained = {max((row for row in rows if row in part), key=len) for part in parts}
    assert len(explained) == len(parts)  # "loss" alone does not explain "mtp loss"


def test_the_notebook_trains_draws_and_generates(
    prepared: StdlibPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cells without Jupyter: commands behind `!`, and Python."""
    notebook = json.loads((repository() / "examples/first_model.ipynb").read_text(encoding="utf-8"))
    names: dict[str, Any] = {}
    monkeypatch.setenv("MPLBACKEND", "Agg")
    few = (*SMALL, f"data.folder={prepared.folder}", "train.steps=12", "validation.every=6", "sample.tokens=0")
    with chdir(tmp_path):
        for cell in notebook["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and source.startswith("!"):
                command = Command.of(shlex.split(source[1:]))
                assert command is not None
                done = called(command.program, *command.arguments, *(few if command.trains else ()))
                assert done.returncode == 0, f"{source}\n{done.stderr}"
            elif cell["cell_type"] == "code":
                exec(compile(source, "first_model.ipynb", "exec"), names)
    assert names["losses"][-1] < names["losses"][0]
    assert [len(line.get_xdata()) for line in names["axes"].lines] == [12, 2]
    names["plt"].close(names["figure"])


@pytest.mark.parametrize("name", ["diverges", "overflows", "flat"])
def test_the_ill_runs_of_the_first_tutorial_are_ill(name: str, prepared: StdlibPaths, tmp_path: Path) -> None:
    replaced = ("train.output", "data.folder", "train.steps")
    words = [word for word in by_output(FIRST)[name] if not word.startswith(replaced)]
    more = (f"data.folder={prepared.folder}", "train.steps=12", "sample.tokens=0", "validation.every=0")
    done = pretrain(tmp_path, *words, *SMALL, *more)
    assert done.returncode == 0, done.stderr
    first, *_, last = metrics(tmp_path)
    guess = math.log(1024)
    assert first["loss"] == pytest.approx(guess, abs=0.5)
    if name == "overflows":
        assert last["skipped"] >= 10
        assert "gradients are not finite" in done.stderr
    elif name == "diverges":
        assert last["loss"] > 2 * guess
        assert last["grad_norm"] > 2 * first["grad_norm"]
    else:
        assert last["loss"] == pytest.approx(first["loss"], abs=0.3)


def test_the_runs_of_the_guide_to_equality_are_equal(prepared: StdlibPaths, tmp_path: Path) -> None:
    runs = by_output(repository() / "docs/proving-equal.md")
    for name, processes in (("one", 0), ("two", 2)):
        words = [word for word in runs[name] if not word.startswith(("train.output", "data.folder"))]
        more = (f"data.folder={prepared.folder}", "sample.tokens=0", "validation.every=0")
        done = pretrain(tmp_path / name, *words, *SMALL, *more, processes=processes)
        assert done.returncode == 0, done.stderr
    one, two = (metrics(tmp_path / name) for name in runs)
    for key in ("loss", "grad_norm"):
        assert [line[key] for line in two] == pytest.approx([line[key] for line in one], rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("row", rows_of_memory(MEMORY), ids=lambda row: row[0])
def test_figures_of_the_guide_to_memory_are_those_of_dry_runs(row: tuple[str, str, str]) -> None:
    keys, gib, seconds = row
    (recipe,) = commands(MEMORY)
    done = called("pretrain", *recipe[2:], "batch.micro_size=1", *keys.split())
    said = done.stdout + done.stderr
    for figure, pattern in ((gib, r"needs ([\d.]+) GiB with context"), (seconds, r"step time ([\d.]+) s")):
        assert f"{float(re.findall(pattern, said)[0]):.1f}" == figure


def test_the_guide_to_memory_has_the_same_figures_in_both_languages() -> None:
    assert rows_of_memory(chinese(MEMORY)) == rows_of_memory(MEMORY)
    assert len(rows_of_memory(MEMORY)) == 13


@pytest.mark.parametrize("page", [CHOICES, chinese(CHOICES)], ids=lambda page: page.name)
def test_first_guesses_are_those_of_the_presets(page: Path) -> None:
    pattern = r"^\| `(\w+)` \| ([\d.e-]+) \| [^|]+ \| (\d+) x (\d+) \| (\d+) \|"
    rows = re.findall(pattern, page.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) == 8
    for name, rate, size, sequence, warmup in rows:
        run = config(f"+config={name}")
        guess = (run.optimizer.lr, run.batch.global_size, run.model.sequence, run.lr_schedule.warmup_steps)
        assert guess == (float(rate), int(size), int(sequence), int(warmup)), name


def test_the_rehearsal_of_gpt2_from_text_to_a_loss(tmp_path: Path) -> None:
    (tmp_path / "rehearsal").mkdir()
    for page in (repository() / "docs").glob("*.md"):
        if not page.name.endswith(".zh.md"):
            shutil.copy(page, tmp_path / "rehearsal" / f"{page.stem}.txt")
    with chdir(tmp_path):
        for words in commands(GPT2):
            command = Command.of(words)
            assert command is not None
            if any(word.startswith(("rehearsal/", "data.train=[rehearsal/")) for word in words):
                few = ["train.steps=60", "validation.every=60", "checkpoint.every=0"] if command.trains else []
                done = called(command.program, *command.arguments, *few)
                assert done.returncode == 0, f"{words}\n{done.stderr}"
        first, *_, last = metrics(tmp_path / "runs/rehearsal")
    assert first["loss"] == pytest.approx(math.log(257), abs=0.2)
    assert last["validation_loss"] < first["loss"] - 1.5
    assert last["validation_loss"] == pytest.approx(last["loss"], abs=0.5)


@pytest.mark.long
@pytest.mark.parametrize("row", rows_of_gpus(GPT2), ids=lambda row: row[0])
def test_gpu_figures_of_the_tutorial_of_gpt2_are_those_of_plans(row: tuple[str, ...]) -> None:
    cluster, seconds, gib, hours, dollars = row
    plan = commands(GPT2)[0]
    done = called("tools/plan", *plan[2:], f"cluster={cluster}")
    ((step, memory),) = re.findall(r"step time ([\d.]+) s .*memory ([\d.]+) of", done.stdout)
    total = 19560 * float(step) / 3600
    assert (step, memory, f"{total:.1f}", f"{3 * total:.0f}") == (seconds, gib, hours, dollars)


def test_the_tutorial_of_gpt2_has_the_same_figures_in_both_languages() -> None:
    assert rows_of_gpus(chinese(GPT2)) == rows_of_gpus(GPT2)
    assert len(rows_of_gpus(GPT2)) == 3


@pytest.mark.parametrize("language", [lambda page: page, chinese], ids=["en", "zh"])
def test_losses_of_the_recipes_are_those_of_the_files_of_results(language: Callable[[Path], Path]) -> None:
    text = language(repository() / "docs/recipes.md").read_text(encoding="utf-8")
    results = {
        name: json.loads((repository() / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        for name in ("model_kinds", "optimizers", "characters")
    }
    for kind, words in KINDS.items():
        (_, loss) = results["model_kinds"]["runs"][kind][0][-1]
        size = num_parameters(config(f"+config={words[0]}", *words[1:]).model)
        assert f"| `{' '.join((f'+config={words[0]}', *words[1:]))}` | {size:,} | {loss:.3f} |" in text
    for name, (half, rate, double) in RATES.items():
        last = {
            row["lr"]: row["validation"][-1][1] for row in results["optimizers"]["runs"] if row["optimizer"] == name
        }
        shown = f"| {last[rate]:.3f} | {last[half]:.3f}, {last[double]:.3f} |"
        assert f"| `optimizer={name} optimizer.lr={rate}` {shown}" in text
    for row in results["characters"]["rows"]:
        assert f"| {row['parameters']:,} | {row['held_out_loss']:.3f} | {row['spread']:.3f} |" in text


QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024}
QWEN3 |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
QWEN3 |= {"intermediate_size": 3072, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000}
QWEN3 |= {"max_position_embeddings": 40960, "tie_word_embeddings": True, "attention_bias": False}
QWEN3 |= {"attention_dropout": 0.0, "initializer_range": 0.02, "use_sliding_window": False, "torch_dtype": "bfloat16"}
"""Published `config.json` of Qwen3-0.6B, without the ids of tokens."""


def test_the_tutorial_of_fine_tuning_describes_the_published_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    done = called("tools/translate_config", "--from", "huggingface", tmp_path / "config.json")
    assert done.returncode == 0, done.stderr
    words = [line.removesuffix(" \\") for line in done.stdout.splitlines() if not line.startswith("#")]
    tuned = config(*by_output(FINE_TUNING)["Qwen3-0.6B-chat"]).model
    assert tuned == replace(config(*words).model, sequence=1024, scaled_init=False)
    assert num_parameters(tuned) == 596_049_920


def test_the_tutorial_of_fine_tuning_from_a_model_to_an_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    page, answers = FINE_TUNING, []
    with chdir(tmp_path):
        run_python_block(page)
        small = [words for words in commands(page) if not re.search("Qwen3-0.6B|openPangu|h100", " ".join(words))]
        for words in small:
            command = Command.of(words)
            assert command is not None
            few = ["train.steps=30", "validation.every=30"] if command.trains else []
            done = called(command.program, *command.arguments, *few)
            assert done.returncode == 0, f"{words}\n{done.stderr}"
            answers += [done.stdout.strip()] if "12 + 7 = ?" in words else []
        lines = metrics(tmp_path / "runs/tiny_chat")
        assert lines[-1]["validation_loss"] < 0.5 * lines[0]["loss"]
        run_python_block(page, 2)
        assert re.fullmatch(r"\d+ of 58\n", capsys.readouterr().out)
        model = transformers.AutoModelForCausalLM.from_pretrained("export/tiny")
        tokenizer = transformers.AutoTokenizer.from_pretrained("export/tiny")
    chat = [{"role": "user", "content": "12 + 7 = ?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    drawn = model.generate(**prompt, max_new_tokens=8, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert answers == 2 * [tokenizer.decode(drawn, skip_special_tokens=True)]


def test_both_languages_make_the_same_small_model() -> None:
    page = FINE_TUNING
    english, other = (path.read_text(encoding="utf-8").split("```")[1::2] for path in (page, chinese(page)))
    assert english == other


@pytest.mark.parametrize("language", [lambda page: page, chinese], ids=["en", "zh"])
def test_the_tutorial_of_megatron_shows_the_translation_and_words_that_32_devices_take(
    language: Callable[[Path], Path], tmp_path: Path
) -> None:
    text = language(repository() / "docs/megatron-to-slurm.md").read_text(encoding="utf-8")
    script = tmp_path / "train_7b.sh"
    script.write_text(text.split("```bash\n")[1].split("```")[0], encoding="utf-8")
    done = called("tools/translate_config", "--from", "megatron", script, "DATA_PATH=my/corpus")
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    shown = text.split("    model=gpt2_124m")[1].split("\n\n")[0].splitlines()[1:]
    assert {line.strip() for line in shown} - {"..."} <= {line.strip() for line in said}
    words = [shlex.split(line.removesuffix(" \\"))[0] for line in said if not line.startswith("#")]
    submitted = shlex.split(text.split("pretrain.sbatch $words ")[1].split("\n\n")[0])
    more = [word for word in submitted if word.strip()]
    assert not layout_problems(config(*words), 32)
    assert not layout_problems(config(*words, *more), 32)
