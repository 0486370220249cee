"""Tokenizers of SentencePiece, PanGu-α (jieba, then SentencePiece) and Hugging Face; see also `other_tokenizers`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import sentencepiece
from numpy.typing import NDArray

from pangu.common.errors import UserError, reading
from pangu.common.protobuf import read_message, read_varint
from pangu.config.data import TokenizerConfig
from pangu.data import other_tokenizers as other
from pangu.data.boundaries import beginning_of_text, end_of_document, tokenizer_facts
from pangu.data.segmentation import NEWLINE, SPACE, Segmenter
from pangu.data.token_spans import SEPARATOR, TokenSpan, library_spans, split_special, without_separators
from pangu.data.tokenizer_checks import (
    CANNOT_ENCODE,
    MOST_GROWTH,
    charsmap_growth,
    check_growth,
    largest_id,
    library_errors,
)

# Pieces of PanGu-α's vocabulary and of those with the same first ids. Documents end with <eot> and begin without an id,
# whatever SentencePiece's own ids say.
_PANGU_PIECES = {"<eod>": 8, "<eot>": 9}


class Tokenizer(Protocol):
    """Interface of all tokenizers."""

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""

    @property
    def eod(self) -> int | None:
        """Id that ends a document; None if the vocabulary has none."""

    @property
    def bos(self) -> int | None:
        """Id that begins a text; None if the model does not expect one."""

    @property
    def special(self) -> dict[str, int]:
        """Special pieces and their ids; `encode` never produces these ids, whatever the text spells."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without ids that begin or end it."""

    def encode_spans(self, text: str) -> list[TokenSpan]:
        """Encode a text that may contain special pieces, with each token's characters; `SEPARATOR` gives no token."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; those outside the vocabulary (padding rows of an embedding) are skipped."""


class SentencePieceTokenizer:
    """Tokenizer of a SentencePiece model."""

    def __init__(self, path: str | Path) -> None:
        """Load the model file. Raises UserError if it is missing, damaged or not a SentencePiece model."""
        if not Path(path).is_file():
            raise UserError(f"data.tokenizer.path = {path}: does not exist")
        rule = "is not a valid SentencePiece model (perhaps a Git LFS pointer: run `git lfs pull`)"
        with reading(path, RuntimeError, ValueError, rule=rule):
            self.processor = _processor(Path(path).read_bytes())
        self.vocab_size: int = self.processor.vocab_size()
        self.eod, self.bos = self._boundaries(path)

    def _boundaries(self, path: str | Path) -> tuple[int | None, int | None]:
        # The file declares a begin piece, but not whether its model expects it: tokenizer_config.json next to it does.
        # Without that file a declared piece is used, as models of this format do.
        if all(self.processor.piece_to_id(piece) == token for piece, token in _PANGU_PIECES.items()):
            return _PANGU_PIECES["<eot>"], None
        declared = self.processor.eos_id(), self.processor.bos_id()
        eod, bos = (token if token >= 0 and self.processor.is_control(token) else None for token in declared)
        return eod, None if tokenizer_facts(path).get("add_bos_token") is False else bos

    @property
    def special(self) -> dict[str, int]:
        """Special pieces and their ids."""
        control = [token for token in range(self.vocab_size) if self.processor.is_control(token)]
        ends = [] if self.eod is None else [self.eod]
        return {self.processor.id_to_piece(token): token for token in (*control, *ends)}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self.processor.encode(text)

    def encode_spans(self, text: str) -> list[TokenSpan]:
        """Encode a text that may contain special pieces."""
        # `SEPARATOR` replaces special pieces: the text gets one dummy prefix, after leading ones, as in training
        special = self.special
        parts = list(split_special(text, special))
        found = [TokenSpan(special[part], start, start + len(part)) for part, start in parts if part in special]
        hidden = "".join(SEPARATOR * len(part) if part in special else part for part, _ in parts)
        lead = len(hidden) - len(hidden.lstrip(SEPARATOR))
        plain = [TokenSpan(token, lead + begin, lead + end) for token, begin, end in self._spans(hidden[lead:])]
        kept = without_separators(hidden, plain, self.processor.unk_id())
        return sorted([*found, *kept], key=lambda span: span.begin)

    def _spans(self, text: str) -> list[TokenSpan]:
        places = [n for n, character in enumerate(text) for _ in character.encode()] + [len(text)]
        pieces = _pieces(self.processor.encode(text, out_type="serialized_proto"))
        return [TokenSpan(token, places[begin], places[end]) for token, begin, end in pieces]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; those outside the vocabulary are skipped."""
        return self.processor.decode([int(i) for i in ids if 0 <= i < self.vocab_size])


def _processor(model: bytes) -> sentencepiece.SentencePieceProcessor:
    """Load a model from the contents of its file. Raises RuntimeError or ValueError unless every id decodes to text."""
    if not model:
        raise ValueError("the file is empty")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    # Protobuf merges repeated specs of normalization before encoding (field 3) and after decoding (field 5), so check
    # the character map (field 2) of each
    fields = read_message(model, slice(0, len(model)))
    specs = [*fields.get(3, []), *fields.get(5, [])]
    for charsmap in (place for spec in specs for place in read_message(model, spec).get(2, [])):
        if charsmap_growth(model[charsmap]) > MOST_GROWTH:
            raise ValueError(f"its normalization replaces a character with more than {MOST_GROWTH} bytes")
    # damaged pieces are not UTF-8, which the library detects only when it decodes them, but for control pieces
    tokens = list(range(processor.vocab_size()))
    processor.id_to_piece(tokens)
    processor.decode([[token] for token in tokens])
    return processor


def _pieces(message: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield id, begin and end (byte offsets in the text) of each piece of a serialized SentencePieceText."""
    # field 2 is a piece with the fields id = 2, begin = 4 and end = 5
    for piece in read_message(message, slice(0, len(message))).get(2, []):
        fields = read_message(message, piece)
        token, begin, end = (read_varint(message, fields[key][0].start)[0] if key in fields else 0 for key in (2, 4, 5))
        yield token, begin, end


