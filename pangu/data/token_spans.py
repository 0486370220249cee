"""Token ids with the characters they stand for, so that a text is encoded as a whole and cut into parts afterward."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

APART = "\ufdd2"
"""Noncharacter that keeps its neighbors from becoming one token. It has no token of its own in the result."""


class TokenSpan(NamedTuple):
    """A token id and the half-open range of characters that it stands for."""

    token: int
    begin: int
    end: int


class SpanTokenizer(Protocol):
    """Tokenizer that can say which characters a token stands for."""

    def encode_spans(self, text: str) -> list[TokenSpan]:
        """Encode a text in which special pieces are spelled, in order; `APART` gives no token."""


def encode_parts(tokenizer: SpanTokenizer, parts: Sequence[str]) -> list[list[int]]:
    """Encode a text as a whole and return the ids of each of its parts.

    The ids are those of the whole text, except that no token reaches across a border of two parts: where one would,
    the text is encoded with `APART` at that border.
    """
    borders = list(accumulate(map(len, parts)))
    spans = tokenizer.encode_spans("".join(parts))
    if crossed := set(_crossed(spans, borders)):
        parts = [part + APART * (border in crossed) for part, border in zip(parts, borders, strict=True)]
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


def without_apart(text: str, spans: Iterable[TokenSpan], unknown: int | None = None) -> list[TokenSpan]:
    """Remove what stands for `APART`. SentencePiece makes one `unknown` piece of several unknown characters, of which
    each run beside `APART` becomes one."""
    kept = []
    for token, begin, end in spans:
        covered = text[begin : max(end, begin + 1)]
        if APART not in covered:
            kept.append(TokenSpan(token, begin, end))
            continue
        runs = re.finditer(f"[^{APART}]+", covered)
        found = [TokenSpan(token, begin + run.start(), begin + run.end()) for run in runs]
        kept += found if token == unknown else found[:1]
    return kept


def split_special(text: str, special: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the stretches of a text, alternately ordinary text and a special piece, each with its first character."""
    place = 0
    pieces = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    for part in re.split(f"({pieces})", text) if pieces else [text]:
        yield part, place
        place += len(part)


def text_spans(
    text: str, special: Mapping[str, int], encode: Callable[[str], list[int]], size: Callable[[int], int]
) -> list[TokenSpan]:
    """Encode a text by a tokenizer whose tokens are bytes of it, `size` many each; `encode` knows no special piece."""
    spans = []
    for part, start in split_special(text, {**special, APART: -1}):
        if part in special:
            spans.append(TokenSpan(special[part], start, start + len(part)))
        elif part != APART:
            # Number of the character that each byte belongs to
            places = [start + n for n, character in enumerate(part) for _ in character.encode()]
            ids = encode(part)
            stops = list(accumulate(map(size, ids)))
            spans += [
                TokenSpan(token, places[stop - size(token)], places[stop - 1] + 1)
                for token, stop in zip(ids, stops, strict=True)
            ]
    return spans


def library_spans(text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[TokenSpan]:
    """Spans from the offsets of the library tokenizers, which may leave out the space that a token begins with."""
    spans, stop = [], 0
    for token, (begin, end) in zip(ids, offsets, strict=True):
        spans.append(TokenSpan(token, min(begin, stop), end))
        stop = max(stop, end)
    return without_apart(text, spans)
