"""A model whose texts begin with an id of their own agrees with transformers and lm-eval, and keeps its ids."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pangu.data.tokenizers import load_tokenizer
from pangu.evaluation.generation import Sampling, continue_prompts, encode_prompts
from pangu.evaluation.inference import LoadedModel
from pangu.interop.loading import load_model
from pangu.tasks.catalogue import find_task
from pangu.tasks.prompts import Prompts, Setup
from pangu.tasks.scoring import ScoredSpan, score
from pangu.tasks.task import Item
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.run import run as run_training
from tests.configs import composed
from tests.data.test_boundaries import write_folder
from tests.interop.test_formats import convert

transformers = pytest.importorskip("transformers")

PROMPTS = ["hello there", "a", "some longer words"]
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights and the tokenizer of Llama 3, whose configuration declares the end of a turn."""
    path = write_folder(tmp_path_factory.mktemp("llama") / "model", "llama 3")
    torch.manual_seed(1)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": [3, 1], "pad_token_id": 2}
    config = transformers.LlamaConfig(
        vocab_size=260, max_position_embeddings=48, initializer_range=0.4, num_key_value_heads=2, **shape, **ids
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(**ids, **SAMPLING)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    return convert("huggingface", "pangu", folder, folder.parent / "run")


@pytest.fixture(scope="module")
def theirs(folder: Path) -> tuple[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return transformers.AutoTokenizer.from_pretrained(folder), model


def loaded(path: Path) -> LoadedModel:
    return load_model(path, Mesh(Layout(), 0, torch.device("cpu")), "fp32")


@pytest.mark.parametrize("kind", ["folder", "run"])
def test_greedy_text_is_that_of_transformers(
    request: pytest.FixtureRequest, theirs: tuple[Any, Any], kind: str
) -> None:
    model, (tokenizer, other) = loaded(request.getfixturevalue(kind)), theirs
    assert model.tokenizer is not None
    assert (model.eod, model.stop, model.bos) == (1, (3,), 0)
    prompts = encode_prompts(PROMPTS, model.tokenizer, model.eod, model.config.sequence, model.bos)
    for text, found in zip(PROMPTS, continue_prompts(model, prompts, Sampling(12, 0.0)), strict=True):
        asked = tokenizer(text, return_tensors="pt")
        ids = other.generate(**asked, max_new_tokens=12, do_sample=False)[0, asked.input_ids.shape[1] :]
        assert found.prompt == text
        assert found.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_perplexity_is_that_of_transformers(folder: Path, theirs: tuple[Any, Any]) -> None:
    """All tokens of a text count; with transformers' recipe those that its documentation counts."""
    model, (tokenizer, other) = loaded(folder), theirs
    assert model.tokenizer is not None
    ids = tokenizer("hello there", return_tensors="pt").input_ids
    with torch.no_grad():
        expected = other(ids, labels=ids).loss.item()
    for recipe in ("own", "huggingface"):
        setup = Setup(recipe=recipe)
        task = find_task("wikitext")
        prompts = Prompts(task, setup, model.tokenizer, model.first, model.config.sequence, (), model.bos)
        (span,) = prompts.spans(Item("1", {}, ("hello there",)))
        (found,) = score(model, [span])
        assert span.ids == tuple(ids[0].tolist())
        assert found.loss / found.tokens == pytest.approx(expected, rel=1e-5)  # fp32
    assert score(model, [ScoredSpan(tuple(ids[0, 1:].tolist()), 1)])[0].loss / 10 != pytest.approx(expected, rel=1e-3)


def test_log_likelihoods_are_those_of_lm_eval(folder: Path) -> None:
    """With and without context, of whole texts, and greedy text."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (this package's extra: eval)")
    HFLM = pytest.importorskip("lm_eval.models.huggingface", reason="lm-eval[hf] is not installed").HFLM  # noqa: N806
    from lm_eval.api.instance import Instance

    from pangu.tasks.lm_eval import PanguLM

    models = [PanguLM(loaded(folder)), HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=1)]

    def answers(model: Any, kind: str, *arguments: Any) -> Any:
        requests = [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]
        return getattr(model, kind)(requests, disable_tqdm=True)

    pairs = [("hello", " there"), ("", "there"), ("a b c", " d"), ("one two", " three")]
    ours, other = (answers(model, "loglikelihood", *pairs) for model in models)
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in other], rel=1e-5)
    texts = [("hello there",), ("a much longer text than the window has room for, as it has only so many",)]
    ours, other = (answers(model, "loglikelihood_rolling", *texts) for model in models)
    assert ours == pytest.approx(other, rel=1e-5)
    until = [("hello", {"until": ["\n"], "max_gen_toks": 8, "do_sample": False})]
    ours, other = (answers(model, "generate_until", *until) for model in models)
    assert ours == other


def test_a_round_trip_keeps_ids_and_sampling(folder: Path, run: Path, tmp_path: Path) -> None:
    back = convert("pangu", "huggingface", run, tmp_path / "back")
    for name, keys in (("config.json", []), ("generation_config.json", [*SAMPLING])):
        was, now = (json.loads((path / name).read_text(encoding="utf-8")) for path in (folder, back))
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", *keys):
            assert now[key] == was[key], key


@pytest.mark.parametrize(("own", "of_generation"), [([1, 3], [1, 3, 5]), (3, [1, 3]), (3, 3)])
def test_a_round_trip_keeps_ends_that_differ_between_the_files(
    folder: Path, tmp_path: Path, own: object, of_generation: object
) -> None:
    """Generation stops at all of them; each file says what it said."""
    copy = Path(shutil.copytree(folder, tmp_path / "in"))
    was = {"config.json": own, "generation_config.json": of_generation}
    for name, ends in was.items():
        facts = json.loads((copy / name).read_text(encoding="utf-8"))
        (copy / name).write_text(json.dumps({**facts, "eos_token_id": ends}), encoding="utf-8")
    back = convert("pangu", "huggingface", convert("huggingface", "pangu", copy, tmp_path / "run"), tmp_path / "back")
    assert {name: json.loads((back / name).read_text(encoding="utf-8"))["eos_token_id"] for name in was} == was


def test_continued_pretraining_keeps_ids_and_sampling(folder: Path, run: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words\n" * 400)
    model = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))["model"]
    words = [f"model.{key}={json.dumps(value)}" for key, value in model.items() if key != "router"]
    data = ["data=stream", f"data.train=[{tmp_path}/a.txt]", f"data.tokenizer={{kind: huggingface, path: {folder}}}"]
    begin = [
        f"checkpoint.init_from={run}/checkpoints/step-00000000",
        f"train.output={tmp_path}/out",
        "lr_schedule.warmup_steps=0",
    ]
    small = ["batch.global_size=1", "batch.micro_size=1", "validation.every=0", "train.steps=1", "train.device=cpu"]
    assert run_training(composed("model=gpt2_124m", *words, *data, *begin, *small)) == 0
    back = convert("pangu", "huggingface", tmp_path / "out", tmp_path / "back")
    for name, keys in (("config.json", []), ("generation_config.json", [*SAMPLING])):
        was, now = (json.loads((path / name).read_text(encoding="utf-8")) for path in (folder, back))
        for key in ("bos_token_id", "pad_token_id", *keys):
            assert now[key] == was[key], key


def test_an_export_of_a_sentencepiece_file_puts_the_beginning_of_a_text_too(tmp_path: Path) -> None:
    from pangu.config.data import TokenizerConfig
    from pangu.interop.formats.huggingface import _write_tokenizer
    from tests.data.test_boundaries import sentencepiece_model

    ours = sentencepiece_model(tmp_path, ["some words of a text"] * 20)
    (tmp_path / "out").mkdir()
    _write_tokenizer(tmp_path / "out", TokenizerConfig("sentencepiece", str(tmp_path / "tokenizer.model")))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert theirs("some text")["input_ids"] == [1, *ours.encode("some text")]
    assert theirs.eos_token_id == ours.eod == 2
    again = load_tokenizer(TokenizerConfig("sentencepiece", str(tmp_path / "out" / "vocab.model")))
    assert (again.eod, again.bos) == (2, 1)
