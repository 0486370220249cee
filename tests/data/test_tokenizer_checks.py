"""Tokenizer files that strangers made: one message each, whatever the library does with them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from pangu.common.errors import UserError
from pangu.common.protobuf import read_message
from pangu.config.data import TokenizerConfig
from pangu.data.tokenizer_checks import charsmap_growth
from pangu.data.tokenizers import SentencePieceTokenizer, load_tokenizer

pytest.importorskip("transformers")

WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "<unk>"}
PIECES = {"unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
BETWEEN = {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 1000}
SLOW = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}


def written(folder: Path, **parts: Any) -> Path:
    none = dict.fromkeys(["truncation", "padding", "normalizer", "post_processor", "decoder"])
    words = {"pre_tokenizer": {"type": "Whitespace"}, "added_tokens": [], "model": WORDS}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", **none, **words, **parts}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder / "tokenizer.json"


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({}, "cannot encode text"),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}, **PIECES}}, "cannot encode text"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": None}}, "cannot encode text"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [], "unk_token": "u"}}, "cannot encode text"),
        ({"model": {**WORDS, "vocab": {"a": 2**31}}}, "it has the id 2147483648; ids are less than 2^31 - 1"),
        ({"model": {**WORDS, "vocab": {"a": 2**32 - 1}}}, "it has the id 4294967295; ids are less than 2^31 - 1"),
        ({"model": {**WORDS, "vocab": {}}}, "it has no pieces"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAgICAgA=="}}, "Cannot parse"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [LONGER] * 3}},
            "its normalizer replaces a character with up to 1e+09",
        ),
        (
            {"decoder": {"type": "Sequence", "decoders": [LONGER] * 2}},
            "its decoder replaces a character with up to 1e+06; at most 100 are allowed",
        ),
        ({"normalizer": BETWEEN}, "its normalizer replaces a character with up to 1e+03; at most 100 are allowed"),
        ({"pre_tokenizer": SLOW, "model": {**WORDS, "unk_token": "a"}}, "cannot encode text"),
    ],
)
def test_hostile_tokenizers_end_in_one_message(tmp_path: Path, parts: dict[str, Any], says: str) -> None:
    file = written(tmp_path, **parts)
    for path in (file, tmp_path):
        with pytest.raises(UserError) as caught:
            load_tokenizer(TokenizerConfig("huggingface", str(path))).encode("a" * 40 + "b other")
        assert str(caught.value).startswith(str(path))
        assert says in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_normalization_of_sentencepiece_is_bounded(tmp_path: Path) -> None:
    """Its own writes 33 bytes for one character at most, and is taken."""
    path, rules = tmp_path / "t.model", tmp_path / "rules.tsv"
    rules.write_text(f"61\t{' '.join(['78'] * 101)}\n")
    options = {"vocab_size": 15, "model_type": "bpe", "minloglevel": 2}

    def trained(**more: str) -> bytes:
        model = io.BytesIO()
        texts = iter(["some text"] * 9)
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, **options, **more)
        return model.getvalue()

    path.write_bytes(model := trained())
    assert SentencePieceTokenizer(path).vocab_size == 15
    # Decoded texts are normalized by field 5, which the library finds by the lower 32 bits of a field's key
    long = trained(denormalization_rule_tsv=str(rules))
    (spec,) = read_message(long, slice(0, len(long)))[5]
    hidden = long[: spec.start - 3] + b"\xaa\x80\x80\x80\x10" + long[spec.start - 2 :]
    # A control piece is never decoded
    for content, says in (
        (long, "replaces a character with more than 100 bytes"),
        (hidden, "field 536870917 before byte"),
        (model.replace(b"</s>", b"\xff/s>"), "is not a valid SentencePiece model"),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=says):
            SentencePieceTokenizer(path)
    # The size of a search tree, the tree, and a replacement
    assert charsmap_growth((1024).to_bytes(4, "little") + bytes(1024) + b"x" * 5000 + b"\0") == 5000
