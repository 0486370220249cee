"""Tokenizers for the files of other libraries (Hugging Face, GPT-2, tiktoken), and a byte tokenizer without files.

The encodings are written out because tiktoken downloads a vocabulary to return its pattern.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from pangu.common.errors import UserError, reading
from pangu.data.boundaries import beginning_of_text, end_of_document, piece_of, tokenizer_facts
from pangu.data.token_spans import TokenSpan, library_spans, text_spans
from pangu.data.tokenizer_checks import CANNOT_ENCODE, check_growth, largest_id, library_errors

_GPT2_END = "<|endoftext|>"
_LETTERS = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENCODINGS = {
    "r50k_base": (_GPT2, 50256),
    "p50k_base": (_GPT2, 50256),
    "cl100k_base": (
        rf"{_SHORT}|{_LETTERS}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        100257,
    ),
    "o200k_base": (
        rf"{_LETTERS}{_UPPER}*{_LOWER}+{_SHORT}?|{_LETTERS}{_UPPER}+{_LOWER}*{_SHORT}?|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        199999,
    ),
}
"""Pre-tokenization pattern and end-of-document id of each tiktoken encoding."""
# Pieces of each encoding. Published files of other models (Qwen, Llama 3, Kimi) have other numbers of pieces and split
# text by other patterns, so that their ids would be silently wrong.
_PIECES = {"r50k_base": 50256, "p50k_base": 50280, "cl100k_base": 100256, "o200k_base": 199998}
_OWN_PIECES = 50000  # largest file that is taken for a vocabulary the user trained


class FastTokenizer:
    """Tokenizer of a Hugging Face `tokenizer.json` or a folder with GPT-2's `vocab.json` and `merges.txt`."""

    def __init__(self, path: str | Path) -> None:
        """Load the files. No text encodes to a special id. Raises UserError for files that are missing or damaged."""
        library = _library("tokenizers")
        self._path = path
        files = [Path(path, name) for name in ("vocab.json", "merges.txt")] if Path(path).is_dir() else [Path(path)]
        if missing := [str(file) for file in files if not file.is_file()]:
            raise UserError(f"tokenizer files not found: {', '.join(missing)}; set data.tokenizer.path")
        # the library raises arbitrary errors for a damaged file
        if len(files) == 1:
            check_growth(files[0])
        with library_errors(path, "is not a tokenizer that the tokenizers library can read"):
            if len(files) == 1:
                self._tokenizer = library.Tokenizer.from_file(str(path))
            else:
                self._tokenizer = library.ByteLevelBPETokenizer(*map(str, files))._tokenizer
            facts = tokenizer_facts(path)
            # Special when loaded from the folder as well; GPT-2's two files cannot declare their only special piece
            declared = [piece_of(facts.get(key)) for key in ("eos_token", "bos_token")]
            declared += [_GPT2_END] if len(files) > 1 else []
            self._tokenizer.add_special_tokens(
                [piece for piece in declared if piece and self._tokenizer.token_to_id(piece) is not None]
            )
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            self._tokenizer.encode_special_tokens = True
            ids = self._tokenizer.get_vocab()
            self.vocab_size: int = largest_id(ids.values()) + 1
        self.eod = end_of_document(self.special, piece_of(facts.get("eos_token")))
        self.bos = beginning_of_text(self.special, facts, self._tokenizer.post_processor)

    @property
    def special(self) -> dict[str, int]:
        """Special pieces and their ids."""
        added = self._tokenizer.get_added_tokens_decoder().items()
        return {piece.content: token for token, piece in added if piece.special}

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        with library_errors(self._path, CANNOT_ENCODE):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_spans(self, text: str) -> list[TokenSpan]:
        """Encode a text that may contain special pieces."""
        self._tokenizer.encode_special_tokens = False
        try:
            with library_errors(self._path, CANNOT_ENCODE):
                encoded = self._tokenizer.encode(text, add_special_tokens=False)
        finally:
            self._tokenizer.encode_special_tokens = True
        return library_spans(text, encoded.ids, encoded.offsets)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; those outside the vocabulary are skipped."""
        with library_errors(self._path, "cannot decode ids"):
            return self._tokenizer.decode([int(i) for i in ids if 0 <= i < self.vocab_size], skip_special_tokens=False)


class TiktokenTokenizer:
    """Tokenizer of a `.tiktoken` file with one of `ENCODINGS`. No text encodes to a special id."""

    def __init__(self, encoding: str, path: str | Path) -> None:
        """Load the file. Raises UserError if it is missing, damaged or of another encoding."""
        library = _library("tiktoken")
        self.bos = None
        pattern, self.eod = ENCODINGS[encoding]
        with reading(path, ValueError, binascii.Error, rule="is not a tiktoken file"):
            ranks = _ranks(Path(path).read_bytes(), self.eod)
            require_encoding(encoding, len(ranks))
            self._encoding = library.Encoding(
                encoding, pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": self.eod}
            )
        self._pieces = {rank: piece for piece, rank in ranks.items()} | {self.eod: b"<|endoftext|>"}
        self.special = {"<|endoftext|>": self.eod}
        self.vocab_size: int = max(self._pieces) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._encoding.encode_ordinary(text)

    def encode_spans(self, text: str) -> list[TokenSpan]:
        """Encode a text that may contain special pieces."""
        return text_spans(text, self.special, self.encode, lambda token: len(self._pieces[token]))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; unknown ids are skipped, for a vocabulary may have gaps."""
        return b"".join(self._pieces.get(int(i), b"") for i in ids).decode(errors="replace")


def require_encoding(encoding: str, pieces: int) -> None:
    """Raise ValueError if a file with this number of pieces belongs to another encoding."""
    if pieces > _OWN_PIECES and pieces != _PIECES[encoding]:
        raise ValueError(
            f"it has {pieces:,} pieces, but {encoding} has {_PIECES[encoding]:,}, so it splits text "
            "differently; use its tokenizer.json with kind=huggingface"
        )


def _ranks(content: bytes, eod: int) -> dict[bytes, int]:
    """Return the id of each piece of a `.tiktoken` file. Raises ValueError for content that would fail later."""
    ranks = {}
    for number, line in enumerate(content.splitlines(), 1):
        piece, _, rank = line.partition(b" ")
        if not rank.isdigit() or len(rank) > 10 or int(rank) >= 2**31 - 1:
            raise ValueError(f"line {number} has no base64 piece followed by its id")
        ranks[base64.b64decode(piece, validate=True)] = int(rank)
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError("a byte has no piece")
    if len(set(ranks.values())) < len(ranks) or eod in ranks.values():
        raise ValueError("two pieces have the same id")
    return ranks


class ByteTokenizer:
    """Tokenizer whose ids are the UTF-8 bytes, and 256 for the end of a document."""

    vocab_size = 257
    eod = 256
    bos = None
    special: ClassVar[dict[str, int]] = {"<|endoftext|>": 256}

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode())

    def encode_spans(self, text: str) -> list[TokenSpan]:
        """Encode a text that may contain special pieces."""
        return text_spans(text, self.special, self.encode, lambda token: 1)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; those above 255 are skipped."""
        return bytes(int(i) for i in ids if 0 <= i < 256).decode(errors="replace")


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise UserError(
            f"this kind of tokenizer needs {name}: pip install {name} (or this package's extra: preprocess)"
        ) from error
