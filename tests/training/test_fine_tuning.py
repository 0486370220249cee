"""A model is trained on text, then fine-tuned on conversations, and stops and goes on as any run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pangu.checkpoint.run_folder import CHAT_TEMPLATE
from pangu.prepare import corpora
from pangu.prepare.indexed_writer import IndexedWriter
from pangu.training.run import run
from tests.configs import composed
from tests.end_to_end.commands import SAME_ATTENTION, SAME_PRODUCTS, SMALL, metrics, on_ranks

MODEL = (*SMALL, "model.vocab=257", "train.device=cpu", SAME_ATTENTION, SAME_PRODUCTS, "optimizer.lr=0.01")
WORDS = {"cat": "meow", "dog": "woof", "cow": "moo", "duck": "quack", "owl": "hoot", "pig": "oink"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run on plain text, and conversations. Not to be changed."""
    folder = tmp_path_factory.mktemp("trained")
    with IndexedWriter(folder / "text", 257) as writer:
        for word in list(WORDS) * 30:
            writer.add([*f"there was a {word}".encode(), 256])
    data = ("data=indexed", f"data.train=[{folder}/text]", "data.packing.eod=256", "validation.every=0")
    words = (*MODEL, *data, "lr_schedule.warmup_steps=2", "train.steps=6", "checkpoint.every=6")
    run(composed(*words, f"train.output={folder}/before"))
    for name in ("train", "held_out"):
        talks = [{"prompt": f"the {word} says ", "response": sound} for word, sound in WORDS.items()]
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, talks * 4)) + "\n", encoding="utf-8")
    return folder


def words_of(trained: Path, output: Path, steps: int, *others: str) -> tuple[str, ...]:
    files = (f"data.train=[{trained}/train.jsonl]", f"data.validation=[{trained}/held_out.jsonl]")
    data = ("data=instructions", *files, "data.tokenizer={kind:bytes}", "data.template=plain")
    begin = f"checkpoint.init_from={trained}/before/checkpoints/step-00000006"
    rates = ("lr_schedule.warmup_steps=2", "lr_schedule.decay_steps=40", "validation.every=10")
    return (
        *MODEL,
        *data,
        begin,
        *rates,
        f"train.steps={steps}",
        "checkpoint.every=10",
        f"train.output={output}",
        *others,
    )


def train(trained: Path, output: Path, steps: int, *others: str) -> list[dict[str, Any]]:
    run(composed(*words_of(trained, output, steps, *others)), corpora=corpora)
    return metrics(output)


DEFAULTS = ("model.kv_heads=4", "model.head_dim=8", "model.ffn=128")
"""What null stands for in the model of `trained`, written out."""


def test_defaults_that_are_written_out_are_no_difference(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither for `checkpoint.init_from`, which warns of those that are, nor for a run that continues."""
    train(trained, tmp_path / "same", 1, *DEFAULTS, "checkpoint.every=1")
    assert len(train(trained, tmp_path / "same", 2, "checkpoint.every=1")) == 2  # null again
    assert "were trained with" not in "".join(capsys.readouterr())
    train(trained, tmp_path / "other", 1, *DEFAULTS, "model.activation=gelu")
    text = "".join(capsys.readouterr())
    assert text.count("were trained with") == text.count("were trained with gelu_tanh") == 1


def test_a_run_that_prepares_nothing_keeps_the_chat_template(trained: Path, tmp_path: Path) -> None:
    train(trained, tmp_path / "run", 1, "checkpoint.every=1")
    template = (tmp_path / "run" / CHAT_TEMPLATE).read_text(encoding="utf-8")
    run(composed(*words_of(trained, tmp_path / "run", 2, "checkpoint.every=1")))
    assert len(metrics(tmp_path / "run")) == 2
    assert (tmp_path / "run" / CHAT_TEMPLATE).read_text(encoding="utf-8") == template


def test_a_checkpoint_learns_to_answer(trained: Path, tmp_path: Path) -> None:
    """The loss of responses falls, a run that was stopped is the same, and two ranks train the same."""
    whole = train(trained, tmp_path / "whole", 40)
    assert whole[0]["loss"] > 3
    assert whole[-1]["validation_loss"] < 1.0 < whole[9]["validation_loss"]
    train(trained, tmp_path / "parts", 10)
    parts = train(trained, tmp_path / "parts", 20)
    assert [line["loss"] for line in parts] == [line["loss"] for line in whole[:20]]
    assert 0 < whole[0]["padding"] < 0.5
    done = on_ranks(2, "pretrain", *words_of(trained, tmp_path / "ranks", 3))
    assert done.returncode == 0, done.stderr
    assert [line["loss"] for line in metrics(tmp_path / "ranks")] == pytest.approx(
        [line["loss"] for line in whole[:3]], rel=1e-5
    )
