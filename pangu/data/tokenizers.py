"""From text to ids and back: SentencePiece, PanGu-α's jieba and SentencePiece, Hugging Face; see `other_tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import sentencepiece

from pangu.config.data import TokenizerConfig
from pangu.config.errors import UserError, reading
from pangu.data import other_tokenizers as other
from pangu.data.boundaries import beginning_of_text, end_of_document, tokenizer_facts
from pangu.data.segmentation import NEWLINE, SPACE, Segmenter
from pangu.data.token_spans import APART, TokenSpan, library_spans, split_special, without_apart
from pangu.data.tokenizer_checks import (
    CANNOT_ENCODE,
    MOST_GROWTH,
    charsmap_growth,
    check_growth,
    largest_id,
    library_errors,
)

_PANGU_PIECES = {"<eod>": 8, "<eot>": 9}
"""Pieces of PanGu-α's vocabulary and of those with its first ids. It ends documents with <eot> and begins them with
nothing, whatever SentencePiece's own ids say."""


class Tokenizer(Protocol):
    """The interface of all tokenizers."""

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document, or None if the vocabulary has none."""

    @property
    def bos(self) -> int | None:
        """Id that belongs before a text, or None."""

    @property
    def special(self) -> dict[str, int]:
        """Pieces that stand for an id of their own but do not stand for text: no text that is encoded spells them."""

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, without begin or end."""

    def encode_spans(self, text: str) -> list[TokenSpan]:
        """Encode a text in which special pieces are spelled; see `token_spans.SpanTokenizer`."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids. Ids beyond the vocabulary (padding rows of an embedding) give nothing."""


class SentencePieceTokenizer:
    """A SentencePiece model. Raises UserError for a file that is missing, damaged or no such model."""

    def __init__(self, path: str | Path) -> None:
        if not Path(path).is_file():
            raise UserError(f"the tokenizer model {path} does not exist")
        rule = "is not a SentencePiece model (or only a pointer to one that Git LFS keeps), or a damaged one"
        with reading(path, RuntimeError, ValueError, rule=rule):
            self.processor = _processor(Path(path).read_bytes())
        self.vocab_size: int = self.processor.vocab_size()
        self.eod, self.bos = self._boundaries(path)

    def _boundaries(self, path: str | Path) -> tuple[int | None, int | None]:
        """Return the ids that end a document and begin a text. The file declares a piece before a text, but not whether
        its model wants it: tokenizer_config.json beside it says so, and without that a declared piece is used, as the
        models of this format do."""
        if all(self.processor.piece_to_id(piece) == token for piece, token in _PANGU_PIECES.items()):
            return _PANGU_PIECES["<eot>"], None
        declared = self.processor.eos_id(), self.processor.bos_id()
        eod, bos = (token if token >= 0 and self.processor.is_control(token) else None for token in declared)
        return eod, None if tokenizer_facts(path).get("add_bos_token") is False else bos

    @property
    def special(self) -> dict[str, int]:
        control = [token for token in range(self.vocab_size) if self.processor.is_control(token)]
        ends = [] if self.eod is None else [self.eod]
        return {self.processor.id_to_piece(token): token for token in (*control, *ends)}

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def encode_spans(self, text: str) -> list[TokenSpan]:
        # `APART` stands in for special pieces, so that the text begins once, with one dummy prefix. It begins behind
        # leading special pieces: the model has seen <s>, then a prefix.
        special = self.special
        parts = list(split_special(text, special))
        found = [TokenSpan(special[part], start, start + len(part)) for part, start in parts if part in special]
        hidden = "".join(APART * len(part) if part in special else part for part, _ in parts)
        lead = len(hidden) - len(hidden.lstrip(APART))
        plain = [TokenSpan(token, lead + begin, lead + end) for token, begin, end in self._spans(hidden[lead:])]
        kept = without_apart(hidden, plain, self.processor.unk_id())
        return sorted([*found, *kept], key=lambda span: span.begin)

    def _spans(self, text: str) -> list[TokenSpan]:
        """Encode an ordinary text as a whole."""
        places = [n for n, character in enumerate(text) for _ in character.encode()] + [len(text)]
        pieces = _pieces(self.processor.encode(text, out_type="serialized_proto"))
        return [TokenSpan(token, places[begin], places[end]) for token, begin, end in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        return self.processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size])


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Open the contents of a model's file. Raises RuntimeError or ValueError unless every id has a text."""
    if not model:
        raise ValueError("an empty file, which the library takes for none")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    # Of several specifications of the normalization, field 3, protobuf merges the fields; field 2 is the map
    specs = [value for key, value in _fields(model) if key == 3 and isinstance(value, bytes)]
    for charsmap in (value for spec in specs for key, value in _fields(spec) if key == 2 and isinstance(value, bytes)):
        if charsmap_growth(charsmap) > MOST_GROWTH:
            raise ValueError(f"its normalization writes more than {MOST_GROWTH} bytes for a character")
    # damaged pieces are not UTF-8, which the library finds when it decodes the first of them
    processor.decode([[token] for token in range(processor.vocab_size())])
    return processor


