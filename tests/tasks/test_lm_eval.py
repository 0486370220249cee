"""The model class for lm-evaluation-harness, against its own for transformers, on the same weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch

from pangu.config.data import TokenizerConfig
from pangu.data.tokenizers import load_tokenizer
from pangu.evaluation.inference import LoadedModel
from pangu.models.parameters import ModelPart
from pangu.pipeline.runner import Runner
from pangu.schedule.schedule import make_schedule
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.topology.placement import TensorRank
from tests.end_to_end.commands import SMALL, command, pretrain
from tests.interop.test_formats import HEADS, convert, weights
from tests.references import foreign_checkpoints as foreign

pytest.importorskip("lm_eval", reason="lm-eval is not installed (this package's extra: eval)")
tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHOICES = [
    {"question": "what is it", "choices": [" a cat", " a dog", " seven long words"], "label": 1},
    {"question": "a question that is longer than the window of the model", "choices": [" no", " yes"], "label": 0},
    {"question": "one two three", "choices": [" four", " five", " six"], "label": 2},
]
TASKS: list[dict[str, Any]] = [
    {
        "task": "local_choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    {
        "task": "local_words",
        "output_type": "loglikelihood",
        "doc_to_target": "{{choices[0]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    {
        "task": "local_texts",
        "output_type": "loglikelihood_rolling",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}],
    },
    {
        "task": "local_writing",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e", "\n\n"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
]


@pytest.fixture
def tasks(tmp_path: Path) -> list[dict[str, Any]]:
    """Four kinds of tasks on a local file."""
    data = tmp_path / "test.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in CHOICES), encoding="utf-8")
    files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    return [{**files, "doc_to_text": "{{question}}", **task} for task in TASKS]


def tokenizer_folder(folder: Path) -> Path:
    """A tokenizer of transformers whose tokens are characters; 0 ends a document."""
    signs = ["<|end|>", *"\n abcdefghijklmnopqrstuvwxyz.,"]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({s: i for i, s in enumerate(signs)}, unk_token="."))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>", bos_token="<|end|>")
    fast.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def test_agrees_with_the_class_for_transformers(tasks: list[dict[str, Any]], tmp_path: Path) -> None:
    """A GPT-2 with random weights, 24 tokens of window: every log-likelihood, every text, every figure."""
    HFLM = own_class()  # noqa: N806

    from pangu.tasks.lm_eval import PanguLM
    from tests.models.test_gpt_against_transformers import GPT, pair

    folder = tokenizer_folder(tmp_path)
    ours, _, theirs = pair()
    runner = Runner(ours, {0: ModelPart.full(ours.config)}, 0, "rank 0", None, torch.float32, TensorRank())
    mesh = Mesh(Layout(), 0, torch.device("cpu"))
    tokenizer = load_tokenizer(TokenizerConfig("huggingface", str(folder)))
    loaded = LoadedModel(runner, make_schedule("gpipe", 1, 1, 1), mesh, GPT, tokenizer, 0, rows=2)
    words = transformers.AutoTokenizer.from_pretrained(str(folder))
    models = [PanguLM(loaded), HFLM(pretrained=theirs.eval(), tokenizer=words, max_length=GPT.sequence, batch_size=1)]
    require_same_answers(tasks, *models)


def test_a_run_agrees_with_its_export(tasks: list[dict[str, Any]], tmp_path: Path) -> None:
    """PanGu-α with random weights: the run here, and what it is converted to in lm-eval's own class."""
    HFLM = own_class()  # noqa: N806

    from pangu.tasks.lm_eval import PanguLM

    vocabulary = control_vocabulary(tmp_path)
    foreign.write_huggingface(tmp_path / "theirs", weights(torch.float32), HEADS)
    given = f"data.tokenizer={{kind: sentencepiece, path: {vocabulary}}}"
    run = convert("huggingface", "pangu", tmp_path / "theirs", tmp_path / "run", given)
    folder = convert("pangu", "huggingface", run, tmp_path / "export")
    theirs = HFLM(pretrained=str(folder), trust_remote_code=True, dtype="float32", device="cpu", batch_size=1)
    require_same_answers(tasks, PanguLM(str(run), device="cpu"), theirs)


def own_class() -> Any:
    """lm-eval's class for transformers, which its extra `hf` is for."""
    return pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval[hf] is not installed").HFLM


def control_vocabulary(folder: Path) -> Path:
    """A SentencePiece model of letters whose <eot> is a control symbol, with the ids that PanGu-α's has."""
    text = folder / "text.txt"
    letters = "abcdefghijklmnopqrstuvwxyz"
    text.write_text(" ".join(a + b for a in letters for b in letters), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "letters"),
        vocab_size=40,
        hard_vocab_limit=False,
        control_symbols=["<a>", "<b>", "<sep>", "<pad>", "<mask>", "<eod>", "<eot>"],
        minloglevel=2,
    )
    return folder / "letters.model"


def require_same_answers(tasks: list[dict[str, Any]], ours: Any, theirs: Any) -> None:
    """Every log-likelihood, every text, every figure of the four kinds of tasks."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    # without the harness's own tasks, thousands of files
    how = {"task_manager": TaskManager(include_defaults=False), "bootstrap_iters": 0, "log_samples": True}
    mine, other = (simple_evaluate(model, tasks=tasks, **how) for model in (ours, theirs))
    compared = 0
    for task in (task["task"] for task in tasks):
        for one, two in zip(mine["samples"][task], other["samples"][task], strict=True):
            for answer, expected in zip(_flat(one["resps"]), _flat(two["resps"]), strict=True):
                # fp32: sums of 40 log-likelihoods of about 10 each
                assert answer == (pytest.approx(expected, rel=1e-5) if isinstance(expected, float) else expected)
                compared += 1
        for name, figure in other["results"][task].items():
            if isinstance(figure, float) and not math.isnan(figure):
                assert mine["results"][task][name] == pytest.approx(figure, rel=1e-4), name
    assert compared == 2 * 8 + 2 * 3 + 3 + 3


def _flat(value: Any) -> list[Any]:
    """Numbers and texts of nested lists."""
    return [part for one in value for part in _flat(one)] if isinstance(value, list | tuple) else [value]


def test_the_command_measures_a_run(tasks: list[dict[str, Any]], tmp_path: Path) -> None:
    """As the documentation says, on one process and on two that share the matrices: the same figures."""
    done = pretrain(tmp_path / "run", *SMALL, f"data.folder={tmp_path}/data", "train.steps=1", "model.vocab=600")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "local.yaml").write_text(json.dumps(tasks[0]), encoding="utf-8")
    figures = []
    for processes, more in ((0, ""), (2, ",tensor=2")):
        output = tmp_path / f"results{processes}"
        words = ["-m", "pangu.tasks.lm_eval", "--model", "pangu", "--tasks", "local_choices"]
        words += ["--model_args", f"pretrained={tmp_path}/run{more}", "--include_path", str(folder)]
        done = command(*words, "--output_path", str(output), "--batch_size", "2", processes=processes)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("|local_choices|") == 1
        (path,) = output.rglob("results*.json")
        figures.append(json.loads(path.read_text(encoding="utf-8"))["results"]["local_choices"])
    assert figures[0] == figures[1]
    refused = command(*words, "--model_args", f"pretrained={tmp_path}/nowhere,tensor=1")
    assert refused.returncode == 2
    assert "nowhere" in refused.stderr.splitlines()[-1]
    assert "Traceback" not in refused.stderr
