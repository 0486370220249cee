"""Training of SentencePiece vocabularies whose first ten ids are those of PanGu-α."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar

import sentencepiece

from pangu.common.errors import UserError
from pangu.data.segmentation import NEWLINE, SPACE
from pangu.data.tokenizers import jieba_segmenter

END_OF_TEXT = 9
"""Id of <eot>, which ends a document in PanGu-α."""

Item = TypeVar("Item")

# SentencePiece itself assigns ids 0-2 to <unk>, <s> and </s>.
_SPECIAL = [NEWLINE, SPACE, "<sep>", "<pad>", "<mask>", "<eod>", "<eot>"]

# Decoding restores the text exactly (except U+2581, SentencePiece's own space): no normalization, newlines and runs
# of spaces become parts of pieces, rare characters become bytes. Special ids are control symbols, which no text can
# produce, so a document that mentions "<eot>" does not end there.
_EXACT = {
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "byte_fallback": True,
    "split_by_whitespace": False,
    "split_by_unicode_script": False,
    "allow_whitespace_only_pieces": True,
    "control_symbols": [piece for piece in _SPECIAL if piece != "<pad>"],
    "pad_id": 6,
    "pad_piece": "<pad>",
}

# Options of PanGu-α's own model: jieba segments the text, which may contain ▂ and ▃ for spaces and newlines.
_PANGU = {"normalization_rule_name": "nmt_nfkc", "user_defined_symbols": _SPECIAL, "pad_id": -1}


def train_sentencepiece(
    texts: Iterable[str],
    vocab: int,
    kind: Literal["bpe", "unigram"],
    coverage: float = 0.9995,
    jieba: bool = False,
    max_sentences: int = 200_000,
) -> bytes:
    """Train a model of exactly `vocab` pieces and return the contents of its file.

    `coverage` is the fraction of characters that get a piece. With `jieba` the model is of kind `pangu`, otherwise
    `sentencepiece`. Training uses at most `max_sentences` uniformly sampled segments of about a thousand characters;
    the same texts give the same model. Raises UserError if the texts are too few or too varied for `vocab` pieces.
    """
    segment = jieba_segmenter() if jieba else str
    model = io.BytesIO()
    options: dict[str, Any] = _PANGU if jieba else _EXACT
    sentences = sampled((sentence for text in texts for sentence in training_sentences(text)), max_sentences)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=map(segment, sentences),
            model_writer=model,
            vocab_size=vocab,
            model_type=kind,
            character_coverage=coverage,
            max_sentence_length=8192,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            num_threads=2,  # written into the model, hence the same on every machine
            minloglevel=2,
            **options,
        )
    except RuntimeError as error:
        raise UserError(_plain_words(str(error), vocab)) from error
    return model.getvalue()


def training_sentences(text: str, limit: int = 1000) -> Iterator[str]:
    """Yield segments of a text of at most `limit` characters, without tabs, split before a newline where possible."""
    # SentencePiece silently skips sentences that exceed its byte limit or contain a tab
    for part in text.split("\t"):
        start = 0
        while start < len(part):
            stop = len(part) if len(part) - start <= limit else part.rfind("\n", start + 1, start + limit)
            stop = stop if stop > start else start + limit
            yield part[start:stop]
            start = stop


def sampled(items: Iterable[Item], size: int) -> list[Item]:
    """Return a uniform, reproducible sample of at most `size` items (Vitter 1985, Algorithm R)."""
    # SentencePiece's own sampling differs between processes
    draw = random.Random(0)
    sample: list[Item] = []
    for number, item in enumerate(items):
        if number < size:
            sample.append(item)
        elif (place := draw.randrange(number + 1)) < size:
            sample[place] = item
    return sample


def _plain_words(error: str, vocab: int) -> str:
    if most := re.search(r"Please set it to a value <= (\d+)", error):
        return f"a vocabulary of {vocab} pieces needs more text; use at most {most[1]} pieces"
    if least := re.search(r"required_chars\. \d+ vs (\d+)", error):
        return (
            f"a vocabulary of {vocab} pieces is too small for the characters of the text; use at least {least[1]}"
            " pieces, or a lower character coverage"
        )
    if "sentences_.empty()" in error or "all_chars_count" in error:
        return "there is no text to train a tokenizer on"
    return f"SentencePiece cannot train a vocabulary of {vocab} pieces: {error}"
