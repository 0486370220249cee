"""PanGu-α's tokenizer for transformers: jieba (unless `jieba` is false), then SentencePiece.

This file goes with exported weights and needs transformers, sentencepiece and jieba; load it with
`AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)`.
"""

from __future__ import annotations

import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import PreTrainedTokenizer

PLACEHOLDER = "\ufdd2"
"""Noncharacter that stands in for a special token."""
_BORDER = "\ufdd0"
_PLACEHOLDER_BYTES = _BORDER.join(f"<0x{byte:02X}>" for byte in PLACEHOLDER.encode())
SPACE, NEWLINE = "▂", "▃"
"""Stand-ins for space and newline, which jieba and SentencePiece would lose."""


class PanguTokenizer(PreTrainedTokenizer):
    """PanGu-α's tokenizer; adds no end, and a beginning only with `add_bos_token`. <eot> is the default `eos_token`."""

    vocab_files_names = {"vocab_file": "vocab.model"}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, jieba: bool = True, add_bos_token: bool = False, **others: Any) -> None:
        """Load the SentencePiece model."""
        self.vocab_file, self.jieba, self.puts_bos = vocab_file, jieba, add_bos_token
        self.processor = sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        names = {"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "<eot>"}
        known = {key: piece for key, piece in names.items() if self.processor.piece_to_id(piece) or key == "unk_token"}
        known |= {key: str(others[key]) for key in ("eos_token", "bos_token") if others.get(key)}
        self._shown = {piece for piece in known.values() if self.processor.is_control(self._convert_token_to_id(piece))}
        options = {"clean_up_tokenization_spaces": False, **known, **others}
        super().__init__(jieba=jieba, add_bos_token=add_bos_token, **options)

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        """Return the ids with the beginning of a text before them, if the tokenizer adds one."""
        return [*([self.bos_token_id] if self.puts_bos else []), *token_ids_0, *(token_ids_1 or [])]

    @property
    def vocab_size(self) -> int:
        """Number of tokens."""
        return self.processor.vocab_size()

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        return {self.processor.id_to_piece(i): i for i in range(self.vocab_size)} | self.added_tokens_encoder

    def tokenize(self, text: str, **options: Any) -> list[str]:
        """Tokenize a text with special tokens as one text: only its beginning has SentencePiece's dummy prefix."""
        special = sorted(self.added_tokens_encoder, key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
        if self.jieba or PLACEHOLDER in text or options.get("split_special_tokens") or len(parts) == 1:
            return super().tokenize(text, **options)
        # `PLACEHOLDER` stands in for special pieces, but for those that the text begins with
        lead = next((number for number, part in enumerate(parts) if part and number % 2 == 0), len(parts))
        found = [part for part in parts[:lead] if part]
        held = iter(parts[lead + 1 :: 2])
        hidden = "".join(PLACEHOLDER if number % 2 else part for number, part in enumerate(parts[lead:]))
        # pieces of unknown characters are these themselves, or their bytes
        pieces = _BORDER.join(self.processor.encode(hidden, out_type=str)).replace(_PLACEHOLDER_BYTES, PLACEHOLDER)
        for piece in pieces.split(_BORDER):
            found += [
                next(held) if run == PLACEHOLDER else run
                for run in re.findall(f"{PLACEHOLDER}|[^{PLACEHOLDER}]+", piece)
            ]
        return found

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        if self.jieba:
            words = self._words().cut(text, cut_all=False)
            text = " ".join(word.replace(" ", SPACE).replace("\n", NEWLINE) for word in words)
        return self.processor.encode(text, out_type=str)

    @staticmethod
    @cache
    def _words() -> Any:
        """Return jieba with its own dictionary, never its cache, which anyone could have put among temporary files."""
        import jieba  # noqa: PLC0415 - optional package

        words = jieba.Tokenizer()
        words.FREQ, words.total = words.gen_pfdict(words.get_dict_file())
        words.initialized = True
        return words

    def _convert_token_to_id(self, token: str) -> int:
        return self.processor.piece_to_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.processor.id_to_piece(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Return the text of tokens, with <eot>, which SentencePiece drops, for programs that stop at it."""
        text = ""
        run: list[str] = []
        for token in tokens:
            if token in self._shown:
                text, run = text + self._text(run) + token, []
            else:
                run.append(token)
        return text + self._text(run)

    def _text(self, pieces: list[str]) -> str:
        text = self.processor.decode_pieces(pieces)
        return text.replace(" ", "").replace(SPACE, " ").replace(NEWLINE, "\n") if self.jieba else text

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        """Copy the model file."""
        target = Path(save_directory) / ("-".join([*([filename_prefix] if filename_prefix else []), "vocab.model"]))
        if Path(self.vocab_file).resolve() != target.resolve():
            shutil.copy(self.vocab_file, target)
        return (str(target),)