def _pieces(message: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield id, begin and end (in bytes of the text) of each piece of a serialized SentencePieceText: field 2 of it is
    a piece with the fields id = 2, begin = 4 and end = 5."""
    for field, value in _fields(message):
        if field == 2 and isinstance(value, bytes):
            piece = dict(_fields(value))
            yield int(piece.get(2, 0)), int(piece.get(4, 0)), int(piece.get(5, 0))


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and value of each field of a protobuf message: an integer, or the bytes of anything else."""
    place = 0

    def integer() -> int:
        nonlocal place
        value = shift = 0
        while True:
            byte = message[place]
            place += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value
            shift += 7

    while place < len(message):
        key = integer()
        fixed = {1: 8, 5: 4}.get(key & 7)
        number = integer() if fixed is None else fixed
        if key & 7:
            place += number
            yield key >> 3, message[place - number : place]
        else:
            yield key >> 3, number


class PanguTokenizer(SentencePieceTokenizer):
    """jieba, then SentencePiece, exactly as PanGu-α's corpus was made. Lossy: its model maps full-width punctuation to
    half-width, drops tabs and knows no character outside its pieces."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.bos = None
        self._segment = jieba_segmenter()

    def encode(self, text: str) -> list[int]:
        return super().encode(self._segment(text))

    def _spans(self, text: str) -> list[TokenSpan]:
        segmented = self._segment(text)
        # Spaces of the segmented text are jieba's; every other character is one of the text.
        places = [0, *accumulate(character != " " for character in segmented)]
        return [TokenSpan(token, places[begin], places[end]) for token, begin, end in super()._spans(segmented)]

    def decode(self, ids: Sequence[int]) -> str:
        # The spaces that are left are those between jieba's words.
        return super().decode(ids).replace(" ", "").replace(SPACE, " ").replace(NEWLINE, "\n")


class HuggingFaceTokenizer:
    """A local folder that transformers' AutoTokenizer loads; nothing is downloaded and no code of the folder is run."""

    def __init__(self, path: str | Path) -> None:
        try:
            from transformers import AutoTokenizer  # noqa: PLC0415 - optional package
        except ImportError as error:
            raise UserError(
                "a huggingface tokenizer needs transformers: pip install transformers (or this package's extra: test)"
            ) from error
        if not Path(path).is_dir():
            raise UserError(f"the tokenizer folder {path} does not exist; download it first and give the local folder")
        # the library's readers raise any kind of error for a damaged file
        self._path = path
        check_growth(Path(path, "tokenizer.json"))
        with library_errors(path, "transformers cannot load a tokenizer from there"):
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            largest_id(self._tokenizer.get_vocab().values())
        self.vocab_size: int = len(self._tokenizer)
        facts, backend = tokenizer_facts(path), getattr(self._tokenizer, "backend_tokenizer", None)
        self.eod = end_of_document(self.special, self._tokenizer.eos_token)
        self.bos = beginning_of_text(self.special, facts, backend and backend.post_processor)
        if backend is None and self._tokenizer.bos_token_id in self._tokenizer.build_inputs_with_special_tokens([])[:1]:
            self.bos = self._tokenizer.bos_token_id

    @property
    def special(self) -> dict[str, int]:
        return {piece.content: token for token, piece in self._tokenizer.added_tokens_decoder.items() if piece.special}

    def encode(self, text: str) -> list[int]:
        with library_errors(self._path, CANNOT_ENCODE):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_spans(self, text: str) -> list[TokenSpan]:
        if not self._tokenizer.is_fast:
            raise UserError(
                f"{self._tokenizer.name_or_path}: this tokenizer does not say which characters its tokens stand for;"
                " save it as a tokenizer.json"
            )
        with library_errors(self._path, CANNOT_ENCODE):
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return library_spans(text, encoded["input_ids"], encoded["offset_mapping"])

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size])


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Open the tokenizer of a configuration. Raises UserError if its files are missing or of another kind."""
    if config.kind == "sentencepiece":
        return SentencePieceTokenizer(config.path)
    if config.kind == "pangu":
        return PanguTokenizer(config.path)
    if config.kind == "huggingface" and not Path(config.path).is_file():
        return HuggingFaceTokenizer(config.path)
    if config.kind == "bytes":
        return other.ByteTokenizer()
    if config.kind in other.ENCODINGS:
        return other.TiktokenTokenizer(config.kind, config.path)
    return other.FastTokenizer(config.path)


def fitting_tokenizer(config: TokenizerConfig, vocab: int) -> Tokenizer:
    """As `load_tokenizer`. Raises UserError, too, for one with more ids than the model has."""
    tokenizer = load_tokenizer(config)
    if tokenizer.vocab_size > vocab:
        raise UserError(f"model.vocab = {vocab}, but the tokenizer of the data has {tokenizer.vocab_size} pieces")
    return tokenizer


@cache
def jieba_segmenter() -> Segmenter:
    """The one of this process, whose dictionary takes a second to read."""
    return Segmenter()
