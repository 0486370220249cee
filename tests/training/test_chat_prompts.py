"""A model that was fine-tuned on conversations is asked as it was trained, here and by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import sentencepiece
import torch

from pangu.checkpoint.run_folder import CHAT_TEMPLATE
from pangu.common.errors import UserError, printable
from pangu.config.data import PackingConfig, TokenizerConfig
from pangu.data.tokenizers import load_tokenizer
from pangu.evaluation.generation import Sampling
from pangu.interop.formats.huggingface import _write_template, _write_tokenizer
from pangu.interop.loading import load_model
from pangu.prepare import corpora
from pangu.prepare.chat import ChatPrompts, ChatTemplate
from pangu.prepare.instructions import Encoder
from pangu.prepare.messages import Dialog, read_prompt
from pangu.prepare.sandbox import Allowance
from pangu.topology.layout import Layout
from pangu.topology.mesh import Mesh
from pangu.training.run import run
from scripts.generate import encode
from scripts.generate import main as generate
from tests.configs import composed
from tests.data.test_boundaries import write_folder
from tests.end_to_end.commands import SAME_ATTENTION, SAME_PRODUCTS, SMALL
from tests.interop.test_formats import convert
from tests.prepare.test_instructions import instructions

transformers = pytest.importorskip("transformers")

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": " And 2+2?\n"},
]
OWN = (
    "\n  {% for m in messages %}{{ bos_token if loop.first }}{{ m.role }}: {% generation %}{{ m.content + eos_token }}"
    "{% endgeneration %}\n{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MODEL = (*SMALL, "model.vocab=264", "model.sequence=400", "train.device=cpu", SAME_ATTENTION, SAME_PRODUCTS)
STEPS = ("train.steps=1", "checkpoint.every=1", "lr_schedule.warmup_steps=0", "validation.every=0")


def fine_tune(folder: Path, published: str, template: str) -> Path:
    """A run of one step on conversations, whose tokenizer is gone when it ends."""
    tokenizer = write_folder(folder / "tokenizer", published)
    facts = json.loads((tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    (tokenizer / "tokenizer_config.json").write_text(json.dumps({**facts, "chat_template": OWN}), encoding="utf-8")
    (folder / "own.jinja").write_text(OWN, encoding="utf-8")
    talk = [*TALK, {"role": "assistant", "content": "4"}]
    (folder / "talk.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 8, encoding="utf-8")
    name = {"file": folder / "own.jinja", "tokenizer": tokenizer}.get(template, template)
    data = (
        "data=instructions",
        f"data.train=[{folder}/talk.jsonl]",
        f"data.template={name}",
        f"data.folder={folder}/d",
    )
    kind = f"data.tokenizer={{kind: huggingface, path: {tokenizer}}}"
    run(composed(*MODEL, *STEPS, *data, kind, f"train.output={folder}/run"), corpora=corpora)
    return folder / "run"


@pytest.mark.parametrize(
    ("published", "template"),
    [
        ("llama 2", "plain"),
        ("llama 3", "llama3"),
        ("llama 3", "alpaca"),
        ("gemma 3", "file"),
        ("llama 3", "tokenizer"),
        ("qwen 3", "chatml"),
        ("qwen 3", "qwen3"),
        ("qwen 3", "plain"),
    ],
)
def test_an_export_and_generate_ask_as_the_training_did(published: str, template: str, tmp_path: Path) -> None:
    """Also of a run folder of an older version, and where the export becomes a run folder again."""
    done = fine_tune(tmp_path, published, template)
    name = {"file": tmp_path / "own.jinja", "tokenizer": tmp_path / "tokenizer"}.get(template, template)
    tokenizer = load_tokenizer(TokenizerConfig("huggingface", str(tmp_path / "tokenizer")))
    packing = PackingConfig(tokenizer.eod, None, True, True, bos=tokenizer.bos)
    source = TokenizerConfig("huggingface", str(tmp_path / "tokenizer"))
    data = instructions(tmp_path, (), tokenizer=source, template=str(name), packing=packing)
    conversation = [*TALK, {"role": "assistant", "content": "4"}]
    with Allowance() as allowance:
        trained = Encoder(data, 400).encode({"messages": conversation}, allowance)
    counted = trained.counted.tolist()
    begin = max(n for n in range(1, len(counted)) if counted[n] and not counted[n - 1])
    expected = trained.ids[:begin].tolist()

    old = shutil.copytree(done, tmp_path / "old")
    (old / CHAT_TEMPLATE).unlink()
    models = [done, old, convert("pangu", "huggingface", done, tmp_path / "out")]
    models.append(convert("huggingface", "pangu", models[-1], tmp_path / "back"))
    (tmp_path / "tokenizer").rename(tmp_path / "gone")
    (tmp_path / "own.jinja").unlink()
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "out")
    assert theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False) == expected
    assert theirs.apply_chat_template(conversation, return_dict=False) == trained.ids.tolist()
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    for path in models:
        if path == old and template in ("file", "tokenizer"):
            continue
        model = load_model(path, Mesh(Layout(), 0, torch.device("cpu")))
        (found,), sampling, is_chat = encode(model, [{"messages": TALK}], Sampling(1), raw=False)
        assert (found, is_chat) == (expected, True)
        last = next(token for token in reversed(trained.ids.tolist()) if tokenizer.decode([token]).strip())
        assert (sampling.end, sampling.stop) == ("", (last,))
        assert last in (ends if isinstance(ends, list) else [ends])


def test_only_the_answer_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text is a message of the user; `--raw` continues it. An end of turn without an id of its own ends an answer
    too."""
    done = fine_tune(tmp_path, "gpt-oss", "chatml")
    (tmp_path / "asked.jsonl").write_text(
        json.dumps({"messages": TALK[1:2]}) + '\n{"prompt": "1+1?"}\n', encoding="utf-8"
    )
    words = ("--max-tokens", "3", "--temperature", "0")
    capsys.readouterr()
    assert generate([str(done), "--prompt", "1+1?", "--raw", *words]) == 0
    assert capsys.readouterr().out.startswith("1+1?")
    output = tmp_path / "answers.jsonl"
    assert generate([str(done), "--prompt", "1+1?", "--output", str(output), *words]) == 0
    answer = json.loads(output.read_text(encoding="utf-8"))
    assert answer["prompt"] == "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    capsys.readouterr()
    assert generate([str(done), "--prompts", str(tmp_path / "asked.jsonl"), *words]) == 0
    said = printable(answer["text"])
    assert capsys.readouterr().out == f"{said}\n\n{said}\n"
    (tmp_path / "asked.jsonl").write_text('{"messages": [{"role": "nobody", "content": "a"}]}\n', encoding="utf-8")
    assert generate([str(done), "--prompts", str(tmp_path / "asked.jsonl"), *words]) == 2
    assert "prompt 1: message 0 has the unknown role nobody" in capsys.readouterr().err
    model = load_model(done, Mesh(Layout(), 0, torch.device("cpu")))
    assert encode(model, [{"prompt": "a"}], Sampling(1), raw=False)[1].end == "<|im_end|>"
    with pytest.raises(UserError, match="prompt 1: has messages, and --raw takes texts"):
        encode(model, [{"messages": TALK}], Sampling(1), raw=True)