class JiebaTokenizer(SentencePieceTokenizer):
    """PanGu-α's tokenizer: jieba, then SentencePiece, exactly as its corpus was made.

    Lossy: its model maps full-width punctuation to half-width, drops tabs and knows no character outside its pieces.
    """

    def __init__(self, path: str | Path) -> None:
        """Load the model file and jieba. Raises UserError like `SentencePieceTokenizer`."""
        super().__init__(path)
        self.bos = None
        self._segment = jieba_segmenter()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return super().encode(self._segment(text))

    def _spans(self, text: str) -> list[TokenSpan]:
        segmented = self._segment(text)
        # Spaces in the segmented text come from jieba; every other character belongs to the text.
        places = [0, *accumulate(character != " " for character in segmented)]
        return [TokenSpan(token, places[begin], places[end]) for token, begin, end in super()._spans(segmented)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; the spaces between jieba's words are removed."""
        return super().decode(ids).replace(" ", "").replace(SPACE, " ").replace(NEWLINE, "\n")


class HuggingFaceTokenizer:
    """Tokenizer of a local folder, loaded by transformers' AutoTokenizer; downloads nothing, runs no code of it."""

    def __init__(self, path: str | Path) -> None:
        """Load the folder. Raises UserError if it is missing or damaged, or if transformers is not installed."""
        try:
            from transformers import AutoTokenizer  # noqa: PLC0415 - optional package
        except ImportError as error:
            raise UserError(
                "a huggingface tokenizer needs transformers; pip install transformers (or this package's extra: test)"
            ) from error
        if not Path(path).is_dir():
            raise UserError(f"data.tokenizer.path = {path}: no such folder; download it first, then give the folder")
        # the library raises arbitrary errors for a damaged file
        self._path = path
        check_growth(Path(path, "tokenizer.json"))
        with library_errors(path, "transformers cannot load a tokenizer from it"):
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
            largest_id(self._tokenizer.get_vocab().values())
        self.vocab_size: int = len(self._tokenizer)
        facts, backend = tokenizer_facts(path), getattr(self._tokenizer, "backend_tokenizer", None)
        self.eod = end_of_document(self.special, self._tokenizer.eos_token)
        self.bos = beginning_of_text(self.special, facts, backend and backend.post_processor)
        if backend is None and self._tokenizer.bos_token_id in self._tokenizer.build_inputs_with_special_tokens([])[:1]:
            self.bos = self._tokenizer.bos_token_id

    @property
    def special(self) -> dict[str, int]:
        """Special pieces and their ids."""
        return {piece.content: token for token, piece in self._tokenizer.added_tokens_decoder.items() if piece.special}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        with library_errors(self._path, CANNOT_ENCODE):
            return self._tokenizer.encode(text, add_special_tokens=False)

    def encode_spans(self, text: str) -> list[TokenSpan]:
        """Encode a text that may contain special pieces. Raises UserError for a tokenizer without offsets."""
        if not self._tokenizer.is_fast:
            raise UserError(
                f"{self._tokenizer.name_or_path}: this tokenizer does not provide token offsets;"
                " save it as a tokenizer.json"
            )
        with library_errors(self._path, CANNOT_ENCODE):
            encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return library_spans(text, encoded["input_ids"], encoded["offset_mapping"])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; those outside the vocabulary are skipped."""
        return self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size])


def load_tokenizer(config: TokenizerConfig) -> Tokenizer:
    """Load the configured tokenizer. Raises UserError if its files are missing or of another kind."""
    if config.kind == "sentencepiece":
        return SentencePieceTokenizer(config.path)
    if config.kind == "pangu":
        return JiebaTokenizer(config.path)
    if config.kind == "huggingface" and not Path(config.path).is_file():
        return HuggingFaceTokenizer(config.path)
    if config.kind == "bytes":
        return other.ByteTokenizer()
    if config.kind in other.ENCODINGS:
        return other.TiktokenTokenizer(config.kind, config.path)
    return other.FastTokenizer(config.path)


def fitting_tokenizer(config: TokenizerConfig, vocab: int) -> Tokenizer:
    """Load the configured tokenizer like `load_tokenizer`. Raises UserError also if it has more than `vocab` ids."""
    tokenizer = load_tokenizer(config)
    if tokenizer.vocab_size > vocab:
        raise UserError(f"model.vocab = {vocab}: must be at least {tokenizer.vocab_size}, the size of the tokenizer")
    return tokenizer


jieba_segmenter = cache(Segmenter)
"""Segmenter of this process, cached because reading its dictionary takes a second."""


_LARGEST_VOCABULARY = 128 << 20


def encode(
    texts: Sequence[str], tokenizer: TokenizerConfig, vocab: int, eod: int | None, bos: int | None = None
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return all ids, with `bos` and `eod` if given, and ids per text. Raises UserError for ids outside `vocab`."""
    encoder = cached_tokenizer(tokenizer)
    ids: list[int] = []
    stops = [0]
    for text in texts:
        if bos is not None:
            ids.append(bos)
        ids += encoder.encode(text)
        if eod is not None:
            ids.append(eod)
        stops.append(len(ids))
    tokens = np.array(ids, dtype=np.int32)
    if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise UserError(f"{tokenizer.path}: produced the id {tokens.max()}, outside its vocabulary")
    return tokens, np.diff(np.array(stops, dtype=np.int64)).astype(np.int32)


cached_tokenizer = cache(load_tokenizer)
"""Cached `load_tokenizer`: each process loads a tokenizer once."""


def tokenizer_digest(path: str) -> str:
    """Return the digest of a tokenizer's file or folder; "" without a path. Raises UserError if it cannot be read."""
    digest = blake2b(digest_size=16)
    if not path:
        return ""
    given = Path(path)
    with reading(path):
        for file in sorted(file for file in given.rglob("*") if file.is_file()) if given.is_dir() else [given]:
            size = file.stat().st_size
            digest.update(f"{file.relative_to(given)}\n{size}\n".encode())
            if size <= _LARGEST_VOCABULARY:  # the folder may also hold a model's weights
                digest.update(file.read_bytes())
    return digest.hexdigest()
