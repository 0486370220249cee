"""Token ids with their character ranges, so that a text can be encoded as a unit and split into parts afterward."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pangu.data.tokenizers import Tokenizer

SEPARATOR = "\ufdd2"
"""Noncharacter that prevents its neighbors from merging into one token; it produces no token in the result."""


class TokenSpan(NamedTuple):
    """Token id and the half-open range of characters that it covers."""

    token: int
    begin: int
    end: int


def encode_parts(tokenizer: Tokenizer, parts: Sequence[str]) -> list[list[int]]:
    """Encode the concatenation of `parts` as one text and return the ids of each part.

    The ids are those of the full text, except that no token crosses the border of two parts: where one would, the text
    is encoded with `SEPARATOR` at that border.
    """
    borders = list(accumulate(map(len, parts)))
    spans = tokenizer.encode_spans("".join(parts))
    if crossed := set(_crossed(spans, borders)):
        parts = [part + SEPARATOR * (border in crossed) for part, border in zip(parts, borders, strict=True)]
        borders = list(accumulate(map(len, parts)))
        spans = tokenizer.encode_spans("".join(parts))
    ids: list[list[int]] = [[] for _ in parts]
    for span in spans:
        ids[min(bisect_right(borders, span.begin), len(parts) - 1)].append(span.token)
    return ids


def _crossed(spans: Sequence[TokenSpan], borders: Sequence[int]) -> Iterator[int]:
    for span in spans:
        place = bisect_right(borders, span.begin)
        while place < len(borders) and borders[place] < span.end:
            yield borders[place]
            place += 1


def without_separators(text: str, spans: Iterable[TokenSpan], unknown: int | None = None) -> list[TokenSpan]:
    """Remove `SEPARATOR` from spans."""
    # SentencePiece merges adjacent unknown characters into one `unknown` piece; split it at `SEPARATOR`
    kept = []
    for token, begin, end in spans:
        covered = text[begin : max(end, begin + 1)]
        if SEPARATOR not in covered:
            kept.append(TokenSpan(token, begin, end))
            continue
        runs = re.finditer(f"[^{SEPARATOR}]+", covered)
        found = [TokenSpan(token, begin + run.start(), begin + run.end()) for run in runs]
        kept += found if token == unknown else found[:1]
    return kept


def split_special(text: str, special: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the segments of a text, alternately ordinary text and a special piece, each with its start offset."""
    place = 0
    pieces = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    for part in re.split(f"({pieces})", text) if pieces else [text]:
        yield part, place
        place += len(part)


def text_spans(
    text: str, special: Mapping[str, int], encode: Callable[[str], list[int]], size: Callable[[int], int]
) -> list[TokenSpan]:
    """Encode with a byte-level tokenizer: a token covers `size(token)` bytes; `encode` knows no special pieces."""
    spans = []
    for part, start in split_special(text, {**special, SEPARATOR: -1}):
        if part in special:
            spans.append(TokenSpan(special[part], start, start + len(part)))
        elif part != SEPARATOR:
            # Index of the character that each byte belongs to
            places = [start + n for n, character in enumerate(part) for _ in character.encode()]
            ids = encode(part)
            stops = list(accumulate(map(size, ids)))
            spans += [
                TokenSpan(token, places[stop - size(token)], places[stop - 1] + 1)
                for token, stop in zip(ids, stops, strict=True)
            ]
    return spans


def library_spans(text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[TokenSpan]:
    """Return spans from the offsets of the library tokenizers, which may omit the leading space of a token."""
    spans, stop = [], 0
    for token, (begin, end) in zip(ids, offsets, strict=True):
        spans.append(TokenSpan(token, min(begin, stop), end))
        stop = max(stop, end)
    return without_separators(text, spans)