@pytest.mark.parametrize(("template", "control"), [("plain", []), ("chatml", ["<|im_start|>", "<|im_end|>"])])
@pytest.mark.parametrize("bytes_", [False, True])
def test_an_exported_sentencepiece_file_reads_a_conversation_as_a_whole(
    template: str, control: list[str], bytes_: bool, tmp_path: Path
) -> None:
    """With one dummy prefix, and with every piece that the template spells."""
    (tmp_path / "text.txt").write_text("What is a text? some words and what user assistant im\n" * 20)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text.txt"),
        model_prefix=str(tmp_path / "small"),
        vocab_size=320 if bytes_ else 60,
        hard_vocab_limit=False,
        byte_fallback=bytes_,
        normalization_rule_name="identity",
        control_symbols=control,
        minloglevel=2,
    )
    config = TokenizerConfig("sentencepiece", str(tmp_path / "small.model"))
    ours = load_tokenizer(config)
    text = ChatTemplate(template, ours.special, ours.eod, ours.bos).portable
    talk = [*TALK[1:3], {"role": "user", "content": "Ω is  what\n\n"}]
    expected = ChatPrompts(text, ours, ours.eod).encode([Dialog(talk, [], [])])[0]
    (tmp_path / "out").mkdir()
    _write_tokenizer(tmp_path / "out", config)
    _write_template(tmp_path / "out", text, config)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False) == expected


def test_an_empty_prompt_begins_as_in_training() -> None:
    tokenizer = load_tokenizer(TokenizerConfig("bytes"))
    chat = ChatPrompts(ChatTemplate("plain", tokenizer.special, tokenizer.eod).portable, tokenizer, tokenizer.eod)
    assert chat.encode([read_prompt({"prompt": ""}), read_prompt({"prompt": "a"})]) == [[256], [97]]
