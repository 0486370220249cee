"""Special ids around a document: its end and the beginning of a text, as a tokenizer's files declare them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pangu.common.files import read_json_object
from pangu.config.data import PackingConfig

if TYPE_CHECKING:
    from pangu.data.tokenizers import Tokenizer

_END_NAMES = (
    re.compile(r"<\|end_?of_?text\|>", re.IGNORECASE),
    re.compile(r"<[|｜]?(end[_▁]of[_▁](sentence|document|text)|endofdocument|eod)[|｜]?>", re.IGNORECASE),
    re.compile(r"</s>|[<\[]\|?eos(_token)?\|?[>\]]", re.IGNORECASE),
)
"""Patterns of special pieces that end a document, the likeliest first. None matches the end of a turn (`<|im_end|>`,
`<|eot_id|>`, `<|return|>`, `<end_of_turn>`)."""

_TURN_NAMES = re.compile(r"turn|im_end|eo[tm]_id|<\|(eot|eom|call|user|assistant)\|>|unused", re.IGNORECASE)


def end_of_document(special: Mapping[str, int], declared: str | None) -> int | None:
    """Return the id that ends a document.

    Args:
        special: special pieces and their ids. An ordinary piece, such as the HTML tag `</s>`, never ends a document.
        declared: `eos_token`. Chat models declare the end of a turn there, which does not end a document.
    """
    named = [piece for name in _END_NAMES for piece in special if name.fullmatch(piece)]
    if (
        declared is not None
        and declared in special
        and (declared in named or not (named or _TURN_NAMES.search(declared)))
    ):
        return special[declared]
    return special[named[0]] if named else None


def beginning_of_text(special: Mapping[str, int], facts: Mapping[str, Any], processor: Any) -> int | None:
    """Return the id that the tokenizer puts before a text, or None.

    Args:
        special: special pieces and their ids.
        facts: contents of tokenizer_config.json.
        processor: post-processor of the `tokenizers` library, or None.
    """
    declared = piece_of(facts.get("bos_token"))
    if facts.get("add_bos_token") is True and declared is not None and declared in special:
        return special[declared]
    return None if processor is None else _first_special(json.loads(processor.__getstate__()))


def _first_special(processor: Mapping[str, Any]) -> int | None:
    if processor["type"] == "Sequence":
        found = [_first_special(each) for each in processor["processors"]]
        return next((token for token in found if token is not None), None)
    if processor["type"] == "TemplateProcessing":
        first = (processor["single"] or [{}])[0].get("SpecialToken")
        return int(processor["special_tokens"][first["id"]]["ids"][0]) if first else None
    return int(processor["cls"][1]) if "cls" in processor else None


def tokenizer_facts(path: str | Path) -> dict[str, Any]:
    """Return the tokenizer_config.json of a folder, or the one next to a file; {} if there is none."""
    file = (Path(path) if Path(path).is_dir() else Path(path).parent) / "tokenizer_config.json"
    return read_json_object(file) if file.is_file() else {}


def piece_of(value: Any) -> str | None:
    """Return the text of a piece in tokenizer_config.json, which is a string or an object with `content`."""
    piece = value.get("content") if isinstance(value, Mapping) else value
    return piece if isinstance(piece, str) else None


def packing_with_ids(packing: PackingConfig, tokenizer: Tokenizer | None, *, own_end: bool) -> PackingConfig:
    """Return the packing with the tokenizer's ids filled in.

    Args:
        packing: configured packing.
        tokenizer: tokenizer of the data.
        own_end: whether `eod: null` means the tokenizer's own end of document.
    """
    eod = tokenizer.eod if packing.eod is None and own_end and tokenizer is not None else packing.eod
    return PackingConfig(**{**vars(packing), "eod": eod, "bos": begin_id(packing.bos, tokenizer)})


def begin_id(bos: int | Literal["auto"] | None, tokenizer: Tokenizer | None) -> int | None:
    """Return the beginning-of-text id; `auto` means the tokenizer's."""
    if bos == "auto":
        return None if tokenizer is None else tokenizer.bos
    return bos


def describe_ids(tokenizer: Tokenizer | None, eod: int | None, bos: int | None) -> str:
    """Return a text with the pieces and ids in use."""
    names = {token: piece for piece, token in tokenizer.special.items()} if tokenizer else {}

    def shown(token: int | None) -> str:
        if token is None:
            return "none"
        piece = names.get(token) or (tokenizer.decode([token]) if tokenizer else "")
        return f"{piece} (id {token})" if piece else f"id {token}"

    return f"end of document {shown(eod)}, beginning of text {shown(bos)}"
