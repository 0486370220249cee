"""Texts that are encoded as a whole and cut into parts: no part begins with a token that the whole text has not."""

from __future__ import annotations

import io
import json
from itertools import chain
from pathlib import Path

import pytest
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pangu.config.data import PackingConfig, TokenizerConfig
from pangu.data.token_spans import SEPARATOR, encode_parts
from pangu.data.tokenizers import SentencePieceTokenizer, load_tokenizer
from pangu.prepare.instructions import Encoder
from pangu.prepare.sandbox import Allowance
from tests.prepare.test_instructions import instructions

LINES = [f"[INST] database hello base data [/INST] ok hello\n\n{n}" for n in range(300)]
PARTS = ["</s>", "[INST] hello  é [/INST]\n\n", " ok", "</s>", "[INST] data", "base", "", "\n"]


def sentencepiece_file(folder: Path, **options: object) -> str:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=80,
        model_type="bpe",
        user_defined_symbols=["\n"],
        minloglevel=2,
        **options,
    )
    path = folder / "t.model"
    path.write_bytes(model.getvalue())
    return str(path)


def library_file(folder: Path, kind: str) -> str:
    """A tokenizer.json of bytes, or of words with a space before the first; or GPT-2's two files."""
    tokenizer, end = Tokenizer(models.BPE()), "<|endoftext|>" if kind == "gpt2" else "</s>"
    if kind == "words":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
        trainer = trainers.BpeTrainer(
            vocab_size=90, show_progress=False, special_tokens=[end], initial_alphabet=["é", "\n"]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=320, show_progress=False, special_tokens=[end], initial_alphabet=alphabet
        )
    tokenizer.train_from_iterator(LINES, trainer)
    if kind == "gpt2":
        tokenizer.model.save(str(folder))
        return str(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder / "tokenizer.json")


def config(folder: Path, kind: str) -> TokenizerConfig:
    if kind == "bytes":
        return TokenizerConfig("bytes")
    if kind in ("prefix", "unknown"):
        return TokenizerConfig("sentencepiece", sentencepiece_file(folder, remove_extra_whitespaces=kind == "unknown"))
    return TokenizerConfig("gpt2" if kind == "gpt2" else "huggingface", library_file(folder, kind))


@pytest.mark.parametrize("kind", ["prefix", "unknown", "words", "byte-level", "gpt2", "bytes"])
def test_ids_of_parts_are_those_of_the_whole_text(tmp_path: Path, kind: str) -> None:
    """But where a token would reach across a border: "data" and "base" are one word, and a piece of their own each."""
    tokenizer = load_tokenizer(config(tmp_path, kind))
    end = tokenizer.eod
    piece = next(piece for piece, token in tokenizer.special.items() if token == end)
    texts = [text.replace("</s>", piece) for text in PARTS]
    parts = encode_parts(tokenizer, texts)
    assert parts[0] == parts[3] == [end]
    assert parts[6] == []
    whole = [span.token for span in tokenizer.encode_spans("".join(texts))]
    assert tokenizer.decode([*chain(*parts)]) == tokenizer.decode(whole)
    joined = encode_parts(tokenizer, [*texts[:4], "".join(texts[4:])])
    assert [*chain(*joined)] == whole
    ordinary = "".join(texts[1:3])
    assert [*chain(*encode_parts(tokenizer, texts[1:3]))] == tokenizer.encode(ordinary)


def test_what_is_held_apart_is_spelled_as_text(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(config(tmp_path, "byte-level"))
    ((*ids,),) = encode_parts(tokenizer, [f"say <{SEPARATOR}/s>"])
    assert tokenizer.eod not in ids
    assert tokenizer.decode(ids) == "say </s>"


def test_each_unknown_run_beside_a_special_piece_is_unknown(tmp_path: Path) -> None:
    """SentencePiece joins neighboring unknown characters, and what stands for a special piece, to one piece."""
    tokenizer = SentencePieceTokenizer(sentencepiece_file(tmp_path))
    unknown = tokenizer.processor.unk_id()
    assert encode_parts(tokenizer, ["ok", "é</s>é", "é"])[1:] == [[unknown, tokenizer.eod, unknown], [unknown]]


@pytest.mark.parametrize("template", ["plain", "chatml", "alpaca", "llama3", "qwen3"])
def test_files_of_gpt2_work_with_every_template(tmp_path: Path, template: str) -> None:
    tokenizer = config(tmp_path, "gpt2")
    packing = PackingConfig(None, None, True, True)
    data = instructions(tmp_path, (), tokenizer=tokenizer, template=template, packing=packing)
    with Allowance() as allowance:
        found = Encoder(data, 512).encode({"prompt": "hello", "response": "data </s>"}, allowance)
    response = load_tokenizer(tokenizer).decode([int(i) for i in found.ids[found.counted > 0]])
    assert "data </s>" in response
    assert json.loads((tmp_path / "vocab.json").read_text())["<|endoftext|>"] == load_tokenizer(tokenizer).eod
